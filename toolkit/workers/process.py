"""One worker's process as the front sees it, and the GPUs that it may use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from toolkit.engine_traits import traits_of
from toolkit.errors import EngineError
from toolkit.files.recipe import Recipe
from toolkit.workers.protocol import FromWorker, Start, ToWorker, front_side, pack

GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
# The device files of GPU drivers: NVIDIA's, WSL's, AMD's (torch for AMD has `cuda` devices too),
# and two of Jetson's.
DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu", "nvgpu")


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA names them; none if their number is unknown.

    This does not load torch, because the front never does.
    """
    named = os.environ.get(GPUS_VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name]
    return [str(index) for index in range(_gpu_count())]


def _gpu_count() -> int:
    """The NVIDIA GPUs of this machine; 0 if their number is unknown.

    Some sandboxes hide the driver's folder in /proc and show only the device files.
    """
    if NVIDIA_GPUS.is_dir() and (count := len(list(NVIDIA_GPUS.iterdir()))):
        return count
    return sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia*"))


def require_gpu(recipe: Recipe) -> None:
    """Raise `EngineError` if the recipe needs a GPU and this machine has none that a process can
    use.

    It only looks at files, which takes no time, so it comes before slow work such as fetching a
    model. If there is a GPU that cannot be used, the worker that loads reports it.
    """
    needs = recipe.hardware.device == "cuda" and traits_of(recipe.engine.name).loads_model
    if not needs or sys.platform != "linux":
        return
    hidden = os.environ.get(GPUS_VARIABLE) in ("", "-1")
    if hidden or not (_gpu_count() or any(any(DEVICES.glob(name)) for name in DEVICE_FILES)):
        why = f"{GPUS_VARIABLE} hides all GPUs" if hidden else "this machine has none"
        raise EngineError(
            f"recipe '{recipe.name}' needs a GPU, {recipe.hardware.name}: {why}",
            "profile and serve it where the GPU is; fit, tune, simulate and render run anywhere",
        )


@dataclass(slots=True, frozen=True)
class GpuShare:
    """The GPUs of one worker.

    `names` goes into its environment; None: leave the environment unchanged, because the worker
    takes no GPU or fewer GPUs are known than it takes. `workers` is how many workers the busiest of
    these GPUs has: each may use that part of its memory.
    """

    names: str | None
    workers: int = 1


def share_gpus(
    workers: int, size: int, visible: Sequence[str], *, shared: bool = False
) -> list[GpuShare]:
    """The GPUs of each worker, which takes `size` of the `visible` ones.

    Workers get different GPUs while there are enough. With `shared`, further workers begin again
    with the first GPU. Without it, `EngineError` is raised: two workers on one GPU would each claim
    its whole memory and time.
    """
    chosen: list[Sequence[str]] = []
    first = 0
    for _ in range(workers):
        if first + size > len(visible):
            first = 0
        names = visible[first : first + size]
        chosen.append(names if len(names) == size else ())
        first += len(names)
    used = Counter(name for names in chosen for name in names)
    busiest = max(used.values(), default=1)
    if busiest > 1 and not shared:
        raise EngineError(
            f"{workers} workers take {workers * size} GPUs, and this machine has {len(visible)} "
            f"({GPUS_VARIABLE}={','.join(visible)})",
            "start fewer workers, or set engine.share_gpus: true in the recipe to divide each "
            "GPU's memory between its workers",
        )
    return [
        GpuShare(",".join(names) if names else None, max((used[name] for name in names), default=1))
        for names in chosen
    ]


KEEP_MEMORY = {  # of glibc's malloc, in bytes: freed memory stays with the process
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
# The first is the name that all supported versions of torch read.
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
STDERR_TAIL_BYTES = 1 << 13
# From closing the socket to exiting: an interpreter that has loaded torch needs this to end.
EXIT_GRACE_S = 5.0
STDERR_DRAIN_S = 1.0  # a grandchild may hold stderr open without end

# These threads never end: when the thread that started a child ends, Linux regards the child's
# parent as ended.
_SPAWNERS = ThreadPoolExecutor(4, "spawner")

OnFrame = Callable[[FromWorker], None]


class WorkerProcess:
    """A child that runs `toolkit.workers`: it is started once, with `spawn`, and ends once.

    It ends when the socket closes, and Linux kills it when the front ends
    (`toolkit.workers.lifeline`).
    """

    def __init__(self, process: subprocess.Popen[bytes], link: _Link, errors: _Tail) -> None:
        self._process = process
        self._link = link
        self._errors = errors

    @classmethod
    async def spawn(
        cls, start: Start, environment: dict[str, str], on_frame: OnFrame
    ) -> WorkerProcess:
        """Start a child with this environment. `on_frame` gets its frames."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, link = await loop.create_unix_connection(lambda: _Link(on_frame), sock=ours)
        try:
            process = await loop.run_in_executor(_SPAWNERS, _start, theirs, environment)
            _, errors = await loop.connect_read_pipe(_Tail, process.stderr)
        except BaseException:  # also when cancelled: closing ends the child, if it was started
            transport.close()
            raise
        worker = cls(process, link, errors)
        worker.send(start)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: ToWorker) -> None:
        """Queue a frame. It is lost if the process has ended."""
        self._link.send(frame)

    def kill(self) -> None:
        """Send SIGKILL to the child and all processes that it started, if the child still runs."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def gone(self) -> str:
        """Wait until the child has ended, and reap it. Returns why it ended, in one line.

        A child that has closed its socket has nothing left to do, and is killed if it does not exit
        within `EXIT_GRACE_S`.
        """
        await self._link.closed
        try:
            code = await asyncio.to_thread(self._process.wait, EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = await asyncio.to_thread(self._process.wait)
        await asyncio.wait((self._errors.closed,), timeout=STDERR_DRAIN_S)
        self._errors.close()
        if code < 0:
            try:
                return f"killed by {signal.Signals(-code).name}"
            except ValueError:
                return f"killed by signal {-code}"
        stderr = self._errors.tail.decode(errors="replace")
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        return f"exit code {code}" + (f": {lines[-1][:300]}" if lines else "")


def _start(theirs: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a child that gets the socket `theirs`, which is closed here.

    This runs on a thread. On the event loop, starting a child copies the page tables of this
    process, and the loop stands still until the child's interpreter is found: 27 to 45 ms for a
    process of 400 MB, and 105 ms for 2 GB. On a thread the child shares this process's memory until
    then, and the loop runs on.
    """
    with theirs:
        return subprocess.Popen(
            (sys.executable, "-m", "toolkit.workers", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            # `kill` ends this group, with all that the child starts. Ctrl-C reaches only the front.
            process_group=0,
        )


class _Stream(asyncio.Protocol):
    """A connection to a child, and a future for its end."""

    def __init__(self) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the same methods but is not a subclass.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.closed.done():
            self.closed.set_result(None)


class _Tail(_Stream):
    """The end of what a child writes to its stderr."""

    tail = b""

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-STDERR_TAIL_BYTES:]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Link(_Stream):
    """The front's end of the socket: cuts frames, and sends them."""

    def __init__(self, on_frame: OnFrame) -> None:
        super().__init__()
        self._on_frame = on_frame
        self._reader = front_side()

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self._on_frame(frame)

    def send(self, frame: ToWorker) -> None:
        if self._transport is not None:
            self._transport.write(pack(frame))


def engine_environment(threads: int | None, device: str) -> dict[str, str]:
    """This process's environment, with `engine_variables`. The user's allocator settings stay."""
    variables = engine_variables(threads, device)
    if any(name in os.environ for name in ALLOCATOR_VARIABLES):
        variables.pop(ALLOCATOR_VARIABLES[0], None)
    return os.environ | variables


def engine_variables(threads: int | None, device: str) -> dict[str, str]:
    """Variables that torch's libraries read when they are loaded: the number of threads, glibc's
    thresholds, and on CUDA the allocator's settings.

    By default glibc maps and unmaps memory for every large tensor, so that on a CPU each prefill
    faults its pages in again (60 times as many faults, 6 to 18 % of a prefill of 1,024 tokens).
    """
    variables = {"TOKENIZERS_PARALLELISM": "false"} | KEEP_MEMORY
    if threads is not None:
        variables |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    if device == "cuda":
        # A slab that grows is a little larger than any block that was freed before it. Segments
        # that can be extended reuse that memory; others leave it as holes.
        variables[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    return variables
