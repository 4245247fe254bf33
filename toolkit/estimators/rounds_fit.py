"""From measured rounds to their law: parts, what dispatch and busy neighbours add, memory, the way to host memory.

Each part's terms compete on held-out error, the fewest first: a term that the data do not show is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from toolkit.errors import InputError
from toolkit.estimators.forms import CLIP, typical
from toolkit.estimators.held_out import Floats, Rows, choose, percent_error, predict_held_out
from toolkit.estimators.laws import SegmentedLaw
from toolkit.estimators.overhead import fit_line
from toolkit.estimators.rounds import law_of_parts
from toolkit.files.fit import HeldOutError, OverheadFit, PartFit, RoundsFit, SwapFit
from toolkit.files.profile import PartPoint, Profile, RoundPoint, RoundsProfile

FLAT, ROW, TOKEN = range(3)  # columns: 1, rows, rows * length
TERMS = ((ROW,), (TOKEN,), (FLAT, ROW), (FLAT, TOKEN), (ROW, TOKEN), (FLAT, ROW, TOKEN))
POINTS_MIN = 5  # as many as there are held-out parts
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
    overhead = fit_round_overhead(sequences_of(measured), law_of_parts(law, join, leave, grow), seed)
    share = _usable_tokens(measured) / profile.engine.capacity_tokens
    rounds = RoundsFit(join=join, leave=leave, grow=grow, overhead=overhead, usable_share=share)
    swap = fit_swap(measured, profile.engine.kv_bytes_per_token, seed, overlaps=profile.engine.device != "cpu")
    return FittedRounds(rounds, swap)


Sequences = Sequence[Sequence[RoundPoint]]


def sequences_of(measured: RoundsProfile) -> list[list[RoundPoint]]:
    """The rounds of each sequence, but for those in which nothing was done."""
    found = ([point for point in sequence.rounds if point.rows] for sequence in measured.sequences)
    return [rounds for rounds in found if rounds]


def fit_round_overhead(sequences: Sequences, law: SegmentedLaw, seed: int) -> OverheadFit:
    """What rounds take over the law of their parts, and the held-out error of whole sequences.

    A round lasts some hundredths of a second, in which a shared machine shows one of its moments; a sequence has many.
    """
    if len(sequences) < POINTS_MIN:
        raise InputError(
            f"rounds: {len(sequences)} sequences were measured, at least {POINTS_MIN} are needed",
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
    return np.array([[round_s(point, law) for point in rounds], [point.seconds for point in rounds]])


def _line(times: Sequence[Floats]) -> tuple[float, float]:
    """batch_s and stretch: the line of the usual round, raised to the mean, which serving pays (as `typical` does)."""
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
    """The terms of a part, by held-out error. A part that takes no time that could be measured has none."""
    if len(points) < POINTS_MIN:
        raise InputError(f"rounds: {len(points)} points of '{name}' measured, at least {POINTS_MIN} are needed", REMEDY)
    seconds = np.array([typical(point.seconds) for point in points])
    if seconds.min() <= RESOLUTION_S:
        return PartFit(flat_s=0.0, row_s=0.0, token_s=0.0, error=NOTHING)
    # A move of the cache concerns all rows; whoever joins or leaves does so beside the others.
    rows = np.array([point.rows + (point.others if name == "grow" else 0) for point in points], dtype=float)
    columns = np.stack([np.ones(len(points)), rows, rows * [point.length for point in points]], axis=1)

    def held_out(terms: tuple[int, ...]) -> Floats:
        chosen = columns[:, terms]
        return predict_held_out(len(points), lambda seen, at: chosen[at] @ _solve(chosen[seen], seconds[seen]), seed)

    predicted = [held_out(terms) for terms in TERMS]
    kept = choose([np.abs(one / seconds - 1.0) for one in predicted])
    coefficients = np.zeros(3)
    coefficients[list(TERMS[kept])] = _solve(columns[:, TERMS[kept]], seconds)
    flat_s, row_s, token_s = coefficients.tolist()
    return PartFit(flat_s=flat_s, row_s=row_s, token_s=token_s, error=percent_error(predicted[kept], seconds))


def _solve(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients >= 0 with the least sum of squared relative residuals."""
    relative = columns / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)
    found, _ = nnls(relative / scale, np.ones(len(seconds)))
    return np.asarray(found / scale, dtype=np.float64)


def _usable_tokens(measured: RoundsProfile) -> int:
    """Rows x the longest that ran at every probed length, with the last one's prefill beside the others."""
    if not measured.memory:
        raise InputError("rounds: memory was not probed", "set profile.memory_lengths in the recipe, and " + REMEDY)
    usable = min(probe.largest_ok * (probe.input_length + probe.steps) for probe in measured.memory)
    if not usable:
        raise InputError("rounds: not even one row ran at some length", "give the engine more KV cache")
    return usable


def fit_swap(measured: RoundsProfile, bytes_per_token: int, seed: int, *, overlaps: bool = True) -> SwapFit | None:
    """One latency for both ways, and a rate for each; `overlaps` as in `SwapFit`."""
    points = [point for point in measured.parts if point.part in ("swap_out", "swap_in")]
    if len(points) < POINTS_MIN or not measured.host_bytes:
        return None
    seconds = np.array([typical(point.seconds) for point in points])
    if seconds.min() <= 0.0:
        return None
    rows = np.array([float(point.rows) for point in points])
    sizes = np.array([float(point.rows * point.length * bytes_per_token) for point in points])
    out = np.array([point.part == "swap_out" for point in points])
    columns = np.stack([rows, sizes * out, sizes * ~out], axis=1)
    error = percent_error(
        predict_held_out(len(points), lambda seen, at: columns[at] @ _solve(columns[seen], seconds[seen]), seed),
        seconds,
    )
    latency_s, out_s, in_s = _solve(columns, seconds).tolist()
    return SwapFit(
        latency_s=latency_s,
        out_bytes_per_s=1.0 / max(out_s, 1.0 / FASTEST),
        in_bytes_per_s=1.0 / max(in_s, 1.0 / FASTEST),
        host_bytes=measured.host_bytes,
        overlaps=overlaps,
        error=error,
    )
