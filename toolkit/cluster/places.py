"""How much of a machine each worker takes, and the room for all of them in a Ray cluster.

One placement group holds a bundle for each worker, spread over the machines. A bundle lies on one
machine, so that all GPUs of a tensor-parallel worker do. When a machine is lost, Ray moves its
bundles as soon as the cluster has room for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.errors import EngineError
from toolkit.files.recipe import Recipe

Resources = Mapping[str, float]  # of a machine, as Ray names them


@dataclass(slots=True, frozen=True)
class MachineShare:
    """The CPUs and GPUs that a worker takes of a machine."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, recipe: Recipe) -> MachineShare:
        """The threads of the engine's processes, and a GPU for each process that needs one."""
        engine = recipe.engine
        on_gpu = recipe.hardware.device == "cuda"
        processes = engine.tensor_parallel_size
        return cls((engine.threads or 1) * processes, processes if on_gpu else 0)

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray's resources."""
        return {"CPU": float(self.cpus)} | ({"GPU": float(self.gpus)} if self.gpus else {})

    def __str__(self) -> str:
        return " and ".join(f"{count:g} {what}" for what, count in self.bundle.items())


def no_room(share: MachineShare, workers: int, machines: Sequence[Resources]) -> str:
    """Why a cluster of these machines has no room: what the workers need, and what it has."""
    total = " and ".join(
        f"{sum(machine.get(what, 0.0) for machine in machines):g} {what}" for what in share.bundle
    )
    return (
        f"the cluster has no room for {workers} worker{'s' * (workers > 1)} of {share} each: "
        f"{total} in all on {len(machines)} machines, of which some may be in use"
    )


class Room:
    """The room of some workers in the cluster that this process has joined.

    `ready` is Ray's object that exists once the cluster has room for all of them.
    """

    def __init__(self, share: MachineShare, workers: int) -> None:
        from ray.util import placement_group

        self._share = share
        self._workers = workers
        self.group: Any = placement_group([share.bundle] * workers, strategy="SPREAD")
        self.ready: Any = self.group.ready()

    def options(self, index: int) -> dict[str, Any]:
        """The options of an actor that takes the whole bundle of worker `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self._share.cpus,
            "num_gpus": self._share.gpus,
            "max_restarts": 0,  # llmctl starts another one
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=index
            ),
        }

    def missing(self, waited_s: float) -> EngineError:
        """The error that says what the workers need and what the cluster has."""
        import ray

        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return EngineError(
            f"{no_room(self._share, self._workers, machines)} (waited {waited_s:g} s)",
            "add machines, or serve with fewer workers",
        )

    def free(self) -> None:
        """Give the room back. Actors in it end."""
        from ray.util import remove_placement_group

        remove_placement_group(self.group)


def reason(message: str) -> str:
    """Ray's message in one line: the last line of a traceback, or the cause of an actor's end."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line for line in lines[1:] if line.startswith("The actor ")]
    return (causes or lines[-1:] or ["the actor ended"])[0][:300]
