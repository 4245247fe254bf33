"""From a profile to its laws: the form of each, its coefficients, and its error on points that the
fit did not see.

Forms compete on held-out error, where a point is all its repeats; the chosen form is then fitted to
all points. `fit_profile` does that for every law of a profile, and `fit_file` makes fit.json of it.

`resampled_fits` and `scaled_fits` draw fits that might have been found instead. They show how far
the error of a fit moves a result that is computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from toolkit.errors import InputError
from toolkit.estimators import forms
from toolkit.estimators.forms import Floats, Form, Points, Rows
from toolkit.estimators.laws import SegmentedLaw, scaled_segment
from toolkit.estimators.load import law_of_steps
from toolkit.estimators.part_fits import (
    fit_memory,
    fit_rounds,
    fit_steps,
    picked,
    resampled_rounds,
    resampled_steps,
    with_step_law,
)
from toolkit.files.fit import (
    Candidate,
    Fit,
    LatencyFit,
    MemoryFit,
    OverheadFit,
    PointError,
    Range,
    RoundsFit,
    StepsFit,
    SwapFit,
)
from toolkit.files.io import EnvelopeFields
from toolkit.files.profile import DecodePoint, PrefillPoint, Profile

Name = Literal["prefill", "decode"]  # of a law

POINTS_MIN = 8
LEAST_S = 1e-9  # of a sample: no clock measures less, and a relative error has no bound there
WORST_POINTS = 3  # named in a fit


@dataclass(slots=True, frozen=True)
class FittedLaw:
    """A law, its points, and the seconds that a fit without each point predicted for it."""

    fit: LatencyFit
    points: Points
    predicted_s: Floats


@dataclass(slots=True, frozen=True)
class FittedProfile:
    """The fits of one profile, as a fit file holds them."""

    prefill: FittedLaw
    decode: FittedLaw
    overhead: OverheadFit
    memory: MemoryFit
    rounds: RoundsFit | None
    swap: SwapFit | None
    steps: StepsFit | None


def fit_file(profile: Profile, fitted: FittedProfile, made_from: EnvelopeFields) -> Fit:
    """The content of fit.json: facts about `profile`, and the laws that were fitted to it."""
    return Fit(
        **made_from,
        recipe_name=profile.recipe_name,
        workers=profile.workers,
        engine=profile.engine,
        prefill=fitted.prefill.fit,
        decode=fitted.decode.fit,
        overhead=fitted.overhead,
        memory=fitted.memory,
        rounds=fitted.rounds,
        swap=fitted.swap,
        steps=fitted.steps,
    )


def laws_of_drafts(profile: Profile, others: Sequence[Profile], seed: int = 0) -> list[StepsFit]:
    """The laws of passes of `others`, which differ from `profile` in the number of drafts.

    `InputError` for a profile of another recipe, of a number that is there already, or without
    passes.
    """
    known = {profile.steps.draft_tokens if profile.steps else 0}
    found = []
    for other in others:
        if other.steps is None or profile.steps is None:
            raise InputError(
                f"a profile of {other.recipe_name} has no passes",
                "profiles of engine vllm have them",
            )
        if other.recipe_name != profile.recipe_name or other.engine.dtype != profile.engine.dtype:
            raise InputError(
                f"a profile of {other.recipe_name} beside one of {profile.recipe_name}",
                "give profiles of one recipe: llmctl profile RECIPE --drafts N",
            )
        steps = fit_steps(other.steps, seed)
        if steps.draft_tokens in known:
            raise InputError(
                f"two profiles have {steps.draft_tokens} drafts",
                "profile another number: llmctl profile RECIPE --drafts N",
            )
        known.add(steps.draft_tokens)
        found.append(steps)
    return found


def fit_profile(profile: Profile, seed: int = 0) -> FittedProfile:
    """Fit every law to a profile; `seed` deals the points into held-out parts.

    Raises `InputError` that names what the profile lacks: points, lengths, batch sizes, slices,
    rounds or memory probes.
    """
    prefill = fit_latency("prefill", profile.prefill, seed)
    decode = fit_latency("decode", profile.decode, seed)
    law = SegmentedLaw(
        tuple(prefill.fit.segments), tuple(decode.fit.segments), profile.engine.prefill_emits_token
    )
    steps = fit_steps(profile.steps, seed) if profile.steps is not None else None
    return FittedProfile(
        prefill,
        decode,
        forms.fit_overhead(profile.slices, law, seed),
        fit_memory(profile.memory, profile.engine),
        *fit_rounds(profile, law, seed),
        steps,
    )


def fit_latency(name: Name, measured: Sequence[PrefillPoint | DecodePoint], seed: int) -> FittedLaw:
    """The best form for the points by held-out error, fitted to all of them. Forms of prefills may
    have a term N*L^2.

    Raises `InputError` if there are too few points, batch sizes or lengths.
    """
    points = points_of(name, measured)
    _check_points(name, points)
    competing = forms.candidates(points, square=name == "prefill")
    predicted = [_held_out(form, points, seed) for form in competing]
    candidates = [
        Candidate(form=form.name, error=forms.percent_error(prediction, points.seconds))
        for form, prediction in zip(competing, predicted, strict=True)
    ]
    kept = forms.choose(predicted, points.seconds)
    form = competing[kept]
    spreads = [_spread_percent(point.seconds) for point in measured]
    known = [spread for spread in spreads if spread is not None]
    fit = LatencyFit(
        form=form.name,
        segments=form.segments(form.solve(points)),
        error=candidates[kept].error,
        candidates=candidates,
        valid=Range(
            batch_size_max=int(points.batch_size.max()), length_max=int(points.length.max())
        ),
        worst_points=_worst_points(points, predicted[kept], spreads),
        spread_percent=float(np.median(known)) if known else None,
        flat_percent=_flat_percent(points, seed) if name == "prefill" else None,
    )
    return FittedLaw(fit, points, predicted[kept])


def _worst_points(
    points: Points, predicted_s: Floats, spreads: Sequence[float | None]
) -> list[PointError]:
    """The points that the law misses most, with how far the samples of each are apart."""
    errors = 100.0 * (predicted_s / points.seconds - 1.0)
    return [
        PointError(
            batch_size=int(points.batch_size[index]),
            length=int(points.length[index]),
            error_percent=float(errors[index]),
            spread_percent=spreads[index],
        )
        for index in np.argsort(-np.abs(errors), kind="stable")[:WORST_POINTS]
    ]


def _flat_percent(points: Points, seed: int) -> float | None:
    """The median held-out error, in percent, of a flat and then linear form."""
    if not forms.may_be_flat(points):
        return None
    predicted = _held_out(forms.FlatForm(), points, seed)
    return forms.percent_error(predicted, points.seconds).median_percent


def _spread_percent(samples: Sequence[float]) -> float | None:
    """The standard deviation over the mean, in percent; None of fewer than two samples."""
    if len(samples) < 2:
        return None
    return float(100.0 * np.std(samples, ddof=1) / np.mean(samples))


def _check_points(name: Name, points: Points) -> None:
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


def _held_out(form: Form, points: Points, seed: int) -> Floats:
    def predict(seen: Rows, rows: Rows) -> Floats:
        return form.predict(form.solve(points.take(seen)), points.take(rows))

    return forms.predict_held_out(len(points), predict, seed)


def points_of(name: Name, measured: Sequence[PrefillPoint | DecodePoint]) -> Points:
    """T_prefill(N, L) or tau(l, N) of each point, by the `typical` of its samples.

    Raises `InputError` for a point without samples, or with one that took no time.
    """
    sizes = [point.batch_size for point in measured]
    lengths = [p.input_length if isinstance(p, PrefillPoint) else p.cached_length for p in measured]
    for point, size, length in zip(measured, sizes, lengths, strict=True):
        if not point.seconds or min(point.seconds) < LEAST_S:
            problem = f"a sample of {min(point.seconds)} s" if point.seconds else "no samples"
            raise InputError(
                f"{name} at N={size}, L={length}: {problem}",
                "measure again with: llmctl profile RECIPE",
            )
    seconds = [forms.typical(point.seconds) for point in measured]
    return Points(np.array(sizes, dtype=float), np.array(lengths, dtype=float), np.array(seconds))


NORMAL_MEDIAN = 0.6745  # of |x| where x is standard normal


def resampled_fits(profile: Profile, fit: Fit, draws: int, seed: int) -> list[Fit]:
    """`draws` fits of `profile` resampled, in the forms of `fit`.

    Repeats of points, slices and sequences of rounds are drawn with replacement. Points and passes
    get random weights (the Bayesian bootstrap, Rubin 1981: unlike draws of points it never loses a
    batch size).

    The draws show what other samples of the same machine would have given. They do not show that
    the machine may be slower tomorrow.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        prefill = _refit("prefill", fit.prefill, profile.prefill, rng)
        decode = _refit("decode", fit.decode, profile.decode, rng)
        law = SegmentedLaw(
            tuple(prefill.segments), tuple(decode.segments), fit.engine.prefill_emits_token
        )
        served_s, seconds = forms.slice_times(picked(profile.slices, rng), law)
        overhead = _with_line(fit.overhead, forms.fit_line(served_s, seconds))
        laws: dict[str, Any] = {"prefill": prefill, "decode": decode, "overhead": overhead}
        if fit.rounds and profile.rounds:
            laws["rounds"] = resampled_rounds(fit.rounds, profile.rounds, law, rng)
        if fit.steps and profile.steps:
            laws["steps"] = resampled_steps(fit.steps, profile.steps, rng)
        # The profiles of other numbers of drafts are not here.
        laws["drafts"] = [_scaled_steps(other, fit.off_percent(other), rng) for other in fit.drafts]
        drawn.append(fit.model_copy(update=laws))
    return drawn


def _refit(
    name: Name,
    law: LatencyFit,
    measured: Sequence[PrefillPoint | DecodePoint],
    rng: np.random.Generator,
) -> LatencyFit:
    redrawn = [
        p.model_copy(update={"seconds": rng.choice(p.seconds, len(p.seconds)).tolist()})
        for p in measured
    ]
    points = points_of(name, redrawn)
    competing = forms.candidates(points, square=name == "prefill")
    form = next((form for form in competing if form.name == law.form), None)
    if form is None:
        raise InputError(
            f"the points do not determine the form '{law.form}'",
            "fit the profile again: llmctl fit PROFILE",
        )
    coefficients = form.solve(points, rng.exponential(size=len(points)))
    return law.model_copy(update={"segments": form.segments(coefficients)})


def scaled_fits(fit: Fit, draws: int, seed: int) -> list[Fit]:
    """`draws` fits for use without a profile: each law as a whole times a log-normal factor. The
    median of the factor's distance from 1 is how far the law is off (`Fit.off_percent`).

    Errors that differ from point to point would partly cancel, so these draws spread wider than
    `resampled_fits`. The memory law stays: its edge is drawn in every simulation.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        laws: dict[str, Any] = {
            "prefill": _scaled(fit.prefill, fit.off_percent(fit.prefill), rng),
            "decode": _scaled(fit.decode, fit.off_percent(fit.decode), rng),
            "overhead": _slower(fit.overhead, rng),
        }
        if fit.rounds:
            slower = {"overhead": _slower(fit.rounds.overhead, rng)}
            laws["rounds"] = fit.rounds.model_copy(update=slower)
        if fit.steps:
            laws["steps"] = _scaled_steps(fit.steps, fit.off_percent(fit.steps), rng)
        laws["drafts"] = [_scaled_steps(other, fit.off_percent(other), rng) for other in fit.drafts]
        drawn.append(fit.model_copy(update=laws))
    return drawn


def _scaled_steps(steps: StepsFit, off_percent: float, rng: np.random.Generator) -> StepsFit:
    return with_step_law(steps, law_of_steps(steps).times(_factor(off_percent, rng)))


def _factor(off_percent: float, rng: np.random.Generator) -> float:
    return float(np.exp(rng.standard_normal() * off_percent / 100.0 / NORMAL_MEDIAN))


def _scaled(law: LatencyFit, off_percent: float, rng: np.random.Generator) -> LatencyFit:
    factor = _factor(off_percent, rng)
    segments = [scaled_segment(segment, factor) for segment in law.segments]
    return law.model_copy(update={"segments": segments})


def _slower(overhead: OverheadFit, rng: np.random.Generator) -> OverheadFit:
    factor = _factor(overhead.error.median_percent, rng)
    return _with_line(overhead, (overhead.batch_s * factor, overhead.stretch * factor))


def _with_line(overhead: OverheadFit, line: tuple[float, float]) -> OverheadFit:
    return overhead.model_copy(update={"batch_s": line[0], "stretch": line[1]})
