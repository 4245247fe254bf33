"""Workers as Ray actors, behind the protocol of `toolkit.workers`: the pool is the same, their
bodies are actors.

One placement group holds a bundle for each worker, spread over the machines; a bundle lies on one
machine, so that the GPUs of a tensor-parallel worker do, and on one with the labels of the worker's
kind. When a machine is lost, Ray gives its bundles a new place as soon as the cluster has room for
them, and the pool starts their workers there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any

from toolkit.errors import EngineError, InputError
from toolkit.files.plan import Kind
from toolkit.files.recipe import VALUE_PATTERN, EngineSpec, HardwareSpec
from toolkit.workers.child import serve
from toolkit.workers.frames import (
    Alive,
    FromWorker,
    Progress,
    RunRound,
    RunSlice,
    Start,
    ToWorker,
    front_side,
    pack,
    worker_side,
)
from toolkit.workers.lifeline import LifeSigns
from toolkit.workers.pool import PATIENCE, Body, OnFrame, WorkerPool, WorkerSpec
from toolkit.workers.process import engine_variables
from toolkit.workers.protocol import OnEvent
from toolkit.workers.supervisor import Patience

# Where the workers of a plan belong in a Ray cluster: how much of a machine each takes, and on
# machines of which kind.
#
# Machines are told apart by Ray's labels. On GPUs it is the label that Ray sets itself, the
# accelerator's type; for CPUs it sets none, so whoever starts a node says of which kind it is:
# `ray start --labels=llmctl.io/kind=NAME`, with the name of the recipe. A fleet may name other
# labels. Where all workers are of one kind and nobody names labels, any machine will do that has
# the CPUs and GPUs.

ACCELERATOR = "ray.io/accelerator-type"
KIND = "llmctl.io/kind"
# Ray's own reading of what NVIDIA's driver calls a GPU: capitals up to and with the first word that
# has a digit.
DATA_CENTRE = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")


@dataclass(slots=True, frozen=True)
class MachineShare:
    """What a worker takes of a machine."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, engine: EngineSpec, hardware: HardwareSpec) -> MachineShare:
        """The threads of its engine's processes, and a GPU for each where they need one."""
        processes = engine.tensor_parallel_size
        return cls((engine.threads or 1) * processes, processes if hardware.device == "cuda" else 0)

    @property
    def bundle(self) -> dict[str, float]:
        """In Ray's words."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def times(self, machine: Mapping[str, float]) -> int:
        """How many workers a machine of these resources has room for."""
        return min(int(machine.get(what, 0.0) // count) for what, count in self.bundle.items())

    def __str__(self) -> str:
        return " and ".join(f"{count:g} {what}" for what, count in self.bundle.items())


@dataclass(slots=True, frozen=True)
class WorkerPlacement:
    """One worker: what it loads, and the labels that its machine must have."""

    outfit: WorkerSpec
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> MachineShare:
        return MachineShare.of(self.outfit.engine, self.outfit.hardware)


@dataclass(slots=True, frozen=True)
class Machine:
    """A node of a cluster: its labels, and all that it has by resource."""

    labels: Mapping[str, str]
    resources: Mapping[str, float]


def places(kinds: Sequence[Kind]) -> list[WorkerPlacement]:
    """A place for each of a plan's workers, in the order of their numbers. `InputError` as
    `node_labels`.
    """
    labels = node_labels(kinds)
    pairs = zip(kinds, labels, strict=True)
    return [
        WorkerPlacement(WorkerSpec.of(kind.recipe), own)
        for kind, own in pairs
        for _ in range(kind.workers)
    ]


def node_labels(kinds: Sequence[Kind]) -> list[dict[str, str]]:
    """Of each kind the labels of its machines.

    `InputError` where there are several kinds and labels cannot tell their machines apart.
    """
    if len(kinds) == 1:
        return [kinds[0].nodes]
    found = [kind.nodes or _usual(kind) for kind in kinds]
    for number, kind in enumerate(kinds):
        for other, labels in zip(kinds[:number], found, strict=False):
            _check_apart(kind, other, found[number], labels)
    return found


def accelerator_type(device: str) -> str:
    """What Ray calls a GPU that its driver, or a data sheet, calls `device`: A100 for NVIDIA
    A100-SXM4-80GB.
    """
    name = device if " " in device else f"NVIDIA {device}"
    match = DATA_CENTRE.match(name)
    if match and len(match[1]) > 1:
        return match[1].replace(" ", "-")
    return re.sub(r"^NVIDIA\s+", "", name).strip().replace(" ", "-")


def no_room(wanted: Sequence[WorkerPlacement], machines: Sequence[Machine]) -> str:
    """What was asked of a cluster of these machines, and what it has: of those kinds that it can
    never hold, else of all.
    """
    kinds = [
        (list(same)) for _, same in groupby(wanted, key=lambda place: (place.share, place.labels))
    ]
    short = [kind for kind in kinds if _room(kind[0], machines) < len(kind)]
    return "the cluster has no room for " + "; and none for ".join(
        _lacks(kind, machines) for kind in short or kinds
    )


def _usual(kind: Kind) -> dict[str, str]:
    if kind.recipe.hardware.device == "cuda":
        return {ACCELERATOR: accelerator_type(kind.fit.engine.device)}
    name = kind.recipe.name
    if not re.fullmatch(VALUE_PATTERN, name):
        raise InputError(
            f"recipe '{name}': its name cannot be a label of machines",
            "name them in the fleet: nodes",
        )
    return {KIND: name}


def _check_apart(
    kind: Kind, other: Kind, labels: Mapping[str, str], others: Mapping[str, str]
) -> None:
    """Several recipes may share their machines, if those are of one kind."""
    devices = [one.fit.engine.device for one in (other, kind)]
    if labels == others and devices[0] != devices[1]:
        raise InputError(
            f"machines with {devices[0]} and with {devices[1]} have the same label in a Ray cluster, {_text(labels)}",
            "name labels of your own in the fleet, like nodes: {memory: 80GB}; then ray start --labels=memory=80GB",
        )


def _room(place: WorkerPlacement, machines: Sequence[Machine]) -> int:
    return sum(place.share.times(machine.resources) for machine in _of_kind(place, machines))


def _of_kind(place: WorkerPlacement, machines: Sequence[Machine]) -> Iterator[Machine]:
    return (machine for machine in machines if place.labels.items() <= machine.labels.items())


def _lacks(kind: Sequence[WorkerPlacement], machines: Sequence[Machine]) -> str:
    """So many workers, of what, where; and what there is."""
    place, fitting = kind[0], list(_of_kind(kind[0], machines))
    asked = f"{len(kind)} worker{'s' * (len(kind) > 1)} of {place.share} each"
    if not place.labels:
        there = f"{_total(place.share, fitting)} in all on {len(machines)} machines"
        return f"{asked}: {there}, of which some may be in use"
    asked += f" on machines with {_text(place.labels)}"
    if fitting:
        return f"{asked}: {_total(place.share, fitting)} in all on {len(fitting)} of them, of which some may be in use"
    return (
        f"{asked}: none of its {len(machines)} has that; they have {_seen(place.labels, machines)}"
    )


def _seen(labels: Mapping[str, str], machines: Sequence[Machine]) -> str:
    """What machines have under the keys of `labels`, each with how many have it."""
    shown = [
        _text({key: one.labels[key] for key in labels if key in one.labels}) for one in machines
    ]
    counts = {text: shown.count(text) for text in sorted(shown)}
    return ", ".join(f"{text} ({count})" for text, count in counts.items())


def _total(share: MachineShare, machines: Sequence[Machine]) -> str:
    sums = {what: sum(one.resources.get(what, 0.0) for one in machines) for what in share.bundle}
    return " and ".join(f"{total:g} {what}" for what, total in sums.items())


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"


# What runs on a machine of the cluster: a worker's loop as an actor, which hears and says frames
# as bytes.
#
# The loop is that of a worker's process (`toolkit.workers.child`). Ray calls methods on threads
# of their own, in whatever order; frames are numbered, and come in theirs. A batch is one call
# whose frames stream back as the worker sends them, a few per second and not one per token.

THREADS = 4  # the loop, a batch's call, the end of the call before, and what is told meanwhile


class QueueChannel:
    """`toolkit.workers.frames.Channel` between threads. Ray ends the actor whose front is gone."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[ToWorker] = SimpleQueue()
        self._outbox: SimpleQueue[FromWorker] = SimpleQueue()
        self._put_back: deque[ToWorker] = deque()
        self._early: dict[int, ToWorker] = {}
        self._next = 0
        self._lock = threading.Lock()

    def deliver(self, number: int, frame: ToWorker) -> None:
        """A frame from the front, which counts them from 0; one whose predecessors are not here yet
        waits for them.
        """
        with self._lock:
            self._early[number] = frame
            while self._next in self._early:
                self._inbox.put(self._early.pop(self._next))
                self._next += 1

    def take(self) -> FromWorker:
        """The next frame for the front, waiting for it."""
        return self._outbox.get()

    def send(self, frame: FromWorker) -> None:
        self._outbox.put(frame)

    def receive(self) -> ToWorker:
        return self._put_back.popleft() if self._put_back else self._inbox.get()

    def poll(self) -> list[ToWorker]:
        frames = list(self._put_back)
        self._put_back.clear()
        try:
            while True:
                frames.append(self._inbox.get_nowait())
        except Empty:
            return frames

    def put_back(self, frame: ToWorker) -> None:
        self._put_back.appendleft(frame)


class WorkerActor:
    """A worker, as Ray makes one. Frames cross as bytes, each with its length before it."""

    def __init__(self) -> None:
        self._channel = QueueChannel()

    def live(self) -> int:
        """Serve until told to stop, and return the exit code; a bug of the engine is raised."""
        return serve(self._channel, LifeSigns(lambda: self._channel.send(Alive()), idle=False))

    def tell(self, number: int, data: bytes) -> None:
        """A frame that needs no answer."""
        for frame in worker_side().feed(data):
            self._channel.deliver(number, frame)

    def ask(self, number: int, data: bytes) -> Iterator[bytes]:
        """A frame that is answered: progress as it comes, and then what ends it."""
        self.tell(number, data)
        while True:
            frame = self._channel.take()
            yield pack(frame)
            if not isinstance(frame, Progress | Alive):
                return


ROOM_TIMEOUT_S = 60.0
LAST_FRAMES_S = 5.0  # an actor that ended in order has said its last: for these frames to arrive


class RayWorkers(WorkerPool):
    """The pool whose bodies are actors of the cluster that this process has joined.

    Args:
        places: of each worker, by number, what it loads and where.
        room_timeout_s: how long `start` waits for the cluster to have room for all of them.
        backoff_s, stop_timeout_s, patience: as the pool's.
    """

    def __init__(
        self,
        places: Sequence[WorkerPlacement],
        *,
        room_timeout_s: float = ROOM_TIMEOUT_S,
        backoff_s: float = 0.5,
        stop_timeout_s: float = 10.0,
        patience: Patience = PATIENCE,
    ) -> None:
        super().__init__(
            len(places),
            self._spawn_actor,
            backoff_s=backoff_s,
            stop_timeout_s=stop_timeout_s,
            patience=patience,
            start_s=math.inf,  # an actor may wait for a place as long as a load may take
        )
        self._places = places
        self._room_timeout_s = room_timeout_s
        self._group: Any = None  # Ray's PlacementGroup

    async def start(self, on_event: OnEvent) -> None:
        """As the pool's; `EngineError` also where the cluster has no room for all workers."""
        from ray.util import placement_group

        self._group = placement_group(
            [place.share.bundle for place in self._places],
            strategy="SPREAD",
            bundle_label_selector=[dict(place.labels) for place in self._places],
        )
        try:
            await asyncio.wait_for(self._group.ready(), self._room_timeout_s)
        except TimeoutError:
            await self.stop()
            raise _no_room(self._places, self._room_timeout_s) from None
        await super().start(on_event)

    async def stop(self) -> None:
        """As the pool's, and the room is given back."""
        await super().stop()
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None

    async def _spawn_actor(self, index: int, on_frame: OnFrame) -> Body:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place, outfit = self._places[index], self._places[index].outfit
        actor = ray.remote(WorkerActor).options(
            num_cpus=place.share.cpus,
            num_gpus=place.share.gpus,
            max_concurrency=THREADS,
            # the pool starts it again, with a new engine and the frames counted from 0
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
            runtime_env={"env_vars": engine_variables(outfit.engine.threads)},
        )
        body = ActorBody(actor.remote(), on_frame)
        body.send(Start.of(outfit.model, outfit.engine, outfit.hardware, outfit.flush_s))
        return body


class ActorBody:
    """One worker's actor as the front sees it (`toolkit.workers.pool.Body`)."""

    def __init__(self, actor: Any, on_frame: OnFrame) -> None:
        self._actor = actor
        self._on_frame = on_frame
        self._sent = 0
        self._hearing: set[asyncio.Task[None]] = set()
        self._life = actor.live.remote()

    def send(self, frame: ToWorker) -> None:
        """Call the actor. Of a call to one that is gone, nothing is heard."""
        number, self._sent = self._sent, self._sent + 1
        if isinstance(frame, Start | RunSlice | RunRound):
            hearing = asyncio.create_task(self._hear(self._actor.ask.remote(number, pack(frame))))
            self._hearing.add(hearing)
            hearing.add_done_callback(self._hearing.discard)
        else:
            self._actor.tell.options(num_returns=0).remote(number, pack(frame))

    def kill(self) -> None:
        """End its process, or its wait for a place."""
        import ray

        ray.kill(self._actor)

    async def gone(self) -> str:
        """Wait for its end, whatever brings it, and see that nothing is left."""
        from ray.exceptions import RayError

        try:
            reason = f"exit code {await self._life}"
            if self._hearing:
                await asyncio.wait(self._hearing, timeout=LAST_FRAMES_S)
        except RayError as error:
            reason = _reason(str(error))
        for hearing in self._hearing:
            hearing.cancel()
        self.kill()
        return reason

    async def _hear(self, answers: Any) -> None:
        """What streams back from one call."""
        from ray.exceptions import RayError

        reader = front_side()
        with contextlib.suppress(RayError):  # `gone` says what happened
            async for answer in answers:
                for frame in reader.feed(await answer):
                    self._on_frame(frame)


def _reason(said: str) -> str:
    """Ray's message in one line: of a traceback its last one, of an actor's death what brought it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    causes = [line for line in lines[1:] if line.startswith("The actor ")]
    return (causes or lines[-1:] or ["the actor ended"])[0][:300]


def _no_room(wanted: Sequence[WorkerPlacement], waited_s: float) -> EngineError:
    import ray

    machines = [Machine(node["Labels"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return EngineError(
        f"{no_room(wanted, machines)} (waited {waited_s:g} s)",
        "add machines, or serve with fewer workers",
    )
