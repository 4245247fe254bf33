"""Servers of an engine's own as Ray actors: an actor starts one on its machine, and ends with it.

The front keeps each `ActorServer` as it keeps a server of its own machine. Everything that waits
for the cluster is in `ActorServer.wait_until_ready`, so that a front can end at any time: `stop`
ends that wait, too. Ray divides a machine's GPUs, by the environment of the actor. It does not
divide CPUs, so the front gives each server its own ones of its machine.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from toolkit.cluster.places import Room, WorkerPlacement, reason
from toolkit.errors import EngineError, LlmctlError

POLL_EVERY_S = 0.2
STOP_S = 60.0  # for a server to end: it may need half a minute, and then its processes are killed
# Threads of an actor: its server's start, its server's end, the order to stop, and one to spare.
THREADS = 4
BOOT = Path("/proc/sys/kernel/random/boot_id")
OPENMP = "OMP_NUM_THREADS"


@dataclass(slots=True, frozen=True)
class ServerSeat:
    """Where a server of the cluster is to run.

    Attributes:
        host: the address of its machine on which it listens.
        cpus: the CPUs of its threads, by their positions among those of the machine.
        used_cpus: the CPUs of the threads of all servers there.
    """

    host: str
    cpus: Sequence[int]
    used_cpus: Sequence[int]


class HostedServer(Protocol):
    """One of several servers that llmctl starts.

    Attributes:
        url: its address, at the latest when it is ready.
    """

    url: str

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        ...

    def ended_by(self) -> str:
        """Why it has ended, in one line."""
        ...

    def wait_until_ready(self) -> None:
        """Wait until it answers. Raises `EngineError` if it ends before."""
        ...

    def stop(self) -> None:
        """End it, with every process of its own."""
        ...


# Starts a server in an empty folder; with it come warnings. Ray pickles this by name.
StartServer = Callable[[ServerSeat, Path], tuple[HostedServer, list[str]]]


class ServerActor:
    """One server, on the actor's machine. It ends when the actor ends, however that happens."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._server: HostedServer | None = None
        # Ray sets it to the actor's CPUs. Without Ray the engine would choose: remove Ray's own.
        if OPENMP.encode() + b"=" not in Path("/proc/self/environ").read_bytes():
            os.environ.pop(OPENMP, None)

    def machine(self) -> tuple[str, str]:
        """Its machine's address, and what its CPUs are: two actors with the same share them."""
        import ray

        boot = BOOT.read_text().strip()
        return ray.util.get_node_ip_address(), f"{boot} {sorted(os.sched_getaffinity(0))}"

    def start(self, start: StartServer, seat: ServerSeat) -> tuple[str, list[str]]:
        """Start the server and wait until it answers. Returns its URL, and warnings."""
        self._folder = TemporaryDirectory(prefix="llmctl-replica-")
        self._server, warnings = start(seat, Path(self._folder.name))
        self._server.wait_until_ready()
        return self._server.url, warnings

    def ended(self) -> None:
        while self._server is not None and self._server.running:
            time.sleep(POLL_EVERY_S)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        if self._folder is not None:
            self._folder.cleanup()


class CpuShares:
    """Which server has which CPUs of which machine. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[object, tuple[str, Sequence[int]]] = {}

    def take(self, server: object, machine: str, threads: int) -> tuple[list[int], set[int]]:
        """Give a server the first CPUs of a machine that no other one has, by their positions.
        Returns them, and those of all servers there.
        """
        with self._lock:
            shares = (cpus for where, cpus in self._held.values() if where == machine)
            held = {cpu for cpus in shares for cpu in cpus}
            cpus = list(islice((cpu for cpu in count() if cpu not in held), threads))
            self._held[server] = machine, cpus
        return cpus, held.union(cpus)

    def free(self, server: object) -> None:
        """Take back what a server has, if anything."""
        with self._lock:
            self._held.pop(server, None)


class RayServers:
    """The room for a plan's servers in the cluster that this process has joined.

    Args:
        places: the machine of each server, by number.
        room_timeout_s: how long the cluster may take to have room for all of them.
        host: on which they listen; '': the address by which Ray's nodes reach the machine.
    """

    def __init__(self, places: Sequence[WorkerPlacement], room_timeout_s: float, host: str) -> None:
        self._places = places
        self._room_timeout_s = room_timeout_s
        self._host = host
        self._room = Room(places)
        self._began_s = time.monotonic()
        self._has_room = False
        self.cpus = CpuShares()

    def start(self, number: int, start: StartServer, say: Callable[[str], None]) -> ActorServer:
        """Start server `number`, at once, wherever it will have room. `say` gets its warnings."""
        import ray

        options = self._room.options(number) | {"max_concurrency": THREADS}
        actor = ray.remote(ServerActor).options(**options).remote()
        return ActorServer(self, number, actor, start, say)

    def close(self) -> None:
        """Give the room back. Servers that still run end."""
        self._room.free()

    def wait(self, placed: Any) -> None:
        """Wait until the cluster has had room for all servers once, or until `placed`, an object of
        Ray, exists or has failed. Raises `EngineError` if there is no room in time.
        """
        import ray

        if self._has_room:
            return
        left_s = max(self._began_s + self._room_timeout_s - time.monotonic(), 0.0)
        done, _ = ray.wait([self._room.ready, placed], timeout=left_s)
        if not done:
            raise self._room.missing(self._room_timeout_s)
        self._has_room = self._room.ready in done

    def seat(self, server: ActorServer, number: int, address: str, machine: str) -> ServerSeat:
        """The seat of a server on its machine. Its CPUs are its own until they are freed."""
        cpus, used = self.cpus.take(server, machine, self._threads(number))
        # Those that start there later are not among `used` yet.
        beside = sum(self._threads(other) for other in self._room.beside(number))
        return ServerSeat(self._host or address, cpus, sorted(used.union(range(beside))))

    def _threads(self, number: int) -> int:
        """The CPUs of a server's threads; 0 on a GPU, and where the engine divides them itself."""
        recipe = self._places[number].recipe
        return (recipe.engine.threads or 0) if recipe.hardware.device == "cpu" else 0


@dataclass(eq=False)
class ActorServer:
    """A server of the cluster as the front sees it. Use `RayServers.start`."""

    servers: RayServers
    number: int
    actor: Any
    start: StartServer
    say: Callable[[str], None]
    url: str = ""  # until it is ready
    _end: Future[None] | None = None  # of the server, or of its actor

    def __post_init__(self) -> None:
        self._machine = self.actor.machine.remote()

    @property
    def running(self) -> bool:
        """Whether neither the server nor its actor has ended. It does not block."""
        return self._end is None or not self._end.done()

    def ended_by(self) -> str:
        """What Ray says of its actor."""
        error = self._end.exception() if self._end is not None and self._end.done() else None
        return "the server ended" if error is None else str(error).strip().splitlines()[0][:300]

    def wait_until_ready(self) -> None:
        """Wait until the cluster has room for it and it answers.

        Raises `EngineError` if there is no room in time or if it ends before, and what its start
        raises, with the machine's address.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        where = ""
        try:
            self.servers.wait(self._machine)
            address, machine = ray.get(self._machine)
            where = f"on {address}: "
            seat = self.servers.seat(self, self.number, address, machine)
            self.url, warnings = ray.get(self.actor.start.remote(self.start, seat))
            self._end = self.actor.ended.remote().future()
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LlmctlError):
                raise type(cause)(f"{where}{cause.message}", cause.hint) from None
            raise EngineError(f"{where}{reason(str(error))}") from None
        except RayError as error:
            raise EngineError(f"{where}{reason(str(error))}") from None
        for warning in warnings:
            self.say(f"{where}{warning}")

    def stop(self) -> None:
        """End it with every process of its own, or its wait for a place in the cluster."""
        import ray
        from ray.exceptions import RayError

        with suppress(RayError):
            placed, _ = ray.wait([self._machine], timeout=0)
            if placed:
                ray.get(self.actor.stop.remote(), timeout=STOP_S)
        ray.kill(self.actor)
        self.servers.cpus.free(self)
