"""Workers as Ray actors: the pool of `toolkit.workers`, with actors as bodies.

The actor runs on a machine of the cluster, and the pool (`RayWorkers`) in the front. One placement
group holds a bundle for each worker, spread over the machines. When a machine is lost, Ray
moves its bundles as soon as the cluster has room for them, and the pool starts their workers there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Iterator
from typing import Any

from msgspec.msgpack import encode

from toolkit.engines.protocol import EnginePass
from toolkit.engines.resources import engine_variables
from toolkit.errors import EngineError
from toolkit.files.recipe import Recipe
from toolkit.processes.channel import Alive, Channel
from toolkit.processes.lifeline import LifeSigns
from toolkit.workers.child import serve
from toolkit.workers.pool import Body, Patience, WorkerPool
from toolkit.workers.process import OnFrame
from toolkit.workers.protocol import (
    FROM_WORKER,
    TO_WORKER,
    OnEvent,
    PassProgress,
    Start,
    ToWorker,
)

# Threads of an actor: the loop, a pass's call, the end of the call before it, and other frames.
THREADS = 4


def bundle_of(recipe: Recipe) -> dict[str, float]:
    """What a worker takes of a machine: the threads of its engine, and the GPU if it needs one."""
    gpu = {"GPU": 1.0} if recipe.hardware.device == "cuda" else {}
    return {"CPU": float(recipe.engine.threads or 1)} | gpu


def reason(message: str) -> str:
    """Ray's message in one line: the last line of a traceback, or the cause of an actor's end."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line for line in lines[1:] if line.startswith("The actor ")]
    return (causes or lines[-1:] or ["the actor ended"])[0][:300]


class WorkerActor:
    """A worker's loop (`toolkit.workers.child`) as a Ray actor. Ray ends it when its front is gone.

    Frames come and go as bytes. A pass is one call; its frames stream back as the worker sends
    them, a few per second.
    """

    def __init__(self) -> None:
        front, worker = socket.socketpair()
        self._front = Channel(front)
        self._worker = Channel(worker)
        self._early: dict[int, ToWorker] = {}
        self._next = 0
        self._lock = threading.Lock()

    def serve(self) -> int:
        """Serve until `Stop`, and return the exit code; errors of the engine propagate."""
        signs = LifeSigns(lambda: self._worker.send(Alive()), idle=False)
        return serve(self._worker, signs)

    def send(self, number: int, data: bytes) -> None:
        """Deliver the front's frame `number`, counted from 0, after all earlier frames: Ray may
        call methods in any order.
        """
        with self._lock:
            self._early[number] = TO_WORKER.decode(data)
            while self._next in self._early:
                self._front.send(self._early.pop(self._next))
                self._next += 1

    def call(self, number: int, data: bytes) -> Iterator[bytes]:
        """Deliver a frame that is answered. Yields progress as it comes, then the final frame."""
        self.send(number, data)
        while True:
            frame = self._front.receive(FROM_WORKER)
            yield encode(frame)
            if not isinstance(frame, PassProgress | Alive):
                return


LAST_FRAMES_S = 5.0  # for the last frames of an actor that ended in order to arrive


class RayWorkers(WorkerPool):
    """The pool of actors in the cluster that this process has joined.

    Args:
        recipe: what each worker loads.
        workers: how many there are.
        patience: as in `WorkerPool`.
    """

    start_s = math.inf  # an actor may wait for a place as long as a load may take
    room_s = 60.0  # that the cluster has to make room for all workers

    def __init__(self, recipe: Recipe, workers: int, patience: Patience) -> None:
        super().__init__(workers, patience)
        self._recipe = recipe
        self._room: Any = None  # a placement group of Ray, with a bundle for each worker

    async def start(self, on_event: OnEvent) -> None:
        """See `WorkerPool.start`. Raises `EngineError` also if the cluster lacks room for them."""
        from ray.util import placement_group

        bundles = [bundle_of(self._recipe)] * self.size
        self._room = placement_group(bundles, strategy="SPREAD")
        try:
            await asyncio.wait_for(self._room.ready(), self.room_s)
        except TimeoutError:
            await self.stop()
            raise self._no_room() from None
        await super().start(on_event)

    async def stop(self) -> None:
        """See `WorkerPool.stop`. It also frees the workers' room in the cluster."""
        from ray.util import remove_placement_group

        await super().stop()
        if self._room is not None:
            remove_placement_group(self._room)
            self._room = None

    async def spawn(self, worker: int, on_frame: OnFrame) -> Body:
        """Start an actor, which may wait for its place in the cluster."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        recipe = self._recipe
        bundle = bundle_of(recipe)
        place = PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=worker)
        variables = engine_variables(recipe.engine.threads, recipe.hardware.device)
        actor = ray.remote(WorkerActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            max_restarts=0,  # llmctl starts another one
            scheduling_strategy=place,
            max_concurrency=THREADS,
            runtime_env={"env_vars": variables},
        )
        body = ActorBody(actor.remote(), on_frame)
        body.send(Start(recipe.model_dump_json()))
        return body

    def _no_room(self) -> EngineError:
        """Return the error that says what the workers need and what the cluster has."""
        import ray

        bundle = bundle_of(self._recipe)
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        share = " and ".join(f"{count:g} {what}" for what, count in bundle.items())
        total = " and ".join(
            f"{sum(machine.get(what, 0.0) for machine in machines):g} {what}" for what in bundle
        )
        return EngineError(
            f"the cluster has no room for {self.size} worker{'s' * (self.size > 1)} of {share} "
            f"each: {total} in all on {len(machines)} machines, of which some may be in use "
            f"(waited {self.room_s:g} s)",
            "add machines, or serve with fewer workers",
        )


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
        number = self._sent
        self._sent = self._sent + 1
        if isinstance(frame, Start | EnginePass):
            answers = self._actor.call.remote(number, encode(frame))
            receiving = asyncio.create_task(self._receive(answers))
            self._receiving.add(receiving)
            receiving.add_done_callback(self._receiving.discard)
        else:
            self._actor.send.options(num_returns=0).remote(number, encode(frame))

    def kill(self) -> None:
        """End its process, or its wait for a place in the cluster."""
        import ray

        ray.kill(self._actor)

    async def gone(self) -> str:
        """Wait until it has ended for any reason, and ensure that nothing of it is left."""
        from ray.exceptions import RayError

        try:
            ended = f"exit code {await self._end}"
            if self._receiving:
                await asyncio.wait(self._receiving, timeout=LAST_FRAMES_S)
        except RayError as error:
            ended = reason(str(error))
        for receiving in self._receiving:
            receiving.cancel()
        self.kill()
        return ended

    async def _receive(self, answers: Any) -> None:
        """Receive the frames that stream back from one call."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError):  # `gone` reports it
            async for answer in answers:
                self._on_frame(FROM_WORKER.decode(await answer))
