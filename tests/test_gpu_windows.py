"""What vLLM served on an H200, predicted by the fit that ships."""

import pytest
from test_shipped_profiles import rounded

from benchmarks.engines.gpu_profile import from_idle, read_measured, shipped_profile, text_of
from benchmarks.engines.gpu_windows import NAME, SPEED, errors_of
from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.part_fits import fit_steps
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.profile import Profile
from toolkit.files.shipped import shipped_profiles

FOLDER = shipped_profiles() / NAME
TTFT_LIMITS = {10.0: 13.0, 18.0: 23.0}  # of the error's size, in percent, by window


@pytest.mark.slow
def test_the_shipped_profile_is_made_of_what_was_measured():
    made = text_of(shipped_profile(read_measured()))
    assert made == (FOLDER / "profile.json").read_text()


def visited(*points):
    """Points of (prompts, tokens of each, decodes, whether a request was left)."""
    return [
        {
            "prefills": prompts,
            "prefill_tokens": prompts * length,
            "decodes": decodes,
            "seconds": [0.01],
            "host_s": [0.0] * left,
        }
        for prompts, length, decodes, left in points
    ]


GRID = [{"batch_size": rows, "input_length": 128} for rows in (1, 8, 32)]


@pytest.mark.parametrize(
    ("points", "idle"),
    [
        ([(1, 128, 0, False), (1, 64, 0, False)], [True, True]),
        ([(1, 128, 0, False), (7, 128, 0, False)], [True, False]),  # a burst of 8
        ([(1, 128, 0, False), (25, 128, 0, True), (6, 128, 0, False)], [True, False, False]),
        ([(3, 64, 0, False), (5, 64, 0, False)], [True, True]),  # the grid has no such batch
        ([(1, 128, 0, True), (0, 0, 1, False), (8, 128, 0, False)], [True, False, True]),
    ],
)
def test_a_visit_begins_from_idle(points, idle):
    assert from_idle(visited(*points), GRID) == idle


@pytest.mark.slow
def test_windows_are_predicted_from_profile_and_warm_up():
    rows = [row for row in errors_of(read_file(Fit, FOLDER / "fit.json")) if row["knows"] == SPEED]
    assert len(rows) == 2
    for row in rows:
        error = row["error"]
        assert abs(error["throughput_rps"]) <= 1.0
        assert abs(error["tpot_mean_s"]) <= 5.0
        assert abs(error["e2e_mean_s"]) <= 5.0
        assert abs(error["ttft_mean_s"]) <= TTFT_LIMITS[row["rate_rps"]]


@pytest.mark.slow
def test_the_law_of_its_passes_is_within_3_percent_held_out():
    measured = read_file(Profile, FOLDER / "profile.json")
    fit = fit_steps(measured.steps, 0)
    assert fit.error.median_percent <= 3.0
    assert fit.error.p95_percent <= 40.5
    assert fit.launches == "inferred"
    assert fit.law.terms["pass_read"] == pytest.approx(5.06e-3, rel=0.01)
    assert fit.law.terms["token_arithmetic"] == pytest.approx(2.28e-5, rel=0.02)
    shipped = read_file(Fit, FOLDER / "fit.json").steps
    assert rounded(fit.model_dump()) == rounded(shipped.model_dump())


def test_policies_inside_it_believe_what_a_prompt_costs_decodes():
    """A prompt of 128 tokens holds decodes up for 26 to 30 ms, which is its launch."""
    believed = laws_from_fit(read_file(Fit, FOLDER / "fit.json")).rounds
    step_s = believed.decode_s(1, 128, 1)
    assert 0.026 <= believed.prefill_s(1, 128) + step_s <= 0.030
    assert 0.050 <= believed.prefill_s(1, 2048) + step_s <= 0.058
