"""Workers as Ray actors: the pool of `toolkit.workers`, with actors as bodies.

One placement group holds a bundle for each worker, spread over the machines. A bundle lies on one
machine, so that all GPUs of a tensor-parallel worker do, and that machine has the labels of the
worker's kind. When a machine is lost, Ray moves its bundles as soon as the cluster has room for
them, and the pool starts their workers there.

In this order: how much of which machine each worker takes (`places`, `node_labels`, `no_room`); the
actor, which runs on a machine of the cluster; and the pool (`RayWorkers`), which runs in the front.

Ray's labels distinguish machines. For GPUs it is the label that Ray sets itself, the accelerator's
type. For CPUs Ray sets none, so the operator names the kind of a node when it starts: `ray start
--labels=llmctl.io/kind=NAME`, with the name of the recipe. A fleet may name other labels. If all
workers are of one kind and no labels are named, any machine with enough CPUs and GPUs is used.
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
from toolkit.workers.lifeline import LifeSigns
from toolkit.workers.pool import PATIENCE, Body, WorkerPool, WorkerSpec
from toolkit.workers.process import OnFrame, engine_variables
from toolkit.workers.protocol import (
    Alive,
    FromWorker,
    OnEvent,
    Progress,
    RunRound,
    RunSlice,
    Start,
    ToWorker,
    front_side,
    pack,
    worker_side,
)
from toolkit.workers.supervisor import Patience

ACCELERATOR = "ray.io/accelerator-type"
KIND = "llmctl.io/kind"
# How Ray reads the GPU's name from NVIDIA's driver: words in capitals, up to the first with a
# digit.
DATA_CENTRE = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")


@dataclass(slots=True, frozen=True)
class MachineShare:
    """The CPUs and GPUs that a worker takes of a machine."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, engine: EngineSpec, hardware: HardwareSpec) -> MachineShare:
        """The threads of the engine's processes, and a GPU for each process that needs one."""
        processes = engine.tensor_parallel_size
        return cls((engine.threads or 1) * processes, processes if hardware.device == "cuda" else 0)

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray's resources."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def fits(self, machine: Mapping[str, float]) -> int:
        """The number of workers that a machine with these resources has room for."""
        return min(int(machine.get(what, 0.0) // count) for what, count in self.bundle.items())

    def __str__(self) -> str:
        return " and ".join(f"{count:g} {what}" for what, count in self.bundle.items())


@dataclass(slots=True, frozen=True)
class WorkerPlacement:
    """One worker: what it loads, and the labels that its machine must have."""

    spec: WorkerSpec
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> MachineShare:
        return MachineShare.of(self.spec.engine, self.spec.hardware)


@dataclass(slots=True, frozen=True)
class Machine:
    """A node of a cluster: its labels and its resources."""

    labels: Mapping[str, str]
    resources: Mapping[str, float]


def places(kinds: Sequence[Kind]) -> list[WorkerPlacement]:
    """The placements of a plan's workers, by number. Raises `InputError` as `node_labels`."""
    return [
        WorkerPlacement(WorkerSpec.of(kind.recipe), labels)
        for kind, labels in zip(kinds, node_labels(kinds), strict=True)
        for _ in range(kind.workers)
    ]


def node_labels(kinds: Sequence[Kind]) -> list[dict[str, str]]:
    """The labels of each kind's machines.

    Raises `InputError` if there are several kinds and labels cannot distinguish their machines.
    """
    if len(kinds) == 1:
        return [kinds[0].nodes]
    found = [kind.nodes or _default_labels(kind) for kind in kinds]
    for number, kind in enumerate(kinds):
        for other, labels in zip(kinds[:number], found, strict=False):
            _check_apart(kind, other, found[number], labels)
    return found


def accelerator_type(device: str) -> str:
    """Ray's name of a GPU that its driver or a data sheet calls `device`: A100 for NVIDIA
    A100-SXM4-80GB.
    """
    name = device if " " in device else f"NVIDIA {device}"
    match = DATA_CENTRE.match(name)
    if match and len(match[1]) > 1:
        return match[1].replace(" ", "-")
    return re.sub(r"^NVIDIA\s+", "", name).strip().replace(" ", "-")


def no_room(wanted: Sequence[WorkerPlacement], machines: Sequence[Machine]) -> str:
    """Why a cluster of these machines has no room for the `wanted` workers: what they need and what
    it has, for the kinds that it can never hold, else for all.
    """
    kinds = [
        list(same) for _, same in groupby(wanted, key=lambda place: (place.share, place.labels))
    ]
    short = [
        kind
        for kind in kinds
        if len(kind)
        > sum(kind[0].share.fits(machine.resources) for machine in _of_kind(kind[0], machines))
    ]
    return "the cluster has no room for " + "; and none for ".join(
        _lacks(kind, machines) for kind in short or kinds
    )


def _default_labels(kind: Kind) -> dict[str, str]:
    if kind.recipe.hardware.device == "cuda":
        return {ACCELERATOR: accelerator_type(kind.fit.engine.device)}
    name = kind.recipe.name
    if not re.fullmatch(VALUE_PATTERN, name):
        raise InputError(
            f"recipe '{name}': its name cannot be a label of machines",
            "set their labels in the fleet: nodes",
        )
    return {KIND: name}


def _check_apart(
    kind: Kind, other: Kind, labels: Mapping[str, str], others: Mapping[str, str]
) -> None:
    """Several recipes may share machines only if these have the same device."""
    devices = other.fit.engine.device, kind.fit.engine.device
    if labels == others and devices[0] != devices[1]:
        raise InputError(
            f"machines with {devices[0]} and with {devices[1]} have the same label in a Ray "
            f"cluster, {_text(labels)}",
            "set other labels in the fleet, like nodes: {memory: 80GB}; then: "
            "ray start --labels=memory=80GB",
        )


def _of_kind(place: WorkerPlacement, machines: Sequence[Machine]) -> Iterator[Machine]:
    return (machine for machine in machines if place.labels.items() <= machine.labels.items())


def _lacks(kind: Sequence[WorkerPlacement], machines: Sequence[Machine]) -> str:
    """How many workers need what on which machines, and what there is."""
    place, fitting = kind[0], list(_of_kind(kind[0], machines))
    needed = f"{len(kind)} worker{'s' * (len(kind) > 1)} of {place.share} each"
    if not place.labels:
        there = f"{_total(place.share, fitting)} in all on {len(machines)} machines"
        return f"{needed}: {there}, of which some may be in use"
    needed += f" on machines with {_text(place.labels)}"
    if fitting:
        total = _total(place.share, fitting)
        return f"{needed}: {total} in all on {len(fitting)} of them, of which some may be in use"
    shown = [
        _text({key: machine.labels[key] for key in place.labels if key in machine.labels})
        for machine in machines
    ]
    counts = ", ".join(f"{text} ({shown.count(text)})" for text in sorted(set(shown)))
    return f"{needed}: none of its {len(machines)} has that; they have {counts}"


def _total(share: MachineShare, machines: Sequence[Machine]) -> str:
    sums = {
        what: sum(machine.resources.get(what, 0.0) for machine in machines) for what in share.bundle
    }
    return " and ".join(f"{total:g} {what}" for what, total in sums.items())


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"


# Threads of an actor: the loop, a batch's call, the end of the call before it, and other frames.
THREADS = 4


class QueueChannel:
    """`toolkit.workers.protocol.Channel` between threads. Ray ends an actor when its front is gone.

    Ray may call methods in any order, so frames are numbered and delivered in order.
    """

    def __init__(self) -> None:
        self._inbox: SimpleQueue[ToWorker] = SimpleQueue()
        self._outbox: SimpleQueue[FromWorker] = SimpleQueue()
        self._put_back: deque[ToWorker] = deque()
        self._early: dict[int, ToWorker] = {}
        self._next = 0
        self._lock = threading.Lock()

    def deliver(self, number: int, frame: ToWorker) -> None:
        """Deliver the front's frame `number`, counted from 0, after all earlier frames."""
        with self._lock:
            self._early[number] = frame
            while self._next in self._early:
                self._inbox.put(self._early.pop(self._next))
                self._next += 1

    def take(self) -> FromWorker:
        """Wait for the next frame to the front."""
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
    """A worker's loop (`toolkit.workers.child`) as a Ray actor. Frames are sent as bytes, each
    preceded by its length.

    A batch is one call; its frames stream back as the worker sends them, a few per second.
    """

    def __init__(self) -> None:
        self._channel = QueueChannel()

    def serve(self) -> int:
        """Serve until `Stop`, and return the exit code; errors of the engine propagate."""
        return serve(self._channel, LifeSigns(lambda: self._channel.send(Alive()), idle=False))

    def send(self, number: int, data: bytes) -> None:
        """Deliver a frame that gets no answer."""
        for frame in worker_side().feed(data):
            self._channel.deliver(number, frame)

    def call(self, number: int, data: bytes) -> Iterator[bytes]:
        """Deliver a frame that is answered. Yields progress as it comes, then the final frame."""
        self.send(number, data)
        while True:
            frame = self._channel.take()
            yield pack(frame)
            if not isinstance(frame, Progress | Alive):
                return


ROOM_TIMEOUT_S = 60.0
LAST_FRAMES_S = 5.0  # for the last frames of an actor that ended in order to arrive


class RayWorkers(WorkerPool):
    """The pool of actors in the cluster that this process has joined.

    Args:
        places: what each worker loads and where, by number.
        room_timeout_s: how long `start` waits for the cluster to have room for all workers.
        backoff_s, stop_timeout_s, patience: as in `WorkerPool`.
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
        """See `WorkerPool.start`. Raises `EngineError` also if the cluster has no room for all
        workers.
        """
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
            import ray

            alive = [node for node in ray.nodes() if node["Alive"]]
            machines = [Machine(node["Labels"], node["Resources"]) for node in alive]
            raise EngineError(
                f"{no_room(self._places, machines)} (waited {self._room_timeout_s:g} s)",
                "add machines, or serve with fewer workers",
            ) from None
        await super().start(on_event)

    async def stop(self) -> None:
        """See `WorkerPool.stop`. It also frees the workers' room in the cluster."""
        await super().stop()
        if self._group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(self._group)
            self._group = None

    async def _spawn_actor(self, index: int, on_frame: OnFrame) -> Body:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place, spec = self._places[index], self._places[index].spec
        actor = ray.remote(WorkerActor).options(
            num_cpus=place.share.cpus,
            num_gpus=place.share.gpus,
            max_concurrency=THREADS,
            max_restarts=0,  # the pool restarts it, with a new engine and frames counted from 0
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            ),
            runtime_env={"env_vars": engine_variables(spec.engine.threads, spec.hardware.device)},
        )
        body = ActorBody(actor.remote(), on_frame)
        body.send(Start.of(spec.model, spec.engine, spec.hardware))
        return body


class ActorBody:
    """One worker's actor as the front sees it: a `toolkit.workers.pool.Body`."""

    def __init__(self, actor: Any, on_frame: OnFrame) -> None:
        self._actor = actor
        self._on_frame = on_frame
        self._sent = 0
        self._receiving: set[asyncio.Task[None]] = set()
        self._end = actor.serve.remote()

    def send(self, frame: ToWorker) -> None:
        """Call the actor. A call to an actor that is gone gets no answer."""
        number, self._sent = self._sent, self._sent + 1
        if isinstance(frame, Start | RunSlice | RunRound):
            answers = self._actor.call.remote(number, pack(frame))
            receiving = asyncio.create_task(self._receive(answers))
            self._receiving.add(receiving)
            receiving.add_done_callback(self._receiving.discard)
        else:
            self._actor.send.options(num_returns=0).remote(number, pack(frame))

    def kill(self) -> None:
        """End its process, or its wait for a place in the cluster."""
        import ray

        ray.kill(self._actor)

    async def gone(self) -> str:
        """Wait until it has ended for any reason, and ensure that nothing of it is left."""
        from ray.exceptions import RayError

        try:
            reason = f"exit code {await self._end}"
            if self._receiving:
                await asyncio.wait(self._receiving, timeout=LAST_FRAMES_S)
        except RayError as error:
            reason = _reason(str(error))
        for receiving in self._receiving:
            receiving.cancel()
        self.kill()
        return reason

    async def _receive(self, answers: Any) -> None:
        """Receive the frames that stream back from one call."""
        from ray.exceptions import RayError

        reader = front_side()
        with contextlib.suppress(RayError):  # `gone` reports it
            async for answer in answers:
                for frame in reader.feed(await answer):
                    self._on_frame(frame)


def _reason(message: str) -> str:
    """Ray's message in one line: the last line of a traceback, or the cause of an actor's end."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line for line in lines[1:] if line.startswith("The actor ")]
    return (causes or lines[-1:] or ["the actor ended"])[0][:300]
