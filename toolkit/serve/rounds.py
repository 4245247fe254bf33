"""The rows that a worker keeps between rounds: which request has which number there, and what came of a round.

The scheduler speaks of jobs, the engine of numbers, which a row gets when it enters and loses when its cache is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from toolkit.engines.protocol import Round, RoundOutput
from toolkit.sched.types import Batch, Failure, Job, RoundResult
from toolkit.serve.live import Live


class KeptRows:
    """One worker's rows, and the round that it runs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by request
        self._lives: dict[int, Live] = {}
        self._next = 0
        self._stale: list[int] = []  # what the engine may still hold, and the scheduler has forgotten
        self._entered: tuple[int, ...] = ()
        self._received: dict[int, int] = {}  # tokens in this round, by number
        self._ended: list[int] = []  # in this round

    def begin(self, batch: Batch, live_of: Callable[[str], Live]) -> Round:
        """The round for the engine. `live_of` knows the requests of those who enter."""
        evict = (*self._stale, *self._forget(batch.evict), *self._forget(batch.release))
        self._stale = []
        moves = batch.moves
        kept = self._numbers_of
        lives = [live_of(job.request_id) for job in batch.jobs]
        self._entered = tuple(range(self._next, self._next + len(lives)))
        self._next += len(lives)
        self._lives.update(zip(self._entered, lives, strict=True))
        self._numbers.update((job.request_id, number) for job, number in zip(batch.jobs, self._entered, strict=True))
        self._received, self._ended = {}, []
        return Round(
            batch.steps,
            tuple(live.row() for live in lives),
            self._entered,
            evict,
            kept(moves.pause) if moves else (),
            kept(moves.swap_out) if moves else (),
            kept(moves.swap_in) if moves else (),
            kept(moves.resume) if moves else (),
            bool(moves and moves.overlap),
            batch.stop_every,
        )

    def receive(self, number: int, tokens: int, *, ended: bool) -> Live:
        """So many tokens came for a row; whose it is."""
        self._received[number] = self._received.get(number, 0) + tokens
        if ended:
            self._ended.append(number)
        return self._lives[number]

    def result(self, batch: Batch, output: RoundOutput) -> RoundResult:
        """What a round did, in the scheduler's words."""
        prefilled = all(step == 0 for _, step in output.joined)  # not so where a prefill is shaped into a step
        return RoundResult(batch.batch_id, batch.worker, output.steps, self._end(output.ended), prefilled)

    def failed(
        self, batch: Batch, failure: Failure, swapped: Iterable[Job], in_host: Collection[int] = ()
    ) -> RoundResult:
        """What came of a round before it failed, by the tokens that came. Rows that are `in_host` memory outlive `oom`.

        Of those which the scheduler takes to be `swapped` out, some may not have got there.

        Where only some newcomers had their first token, it is not counted: the scheduler takes such jobs to be a token
        shorter than they are.
        """
        received = self._received
        first = [received.get(number, 0) for number in self._entered]
        went_on = [received.get(number, 0) for number in self._lives if number not in self._entered]
        steps = max(went_on, default=max(min(first, default=0) - 1, 0))
        ended = self._end(self._ended)
        out = [job.request_id for job in swapped if job.request_id in self._numbers] if failure == "oom" else []
        kept = {request_id for request_id in out if self._numbers[request_id] in in_host}
        lost = tuple(request_id for request_id in out if request_id not in kept)
        gone = [request_id for request_id in self._numbers if request_id not in kept]
        numbers = [self._numbers.pop(request_id) for request_id in gone]
        for number in numbers:
            del self._lives[number]
        self._stale = numbers if failure == "oom" else []
        return RoundResult(batch.batch_id, batch.worker, steps, ended, bool(first) and min(first) > 0, failure, lost)

    def _end(self, numbers: Iterable[int]) -> tuple[str, ...]:
        """These rows have ended; whose they were."""
        ended = tuple(self._lives.pop(number).ask.request_id for number in numbers)
        for request_id in ended:
            del self._numbers[request_id]
        return ended

    def _numbers_of(self, jobs: Iterable[Job]) -> tuple[int, ...]:
        return tuple(self._numbers[job.request_id] for job in jobs)

    def _forget(self, jobs: Iterable[Job]) -> list[int]:
        """The numbers of jobs whose caches are dropped; some have gone already."""
        found = [self._numbers.pop(job.request_id) for job in jobs if job.request_id in self._numbers]
        for number in found:
            del self._lives[number]
        return found
