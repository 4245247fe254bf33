"""The fit of the law of rounds: it finds known coefficients, and no terms that do not exist."""

from dataclasses import replace

import pytest
from said import says
from samples import HEAD
from synthetic_profiles import FACTS, LAW, make_profile, make_rounds

from toolkit.errors import InputError
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.laws import LinearLaw, law_of_rounds
from toolkit.files.profile import Profile


def profile(**truth) -> Profile:
    return make_profile().model_copy(update={"rounds": make_rounds(LAW, **truth)})


def fitted(**truth):
    return fit_profile(profile(**truth), HEAD)


def close(value: float):
    return pytest.approx(value, rel=1e-3, abs=1e-12)


def test_fitted_parts_are_true_and_absent_terms_are_left_out():
    rounds = fitted().rounds
    for part, truth in (
        (rounds.join, {"row": close(2e-4), "token": close(1e-6)}),
        (rounds.leave, {"row": close(3e-4)}),
        (rounds.grow, {"cached": close(2e-8)}),
    ):
        assert part.terms == {name: close(0.0) for name in part.terms} | truth
        assert part.error.worst_percent < 0.1


def test_fitted_dispatch_and_stretch_equal_the_true_ones():
    overhead = fitted().rounds.overhead
    assert (overhead.batch_s, overhead.stretch) == (close(1.5e-3), close(1.3))
    assert overhead.error.worst_percent < 0.1
    assert overhead.error.points == 8


def test_the_fitted_link_to_host_memory_equals_the_true_one():
    swap = fitted().swap
    assert (swap.latency_s, swap.out_bytes_per_s, swap.in_bytes_per_s) == (
        close(1e-4),
        close(2e9),
        close(4e9),
    )
    assert swap.host_bytes == 1 << 30


@pytest.mark.parametrize(("device", "overlaps"), [("cpu", False), ("NVIDIA A100-SXM4-80GB", True)])
def test_transfers_do_not_overlap_computation_on_a_cpu(device, overlaps):
    facts = profile().engine.model_copy(update={"device": device})
    found = fit_profile(profile().model_copy(update={"engine": facts}), HEAD)
    assert found.swap.overlaps is overlaps


def test_the_usable_share_is_what_ran_at_every_length():
    assert fitted().rounds.usable_share * FACTS.capacity_tokens == close(min(110 * 65, 28 * 257))


def test_the_law_of_rounds_predicts_the_measured_rounds():
    found = profile()
    law = law_of_rounds(LAW, fit_profile(found, HEAD).rounds)
    for point in found.rounds.sequences[0].rounds:
        seconds = law.round_s + sum(law.prefill_s(*group) for group in point.groups)
        seconds += law.decode_s(point.rows, point.cached_length, point.steps)
        seconds += point.left * law.leave_s(point.cached_length + point.steps)
        assert seconds == pytest.approx(point.seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parts": []}, ("rounds", "0 points", "'join'")),
        ({"sequences": []}, ("rounds", "0 sequences")),
        ({"memory": []}, ("rounds", "memory")),
    ],
)
def test_the_error_names_the_missing_measurement(change, named):
    found = profile()
    lacking = found.model_copy(update={"rounds": found.rounds.model_copy(update=change)})
    with pytest.raises(InputError) as caught:
        fit_profile(lacking, HEAD)
    assert says(caught.value.message, *named)


def test_a_profile_without_rounds_and_passes_has_no_laws_of_them():
    found = fit_profile(make_profile(), HEAD)
    assert (found.rounds, found.steps) == (None, None)
    assert LinearLaw(LAW.prefill, LAW.decode, True).round_s == replace(LAW).leave_s(100) == 0.0
