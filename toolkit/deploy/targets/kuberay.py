"""A Kubernetes cluster with KubeRay: one front, a Deployment that joins a RayCluster, whose pods
run the workers.

Why the front is not a container of the head's pod, and no RayJob or RayService: docs/decisions.md.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel

from toolkit.cluster.workers import MachineShare, node_labels
from toolkit.deploy.kinds.kubernetes import (
    Affinity,
    Container,
    ContainerPort,
    Deployment,
    DeploymentSpec,
    DisruptionSpec,
    EmptyDir,
    EnvVar,
    Exec,
    Handler,
    Kustomization,
    Lifecycle,
    PodDisruptionBudget,
    PodMetadata,
    PodSpec,
    PodTemplate,
    Resources,
    Selector,
    Strategy,
    Volume,
    VolumeMount,
)
from toolkit.deploy.kinds.operators import (
    AuthOptions,
    HeadGroup,
    PrometheusRule,
    RayCluster,
    RayClusterSpec,
    StartParams,
    UpgradeStrategy,
    WorkerGroup,
)
from toolkit.deploy.monitoring import drift_percent, rules, series
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Reckoned,
    Rendered,
    fill,
    llmctl_image,
    object_name,
    products,
    told,
)
from toolkit.deploy.reckon import (
    FRONT_MIB,
    LIMIT_FACTOR,
    MIB,
    PROPAGATION_S,
    check_podable,
    drain_s,
    grace_s,
    startup_s,
    waiting_threshold,
    worker_memory_beside,
    worker_memory_mib,
)
from toolkit.deploy.targets.kubernetes import cluster_policy, front_policy, pod_monitor
from toolkit.deploy.targets.objects import (
    ALIVE,
    FOLDERS,
    FORWARDED,
    GPU,
    HTTP,
    MODELS_MOUNT,
    PLAN_FOLDER,
    PORT,
    READY,
    TMP,
    TMP_MOUNT,
    by_reference,
    claim_files,
    dashboard_map,
    digests,
    environment,
    loading_environment,
    metadata,
    models_told,
    models_volume,
    mounts,
    on_products,
    plan_map,
    pod_metadata,
    preparation,
    probes_told,
    selector,
    service,
    started,
    tolerations,
    volumes,
)
from toolkit.errors import InputError
from toolkit.files.plan import Kind
from toolkit.files.strict import dump_yaml

# The worker groups of a RayCluster: one for each kind of a plan's workers, with a pod for each
# worker.
#
# A plan of one kind has one group, whose pods prefer the GPU that was measured. Of a fleet each
# group needs machines of its own kind: those that the fleet labels, or with the GPU that was
# measured; and where neither is known any, on which the front then waits in vain for a node that
# Ray gives the right label, and says so. Ray's label of the GPU is Ray's own to set; others are
# set here.

EXTRA = "kuberay"  # of our package: Ray with the agents whose answers KubeRay's probes ask for
OBJECT_STORE_MIB = 256  # prompts and tokens are all that it carries
NODE_MIB = 512  # raylet and agents of a machine: 250 MiB were in use by an idle one of Ray 2.60
NODE_CPU_MILLI = 250
RAY_ENVIRONMENT = [EnvVar(name="RAY_USAGE_STATS_ENABLED", value="0")]  # of everything that runs Ray
RAYS_OWN = "ray.io/"  # before the labels that Ray sets


@dataclass(frozen=True, slots=True)
class RayWorkerGroup:
    """A kind's group: what it is called, how many pods it has, and the labels by which the front
    finds its nodes.

    `alone`: there is no other kind.
    """

    kind: Kind
    name: str
    count: Reckoned[int]
    labels: Mapping[str, str]
    alone: bool

    @property
    def share(self) -> MachineShare:
        """What a worker's actor takes of its pod."""
        return MachineShare.of(self.kind.recipe.engine, self.kind.recipe.hardware)

    @property
    def memory(self) -> Reckoned[int]:
        """MiB that a worker's pod asks for."""
        engine = worker_memory_mib(self.kind)
        ours = f"{NODE_MIB} MiB for Ray's processes and {OBJECT_STORE_MIB} MiB for its object store"
        return Reckoned(engine.value + NODE_MIB + OBJECT_STORE_MIB, f"{engine.source} + {ours}")

    @property
    def memory_limit(self) -> Reckoned[int]:
        """MiB at which a worker's pod is ended."""
        beside = worker_memory_beside(self.kind)
        source = f"{LIMIT_FACTOR} times what it asks for" + (
            f" + {beside.source}" if beside.value else ""
        )
        return Reckoned(LIMIT_FACTOR * self.memory.value + beside.value, source)

    @property
    def set_here(self) -> dict[str, str]:
        """Those of its labels that Ray does not set."""
        return {key: value for key, value in self.labels.items() if not key.startswith(RAYS_OWN)}

    @property
    def machines(self) -> dict[str, str]:
        """Labels that the fleet says its machines have, Kubernetes' nodes."""
        return {
            key: value for key, value in self.kind.nodes.items() if not key.startswith(RAYS_OWN)
        }


def groups(order: Order) -> list[RayWorkerGroup]:
    """One for each kind, in the plan's order."""
    kinds = order.plan.kinds
    labels = node_labels(kinds)
    if len(kinds) == 1:
        return [RayWorkerGroup(kinds[0], "workers", worker_count(order), labels[0], alone=True)]
    return [
        RayWorkerGroup(
            kind,
            object_name(kind.recipe.name),
            Reckoned(kind.workers, "fleet: workers"),
            own,
            alone=False,
        )
        for kind, own in zip(kinds, labels, strict=True)
    ]


def worker_count(order: Order) -> Reckoned[int]:
    """Workers under the one scheduler: as many as the tuning needed, or the plan's."""
    workload = order.plan.workload
    if workload is None or workload.workers_needed is None:
        return Reckoned(order.plan.workers, "plan: workers")
    return Reckoned(
        workload.workers_needed, "tuned: so many workers under one scheduler keep all limits"
    )


def worker_group(
    order: Order, group: RayWorkerGroup, member: dict[str, str], grace_s: int, lifecycle: Lifecycle
) -> WorkerGroup:
    """The group's pods, which wear the labels of a `member` and end as `lifecycle` and `grace_s`
    say.
    """
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


def told_of(order: Order, group: RayWorkerGroup) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about a group."""
    share, engine = group.share, group.kind.recipe.engine
    threads = f"recipe: {engine.threads or 1} threads x {engine.tensor_parallel_size} processes"
    lines = [
        told(f"{group.name}: replicas" + ", and serve --workers" * group.alone, group.count),
        ExplainedValue(
            f"{group.name}: nvidia.com/gpu",
            str(share.gpus),
            "recipe: engine.tensor_parallel_size, or none on CPUs",
        ),
        ExplainedValue(f"{group.name}: num-cpus", str(share.cpus), threads),
        told(f"{group.name}: memory", group.memory, f"{group.memory.value:,} MiB"),
        told(
            f"{group.name}: memory limit", group.memory_limit, f"{group.memory_limit.value:,} MiB"
        ),
    ]
    if group.labels:
        shown = ", ".join(f"{key}={value}" for key, value in group.labels.items())
        lines.append(
            ExplainedValue(
                f"{group.name}: nodes of Ray",
                shown,
                "by these labels the front finds its kind's pods",
            )
        )
    if not group.alone or group.machines:
        lines.append(ExplainedValue(f"{group.name}: machines", *_machines(group)))
    elif share.gpus:
        where = products(order, group.kind)
        lines.append(told(f"{group.name}: node affinity", where, ", ".join(where.value)))
    return lines


def _machines(group: RayWorkerGroup) -> tuple[str, str]:
    """On which its pods are scheduled, and why."""
    if group.machines:
        return ", ".join(f"{key}={value}" for key, value in group.machines.items()), "fleet: nodes"
    if not group.share.gpus:
        return "any", "the fleet names no labels of its machines: nodes"
    if group.kind.fit.engine.analytic:
        return (
            "any with a GPU",
            "the fit is no measurement, so the GPU's product is not known; name nodes in the fleet",
        )
    return group.kind.fit.engine.device.replace(" ", "-"), "the GPU that was measured, and no other"


def _affinity(order: Order, group: RayWorkerGroup) -> Affinity | None:
    if not group.share.gpus or group.machines:
        return None
    known = not group.kind.fit.engine.analytic
    return on_products(order, group.kind, required=known and not group.alone)


def _container(order: Order, group: RayWorkerGroup, lifecycle: Lifecycle) -> Container:
    share = group.share
    devices = {GPU: str(share.gpus)} if share.gpus else {}
    asked = {"cpu": f"{1000 * share.cpus + NODE_CPU_MILLI}m", "memory": f"{group.memory.value}Mi"}
    most = {"memory": f"{group.memory_limit.value}Mi"}
    return Container(
        name="ray-worker",
        image=llmctl_image(order, EXTRA).value,
        env=[*loading_environment(order), *RAY_ENVIRONMENT],
        resources=Resources(requests=asked | devices, limits=most | devices),
        lifecycle=lifecycle,
        volume_mounts=[MODELS_MOUNT, TMP_MOUNT],
    )


# The RayCluster of a plan: a head that only keeps the books, and a pod for each worker
# (`raygroups`).
#
# Commands, probes and the wait for the head are KubeRay's own. Nothing here changes with the plan
# alone: pod templates that did would have the cluster built anew for a new plan.

RAY = "2.60.0"  # what constraints.txt has the image install; KubeRay chooses its probes by it
GCS_PORT = 6379
TOKEN_KEY = "auth_token"  # KubeRay's name of it
HEAD_MIB = 4096  # and of the head: 610 MiB idle; what it remembers of calls and lost actors grows
HEAD_CPU = "1"
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
            worker_group_specs=[
                worker_group(
                    order, group, member(order), worker_grace_s(order).value, _lingering("worker")
                )
                for group in groups(order)
            ],
        ),
    )


def member(order: Order) -> dict[str, str]:
    """The label of all pods of the deployment, Ray's and the front's. The name's label is the
    front's alone.
    """
    return {"app.kubernetes.io/part-of": order.name}


def ray_member(order: Order) -> dict[str, str]:
    """The label that KubeRay puts on the pods of this cluster."""
    return {"ray.io/cluster": order.name}


def worker_grace_s(order: Order) -> Reckoned[int]:
    """How long a worker's pod may wait for the front's drain."""
    front = grace_s(drain_s(order), PROPAGATION_S).value
    return Reckoned(
        front + AFTER_FRONT_S, f"the front's {front} + {AFTER_FRONT_S} for the actor's end"
    )


def head_grace_s(order: Order) -> Reckoned[int]:
    """How long the head may wait for everybody else."""
    workers = worker_grace_s(order).value
    return Reckoned(
        workers + AFTER_FRONT_S, f"the workers' {workers} + {AFTER_FRONT_S} for their raylets' end"
    )


def fingerprint(order: Order) -> str:
    """The cluster's spec as text: with another one the front has to start anew."""
    return json.dumps(
        ray_cluster(order).spec.model_dump(by_alias=True, exclude_none=True), sort_keys=True
    )


def _head_params() -> StartParams:
    """Nothing runs on the head; its dashboard listens on loopback, for `kubectl port-forward`."""
    return {
        "num-cpus": "0",
        "dashboard-host": "127.0.0.1",
        "object-store-memory": str(OBJECT_STORE_MIB * MIB),
    }


def _head(order: Order) -> PodTemplate:
    folders = [EnvVar(name="HOME", value=FOLDERS["HOME"]), *RAY_ENVIRONMENT]
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
        spec=PodSpec(
            termination_grace_period_seconds=head_grace_s(order).value,
            containers=[container],
            volumes=[TMP],
        ),
    )


def _lingering(*words: str) -> Lifecycle:
    """The hook that has a pod end after those who need it."""
    command = ["python", "-m", "toolkit.cluster.linger", *words]
    return Lifecycle(pre_stop=Handler(exec=Exec(command=command)))


# The front of a RayCluster: a Deployment of one pod that joins the cluster, gives it nothing to
# run on, and serves.

SCRIPT = "front.sh"
CPU = "2"  # the server's loop, and Ray's processes beside it


def front_script(order: Order) -> str:
    """front.sh: joins the cluster, and serves."""
    flags: list[tuple[str, object]] = [
        ("--ray", "auto"),
        *([] if order.plan.others else [("--workers", worker_count(order).value)]),
        ("--room-timeout", startup_s(order).value),
        ("--host", "0.0.0.0"),
        ("--port", PORT),
        ("--shutdown-notice", PROPAGATION_S),
        ("--shutdown-timeout", drain_s(order).value),
    ]
    return fill(
        SCRIPT,
        comment=order.comment(),
        object_store_bytes=OBJECT_STORE_MIB * MIB,
        flags=flags,
        allowances=order.allowances,
    )


def head_address(order: Order) -> str:
    """Where KubeRay's Service for the head is."""
    return f"{order.name}-head-svc.{order.options.namespace}.svc:{GCS_PORT}"


def front(order: Order) -> Deployment:
    """One front, never two: they would ask the cluster for the same room."""
    cluster = hashlib.sha256(fingerprint(order).encode()).hexdigest()
    about = pod_metadata(order, **{"llmctl.io/raycluster-sha256": cluster})
    template = PodTemplate(
        metadata=about.model_copy(
            update={
                "labels": about.labels | member(order),
                "annotations": (about.annotations or {}) | STAYS,
            }
        ),
        spec=_pod(order),
    )
    return Deployment(
        metadata=metadata(order),
        spec=DeploymentSpec(
            replicas=1,
            progress_deadline_seconds=startup_s(order).value + 60,
            strategy=Strategy(type="Recreate"),
            selector=selector(order),
            template=template,
        ),
    )


def _pod(order: Order) -> PodSpec:
    shared = Volume(
        name="shm", empty_dir=EmptyDir(medium="Memory", size_limit=f"{OBJECT_STORE_MIB + 64}Mi")
    )
    asked, most = front_memory().value, front_memory_limit().value
    container = Container(
        name="llmctl",
        image=llmctl_image(order, EXTRA).value,
        command=["bash", f"{PLAN_FOLDER}/{SCRIPT}"],
        ports=[HTTP],
        env=[*environment(order), *_joining(order)],
        resources=Resources(
            requests={"cpu": CPU, "memory": f"{asked}Mi"}, limits={"memory": f"{most}Mi"}
        ),
        startup_probe=started(order),
        readiness_probe=READY,
        liveness_probe=ALIVE,
        volume_mounts=[*mounts(), VolumeMount(name="shm", mount_path="/dev/shm")],
    )
    return PodSpec(
        termination_grace_period_seconds=grace_s(drain_s(order), PROPAGATION_S).value,
        containers=[container],
        volumes=[*volumes(order), shared],
    )


def _joining(order: Order) -> list[EnvVar]:
    return [
        EnvVar(name="RAY_ADDRESS", value=head_address(order)),
        EnvVar(name="RAY_AUTH_MODE", value="token"),
        by_reference(order, "RAY_AUTH_TOKEN", TOKEN_KEY),
        *RAY_ENVIRONMENT,
    ]


def front_memory() -> Reckoned[int]:
    """MiB that the front's pod asks for."""
    ray = f"{NODE_MIB} for its raylet, {OBJECT_STORE_MIB} for the object store"
    return Reckoned(
        FRONT_MIB + NODE_MIB + OBJECT_STORE_MIB, f"{FRONT_MIB} MiB for the front, {ray}"
    )


def front_memory_limit() -> Reckoned[int]:
    """MiB at which the front's pod is ended."""
    return Reckoned(LIMIT_FACTOR * front_memory().value, f"{LIMIT_FACTOR} times what it asks for")


def render(order: Order) -> Rendered:
    """core/ and, beside it, what needs Prometheus' operator. `InputError` for engines that Ray
    cannot run here.
    """
    _check(order)
    threshold = waiting_threshold(order.plan, order.trace)
    core: dict[str, BaseModel] = {
        "raycluster.yaml": ray_cluster(order),
        "deployment.yaml": front(order),
        "service.yaml": service(order),
        "networkpolicy.yaml": front_policy(order, member(order)),
        "networkpolicy-ray.yaml": cluster_policy(order, ray_member(order), member(order)),
    }
    if worker_count(order).value > 1:
        core["poddisruptionbudget.yaml"] = _budget(order)
    watched: dict[str, BaseModel] = {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": PrometheusRule(
            metadata=metadata(order), spec=rules(order, series(order, monitored=True), threshold)
        ),
    }
    objects = {f"core/{name}": one for name, one in core.items()} | watched
    namespace = order.options.namespace
    objects["core/kustomization.yaml"] = Kustomization(
        namespace=namespace, resources=sorted(core), config_map_generator=[plan_map(order, SCRIPT)]
    )
    objects["kustomization.yaml"] = Kustomization(
        namespace=namespace,
        resources=["core", *sorted(watched)],
        config_map_generator=[dashboard_map(order)],
    )
    files = {name: dump_yaml([one], order.comment()) for name, one in objects.items()}
    files |= claim_files(order, _mounting(order))
    files |= {"core/plan.json": order.text, f"core/{SCRIPT}": front_script(order)}
    return Rendered(files, _told(order), _start(order), FORWARDED)


def _check(order: Order) -> None:
    check_podable(order)
    if order.options.gpu_products and order.plan.others:
        raise InputError(
            "--gpu-product names the GPU of one kind of workers; the fleet has several",
            "say in the fleet which nodes each kind is on: nodes",
        )
    if order.options.replicas > 1:
        raise InputError(
            f"--replicas {order.options.replicas}: under KubeRay one front has all workers",
            "tune with --workers auto for more workers, or render the target 'kubernetes'",
        )


def _mounting(order: Order) -> Reckoned[int]:
    """Pods that have the models' volume: the workers', and the front's for the tokenizer."""
    workers = sum(group.count.value for group in groups(order))
    return Reckoned(workers + 1, f"{workers + 1} pods: the workers' and the front's")


def _budget(order: Order) -> PodDisruptionBudget:
    """One worker at a time. As a number of pods that stay: a RayCluster has no scale that a share
    could be of.
    """
    workers = {**ray_member(order), "ray.io/node-type": "worker"}
    return PodDisruptionBudget(
        metadata=metadata(order),
        spec=DisruptionSpec(
            min_available=worker_count(order).value - 1, selector=Selector(match_labels=workers)
        ),
    )


def _told(order: Order) -> list[ExplainedValue]:
    drain, startup, drift = drain_s(order), startup_s(order), drift_percent(order)
    grace, asked, most = grace_s(drain, PROPAGATION_S), front_memory(), front_memory_limit()
    return [
        told("image", llmctl_image(order, EXTRA)),
        ExplainedValue(
            "rayVersion", RAY, "what the image has installed; KubeRay chooses its probes by it"
        ),
        ExplainedValue(
            "authOptions",
            "token",
            f"Secret {order.name}, key {TOKEN_KEY}: whoever reaches Ray's ports needs it",
        ),
        ExplainedValue(
            "upgradeStrategy",
            "Recreate",
            "one image for all: another one replaces all of Ray's pods, and the front",
        ),
        *[line for group in groups(order) for line in told_of(order, group)],
        told(
            "workers: terminationGracePeriodSeconds",
            worker_grace_s(order),
            f"{worker_grace_s(order).value} s",
        ),
        ExplainedValue(
            "workers: preStop",
            "linger worker",
            "its raylet stays until no actor runs on it: for the front's drain",
        ),
        ExplainedValue(
            "head: num-cpus", "0", "nothing runs on it; losing it is losing the cluster"
        ),
        ExplainedValue(
            "head: dashboard-host", "127.0.0.1", "for kubectl port-forward; nobody else reaches it"
        ),
        ExplainedValue(
            "head: memory",
            f"{HEAD_MIB:,} MiB",
            "Ray 2.60's head: 610 MiB when idle, and room for its records",
        ),
        told(
            "head: terminationGracePeriodSeconds",
            head_grace_s(order),
            f"{head_grace_s(order).value} s",
        ),
        ExplainedValue(
            "head: preStop", "linger head", "the head stays until all who were connected have left"
        ),
        told("front: memory", asked, f"{asked.value:,} MiB"),
        told("front: memory limit", most, f"{most.value:,} MiB"),
        ExplainedValue(
            "front: strategy",
            "Recreate",
            "the next front finds room when the workers of this one are gone",
        ),
        ExplainedValue(
            "front: --room-timeout",
            f"{startup.value} s",
            "until KubeRay's pods run; then loading begins",
        ),
        ExplainedValue(
            "front: --shutdown-notice",
            f"{PROPAGATION_S} s",
            "until the cluster's proxies know that the pod is leaving",
        ),
        told("front: --shutdown-timeout", drain, f"{drain.value} s"),
        told("front: terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *probes_told(order, "front: "),
        *models_told(order, _mounting(order)),
        ExplainedValue(
            "probes of Ray's pods",
            "KubeRay's",
            "it adds its own: the raylet's health, and on the head GCS's",
        ),
        ExplainedValue(
            "PodDisruptionBudget",
            "minAvailable",
            "one worker at a time; its requests go on at the others",
        ),
        ExplainedValue(
            "ScaledObject",
            "none",
            "the placement group has a fixed number of workers; render again for another",
        ),
        told("drift alert", drift, f"{drift.value:g} %"),
    ]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
Needs KubeRay 1.6 or newer. One Secret has the callers' key and the token of Ray's own connections:

```bash
{preparation(order, TOKEN_KEY)}
kubectl apply -k .          # needs the CRDs of KubeRay and of Prometheus' operator; without the latter: -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # the front drains, then the workers end, then the head
```

A new plan replaces the front alone, which drains first; its workers start anew on the pods that are there. Another
image or size replaces all of it, in the order of `kubectl delete`. A lost worker's requests go on at the others; losing
the head, or the front, loses what runs, and both are started again.

Pods of other namespaces may call it where their namespace is labelled `llmctl.io/client: "true"`."""
