"""Where the workers of a plan belong in a Ray cluster: how much of a machine each takes, and on machines of which kind.

Machines are told apart by Ray's labels. On GPUs it is the label that Ray sets itself, the accelerator's type; for CPUs
it sets none, so whoever starts a node says of which kind it is: `ray start --labels=llmctl.io/kind=NAME`, with the
name of the recipe. A fleet may name other labels. Where all workers are of one kind and nobody names labels, any
machine will do that has the CPUs and GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from toolkit.errors import InputError
from toolkit.files.labels import VALUE_PATTERN
from toolkit.files.plan import Kind
from toolkit.files.recipe import EngineSpec, HardwareSpec
from toolkit.workers.processes import Outfit

ACCELERATOR = "ray.io/accelerator-type"
KIND = "llmctl.io/kind"
# Ray's own reading of what NVIDIA's driver calls a GPU: capitals up to and with the first word that has a digit.
DATA_CENTRE = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*\d[A-Z0-9]*)")


@dataclass(slots=True, frozen=True)
class Share:
    """What a worker takes of a machine."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, engine: EngineSpec, hardware: HardwareSpec) -> Share:
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
class Place:
    """One worker: what it loads, and the labels that its machine must have."""

    outfit: Outfit
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def share(self) -> Share:
        return Share.of(self.outfit.engine, self.outfit.hardware)


@dataclass(slots=True, frozen=True)
class Machine:
    """A node of a cluster: its labels, and all that it has by resource."""

    labels: Mapping[str, str]
    resources: Mapping[str, float]


def places(kinds: Sequence[Kind]) -> list[Place]:
    """A place for each of a plan's workers, in the order of their numbers. `InputError` as `node_labels`."""
    labels = node_labels(kinds)
    pairs = zip(kinds, labels, strict=True)
    return [Place(Outfit.of(kind.recipe), own) for kind, own in pairs for _ in range(kind.workers)]


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
    """What Ray calls a GPU that its driver, or a data sheet, calls `device`: A100 for NVIDIA A100-SXM4-80GB."""
    name = device if " " in device else f"NVIDIA {device}"
    match = DATA_CENTRE.match(name)
    if match and len(match[1]) > 1:
        return match[1].replace(" ", "-")
    return re.sub(r"^NVIDIA\s+", "", name).strip().replace(" ", "-")


def no_room(wanted: Sequence[Place], machines: Sequence[Machine]) -> str:
    """What was asked of a cluster of these machines, and what it has: of those kinds that it can never hold, else of
    all."""
    kinds = [(list(same)) for _, same in groupby(wanted, key=lambda place: (place.share, place.labels))]
    short = [kind for kind in kinds if _room(kind[0], machines) < len(kind)]
    return "the cluster has no room for " + "; and none for ".join(_lacks(kind, machines) for kind in short or kinds)


def _usual(kind: Kind) -> dict[str, str]:
    if kind.recipe.hardware.device == "cuda":
        return {ACCELERATOR: accelerator_type(kind.fit.engine.device)}
    name = kind.recipe.name
    if not re.fullmatch(VALUE_PATTERN, name):
        raise InputError(f"recipe '{name}': its name cannot be a label of machines", "name them in the fleet: nodes")
    return {KIND: name}


def _check_apart(kind: Kind, other: Kind, labels: Mapping[str, str], others: Mapping[str, str]) -> None:
    """Several recipes may share their machines, if those are of one kind."""
    devices = [one.fit.engine.device for one in (other, kind)]
    if labels == others and devices[0] != devices[1]:
        raise InputError(
            f"machines with {devices[0]} and with {devices[1]} have the same label in a Ray cluster, {_text(labels)}",
            "name labels of your own in the fleet, like nodes: {memory: 80GB}; then ray start --labels=memory=80GB",
        )


def _room(place: Place, machines: Sequence[Machine]) -> int:
    return sum(place.share.times(machine.resources) for machine in _of_kind(place, machines))


def _of_kind(place: Place, machines: Sequence[Machine]) -> Iterator[Machine]:
    return (machine for machine in machines if place.labels.items() <= machine.labels.items())


def _lacks(kind: Sequence[Place], machines: Sequence[Machine]) -> str:
    """So many workers, of what, where; and what there is."""
    place, fitting = kind[0], list(_of_kind(kind[0], machines))
    asked = f"{len(kind)} worker{'s' * (len(kind) > 1)} of {place.share} each"
    if not place.labels:
        return (
            f"{asked}: {_total(place.share, fitting)} in all on {len(machines)} machines, of which some may be in use"
        )
    asked += f" on machines with {_text(place.labels)}"
    if fitting:
        return f"{asked}: {_total(place.share, fitting)} in all on {len(fitting)} of them, of which some may be in use"
    return f"{asked}: none of its {len(machines)} has that; they have {_seen(place.labels, machines)}"


def _seen(labels: Mapping[str, str], machines: Sequence[Machine]) -> str:
    """What machines have under the keys of `labels`, each with how many have it."""
    shown = [_text({key: one.labels[key] for key in labels if key in one.labels}) for one in machines]
    counts = {text: shown.count(text) for text in sorted(shown)}
    return ", ".join(f"{text} ({count})" for text, count in counts.items())


def _total(share: Share, machines: Sequence[Machine]) -> str:
    sums = {what: sum(one.resources.get(what, 0.0) for one in machines) for what in share.bundle}
    return " and ".join(f"{total:g} {what}" for what, total in sums.items())


def _text(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items())) or "none"
