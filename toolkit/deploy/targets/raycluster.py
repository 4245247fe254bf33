"""The RayCluster of a plan: a head that only keeps the books, and a pod for each worker.

Commands, probes and the wait for the head are KubeRay's own. Nothing here changes with the plan alone: pod templates
that did would have the cluster built anew for a new plan.
"""

from __future__ import annotations

import json

from toolkit.deploy.images import llmctl_image
from toolkit.deploy.kinds.base import PodMetadata
from toolkit.deploy.kinds.kubernetes import PodTemplate
from toolkit.deploy.kinds.pods import Container, ContainerPort, EnvVar, Exec, Handler, Lifecycle, PodSpec, Resources
from toolkit.deploy.kinds.raycluster import (
    AuthOptions,
    HeadGroup,
    RayCluster,
    RayClusterSpec,
    StartParams,
    UpgradeStrategy,
    WorkerGroup,
)
from toolkit.deploy.order import Order, Reckoned
from toolkit.deploy.reckon import MIB, PROPAGATION_S, drain_s, grace_s, worker_memory_mib
from toolkit.deploy.targets.objects import digests, metadata
from toolkit.deploy.targets.pods import (
    FOLDERS,
    GPU,
    MODELS_MOUNT,
    TMP,
    TMP_MOUNT,
    affinity,
    loading_environment,
    models_volume,
    tolerations,
)

RAY = "2.60.0"  # what constraints.txt has the image install; KubeRay chooses its probes by it
EXTRA = "kuberay"  # of our package: Ray with the agents whose answers KubeRay's probes ask for
GCS_PORT = 6379
TOKEN_KEY = "auth_token"  # KubeRay's name of it
OBJECT_STORE_MIB = 256  # prompts and tokens are all that it carries
NODE_MIB = 512  # raylet and agents of a machine: 250 MiB were in use by an idle one of Ray 2.60
HEAD_MIB = 4096  # and of the head: 610 MiB idle; what it remembers of calls and lost actors grows
HEAD_CPU, NODE_CPU_MILLI = "1", 250
AFTER_FRONT_S = 15  # an actor's end, and a raylet's
STAYS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def ray_cluster(order: Order) -> RayCluster:
    """The cluster; called as the deployment is."""
    about = metadata(order)
    return RayCluster(
        metadata=about.model_copy(update={"annotations": digests(order)}),
        spec=RayClusterSpec(
            ray_version=RAY,
            auth_options=AuthOptions(secret_name=order.name),
            upgrade_strategy=UpgradeStrategy(),
            head_group_spec=HeadGroup(ray_start_params=_head_params(), template=_head(order)),
            worker_group_specs=[_workers(order)],
        ),
    )


def worker_count(order: Order) -> Reckoned[int]:
    """Workers under the one scheduler: as many as the tuning needed, or the plan's."""
    workload = order.plan.workload
    if workload is None or workload.workers_needed is None:
        return Reckoned(order.plan.workers, "plan: workers")
    return Reckoned(workload.workers_needed, "tuned: so many workers under one scheduler keep all limits")


def member(order: Order) -> dict[str, str]:
    """The label of all pods of the deployment, Ray's and the front's. The name's label is the front's alone."""
    return {"app.kubernetes.io/part-of": order.name}


def ray_member(order: Order) -> dict[str, str]:
    """The label that KubeRay puts on the pods of this cluster."""
    return {"ray.io/cluster": order.name}


def worker_gpus(order: Order) -> int:
    """GPUs of one worker's pod."""
    recipe = order.plan.recipe
    return 0 if recipe.hardware.device == "cpu" else recipe.engine.tensor_parallel_size


def worker_cpus(order: Order) -> Reckoned[int]:
    """CPUs that a worker's actor takes, as `toolkit.cluster.workers.Share` reckons them."""
    engine = order.plan.recipe.engine
    source = f"recipe: {engine.threads or 1} threads x {engine.tensor_parallel_size} processes"
    return Reckoned((engine.threads or 1) * engine.tensor_parallel_size, source)


def worker_memory(order: Order) -> Reckoned[int]:
    """MiB that a worker's pod asks for."""
    engine = worker_memory_mib(order)
    ours = f"{NODE_MIB} MiB for Ray's processes and {OBJECT_STORE_MIB} MiB for its object store"
    return Reckoned(engine.value + NODE_MIB + OBJECT_STORE_MIB, f"{engine.source} + {ours}")


def worker_grace_s(order: Order) -> Reckoned[int]:
    """How long a worker's pod may wait for the front's drain."""
    front = grace_s(drain_s(order), PROPAGATION_S).value
    return Reckoned(front + AFTER_FRONT_S, f"the front's {front} + {AFTER_FRONT_S} for the actor's end")


def head_grace_s(order: Order) -> Reckoned[int]:
    """How long the head may wait for everybody else."""
    workers = worker_grace_s(order).value
    return Reckoned(workers + AFTER_FRONT_S, f"the workers' {workers} + {AFTER_FRONT_S} for their raylets' end")


def fingerprint(order: Order) -> str:
    """The cluster's spec as text: with another one the front has to start anew."""
    return json.dumps(ray_cluster(order).spec.model_dump(by_alias=True, exclude_none=True), sort_keys=True)


def ray_environment() -> list[EnvVar]:
    """Of everything that runs Ray."""
    return [EnvVar(name="RAY_USAGE_STATS_ENABLED", value="0")]


def _head_params() -> StartParams:
    """Nothing runs on the head; its dashboard listens on loopback, for `kubectl port-forward`."""
    return {"num-cpus": "0", "dashboard-host": "127.0.0.1", "object-store-memory": str(OBJECT_STORE_MIB * MIB)}


def _head(order: Order) -> PodTemplate:
    folders = [EnvVar(name="HOME", value=FOLDERS["HOME"]), *ray_environment()]
    size = {"memory": f"{HEAD_MIB}Mi"}
    container = Container(
        name="ray-head",
        image=llmctl_image(order, EXTRA).value,
        ports=[
            ContainerPort(name="gcs-server", container_port=GCS_PORT),
            ContainerPort(name="metrics", container_port=8080),
        ],
        env=folders,
        resources=Resources(requests={"cpu": HEAD_CPU} | size, limits=size),
        lifecycle=_lingering("head", str(GCS_PORT)),
        volume_mounts=[TMP_MOUNT],
    )
    return PodTemplate(
        metadata=PodMetadata(labels=member(order), annotations=STAYS),
        spec=PodSpec(termination_grace_period_seconds=head_grace_s(order).value, containers=[container], volumes=[TMP]),
    )


def _workers(order: Order) -> WorkerGroup:
    count = worker_count(order).value
    return WorkerGroup(
        group_name="workers",
        replicas=count,
        min_replicas=count,
        max_replicas=count,
        ray_start_params={
            "num-cpus": str(worker_cpus(order).value),
            "num-gpus": str(worker_gpus(order)),
            "object-store-memory": str(OBJECT_STORE_MIB * MIB),
        },
        template=_worker(order),
    )


def _worker(order: Order) -> PodTemplate:
    devices = {GPU: str(worker_gpus(order))} if worker_gpus(order) else {}
    cpu = f"{1000 * worker_cpus(order).value + NODE_CPU_MILLI}m"
    asked = {"cpu": cpu, "memory": f"{worker_memory(order).value}Mi"}
    container = Container(
        name="ray-worker",
        image=llmctl_image(order, EXTRA).value,
        env=[*loading_environment(order), *ray_environment()],
        resources=Resources(requests=asked | devices, limits=devices),
        lifecycle=_lingering("worker"),
        volume_mounts=[MODELS_MOUNT, TMP_MOUNT],
    )
    return PodTemplate(
        metadata=PodMetadata(labels=member(order)),
        spec=PodSpec(
            termination_grace_period_seconds=worker_grace_s(order).value,
            affinity=affinity(order),
            tolerations=tolerations(order),
            containers=[container],
            volumes=[models_volume(order), TMP],
        ),
    )


def _lingering(*words: str) -> Lifecycle:
    """The hook that has a pod end after those who need it."""
    command = ["python", "-m", "toolkit.cluster.linger", *words]
    return Lifecycle(pre_stop=Handler(exec=Exec(command=command)))
