"""From a profile to its laws: the terms of each, and its error on points that the fit did not see.

A point is all its repeats, and a law is fitted to all points. `fit_profile` does that for every law
of a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from toolkit.errors import InputError
from toolkit.estimators.laws import DECODE_TERMS, PREFILL_TERMS, LinearLaw
from toolkit.estimators.least_squares import (
    fit_overhead,
    fit_terms,
    typical_seconds,
)
from toolkit.estimators.part_fits import fit_memory, fit_rounds, fit_steps
from toolkit.files.fit import Fit, LawFit, OverheadFit, StepsFit
from toolkit.files.io import EnvelopeFields
from toolkit.files.profile import Profile, SlicePoint
from toolkit.laws.features import StepShape, chunk_attended
from toolkit.laws.passes import PassLaw, PassRange

Name = Literal["prefill", "decode"]  # of a law
GridPoint = tuple[int, int, list[float]]  # batch size N, length L, and samples

POINTS_MIN = 8
SLICES_MIN = 6


def laws_of_drafts(profile: Profile, others: Sequence[Profile], seed: int = 0) -> list[StepsFit]:
    """Return the laws of passes of `others`, which differ from `profile` in the number of drafts.

    Raises InputError for a profile of another recipe, of a number that is there already, or without
    passes.
    """
    known = {profile.steps.draft_tokens if profile.steps else 0}
    found = []
    for other in others:
        if (
            other.steps is None
            or other.recipe_name != profile.recipe_name
            or other.engine.dtype != profile.engine.dtype
        ):
            raise InputError(
                f"a profile of {other.recipe_name} beside one of {profile.recipe_name}",
                "give profiles of one recipe of engine vllm: llmctl profile RECIPE --drafts N",
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

    Raises InputError that names what the profile lacks: points, lengths, batch sizes, slices,
    rounds or memory probes.
    """
    prefills = [(one.batch_size, one.input_length, one.seconds) for one in profile.prefill]
    decodes = [(one.batch_size, one.cached_length, one.seconds) for one in profile.decode]
    prefill = fit_latency("prefill", prefills, seed)
    decode = fit_latency("decode", decodes, seed)
    law = LinearLaw(prefill.law, decode.law, profile.engine.prefill_emits_token)
    rounds, swap = fit_rounds(profile, law, seed)
    passes = profile.steps
    return Fit(
        **made_from,
        recipe_name=profile.recipe_name,
        workers=profile.workers,
        engine=profile.engine,
        prefill=prefill,
        decode=decode,
        overhead=overhead_of_slices(profile.slices, law, seed),
        memory=fit_memory(profile.memory, profile.engine),
        rounds=rounds,
        swap=swap,
        steps=passes and fit_steps(passes, seed, computed=bool(profile.engine.analytic)),
    )


def fit_latency(name: Name, grid: Sequence[GridPoint], seed: int) -> LawFit:
    """Return the law of prefills, T_prefill(N, L), or of decode steps, tau(l, N). Steps may be
    flat, and then linear.

    Raises InputError if there are too few points, batch sizes or lengths, or a point without a
    sample, or one that took no time.
    """
    sizes = {n for n, _, _ in grid}
    lengths = {length for _, length, _ in grid}
    if len(grid) < POINTS_MIN or len(sizes) < 2 or len(lengths) < 2:
        raise InputError(
            f"{name}: measured points {len(grid)}, batch sizes {len(sizes)}, lengths "
            f"{len(lengths)}; needed are {POINTS_MIN}, 2 and 2",
            "profile.batch_sizes, input_lengths or cached_lengths in the recipe need more values; "
            "then: llmctl profile RECIPE",
        )
    seconds = typical_seconds((f"{name} at N={n}, L={length}", own) for n, length, own in grid)
    if name == "prefill":
        shapes = [StepShape(0, 0, n, n * long, n * chunk_attended(0, long)) for n, long, _ in grid]
        form = PassLaw(dict.fromkeys(PREFILL_TERMS, 0.0))
    else:
        shapes = [StepShape(n, n * length) for n, length, _ in grid]
        form = PassLaw(dict.fromkeys(DECODE_TERMS, 0.0), flat_s=1.0)
    law = fit_terms(form, shapes, seconds, seed)
    valid = PassRange(rows_max=max(sizes), length_max=max(lengths))
    return LawFit(law=replace(law, valid=valid))


def overhead_of_slices(slices: Sequence[SlicePoint], law: LinearLaw, seed: int) -> OverheadFit:
    """Return what a slice costs beyond `law` when it goes through a worker process and all workers
    run. Raises InputError if fewer than six slices were measured, or if one took no time.
    """
    if len(slices) < SLICES_MIN:
        raise InputError(
            f"overhead: {len(slices)} slices measured, at least {SLICES_MIN} are needed",
            "set profile.slices in the recipe; then: llmctl profile RECIPE",
        )
    seconds = typical_seconds(("overhead: a slice", [point.seconds]) for point in slices)
    served = [law.serve_s(point.batch_size, point.input_length, point.steps) for point in slices]
    return fit_overhead(list(np.stack([served, seconds]).T[:, :, None]), seed)
