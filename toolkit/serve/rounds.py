"""The rows that a worker keeps between rounds: which request has which number there, and what came of a round.

The scheduler speaks of jobs, the engine of numbers, which a row gets when it enters and loses when its cache is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from toolkit.engines.protocol import Round, RoundOutput
from toolkit.sched.types import Batch, Failure, Job, RoundResult
from toolkit.serve.live import Live


class KeptRows:
    """One worker's rows, and the round that it runs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # by request
        self._lives: dict[int, Live] = {}
        self._next = 0
        self._prefilling: dict[int, None] = {}  # whose first token has not come since they entered
        self._waited: tuple[int, ...] = ()  # those of them when the round began
        self._received: dict[int, int] = {}  # tokens in this round, by number
        self._ended: list[int] = []  # in this round
        self._steps = 0  # decode steps as the scheduler counts them, who decides where a round may stop

    def begin(self, batch: Batch, live_of: Callable[[str], Live]) -> Round:
        """The round for the engine. `live_of` knows the requests of those who enter."""
        evict = (*self._forget(batch.evict), *self._forget(batch.release))
        moves = batch.moves
        kept = self._numbers_of
        lives = [live_of(job.request_id) for job in batch.jobs]
        entered = tuple(range(self._next, self._next + len(lives)))
        self._next += len(lives)
        self._lives.update(zip(entered, lives, strict=True))
        self._numbers.update((job.request_id, number) for job, number in zip(batch.jobs, entered, strict=True))
        self._prefilling.update(dict.fromkeys(entered))
        self._waited = tuple(self._prefilling)
        self._received, self._ended = {}, []
        return Round(
            batch.steps,
            tuple(live.row() for live in lives),
            entered,
            evict,
            kept(moves.pause) if moves else (),
            kept(moves.swap_out) if moves else (),
            kept(moves.swap_in) if moves else (),
            kept(moves.resume) if moves else (),
            bool(moves and moves.overlap),
            batch.stop_every,
            batch.chunk_tokens,
            self._steps,
        )

    def receive(self, number: int, tokens: int, *, ended: bool) -> Live:
        """So many tokens came for a row; whose it is."""
        self._received[number] = self._received.get(number, 0) + tokens
        self._prefilling.pop(number, None)
        if ended:
            self._ended.append(number)
        return self._lives[number]

    def result(self, batch: Batch, output: RoundOutput) -> RoundResult:
        """What a round did, in the scheduler's words."""
        joined = self._joined(dict(output.joined))
        for number, _ in output.joined:
            self._prefilling.pop(number, None)
        dropped = tuple([self._lives[number].ask.request_id for number in output.dropped])
        for number, request_id in zip(output.dropped, dropped, strict=True):
            del self._numbers[request_id]
            self._drop(number)
        failure: Failure = "oom" if output.is_short else ""
        self._steps += output.steps
        ended = self._end(output.ended)
        return RoundResult(batch.batch_id, batch.worker, output.steps, ended, joined, failure, dropped=dropped)

    def crashed(self, batch: Batch) -> RoundResult:
        """What came of a round before its worker was lost, by the tokens that came. All rows went with it."""
        received, waited = self._received, self._waited
        first = {number: received[number] - 1 for number in waited if number in received}  # steps since they joined
        went_on = [count for number, count in received.items() if number not in waited]
        steps = max([*first.values(), *went_on], default=0)
        joined = self._joined({number: steps - since for number, since in first.items()})
        ended = self._end(self._ended)
        self._numbers.clear()
        self._lives.clear()
        self._prefilling.clear()
        self._steps += steps
        return RoundResult(batch.batch_id, batch.worker, steps, ended, joined, "crashed")

    def _joined(self, after: Mapping[int, int]) -> tuple[tuple[str, int], ...] | None:
        """Whose prefill ended after how many steps, by request; None: everybody's before the first."""
        if len(after) == len(self._waited) and not any(after.values()):
            return None
        return tuple([(self._lives[number].ask.request_id, steps) for number, steps in after.items()])

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
            self._drop(number)
        return found

    def _drop(self, number: int) -> None:
        del self._lives[number]
        self._prefilling.pop(number, None)
