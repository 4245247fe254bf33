"""From a profile to its laws: the form of each, its coefficients, and its error on points that the
fit did not see.

Forms compete on held-out error, where a point is all its repeats; the chosen form is then fitted to
all points. `fit_profile` does that for every law of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from toolkit.errors import InputError
from toolkit.estimators import forms
from toolkit.estimators.forms import Floats, Form, Points, Rows
from toolkit.estimators.laws import SegmentedLaw
from toolkit.estimators.part_fits import fit_memory, fit_rounds, fit_steps
from toolkit.files.fit import Candidate, Fit, LatencyFit, PointError, StepsFit
from toolkit.files.io import EnvelopeFields
from toolkit.files.profile import DecodePoint, PrefillPoint, Profile
from toolkit.laws.passes import PassRange

Name = Literal["prefill", "decode"]  # of a law

POINTS_MIN = 8
LEAST_S = 1e-9  # of a sample: no clock measures less, and a relative error has no bound there
WORST_POINTS = 3  # named in a fit


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


def fit_profile(profile: Profile, made_from: EnvelopeFields, seed: int = 0) -> Fit:
    """Fit every law to a profile: the content of fit.json.

    Args:
        made_from: the common fields of the file.
        seed: deals the points into held-out parts.

    Raises `InputError` that names what the profile lacks: points, lengths, batch sizes, slices,
    rounds or memory probes.
    """
    prefill = fit_latency("prefill", profile.prefill, seed)
    decode = fit_latency("decode", profile.decode, seed)
    law = SegmentedLaw(
        tuple(prefill.pieces), tuple(decode.pieces), profile.engine.prefill_emits_token
    )
    rounds, swap = fit_rounds(profile, law, seed)
    passes = profile.steps
    return Fit(
        **made_from,
        recipe_name=profile.recipe_name,
        workers=profile.workers,
        engine=profile.engine,
        prefill=prefill,
        decode=decode,
        overhead=forms.overhead_of_slices(profile.slices, law, seed),
        memory=fit_memory(profile.memory, profile.engine),
        rounds=rounds,
        swap=swap,
        steps=passes and fit_steps(passes, seed, computed=bool(profile.engine.analytic)),
    )


def fit_latency(
    name: Name, measured: Sequence[PrefillPoint | DecodePoint], seed: int
) -> LatencyFit:
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
    return LatencyFit(
        form=form.name,
        pieces=form.solve(points),
        error=candidates[kept].error,
        candidates=candidates,
        valid=PassRange(rows_max=int(points.batch_size.max()), length_max=int(points.length.max())),
        worst_points=_worst_points(points, predicted[kept], spreads),
        spread_percent=float(np.median(known)) if known else None,
    )


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
        return forms.seconds_of(form.solve(points.take(seen)), points.take(rows))

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
    columns = np.array(sizes, dtype=float), np.array(lengths, dtype=float), np.array(seconds)
    return Points(*columns, term="token" if name == "prefill" else "cached")
