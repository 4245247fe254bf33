"""The RayCluster of a plan: a worker group per kind with a pod per worker, and a head.

A plan of one kind has one group; its pods prefer the GPU that was measured. In a fleet, each
group requires machines of its own kind: those with the fleet's labels, or with the GPU that was
measured. Where neither is known, its pods may run on any machine; the front then waits for a node
that Ray gives the right label, and says so. Ray sets its label of the GPU; other labels are set
here.

The servers of an engine's own run in the same pods, each started by its actor: one image has the
engine, llmctl and Ray.

No work runs on the head. Commands, probes and the wait for the head are KubeRay's own. The
objects here do not depend on the plan's settings; otherwise a new plan would rebuild the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import toolkit
from toolkit.cluster.places import MachineShare, node_labels
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Sourced,
    explain_value,
    llmctl_image,
    object_name,
    products,
)
from toolkit.deploy.reckon import (
    LIMIT_FACTOR,
    PROPAGATION_S,
    drain_s,
    grace_s,
    worker_extra_memory_mib,
    worker_memory_mib,
)
from toolkit.deploy.replicas import KindReplicas, Replication
from toolkit.deploy.targets.objects import (
    FOLDERS,
    MODELS_MOUNT,
    TMP,
    TMP_MOUNT,
    Object,
    asked,
    before_stop,
    container,
    digests,
    loading_environment,
    metadata,
    models_volume,
    on_products,
    pod_spec,
    tolerations,
    variables,
)
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.plan import Kind
from toolkit.units import MIB

DOCKERFILE = "Dockerfile.vllm"
EXTRA = "kuberay"  # of the package: Ray with the agents that KubeRay's probes query
OBJECT_STORE_MIB = 256  # it holds only prompts and tokens
NODE_MIB = 512  # raylet and agents of a machine; idle, those of Ray 2.60 used 250 MiB
NODE_CPU_MILLI = 250
RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0"}  # of all containers with Ray
RAY_LABELS = "ray.io/"  # prefix of the labels that Ray sets
RAY = "2.60.0"  # the version that constraints.txt installs; KubeRay chooses its probes by it
GCS_PORT = 6379
HEAD_MIB = 4096  # 610 MiB when idle; its records of calls and lost actors grow
HEAD_CPU = "1"
AFTER_FRONT_S = 15  # for the end of an actor, and of a raylet
LINGER = ("python", "-m", "toolkit.cluster.linger")  # ends a pod only after those that need it
STAYS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


@dataclass(frozen=True, slots=True)
class RayWorkerGroup:
    """A kind's group: its name, its number of pods, and the labels by which the front finds its
    nodes. `alone`: there is no other kind. `servers`: its workers are servers of the engine's own.
    """

    kind: Kind
    name: str
    count: Sourced[int]
    labels: Mapping[str, str]
    alone: bool
    servers: KindReplicas | None = None

    @property
    def share(self) -> MachineShare:
        """The part of its pod that a worker's actor takes."""
        return MachineShare.of(self.kind.recipe.engine, self.kind.recipe.hardware)

    @property
    def memory(self) -> Sourced[int]:
        """MiB that a worker's pod requests."""
        engine = self.servers.memory_mib if self.servers else worker_memory_mib(self.kind)
        ours = f"{NODE_MIB} MiB for Ray's processes and {OBJECT_STORE_MIB} MiB for its object store"
        return Sourced(engine.value + NODE_MIB + OBJECT_STORE_MIB, f"{engine.source} + {ours}")

    @property
    def cores(self) -> Sourced[int]:
        """CPU cores of a worker without Ray's part."""
        return self.servers.cores if self.servers else Sourced(self.share.cpus, "num-cpus")

    @property
    def memory_limit(self) -> Sourced[int]:
        """MiB at which a worker's pod is killed."""
        extra = worker_extra_memory_mib(self.kind)
        source = f"{LIMIT_FACTOR} times what it requests"
        source += f" + {extra.source}" if extra.value else ""
        return Sourced(LIMIT_FACTOR * self.memory.value + extra.value, source)

    @property
    def set_here(self) -> dict[str, str]:
        """The labels that Ray does not set itself."""
        return {key: value for key, value in self.labels.items() if not key.startswith(RAY_LABELS)}

    @property
    def machines(self) -> dict[str, str]:
        """The labels of its machines (Kubernetes' nodes) that the fleet names."""
        nodes = self.kind.nodes
        return {key: value for key, value in nodes.items() if not key.startswith(RAY_LABELS)}


def groups(order: Order) -> list[RayWorkerGroup]:
    """The groups, one per kind, in the plan's order."""
    kinds = order.plan.kinds
    labels, behind = node_labels(kinds), replication(order)
    servers = [None for _ in kinds] if behind is None else behind.kinds
    if len(kinds) == 1:
        count = worker_count(order)
        return [RayWorkerGroup(kinds[0], "workers", count, labels[0], True, servers[0])]
    return [
        RayWorkerGroup(
            kind,
            object_name(kind.recipe.name),
            Sourced(kind.workers, "fleet: workers"),
            labels[number],
            alone=False,
            servers=servers[number],
        )
        for number, kind in enumerate(kinds)
    ]


def replication(order: Order) -> Replication | None:
    """The plan's workers as servers of an engine's own; None: they are llmctl's."""
    return Replication(order) if traits_of(order.plan.recipe.engine.name).server else None


def drain(order: Order) -> Sourced[int]:
    """Seconds that running requests get to end."""
    behind = replication(order)
    return drain_s(order) if behind is None else behind.drain


def image(order: Order) -> Sourced[str]:
    """The image of all pods: Ray and llmctl, with the engine.

    Raises `InputError` where the image of the command line is not pinned, and where no image has
    the engine for all kinds.
    """
    behind = replication(order)
    if behind is None or order.options.image:
        return llmctl_image(order, EXTRA)
    bases = sorted({kind.server.image for kind in behind.kinds})
    if len(bases) > 1:
        raise InputError(
            f"all pods have one image, and the kinds need several: {', '.join(bases)}",
            "build one with llmctl, Ray and the engine for all kinds, and name it: --image",
        )
    name = f"llmctl:{toolkit.__version__}-{EXTRA}-{order.plan.recipe.engine.name}"
    build = f"docker build -t {name} -f {DOCKERFILE} --build-arg BASE={bases[0]} ."
    source = "the engine's own with llmctl and Ray beside it; it was not built here"
    return Sourced(name, f"{source}: {build}")


def worker_count(order: Order) -> Sourced[int]:
    """The number of workers behind the one front: as the tuning found, or the plan's."""
    workload, behind = order.plan.workload, replication(order)
    if behind is not None and len(behind.kinds) == 1:
        return behind.kinds[0].count
    if workload is None or workload.workers_needed is None:
        return Sourced(order.plan.workers, "plan: workers")
    source = "tuned: this number of workers under one scheduler keeps all limits"
    return Sourced(workload.workers_needed, source)


def _worker_group(order: Order, group: RayWorkerGroup) -> Object:
    """The worker group of the RayCluster."""
    count, share, kind = group.count.value, group.share, group.kind
    # KubeRay refuses labels among the parameters.
    labelled = {"labels": group.set_here} if group.set_here else {}
    affinity = None
    if share.gpus and not group.machines:
        required = not kind.fit.engine.analytic and not group.alone
        affinity = on_products(order, kind, required=required)
    own = group.servers.environment if group.servers else {}
    millicores = f"{1000 * group.cores.value + NODE_CPU_MILLI}m"
    worker = container(
        "ray-worker",
        image(order).value,
        [MODELS_MOUNT, TMP_MOUNT],
        env=[*loading_environment(order), *variables(RAY_ENVIRONMENT | own)],
        resources=asked(millicores, group.memory.value, group.memory_limit.value, share.gpus),
        lifecycle=before_stop(*LINGER, "worker"),
    )
    spec = pod_spec(
        worker_grace_s(order).value,
        worker,
        [models_volume(order, kind), TMP],
        affinity=affinity,
        nodes=group.machines,
        tolerations=tolerations(kind.recipe),
    )
    return {
        "groupName": group.name,
        "replicas": count,
        "minReplicas": count,
        "maxReplicas": count,
        **labelled,
        "rayStartParams": {
            "num-cpus": str(share.cpus),
            "num-gpus": str(share.gpus),
            "object-store-memory": str(OBJECT_STORE_MIB * MIB),
        },
        "template": {"metadata": {"labels": member(order)}, "spec": spec},
    }


def explain_group(order: Order, group: RayWorkerGroup) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about a group of workers."""
    share, engine = group.share, group.kind.recipe.engine
    threads = f"recipe: {engine.threads or 1} threads x {engine.tensor_parallel_size} processes"
    lines = [
        explain_value(
            f"{group.name}: replicas" + ", and serve --workers" * group.alone, group.count
        ),
        ExplainedValue(
            f"{group.name}: nvidia.com/gpu",
            str(share.gpus),
            "recipe: engine.tensor_parallel_size, or none on CPUs",
        ),
        ExplainedValue(f"{group.name}: num-cpus", str(share.cpus), threads),
        *([explain_value(f"{group.name}: cpu", group.cores)] if group.servers else []),
        explain_value(f"{group.name}: memory", group.memory, f"{group.memory.value:,} MiB"),
        explain_value(
            f"{group.name}: memory limit", group.memory_limit, f"{group.memory_limit.value:,} MiB"
        ),
    ]
    if group.labels:
        shown = ", ".join(f"{key}={value}" for key, value in group.labels.items())
        why = "the front finds its kind's pods by these labels"
        lines.append(ExplainedValue(f"{group.name}: nodes of Ray", shown, why))
    if not group.alone or group.machines:
        engine_fit = group.kind.fit.engine
        if group.machines:
            named = ", ".join(f"{key}={value}" for key, value in group.machines.items())
            where = Sourced(named, "fleet: nodes")
        elif not share.gpus:
            where = Sourced("any", "the fleet names no labels of its machines: nodes")
        elif engine_fit.analytic:
            why = (
                "the fit is not measured, so the GPU's product is not known; name nodes in the "
                "fleet"
            )
            where = Sourced("any with a GPU", why)
        else:
            product = engine_fit.device.replace(" ", "-")
            where = Sourced(product, "only the GPU that was measured")
        lines.append(explain_value(f"{group.name}: machines", where))
    elif share.gpus:
        known = products(order, group.kind)
        lines.append(explain_value(f"{group.name}: node affinity", known, ", ".join(known.value)))
    return lines


def ray_cluster(order: Order) -> Object:
    """The RayCluster, which has the deployment's name.

    Every connection to Ray needs the token in the Secret's key `auth_token`. A changed template
    recreates all pods; by default, only newly made pods would get it.
    """
    size = f"{HEAD_MIB}Mi"
    head = container(
        "ray-head",
        image(order).value,
        [TMP_MOUNT],
        ports=[
            {"name": "gcs-server", "containerPort": GCS_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": 8080, "protocol": "TCP"},
        ],
        env=variables({"HOME": FOLDERS["HOME"]} | RAY_ENVIRONMENT),
        resources={"requests": {"cpu": HEAD_CPU, "memory": size}, "limits": {"memory": size}},
        lifecycle=before_stop(*LINGER, "head", str(GCS_PORT)),
    )
    template = {
        "metadata": {"labels": member(order), "annotations": STAYS},
        "spec": pod_spec(head_grace_s(order).value, head, [TMP]),
    }
    parameters = {
        "num-cpus": "0",  # no work runs on the head
        "dashboard-host": "127.0.0.1",  # for `kubectl port-forward`
        "object-store-memory": str(OBJECT_STORE_MIB * MIB),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {**metadata(order), "annotations": digests(order)},
        "spec": {
            "rayVersion": RAY,
            "authOptions": {"mode": "token", "secretName": order.name},
            "upgradeStrategy": {"type": "Recreate"},
            "headGroupSpec": {"rayStartParams": parameters, "template": template},
            "workerGroupSpecs": [_worker_group(order, group) for group in groups(order)],
        },
    }


def member(order: Order) -> dict[str, str]:
    """The label of all pods of the deployment. Only the front has the label of the name."""
    return {"app.kubernetes.io/part-of": order.name}


def ray_member(order: Order) -> dict[str, str]:
    """The label that KubeRay puts on the pods of this cluster."""
    return {"ray.io/cluster": order.name}


def worker_grace_s(order: Order) -> Sourced[int]:
    """Seconds that a worker's pod may wait for the front's drain."""
    behind = replication(order)
    longest = drain_s(order) if behind is None else behind.longest_drain
    front = grace_s(longest, PROPAGATION_S).value
    source = f"the front's {front} + {AFTER_FRONT_S} for the end of the actor"
    return Sourced(front + AFTER_FRONT_S, source)


def head_grace_s(order: Order) -> Sourced[int]:
    """Seconds that the head's pod may wait for the workers' pods."""
    workers = worker_grace_s(order).value
    source = f"the workers' {workers} + {AFTER_FRONT_S} for the end of their raylets"
    return Sourced(workers + AFTER_FRONT_S, source)
