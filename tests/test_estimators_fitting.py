"""Fits find the true laws of synthetic profiles, and refuse profiles that do not determine them."""

import numpy as np
import pytest
from pydantic import ValidationError
from said import says
from samples import HEAD
from synthetic_profiles import FACTS, LAW, make_profile, probe_all

from toolkit.errors import InputError
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.laws import LinearLaw
from toolkit.estimators.least_squares import typical
from toolkit.estimators.memory import RuleMemory, ZetaMemory
from toolkit.estimators.part_fits import fit_memory
from toolkit.files.fit import MemoryFit
from toolkit.files.profile import MemoryPoint, Profile
from toolkit.laws.passes import PassLaw


def predicted(law: PassLaw, size: int, length: int) -> float:
    tokens = size * length
    counts = {"pass": 1, "row": size, "length": length, "token": tokens, "cached": tokens}
    counts["attended"] = tokens * length / 2
    return sum(seconds * counts[name] for name, seconds in law.terms.items())


def test_the_fit_of_exact_times_has_the_true_coefficients():
    fit = fit_profile(make_profile(), HEAD).prefill
    assert fit.error.worst_percent < 1e-6
    assert fit.law.terms == pytest.approx(LAW.prefill.terms | {"attended": 0.0})


def test_the_fit_of_noisy_times_predicts_the_true_times():
    fit = fit_profile(make_profile(noise=0.1), HEAD)
    for size, length in ((1, 16), (3, 100), (16, 64), (32, 256)):
        assert predicted(fit.prefill.law, size, length) == pytest.approx(
            LAW.prefill_s(size, length), rel=0.1
        )
        assert predicted(fit.decode.law, size, length) == pytest.approx(
            LAW.decode_s(size, length - 1, 1), rel=0.1
        )


def test_held_out_error_is_the_noise_that_was_put_in():
    error = fit_profile(make_profile(noise=0.2), HEAD).decode.error
    # means of 5 samples of sigma 0.2 scatter by 0.09, their median |x| is 6 %
    assert 2.0 < error.median_percent < 12.0


def test_the_square_is_chosen_when_prefill_is_quadratic():
    fit = fit_profile(
        make_profile(
            prefill=lambda size, length: LAW.prefill_s(size, length) + 1e-6 * size * length**2,
            noise=0.02,
        ),
        HEAD,
    ).prefill
    assert fit.law.terms["attended"] == pytest.approx(2e-6, rel=0.1)


def launches(size: int, length: int) -> float:
    """A decode step of an 8B model on a GPU: launches, and then the caches that it reads."""
    return max(0.014, 0.004 + 6e-8 * size * length)


def launched() -> Profile:
    sizes = (1, 4, 16, 64, 128, 256)
    lengths = (128, 512, 1024, 2048, 4096)
    return make_profile(decode=launches, sizes=sizes, lengths=lengths, noise=0.02)


@pytest.mark.slow
def test_a_step_that_is_flat_and_then_linear_has_a_form():
    made = launched()
    fit = fit_profile(made, HEAD).decode
    assert fit.law.flat_s == pytest.approx(0.014, rel=0.02)
    assert fit.law.terms["cached"] == pytest.approx(6e-8, rel=0.1)
    assert fit.error.median_percent < 3.0
    law = LinearLaw(fit_profile(made, HEAD).prefill.law, fit.law, True)
    for size, length in ((1, 200), (64, 1500), (256, 4000)):
        assert law.decode_s(size, length - 1, 1) == pytest.approx(launches(size, length), rel=0.06)
    assert fit_profile(make_profile(), HEAD).decode.law.flat_s == 0.0


def test_no_law_falls_beyond_its_data():
    """The measured times have no order in them at all."""
    rng = np.random.default_rng(0)
    drawn = make_profile(*[lambda size, length: float(rng.lognormal(-5, 1.0))] * 2)
    fit = fit_profile(drawn, HEAD)
    for law in (fit.prefill.law, fit.decode.law):
        assert min(law.terms.values()) >= 0.0
        far = [predicted(law, *at) for at in ((128, 2048), (64, 2048), (32, 512))]
        assert far == sorted(far, reverse=True)


def test_a_point_is_the_mean_of_its_samples_and_a_disturbed_one_hardly_moves_it():
    assert typical([1.0, 1.0, 1.0, 1.4, 1.4]) == pytest.approx(1.16)
    assert typical([1.0, 1.0, 1.0, 1.0, 100.0]) == pytest.approx(1.1)


def test_the_fitted_overhead_equals_the_true_one():
    overhead = fit_profile(make_profile(batch_s=4e-3, stretch=1.3), HEAD).overhead
    assert overhead.batch_s == pytest.approx(4e-3, rel=1e-3)
    assert overhead.stretch == pytest.approx(1.3, rel=1e-3)
    assert overhead.error.points == 24


def test_a_disturbed_slice_hardly_bends_the_overhead():
    """One of 24 took ten times as long, and counts as half as much again."""
    profile = make_profile(batch_s=4e-3, stretch=1.3)
    first = profile.slices[0].model_copy(update={"seconds": 10 * profile.slices[0].seconds})
    disturbed = profile.model_copy(update={"slices": [first, *profile.slices[1:]]})
    assert fit_profile(disturbed, HEAD).overhead.stretch == pytest.approx(1.3, rel=0.08)


def test_zeta_is_fitted_from_probes():
    fit = fit_memory(probe_all(0.9), FACTS)
    assert fit.form == "zeta"
    assert fit.zeta == pytest.approx(0.9, abs=0.01)
    assert fit.zeta_std < 0.01


def test_a_prefill_that_holds_activations_gets_a_workspace():
    shapes = [(length, steps) for length in (64, 128, 256) for steps in (32, 512 - length)]
    fits = [int(8192 * 0.95 / (length * 3.75 + steps)) for length, steps in shapes]
    probes = [
        MemoryPoint(input_length=length, steps=steps, largest_ok=rows, smallest_oom=rows + 1)
        for (length, steps), rows in zip(shapes, fits, strict=True)
    ]
    fit = fit_memory(probes, FACTS)
    assert fit.form == "zeta"
    assert fit.workspace == pytest.approx(2.75, abs=0.2)
    law = ZetaMemory(fit.capacity_tokens, fit.zeta, fit.workspace)
    for (length, steps), rows in zip(shapes, fits, strict=True):
        assert abs(int(law.max_batch(np.array([length]), steps, 0.0)[0]) - rows) <= 1
        assert not law.runs_out(rows - 1, length, steps, 0.0)
        assert law.runs_out(rows + 2, length, steps, 0.0)


def test_rules_where_no_zeta_explains_the_probes():
    table = {200: 28, 500: 28, 900: 22, 1500: 12}  # Algorithm 2: tokens from 5,600 to 19,800
    probes = [
        MemoryPoint(input_length=total - 16, steps=16, largest_ok=rows, smallest_oom=rows + 1)
        for total, rows in table.items()
    ]
    fit = fit_memory(
        probes, FACTS.model_copy(update={"capacity_tokens": 20_000, "max_model_len": 2048})
    )
    assert fit.form == "rules"
    assert [(rule.length_above, rule.max_batch_size) for rule in fit.rules] == [
        (1500, 8),
        (900, 12),
        (500, 22),
        (0, 28),
    ]
    law = RuleMemory(tuple(fit.rules))
    for total, rows in table.items():
        assert law.max_batch(np.array([total - 16]), 16, 0.0).tolist() == [rows]
        assert not law.runs_out(rows, total - 16, 16, 0.0)
        assert law.runs_out(rows + 1, total - 16, 16, 0.0)


def test_an_unreached_edge_is_the_largest_batch_that_ran():
    probes = [MemoryPoint(input_length=112, steps=16, largest_ok=32, smallest_oom=None)]
    fit = fit_memory(probes, FACTS)
    assert (fit.zeta, fit.zeta_std) == (32 * 128 / 8192, 0.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sizes": (1, 2), "lengths": (16, 32)}, ("prefill", "points 4", "8")),
        ({"lengths": (64,), "sizes": range(1, 10)}, ("prefill", "points 9", "lengths 1")),
        ({"sizes": (4,), "lengths": range(1, 10)}, ("prefill", "points 9", "batch sizes 1")),
        ({"slices": 2}, ("overhead", "2 slices", "6")),
        ({"memory": []}, ("memory", "none")),
        ({"prefill": lambda size, length: 0.0}, ("prefill", "N=1, L=16", "0.0 s")),
        ({"decode": lambda size, length: -1.0}, ("decode", "N=1, L=16", "-1.0 s")),
        (
            {"memory": [MemoryPoint(input_length=9, steps=1, largest_ok=5, smallest_oom=5)]},
            ("memory", "L=9", "5"),
        ),
        (
            {"memory": [MemoryPoint(input_length=9, steps=1, largest_ok=0, smallest_oom=1)]},
            ("memory", "lengths: 9"),
        ),
    ],
)
def test_the_error_names_what_a_profile_lacks(change, named):
    with pytest.raises(InputError) as error:
        fit_profile(make_profile(**change), HEAD)
    assert says(error.value.message, *named)
    assert error.value.hint


@pytest.mark.parametrize("bounds", [[], [0, 100], [50, 50]])
def test_rules_that_are_missing_or_out_of_order_are_refused(bounds: list[int]) -> None:
    rules = [{"length_above": bound, "max_batch_size": 4} for bound in bounds]
    given = {"capacity_tokens": 100, "kv_bytes_per_token": 1, "zeta": 1.0, "zeta_std": 0.0}
    with pytest.raises(ValidationError, match="rules"):
        MemoryFit.model_validate({"form": "rules", "rules": rules, **given})
