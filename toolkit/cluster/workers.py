"""Workers as Ray actors, behind the protocol of `toolkit.workers`: the pool is the same, their bodies are actors.

One placement group holds a bundle for each worker, spread over the machines; a bundle lies on one machine, so that the
GPUs of a tensor-parallel worker do, and on one with the labels of the worker's kind. When a machine is lost, Ray gives
its bundles a new place as soon as the cluster has room for them, and the pool starts their workers there.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

from toolkit.cluster.actor import THREADS, WorkerActor
from toolkit.cluster.places import Machine, Place, no_room
from toolkit.errors import EngineError
from toolkit.workers.frames import Run, RunRound, Start, ToWorker, front_side, pack
from toolkit.workers.pool import PATIENCE, Body, OnFrame, Pool
from toolkit.workers.process import engine_variables
from toolkit.workers.protocol import OnEvent
from toolkit.workers.supervisor import Patience

ROOM_TIMEOUT_S = 60.0
LAST_FRAMES_S = 5.0  # an actor that ended in order has said its last: for these frames to arrive


class RayWorkers(Pool):
    """The pool whose bodies are actors of the cluster that this process has joined.

    Args:
        places: of each worker, by number, what it loads and where.
        room_timeout_s: how long `start` waits for the cluster to have room for all of them.
        backoff_s, stop_timeout_s, patience: as the pool's.
    """

    def __init__(
        self,
        places: Sequence[Place],
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
            max_restarts=0,  # the pool starts it again, with a new engine and the frames counted from 0
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
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
        if isinstance(frame, Start | Run | RunRound):
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


def _no_room(wanted: Sequence[Place], waited_s: float) -> EngineError:
    import ray

    machines = [Machine(node["Labels"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return EngineError(
        f"{no_room(wanted, machines)} (waited {waited_s:g} s)", "add machines, or serve with fewer workers"
    )
