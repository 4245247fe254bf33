"""Latency laws: seconds of a prefill, a decode step, a slice, a round and a cache transfer.

A law answers in closed form from its coefficients, so the simulator computes the steps of a whole
slice with one call. A law does not know where its coefficients came from (`fitting`) or how
accurate they are (`toolkit.files.fit`).

In this order: the law of an engine's batches (`LinearLaw`, of two `PassLaw`s), which the simulator
asks several times a round, the laws of rounds (`law_of_rounds`, `RoundsByPass`), and the law
of swapping (`LinearSwap`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.files.fit import RoundsFit, SwapFit
from toolkit.laws.features import StepShape
from toolkit.laws.passes import PassLaw
from toolkit.sched.types import LatencyLaw

# The terms that have a closed form of their sum over the steps of a slice.
PREFILL_TERMS = ("pass", "row", "length", "token", "attended")
DECODE_TERMS = ("pass", "row", "length", "cached")


@dataclass(frozen=True)
class LinearLaw(LatencyLaw):
    """SCLS paper, Eq. 1-4, with an optional N * L^2 term in prefill.

    T_prefill(N, L) = token*N*L + row*N + length*L + pass + attended*N*L^2/2. tau(l, N) has the same
    form with the cached length l (`cached` in place of `token`) and no square; it is at least
    `flat_s`, as on a GPU that waits for the launches of a step's kernels.

    Attributes:
        prefill_emits_token: True for an engine that samples from the prefill's logits: a slice of S
            tokens is a prefill and S - 1 decode iterations. False: S iterations (Eq. 1-2).
        padded: True: each row costs what the longest row costs. False: L is the mean length of a
            paged engine's rows.
        round_s: seconds of a round in addition to its prefills and steps.
        leaving: seconds of a row that leaves, and more seconds per token that it has.
        batch_s: seconds of a batch in addition to its prefill: dispatch, tokenizer and pipe.
    """

    prefill: PassLaw
    decode: PassLaw
    prefill_emits_token: bool
    padded: bool = True
    round_s: float = 0.0
    leaving: tuple[float, float] = (0.0, 0.0)
    batch_s: float = 0.0
    # The seconds of `PREFILL_TERMS` and of `DECODE_TERMS`, which evaluation reads.
    _prefill: tuple[float, float, float, float, float] = field(
        init=False, repr=False, compare=False, default=(0.0, 0.0, 0.0, 0.0, 0.0)
    )
    _decode: tuple[float, float, float, float] = field(
        init=False, repr=False, compare=False, default=(0.0, 0.0, 0.0, 0.0)
    )
    # `serve_table`s by (max_batch_size, steps)
    _tables: dict[tuple[int, int], NDArray[np.float64]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        for name, law, known in (
            ("prefill", self.prefill, PREFILL_TERMS),
            ("decode", self.decode, DECODE_TERMS),
        ):
            others = set(law.terms) - set(known)
            if others:
                raise InputError(f"{name}: it has terms {sorted(others)}, and may have {known}")
            seconds = tuple([law.terms.get(term, 0.0) for term in known])
            object.__setattr__(self, f"_{name}", seconds)

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Seconds of a prefill pass over the columns from `start` to `end` of N rows.

        T_prefill(N, end) - T_prefill(N, start) + T_prefill(N, 0): each pass pays the part that does
        not depend on L, but only the first one the constant cost of the batch.
        """
        fixed_s, row_s, length_s, token_s, attended_s = self._prefill
        slope = token_s * batch_size + length_s
        square = attended_s / 2 * batch_size
        seconds = row_s * batch_size + fixed_s + (end - start) * (slope + (end + start) * square)
        return seconds if start else self.batch_s + seconds

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Seconds of `steps` decode steps. Steps that begin flat and end linear count as their mean
        length, and so a little less than they take.
        """
        fixed_s, row_s, length_s, cached_s = self._decode
        fixed_s += row_s * batch_size
        slope = cached_s * batch_size + length_s
        mean_s = fixed_s + slope * (input_length + (steps + 1) * 0.5)
        flat_s = self.decode.flat_s
        return steps * (mean_s if mean_s > flat_s else flat_s)

    def leave_s(self, length: float) -> float:
        return self.leaving[0] + self.leaving[1] * length

    def times(self, factor: float) -> LinearLaw:
        """Return the law of an engine on which everything takes `factor` times as long."""
        return replace(
            self,
            prefill=self.prefill.times(factor),
            decode=self.decode.times(factor),
            round_s=factor * self.round_s,
            leaving=(factor * self.leaving[0], factor * self.leaving[1]),
            batch_s=factor * self.batch_s,
        )

    def iterations(self, tokens: int) -> int:
        """Decode iterations after the prefill until a row has `tokens` tokens."""
        return tokens - self.prefill_emits_token if tokens > 0 else 0

    def serve_s(self, batch_size: int, input_length: int, tokens: int) -> float:
        """T_serve(N, L, S) in seconds (Eq. 1) of one batch; `serve_table` holds it for many."""
        return self.prefill_s(batch_size, input_length) + self.decode_s(
            batch_size, input_length, self.iterations(tokens)
        )

    def serve_table(self, max_batch_size: int, steps: int) -> NDArray[np.float64]:
        """T_serve as coefficients of 1, L and L^2: a read-only array [3, max_batch_size + 1].

        Column 0 is unused. If decode steps have a flat part, there are two rows more: the
        coefficients of 1 and L where the steps of the slice are flat. T_serve is then the larger of
        the two.
        """
        key = (max_batch_size, steps)
        if key not in self._tables:
            iterations = self.iterations(steps)
            sizes = np.arange(max_batch_size + 1)
            fixed_s, row_s, length_s, token_s, attended_s = self._prefill
            fixed = row_s * sizes + fixed_s + self.batch_s
            slope = token_s * sizes + length_s
            fixed_s, row_s, length_s, cached_s = self._decode
            step_fixed = row_s * sizes + fixed_s
            step_slope = cached_s * sizes + length_s
            rising = fixed + iterations * (step_fixed + step_slope * (iterations + 1) * 0.5)
            rows = [rising, slope + iterations * step_slope, attended_s / 2 * sizes]
            if self.decode.flat_s:
                rows += [fixed + iterations * self.decode.flat_s, slope]
            table = np.array(rows)
            table.flags.writeable = False
            self._tables[key] = table
        return self._tables[key]


def unit_step() -> LinearLaw:
    """Return a clock that counts decode steps: each takes 1, prefill takes 0."""
    return LinearLaw(PassLaw({}), PassLaw({"pass": 1.0}), prefill_emits_token=False)


def law_of_parts(engine: LinearLaw, join: PassLaw, leave: PassLaw, grow: PassLaw) -> LinearLaw:
    """The engine's law plus the cost of joins (into prefills), cache moves (into decode steps) and
    leaves, as measured in one process.
    """
    left = leave.terms
    return replace(
        engine,
        prefill=engine.prefill.plus(join),
        decode=engine.decode.plus(grow),
        leaving=(left.get("row", 0.0), left.get("cached", 0.0)),
    )


def law_of_rounds(engine: LinearLaw, fit: RoundsFit) -> LinearLaw:
    """The law of rounds: from a round's dispatch to a worker process until its result, with all
    workers busy.

    seconds = batch_s + stretch * (the seconds of `law_of_parts`), as with slices.
    """
    parts = law_of_parts(engine, fit.join, fit.leave, fit.grow)
    return replace(parts.times(fit.overhead.stretch), round_s=fit.overhead.batch_s)


@dataclass(frozen=True)
class RoundsByPass(LatencyLaw):
    """What a policy inside an engine believes of its rounds, by the law of the engine's passes.

    A chunk between decodes costs the decodes two gaps where passes overlap. With d a pass of
    decodes alone, e and g the launch and the GPU's time of the chunk, and c the next launch, both
    gaps together last max(d + g, e + c). So a chunk takes that long, less the d that a step takes
    anyway.
    """

    law: PassLaw
    prefill_emits_token: bool = True
    padded: bool = False
    round_s: float = 0.0

    def pass_s(self, batch_size: int, start: float, end: float) -> float:
        """Seconds of chunks from `start` to `end` tokens, [batch_size] at once."""
        law = self.law
        tokens = batch_size * (end - start)
        attended = tokens * (start + end) / 2
        shape = StepShape(0, 0, batch_size, round(tokens), attended, round(batch_size * start))
        alone = StepShape(1, 0)
        decodes_s = law.gpu_s(alone)
        launches_s = law.launch_s(shape) + law.launch_s(alone)
        return max(law.gpu_s(shape), launches_s - decodes_s) + law.after_s(batch_size)

    def decode_s(self, batch_size: int, input_length: float, steps: int) -> float:
        """Seconds of `steps` decode steps of rows that have `input_length` tokens before them: of
        their mean length. Steps that begin by launches and end by work take a little longer.
        """
        cached = round(batch_size * (input_length + (steps + 1) * 0.5))
        return steps * self.law.step_s(StepShape(batch_size, cached))

    def times(self, factor: float) -> RoundsByPass:
        """Return the law of passes that take `factor` times as long."""
        return replace(self, law=self.law.times(factor))


@dataclass(frozen=True)
class LinearSwap:
    """Seconds to move a KV cache between the device and host memory: latency_s + tokens / (tokens
    per second), for each cache and each direction.

    FastServe's example: OPT-175B's caches over PCIe 4.0 x16 take 36 ms, and a decode step 250 ms.

    Attributes:
        overlaps: True: transfers run in parallel with computation. False: the thread that computes
            also copies, so computation waits.
    """

    latency_s: float
    out_tokens_per_s: float
    in_tokens_per_s: float
    overlaps: bool = True

    def out_s(self, tokens: int) -> float:
        """Seconds from the device to host memory."""
        return self.latency_s + tokens / self.out_tokens_per_s

    def in_s(self, tokens: int) -> float:
        """Seconds from host memory to the device."""
        return self.latency_s + tokens / self.in_tokens_per_s


def swap_from_fit(fit: SwapFit, kv_bytes_per_token: int) -> tuple[LinearSwap, int]:
    """The law of a measured link, and the number of tokens of KV cache that host memory holds."""
    rates = fit.out_bytes_per_s / kv_bytes_per_token, fit.in_bytes_per_s / kv_bytes_per_token
    return LinearSwap(fit.latency_s, *rates, fit.overlaps), fit.host_bytes // kv_bytes_per_token
