"""A worker's model on several processes: rank 0 serves, the others do the same beside it
(`toolkit.engines.tensor_parallel`).

What rank 0 is asked it passes on, and after each step it says whether the step was wanted and which
tokens it drew: ranks draw the same ones from the same logits, and one that did not would end the
group. That goes over pipes, as lines of JSON, which also tell at once when either side is gone: a
rank that dies takes its group down, so that for everybody else the group is one worker that was
lost.

A batch that memory has no room for is refused by every rank's ledger alike, before its first pass.
What runs out of memory in the middle, on one GPU alone, leaves the others in a collective: that
ends the group, too.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn

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
from toolkit.errors import EngineError
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

# A model's share for one process of several: tensor parallelism by the model's own `tp_plan`
# (Megatron-LM).
#
# transformers names for each model the linear layers to cut by their outputs ("colwise":
# attention heads, the MLP's inner width) and by their inputs ("rowwise"), so that a layer needs
# two sums over all processes. What is cut stays a plain linear layer with a collective behind it:
# through DTensor, torch's own `parallelize_module` took 5 times as long for a decode step
# (docs/decisions.md). Embeddings and norms are kept whole; so are logits, which are gathered.

BY_OUTPUT, BY_INPUT = ("colwise", "colwise_gather_output", "colwise_rep"), ("rowwise",)
GATHERED = BY_OUTPUT[1:]
WHOLE = (
    "embedding_rowwise",
    "replicated_with_grad_allreduce",
    "replicate",
)  # at inference the same on every rank
PATIENCE = datetime.timedelta(
    minutes=30
)  # for a rank that still loads; one that has died is noticed at once

Hook = Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class RankShare:
    """Which process of a group this is, and where the group meets: a file that nobody else can
    read.

    `on_join` is called before the others are waited for; `parameters` are the whole model's, once
    it is cut.
    """

    rank: int
    size: int
    rendezvous: str
    on_join: Callable[[], None] = lambda: None
    parameters: int = 0

    def join(self, device: torch.device) -> None:
        """Meet the others; returns when all are there. Collectives go over loopback or the GPUs'
        own links.
        """
        self.on_join()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"file://{self.rendezvous}",
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENCE,
        )

    def least(self, value: int, device: torch.device) -> int:
        """The smallest of all ranks' values."""
        every = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(every, op=dist.ReduceOp.MIN)
        return int(every.item())


def loopback() -> str:
    """The name of the loopback interface: 'lo', 'lo0'."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def check_shares(config: Any, size: int) -> None:
    """`EngineError` where heads cannot be dealt evenly."""
    text = config.get_text_config(decoder=True)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None)
        if heads and heads % size:
            raise EngineError(
                f"engine.tensor_parallel_size is {size}, which does not divide the model's {key}, {heads}",
                "choose a divisor of both numbers of heads",
            )


def cut(model: Any, share: RankShare) -> None:
    """Keep this rank's share of `model`'s weights, and put collectives behind what was cut.

    All ranks must have loaded the same weights. `EngineError` for a model whose plan is missing, or
    has layers that are cut in ways which are not known here (experts, fused projections).
    """
    check_shares(model.config, share.size)
    share.parameters = sum(weight.numel() for weight in model.parameters())
    plan: dict[str, str] = dict(model.tp_plan or {})
    kind = model.config.model_type
    if not any(style in BY_INPUT for style in plan.values()):
        raise EngineError(
            f"model_type '{kind}' has no tp_plan in transformers", "use tensor_parallel_size 1"
        )
    modules = [(name, module) for name, module in model.named_modules() if _pattern(name) in plan]
    for name, module in modules:
        style = plan[_pattern(name)]
        if style in WHOLE:
            continue
        if style not in (*BY_OUTPUT, *BY_INPUT) or not isinstance(module, nn.Linear):
            what = f"'{style}' of a {type(module).__name__}"
            raise EngineError(
                f"model_type '{kind}' cannot be shared: its plan for {name} is {what}", "use size 1"
            )
        _cut_linear(module, style, share)


def _pattern(name: str) -> str:
    """A module's name as plans have it: layers by '*'."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _cut_linear(module: nn.Linear, style: str, share: RankShare) -> None:
    by_output = style in BY_OUTPUT
    module.weight = _part(module.weight, 0 if by_output else 1, share)
    if module.bias is not None and by_output:
        module.bias = _part(module.bias, 0, share)
    elif module.bias is not None and share.rank:  # it is summed, so one rank adds it
        module.register_parameter("bias", None)
    hook = _gather(share.size) if style in GATHERED else None if by_output else _sum
    if hook is not None:
        module.register_forward_hook(hook)


def _part(weight: torch.Tensor, dim: int, share: RankShare) -> nn.Parameter:
    if weight.shape[dim] % share.size:
        raise EngineError(
            f"engine.tensor_parallel_size is {share.size}, and a weight has {weight.shape[dim]} rows"
        )
    return nn.Parameter(
        weight.detach().chunk(share.size, dim)[share.rank].clone(), requires_grad=False
    )


def _sum(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output


def _gather(size: int) -> Hook:
    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(output) for _ in range(size)]
        dist.all_gather(parts, output.contiguous())
        return torch.cat(parts, dim=-1)

    return hook


FOLLOWER = ("-m", "toolkit.engines.tensor_parallel")
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
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


class RankRound(msgspec.Struct, frozen=True, tag="round"):
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


Line = LoadModel | Slice | RankRound | Timing | Stepped
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Line)


class TensorParallelEngine:
    """`RoundEngine` on several processes, of which this is rank 0. Raises what the engine raises
    when it is loaded.
    """

    def __init__(self, model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
        from toolkit.engines.factory import load_engine

        size = engine.tensor_parallel_size
        _use_loopback()
        self._ending = threading.Event()
        with tempfile.TemporaryDirectory(prefix="llmctl-group-") as folder:
            meeting = str(Path(folder, "ranks"))
            texts = model.model_dump_json(), engine.model_dump_json(), hardware.model_dump_json()
            self._others = [_start(LoadModel(*texts, rank, meeting)) for rank in range(1, size)]
            try:
                self._engine = load_engine(
                    model, engine, hardware, RankShare(0, size, meeting, self._watch)
                )
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
        self._tell(RankRound(plan))
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

    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
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
        """From now on ranks wait for each other: without one of them, there is nothing to go on
        with.
        """
        for rank, other in enumerate(self._others, start=1):
            threading.Thread(
                target=self._mourn, args=(rank, other), daemon=True, name=f"rank {rank}"
            ).start()

    def _mourn(self, rank: int, other: subprocess.Popen[bytes]) -> None:
        code = other.wait()
        if not self._ending.is_set():
            print(
                f"rank {rank} of the worker's group ended with {code}", file=sys.stderr, flush=True
            )
            os._exit(1)  # the main thread may wait for that rank for ever

    def _end(self) -> None:
        self._ending.set()
        for other in self._others:
            other.kill()
            other.wait()


def _start(load: LoadModel) -> subprocess.Popen[bytes]:
    """A rank's process. It ends when its stdin does, so it does not outlive rank 0, however that
    dies.
    """
    other = subprocess.Popen(
        (sys.executable, *FOLLOWER), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
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
    """A device that is full in the middle of a pass leaves the other ranks waiting: `EngineError`,
    the group ends.
    """
    try:
        yield
    except OutOfMemory as error:
        if error.of_device:
            raise EngineError(f"one of the group's devices is out of memory: {error}") from error
        raise


class RankOrders:
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


def follow(engine: Engine, orders: RankOrders) -> None:
    """Do what rank 0 does, for ever."""
    for line in orders:
        with (
            contextlib.suppress(OutOfMemory),
            _only_ledgers_refuse(),
        ):  # rank 0's said so at the same place
            if isinstance(line, Slice):
                engine.run_slice(line.rows, line.steps, orders.on_step)
            elif isinstance(line, RankRound):
                cast(RoundEngine, engine).run_round(line.plan, orders.on_step)
            elif isinstance(line, Timing):
                _time(engine, line)


def _time(engine: Engine, line: Timing) -> None:
    if line.what == "prefill":
        engine.time_prefill(line.rows, line.length, _no_clock)
    elif line.what == "decode":
        engine.time_decode(line.rows, line.length, _no_clock)
    else:
        cast(RoundEngine, engine).time_part(
            cast(Part, line.what), line.rows, line.length, line.others, _no_clock
        )


def _no_clock() -> float:
    return 0.0


def main() -> None:
    """A rank other than 0."""
    import signal

    from toolkit.engines.factory import load_engine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # when to end is rank 0's to say
    orders = RankOrders(sys.stdin.buffer)
    load = next(iter(orders))
    assert isinstance(load, LoadModel)
    engine = EngineSpec.model_validate_json(load.engine)
    follow(
        load_engine(
            ModelSpec.model_validate_json(load.model),
            engine,
            HardwareSpec.model_validate_json(load.hardware),
            RankShare(load.rank, engine.tensor_parallel_size, load.rendezvous),
        ),
        orders,
    )


if __name__ == "__main__":
    main()
