"""Tensor parallelism: one worker's model on several processes (Megatron-LM).

The model's own `tp_plan` says which linear layers to cut. transformers names for each model the
layers to cut by their outputs ("colwise": attention heads, the MLP's inner width) and by their
inputs ("rowwise"), so that a layer needs two sums over all processes. A cut layer stays a plain
linear layer with a collective after it: through DTensor, torch's own `parallelize_module` took 5
times as long for a decode step (docs/decisions/). Embeddings and norms stay whole, and logits are
gathered.

Rank 0 serves, and the other ranks repeat what it does. Rank 0 forwards each call, and after each
step its tokens and whether the step was wanted. All ranks draw the same tokens from the same
logits; a rank that does not ends the group. The messages are lines of JSON over pipes, which also
show at once when either side has ended. A rank that ends takes its group down, so that the group as
a whole is one lost worker.

If a batch does not fit, the ledgers of all ranks refuse it before its first pass. If one GPU alone
runs out of memory in a pass, the other ranks wait in a collective, so that ends the group too.

`python -m toolkit.engines.tensor_parallel` is the process of the other ranks.
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
from typing import IO, Any, Literal, cast

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
    load_engine,
)
from toolkit.errors import EngineError
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

BY_OUTPUT = ("colwise", "colwise_gather_output", "colwise_rep")
BY_INPUT = ("rowwise",)
GATHERED = BY_OUTPUT[1:]
# Layers that are the same on every rank at inference.
WHOLE = ("embedding_rowwise", "replicated_with_grad_allreduce", "replicate")
# How long to wait for a rank that still loads; a rank that has ended is noticed at once.
RENDEZVOUS_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(slots=True)
class RankShare:
    """The place of this process in its group.

    Attributes:
        rendezvous: a file where the group meets, which no other user can read.
        on_join: called before this process waits for the others.
        parameters: of the whole model; set when it is cut.
    """

    rank: int
    size: int
    rendezvous: str
    on_join: Callable[[], None] = lambda: None
    parameters: int = 0

    def join(self, device: torch.device) -> None:
        """Wait until all ranks have joined. Collectives use loopback or the GPUs' own links."""
        self.on_join()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=f"file://{self.rendezvous}",
            rank=self.rank,
            world_size=self.size,
            timeout=RENDEZVOUS_TIMEOUT,
        )

    def least(self, value: int, device: torch.device) -> int:
        least = torch.tensor([value], dtype=torch.int64, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least.item())


def loopback() -> str:
    """The name of the loopback interface: 'lo', 'lo0'."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def cut(model: Any, share: RankShare) -> None:
    """Keep this rank's share of `model`'s weights, and put collectives after the layers that are
    cut.

    All ranks must have loaded the same weights. Raises `EngineError` if the heads cannot be divided
    evenly, and for a model without a plan or with layers that this function does not know how to
    cut (experts, fused projections).
    """
    text = model.config.get_text_config(decoder=True)
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None)
        if heads and heads % share.size:
            raise EngineError(
                f"engine.tensor_parallel_size is {share.size}, which does not divide the model's "
                f"{key}, {heads}",
                "choose a divisor of both numbers of heads",
            )
    share.parameters = sum(weight.numel() for weight in model.parameters())
    plan: dict[str, str] = dict(model.tp_plan or {})
    kind = model.config.model_type
    if not any(style in BY_INPUT for style in plan.values()):
        raise EngineError(
            f"model_type '{kind}' has no tp_plan in transformers", "use tensor_parallel_size 1"
        )
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))  # plans name layers by '*'
        if style is None or style in WHOLE:
            continue
        if style not in (*BY_OUTPUT, *BY_INPUT) or not isinstance(module, nn.Linear):
            what = f"'{style}' of a {type(module).__name__}"
            raise EngineError(
                f"model_type '{kind}' cannot be divided: its plan for {name} is {what}",
                "use tensor_parallel_size 1",
            )
        by_output = style in BY_OUTPUT
        module.weight = _part(module.weight, 0 if by_output else 1, share)
        if module.bias is not None and by_output:
            module.bias = _part(module.bias, 0, share)
        elif module.bias is not None and share.rank:  # outputs are summed: one rank adds the bias
            module.register_parameter("bias", None)
        if style in GATHERED:
            module.register_forward_hook(_gather)
        elif not by_output:
            module.register_forward_hook(_sum)


def _part(weight: torch.Tensor, dim: int, share: RankShare) -> nn.Parameter:
    if weight.shape[dim] % share.size:
        raise EngineError(
            f"engine.tensor_parallel_size is {share.size}, which does not divide a weight of size "
            f"{weight.shape[dim]}",
            "use tensor_parallel_size 1",
        )
    part = weight.detach().chunk(share.size, dim)[share.rank].clone()
    return nn.Parameter(part, requires_grad=False)


def _sum(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(output)
    return output


def _gather(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output.contiguous())
    return torch.cat(parts, dim=-1)


RANK_COMMAND = (sys.executable, "-m", "toolkit.engines.tensor_parallel")
SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
Timed = Literal["time_prefill", "time_decode", "time_part"]


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    """The first line to a rank: what to load. The specs are JSON of the recipe's sections."""

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
    """A method of `RoundEngine` that times something, and its arguments before the clock."""

    method: Timed
    arguments: tuple[int | str, ...]

    def run(self, engine: Engine, clock: Callable[[], float]) -> float:
        seconds: float = getattr(engine, self.method)(*self.arguments, clock)
        return seconds


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """Rank 0 made a step: the tokens that it drew, and whether it goes on."""

    tokens: tuple[int, ...]
    wanted: bool


Line = LoadModel | Slice | RankRound | Timing | Stepped
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Line)


class TensorParallelEngine:
    """`RoundEngine` on several processes; this is rank 0. Raises the errors of its engine."""

    def __init__(self, model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> None:
        size = engine.tensor_parallel_size
        for variable in SOCKET_VARIABLES:
            os.environ.setdefault(variable, loopback())
        self._ending = threading.Event()
        with tempfile.TemporaryDirectory(prefix="llmctl-group-") as folder:
            rendezvous = str(Path(folder, "ranks"))
            texts = model.model_dump_json(), engine.model_dump_json(), hardware.model_dump_json()
            # A rank's process ends when its stdin is closed, so it does not outlive rank 0.
            self._others = [
                subprocess.Popen(RANK_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
                for _ in range(1, size)
            ]
            for rank, other in enumerate(self._others, start=1):
                _write(other, _ENCODER.encode(LoadModel(*texts, rank, rendezvous)) + b"\n")
            try:
                self._engine = load_engine(
                    model, engine, hardware, RankShare(0, size, rendezvous, self._watch)
                )
            except BaseException:  # also when interrupted: the other ranks would wait for ever
                self._ending.set()
                for other in self._others:
                    other.kill()
                    other.wait()
                raise
        self.facts = self._engine.facts

    def run_slice(self, rows: Sequence[Row], steps: int, on_step: OnStep) -> SliceOutput:
        self._send(Slice(tuple(rows), steps))
        with _device_memory_ends_group():
            return self._engine.run_slice(rows, steps, self._forwarding(on_step))

    def run_round(self, plan: Round, on_step: OnStep) -> RoundOutput:
        self._send(RankRound(plan))
        with _device_memory_ends_group():
            return cast(RoundEngine, self._engine).run_round(plan, self._forwarding(on_step))

    def time_prefill(self, batch_size: int, input_length: int, clock: Callable[[], float]) -> float:
        return self._time(clock, "time_prefill", batch_size, input_length)

    def time_decode(self, batch_size: int, cached_length: int, clock: Callable[[], float]) -> float:
        return self._time(clock, "time_decode", batch_size, cached_length)

    def time_part(
        self, part: Part, rows: int, length: int, others: int, clock: Callable[[], float]
    ) -> float:
        return self._time(clock, "time_part", part, rows, length, others)

    def _time(self, clock: Callable[[], float], method: Timed, *arguments: int | str) -> float:
        timing = Timing(method, arguments)
        self._send(timing)
        with _device_memory_ends_group():
            return timing.run(self._engine, clock)

    def _forwarding(self, on_step: OnStep) -> OnStep:
        """`on_step`, with its result also sent to the other ranks."""

        def forward(step: StepOutput) -> bool:
            wanted = on_step(step)
            self._send(Stepped(step.tokens, wanted))
            return wanted

        return forward

    def _send(self, line: Line) -> None:
        text = _ENCODER.encode(line) + b"\n"
        for other in self._others:
            _write(other, text)

    def _watch(self) -> None:
        """End this process as soon as another rank ends: from now on ranks wait for one another."""

        def end_with(rank: int, other: subprocess.Popen[bytes]) -> None:
            code = other.wait()
            if not self._ending.is_set():
                message = f"rank {rank} of the worker's group ended with {code}"
                print(message, file=sys.stderr, flush=True)
                os._exit(1)  # the main thread may wait for that rank without end

        for rank, other in enumerate(self._others, start=1):
            threading.Thread(
                target=end_with, args=(rank, other), daemon=True, name=f"rank {rank}"
            ).start()


def _write(other: subprocess.Popen[bytes], text: bytes) -> None:
    assert other.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # a watching thread notices that the rank ended
        other.stdin.write(text)
        other.stdin.flush()


@contextlib.contextmanager
def _device_memory_ends_group() -> Iterator[None]:
    """Turn a device's out of memory into `EngineError`, which ends the group: the other ranks wait
    in the middle of a pass.
    """
    try:
        yield
    except OutOfMemory as error:
        if error.of_device:
            raise EngineError(f"one of the group's devices is out of memory: {error}") from error
        raise


class RankOrders:
    """Lines from rank 0, read as they come. When the pipe ends, the process ends at once."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True, name="orders").start()

    def __iter__(self) -> Iterator[Line]:
        while True:
            yield self._lines.get()

    def on_step(self, step: StepOutput) -> bool:
        """Whether rank 0 goes on after this step."""
        line = self._lines.get()
        if not isinstance(line, Stepped) or line.tokens != step.tokens:
            raise EngineError(f"ranks of a group disagree: {step.tokens} here, {line} at rank 0")
        return line.wanted

    def _read(self) -> None:
        try:
            for line in self._stream:
                self._lines.put(_DECODER.decode(line))
        finally:
            os._exit(0)


def follow(engine: Engine, orders: RankOrders) -> None:
    """Repeat what rank 0 does, without end."""
    for line in orders:
        # Rank 0's own ledger refuses the same batch, and reports it.
        with contextlib.suppress(OutOfMemory), _device_memory_ends_group():
            if isinstance(line, Slice):
                engine.run_slice(line.rows, line.steps, orders.on_step)
            elif isinstance(line, RankRound):
                cast(RoundEngine, engine).run_round(line.plan, orders.on_step)
            elif isinstance(line, Timing):
                line.run(engine, lambda: 0.0)  # rank 0 measures


def main() -> None:
    """Run a rank other than 0."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to end
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
