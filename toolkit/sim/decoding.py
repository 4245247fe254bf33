"""The rows that a simulated worker decodes: when each ends, the gaps between its tokens, and the
memory that it takes.

Any number of decode steps costs O(log n), and nothing per token. The next row to end is the top of
a heap of end steps; the largest gap between a request's tokens comes from a stack of the gaps that
no later gap exceeded (`toolkit.sim.ledger.Gaps`); memory is summed as a series.
`toolkit.sim.continuous` decides when rows enter, step and leave.

`SwapStore` holds the caches of rows that do not decode, `Decoding` the rows that do, each a
`DecodingRow`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from toolkit.sched.protocols import SwapLaw
from toolkit.sched.queues import transfers_s
from toolkit.sched.types import NO_LIMIT, Job, Moves
from toolkit.sim.ledger import Gaps, Ledger, RequestOutcome, TokenGaps
from toolkit.sim.worker import SimulatedWorker

if TYPE_CHECKING:
    from toolkit.sim.world import World


class SwapStore:
    """The caches of a worker's jobs that do not decode, in tokens by job: paused or in transfer on
    the device, and swapped to host memory.

    `law` says how long transfers take; without one there is no host memory. `ledger` counts them.
    """

    __slots__ = ("_host", "_ledger", "device", "device_tokens", "host_tokens", "law")

    def __init__(self, law: SwapLaw | None, ledger: Ledger) -> None:
        self.law = law
        self.device: dict[Job, int] = {}
        self.device_tokens = 0
        self.host_tokens = 0
        self._host: dict[Job, int] = {}
        self._ledger = ledger

    def put(self, job: Job, tokens: int) -> None:
        """Keep a cache of `tokens` on the device while its job does not decode."""
        self.device[job] = tokens
        self.device_tokens += tokens

    def take(self, job: Job) -> int:
        """Remove a job's cache on the device, since it decodes again or is dropped; its tokens."""
        tokens = self.device.pop(job)
        self.device_tokens -= tokens
        return tokens

    def drop(self, job: Job) -> bool:
        """Drop the job's cache on the device or in host memory; whether there was one."""
        if job in self.device:
            self.take(job)
            return True
        tokens = self._host.pop(job, 0)
        self.host_tokens -= tokens
        return tokens > 0

    def duration_s(self, moves: Moves) -> float:
        """Seconds that the transfers of a pass take, one after the other."""
        if not (moves.swap_out or moves.swap_in):
            return 0.0
        assert self.law is not None, "a policy swaps where there is no host memory"
        out = [self.device[job] for job in moves.swap_out]
        return transfers_s(self.law, out, [self._host[job] for job in moves.swap_in])

    def arriving(self, moves: Moves) -> int:
        """Tokens on the device of the caches that `moves` swaps in."""
        return sum([self._host[job] for job in moves.swap_in])

    def transfer(self, moves: Moves) -> None:
        """Make the transfers of a pass and count them."""
        ledger = self._ledger
        host = self._host
        for job in moves.swap_out:
            host[job] = tokens = self.take(job)
            self.host_tokens += tokens
            ledger.swapped_tokens += tokens
        ledger.peak_host_tokens = max(ledger.peak_host_tokens, self.host_tokens)
        for job in moves.swap_in:
            tokens = host.pop(job)
            self.host_tokens -= tokens
            self.put(job, tokens)
            ledger.swapped_tokens += tokens
        ledger.swaps_out += len(moves.swap_out)
        ledger.swaps_in += len(moves.swap_in)


@mypyc_attr(acyclic=True)
class DecodingRow:
    """A job that decodes on one worker. Rows are in order of their ends, then of admission.

    A job that was released may decode elsewhere before its worker's next pass drops its row, so a
    row is not a part of its `RequestOutcome`.

    Attributes:
        key: its length less the worker's decode steps when it joined, without the prefill's token.
        mark: of its gaps.
        end: the worker's decode step after which it ends.
        admission: its number among the worker's admissions.
        stays: whether it still decodes.
    """

    __slots__ = ("admission", "end", "job", "key", "mark", "outcome", "stays")

    def __init__(
        self, job: Job, outcome: RequestOutcome, key: int, mark: int, end: int, admission: int
    ) -> None:
        self.job = job
        self.outcome = outcome
        self.key = key
        self.mark = mark
        self.end = end
        self.admission = admission
        self.stays = True

    def __lt__(self, other: DecodingRow) -> bool:
        if self.end != other.end:
            return self.end < other.end
        return self.admission < other.admission


class Decoding(SimulatedWorker):
    """The rows of one worker, counted independently of the scheduler, so that a decision that
    exceeds the capacity shows. `Job.number` is a job's index in the ledger.
    """

    def __init__(self, index: int, ledger: Ledger, world: World) -> None:
        super().__init__(index, ledger, world)
        # What few passes need comes first, so that the rest lies together, as in `Worker`.
        self._resumed: list[DecodingRow] = []  # entered with their caches, and had no token since
        self._swap_store = SwapStore(world.swap, ledger)
        self._round_s: float = self._latency.round_s
        self._padded: bool = self._latency.padded
        self._in_slab = False  # whether memory is the number of rows x the longest row
        self._steps = 0  # decode steps since the start
        self._ends: list[DecodingRow] = []  # a heap; an entry is stale if its row has left
        self._admissions = 0
        self._resident: dict[Job, DecodingRow] = {}
        self._key_sum = 0
        self._longest_key = 0
        self._gaps = Gaps()
        self._tokenless: list[DecodingRow] = []  # entered by a prefill, and had no token since

    @property
    def used(self) -> int:
        """Tokens in the residents' caches now."""
        return self._key_sum + len(self._resident) * (self._steps + self._emits)

    def _enter(self, jobs: Sequence[Job]) -> int:
        """Jobs with a prefilled input start to decode; the sum of their lengths in tokens."""
        steps = self._steps
        mark = self._gaps.mark(alone=not self._resident)
        total = 0
        for job in jobs:
            total += job.length
            self._tokenless.append(self._add(job, job.length - steps, mark, self._emits))
        return total

    def _resume(self, jobs: Sequence[Job]) -> None:
        """Jobs decode again with kept caches; their next token comes with the next step."""
        before = self._steps + self._emits
        mark = self._gaps.mark(alone=not self._resident)
        for job in jobs:
            self._resumed.append(self._add(job, self._swap_store.take(job) - before, mark, 0))

    def _add(self, job: Job, key: int, mark: int, given: int) -> DecodingRow:
        """Return the row of a job that decodes from now on, with `given` tokens of a prefill."""
        outcome = self._ledger.outcomes[job.number]
        end = self._steps - given + outcome.output_tokens - job.generated
        if not self._resident or key > self._longest_key:
            self._longest_key = key
        self._key_sum += key
        self._admissions += 1
        row = DecodingRow(job, outcome, key, mark, end, self._admissions)
        self._resident[job] = row
        heappush(self._ends, row)
        return row

    def _drop_stale_ends(self) -> None:
        """Remove the ends of jobs that were evicted or paused from the top of the heap."""
        ends = self._ends
        while not ends[0].stays:
            heappop(ends)

    def _length(self) -> float:
        """L of the next decode steps: the longest row's length, or in a paged engine the mean."""
        if self._padded:
            return float(self._longest_key + self._steps)
        return self._key_sum / len(self._resident) + self._steps

    def _take_steps(self, begin_s: float, ran: int, end_s: float, beside: int) -> None:
        """All rows decode `ran` times, at least once, from `begin_s` to `end_s`; `beside`: tokens
        on the device besides theirs.

        The first step ends the gap since each row's last token; of the others the last is longest.
        """
        ledger = self._ledger
        gaps = self._gaps
        times = self._latency
        n = len(self._resident)
        used = self.used + beside
        row_steps = n * ran
        ledger.decoding_steps += ran
        ledger.row_steps += row_steps
        if used + row_steps > ledger.peak_tokens:
            ledger.peak_tokens = float(used + row_steps)
        ledger.memory_token_steps += ran * used + n * (ran * (ran + 1) // 2)
        length = self._length()
        if ledger.token_gaps is not None:  # `_give_tokens` counts the first gap of new rows
            begun_s = begin_s + times.decode_s(n, length, 1)
            self._count_waits(begun_s, ledger.token_gaps)
            if ran > 1:
                second_s = begin_s + times.decode_s(n, length, 2) - begun_s
                last_s = end_s - (begin_s + times.decode_s(n, length, ran - 1))
                ledger.token_gaps.add(n * (ran - 1), second_s, last_s)
        waits = bool(self._tokenless or self._resumed)
        if waits or ran == 1 or gaps.waiting_since != begin_s:
            first_s = begin_s + times.decode_s(n, length, 1)
            gaps.end_waits(first_s)
            if waits:
                self._give_tokens(self._tokenless, first_s)
                self._give_tokens(self._resumed, first_s)
        if ran > 1:
            gaps.push(end_s - (begin_s + times.decode_s(n, length, ran - 1)))
        gaps.wait_from(end_s)
        self._steps += ran

    def _beside(self, moves: Moves | None) -> int:
        """Tokens on the device besides the decoding rows' own, including tokens in transfer."""
        store = self._swap_store
        arriving = store.arriving(moves) if moves is not None and moves.overlap else 0
        return store.device_tokens + arriving

    def _give_tokens(self, rows: list[DecodingRow], at_s: float) -> None:
        """Record a token for each of `rows`, the first since they entered, and clear the list."""
        if not rows:
            return
        token_gaps = self._ledger.token_gaps
        for row in rows:
            row.outcome.go_on(at_s, token_gaps)
            row.outcome.last_token_s = at_s
        rows.clear()

    def _count_waits(self, at_s: float, into: TokenGaps) -> None:
        """Count the gaps that end with a token for all rows at `at_s`."""
        fresh = {row.outcome for row in (*self._tokenless, *self._resumed)}
        joined = Counter([row.mark for row in self._resident.values() if row.outcome not in fresh])
        for mark, count in joined.items():
            waited_s = at_s - self._gaps.since(mark)
            into.add(count, waited_s, waited_s)

    def _end_due(self) -> tuple[str, ...]:
        """Remove the rows that ended; their request ids."""
        ends = self._ends
        steps = self._steps
        ended: list[str] = []
        while ends and ends[0].end <= steps:
            row = heappop(ends)
            if row.stays:
                self._leave(row)
                row.outcome.ok = True
                ended.append(row.job.request_id)
        return tuple(ended)

    def _leave(self, row: DecodingRow) -> None:
        """Remove a row, and write its last token and largest gap into the ledger."""
        resident = self._resident
        outcome = row.outcome
        gaps = self._gaps
        del resident[row.job]
        row.stays = False
        key = row.key
        self._key_sum -= key
        if self._padded and key == self._longest_key and resident:
            longest = -NO_LIMIT
            for other in resident.values():  # by hand: compiled, it is several times as fast
                if other.key > longest:
                    longest = other.key
            self._longest_key = longest
        fresh = self._tokenless if row in self._tokenless else self._resumed
        if row in fresh:
            fresh.remove(row)  # no token has come since it joined
            return
        if gaps.last_s > outcome.last_token_s:
            outcome.last_token_s = gaps.last_s
        gap_s = gaps.largest(row.mark)
        if gap_s > outcome.max_gap_s:
            outcome.max_gap_s = gap_s

    def _future_peak(self, coming: Sequence[tuple[int, int]]) -> int:
        """The peak in tokens of the rows and of those `coming`: (tokens, steps left) of each."""
        from toolkit.sched.kernels import peak_to_come

        held = self._steps + self._emits
        rows = [(row.key + held, row.end - self._steps) for row in self._resident.values()]
        rows += coming
        used = [tokens for tokens, _ in rows]
        remaining = [left for _, left in rows]
        return peak_to_come(used, remaining, padded=self._in_slab)
