"""Laws as they might have been fitted: for saying how far an error of the fit moves what is computed from it.

With the profile at hand it is measured again in thought: repeats are drawn with replacement, points get random weights
(the Bayesian bootstrap, Rubin 1981: unlike draws of points it never loses a batch size), slices are drawn with
replacement, and the forms that the fit chose are fitted anew. That shows what other samples of the same machine would
have given; that the machine may be slower tomorrow, it does not show.

Without the profile each law is scaled as a whole by its stated held-out error. Errors that differ from point to point
would partly cancel, so this is the wider of the two. The memory law stays: its edge is drawn in every simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from toolkit.estimators.fitting import decode_points, prefill_points
from toolkit.estimators.forms import Points, form_named
from toolkit.estimators.laws import SegmentedLaw
from toolkit.estimators.overhead import refit_overhead
from toolkit.estimators.rounds import law_of_parts
from toolkit.estimators.rounds_fit import refit_round_overhead, sequences_of
from toolkit.files.fit import Fit, HeldOutError, LatencyFit, OverheadFit, RoundsFit, Segment
from toolkit.files.profile import DecodePoint, PrefillPoint, Profile, RoundPoint

Measured = TypeVar("Measured", PrefillPoint, DecodePoint)

NORMAL_MEDIAN = 0.6745  # of |x| where x is standard normal
COEFFICIENTS = ("nl", "n", "l", "const", "nll")


def resampled_fits(profile: Profile, fit: Fit, draws: int, seed: int) -> list[Fit]:
    """`draws` fits of `profile`, resampled, in the forms of `fit`."""
    rng = np.random.default_rng(seed)
    return [_resampled(profile, fit, rng) for _ in range(draws)]


def _resampled(profile: Profile, fit: Fit, rng: np.random.Generator) -> Fit:
    prefill = _refit(fit.prefill, prefill_points(_redrawn(profile.prefill, rng)), rng, square=True)
    decode = _refit(fit.decode, decode_points(_redrawn(profile.decode, rng)), rng, square=False)
    law = SegmentedLaw(tuple(prefill.segments), tuple(decode.segments), fit.engine.prefill_emits_token)
    slices = [profile.slices[k] for k in rng.integers(len(profile.slices), size=len(profile.slices))]
    batch_s, stretch = refit_overhead(slices, law)
    overhead = fit.overhead.model_copy(update={"batch_s": batch_s, "stretch": stretch})
    found: dict[str, object] = {"prefill": prefill, "decode": decode, "overhead": overhead}
    if fit.rounds and profile.rounds:
        found["rounds"] = _redrawn_rounds(fit.rounds, sequences_of(profile.rounds), law, rng)
    return fit.model_copy(update=found)


def _redrawn_rounds(
    fit: RoundsFit, sequences: Sequence[Sequence[RoundPoint]], law: SegmentedLaw, rng: np.random.Generator
) -> RoundsFit:
    """The parts stay: they are a few percent of a round."""
    drawn = [sequences[k] for k in rng.integers(len(sequences), size=len(sequences))]
    batch_s, stretch = refit_round_overhead(drawn, law_of_parts(law, fit.join, fit.leave, fit.grow))
    return fit.model_copy(update={"overhead": fit.overhead.model_copy(update={"batch_s": batch_s, "stretch": stretch})})


def _redrawn(points: Sequence[Measured], rng: np.random.Generator) -> list[Measured]:
    return [p.model_copy(update={"seconds": rng.choice(p.seconds, len(p.seconds)).tolist()}) for p in points]


def _refit(law: LatencyFit, points: Points, rng: np.random.Generator, *, square: bool) -> LatencyFit:
    form = form_named(law.form, points, square=square)
    coefficients = form.solve(points, rng.exponential(size=len(points)))
    return law.model_copy(update={"segments": form.segments(coefficients)})


def scaled_fits(fit: Fit, draws: int, seed: int) -> list[Fit]:
    """`draws` fits, each law of each scaled by a log-normal factor whose median error is the law's held-out one."""
    rng = np.random.default_rng(seed)
    return [_scaled(fit, rng) for _ in range(draws)]


def _scaled(fit: Fit, rng: np.random.Generator) -> Fit:
    prefill, decode, overhead = (_factor(one.error, rng) for one in (fit.prefill, fit.decode, fit.overhead))
    found: dict[str, object] = {
        "prefill": _times(fit.prefill, prefill),
        "decode": _times(fit.decode, decode),
        "overhead": _slower(fit.overhead, overhead),
    }
    if fit.rounds:
        slower = _slower(fit.rounds.overhead, _factor(fit.rounds.overhead.error, rng))
        found["rounds"] = fit.rounds.model_copy(update={"overhead": slower})
    return fit.model_copy(update=found)


def _slower(overhead: OverheadFit, factor: float) -> OverheadFit:
    return OverheadFit(batch_s=overhead.batch_s * factor, stretch=overhead.stretch * factor, error=overhead.error)


def _factor(error: HeldOutError, rng: np.random.Generator) -> float:
    return float(np.exp(rng.standard_normal() * error.median_percent / 100.0 / NORMAL_MEDIAN))


def _times(law: LatencyFit, factor: float) -> LatencyFit:
    def scaled(segment: Segment) -> Segment:
        return segment.model_copy(update={name: getattr(segment, name) * factor for name in COEFFICIENTS})

    return law.model_copy(update={"segments": [scaled(segment) for segment in law.segments]})
