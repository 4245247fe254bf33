"""Runs an engine's rounds, and keeps the tokens of each request."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
import tiny
import torch
from slices import run_slice
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.engines.fixed_step import FixedShape, FixedSteps
from toolkit.engines.loading import load_model
from toolkit.engines.memory import ByteLedger
from toolkit.engines.protocol import (
    Engine,
    EnginePass,
    LiveRow,
    PassOutput,
    Row,
    SamplingParams,
    StepOutput,
)
from toolkit.engines.rebatch_engine import RebatchEngine

GREEDY = SamplingParams()
FREE = SamplingParams(ignore_eos=True)
WAITS = "waits"
RUNS = "runs"
PAUSED = "paused"
SWAPPED = "swapped"
DONE = "done"


def rebatch_engine(
    kind: str = "llama", *, budget_mib: float = 16.0, dtype: str = "float32", **changes: Any
) -> RebatchEngine:
    spec = tiny.model_spec(kind, dtype=dtype)
    return RebatchEngine(
        spec, tiny.engine_spec("rebatch", budget_mib=budget_mib, **changes), tiny.CPU
    )


def step_logits(engine: RebatchEngine, lengths: Sequence[int]) -> torch.Tensor:
    """Logits [3, N, V] of decode steps over random caches of these lengths and fixed tokens, the
    same for every engine of a model.
    """
    batch = engine._batch
    generator = torch.Generator().manual_seed(3)
    shapes = engine._kv_shapes
    caches = [
        [
            tuple(
                torch.randn(heads, length, dim, generator=generator).bfloat16()
                for _, heads, _, dim in pair
            )
            for pair in shapes
        ]
        for length in lengths
    ]
    newcomers = [(k, LiveRow(free_row(length + 1, 9), ())) for k, length in enumerate(lengths)]
    found = []
    with torch.inference_mode():
        batch.join(list(zip(newcomers, caches, strict=True)))
        for step in range(3):
            batch.cache.make_room(len(lengths), 0, ahead=1)
            last = torch.arange(len(lengths), device=batch.cache.device) + 17 * step
            found.append(batch._logits(last).float().cpu().clone())
            batch.cache.advance()
        batch.clear()
    return torch.stack(found)


def kept_bytes(engine: RebatchEngine) -> int:
    """Bytes of the slabs that steps of fixed shapes keep when no row is left."""
    cache = engine._batch.cache
    keeps = getattr(cache, "_stays", False) and not engine._batch
    return cache.slab_tokens * cache.bytes_per_token if keeps else 0


def go_on(_: StepOutput) -> bool:
    """An `OnStep` that stops nothing."""
    return True


def alone(engine: Engine, rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """The tokens of each row, from a slice of its own."""
    return [run_slice(engine, [row], 1000, go_on).tokens[0] for row in rows]


class Replay:
    """A stand-in for a graph, where there is no GPU: the same step on the same tensors, into the
    same output. Like a graph, it reads the tensors that were there when it was captured.
    """

    def __init__(self, steps: FixedSteps, shape: FixedShape) -> None:
        self.steps = steps
        self.shape = shape
        self.pointers = self.now()
        self.replays = 0

    def now(self) -> list[int]:
        """Where the tensors are that a graph would read and write."""
        steps = self.steps
        memory = [each for pair in steps._cache.flat() for each in pair]
        inputs = [steps._tokens, steps._firsts, steps._cached, steps._grows, steps._since]
        assert all(len(each) for each in (*inputs, steps._logits))
        return [each.data_ptr() for each in (*memory, *inputs, steps._logits)]

    def replay(self) -> None:
        assert self.now() == self.pointers
        self.steps._logits[: self.shape.rows].copy_(self.steps._run(self.shape))
        self.replays += 1


def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The stand-ins that engines capture from now on."""
    found: list[Replay] = []

    def capture(steps: FixedSteps, shape: FixedShape) -> Replay:
        found.append(Replay(steps, shape))
        return found[-1]

    monkeypatch.setattr(FixedSteps, "_capture", capture)
    return found


class FailingAllocations(TorchDispatchMode):
    """In this context, allocations are counted: charges to a ledger, and every tensor that is made.

    The allocation number `fails_at` fails, and with `lasting` all later ones until `stop_failing`.
    """

    def __init__(self, engine: RebatchEngine, fails_at: int = 0, *, lasting: bool = False) -> None:
        super().__init__()
        self._ledgers = engine.ledger, engine.host_ledger
        self._fails_at = fails_at
        self._lasting = lasting
        self.count = 0
        self.failures = 0

    def __enter__(self) -> "FailingAllocations":
        for ledger in self._ledgers:
            ledger.take = partial(self._take, ledger)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        for ledger in self._ledgers:
            del ledger.take
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fresh = any(
            str(value.type) == "Tensor" and value.alias_info is None
            for value in func._schema.returns
        )
        made = func(*args, **(kwargs or {}))
        if (fresh or "lift_fresh" in str(func)) and not (
            isinstance(made, torch.Tensor) and made.numel() == 0
        ):
            self._count()
        return made

    def stop_failing(self) -> None:
        """Let allocations succeed again."""
        if self.failures:
            self._lasting = False

    def _take(self, ledger: ByteLedger, size_bytes: int) -> None:
        if size_bytes > 0:
            self._count()
        ByteLedger.take(ledger, size_bytes)

    def _count(self) -> None:
        self.count += 1
        if self.count == self._fails_at or (self._lasting and self.failures):
            self.failures += 1
            raise torch.OutOfMemoryError("injected")


def free_row(length: int, new: int, *, first: int = 0) -> Row:
    """A row that gets exactly `new` tokens."""
    return Row(
        f"{length}+{new}", tuple((first + index) % 256 for index in range(length)), 0, new, FREE
    )


def random_rows(seed: int, count: int, sampling: SamplingParams = GREEDY) -> list[Row]:
    """Rows with prompts of 1 to 60 tokens and output limits of 1 to 30."""
    rng = random.Random(seed)
    return [
        Row(
            f"r{index}",
            tuple(rng.randrange(256) for _ in range(rng.randint(1, 60))),
            0,
            rng.randint(1, 30),
            msgspec.structs.replace(sampling, seed=index),
        )
        for index in range(count)
    ]


def generated_alone(kind: str, rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """The tokens of transformers' own greedy `generate` for each row, one request at a time."""
    model = load_model(tiny.model_spec(kind), tiny.CPU)
    texts = []
    for row in rows:
        prompt = torch.tensor([row.tokens])
        with torch.inference_mode():
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=row.max_new_tokens,
                do_sample=False,
                pad_token_id=258,
            )
        texts.append(tuple(tokens[0, len(row.tokens) :].tolist()))
    return texts


class RoundDriver:
    """Serves requests in an engine's rounds; a request's number is its index.

    `run` makes a round and checks that its output agrees with the plan.
    """

    def __init__(
        self, engine: RebatchEngine, rows: Sequence[Row], *, chunk_tokens: int = 0
    ) -> None:
        self.engine = engine
        self.rows = list(rows)
        self.got: list[list[int]] = [[] for _ in rows]
        self.state = [WAITS for _ in rows]
        self.steps: list[StepOutput] = []  # of the last round
        self.chunk_tokens = chunk_tokens  # of all rounds
        self.dropped: list[int] = []  # in the last round
        # Whether running rows have their whole caches when a round ends.
        self.whole = not chunk_tokens
        self.stop_after: int | None = None

    def having(self, *states: str) -> list[int]:
        """The numbers of the requests in one of these states."""
        return [number for number, state in enumerate(self.state) if state in states]

    def run(self, steps: int = 5, *, enter: Sequence[int] = (), **moves: Any) -> PassOutput:
        rows = tuple(map(self.as_row, enter))
        plan = EnginePass(
            steps=steps, enter=rows, numbers=tuple(enter), chunk_tokens=self.chunk_tokens, **moves
        )
        self._set(plan.evict, WAITS)
        self._set(plan.pause, PAUSED)
        self._set(plan.swap_out, SWAPPED)
        self._set(plan.swap_in, PAUSED)
        self._set((*plan.resume, *enter), RUNS)
        self.steps = []
        output = self.engine.run(plan, self._on_step)
        assert output.steps <= steps
        self.dropped = list(output.dropped)
        assert self.dropped == sorted(self.dropped, reverse=True)
        self._set(self.dropped, WAITS)
        self._check_places()
        if self.whole:
            held = sum(len(self.as_row(number).tokens) - 1 for number in self.having(RUNS, PAUSED))
            assert output.tokens == held <= output.padded_tokens
        return output

    def _check_places(self) -> None:
        """Check that the engine has each row in the state that the plan wanted, and no others."""
        engine = self.engine
        running = {*engine._batch.numbers, *engine._prefiller.numbers}
        assert running == set(self.having(RUNS))
        assert set(engine._suspended.on_device) == set(self.having(PAUSED))
        assert set(engine._suspended._rows) - set(engine._suspended.on_device) == set(
            self.having(SWAPPED)
        )

    def finish(self) -> list[tuple[int, ...]]:
        """Run all requests to their ends. Returns the tokens of each."""
        for _ in range(1000):
            if not self.having(WAITS, RUNS, PAUSED, SWAPPED):
                break
            swapped = self.having(SWAPPED)
            self.run(
                7,
                enter=self.having(WAITS),
                swap_in=tuple(swapped),
                resume=(*self.having(PAUSED), *swapped),
            )
        return [tuple(tokens) for tokens in self.got]

    def at_random(self, rng: random.Random) -> None:
        """Run a round of random moves."""
        running = self._some(rng, self.having(RUNS), 0.25)
        evict, pause, swap_out = (tuple(running[index::3]) for index in range(3))
        paused = self._some(rng, self.having(PAUSED), 0.6)
        swapped = self._some(rng, self.having(SWAPPED), 0.4)
        swap_out += tuple(paused[1::2])
        resume = (*paused[::2], *swapped[::2])
        self.run(
            rng.randint(1, 8),
            enter=self._some(rng, self.having(WAITS), 0.3),
            evict=evict,
            pause=pause,
            swap_out=swap_out,
            swap_in=tuple(swapped),
            resume=resume,
            overlap=rng.random() < 0.5,
        )

    def as_row(self, number: int) -> Row:
        row = self.rows[number]
        got = self.got[number]
        return msgspec.structs.replace(row, tokens=(*row.tokens, *got), generated=len(got))

    def _some(self, rng: random.Random, numbers: list[int], share: float) -> list[int]:
        return [number for number in numbers if rng.random() < share]

    def _set(self, numbers: Sequence[int], state: str) -> None:
        for number in numbers:
            self.state[number] = state

    def _on_step(self, step: StepOutput) -> bool:
        self.steps.append(step)
        for number, token in zip(step.rows, step.tokens, strict=True):
            assert self.state[number] == RUNS
            self.got[number].append(token)
        self._set([number for number, _ in step.ended], DONE)
        return self.stop_after is None or len(self.steps) < self.stop_after
