"""A law from the passes that a server made for real traffic: no run of its own, no extra request.

A log of passes (`toolkit.files.iterations`) has what a profile measures: the shape of each pass and
its time. What differs is the choice of shapes, which is the traffic's. So `Coverage` says which
terms of the law these passes show, and `profile_of_log` refuses passes that show too little. What a
log does not have: the front (clients see it), and passes that traffic did not need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from toolkit.backends.vllm.profile import (
    facts_of,
    least_sampler_s,
    points,
    refuse_not_modelled,
    refuse_unknown_experts,
    steps_of_header,
    timed,
)
from toolkit.catalogue.caches import read_tokens
from toolkit.errors import InputError
from toolkit.estimators.least_squares import Floats, standard_deviations
from toolkit.estimators.part_fits import fit_steps, form_of
from toolkit.estimators.pipeline_fit import shape_of
from toolkit.files.fit import Fit
from toolkit.files.io import EnvelopeFields
from toolkit.files.iterations import IterationLogHeader, LoggedPass, header_of, passes_of
from toolkit.files.profile import Profile, StepsProfile
from toolkit.files.recipe import Recipe
from toolkit.laws.features import FEATURES, StepShape
from toolkit.laws.passes import PassLaw
from toolkit.profiling.analytic import ComputedPasses, computed_profile
from toolkit.profiling.run import with_sampler
from toolkit.sched.eventlog import whole_lines

POINTS_MAX = 3000  # the newest ones; a fit of more takes longer and finds the same
PASSES_MIN = 200
ROWS_MIN = 3  # different numbers of rows that decode
CHUNKS_MIN = 20  # passes with chunks
UNSURE = 0.1  # of a pass's time: a term that moves it by more, in one standard error


@dataclass(frozen=True, slots=True)
class PassHistory:
    """The header of a log, and its passes."""

    header: IterationLogHeader
    passes: list[LoggedPass]


def read_passes(path: Path) -> PassHistory:
    """A log of passes, also of a server that still writes it. `InputError` for any other file."""
    try:
        with path.open("rb") as file:
            first = file.readline()
            lines = [*whole_lines(file)]
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read: {error.strerror}",
            "a server writes one with: llmctl serve PLAN.json --pass-log FILE",
        ) from None
    try:
        return PassHistory(header_of(first), passes_of(lines))
    except msgspec.DecodeError as error:
        raise InputError(
            f"{path}: not a log of passes: {error}", "name the file of: llmctl serve --pass-log"
        ) from None


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the passes show of the law.

    Attributes:
        passes, points: how many passes there were, and of how many compositions in a row.
        shown: how many terms some pass has.
        unsure: terms that the traffic does not identify, in words: what they could not be told
            apart from moves a typical pass by more than `UNSURE` of its time.
        absent: terms of which no pass had anything.
    """

    passes: int
    points: int
    shown: int
    unsure: list[str]
    absent: list[str]


def steps_of_log(recipe: Recipe, history: PassHistory) -> StepsProfile:
    """The passes as a profile has them. `InputError` for a server that no law describes, and for
    too few passes or too few kinds of them.
    """
    header = history.header
    refuse_not_modelled(header)
    refuse_unknown_experts(recipe, header.model_type)
    made = [one for one in history.passes if one.rows]
    if len(made) < PASSES_MIN:
        raise InputError(
            f"the log has {len(made):,} passes, and a law needs {PASSES_MIN:,}",
            "wait for more traffic",
        )
    resolved = header.resolved
    window = read_tokens(resolved.groups, resolved.index_topk) if resolved is not None else 0
    found = points(timed(made, window))[-POINTS_MAX:]
    shown_s = least_sampler_s(made)
    if shown_s < math.inf:
        found = [with_sampler(point, shown_s) for point in found]
    chunks = sum(point.prefills > 0 for point in found)
    rows = {point.decodes for point in found if not point.prefills}
    if chunks < CHUNKS_MIN or len(rows) < ROWS_MIN:
        raise InputError(
            f"the log has {chunks} passes with prompts and {len(rows)} numbers of decoding rows; a "
            f"law needs {CHUNKS_MIN} and {ROWS_MIN}",
            "wait for more traffic, or profile: llmctl profile RECIPE",
        )
    return steps_of_header(header, recipe).model_copy(update={"points": found})


def coverage(law: PassLaw, steps: StepsProfile, passes: int) -> Coverage:
    """Return which terms the points identify, of a law in which all new tokens cost the same and
    no passes overlap.
    """
    shapes = [shape_of(point) for point in steps.points]
    form = form_of(steps, (0,))
    columns = np.array(form.columns(shapes))
    seconds = np.array([float(np.mean(point.seconds)) for point in steps.points])
    predicted = np.array([law.forward_s(shape) for shape in shapes])
    std = standard_deviations(columns, seconds, predicted)
    unsure = []
    absent = []
    words = [*(FEATURES[term].words for term in form.terms), "new tokens"]
    for name, column, deviation in zip(words, columns.T, std.tolist(), strict=True):
        shares = (column / seconds)[column > 0.0]
        if not len(shares):
            absent.append(name)
        elif deviation * np.median(shares) > UNSURE:
            unsure.append(name)
    shown = len(words) - len(absent)
    return Coverage(passes, len(steps.points), shown, unsure, absent)


def refuse_unsure(found: Coverage) -> None:
    """`InputError` where the traffic tells apart less than half of the law's terms."""
    if 2 * len(found.unsure) > found.shown:
        raise InputError(
            f"the passes do not tell apart {', '.join(found.unsure)}",
            "wait for traffic of other lengths and loads, or: llmctl profile RECIPE",
        )


def profile_of_log(
    recipe: Recipe, history: PassHistory, head: EnvelopeFields, seed: int = 0
) -> tuple[Profile, Coverage]:
    """A profile with the passes of the log; its prefills and decode steps follow from their law,
    over the recipe's grid. `steps_of_log` and `refuse_unsure` say what is refused.
    """
    steps = steps_of_log(recipe, history)
    law = fit_steps(steps, seed).law

    def seconds(shapes: Sequence[StepShape]) -> Floats:
        return np.array([law.forward_s(shape) for shape in shapes])

    facts = facts_of(recipe, history.header)
    times = ComputedPasses(seconds, "passes of a server's log", window=law.window)
    found = coverage(law, steps, len(history.passes))
    refuse_unsure(found)
    return computed_profile(recipe, head, facts, times, steps), found


def with_pass_errors(fit: Fit) -> Fit:
    """Return the fit of such a profile. Its prefills, decode steps and slices are as far off as its
    passes: they were computed by the law of these.
    """
    assert fit.steps is not None
    error = fit.steps.error
    prefill, decode = (
        one.model_copy(update={"law": replace(one.law, error=error)})
        for one in (fit.prefill, fit.decode)
    )
    overhead = fit.overhead.model_copy(update={"error": error})
    return fit.model_copy(update={"prefill": prefill, "decode": decode, "overhead": overhead})
