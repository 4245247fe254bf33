"""From a profile to its laws: which form, which coefficients, and how far off on points that the
fit did not see.

Forms compete on held-out error (`held_out`), where a point is all its repeats; the form that is
kept is then fitted to all points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from toolkit.errors import InputError
from toolkit.estimators.forms import (
    Floats,
    LawForm,
    Points,
    Rows,
    candidates,
    choose,
    fit_overhead,
    form_named,
    percent_error,
    predict_held_out,
    refit_overhead,
    typical,
)
from toolkit.estimators.laws import SegmentedLaw, law_of_parts
from toolkit.estimators.part_fits import (
    FittedRounds,
    fit_memory,
    fit_rounds,
    fit_steps,
    refit_round_overhead,
    sequences_of,
)
from toolkit.files.fit import (
    Candidate,
    Fit,
    HeldOutError,
    LatencyFit,
    MemoryFit,
    OverheadFit,
    Range,
    RoundsFit,
    Segment,
    StepsFit,
)
from toolkit.files.io import EnvelopeFields
from toolkit.files.profile import DecodePoint, PrefillPoint, Profile, RoundPoint

POINTS_MIN = 8


@dataclass(slots=True, frozen=True)
class HeldOut:
    """A law's points, and the seconds that a fit without it predicted for each."""

    points: Points
    predicted_s: Floats


@dataclass(slots=True, frozen=True)
class FittedLaw:
    """A law, and the held-out predictions behind its errors."""

    fit: LatencyFit
    held_out: HeldOut


@dataclass(slots=True, frozen=True)
class FittedProfile:
    """All that a fit file holds of one profile."""

    prefill: FittedLaw
    decode: FittedLaw
    overhead: OverheadFit
    memory: MemoryFit
    rounds: FittedRounds | None = None
    steps: StepsFit | None = None


def fit_file(profile: Profile, fitted: FittedProfile, made_from: EnvelopeFields) -> Fit:
    """What fit.json holds of `profile` and the laws that were fitted to it."""
    rounds = fitted.rounds
    return Fit(
        **made_from,
        recipe_name=profile.recipe_name,
        workers=profile.workers,
        engine=profile.engine,
        prefill=fitted.prefill.fit,
        decode=fitted.decode.fit,
        overhead=fitted.overhead,
        memory=fitted.memory,
        rounds=rounds.rounds if rounds else None,
        swap=rounds.swap if rounds else None,
        steps=fitted.steps,
    )


def fit_profile(profile: Profile, seed: int = 0) -> FittedProfile:
    """Fit every law to a profile; `seed` deals the points into parts.

    Raises `InputError` naming what the profile lacks: points, lengths, batch sizes, slices, rounds or memory probes.
    """
    prefill = fit_latency("prefill", prefill_points(profile.prefill), seed, square=True)
    decode = fit_latency("decode", decode_points(profile.decode), seed, square=False)
    law = SegmentedLaw(
        tuple(prefill.fit.segments), tuple(decode.fit.segments), profile.engine.prefill_emits_token
    )
    return FittedProfile(
        prefill,
        decode,
        fit_overhead(profile.slices, law, seed),
        fit_memory(profile.memory, profile.engine),
        fit_rounds(profile, law, seed),
        fit_steps(profile.steps, seed),
    )


def fit_latency(name: str, points: Points, seed: int, *, square: bool) -> FittedLaw:
    """The best form for the points by held-out error, fitted to all of them. `name` is for
    messages.

    Raises `InputError` where there are too few points, batch sizes or lengths, or a time that is not positive.
    """
    _check(name, points)
    forms = candidates(points, square=square)
    predicted = [_predict_held_out(form, points, seed) for form in forms]
    errors = [percent_error(prediction, points.seconds) for prediction in predicted]
    kept = choose([np.abs(prediction / points.seconds - 1.0) for prediction in predicted])
    form = forms[kept]
    fit = LatencyFit(
        form=form.name,
        segments=form.segments(form.solve(points)),
        error=errors[kept],
        candidates=[
            Candidate(form=form.name, error=error)
            for form, error in zip(forms, errors, strict=True)
        ],
        valid=Range(
            batch_size_max=int(points.batch_size.max()), length_max=int(points.length.max())
        ),
    )
    return FittedLaw(fit, HeldOut(points, predicted[kept]))


def _predict_held_out(form: LawForm, points: Points, seed: int) -> Floats:
    def predict(seen: Rows, rows: Rows) -> Floats:
        return form.predict(form.solve(points.take(seen)), points.take(rows))

    return predict_held_out(len(points), predict, seed)


def prefill_points(measured: Sequence[PrefillPoint]) -> Points:
    """T_prefill(N, L) of each point, by the `typical` of its samples. `InputError` for one that
    took no time.
    """
    return _points("prefill", [(p.batch_size, p.input_length, p.seconds) for p in measured])


def decode_points(measured: Sequence[DecodePoint]) -> Points:
    """tau(l, N) of each point, by the `typical` of its samples. `InputError` for one that took no
    time.
    """
    return _points("decode", [(p.batch_size, p.cached_length, p.seconds) for p in measured])


def _points(name: str, rows: Sequence[tuple[int, int, list[float]]]) -> Points:
    """Each point with the `typical` of its samples."""
    for size, length, samples in rows:
        if not samples or min(samples) <= 0.0:
            found = "no samples" if not samples else f"a sample of {min(samples)} s"
            raise InputError(
                f"{name} at N={size}, L={length}: {found}",
                "measure again with: llmctl profile RECIPE",
            )
    sizes, lengths = [row[0] for row in rows], [row[1] for row in rows]
    seconds = [typical(row[2]) for row in rows]
    return Points(np.array(sizes, dtype=float), np.array(lengths, dtype=float), np.array(seconds))


def _check(name: str, points: Points) -> None:
    lengths = "input_lengths" if name == "prefill" else "cached_lengths"
    remedy = "profile.{} in the recipe needs more values; then: llmctl profile RECIPE"
    if len(points) < POINTS_MIN:
        raise InputError(
            f"{name}: {len(points)} points measured, at least {POINTS_MIN} are needed",
            remedy.format(lengths),
        )
    for what, values, key in (
        ("batch size", points.batch_size, "batch_sizes"),
        ("length", points.length, lengths),
    ):
        if len(np.unique(values)) < 2:
            only = int(values[0])
            message = f"{name}: all {len(points)} points have {what} {only}, at least 2 are needed"
            raise InputError(message, remedy.format(key))


# Laws as they might have been fitted: for saying how far an error of the fit moves what is
# computed from it.
#
# With the profile at hand it is measured again in thought: repeats are drawn with replacement,
# points get random weights (the Bayesian bootstrap, Rubin 1981: unlike draws of points it never
# loses a batch size), slices are drawn with replacement, and the forms that the fit chose are
# fitted anew. That shows what other samples of the same machine would have given; that the
# machine may be slower tomorrow, it does not show.
#
# Without the profile each law is scaled as a whole by its stated held-out error. Errors that
# differ from point to point would partly cancel, so this is the wider of the two. The memory law
# stays: its edge is drawn in every simulation.

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
    law = SegmentedLaw(
        tuple(prefill.segments), tuple(decode.segments), fit.engine.prefill_emits_token
    )
    slices = [
        profile.slices[k] for k in rng.integers(len(profile.slices), size=len(profile.slices))
    ]
    batch_s, stretch = refit_overhead(slices, law)
    overhead = fit.overhead.model_copy(update={"batch_s": batch_s, "stretch": stretch})
    found: dict[str, object] = {"prefill": prefill, "decode": decode, "overhead": overhead}
    if fit.rounds and profile.rounds:
        found["rounds"] = _redrawn_rounds(fit.rounds, sequences_of(profile.rounds), law, rng)
    return fit.model_copy(update=found)


def _redrawn_rounds(
    fit: RoundsFit,
    sequences: Sequence[Sequence[RoundPoint]],
    law: SegmentedLaw,
    rng: np.random.Generator,
) -> RoundsFit:
    """The parts stay: they are a few percent of a round."""
    drawn = [sequences[k] for k in rng.integers(len(sequences), size=len(sequences))]
    batch_s, stretch = refit_round_overhead(drawn, law_of_parts(law, fit.join, fit.leave, fit.grow))
    return fit.model_copy(
        update={
            "overhead": fit.overhead.model_copy(update={"batch_s": batch_s, "stretch": stretch})
        }
    )


def _redrawn(points: Sequence[Measured], rng: np.random.Generator) -> list[Measured]:
    return [
        p.model_copy(update={"seconds": rng.choice(p.seconds, len(p.seconds)).tolist()})
        for p in points
    ]


def _refit(
    law: LatencyFit, points: Points, rng: np.random.Generator, *, square: bool
) -> LatencyFit:
    form = form_named(law.form, points, square=square)
    coefficients = form.solve(points, rng.exponential(size=len(points)))
    return law.model_copy(update={"segments": form.segments(coefficients)})


def scaled_fits(fit: Fit, draws: int, seed: int) -> list[Fit]:
    """`draws` fits, each law of each scaled by a log-normal factor whose median error is the law's
    held-out one.
    """
    rng = np.random.default_rng(seed)
    return [_scaled(fit, rng) for _ in range(draws)]


def _scaled(fit: Fit, rng: np.random.Generator) -> Fit:
    prefill, decode, overhead = (
        _factor(one.error, rng) for one in (fit.prefill, fit.decode, fit.overhead)
    )
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
    return OverheadFit(
        batch_s=overhead.batch_s * factor, stretch=overhead.stretch * factor, error=overhead.error
    )


def _factor(error: HeldOutError, rng: np.random.Generator) -> float:
    return float(np.exp(rng.standard_normal() * error.median_percent / 100.0 / NORMAL_MEDIAN))


def _times(law: LatencyFit, factor: float) -> LatencyFit:
    def scaled(segment: Segment) -> Segment:
        return segment.model_copy(
            update={name: getattr(segment, name) * factor for name in COEFFICIENTS}
        )

    return law.model_copy(update={"segments": [scaled(segment) for segment in law.segments]})
