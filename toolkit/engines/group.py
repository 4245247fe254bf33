"""A worker's model on several processes: rank 0 serves, the others do the same beside it (`toolkit.engines.shards`).

What rank 0 is asked it passes on, and after each step it says whether the step was wanted and which tokens it drew:
ranks draw the same ones from the same logits, and one that did not would end the group. That goes over pipes, as lines
of JSON, which also tell at once when either side is gone: a rank that dies takes its group down, so that for everybody
else the group is one worker that was lost.

A batch that memory has no room for is refused by every rank's ledger alike, before its first pass. What runs out of
memory in the middle, on one GPU alone, leaves the others in a collective: that ends the group, too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import msgspec

from toolkit.engines.protocol import (
    Engine,
    OnStep,
    OutOfMemory,
    Part,
    Round,
    RoundEngine,
    RoundOutput,
    Row,
    SliceOutput,
    StepOutput,
)
from toolkit.engines.shards import Share, loopback
from toolkit.errors import EngineError
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

FOLLOWER = ("-m", "toolkit.engines.group")
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The first line to a rank: what to load. The specs are JSON of the recipe's models."""

    model: str
    engine: str
    hardware: str
    rank: int
    rendezvous: str


class Slice(msgspec.Struct, frozen=True, tag="slice"):
    """`Engine.run_slice`."""

    rows: tuple[Row, ...]
    steps: int


class Rounds(msgspec.Struct, frozen=True, tag="round"):
    """`RoundEngine.run_round`."""

    plan: Round


class Timing(msgspec.Struct, frozen=True, tag="time"):
    """`time_prefill`, `time_decode`, or `time_part`."""

    what: str
    rows: int
    length: int
    others: int = 0


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """Rank 0 made a step: the tokens that it drew, and whether there should be another."""

    tokens: tuple[int, ...]
    wanted: bool


Line = Load | Slice | Rounds | Timing | Stepped
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Line)


class Group:
    """`RoundEngine` on several processes, of which this is rank 0. Raises what the engine raises when it is loaded."""

    def __init__(self, model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
        from toolkit.engines.factory import load_engine

        size = engine.tensor_parallel_size
        _use_loopback()
        self._ending = threading.Event()
        with tempfile.TemporaryDirectory(prefix="llmctl-group-") as folder:
            meeting = str(Path(folder, "ranks"))
            texts = model.model_dump_json(), engine.model_dump_json(), hardware.model_dump_json()
            self._others = [_start(Load(*texts, rank, meeting)) for rank in range(1, size)]
            try:
                self._engine = load_engine(model, engine, hardware, Share(0, size, meeting, self._watch))
            except BaseException:
                self._end()
                raise
        self.facts = self._engine.facts

    def run_slice(self, rows: Sequence[Row], steps: int, on_step: OnStep) -> SliceOutput:
        """See `Engine.run_slice`."""
        self._tell(Slice(tuple(rows), steps))
        with _only_ledgers_refuse():
            return self._engine.run_slice(rows, steps, self._telling(on_step))

    def run_round(self, plan: Round, on_step: OnStep) -> RoundOutput:
        """See `RoundEngine.run_round`."""
        self._tell(Rounds(plan))
        with _only_ledgers_refuse():
            return cast(RoundEngine, self._engine).run_round(plan, self._telling(on_step))

    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_prefill`."""
        self._tell(Timing("prefill", batch_size, input_length))
        with _only_ledgers_refuse():
            return self._engine.time_prefill(batch_size, input_length, clock)

    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        """See `Engine.time_decode`."""
        self._tell(Timing("decode", batch_size, cached_length))
        with _only_ledgers_refuse():
            return self._engine.time_decode(batch_size, cached_length, clock)

    def time_part(self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]) -> float:
        """See `RoundEngine.time_part`."""
        self._tell(Timing(part, rows, length, others))
        with _only_ledgers_refuse():
            return cast(RoundEngine, self._engine).time_part(part, rows, length, others, clock)

    def _telling(self, on_step: OnStep) -> OnStep:
        def told(step: StepOutput) -> bool:
            wanted = on_step(step)
            self._tell(Stepped(step.tokens, wanted))
            return wanted

        return told

    def _tell(self, line: Line) -> None:
        text = _ENCODER.encode(line) + b"\n"
        for other in self._others:
            _write(other, text)

    def _watch(self) -> None:
        """From now on ranks wait for each other: without one of them, there is nothing to go on with."""
        for rank, other in enumerate(self._others, start=1):
            threading.Thread(target=self._mourn, args=(rank, other), daemon=True, name=f"rank {rank}").start()

    def _mourn(self, rank: int, other: subprocess.Popen[bytes]) -> None:
        code = other.wait()
        if not self._ending.is_set():
            print(f"rank {rank} of the worker's group ended with {code}", file=sys.stderr, flush=True)
            os._exit(1)  # the main thread may wait for that rank for ever

    def _end(self) -> None:
        self._ending.set()
        for other in self._others:
            other.kill()
            other.wait()


def _start(load: Load) -> subprocess.Popen[bytes]:
    """A rank's process. It ends when its stdin does, so it does not outlive rank 0, however that dies."""
    other = subprocess.Popen((sys.executable, *FOLLOWER), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    _write(other, _ENCODER.encode(load) + b"\n")
    return other


def _write(other: subprocess.Popen[bytes], text: bytes) -> None:
    assert other.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # its end is noticed by who waits for it
        other.stdin.write(text)
        other.stdin.flush()


def _use_loopback() -> None:
    for name in SOCKET_VARIABLES:
        os.environ.setdefault(name, loopback())


@contextlib.contextmanager
def _only_ledgers_refuse() -> Iterator[None]:
    """A device that is full in the middle of a pass leaves the other ranks waiting: `EngineError`, the group ends."""
    try:
        yield
    except OutOfMemory as error:
        if error.of_device:
            raise EngineError(f"one of the group's devices is out of memory: {error}") from error
        raise


class Orders:
    """Lines from rank 0, read as they come. The process ends with the pipe, whatever it does then."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="orders").start()

    def __iter__(self) -> Iterator[Line]:
        while True:
            yield self._lines.get()

    def on_step(self, step: StepOutput) -> bool:
        """What rank 0 decided after this step."""
        line = self._lines.get()
        if not isinstance(line, Stepped) or line.tokens != step.tokens:
            raise EngineError(f"ranks of a group disagree: {step.tokens} here, at rank 0 {line}")
        return line.wanted

    def _read(self) -> None:
        try:
            for line in self._stream:
                self._lines.put(_DECODER.decode(line))
        finally:
            os._exit(0)


def follow(engine: Engine, orders: Orders) -> None:
    """Do what rank 0 does, for ever."""
    for line in orders:
        with contextlib.suppress(OutOfMemory), _only_ledgers_refuse():  # rank 0's said so at the same place
            if isinstance(line, Slice):
                engine.run_slice(line.rows, line.steps, orders.on_step)
            elif isinstance(line, Rounds):
                cast(RoundEngine, engine).run_round(line.plan, orders.on_step)
            elif isinstance(line, Timing):
                _time(engine, line)


def _time(engine: Engine, line: Timing) -> None:
    if line.what == "prefill":
        engine.time_prefill(line.rows, line.length, _no_clock)
    elif line.what == "decode":
        engine.time_decode(line.rows, line.length, _no_clock)
    else:
        cast(RoundEngine, engine).time_part(cast(Part, line.what), line.rows, line.length, line.others, _no_clock)


def _no_clock() -> float:
    return 0.0


def main() -> None:
    """A rank other than 0."""
    import signal

    from toolkit.engines.factory import load_engine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # when to end is rank 0's to say
    orders = Orders(sys.stdin.buffer)
    load = next(iter(orders))
    assert isinstance(load, Load)
    engine = EngineSpec.model_validate_json(load.engine)
    follow(
        load_engine(
            ModelSpec.model_validate_json(load.model),
            engine,
            HardwareSpec.model_validate_json(load.hardware),
            Share(load.rank, engine.tensor_parallel_size, load.rendezvous),
        ),
        orders,
    )


if __name__ == "__main__":
    main()
