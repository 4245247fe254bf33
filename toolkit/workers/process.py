"""One worker's process as the front sees it: started, spoken to, and gone once, with a line that
says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from toolkit import guard
from toolkit.engine_traits import traits_of
from toolkit.errors import EngineError
from toolkit.files.recipe import Recipe
from toolkit.workers.frames import FromWorker, Start, ToWorker, front_side, pack

# Which GPUs this machine has, and which of them a worker's process may see: its own, so that
# workers of one machine do not all take the first.
#
# Asked before torch is loaded, and without it: the front never loads it.

VARIABLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
DEVICES = Path("/dev")
# What a GPU's driver makes in /dev: NVIDIA's, that of WSL, AMD's (whose torch has `cuda` devices
# too), two of Jetson's.
DEVICE_FILES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu", "nvgpu")


def visible_gpus(
    environment: Mapping[str, str] = os.environ, driver: Path = NVIDIA_GPUS
) -> list[str]:
    """The GPUs that this process may use, as CUDA names them; none where nobody says how many there
    are.
    """
    named = environment.get(VARIABLE)
    if named is not None:
        return [name for name in named.split(",") if name]
    count = len(list(driver.iterdir())) if driver.is_dir() else 0
    return [str(index) for index in range(count)]


def require_gpu(
    recipes: Iterable[Recipe],
    environment: Mapping[str, str] = os.environ,
    driver: Path = NVIDIA_GPUS,
    devices: Path = DEVICES,
) -> None:
    """`EngineError` where one of `recipes` needs a GPU and this machine has none that a process
    could use.

    A look at files, which takes no time: asked before anything slow, such as fetching a model, is
    done in vain. Where a GPU is there and cannot be used, the worker that loads says so.
    """
    wanted = next(
        (
            one
            for one in recipes
            if one.hardware.device == "cuda" and traits_of(one.engine.name).loads_model
        ),
        None,
    )
    if wanted is None or sys.platform != "linux":
        return
    hidden = environment.get(VARIABLE) in ("", "-1")
    if hidden or not (
        visible_gpus({}, driver) or any(next(devices.glob(name), None) for name in DEVICE_FILES)
    ):
        why = f"{VARIABLE} hides all GPUs" if hidden else "this machine has none"
        raise EngineError(
            f"recipe '{wanted.name}' needs a GPU, {wanted.hardware.name}: {why}",
            "profile and serve it where the GPU is; fit, tune, simulate and render run anywhere",
        )


def share_gpus(sizes: Sequence[int], visible: Sequence[str]) -> list[str | None]:
    """The GPUs of each worker, for its environment, one worker after the other; `sizes` are how
    many each takes.

    From the first again where there are no more. None: leave the environment as it is, since the
    worker takes none, or too few are known even for it alone.
    """
    found: list[str | None] = []
    first = 0
    for size in sizes:
        if first + size > len(visible):
            first = 0
        mine = visible[first : first + size]
        found.append(",".join(mine) if size and len(mine) == size else None)
        first += len(mine)
    return found


KEEP_MEMORY = {
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
STDERR_TAIL_BYTES = 1 << 13
# between closing the socket and exiting: what an interpreter with torch loaded needs to end
EXIT_GRACE_S = 5.0
STDERR_DRAIN_S = 1.0  # a grandchild may hold stderr open for ever

# Threads that stay: Linux takes the end of the thread that started a child for the end of its
# parent.
_SPAWNERS = ThreadPoolExecutor(4, "spawner")

OnFrame = Callable[[FromWorker], None]


@dataclass(slots=True, frozen=True)
class Exit:
    """How a process ended: Python's return code (negative: a signal), and the last line of its
    stderr.
    """

    code: int
    last_line: str

    @property
    def reason(self) -> str:
        """One line for people."""
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return f"exit code {self.code}" + (f": {self.last_line}" if self.last_line else "")


class WorkerProcess:
    """A child that runs `toolkit.workers`. Use `spawn`.

    The child ends when the socket closes, and Linux and `toolkit.guard` kill it with all that it
    started when the front dies.
    """

    def __init__(self, process: subprocess.Popen[bytes], link: _Link, errors: _Tail) -> None:
        self._process = process
        self._link = link
        self._errors = errors

    @classmethod
    async def spawn(
        cls, start: Start, threads: int | None, on_frame: OnFrame, gpus: str | None = None
    ) -> WorkerProcess:
        """Start a child, which sees these `gpus` alone, and send it `start`; `on_frame` gets what
        it says.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, link = await loop.create_unix_connection(lambda: _Link(on_frame), sock=ours)
        environment = engine_environment(threads) | ({} if gpus is None else {VARIABLE: gpus})
        try:
            process = await loop.run_in_executor(_SPAWNERS, _start, theirs, environment)
            _, errors = await loop.connect_read_pipe(_Tail, process.stderr)
        except BaseException:
            transport.close()  # one that is started all the same ends by it
            raise
        worker = cls(process, link, errors)
        worker.send(start)
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, frame: ToWorker) -> None:
        """Queue a frame; one that is sent to a process that is gone, is lost."""
        self._link.send(frame)

    def kill(self) -> None:
        """SIGKILL to it and to all that it started, if it still runs."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def gone(self) -> str:
        """Wait until it has ended and was reaped, and say why.

        A child that closed its socket has nothing left to do but exit.
        """
        await self._link.closed
        try:
            code = await asyncio.to_thread(self._process.wait, EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = await asyncio.to_thread(self._process.wait)
        guard.forget(self.pid)
        await asyncio.wait((self._errors.closed,), timeout=STDERR_DRAIN_S)
        self._errors.close()
        return Exit(code, _last_line(bytes(self._errors.tail))).reason


def _start(theirs: socket.socket, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a child that has the socket, which is closed here.

    Not by the loop: it would copy the page tables of this process, and stand still for that and
    until the child's interpreter is found. That took 27 to 45 ms where this process had 400 MB, 105
    ms where it had 2 GB; on a thread, whose process the child shares until then, the loop runs on.
    """
    with theirs:
        process = subprocess.Popen(
            (sys.executable, "-m", "toolkit.workers", str(theirs.fileno())),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            # so that what it starts can be killed with it; Ctrl-C is for the front alone
            process_group=0,
        )
    try:
        guard.watch(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise
    return process


class _Tail(asyncio.Protocol):
    """The end of what a child writes to its stderr."""

    def __init__(self) -> None:
        self.tail = bytearray()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-STDERR_TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class _Link(asyncio.Protocol):
    """The front's end of the socket."""

    def __init__(self, on_frame: OnFrame) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_frame = on_frame
        self._reader = front_side()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's is one without being a subclass

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            self._on_frame(frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.closed.set_result(None)

    def send(self, frame: ToWorker) -> None:
        if self._transport is not None:
            self._transport.write(pack(frame))


def engine_environment(threads: int | None) -> dict[str, str]:
    """Ours, with what libraries under torch read when they are loaded."""
    return os.environ | engine_variables(threads)


def engine_variables(threads: int | None) -> dict[str, str]:
    """The number of threads, and glibc's thresholds.

    By default glibc maps every large tensor anew and gives it back at once: on a CPU each prefill
    then faults its pages in again (60 times as many faults, 6 to 18 % of a prefill of 1,024
    tokens).
    """
    variables = {"TOKENIZERS_PARALLELISM": "false"} | KEEP_MEMORY
    if threads is not None:
        variables |= dict.fromkeys(THREAD_VARIABLES, str(threads))
    return variables


def _last_line(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
