"""The engine `fake`, without a model: deterministic tokens, and failures on demand.

It is a plugin, as another package would add it (`llmctl.engines`), and needs no torch.

The next token of a row is a hash of all its tokens so far, so a row gets the same tokens in slices
and in one piece. Tokens are printable ASCII, so that a byte tokenizer shows text.

In passes that keep caches, newcomers are prefilled in the chunks of `toolkit.sched.prefills`, as in
the engine `rebatch`, and join without padding. Memory is counted in real tokens: a prefill or a
step that would exceed `capacity_tokens` on the device is not made, and drops the same rows as the
engine `rebatch`. Host memory is unlimited.
"""

from __future__ import annotations

import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

import toolkit
from toolkit.engine_traits import LOCAL, EngineTraits
from toolkit.engines.protocol import (
    EnginePass,
    LiveRow,
    OnStep,
    OutOfMemory,
    Part,
    PassOutput,
    PassRecord,
    Row,
    StepOutput,
    advance,
    rows_of_slice,
)
from toolkit.engines.tokenizer import EOS, VOCAB_SIZE
from toolkit.errors import InputError, nearest
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.sched.prefills import PrefillChunks

TRAITS = EngineTraits(
    "fake",
    "no model: deterministic tokens and set times, for tests",
    backend=LOCAL,
    load="llmctl_fake:load",
    keeps_rows=True,
    loads_model=False,
    for_tests=True,
)
FIRST_TOKEN = 32
LAST_TOKEN = 126  # printable ASCII
DEFAULT_KV_BYTES = 1024
DEFAULT_BUDGET_MIB = 64.0


def mix(*words: int) -> int:
    """Return a hash of 64 bits of integers, in order (SplitMix64)."""
    mask = (1 << 64) - 1
    state = 0
    for word in words:
        state = ((state ^ (word & mask)) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return state


@dataclass(slots=True, frozen=True)
class FakeConfig:
    """The keys of `model.config` for the engine 'fake'.

    Attributes:
        eos_one_in: one token in so many is EOS; 0: none.
        prefill_s, prefill_token_s: T_prefill = prefill_s + prefill_token_s * N * L.
        decode_s, decode_row_s: tau = decode_s + decode_row_s * N.
        crash_token: a batch with this token in a prompt raises.
        hang_token: a batch with this token in a prompt gives one token per row, then hangs.
    """

    model_type: str = "fake"
    vocab_size: int = VOCAB_SIZE
    eos_token_id: int = EOS
    eos_one_in: int = 64
    prefill_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_s: float = 0.0
    decode_row_s: float = 0.0
    crash_token: int | None = None
    hang_token: int | None = None

    @classmethod
    def of(cls, model: ModelSpec) -> FakeConfig:
        """The settings of a recipe. Raises `InputError` for an unknown key, naming the nearest."""
        known = cls.__dataclass_fields__
        for key in model.config:
            if key not in known:
                raise InputError(
                    f"model.config.{key}: the fake engine has no such key", nearest(key, known)
                )
        try:
            return msgspec.convert(model.config, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"model.config: {error}") from None


class FakeEngine:
    """`toolkit.engines.protocol.Engine` in memory.

    Args:
        facts: what it reports. A batch with N * (L + S) above `capacity_tokens` runs out of memory.
        config: tokens, times, ends and failures.
    """

    def __init__(self, facts: EngineFacts, config: FakeConfig = FakeConfig()) -> None:
        self.facts = facts
        self._config = config
        self._running: dict[int, FakeRow] = {}
        self._paused: dict[int, FakeRow] = {}
        self._swapped: dict[int, FakeRow] = {}
        self._entering: dict[int, FakeRow] = {}
        self._passes: PrefillChunks[int] = PrefillChunks()  # of the entering rows
        self._step_is_due = False  # before the next bounded pass

    def prefill_s(self, batch_size: int, length: int) -> float:
        return self._config.prefill_s + self._config.prefill_token_s * batch_size * length

    def decode_s(self, batch_size: int, length: int) -> float:
        return self._config.decode_s + self._config.decode_row_s * batch_size

    def run(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        self._check_rows(plan.enter)
        return (self._run_kept if plan.keep_cache else self._run_slice)(plan, on_step)

    def _run_slice(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        config = self._config
        rows = plan.enter
        width = max(len(row.tokens) for row in rows)
        steps = min(plan.steps, max(row.remaining for row in rows))
        record = PassRecord(plan, on_step)
        try:
            self._check_memory(len(rows), width + steps)
        except OutOfMemory:
            record.run_out()
            return record.output()
        texts = [Text(row, config) for row in rows]
        live = rows_of_slice(plan, (config.eos_token_id,))
        while True:
            latency_s = self.decode_s if record.steps else self.prefill_s
            self.wait(latency_s(len(rows), width + record.steps))
            live = record.draw(live, [text.next() for text in texts])
            if record.is_over():
                break
            if any(config.hang_token in row.tokens for row in rows):
                threading.Event().wait()
        return record.output()

    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        self._check_memory(batch_size, input_length + 1)
        return self._time(self.prefill_s(batch_size, input_length), clock)

    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        self._check_memory(batch_size, cached_length + 1)
        return self._time(self.decode_s(batch_size, cached_length), clock)

    def _time(self, seconds: float, clock: Callable[[], float]) -> float:
        start = clock()
        self.wait(seconds)
        return clock() - start

    def _check_rows(self, rows: Sequence[Row]) -> None:
        if any(self._config.crash_token in row.tokens for row in rows):
            raise RuntimeError(
                f"a prompt holds the token {self._config.crash_token} that crashes this engine"
            )

    def _check_memory(self, batch_size: int, columns: int) -> None:
        needed = batch_size * columns
        capacity = self.facts.capacity_tokens
        if needed > capacity:
            raise OutOfMemory(f"{needed} tokens do not fit into {capacity}")

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        if seconds > 0:
            time.sleep(seconds)

    def _run_kept(self, plan: EnginePass, on_step: OnStep) -> PassOutput:
        self._move(plan)
        for number, row in zip(plan.numbers, plan.enter, strict=True):
            self._entering[number] = FakeRow(row, self._config)
            self._passes.add(number, len(row.tokens))
        record = PassRecord(plan, on_step)
        over = False
        while not over:
            while (
                self._passes
                and not (self._running and self._step_is_due)
                and not (plan.chunk_tokens and record.ended)
            ):
                newcomers = self._prefill(plan.chunk_tokens if self._running else 0)
                if self._device_tokens() + len(newcomers) > self.facts.capacity_tokens:
                    record.dropped += self._drop_newcomers(newcomers)
                    record.dropped += (
                        self._drop_last() if self._paused and not self._running else []
                    )
                elif newcomers:
                    record.count_joined(newcomers)
                    record.report(self._advance(newcomers))
            record.is_short = bool(record.dropped)
            # A pass that is stopped ends after a step, not between a step and its prefill.
            ends = bool(record.ended) or record.is_short if record.steps else record.is_over()
            if ends or not self._running:
                break
            if self._device_tokens() + len(self._running) > self.facts.capacity_tokens:
                record.dropped += self._drop_newcomers() or self._drop_last()
                break
            longest = max(row.length for row in self._running.values())
            self.wait(self.decode_s(len(self._running), longest))
            self._step_is_due = False
            record.count_step(self._advance(tuple(self._running)))
            over = record.is_over()
        tokens = self._device_tokens()
        return record.output(tokens, tokens)

    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
        """Only prefills and steps take time in this engine."""
        self._check_memory(rows + others, length)
        return self._time(0.0, clock)

    def _drop_newcomers(self, joining: Sequence[int] = ()) -> list[int]:
        """Drop the rows `joining`, which have just ended their prefill, and all entering rows."""
        numbers = [*joining, *self._entering]
        for number in joining:
            del self._running[number]
        self._entering.clear()
        self._passes.clear()
        self._step_is_due = False
        return numbers

    def _drop_last(self) -> list[int]:
        """Drop the last admitted row, of the paused rows if there are any."""
        rows = self._paused or self._running
        number = max(rows)
        del rows[number]
        return [number]

    def _prefill(self, bound: int) -> tuple[int, ...]:
        """Make one pass. Returns the rows that it completes, which run from here on."""
        made = self._passes.next(bound)
        rows = len(made.group.keys)
        before_s = self.prefill_s(rows, made.start) - self.prefill_s(rows, 0) if made.start else 0
        self.wait(self.prefill_s(rows, made.end) - before_s)
        self._passes.made(made)
        self._step_is_due = bound > 0
        if not made.completes:
            return ()
        newcomers = tuple(made.group.keys)
        self._running.update((number, self._entering.pop(number)) for number in newcomers)
        return newcomers

    def _move(self, plan: EnginePass) -> None:
        for number in plan.evict:
            self._passes.remove(number)
            for place in (self._running, self._paused, self._swapped, self._entering):
                place.pop(number, None)
        for number in plan.pause:
            self._paused[number] = self._running.pop(number)
        for number in plan.swap_out:
            place = self._running if number in self._running else self._paused
            self._swapped[number] = place.pop(number)
        for number in plan.swap_in:
            self._paused[number] = self._swapped.pop(number)
        for number in plan.resume:
            self._running[number] = self._paused.pop(number)

    def _advance(self, numbers: tuple[int, ...]) -> StepOutput:
        """One token for each row; rows that end with it leave."""
        rows = [(number, self._running[number]) for number in numbers]
        step = advance(rows, [row.text.next() for _, row in rows])
        for number, _ in step.ended:
            del self._running[number]
        return step

    def _device_tokens(self) -> int:
        """Tokens on the device; the prompts of entering rows count from their first pass on."""
        group = self._passes.group
        entering = sum(group.lengths) if group else 0
        return entering + sum(
            row.length for place in (self._running, self._paused) for row in place.values()
        )


class Text:
    """One row's tokens, from a checksum of all tokens so far, which can continue from any point."""

    def __init__(self, row: Row, config: FakeConfig) -> None:
        sampling = row.sampling
        self._salt = sampling.seed if sampling.temperature > 0 else 0
        self._config = config
        self._generated = row.generated
        self._may_end_after = sampling.min_tokens
        self._state = zlib.crc32(array("q", row.tokens))

    def next(self) -> int:
        config = self._config
        draw = mix(self._state, self._salt, self._generated)
        may_end = config.eos_one_in and self._generated >= self._may_end_after
        if may_end and (draw >> 32) % config.eos_one_in == 0:
            token = config.eos_token_id
        else:
            last = min(LAST_TOKEN, config.vocab_size - 1)
            first = min(FIRST_TOKEN, last)
            token = first + draw % (last - first + 1)
        self._generated += 1
        self._state = zlib.crc32(array("q", (token,)), self._state)
        return token


class FakeRow(LiveRow):
    """A row with its text."""

    __slots__ = ("text",)

    def __init__(self, row: Row, config: FakeConfig) -> None:
        super().__init__(row, (config.eos_token_id,))
        self.text = Text(row, config)

    @property
    def length(self) -> int:
        """Tokens of the cache that it would have."""
        return len(self.row.tokens) + len(self.tokens)


def load(model: ModelSpec, engine: EngineSpec, _: HardwareSpec) -> FakeEngine:
    """The fake engine of a recipe. Raises `InputError` for unknown keys of `model.config`."""
    config = FakeConfig.of(model)
    kv_bytes = model.kv_bytes_per_token or DEFAULT_KV_BYTES
    budget = int((engine.kv_cache_memory_mib or DEFAULT_BUDGET_MIB) * (1 << 20))
    facts = EngineFacts(
        engine="fake",
        engine_version=toolkit.__version__,
        model_type=config.model_type,
        parameters=0,
        dtype=model.dtype,
        device="none",
        threads=engine.threads,
        kv_bytes_per_token=kv_bytes,
        kv_budget_bytes=budget,
        capacity_tokens=budget // kv_bytes,
        max_model_len=model.max_model_len,
        vocab_size=config.vocab_size,
        prefill_emits_token=True,
    )
    return FakeEngine(facts, config)
