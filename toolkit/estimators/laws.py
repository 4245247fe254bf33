"""Latency laws: how long a prefill, a decode step, a whole slice takes (SCLS paper, Eq. 1-4).

A law answers from its coefficients alone, in closed form: the simulator jumps over a slice's steps
with one call. It says nothing about where the coefficients came from (`fitting`) nor how good they
are (`toolkit.files.fit`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.files.fit import PartFit, RoundsFit, Segment, SwapFit
from toolkit.sched.protocols import LatencyLaw

# a search over slice lengths asks for one table per trial; the old ones are not asked for again
TABLES_KEPT = 64


@dataclass(frozen=True)
class SegmentedLaw:
    """Eq. 3 and 4, with an optional N * L^2 term in prefill, and coefficients that may change with
    the batch size.

    T_prefill(N, L) = nl*N*L + n*N + l*L + const + nll*N*L^2; tau(l, N) is the same with the cached
    length l and no square. The segment that holds for N is the last one whose `batch_size_min` is
    not above N.

    `prefill_emits_token`: a slice of S tokens is a prefill and S - 1 decode iterations, as an
    engine does that samples from the prefill's logits; else S iterations, as Eq. 1-2 has it.
    """

    prefill: tuple[Segment, ...]
    decode: tuple[Segment, ...]
    prefill_emits_token: bool
    padded: bool = (
        True  # rows cost what the longest costs; False: l is the mean of a paged engine's rows
    )
    round_s: float = 0.0  # of a round, besides its prefills and steps
    leaving: tuple[float, float] = (
        0.0,
        0.0,
    )  # seconds of a row that leaves, and more per token that it has
    # Coefficients by N as plain floats, and tables by their arguments: both are derived, and asked
    # for once per batch.
    _sizes: dict[int, tuple[float, float, float, float, float]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _tables: dict[tuple[int, int], NDArray[np.float64]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        _check_segments("prefill", self.prefill)
        _check_segments("decode", self.decode)
        if any(segment.nll for segment in self.decode):
            raise InputError("decode: nll is not 0, and tau(l, N) has no square (Eq. 4)")

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """T_prefill(N, L) in seconds, Eq. 3."""
        sizes = self._sizes
        fixed, slope, square, _, _ = (
            sizes[batch_size] if batch_size in sizes else self._coefficients(batch_size)
        )
        return fixed + input_length * (slope + input_length * square)

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """T_prefill(N, end) - T_prefill(N, start) + T_prefill(N, 0): each pass pays what does not
        depend on L.
        """
        sizes = self._sizes
        fixed, slope, square, _, _ = (
            sizes[batch_size] if batch_size in sizes else self._coefficients(batch_size)
        )
        return fixed + (end - start) * (slope + (end + start) * square)

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Sum of tau(L + i, N) over i = 1..steps, in seconds: steps*e + f*(steps*L +
        steps*(steps+1)/2).
        """
        sizes = self._sizes
        _, _, _, fixed, slope = (
            sizes[batch_size] if batch_size in sizes else self._coefficients(batch_size)
        )
        return steps * (fixed + slope * (input_length + (steps + 1) * 0.5))

    def leave_s(self, length: float) -> float:
        """Seconds until a row of about `length` tokens has left a running batch."""
        fixed, slope = self.leaving
        return fixed + slope * length

    def iterations(self, tokens: int) -> int:
        """Decode iterations that give a row `tokens` tokens, prefill included."""
        return tokens - self.prefill_emits_token if tokens > 0 else 0

    def serve_s(self, batch_size: int, input_length: int, tokens: int) -> float:
        """T_serve(N, L, S) in seconds, Eq. 1: what `serve_table` holds, for one batch."""
        steps = self.iterations(tokens)
        return self.prefill_s(batch_size, input_length) + self.decode_s(
            batch_size, input_length, steps
        )

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """T_serve as coefficients of 1, L and L^2: a read-only array [3, max_batch_size + 1];
        column 0 is unused.
        """
        key = (max_batch_size, steps)
        if key not in self._tables:
            if len(self._tables) >= TABLES_KEPT:
                self._tables.clear()
            self._tables[key] = self._table(max_batch_size, self.iterations(steps))
        return self._tables[key]

    def _table(self, max_batch_size: int, iterations: int) -> NDArray[np.float64]:
        sizes = np.arange(max_batch_size + 1)
        prefill, decode = _by_size(self.prefill, sizes), _by_size(self.decode, sizes)
        table = np.empty((3, max_batch_size + 1))
        table[0] = prefill[0] + iterations * (decode[0] + decode[1] * (iterations + 1) * 0.5)
        table[1] = prefill[1] + iterations * decode[1]
        table[2] = prefill[2]
        table.flags.writeable = False
        return table

    def _coefficients(self, batch_size: int) -> tuple[float, float, float, float, float]:
        sizes = np.array([batch_size])
        prefill = _by_size(self.prefill, sizes)[:, 0].tolist()
        decode = _by_size(self.decode, sizes)[:, 0].tolist()
        found = (prefill[0], prefill[1], prefill[2], decode[0], decode[1])
        self._sizes[batch_size] = found
        return found


def _by_size(segments: Sequence[Segment], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Coefficients of 1, L and L^2 for each batch size: an array [3, len(sizes)]."""
    starts = np.array([segment.batch_size_min for segment in segments])
    chosen = np.maximum(np.searchsorted(starts, sizes, side="right") - 1, 0)
    nl, n, l, const, nll = np.array([[s.nl, s.n, s.l, s.const, s.nll] for s in segments])[chosen].T  # noqa: E741
    return np.array([n * sizes + const, nl * sizes + l, nll * sizes])


def _check_segments(name: str, segments: Sequence[Segment]) -> None:
    starts = [segment.batch_size_min for segment in segments]
    if not starts or starts[0] != 1 or starts != sorted(set(starts)):
        raise InputError(
            f"{name}: segments start at batch sizes {starts}; they must begin at 1 and ascend"
        )
    for segment in segments:
        values = (segment.nl, segment.n, segment.l, segment.const, segment.nll)
        if not all(math.isfinite(value) for value in values):
            raise InputError(f"{name}: coefficients {values} are not all finite")


def bilinear_law(
    p: tuple[float, float, float, float],
    d: tuple[float, float, float, float],
    prefill_emits_token: bool = False,
) -> SegmentedLaw:
    """Eq. 3 and 4 as the paper writes them: p = (p1..p4), d = (d1..d4), in seconds per N*L, per N,
    per L, and flat.
    """

    def whole(c: tuple[float, float, float, float]) -> tuple[Segment, ...]:
        return (Segment(batch_size_min=1, nl=c[0], n=c[1], l=c[2], const=c[3]),)

    return SegmentedLaw(whole(p), whole(d), prefill_emits_token)


def unit_step() -> SegmentedLaw:
    """A clock that counts decode steps: each takes 1, prefill takes 0."""
    return bilinear_law((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0))


@dataclass(frozen=True)
class WithOverhead:
    """A law as a server meets it: `stretch` times as long, and `batch_s` more per batch.

    The flat part is dispatch, tokenizer and pipe; the stretch is what workers side by side cost
    each other.
    """

    law: LatencyLaw
    batch_s: float
    stretch: float
    _tables: dict[tuple[int, int], NDArray[np.float64]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        if not (self.batch_s >= 0 and self.stretch > 0):
            raise InputError(
                f"overhead: batch_s {self.batch_s} must be >= 0 and stretch {self.stretch} > 0"
            )

    @property
    def prefill_emits_token(self) -> bool:
        return self.law.prefill_emits_token

    @property
    def padded(self) -> bool:
        return self.law.padded

    @property
    def round_s(self) -> float:
        return self.stretch * self.law.round_s

    def leave_s(self, length: float) -> float:
        """Seconds until a row of about `length` tokens has left a running batch."""
        return self.stretch * self.law.leave_s(length)

    def prefill_s(self, batch_size: int, input_length: float) -> float:
        """The batch's flat cost and its prefill, in seconds."""
        return self.batch_s + self.stretch * self.law.prefill_s(batch_size, input_length)

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """A pass's seconds, and in a prefill's first one the batch's flat cost."""
        return (0.0 if start else self.batch_s) + self.stretch * self.law.pass_s(
            batch_size, start, end
        )

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Seconds of `steps` decode iterations after an input of L."""
        return self.stretch * self.law.decode_s(batch_size, input_length, steps)

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """As `SegmentedLaw.serve_table`."""
        key = (max_batch_size, steps)
        if key not in self._tables:
            if len(self._tables) >= TABLES_KEPT:
                self._tables.clear()
            table = self.stretch * self.law.serve_table(max_batch_size, steps)
            table[0] += self.batch_s
            table.flags.writeable = False
            self._tables[key] = table
        return self._tables[key]


# The law of rounds: what a worker that keeps its rows takes from the dispatch of a round to its
# result.
#
#     seconds = batch_s + stretch * (groups' prefills and joins + decode steps and moves of the cache + rows that leave)
#
# The parts are measured in one process; as with slices, the flat part is dispatch and pipe, and
# the stretch what workers cost each other. Joins go into the law of prefills, and moves of the
# cache into that of decode steps: the round's law is a law of the same form, which scheduler and
# simulator ask as any other.


def law_of_parts(
    engine: SegmentedLaw, join: PartFit, leave: PartFit, grow: PartFit
) -> SegmentedLaw:
    """The engine's law with what joins, leaves and moves add to it."""
    return replace(
        engine,
        prefill=tuple(_with(segment, join) for segment in engine.prefill),
        decode=tuple(_with(segment, grow) for segment in engine.decode),
        leaving=(leave.flat_s + leave.row_s, leave.token_s),
    )


def law_of_rounds(engine: SegmentedLaw, fit: RoundsFit) -> SegmentedLaw:
    """The law that holds for rounds through a worker's process, all workers busy."""
    parts = law_of_parts(engine, fit.join, fit.leave, fit.grow)
    stretch = fit.overhead.stretch
    return replace(
        parts,
        prefill=tuple(_times(segment, stretch) for segment in parts.prefill),
        decode=tuple(_times(segment, stretch) for segment in parts.decode),
        round_s=fit.overhead.batch_s,
        leaving=(stretch * parts.leaving[0], stretch * parts.leaving[1]),
    )


def _with(segment: Segment, part: PartFit) -> Segment:
    return segment.model_copy(
        update={
            "const": segment.const + part.flat_s,
            "n": segment.n + part.row_s,
            "nl": segment.nl + part.token_s,
        }
    )


def _times(segment: Segment, factor: float) -> Segment:
    names = ("nl", "n", "l", "const", "nll")
    return segment.model_copy(update={name: getattr(segment, name) * factor for name in names})


# The law of swapping: how long a KV cache takes from the device to host memory and back.


@dataclass(frozen=True)
class LinearSwap:
    """seconds = latency_s + tokens / (tokens per second), for each cache and each way.

    FastServe's example: OPT-175B's caches over PCIe 4.0 x16, 36 ms beside a decode step of 250 ms.
    """

    latency_s: float
    out_tokens_per_s: float
    in_tokens_per_s: float
    overlaps: bool = True  # beside compute; False: whoever computes copies, and compute waits

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise InputError(
                f"swap: a latency of {self.latency_s} s is not possible; it is finite and at least 0"
            )
        if not (self.out_tokens_per_s > 0 and self.in_tokens_per_s > 0):
            rates = f"{self.out_tokens_per_s} and {self.in_tokens_per_s}"
            raise InputError(f"swap: rates of {rates} tokens/s are not possible; both are above 0")

    def out_s(self, tokens: int) -> float:
        """Seconds from the device to host memory."""
        return self.latency_s + tokens / self.out_tokens_per_s

    def in_s(self, tokens: int) -> float:
        """Seconds from host memory to the device."""
        return self.latency_s + tokens / self.in_tokens_per_s


def swap_from_fit(fit: SwapFit, kv_bytes_per_token: int) -> tuple[LinearSwap, int]:
    """The law of a measured link, and the tokens of KV cache that its host memory holds."""
    if kv_bytes_per_token < 1:
        raise InputError(
            f"swap: {kv_bytes_per_token} bytes of KV cache per token is not possible; it is at least 1"
        )
    rates = fit.out_bytes_per_s / kv_bytes_per_token, fit.in_bytes_per_s / kv_bytes_per_token
    return LinearSwap(fit.latency_s, *rates, fit.overlaps), fit.host_bytes // kv_bytes_per_token
