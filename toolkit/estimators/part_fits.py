"""From memory probes to a memory law: one zeta where it explains them (SCLS paper, Eq. 9), else
rules (Algorithm 2).

A probe brackets the edge: N rows ran, M > N rows did not. In shares of the capacity, N * (L + S) /
capacity, that is an interval; zeta is where the intervals meet. Beyond the paper, and only where
that fails: a prefill's activations, which take memory in proportion to N * L.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import minimize, nnls
from scipy.special import ndtr  # of scipy.stats, which takes long to import, only this is needed

from toolkit.errors import InputError
from toolkit.estimators.forms import (
    CLIP,
    Floats,
    Rows,
    choose,
    fit_line,
    percent_error,
    predict_held_out,
    typical,
)
from toolkit.estimators.laws import SegmentedLaw, law_of_parts
from toolkit.estimators.steps import StepLaw, StepShape, features
from toolkit.files.fit import (
    BatchRule,
    Candidate,
    HeldOutError,
    MemoryFit,
    OverheadFit,
    PartFit,
    RoundsFit,
    StepRange,
    StepsFit,
    SwapFit,
)
from toolkit.files.profile import (
    EngineFacts,
    FrontPoint,
    MemoryPoint,
    PartPoint,
    Profile,
    RoundPoint,
    RoundsProfile,
    StepPoint,
    StepsProfile,
)

SLACK = 0.05  # of the edge: the rules' steps, between two probed lengths, waste more than that
WORKSPACES = np.linspace(0.0, 16.0, 321)
UNIFORM_STD = (
    12**-0.5
)  # of a uniform distribution of width 1: all that a bracket says of what lies inside


@dataclass(slots=True, frozen=True)
class _Probes:
    """The probes as arrays [n]; `failed` is infinite where the edge was not reached."""

    length: Floats
    steps: Floats
    ran: Floats
    failed: Floats

    def shares(self, workspace: float, capacity: int) -> tuple[Floats, Floats, Floats]:
        """What one row takes of the capacity, and the interval [low, high) in which the edge lies."""
        row = (self.length * (1.0 + workspace) + self.steps) / capacity
        return row, self.ran * row, self.failed * row


def fit_memory(probes: Sequence[MemoryPoint], engine: EngineFacts) -> MemoryFit:
    """The memory law that the probes show: zeta alone, zeta with a prefill's workspace, or rules.

    The first that explains them is taken: that is off by at most one row or 5 % everywhere. Raises
    `InputError` without probes, where one contradicts itself, or where not even one row ever ran. A
    server is not probed: its capacity is what it says.
    """
    if engine.is_server:
        return MemoryFit(
            form="zeta",
            capacity_tokens=engine.capacity_tokens,
            kv_bytes_per_token=engine.kv_bytes_per_token,
            zeta=1.0,
            zeta_std=0.0,
        )
    _check_probes(probes)
    found = _Probes(
        length=np.array([probe.input_length for probe in probes], dtype=float),
        steps=np.array([probe.steps for probe in probes], dtype=float),
        ran=np.array([probe.largest_ok for probe in probes], dtype=float),
        failed=np.array([np.inf if p.smallest_oom is None else p.smallest_oom for p in probes]),
    )
    capacity = engine.capacity_tokens
    for workspace in (0.0, _likeliest_workspace(found, capacity)):
        row, low, high = found.shares(workspace, capacity)
        slack = np.maximum(row, SLACK * np.median(low))
        explained = np.max(low - slack) < np.min(high + slack)
        if explained:
            break
    rules = [] if explained else _rules(found.length + found.steps, found.ran, engine.max_model_len)
    zeta, std = _edge(low, high)
    return MemoryFit(
        form="zeta" if explained else "rules",
        capacity_tokens=capacity,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        zeta=zeta,
        zeta_std=std if explained else _bracket_std(found.ran, found.failed),
        workspace=workspace if explained else 0.0,
        rules=rules,
    )


def _likeliest_workspace(found: _Probes, capacity: int) -> float:
    """The workspace under which the probes' intervals overlap most, or miss one another least."""

    def gap(workspace: float) -> float:
        _, low, high = found.shares(workspace, capacity)
        return float(low.max() / high.min())

    return float(min(WORKSPACES, key=gap))


def _edge(low: Floats, high: Floats) -> tuple[float, float]:
    """Mean and standard deviation of an edge that lies in each [low, high), in shares of the
    capacity.

    Where all intervals meet, the edge is in what they share. Where they do not, it differs from
    length to length, and its likeliest normal distribution is taken. Where no probe ran out, it is
    known only to be beyond the largest.
    """
    if np.all(np.isinf(high)):
        return float(low.max()), 0.0
    shared_low, shared_high = float(low.max()), float(high.min())
    if shared_low < shared_high:
        return (shared_low + shared_high) / 2, (shared_high - shared_low) * UNIFORM_STD
    middle = np.where(np.isinf(high), low, (low + high) / 2)

    def unlikelihood(at: Floats) -> float:
        mean, std = at[0], np.exp(at[1])
        inside = ndtr((high - mean) / std) - ndtr((low - mean) / std)
        return float(-np.log(np.maximum(inside, 1e-300)).sum())

    start = np.array([middle.mean(), np.log(middle.std() + 1e-3)])
    found = minimize(unlikelihood, start, method="Nelder-Mead")
    return float(found.x[0]), float(np.exp(found.x[1]))


def _rules(totals: Floats, ran: Floats, max_model_len: int) -> list[BatchRule]:
    """Algorithm 2's table: up to each probed L + S, as many rows as ran there, and never more than
    at a shorter one.

    Beyond the longest probe, rows shrink as if the tokens that fitted there were all there is.
    """
    order = np.lexsort((ran, totals))
    totals, limits = totals[order], np.minimum.accumulate(ran[order])
    bounds = [0, *totals[:-1].astype(int).tolist()]
    rules: list[BatchRule] = []
    for bound, limit in zip(bounds, limits.astype(int).tolist(), strict=True):
        if not rules or rules[-1].max_batch_size != limit:
            rules.append(BatchRule(length_above=bound, max_batch_size=limit))
    longest = int(totals[-1])
    if longest < max_model_len:
        rules.append(
            BatchRule(
                length_above=longest, max_batch_size=int(limits[-1] * longest / max_model_len)
            )
        )
    return rules[::-1]


def _bracket_std(ran: Floats, failed: Floats) -> float:
    """How far, relative to the rule, a limit may lie from the batch size that ran: 0 where the next
    one failed.
    """
    known = np.isfinite(failed) & (ran > 0)
    return (
        float(np.mean((failed[known] - 1 - ran[known]) / ran[known]) * UNIFORM_STD)
        if known.any()
        else 0.0
    )


def _check_probes(probes: Sequence[MemoryPoint]) -> None:
    remedy = "set profile.memory_lengths in the recipe; then: llmctl profile RECIPE"
    if not probes:
        raise InputError("memory: no length was probed, at least 1 is needed", remedy)
    for probe in probes:
        if probe.smallest_oom is not None and probe.smallest_oom <= probe.largest_ok:
            found = f"{probe.largest_ok} rows ran and {probe.smallest_oom} ran out of memory"
            raise InputError(
                f"memory at L={probe.input_length}: {found}",
                "measure again with: llmctl profile RECIPE",
            )
    if all(probe.largest_ok == 0 for probe in probes):
        shortest = min(probe.input_length for probe in probes)
        raise InputError(
            f"memory: not even one row of {shortest} tokens ran", "give the engine more KV cache"
        )


# From measured rounds to their law: parts, what dispatch and busy neighbours add, memory, the way
# to host memory.
#
# Each part's terms compete on held-out error, the fewest first: a term that the data do not show
# is not there.

FLAT, ROW, TOKEN = range(3)  # columns: 1, rows, rows * length
TERMS = ((ROW,), (TOKEN,), (FLAT, ROW), (FLAT, TOKEN), (ROW, TOKEN), (FLAT, ROW, TOKEN))
ROUND_POINTS_MIN = 5  # as many as there are held-out parts
RESOLUTION_S = 1e-7
FASTEST = 1e15  # bytes per second of a transfer that takes no time
NOTHING = HeldOutError(median_percent=0.0, p95_percent=0.0, worst_percent=0.0, points=0)
REMEDY = "measure again with: llmctl profile RECIPE"


@dataclass(slots=True, frozen=True)
class FittedRounds:
    """What a fit file holds of rounds, and of the way to host memory."""

    rounds: RoundsFit
    swap: SwapFit | None


def fit_rounds(profile: Profile, law: SegmentedLaw, seed: int) -> FittedRounds | None:
    """The law of a profile's rounds over the engine's `law`; None where it has none.

    Raises `InputError` where there are too few points of a part, sequences of rounds, or no probe of memory.
    """
    measured = profile.rounds
    if measured is None:
        return None
    join, leave = (_fit_part(name, _of_part(measured, name), seed) for name in ("join", "leave"))
    grow = _fit_part("grow", _of_part(measured, "grow"), seed)
    overhead = fit_round_overhead(
        sequences_of(measured), law_of_parts(law, join, leave, grow), seed
    )
    share = _usable_tokens(measured) / profile.engine.capacity_tokens
    rounds = RoundsFit(join=join, leave=leave, grow=grow, overhead=overhead, usable_share=share)
    swap = fit_swap(
        measured, profile.engine.kv_bytes_per_token, seed, overlaps=profile.engine.device != "cpu"
    )
    return FittedRounds(rounds, swap)


Sequences = Sequence[Sequence[RoundPoint]]


def sequences_of(measured: RoundsProfile) -> list[list[RoundPoint]]:
    """The rounds of each sequence, but for those in which nothing was done."""
    found = ([point for point in sequence.rounds if point.rows] for sequence in measured.sequences)
    return [rounds for rounds in found if rounds]


def fit_round_overhead(sequences: Sequences, law: SegmentedLaw, seed: int) -> OverheadFit:
    """What rounds take over the law of their parts, and the held-out error of whole sequences.

    A round lasts some hundredths of a second, in which a shared machine shows one of its moments; a
    sequence has many.
    """
    if len(sequences) < ROUND_POINTS_MIN:
        raise InputError(
            f"rounds: {len(sequences)} sequences were measured, at least {ROUND_POINTS_MIN} are needed",
            "raise profile.sequences in the recipe; then: llmctl profile RECIPE",
        )
    times = [_times(rounds, law) for rounds in sequences]
    if min(each.min() for each in times) <= 0.0:
        raise InputError("rounds: one took no time", REMEDY)

    def predict(seen: Rows, rows: Rows) -> Floats:
        batch_s, stretch = _line([times[k] for k in seen])
        return np.array([batch_s * times[k].shape[1] + stretch * times[k][0].sum() for k in rows])

    totals = np.array([each[1].sum() for each in times])
    error = percent_error(predict_held_out(len(times), predict, seed), totals)
    batch_s, stretch = _line(times)
    return OverheadFit(batch_s=batch_s, stretch=stretch, error=error)


def refit_round_overhead(sequences: Sequences, law: SegmentedLaw) -> tuple[float, float]:
    """batch_s and stretch of sequences that were checked before, without the held-out error."""
    return _line([_times(rounds, law) for rounds in sequences])


def _times(rounds: Sequence[RoundPoint], law: SegmentedLaw) -> Floats:
    """[2, n]: what the law says of each round, and what it took."""
    return np.array(
        [[round_s(point, law) for point in rounds], [point.seconds for point in rounds]]
    )


def _line(times: Sequence[Floats]) -> tuple[float, float]:
    """batch_s and stretch: the line of the usual round, raised to the mean, which serving pays (as
    `typical` does).
    """
    expected, seconds = np.concatenate(times, axis=1)
    batch_s, stretch = fit_line(expected, seconds)
    usual = batch_s + stretch * expected
    mean = float(np.minimum(seconds, CLIP * usual).sum() / usual.sum())
    return batch_s * mean, stretch * mean


def round_s(point: RoundPoint, law: SegmentedLaw) -> float:
    """What the law of a round's parts says of it."""
    seconds = sum(law.prefill_s(rows, length) for rows, length in point.groups)
    if point.steps:
        seconds += law.decode_s(point.rows, point.cached_length, point.steps)
    return seconds + point.left * law.leave_s(point.cached_length + point.steps)


def _of_part(measured: RoundsProfile, part: str) -> list[PartPoint]:
    return [point for point in measured.parts if point.part == part]


def _fit_part(name: str, points: Sequence[PartPoint], seed: int) -> PartFit:
    """The terms of a part, by held-out error. A part that takes no time that could be measured has
    none.
    """
    if len(points) < ROUND_POINTS_MIN:
        raise InputError(
            f"rounds: {len(points)} points of '{name}' measured, at least {ROUND_POINTS_MIN} are needed",
            REMEDY,
        )
    seconds = np.array([typical(point.seconds) for point in points])
    if seconds.min() <= RESOLUTION_S:
        return PartFit(flat_s=0.0, row_s=0.0, token_s=0.0, error=NOTHING)
    # A move of the cache concerns all rows; whoever joins or leaves does so beside the others.
    rows = np.array(
        [point.rows + (point.others if name == "grow" else 0) for point in points], dtype=float
    )
    columns = np.stack(
        [np.ones(len(points)), rows, rows * [point.length for point in points]], axis=1
    )

    def held_out(terms: tuple[int, ...]) -> Floats:
        chosen = columns[:, terms]
        return predict_held_out(
            len(points),
            lambda seen, at: chosen[at] @ _solve_rounds(chosen[seen], seconds[seen]),
            seed,
        )

    predicted = [held_out(terms) for terms in TERMS]
    kept = choose([np.abs(one / seconds - 1.0) for one in predicted])
    coefficients = np.zeros(3)
    coefficients[list(TERMS[kept])] = _solve_rounds(columns[:, TERMS[kept]], seconds)
    flat_s, row_s, token_s = coefficients.tolist()
    return PartFit(
        flat_s=flat_s, row_s=row_s, token_s=token_s, error=percent_error(predicted[kept], seconds)
    )


def _solve_rounds(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 with the least sum of squared relative residuals."""
    relative = columns / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    found, _ = nnls(relative / scale, np.ones(len(seconds)))
    return np.asarray(found / scale, dtype=np.float64)


def _usable_tokens(measured: RoundsProfile) -> int:
    """Rows x the longest that ran at every probed length, with the last one's prefill beside the
    others.
    """
    if not measured.memory:
        raise InputError(
            "rounds: memory was not probed",
            "set profile.memory_lengths in the recipe, and " + REMEDY,
        )
    usable = min(probe.largest_ok * (probe.input_length + probe.steps) for probe in measured.memory)
    if not usable:
        raise InputError(
            "rounds: not even one row ran at some length", "give the engine more KV cache"
        )
    return usable


def fit_swap(
    measured: RoundsProfile, bytes_per_token: int, seed: int, *, overlaps: bool = True
) -> SwapFit | None:
    """One latency for both ways, and a rate for each; `overlaps` as in `SwapFit`."""
    points = [point for point in measured.parts if point.part in ("swap_out", "swap_in")]
    if len(points) < ROUND_POINTS_MIN or not measured.host_bytes:
        return None
    seconds = np.array([typical(point.seconds) for point in points])
    if seconds.min() <= 0.0:
        return None
    rows = np.array([float(point.rows) for point in points])
    sizes = np.array([float(point.rows * point.length * bytes_per_token) for point in points])
    out = np.array([point.part == "swap_out" for point in points])
    columns = np.stack([rows, sizes * out, sizes * ~out], axis=1)
    error = percent_error(
        predict_held_out(
            len(points),
            lambda seen, at: columns[at] @ _solve_rounds(columns[seen], seconds[seen]),
            seed,
        ),
        seconds,
    )
    latency_s, out_s, in_s = _solve_rounds(columns, seconds).tolist()
    return SwapFit(
        latency_s=latency_s,
        out_bytes_per_s=1.0 / max(out_s, 1.0 / FASTEST),
        in_bytes_per_s=1.0 / max(in_s, 1.0 / FASTEST),
        host_bytes=measured.host_bytes,
        overlaps=overlaps,
        error=error,
    )


# From measured forward passes to the law of a paged engine's pass: coefficients >= 0, by least
# relative squares.
#
# Where the cost of a new token changes (`StepLaw.knots`) competes on held-out error, the fewest
# knots first. A pass is seen once: what disturbed it counts up to half of it, and the law is then
# raised to the mean, which serving pays.

PASS_POINTS_MIN = 40
PLACES = (8, 32, 128, 512)  # tokens at which a knot may be
KNOTS_MAX = 2
ROUNDS = 4  # of fitting and clipping


def fit_steps(measured: StepsProfile | None, seed: int) -> StepsFit | None:
    """The law of a profile's passes; None where they were not seen.

    Raises `InputError` where there are too few of them, or of those without chunks, or one that took no time.
    """
    if measured is None:
        return None
    points = measured.points
    _check_passes(points)
    shapes = [shape_of(point) for point in points]
    seconds = np.array([typical(point.seconds) for point in points])
    weight = np.sqrt([min(len(point.seconds), 16) for point in points])
    tried = _knots(max(shape.tokens for shape in shapes))
    columns = [np.array([features(shape, knots) for shape in shapes]) for knots in tried]
    predicted = [_held_out(each, seconds, weight, seed) for each in columns]
    kept = choose([np.abs(one / seconds - 1.0) for one in predicted])
    law = StepLaw.of(_solve_passes(columns[kept], seconds, weight).tolist(), tried[kept])
    host_s, host_row_s = _host(points)
    front_s, front_row_s = _front(measured.front)
    errors = [percent_error(one, seconds) for one in predicted]
    return StepsFit(
        base_s=law.base_s,
        row_s=law.row_s,
        prefill_s=law.prefill_s,
        cached_s=law.cached_s,
        attended_s=law.attended_s,
        token_s=list(law.token_s),
        knots=list(law.knots),
        host_s=host_s,
        host_row_s=host_row_s,
        error=errors[kept],
        candidates=[
            Candidate(form=f"knots {', '.join(map(str, knots))}", error=error)
            for knots, error in zip(tried, errors, strict=True)
        ],
        valid=StepRange(
            rows_max=max(shape.rows for shape in shapes),
            tokens_max=max(shape.tokens for shape in shapes),
            cached_max=max(shape.decode_cached for shape in shapes),
        ),
        front_s=front_s,
        front_row_s=front_row_s,
        block_tokens=measured.block_tokens,
        blocks=measured.blocks,
        async_scheduling=measured.async_scheduling,
    )


def shape_of(point: StepPoint) -> StepShape:
    """The composition of a measured pass."""
    return StepShape(
        point.decodes,
        round(point.decode_cached),
        point.prefills,
        point.prefill_tokens,
        point.prefill_attended,
    )


def _knots(tokens_max: int) -> list[tuple[int, ...]]:
    places = [place for place in PLACES if place < tokens_max]
    return [
        (0, *chosen) for count in range(KNOTS_MAX + 1) for chosen in combinations(places, count)
    ]


def _held_out(columns: Floats, seconds: Floats, weight: Floats, seed: int) -> Floats:
    def predict(seen: Rows, rows: Rows) -> Floats:
        return np.asarray(
            columns[rows] @ _solve_passes(columns[seen], seconds[seen], weight[seen]),
            dtype=np.float64,
        )

    return predict_held_out(len(seconds), predict, seed)


def _solve_passes(columns: Floats, seconds: Floats, weight: Floats) -> Floats:
    """Coefficients >= 0 of the usual pass, raised to the mean of passes none of which counts beyond
    1.5 times that.
    """
    clipped, found = seconds, np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        found = _least_squares(columns, clipped, weight)
        usual = columns @ found
        clipped = np.minimum(seconds, CLIP * usual)
    weights = np.square(weight)
    return np.asarray(
        found * float((weights * clipped).sum() / (weights * usual).sum()), dtype=np.float64
    )


def _least_squares(columns: Floats, seconds: Floats, weight: Floats) -> Floats:
    relative = columns * (weight / seconds)[:, None]
    scale = np.linalg.norm(relative, axis=0)
    scale[scale == 0.0] = 1.0
    found, _ = nnls(relative / scale, weight)
    return np.asarray(found / scale, dtype=np.float64)


def _host(points: Sequence[StepPoint]) -> tuple[float, float]:
    """Flat and per row. A gap in which somebody else had the machine counts as three usual ones."""
    rows = np.array(
        [point.decodes + point.prefills for point in points if point.host_s], dtype=float
    )
    if not len(rows):
        return 0.0, 0.0
    seconds = np.array([typical(point.host_s) for point in points if point.host_s])
    seconds = np.minimum(seconds, 3.0 * np.median(seconds))
    found, _ = nnls(np.stack([np.ones(len(rows)), rows], axis=1), seconds)
    return float(found[0]), float(found[1])


def _front(points: Sequence[FrontPoint]) -> tuple[float, float]:
    """What a first token takes there and back for a request alone, and what other rows add to the
    way back.
    """
    alone = [point.seconds for point in points if point.rows == 1]
    if not alone:
        return 0.0, 0.0
    several = [point for point in points if point.rows > 1]
    rows = np.array([point.rows for point in several], dtype=float)
    seconds = np.array([point.seconds for point in several])
    if not len(several):
        return typical(alone), 0.0
    found, _ = nnls(
        np.stack([np.ones(len(rows)), rows], axis=1), np.minimum(seconds, 3.0 * np.median(seconds))
    )
    return typical(alone), float(found[1])


def _check_passes(points: Sequence[StepPoint]) -> None:
    if len(points) < PASS_POINTS_MIN:
        raise InputError(
            f"steps: {len(points)} passes were measured, at least {PASS_POINTS_MIN} are needed",
            REMEDY,
        )
    if not any(point.prefills for point in points) or all(point.prefills for point in points):
        raise InputError(
            "steps: passes with chunks of prompts and passes without are both needed", REMEDY
        )
    if any(not point.seconds or min(point.seconds) <= 0.0 for point in points):
        raise InputError("steps: a pass took no time", REMEDY)
