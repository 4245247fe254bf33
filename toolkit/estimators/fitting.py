"""From a profile to its laws: which form, which coefficients, and how far off on points that the fit did not see.

Forms compete on held-out error (`held_out`), where a point is all its repeats; the form that is kept is then fitted to
all points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.errors import InputError
from toolkit.estimators.forms import Form, Points, candidates, typical
from toolkit.estimators.held_out import Floats, Rows, choose, percent_error, predict_held_out
from toolkit.estimators.laws import SegmentedLaw
from toolkit.estimators.memory_fit import fit_memory
from toolkit.estimators.overhead import fit_overhead
from toolkit.estimators.rounds_fit import FittedRounds, fit_rounds
from toolkit.estimators.steps_fit import fit_steps
from toolkit.files.fit import Candidate, Fit, LatencyFit, MemoryFit, OverheadFit, Range, StepsFit
from toolkit.files.io import Head
from toolkit.files.profile import DecodePoint, PrefillPoint, Profile

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


def fit_file(profile: Profile, fitted: FittedProfile, made_from: Head) -> Fit:
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
    law = SegmentedLaw(tuple(prefill.fit.segments), tuple(decode.fit.segments), profile.engine.prefill_emits_token)
    return FittedProfile(
        prefill,
        decode,
        fit_overhead(profile.slices, law, seed),
        fit_memory(profile.memory, profile.engine),
        fit_rounds(profile, law, seed),
        fit_steps(profile.steps, seed),
    )


def fit_latency(name: str, points: Points, seed: int, *, square: bool) -> FittedLaw:
    """The best form for the points by held-out error, fitted to all of them. `name` is for messages.

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
        candidates=[Candidate(form=form.name, error=error) for form, error in zip(forms, errors, strict=True)],
        valid=Range(batch_size_max=int(points.batch_size.max()), length_max=int(points.length.max())),
    )
    return FittedLaw(fit, HeldOut(points, predicted[kept]))


def _predict_held_out(form: Form, points: Points, seed: int) -> Floats:
    def predict(seen: Rows, rows: Rows) -> Floats:
        return form.predict(form.solve(points.take(seen)), points.take(rows))

    return predict_held_out(len(points), predict, seed)


def prefill_points(measured: Sequence[PrefillPoint]) -> Points:
    """T_prefill(N, L) of each point, by the `typical` of its samples. `InputError` for one that took no time."""
    return _points("prefill", [(p.batch_size, p.input_length, p.seconds) for p in measured])


def decode_points(measured: Sequence[DecodePoint]) -> Points:
    """tau(l, N) of each point, by the `typical` of its samples. `InputError` for one that took no time."""
    return _points("decode", [(p.batch_size, p.cached_length, p.seconds) for p in measured])


def _points(name: str, rows: Sequence[tuple[int, int, list[float]]]) -> Points:
    """Each point with the `typical` of its samples."""
    for size, length, samples in rows:
        if not samples or min(samples) <= 0.0:
            found = "no samples" if not samples else f"a sample of {min(samples)} s"
            raise InputError(f"{name} at N={size}, L={length}: {found}", "measure again with: llmctl profile RECIPE")
    sizes, lengths = [row[0] for row in rows], [row[1] for row in rows]
    seconds = [typical(row[2]) for row in rows]
    return Points(np.array(sizes, dtype=float), np.array(lengths, dtype=float), np.array(seconds))


def _check(name: str, points: Points) -> None:
    lengths = "input_lengths" if name == "prefill" else "cached_lengths"
    remedy = "profile.{} in the recipe needs more values; then: llmctl profile RECIPE"
    if len(points) < POINTS_MIN:
        raise InputError(
            f"{name}: {len(points)} points measured, at least {POINTS_MIN} are needed", remedy.format(lengths)
        )
    for what, values, key in (("batch size", points.batch_size, "batch_sizes"), ("length", points.length, lengths)):
        if len(np.unique(values)) < 2:
            only = int(values[0])
            message = f"{name}: all {len(points)} points have {what} {only}, at least 2 are needed"
            raise InputError(message, remedy.format(key))
