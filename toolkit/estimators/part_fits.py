"""Fits of memory, of rounds, of the link to host memory, and of a paged engine's passes and front.

In this order:

- `fit_memory`: memory probes to a memory law. It is one zeta where that explains the probes (SCLS
  paper, Eq. 9), else rules (Algorithm 2). A probe brackets the edge: N rows ran, M > N did not. As
  a share of the capacity, N * (L + S) / capacity, that is an interval; zeta lies where the
  intervals intersect. Beyond the paper, and only where that fails: a workspace for a prefill's
  activations, which take memory in proportion to N * L.
- `fit_rounds` and `fit_swap`: measured rounds to the law of their parts, the overhead of dispatch
  and of other busy workers, the memory usable in rounds, and the link to host memory.
- `fit_steps`: measured forward passes to the law of a pass; `fit_front`: requests to the delay of
  the engine's front.

Forms of a law compete on held-out error, the fewest terms first: a term that the data do not show
is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Literal

import numpy as np
from scipy.optimize import lsq_linear, minimize
from scipy.special import ndtr  # of scipy.stats, which takes long to import, only this is needed

from toolkit.catalogue.caches import window_of
from toolkit.catalogue.classes import of_resolved, refuse
from toolkit.errors import InputError
from toolkit.estimators import forms, pipeline_fit
from toolkit.estimators.forms import Floats, Rows
from toolkit.estimators.laws import SegmentedLaw, law_of_parts
from toolkit.files.fit import (
    BatchRule,
    Candidate,
    MemoryFit,
    OverheadFit,
    RoundsFit,
    StepsFit,
    SwapFit,
)
from toolkit.files.profile import (
    EngineFacts,
    FrontPoint,
    MemoryPoint,
    Profile,
    RoundPoint,
    RoundsProfile,
    StepPoint,
    StepsProfile,
    TrafficFront,
)
from toolkit.laws.features import StepShape
from toolkit.laws.passes import HeldOutError, PassLaw, PassRange

MEASURE_AGAIN = "measure again with: llmctl profile RECIPE"

EDGE_TOLERANCE = 0.05  # of the edge; the steps of rules between two probed lengths waste more
WORKSPACES = np.linspace(0.0, 16.0, 321)  # tried, in tokens of cache per input token
UNIFORM_STD = 12**-0.5  # of a uniform distribution of width 1: the edge inside its bracket


def fit_memory(probes: Sequence[MemoryPoint], engine: EngineFacts) -> MemoryFit:
    """The memory law that the probes show: zeta alone, zeta with a prefill's workspace, or rules.

    The result is the first of these that explains the probes, which means that it is off by at most
    one row or 5 % everywhere. A server is not probed: the result is the capacity that it states.

    Raises `InputError` without probes, if a probe contradicts itself, or if not even one row ran.
    """
    capacity = engine.capacity_tokens
    per_token = engine.kv_bytes_per_token
    law = partial(MemoryFit, capacity_tokens=capacity, kv_bytes_per_token=per_token)
    if engine.is_server:
        return law(form="zeta", zeta=1.0, zeta_std=0.0)
    _check_probes(probes)
    length: Floats = np.array([probe.input_length for probe in probes], dtype=float)
    steps: Floats = np.array([probe.steps for probe in probes], dtype=float)
    ran = np.array([probe.largest_ok for probe in probes], dtype=float)
    # infinite where the edge was not reached
    failed = np.array([np.inf if p.smallest_oom is None else p.smallest_oom for p in probes])

    def row_share(workspace: float) -> Floats:
        return (length * (1.0 + workspace) + steps) / capacity

    def gap(workspace: float) -> float:
        """How far apart the intervals of the edge are; below 1 they overlap."""
        row = row_share(workspace)
        return float((ran * row).max() / (failed * row).min())

    for workspace in (0.0, float(min(WORKSPACES, key=gap))):
        row = row_share(workspace)
        low = ran * row
        high = failed * row
        tolerance = np.maximum(row, EDGE_TOLERANCE * np.median(low))
        zeta, std = _edge(low, high)
        if np.max(low - tolerance) < np.min(high + tolerance):
            return law(form="zeta", zeta=zeta, zeta_std=std, workspace=workspace)
    # A limit differs from the batch size that ran where the next larger batch was not tried.
    known = np.isfinite(failed) & (ran > 0)
    widths = (failed[known] - 1 - ran[known]) / ran[known]
    std = float(widths.mean() * UNIFORM_STD) if known.any() else 0.0
    rules = _rules(length + steps, ran, engine.max_model_len)
    return law(form="rules", zeta=zeta, zeta_std=std, rules=rules)


def _check_probes(probes: Sequence[MemoryPoint]) -> None:
    if not probes:
        raise InputError(
            "memory: no length was probed, at least 1 is needed",
            "set profile.memory_lengths in the recipe; then: llmctl profile RECIPE",
        )
    for probe in probes:
        if probe.smallest_oom is not None and probe.smallest_oom <= probe.largest_ok:
            both = f"{probe.largest_ok} rows ran and {probe.smallest_oom} ran out of memory"
            raise InputError(f"memory at L={probe.input_length}: {both}", MEASURE_AGAIN)
    if all(probe.largest_ok == 0 for probe in probes):
        shortest = min(probe.input_length for probe in probes)
        raise InputError(
            f"memory: not even one row of {shortest} tokens ran", "give the engine more KV cache"
        )


def _edge(low: Floats, high: Floats) -> tuple[float, float]:
    """Mean and standard deviation of the edge, in shares of the capacity, given an interval
    [low, high) of each probe.

    If all intervals intersect, the edge lies in the intersection. If not, it differs from length to
    length: this is its likeliest normal distribution. If no probe ran out of memory, the edge is
    the largest share that ran.
    """
    if np.all(np.isinf(high)):
        return float(low.max()), 0.0
    shared_low = float(low.max())
    shared_high = float(high.min())
    if shared_low < shared_high:
        return (shared_low + shared_high) / 2, (shared_high - shared_low) * UNIFORM_STD
    middle = np.where(np.isinf(high), low, (low + high) / 2)

    def unlikelihood(mean_and_log_std: Floats) -> float:
        mean = mean_and_log_std[0]
        std = np.exp(mean_and_log_std[1])
        inside = ndtr((high - mean) / std) - ndtr((low - mean) / std)
        return float(-np.log(np.maximum(inside, 1e-300)).sum())

    start = np.array([middle.mean(), np.log(middle.std() + 1e-3)])
    likeliest = minimize(unlikelihood, start, method="Nelder-Mead")
    return float(likeliest.x[0]), float(np.exp(likeliest.x[1]))


def _rules(totals: Floats, ran: Floats, max_model_len: int) -> list[BatchRule]:
    """Algorithm 2's table: up to each probed L + S, as many rows as ran there, but never more than
    at a shorter one. Beyond the longest probe, rows shrink as if the tokens that fitted there were
    the whole capacity.
    """
    order = np.lexsort((ran, totals))
    totals = totals[order]
    limits = np.minimum.accumulate(ran[order])
    bounds = [0, *totals[:-1].astype(int).tolist()]
    rules: list[BatchRule] = []
    for bound, limit in zip(bounds, limits.astype(int).tolist(), strict=True):
        if not rules or rules[-1].max_batch_size != limit:
            rules.append(BatchRule(length_above=bound, max_batch_size=limit))
    longest = int(totals[-1])
    if longest < max_model_len:
        rows = int(limits[-1] * longest / max_model_len)
        rules.append(BatchRule(length_above=longest, max_batch_size=rows))
    return rules[::-1]


PARTS = ("row", "tokens", "pass row", "pass tokens", "row tokens", "pass row tokens")  # their terms
PART_SECONDS_MIN = 1e-7  # a part that takes less is not measurable and has no terms
BYTES_PER_S_MAX = 1e15  # of a transfer that takes no measurable time
NO_ERROR = HeldOutError(median_percent=0.0, p95_percent=0.0, worst_percent=0.0, points=0)


def fit_rounds(
    profile: Profile, law: SegmentedLaw, seed: int
) -> tuple[RoundsFit | None, SwapFit | None]:
    """The laws of a profile's rounds, given the engine's `law`, and of the link to host memory;
    None where the profile has none.

    Raises `InputError` if there are too few points of a part, too few sequences of rounds, or no
    memory probes.
    """
    measured = profile.rounds
    if measured is None:
        return None, None
    join, leave, grow = (_fit_part(name, measured, seed) for name in ("join", "leave", "grow"))
    overhead = _fit_round_overhead(measured, law_of_parts(law, join, leave, grow), seed)
    if not measured.memory:
        raise InputError(
            "rounds: memory was not probed",
            "set profile.memory_lengths in the recipe, and " + MEASURE_AGAIN,
        )
    # Rows times the longest row's tokens that ran at every probed length, with the last row
    # prefilled while the others held their caches.
    usable = min(p.largest_ok * (p.input_length + p.steps) for p in measured.memory)
    if not usable:
        raise InputError(
            "rounds: not even one row ran at some length", "give the engine more KV cache"
        )
    share = usable / profile.engine.capacity_tokens
    rounds = RoundsFit(join=join, leave=leave, grow=grow, overhead=overhead, usable_share=share)
    swap = fit_swap(
        measured, profile.engine.kv_bytes_per_token, seed, overlaps=profile.engine.device != "cpu"
    )
    return rounds, swap


def _fit_round_overhead(measured: RoundsProfile, law: SegmentedLaw, seed: int) -> OverheadFit:
    """The overhead of rounds over the law of their parts, and the held-out error of whole
    sequences.

    The error is of sequences because a round lasts only some hundredths of a second, and so shows
    one momentary speed of a shared machine; a sequence shows many.
    """
    times = _times_by_sequence(measured, law)
    if len(times) < forms.HELD_OUT_PARTS:
        raise InputError(
            f"rounds: {len(times)} sequences were measured, at least "
            f"{forms.HELD_OUT_PARTS} are needed",
            "raise profile.sequences in the recipe; then: llmctl profile RECIPE",
        )
    if min(pair.min() for pair in times) <= 0.0:
        raise InputError("rounds: a round took no time", MEASURE_AGAIN)
    return forms.fit_overhead(times, _raised_line, seed)


def _times_by_sequence(measured: RoundsProfile, law: SegmentedLaw) -> list[Floats]:
    """Of each sequence, the seconds of its rounds by the law of their parts, and as measured:
    [2, n]. Rounds without rows are left out.
    """

    def expected_s(point: RoundPoint) -> float:
        seconds = sum(law.prefill_s(rows, length) for rows, length in point.groups)
        if point.steps:
            seconds += law.decode_s(point.rows, point.cached_length, point.steps)
        return seconds + point.left * law.leave_s(point.cached_length + point.steps)

    sequences = [[p for p in sequence.rounds if p.rows] for sequence in measured.sequences]
    return [
        np.array([[expected_s(point) for point in rounds], [point.seconds for point in rounds]])
        for rounds in sequences
        if rounds
    ]


def _raised_line(expected: Floats, seconds: Floats) -> tuple[float, float]:
    """batch_s and stretch: the line through typical rounds, raised to the mean (as in `typical`),
    which is what serving pays.
    """
    batch_s, stretch = forms.fit_line(expected, seconds)
    line = batch_s + stretch * expected
    raised = float(np.minimum(seconds, forms.TYPICAL_MAX * line).sum() / line.sum())
    return batch_s * raised, stretch * raised


def _fit_part(name: str, measured: RoundsProfile, seed: int) -> PassLaw:
    """The law of a part of rounds, its terms by held-out error; without terms if it takes no
    measurable time. Newcomers compute their tokens, other rows have them cached.
    """
    points = [point for point in measured.parts if point.part == name]
    if len(points) < forms.HELD_OUT_PARTS:
        raise InputError(
            f"rounds: {len(points)} points of '{name}' measured, at least "
            f"{forms.HELD_OUT_PARTS} are needed",
            MEASURE_AGAIN,
        )
    seconds = np.array([forms.typical(point.seconds) for point in points])
    if seconds.min() <= PART_SECONDS_MIN:
        return PassLaw({}, error=NO_ERROR)
    tokens = "token" if name == "join" else "cached"
    tried = [
        PassLaw(dict.fromkeys(terms.replace("tokens", tokens).split(), 0.0)) for terms in PARTS
    ]
    shapes = []
    for point in points:
        # A move of the cache affects all rows. A join or a leave affects only its own rows.
        rows = point.rows + (point.others if name == "grow" else 0)
        both = rows, rows * point.length
        shapes.append(StepShape(0, 0, *both) if name == "join" else StepShape(*both))
    law, _ = best_law(tried, StepPasses(shapes, seconds), seed, forms.solve_relative)
    return law


def fit_swap(
    measured: RoundsProfile, bytes_per_token: int, seed: int, *, overlaps: bool = True
) -> SwapFit | None:
    """The link to host memory: one latency for both directions, and a rate for each.

    `overlaps` as in `SwapFit`. None if swaps were not measured, took no time, or had no host
    memory.
    """
    points = [point for point in measured.parts if point.part in ("swap_out", "swap_in")]
    if len(points) < forms.HELD_OUT_PARTS or not measured.host_bytes:
        return None
    seconds = np.array([forms.typical(point.seconds) for point in points])
    if seconds.min() <= 0.0:
        return None
    shapes = [  # out: cached tokens of decodes; in: cached tokens before chunks
        StepShape(point.rows, point.rows * point.length)
        if point.part == "swap_out"
        else StepShape(0, 0, point.rows, prefill_cached=point.rows * point.length)
        for point in points
    ]
    form = PassLaw({"row": 0.0, "cached": 0.0, "behind": 0.0})
    law, _ = best_law([form], StepPasses(shapes, seconds), seed, forms.solve_relative)
    out_s, in_s = (law.terms[name] / bytes_per_token for name in ("cached", "behind"))
    return SwapFit(
        latency_s=law.terms["row"],
        out_bytes_per_s=1.0 / max(out_s, 1.0 / BYTES_PER_S_MAX),
        in_bytes_per_s=1.0 / max(in_s, 1.0 / BYTES_PER_S_MAX),
        host_bytes=measured.host_bytes,
        overlaps=overlaps,
        error=law.error,
    )


PASSES_MIN = 40
KNOT_TOKENS = (8, 32, 128, 512)  # new tokens at which a knot may be
KNOTS_MAX = 2
# Of computed passes, which have no noise: tiles of GEMMs begin and end at these.
COMPUTED_KNOTS = (
    *(0, 2, 4, 8, 16, 17, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384),
    *(512, 513, 768, 1024, 1025, 2048, 4096, 8192),
)
GAP_MAX = 3.0  # times the median: how much a longer gap between passes counts
# The terms of a single pass; the cost of reading caches in `cached`, or beside chunks another one.
READS = ("cached",)
READS_APART = ("cached_alone", "cached_beside")


@dataclass(frozen=True, slots=True)
class StepPasses:
    """Measured points of passes, [n]: compositions, typical seconds, and roots of weights; None:
    all weigh the same.
    """

    shapes: Sequence[StepShape]
    seconds: Floats
    root_weight: Floats | None = None

    @classmethod
    def of(cls, points: Sequence[StepPoint]) -> StepPasses:
        """Return the points, each with the weight of its samples that count."""
        counted = np.array([min(len(one.seconds), forms.SAMPLES_COUNTED_MAX) for one in points])
        seconds = np.array([forms.typical(point.seconds) for point in points])
        return cls([pipeline_fit.shape_of(point) for point in points], seconds, np.sqrt(counted))


Solve = Callable[[Floats, Floats, Floats], Floats]  # such as `forms.solve_passes`


def best_law(
    tried: Sequence[PassLaw], passes: StepPasses, seed: int, solve: Solve = forms.solve_passes
) -> tuple[PassLaw, list[Candidate]]:
    """Return the form with the least held-out error, the simplest first, fitted to all passes; and
    all forms that were tried.
    """
    seconds = passes.seconds
    root = np.ones(len(seconds)) if passes.root_weight is None else passes.root_weight
    columns = [np.array(form.columns(passes.shapes)) for form in tried]

    def held_out_s(counted: Floats) -> Floats:
        def predict(seen: Rows, rows: Rows) -> Floats:
            return counted[rows] @ solve(counted[seen], seconds[seen], root[seen])

        return forms.predict_held_out(len(seconds), predict, seed)

    predicted = [held_out_s(one) for one in columns]
    candidates = [
        Candidate(form=form.form, error=forms.percent_error(prediction, seconds))
        for form, prediction in zip(tried, predicted, strict=True)
    ]
    kept = forms.choose(predicted, seconds)
    law = tried[kept].with_values(solve(columns[kept], seconds, root).tolist())
    return replace(law, error=candidates[kept].error), candidates


def form_of(measured: StepsProfile, knots: tuple[int, ...], reads: tuple[str, ...]) -> PassLaw:
    """Return a law of the profile's model with every term at 0: a form that may be fitted."""
    groups = measured.resolved.groups if measured.resolved is not None else []
    window = window_of(groups)
    terms = ["pass", "row", "chunk", *reads, "attended", "behind"]
    terms += ["expert"] if measured.experts else []
    terms += ["inside", "attended_inside"] if window else []
    return PassLaw(
        dict.fromkeys(terms, 0.0),
        (0.0,) * len(knots),
        knots,
        experts=measured.experts,
        experts_per_token=measured.experts_per_token,
        window=window,
    )


def fit_steps(measured: StepsProfile, seed: int, *, computed: bool = False) -> StepsFit:
    """The law of a profile's passes.

    Coefficients are >= 0, by least relative squares. Where the cost of a new token changes
    (`PassLaw.knots`) is chosen by held-out error, the fewest knots first; then whether decodes
    beside chunks have a cost of their own.

    Passes that were `computed` have no noise (`_fit_computed`).

    Passes that overlap have a law of their own (`pipeline_fit`), if the profile says how they were
    launched; the error is then that law's.

    Raises `InputError` for a server that is not modelled, if there are too few passes, if passes
    with or without chunks are missing, or if a pass took no time.
    """
    if measured.resolved is not None:
        refuse("the measured server", of_resolved(measured.resolved))
    points = measured.points
    _check_passes(points)
    passes = StepPasses.of(points)
    fitted = _fit_computed(measured, passes) if computed else fit_single(measured, passes, seed)
    law, candidates = fitted
    launches: Literal["measured", "inferred", ""] = ""
    graphs = pipeline_fit.graphs_of(measured)
    if graphs is not None:
        columns = pipeline_fit.PassColumns.of(
            points, graphs, (measured.experts, measured.experts_per_token)
        )
        means = np.array([np.mean(point.seconds) for point in points])
        error = forms.percent_error(pipeline_fit.held_out_s(columns, seed), means)
        law = replace(pipeline_fit.fit_pipeline(columns), error=error)
        launches = "measured" if columns.launches.any() else "inferred"
        candidates.append(Candidate(form=law.form, error=error))
    else:
        host_s, host_row_s = _fit_host(points, math.inf if computed else GAP_MAX)
        law = law.with_terms(
            {"host": host_s, "host_row": host_row_s} if host_s + host_row_s else {}
        )
    front_s, front_row_s = fit_front(measured)
    valid = PassRange(
        rows_max=max(shape.rows for shape in passes.shapes),
        tokens_max=max(shape.tokens for shape in passes.shapes),
        cached_max=_most_cached(measured, passes, computed=computed),
    )
    return StepsFit(
        law=replace(law, valid=valid),
        candidates=candidates,
        launches=launches,
        front_s=front_s,
        front_row_s=front_row_s,
        block_tokens=measured.block_tokens,
        blocks=measured.blocks,
        async_scheduling=measured.async_scheduling,
        draft_method=measured.draft_method,
        draft_tokens=measured.draft_tokens,
        resolved=measured.resolved,
    )


def _most_cached(measured: StepsProfile, passes: StepPasses, *, computed: bool) -> int:
    """Return the cached tokens up to which the law holds. Computed passes are linear in them, so
    their law holds for a full cache.
    """
    if computed:
        return measured.blocks * measured.block_tokens
    return max(shape.decode_cached for shape in passes.shapes)


def _fit_computed(measured: StepsProfile, passes: StepPasses) -> tuple[PassLaw, list[Candidate]]:
    """Return the law of computed passes, with what its form loses of them.

    It has all knots of `COMPUTED_KNOTS` up to the longest pass, and a token may cost less than
    nothing where a tile fills up. Passes with chunks weigh as much together as passes without; a
    pass that takes `least_s` says nothing of its parts.
    """
    shapes = passes.shapes
    longest = max(shape.tokens for shape in shapes)
    knots = tuple(knot for knot in COMPUTED_KNOTS if knot < longest)
    form = form_of(measured, knots, READS_APART)
    mixed = np.array([shape.prefills > 0 for shape in shapes])
    told = ~mixed | (passes.seconds > measured.least_s)
    weight = np.sqrt(np.where(mixed, 1.0 / mixed.mean(), 1.0 / (~mixed).mean()))
    columns = np.array(form.columns(shapes))
    least = np.zeros(columns.shape[1])
    least[len(form.terms) : -1] = -np.inf  # but for the last of the new tokens
    relative = (columns * (weight / passes.seconds)[:, None])[told]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0.0] = 1.0
    found = lsq_linear(relative / scale, weight[told], (least, np.inf), method="bvls")
    coefficients = np.maximum(found.x, least) / scale  # the solver may miss a bound by its rounding
    law = replace(form.with_values(coefficients.tolist()), least_s=measured.least_s)
    predicted = np.array([law.forward_s(shape) for shape in shapes])
    error = forms.percent_error(predicted, passes.seconds)
    return replace(law, error=error), [Candidate(form=law.form, error=error)]


def fit_single(
    measured: StepsProfile, passes: StepPasses, seed: int
) -> tuple[PassLaw, list[Candidate]]:
    """Return the law of passes as if none overlapped, of the form with the least error, with that
    error and standard deviations; and all forms that were tried.
    """
    tokens_max = max(shape.tokens for shape in passes.shapes)
    places = [tokens for tokens in KNOT_TOKENS if tokens < tokens_max]
    tried = [
        form_of(measured, (0, *knots), READS)
        for count in range(KNOTS_MAX + 1)
        for knots in combinations(places, count)
    ]
    best, candidates = best_law(tried, passes, seed)
    apart = form_of(measured, best.knots, READS_APART)
    law, both = best_law([form_of(measured, best.knots, READS), apart], passes, seed)
    columns = np.array(law.columns(passes.shapes))
    values = np.array([*law.terms.values(), *law.token_s])
    std = forms.standard_deviations(columns, passes.seconds, columns @ values)
    known = {name: s for name, s in zip(law.names, std.tolist(), strict=True) if s < math.inf}
    return replace(law, std=known), [*candidates, both[-1]]


def _check_passes(points: Sequence[StepPoint]) -> None:
    if len(points) < PASSES_MIN:
        raise InputError(
            f"steps: {len(points)} passes were measured, at least {PASSES_MIN} are needed",
            MEASURE_AGAIN,
        )
    if not any(point.prefills for point in points) or all(point.prefills for point in points):
        raise InputError(
            "steps: passes with chunks of prompts and passes without are both needed", MEASURE_AGAIN
        )
    if any(not point.seconds or min(point.seconds) <= 0.0 for point in points):
        raise InputError("steps: a pass took no time", MEASURE_AGAIN)


def point_of(shape: StepShape, seconds: float) -> StepPoint:
    """A pass of this composition that took so long."""
    names = StepPoint.model_fields.keys() - {"seconds", "host_s", "idle", "launch_s"}
    return StepPoint(**{name: getattr(shape, name) for name in names}, seconds=[seconds], host_s=[])


def _fit_host(points: Sequence[StepPoint], longest: float) -> tuple[float, float]:
    """Return the seconds between passes, constant and per row. A gap counts at most `longest` times
    the median, because another program may have used the machine.
    """
    points = [point for point in points if point.host_s]
    if not points:
        return 0.0, 0.0
    rows = np.array([float(point.decodes + point.prefills) for point in points])
    gaps_s = [forms.typical(point.host_s) for point in points]
    return forms.line_in_rows(rows, np.minimum(gaps_s, longest * np.median(gaps_s)))


# How much a longer time counts: so many times the median of the times of as many rows, or the line.
OUTLIER = 3.0
FRONT_ROUNDS = 8  # of fitting and clipping
LEAST_ERROR_S = 1e-3  # of a request's time in the front: scheduling of the machine's processes
TRAFFIC_MIN = 20  # requests; fewer show nothing of a mean


def fit_front(measured: StepsProfile) -> tuple[float, float]:
    """The seconds that the front (HTTP, tokenizing, streams of tokens to clients) adds to a request
    alone, and for each row that runs: the tokens of a pass reach the one process of the front
    together, and it passes them on one by one.

    Where passes overlap it is of requests in traffic, at loads that the engine keeps up with, and
    of requests alone. Traffic of other engines goes up to what they can serve and beyond, where
    requests wait for reasons of overload: there the constant is of requests alone, and the slope of
    the way back of several at once.
    """
    alone = [point.seconds for point in measured.front if point.rows == 1]
    if measured.async_scheduling and len(measured.front_in_traffic) >= TRAFFIC_MIN:
        return _in_traffic(measured.front_in_traffic, alone)
    several = [point for point in measured.front if point.rows > 1]
    constant_s = forms.typical(alone) if alone else 0.0
    row_s = _slope(several) if alone and several else 0.0
    return constant_s, row_s


def _in_traffic(points: Sequence[TrafficFront], alone: Sequence[float]) -> tuple[float, float]:
    """The line through all requests, those alone as rows of one.

    A time on the way in is uncertain by the time between two schedules, evenly within half of it on
    either side, and weighs accordingly.
    """
    rows = np.array([*(float(point.rows) for point in points), *np.ones(len(alone))])
    seconds = np.array([*(point.in_s + point.out_s for point in points), *alone])
    uncertain_s = np.array([*(point.scheduled_s for point in points), *np.zeros(len(alone))])
    weight = 1.0 / np.sqrt(LEAST_ERROR_S**2 + uncertain_s**2 / 12)
    counted = seconds
    for _ in range(FRONT_ROUNDS):
        constant_s, row_s = forms.line_in_rows(rows, counted, weight)
        line = constant_s + row_s * rows
        counted = np.minimum(seconds, OUTLIER * line + uncertain_s / 2)
    return constant_s, row_s


def _slope(points: Sequence[FrontPoint]) -> float:
    """Seconds per row of several requests at once. Another program may have used the machine, so a
    time counts at most three times the median of the times of as many rows.
    """
    of_rows: defaultdict[int, list[float]] = defaultdict(list)
    for point in points:
        of_rows[point.rows].append(point.seconds)
    rows = np.repeat(list(of_rows), [len(times) for times in of_rows.values()])
    times_s = [np.minimum(times, OUTLIER * np.median(times)) for times in of_rows.values()]
    _, row_s = forms.line_in_rows(rows.astype(float), np.concatenate(times_s))
    return row_s
