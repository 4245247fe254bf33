"""How much of which machine each worker of a plan takes, and the room for all of them in a cluster.

One placement group holds a bundle for each worker, spread over the machines. A bundle lies on one
machine, so that all GPUs of a tensor-parallel worker do, and that machine has the labels of the
worker's kind. When a machine is lost, Ray moves its bundles as soon as the cluster has room for
them.

Ray's labels distinguish machines. For GPUs it is the label that Ray sets itself, the accelerator's
type. For CPUs Ray sets none, so the operator names the kind of a node when it starts: `ray start
--labels=llmctl.io/kind=NAME`, with the name of the recipe. A fleet may name other labels. If all
workers are of one kind and no labels are named, any machine with enough CPUs and GPUs is used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from toolkit.cluster.connect import AUTO, LOCAL
from toolkit.errors import EngineError, InputError
from toolkit.files.plan import Kind
from toolkit.files.recipe import VALUE_PATTERN, Recipe

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

    def fits(self, machine: Mapping[str, float]) -> int:
        """The number of workers that a machine with these resources has room for."""
        return min(int(machine.get(what, 0.0) // count) for what, count in self.bundle.items())

    def __str__(self) -> str:
        return " and ".join(f"{count:g} {what}" for what, count in self.bundle.items())


@dataclass(slots=True, frozen=True)
class WorkerPlacement:
    """One worker: what it loads, and the labels that its machine must have."""

    recipe: Recipe
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> MachineShare:
        return MachineShare.of(self.recipe)


@dataclass(slots=True, frozen=True)
class Machine:
    """A node of a cluster: its labels and its resources."""

    labels: Mapping[str, str]
    resources: Mapping[str, float]


def places(kinds: Sequence[Kind]) -> list[WorkerPlacement]:
    """The placements of a plan's workers, by number. Raises `InputError` as `node_labels`."""
    return [
        WorkerPlacement(kind.recipe, labels)
        for kind, labels in zip(kinds, node_labels(kinds), strict=True)
        for _ in range(kind.workers)
    ]


def refuse_local_fleet(kinds: Sequence[Kind], address: str) -> None:
    """Raise `InputError` for several kinds on a cluster of this machine alone."""
    if len(kinds) > 1 and address == LOCAL:
        raise InputError(
            f"--ray {LOCAL}: a cluster of this machine alone is one node of one kind; "
            f"the fleet has {len(kinds)}",
            "leave --ray out to run workers of all kinds on this machine; "
            f"or join a cluster with --ray {AUTO}",
        )


def node_labels(kinds: Sequence[Kind]) -> list[dict[str, str]]:
    """The labels of each kind's machines.

    Raises `InputError` if there are several kinds and labels cannot distinguish their machines.
    """
    if len(kinds) == 1:
        return [kinds[0].nodes]
    labels_of_kinds: list[dict[str, str]] = []
    for kind in kinds:
        name = kind.recipe.name
        if kind.nodes:
            labels = kind.nodes
        elif kind.recipe.hardware.device == "cuda":
            labels = {ACCELERATOR: accelerator_type(kind.fit.engine.device)}
        elif re.fullmatch(VALUE_PATTERN, name):
            labels = {KIND: name}
        else:
            raise InputError(
                f"recipe '{name}': its name cannot be a label of machines",
                "set their labels in the fleet: nodes",
            )
        labels_of_kinds.append(labels)
    # Several recipes may share machines only if these have the same device.
    for number, kind in enumerate(kinds):
        for other, labels in zip(kinds[:number], labels_of_kinds, strict=False):
            devices = other.fit.engine.device, kind.fit.engine.device
            if labels == labels_of_kinds[number] and devices[0] != devices[1]:
                raise InputError(
                    f"machines with {devices[0]} and with {devices[1]} have the same label in a "
                    f"Ray cluster, {_text(labels)}",
                    "set other labels in the fleet, like nodes: {memory: 80GB}; then: "
                    "ray start --labels=memory=80GB",
                )
    return labels_of_kinds


def accelerator_type(device: str) -> str:
    """Ray's name of a GPU, from its driver's or data sheet's: A100 for NVIDIA A100-SXM4-80GB."""
    name = device if " " in device else f"NVIDIA {device}"
    match = DATA_CENTRE.match(name)
    if match and len(match[1]) > 1:
        return match[1].replace(" ", "-")
    return re.sub(r"^NVIDIA\s+", "", name).strip().replace(" ", "-")


def no_room(wanted: Sequence[WorkerPlacement], machines: Sequence[Machine]) -> str:
    """Why a cluster of these machines has no room for the `wanted` workers: what they need and what
    it has, for the kinds that it can never hold, else for all.
    """
    every = []
    short = []
    for _, same in groupby(wanted, key=lambda place: (place.share, place.labels)):
        kind = list(same)
        place = kind[0]
        fitting = _labelled(machines, kind[0].labels)
        room = sum(place.share.fits(machine.resources) for machine in fitting)
        every.append(_lacks(place, len(kind), machines))
        if len(kind) > room:
            short.append(every[-1])
    return "the cluster has no room for " + "; and none for ".join(short or every)


def _labelled(machines: Sequence[Machine], labels: Mapping[str, str]) -> list[Machine]:
    return [machine for machine in machines if labels.items() <= machine.labels.items()]


def _lacks(place: WorkerPlacement, count: int, machines: Sequence[Machine]) -> str:
    """How many workers need what on which machines, and what there is."""
    labels = place.labels
    fitting = _labelled(machines, place.labels)
    needed = f"{count} worker{'s' * (count > 1)} of {place.share} each"
    where = f"{len(machines)} machines"
    if labels:
        needed += f" on machines with {_text(labels)}"
        where = f"{len(fitting)} of them"
    if fitting or not labels:
        total = " and ".join(
            f"{sum(machine.resources.get(what, 0.0) for machine in fitting):g} {what}"
            for what in place.share.bundle
        )
        return f"{needed}: {total} in all on {where}, of which some may be in use"
    shown = Counter(
        _text({key: machine.labels[key] for key in labels if key in machine.labels})
        for machine in machines
    )
    counts = ", ".join(f"{text} ({number})" for text, number in sorted(shown.items()))
    return f"{needed}: none of its {len(machines)} has that; they have {counts}"


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"


class Room:
    """The room of some workers in the cluster that this process has joined.

    `ready` is Ray's object that exists once the cluster has room for all of them.
    """

    def __init__(self, places: Sequence[WorkerPlacement]) -> None:
        from ray.util import placement_group

        self._places = places
        self.group: Any = placement_group(
            [place.share.bundle for place in places],
            strategy="SPREAD",
            bundle_label_selector=[dict(place.labels) for place in places],
        )
        self.ready: Any = self.group.ready()

    def options(self, index: int) -> dict[str, Any]:
        """The options of an actor that takes the whole bundle of worker `index`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = self._places[index].share
        return {
            "num_cpus": share.cpus,
            "num_gpus": share.gpus,
            "max_restarts": 0,  # llmctl starts another one
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=index
            ),
        }

    def beside(self, index: int) -> list[int]:
        """The workers on the machine of worker `index`, itself included."""
        from ray.util import placement_group_table

        nodes = placement_group_table(self.group)["bundles_to_node_id"]
        return [other for other in nodes if nodes[other] == nodes[index]]

    def missing(self, waited_s: float) -> EngineError:
        """The error that says what the workers need and what the cluster has."""
        import ray

        alive = [node for node in ray.nodes() if node["Alive"]]
        machines = [Machine(node["Labels"], node["Resources"]) for node in alive]
        return EngineError(
            f"{no_room(self._places, machines)} (waited {waited_s:g} s)",
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
