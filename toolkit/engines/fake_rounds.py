"""Rounds without a model: rows that come, go, pause and swap, each with the fake engine's tokens.

Newcomers are prefilled in the passes of `toolkit.sched.passes`, as by the engine `rebatch`, and join without padding.
Memory is counted in real tokens: a prefill or a step that would pass `capacity_tokens` on the device is not made, and
drops whom it drops on the engine `rebatch`. Host memory has no end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from toolkit.engines.endings import LiveRow
from toolkit.engines.fake import FakeEngine, Text
from toolkit.engines.protocol import FinishReason, OnStep, Part, Round, RoundOutput, Row, StepOutput
from toolkit.sched.passes import Pass, Passes


class FakeRow:
    """A row, and the length of the cache that it would have."""

    def __init__(self, row: Row, live: LiveRow, text: Text) -> None:
        self._live = live
        self._text = text
        self._prompt = len(row.tokens)

    @property
    def length(self) -> int:
        return self._prompt + len(self._live.tokens)

    def next(self) -> tuple[int, FinishReason]:
        return self._live.advance(self._text.next())


class FakeRoundEngine(FakeEngine):
    """`toolkit.engines.protocol.RoundEngine` in memory."""

    def __init__(self, *args, **options) -> None:  # type: ignore[no-untyped-def]  # those of FakeEngine
        super().__init__(*args, **options)
        self._running: dict[int, FakeRow] = {}
        self._paused: dict[int, FakeRow] = {}
        self._swapped: dict[int, FakeRow] = {}
        self._entering: dict[int, FakeRow] = {}
        self._passes: Passes[int] = Passes()  # of those who enter
        self._step_is_due = False  # before the next bounded pass

    def run_round(self, plan: Round, on_step: OnStep) -> RoundOutput:
        """See `RoundEngine.run_round`."""
        self._move(plan)
        self._check_rows(plan.enter)
        for number, row in zip(plan.numbers, plan.enter, strict=True):
            self._enter(number, FakeRow(row, LiveRow(row, (self._config.eos_token_id,)), Text(row, self._config)))
        ended: list[int] = []
        joined: list[tuple[int, int]] = []
        dropped: list[int] = []
        steps, wanted = 0, True
        over = False
        while not over:
            while self._passes and not (self._running and self._step_is_due) and not (plan.chunk_tokens and ended):
                newcomers = self._prefill(plan.chunk_tokens if self._running else 0)
                if self._device_tokens() + len(newcomers) > self.facts.capacity_tokens:
                    dropped += self._drop_newcomers(newcomers)
                    dropped += self._drop_last() if self._paused and not self._running else []
                elif newcomers:
                    joined += [(number, steps) for number in newcomers]
                    wanted = on_step(self._advance(newcomers, ended)) and wanted
            stopped = not (wanted or steps or plan.chunk_tokens or plan.steps_before % plan.stop_every)
            if dropped or ended or stopped or not self._running or not plan.steps:
                break
            if self._device_tokens() + len(self._running) > self.facts.capacity_tokens:
                dropped += self._drop_newcomers() or self._drop_last()
                break
            self._wait(self._decode_s(len(self._running), max(row.length for row in self._running.values())))
            steps += 1
            self._step_is_due = False
            wanted = on_step(self._advance(tuple(self._running), ended)) and wanted
            over = bool(ended) or steps >= plan.steps or not (wanted or (plan.steps_before + steps) % plan.stop_every)
        tokens = self._device_tokens()
        return RoundOutput(steps, tuple(joined), tuple(ended), tokens, tokens, tuple(sorted(dropped, reverse=True)))

    def time_part(self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]) -> float:
        """See `RoundEngine.time_part`. Nothing takes time here but prefills and steps."""
        self._check_memory(rows + others, length)
        start = clock()
        return clock() - start

    def _drop_newcomers(self, joining: Sequence[int] = ()) -> list[int]:
        """Those whose prefill has just ended, and all who wait for theirs."""
        numbers = [*joining, *self._entering]
        for number in joining:
            del self._running[number]
        self._entering.clear()
        self._passes.clear()
        self._step_is_due = False
        return numbers

    def _drop_last(self) -> list[int]:
        """The last who was admitted, of the paused rows if there are any."""
        rows = self._paused or self._running
        number = max(rows)
        del rows[number]
        return [number]

    def _prefill(self, bound: int) -> tuple[int, ...]:
        """One pass; who is prefilled with it, and runs from here on."""
        made = self._passes.next(bound)
        self._wait(self._pass_s(made))
        self._passes.made(made)
        self._step_is_due = bound > 0
        if not made.completes:
            return ()
        newcomers = tuple(made.group.keys)
        self._running.update((number, self._entering.pop(number)) for number in newcomers)
        return newcomers

    def _pass_s(self, one: Pass[int]) -> float:
        rows = len(one.group.keys)
        before_s = self._prefill_s(rows, one.start) - self._prefill_s(rows, 0) if one.start else 0.0
        return self._prefill_s(rows, one.end) - before_s

    def _enter(self, number: int, row: FakeRow) -> None:
        self._entering[number] = row
        self._passes.add(number, row.length)

    def _move(self, plan: Round) -> None:
        for number in plan.evict:
            self._passes.remove(number)
            for place in (self._running, self._paused, self._swapped, self._entering):
                place.pop(number, None)
        for number in plan.pause:
            self._paused[number] = self._running.pop(number)
        for number in plan.swap_out:
            self._swapped[number] = (self._running if number in self._running else self._paused).pop(number)
        for number in plan.swap_in:
            self._paused[number] = self._swapped.pop(number)
        for number in plan.resume:
            self._running[number] = self._paused.pop(number)

    def _advance(self, numbers: Iterable[int], ended: list[int]) -> StepOutput:
        """One token for each, and who ended with it leaves."""
        numbers = tuple(numbers)
        got = [self._running[number].next() for number in numbers]
        ends = tuple((number, finish) for number, (_, finish) in zip(numbers, got, strict=True) if finish)
        for number, _ in ends:
            del self._running[number]
            ended.append(number)
        return StepOutput(numbers, tuple(token for token, _ in got), ends)

    def _device_tokens(self) -> int:
        """Of rows that enter, their prompts count from the first pass on."""
        group = self._passes.group
        entering = sum(group.lengths) if group else 0
        return entering + sum(row.length for place in (self._running, self._paused) for row in place.values())
