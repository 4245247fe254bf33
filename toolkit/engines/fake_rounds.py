"""Rounds without a model: rows that come, go, pause and swap, each with the fake engine's tokens.

Memory is counted in real tokens: a round that would pass `capacity_tokens` on the device runs out of it. Host memory
has no end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from toolkit.engines.endings import LiveRow
from toolkit.engines.fake import FakeEngine, Text
from toolkit.engines.protocol import FinishReason, OnStep, OutOfMemory, Part, Round, RoundOutput, Row, StepOutput


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

    _steps = 0

    def __init__(self, *args, **options) -> None:  # type: ignore[no-untyped-def]  # those of FakeEngine
        super().__init__(*args, **options)
        self._running: dict[int, FakeRow] = {}
        self._paused: dict[int, FakeRow] = {}
        self._swapped: dict[int, FakeRow] = {}

    def run_round(self, plan: Round, on_step: OnStep) -> RoundOutput:
        """See `RoundEngine.run_round`."""
        try:
            return self._run(plan, on_step)
        except OutOfMemory as error:
            self._running.clear()
            self._paused.clear()
            raise OutOfMemory(str(error), tuple(self._swapped)) from None

    def time_part(self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]) -> float:
        """See `RoundEngine.time_part`. Nothing takes time here but prefills and steps."""
        self._check_memory(rows + others, length)
        start = clock()
        return clock() - start

    def _run(self, plan: Round, on_step: OnStep) -> RoundOutput:
        self._move(plan)
        self._check_rows(plan.enter)
        ended: list[int] = []
        steps, wanted = 0, True
        for number, row in zip(plan.numbers, plan.enter, strict=True):
            self._running[number] = FakeRow(row, LiveRow(row, (self._config.eos_token_id,)), Text(row, self._config))
        if plan.enter:
            self._wait(self._prefill_s(len(plan.enter), max(len(row.tokens) for row in plan.enter)))
            wanted = on_step(self._advance(plan.numbers, ended))
        while self._running and steps < plan.steps and not ended:
            if not wanted and self._steps % plan.stop_every == 0:
                break
            self._wait(self._decode_s(len(self._running), max(row.length for row in self._running.values())))
            self._steps += 1
            steps += 1
            wanted = on_step(self._advance(tuple(self._running), ended)) and wanted
        tokens = self._device_tokens()
        return RoundOutput(steps, tuple((number, 0) for number in plan.numbers), tuple(ended), tokens, tokens)

    def _move(self, plan: Round) -> None:
        for number in plan.evict:
            for place in (self._running, self._paused, self._swapped):
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
        if self._device_tokens() > self.facts.capacity_tokens:
            raise OutOfMemory(f"{self._device_tokens()} tokens do not fit into {self.facts.capacity_tokens}")
        for number, _ in ends:
            del self._running[number]
            ended.append(number)
        return StepOutput(numbers, tuple(token for token, _ in got), ends)

    def _device_tokens(self) -> int:
        return sum(row.length for place in (self._running, self._paused) for row in place.values())
