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

A term that the data do not show is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from toolkit.catalogue.caches import read_tokens
from toolkit.errors import InputError
from toolkit.estimators.laws import LinearLaw, law_of_parts
from toolkit.estimators.least_squares import (
    HELD_OUT_PARTS,
    MEASURE_AGAIN,
    SAMPLES_COUNTED_MAX,
    Floats,
    fit_overhead,
    fit_terms,
    line_in_rows,
    solve_passes,
    solve_relative,
    typical,
    typical_seconds,
)
from toolkit.estimators.pipeline_fit import PassSequence, fit_pipeline, graphs_of, shape_of
from toolkit.files.fit import BatchRule, MemoryFit, RoundsFit, StepsFit, SwapFit
from toolkit.files.profile import (
    EngineFacts,
    MemoryPoint,
    Profile,
    RoundPoint,
    RoundsProfile,
    StepPoint,
    StepsProfile,
)
from toolkit.laws.features import StepShape
from toolkit.laws.passes import PassLaw, PassRange

TERMS = ("pass", "row", "chunk", "cached_alone", "cached_beside", "attended", "behind")

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
    law = partial(MemoryFit, capacity_tokens=capacity, kv_bytes_per_token=engine.kv_bytes_per_token)
    if engine.is_server:
        return law(form="zeta", zeta=1.0, zeta_std=0.0)
    _check_probes(probes)
    length: Floats = np.array([probe.input_length for probe in probes], dtype=float)
    steps: Floats = np.array([probe.steps for probe in probes], dtype=float)
    ran = np.array([probe.largest_ok for probe in probes], dtype=float)
    # infinite where the edge was not reached
    failed = np.array([np.inf if p.smallest_oom is None else p.smallest_oom for p in probes])

    def edges(workspace: float) -> tuple[Floats, Floats, Floats]:
        """Return the shares of a row, of the rows that ran, and of the rows that ran out."""
        row = (length * (1.0 + workspace) + steps) / capacity
        return row, ran * row, failed * row

    def gap(workspace: float) -> float:
        """Return how far apart the intervals of the edge are; below 1 they overlap."""
        _, low, high = edges(workspace)
        return float(low.max() / high.min())

    for workspace in (0.0, float(min(WORKSPACES, key=gap))):
        row, low, high = edges(workspace)
        tolerance = np.maximum(row, EDGE_TOLERANCE * np.median(low))
        zeta, std = _edge(float(low.max()), float(high.min()))
        if np.max(low - tolerance) < np.min(high + tolerance):
            return law(form="zeta", zeta=zeta, zeta_std=std, workspace=workspace)
    # A limit differs from the batch size that ran where the next larger batch was not tried.
    known = np.isfinite(failed) & (ran > 0)
    widths = (failed[known] - 1 - ran[known]) / ran[known]
    std = float(widths.mean() * UNIFORM_STD) if known.any() else 0.0
    return law(
        form="rules",
        zeta=zeta,
        zeta_std=std,
        rules=_rules(length + steps, ran, engine.max_model_len),
    )


def _check_probes(probes: Sequence[MemoryPoint]) -> None:
    for probe in probes:
        if probe.smallest_oom is not None and probe.smallest_oom <= probe.largest_ok:
            both = f"{probe.largest_ok} rows ran and {probe.smallest_oom} ran out of memory"
            raise InputError(f"memory at L={probe.input_length}: {both}", MEASURE_AGAIN)
    if not any(probe.largest_ok for probe in probes):
        lengths = ", ".join([str(probe.input_length) for probe in probes]) or "none"
        raise InputError(
            f"memory: not even one row ran; probed lengths: {lengths}",
            "give the engine more KV cache, or set profile.memory_lengths in the recipe; then: "
            "llmctl profile RECIPE",
        )


def _edge(low: float, high: float) -> tuple[float, float]:
    """Return the mean and the standard deviation of the edge, in shares of the capacity, given the
    largest share that ran and the least that did not: evenly distributed between both.

    `low` is above `high` where the edge differs from length to length. If no probe ran out of
    memory, `high` is infinite, and the edge is the largest share that ran.
    """
    if np.isinf(high):
        return low, 0.0
    return (low + high) / 2, abs(high - low) * UNIFORM_STD


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


PART_TERMS = {
    "join": ("pass", "row", "token"),
    "leave": ("row", "cached"),
    "grow": ("pass", "row", "cached"),
}
PART_SECONDS_MIN = 1e-7  # a part that takes less is not measurable
BYTES_PER_S_MAX = 1e15  # of a transfer that takes no measurable time


def fit_rounds(
    profile: Profile, law: LinearLaw, seed: int
) -> tuple[RoundsFit | None, SwapFit | None]:
    """The laws of a profile's rounds, given the engine's `law`, and of the link to host memory;
    None where the profile has none.

    Raises `InputError` if there are too few points of a part, too few sequences of rounds, or no
    memory probes.
    """
    measured = profile.rounds
    if measured is None:
        return None, None
    join, leave, grow = (_fit_part(name, measured, seed) for name in PART_TERMS)
    times = _times_by_sequence(measured, law_of_parts(law, join, leave, grow))
    overhead = fit_overhead(times, seed)
    # Rows times the longest row's tokens that ran at every probed length, with the last row
    # prefilled while the others held their caches.
    tokens = [p.largest_ok * (p.input_length + p.steps) for p in measured.memory]
    usable = min(tokens, default=0)
    if not usable:
        raise InputError(
            f"rounds: memory was probed at {len(tokens)} lengths, and not each ran a row",
            "give the engine more KV cache, or set profile.memory_lengths in the recipe",
        )
    share = usable / profile.engine.capacity_tokens
    rounds = RoundsFit(join=join, leave=leave, grow=grow, overhead=overhead, usable_share=share)
    swap = fit_swap(
        measured, profile.engine.kv_bytes_per_token, seed, overlaps=profile.engine.device != "cpu"
    )
    return rounds, swap


def _times_by_sequence(measured: RoundsProfile, law: LinearLaw) -> list[Floats]:
    """Return, of each sequence, the seconds of its rounds by the law of their parts, and as
    measured: [2, n]. Rounds without rows are left out.

    Sequences are held out whole, because a round lasts only some hundredths of a second, and so
    shows one momentary speed of a shared machine; a sequence shows many.
    """

    def expected_s(point: RoundPoint) -> float:
        seconds = sum(law.prefill_s(rows, length) for rows, length in point.groups)
        if point.steps:
            seconds += law.decode_s(point.rows, point.cached_length, point.steps)
        return seconds + point.left * law.leave_s(point.cached_length + point.steps)

    sequences = [[p for p in sequence.rounds if p.rows] for sequence in measured.sequences]
    times = []
    for rounds in filter(None, sequences):
        seconds = typical_seconds(("rounds: a round", [point.seconds]) for point in rounds)
        times.append(np.array([[expected_s(point) for point in rounds], seconds]))
    if len(times) < HELD_OUT_PARTS:
        raise InputError(
            f"rounds: {len(times)} sequences were measured, at least {HELD_OUT_PARTS} are needed",
            "raise profile.sequences in the recipe; then: llmctl profile RECIPE",
        )
    return times


def _fit_part(name: str, measured: RoundsProfile, seed: int) -> PassLaw:
    """Return the law of a part of rounds. Newcomers compute their tokens, other rows have them
    cached.
    """
    points = [point for point in measured.parts if point.part == name]
    if len(points) < HELD_OUT_PARTS:
        raise InputError(
            f"rounds: {len(points)} points of '{name}' measured, at least "
            f"{HELD_OUT_PARTS} are needed",
            MEASURE_AGAIN,
        )
    seconds = np.maximum([typical(point.seconds) for point in points], PART_SECONDS_MIN)
    shapes = []
    for point in points:
        # A move of the cache affects all rows. A join or a leave affects only its own rows.
        rows = point.rows + (point.others if name == "grow" else 0)
        both = rows, rows * point.length
        shapes.append(StepShape(0, 0, *both) if name == "join" else StepShape(*both))
    form = PassLaw(dict.fromkeys(PART_TERMS[name], 0.0))
    return fit_terms(form, shapes, seconds, seed)


def fit_swap(
    measured: RoundsProfile, bytes_per_token: int, seed: int, *, overlaps: bool = True
) -> SwapFit | None:
    """The link to host memory: one latency for both directions, and a rate for each.

    `overlaps` as in `SwapFit`. None if swaps were not measured, took no time, or had no host
    memory.
    """
    points = [point for point in measured.parts if point.part in ("swap_out", "swap_in")]
    if len(points) < HELD_OUT_PARTS or not measured.host_bytes:
        return None
    seconds = np.array([typical(point.seconds) for point in points])
    if seconds.min() <= 0.0:
        return None
    shapes = [  # out: cached tokens of decodes; in: cached tokens before chunks
        StepShape(point.rows, point.rows * point.length)
        if point.part == "swap_out"
        else StepShape(0, 0, point.rows, prefill_cached=point.rows * point.length)
        for point in points
    ]
    form = PassLaw({"row": 0.0, "cached": 0.0, "behind": 0.0})
    law = fit_terms(form, shapes, seconds, seed)
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
KNOTS = (0, 8, 32, 128, 512)  # of new tokens
# Of computed passes, which have no noise: tiles of GEMMs begin and end at these.
COMPUTED_KNOTS = (
    *(0, 2, 4, 8, 16, 17, 32, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384),
    *(512, 513, 768, 1024, 1025, 2048, 4096, 8192),
)


def form_of(measured: StepsProfile, knots: tuple[int, ...]) -> PassLaw:
    """Return a law of the profile's model with every term at 0: a form that may be fitted. It has
    the knots that some pass exceeds.

    Decodes beside chunks read their caches at a cost of their own.
    """
    longest = max(shape_of(point).tokens for point in measured.points)
    knots = tuple(knot for knot in knots if knot < longest)
    resolved = measured.resolved
    window = read_tokens(resolved.groups, resolved.index_topk) if resolved is not None else 0
    terms = [*TERMS]
    terms += ["expert"] if measured.experts else []
    terms += ["inside", "attended_inside"] if window else []
    return PassLaw(
        dict.fromkeys(terms, 0.0),
        (0.0,) * len(knots),
        knots,
        measured.least_s,
        experts=measured.experts,
        experts_per_token=measured.experts_per_token,
        window=window,
    )


def fit_steps(measured: StepsProfile, seed: int, *, computed: bool = False) -> StepsFit:
    """Return the law of a profile's passes.

    Coefficients are >= 0, by least relative squares; the cost of a new token changes at `KNOTS`.
    Passes that overlap have a law of their own (`pipeline_fit`), if the profile says how they were
    launched.

    Raises InputError if there are too few passes, if passes with or without chunks are missing, or
    if a pass took no time.
    """
    points = measured.points
    _check_passes(points)
    shapes = [shape_of(point) for point in points]
    seconds = typical_seconds(("steps: a pass", point.seconds) for point in points)
    graphs = graphs_of(measured)
    launches: Literal["measured", "inferred", ""] = ""
    if graphs is not None:
        passes = PassSequence.of(measured, graphs)
        law = fit_pipeline(passes, seed)
        launches = "measured" if passes.launches.any() else "inferred"
    elif computed:
        law = _fit_computed(measured, shapes, seconds, seed)
    else:
        weight = np.sqrt([min(len(point.seconds), SAMPLES_COUNTED_MAX) for point in points])
        law = fit_terms(form_of(measured, KNOTS), shapes, seconds, seed, solve_passes, weight)
    if graphs is None:
        law = law.with_terms(_host_terms(points))
    front_s, front_row_s = fit_front(measured)
    # Computed passes are linear in cached tokens, so their law holds for a full cache.
    full = measured.blocks * measured.block_tokens
    valid = PassRange(
        rows_max=max(shape.rows for shape in shapes),
        tokens_max=max(shape.tokens for shape in shapes),
        cached_max=full if computed else max(shape.decode_cached for shape in shapes),
    )
    return StepsFit(
        law=replace(law, valid=valid),
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


def _fit_computed(
    measured: StepsProfile, shapes: list[StepShape], seconds: Floats, seed: int
) -> PassLaw:
    """Return the law of computed passes, with what its form loses of them.

    They have no noise, so a token may cost less than nothing where a tile fills up. Passes with
    chunks weigh as much together as passes without; a pass that takes `least_s` says nothing of its
    parts.
    """
    form = form_of(measured, COMPUTED_KNOTS)
    tokens = slice(len(form.terms), -1)  # new tokens, but for the last of them
    mixed = np.array([shape.prefills > 0 for shape in shapes])
    told = ~mixed | (seconds > measured.least_s)
    weight = told * np.sqrt(np.where(mixed, 1.0 / mixed.mean(), 1.0 / (~mixed).mean()))
    return fit_terms(form, shapes, seconds, seed, partial(solve_relative, free=tokens), weight)


def _check_passes(points: Sequence[StepPoint]) -> None:
    chunks = sum(point.prefills > 0 for point in points)
    if len(points) < PASSES_MIN or chunks in (0, len(points)):
        raise InputError(
            f"steps: {len(points)} passes were measured, {chunks} with chunks of prompts; at least "
            f"{PASSES_MIN} are needed, some with chunks and some without",
            MEASURE_AGAIN,
        )


def _host_terms(points: Sequence[StepPoint]) -> dict[str, float]:
    """Return the terms of the seconds between passes; none where the host takes no time."""
    gaps = [(one.decodes + one.prefills, typical(one.host_s)) for one in points if one.host_s]
    if not gaps:
        return {}
    host_s, host_row_s = line_in_rows(gaps)
    return {"host": host_s, "host_row": host_row_s} if host_s + host_row_s else {}


def point_of(shape: StepShape, seconds: float) -> StepPoint:
    """Return a pass of this composition that took so long."""
    names = StepPoint.model_fields.keys() - {"seconds", "host_s", "idle", "launch_s"}
    return StepPoint(**{name: getattr(shape, name) for name in names}, seconds=[seconds], host_s=[])


def fit_front(measured: StepsProfile) -> tuple[float, float]:
    """Return the seconds that the front (HTTP, tokenizing, streams of tokens to clients) adds to a
    request alone, and for each row that runs: the tokens of a pass reach the one process of the
    front together, and it passes them on one by one.

    The constant is of requests alone, and the slope of the way back of several at once.
    """
    alone = [point.seconds for point in measured.front if point.rows == 1]
    several = [(point.rows, point.seconds) for point in measured.front if point.rows > 1]
    if not alone or not several:
        return (typical(alone) if alone else 0.0), 0.0
    return typical(alone), line_in_rows(several)[1]
