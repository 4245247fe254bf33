"""The worker groups of a RayCluster: one for each kind of a plan's workers, with a pod for each worker.

A plan of one kind has one group, whose pods prefer the GPU that was measured. Of a fleet each group needs machines of
its own kind: those that the fleet labels, or with the GPU that was measured; and where neither is known any, on which
the front then waits in vain for a node that Ray gives the right label, and says so. Ray's label of the GPU is
Ray's own to set; others are set here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.cluster.places import Share, node_labels
from toolkit.deploy.images import llmctl_image
from toolkit.deploy.kinds.base import PodMetadata
from toolkit.deploy.kinds.kubernetes import PodTemplate
from toolkit.deploy.kinds.pods import (
    Affinity,
    Container,
    EnvVar,
    Lifecycle,
    PodSpec,
    Resources,
)
from toolkit.deploy.kinds.raycluster import WorkerGroup
from toolkit.deploy.names import object_name
from toolkit.deploy.order import Order, Reckoned, Told, told
from toolkit.deploy.products import products
from toolkit.deploy.reckon import MIB, worker_memory_mib
from toolkit.deploy.targets.pods import (
    GPU,
    MODELS_MOUNT,
    TMP,
    TMP_MOUNT,
    loading_environment,
    models_volume,
    on_products,
    tolerations,
)
from toolkit.files.plan import Kind

EXTRA = "kuberay"  # of our package: Ray with the agents whose answers KubeRay's probes ask for
OBJECT_STORE_MIB = 256  # prompts and tokens are all that it carries
NODE_MIB = 512  # raylet and agents of a machine: 250 MiB were in use by an idle one of Ray 2.60
NODE_CPU_MILLI = 250
RAY_ENVIRONMENT = [EnvVar(name="RAY_USAGE_STATS_ENABLED", value="0")]  # of everything that runs Ray
RAYS_OWN = "ray.io/"  # before the labels that Ray sets


@dataclass(frozen=True, slots=True)
class Group:
    """A kind's group: what it is called, how many pods it has, and the labels by which the front finds its nodes.

    `alone`: there is no other kind.
    """

    kind: Kind
    name: str
    count: Reckoned[int]
    labels: Mapping[str, str]
    alone: bool

    @property
    def share(self) -> Share:
        """What a worker's actor takes of its pod."""
        return Share.of(self.kind.recipe.engine, self.kind.recipe.hardware)

    @property
    def memory(self) -> Reckoned[int]:
        """MiB that a worker's pod asks for."""
        engine = worker_memory_mib(self.kind)
        ours = f"{NODE_MIB} MiB for Ray's processes and {OBJECT_STORE_MIB} MiB for its object store"
        return Reckoned(engine.value + NODE_MIB + OBJECT_STORE_MIB, f"{engine.source} + {ours}")

    @property
    def set_here(self) -> dict[str, str]:
        """Those of its labels that Ray does not set."""
        return {key: value for key, value in self.labels.items() if not key.startswith(RAYS_OWN)}

    @property
    def machines(self) -> dict[str, str]:
        """Labels that the fleet says its machines have, Kubernetes' nodes."""
        return {key: value for key, value in self.kind.nodes.items() if not key.startswith(RAYS_OWN)}


def groups(order: Order) -> list[Group]:
    """One for each kind, in the plan's order."""
    kinds = order.plan.kinds
    labels = node_labels(kinds)
    if len(kinds) == 1:
        return [Group(kinds[0], "workers", worker_count(order), labels[0], alone=True)]
    return [
        Group(kind, object_name(kind.recipe.name), Reckoned(kind.workers, "fleet: workers"), own, alone=False)
        for kind, own in zip(kinds, labels, strict=True)
    ]


def worker_count(order: Order) -> Reckoned[int]:
    """Workers under the one scheduler: as many as the tuning needed, or the plan's."""
    workload = order.plan.workload
    if workload is None or workload.workers_needed is None:
        return Reckoned(order.plan.workers, "plan: workers")
    return Reckoned(workload.workers_needed, "tuned: so many workers under one scheduler keep all limits")


def worker_group(order: Order, group: Group, member: dict[str, str], grace_s: int, lifecycle: Lifecycle) -> WorkerGroup:
    """The group's pods, which wear the labels of a `member` and end as `lifecycle` and `grace_s` say."""
    count = group.count.value
    return WorkerGroup(
        group_name=group.name,
        replicas=count,
        min_replicas=count,
        max_replicas=count,
        labels=group.set_here or None,
        ray_start_params={
            "num-cpus": str(group.share.cpus),
            "num-gpus": str(group.share.gpus),
            "object-store-memory": str(OBJECT_STORE_MIB * MIB),
        },
        template=PodTemplate(
            metadata=PodMetadata(labels=member),
            spec=PodSpec(
                termination_grace_period_seconds=grace_s,
                affinity=_affinity(order, group),
                node_selector=group.machines or None,
                tolerations=tolerations(group.kind.recipe),
                containers=[_container(order, group, lifecycle)],
                volumes=[models_volume(order, group.kind), TMP],
            ),
        ),
    )


def told_of(order: Order, group: Group) -> list[Told]:
    """The lines of EXPLAIN.md about a group."""
    share, engine = group.share, group.kind.recipe.engine
    threads = f"recipe: {engine.threads or 1} threads x {engine.tensor_parallel_size} processes"
    lines = [
        told(f"{group.name}: replicas" + ", and serve --workers" * group.alone, group.count),
        Told(
            f"{group.name}: nvidia.com/gpu",
            str(share.gpus),
            "recipe: engine.tensor_parallel_size, or none on CPUs",
        ),
        Told(f"{group.name}: num-cpus", str(share.cpus), threads),
        told(f"{group.name}: memory", group.memory, f"{group.memory.value:,} MiB"),
    ]
    if group.labels:
        shown = ", ".join(f"{key}={value}" for key, value in group.labels.items())
        lines.append(Told(f"{group.name}: nodes of Ray", shown, "by these labels the front finds its kind's pods"))
    if not group.alone or group.machines:
        lines.append(Told(f"{group.name}: machines", *_machines(group)))
    elif share.gpus:
        where = products(order, group.kind)
        lines.append(told(f"{group.name}: node affinity", where, ", ".join(where.value)))
    return lines


def _machines(group: Group) -> tuple[str, str]:
    """On which its pods are scheduled, and why."""
    if group.machines:
        return ", ".join(f"{key}={value}" for key, value in group.machines.items()), "fleet: nodes"
    if not group.share.gpus:
        return "any", "the fleet names no labels of its machines: nodes"
    if group.kind.fit.engine.analytic:
        return "any with a GPU", "the fit is no measurement, so the GPU's product is not known; name nodes in the fleet"
    return group.kind.fit.engine.device.replace(" ", "-"), "the GPU that was measured, and no other"


def _affinity(order: Order, group: Group) -> Affinity | None:
    if not group.share.gpus or group.machines:
        return None
    known = not group.kind.fit.engine.analytic
    return on_products(order, group.kind, required=known and not group.alone)


def _container(order: Order, group: Group, lifecycle: Lifecycle) -> Container:
    share = group.share
    devices = {GPU: str(share.gpus)} if share.gpus else {}
    asked = {"cpu": f"{1000 * share.cpus + NODE_CPU_MILLI}m", "memory": f"{group.memory.value}Mi"}
    return Container(
        name="ray-worker",
        image=llmctl_image(order, EXTRA).value,
        env=[*loading_environment(order), *RAY_ENVIRONMENT],
        resources=Resources(requests=asked | devices, limits=devices),
        lifecycle=lifecycle,
        volume_mounts=[MODELS_MOUNT, TMP_MOUNT],
    )
