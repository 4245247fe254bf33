"""Target `kuberay`: a front as a Deployment, which joins a RayCluster with pods for the workers, or
for the servers of an engine's own.

The front is a Deployment of one pod that joins the cluster without offering it resources, and
serves. docs/decisions/ says why it is not a container of the head's pod, and why there is no
RayJob or RayService.

The RayCluster has a worker group per kind with a pod per worker, and a head. A plan of one kind has
one group; its pods prefer the GPU that was measured. In a fleet, each group requires machines of
its own kind: those with the fleet's labels, or with the GPU that was measured. Where neither is
known, its pods may run on any machine; the front then waits for a node that Ray gives the right
label, and says so. Ray sets its label of the GPU; other labels are set here. The servers of an
engine's own run in the same pods, each started by its actor: one image has the engine, llmctl and
Ray.

No work runs on the head. Commands, probes and the wait for the head are KubeRay's own. The cluster
does not depend on the plan's settings; otherwise a new plan would rebuild it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import toolkit
from toolkit.cluster.places import MachineShare, node_labels
from toolkit.deploy import reckon
from toolkit.deploy.monitoring import drift_percent, replica_rules, series
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    fill,
    llmctl_image,
    object_name,
    products,
)
from toolkit.deploy.replicas import KindReplicas, Replication
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets.kubernetes import (
    cluster_policy,
    monitors,
    network_policy,
    pod_monitor,
    prometheus_rule,
)
from toolkit.deploy.targets.objects import Object
from toolkit.endpoints.target import REPLICA_METRICS
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.plan import Kind
from toolkit.units import MIB

SCRIPT = "front.sh"
TOKEN_KEY = "auth_token"  # KubeRay's name
CPU = "2"  # for the server's loop and Ray's processes
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
START = """\
Needs KubeRay 1.6 or newer. One Secret has the clients' key and the token of Ray's own connections:

```bash
{preparation}
kubectl apply -k .
# This needs the CRDs of KubeRay and Prometheus' operator; without the latter: apply -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # the front drains, then the workers end, then the head
```

A new plan replaces only the front, which drains first; new workers start on the existing pods.
Another image or size replaces everything, in the order of `kubectl delete`. Other workers continue
the requests of a lost worker; if the head or the front is lost, running requests are lost and both
start again.

{callers}"""


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need Prometheus' operator.

    Raises `InputError` for options that do not suit this target.
    """
    _check(order)
    ours, rays = member(order), {"ray.io/cluster": order.name}  # the latter is KubeRay's label
    cluster, count = ray_cluster(order), worker_count(order).value
    core = {
        "raycluster.yaml": cluster,
        "deployment.yaml": _front(order, cluster),
        "service.yaml": common.service(common.metadata(order), {common.NAME: order.name}),
        "networkpolicy.yaml": network_policy(order, ours),
        "networkpolicy-ray.yaml": cluster_policy(order, rays, ours),
    }
    if count > 1:
        # It disrupts one worker at a time. It is a number of pods that stay, because a RayCluster
        # has no scale subresource, of which the number of disrupted pods could be taken.
        workers = {**rays, "ray.io/node-type": "worker"}
        core["poddisruptionbudget.yaml"] = common.disruption_budget(
            common.metadata(order), workers, minAvailable=count - 1
        )
    pods = sum(group.count.value for group in groups(order)) + 1
    mounting = Sourced(pods, f"{pods} pods: the workers' and the front's")  # for the tokenizer
    files = common.kustomized(order, core, _operated(order), [common.plan_map(order, SCRIPT)])
    files |= common.claim_files(order, mounting)
    # front.sh joins the cluster and serves.
    flags: list[tuple[str, object]] = [
        ("--ray", "auto"),
        *([] if order.plan.others else [("--workers", count)]),
        ("--room-timeout", reckon.startup_s(order).value),
        ("--host", "0.0.0.0"),
        ("--port", common.PORT),
        ("--shutdown-notice", reckon.PROPAGATION_S),
        ("--shutdown-timeout", front_drain(order).value),
    ]
    files["core/plan.json"] = order.text
    files[f"core/{SCRIPT}"] = fill(
        SCRIPT,
        comment=order.comment(),
        object_store_bytes=OBJECT_STORE_MIB * MIB,
        flags=flags,
        allowances=order.allowances,
    )
    start = START.format(
        preparation=common.preparation(order, TOKEN_KEY),
        namespace=order.options.namespace,
        name=order.name,
        callers=common.CALLERS,
    )
    return Rendered(files, _explained(order, mounting), start, common.FORWARDED)


def _front(order: Order, cluster: Object) -> Object:
    """The Deployment of the front. There is never a second pod: both would claim the same room."""
    # For another spec of the cluster, the front must start again.
    spec = json.dumps(cluster["spec"], sort_keys=True)
    made_for = {"llmctl.io/raycluster-sha256": hashlib.sha256(spec.encode()).hexdigest()}
    # The address of KubeRay's Service for the head.
    head = f"{order.name}-head-svc.{order.options.namespace}.svc:{GCS_PORT}"
    store = {"medium": "Memory", "sizeLimit": f"{OBJECT_STORE_MIB + 64}Mi"}
    container = common.container(
        "llmctl",
        image(order).value,
        [*common.MOUNTS, common.SHARED_MOUNT],
        command=["bash", f"{common.PLAN_FOLDER}/{SCRIPT}"],
        ports=[common.HTTP],
        env=[
            *common.environment(order),
            *common.variables({"RAY_ADDRESS": head, "RAY_AUTH_MODE": "token"}),
            common.by_reference(order, "RAY_AUTH_TOKEN", TOKEN_KEY),
            *common.variables(RAY_ENVIRONMENT),
        ],
        resources=common.asked(CPU, _memory().value, _memory_limit().value),
        **common.probes(order),
    )
    pod = common.pod_spec(
        reckon.grace_s(front_drain(order), reckon.PROPAGATION_S).value,
        container,
        [*common.volumes(order), {"name": "shm", "emptyDir": store}],
    )
    about = {
        "labels": common.labels(order) | member(order),
        "annotations": common.digests(order) | made_for | STAYS,
    }
    template = {"metadata": about, "spec": pod}
    return common.deployment(order, template, {"type": "Recreate"}, reckon.startup_s(order).value)


def _memory() -> Sourced[int]:
    """MiB that the front's pod requests."""
    front, ray, store = reckon.FRONT_MIB, NODE_MIB, OBJECT_STORE_MIB
    source = f"{front} MiB for the front, {ray} for its raylet, {store} for the object store"
    return Sourced(front + ray + store, source)


def _memory_limit() -> Sourced[int]:
    """MiB at which the front's pod is killed."""
    factor = reckon.LIMIT_FACTOR
    return Sourced(factor * _memory().value, f"{factor} times what it requests")


def _operated(order: Order) -> dict[str, Object]:
    """The objects that need Prometheus' operator. Replicas are scraped at the front's own page, for
    their ports change; without a fleet's kinds, so that no alert is about the queue of one.
    """
    behind = replication(order)
    if behind is None:
        return monitors(order, reckon.waiting_threshold(order.plan, order.trace))
    alone = behind.kinds if len(behind.kinds) == 1 else []
    name = alone[0].name if alone else f"{order.name}-replicas"
    queues = [(series(order, monitored=True, of=kind.name), kind.threshold) for kind in alone]
    rules = replica_rules(order, series(order, monitored=True), queues)
    return {
        "podmonitor.yaml": pod_monitor(order),
        "podmonitor-replicas.yaml": pod_monitor(order, page=REPLICA_METRICS, name=name),
        "prometheusrule.yaml": prometheus_rule(order, rules),
    }


def _check(order: Order) -> None:
    """Raise `InputError` for options that do not suit this target."""
    reckon.check_podable(order)
    behind, options = replication(order), order.options
    if options.gpu_products and order.plan.others:
        raise InputError(
            "--gpu-product names the GPU of one kind of workers; the fleet has several",
            "name the nodes of each kind in the fleet: nodes",
        )
    if behind is None:
        if options.replicas > 1:
            raise InputError(
                f"--replicas {options.replicas}: under KubeRay one front has all workers",
                "tune with --workers auto for more workers, or render the target 'kubernetes'",
            )
        return
    behind.check_containable()
    if options.replica_image:
        raise InputError(
            f"--replica-image {options.replica_image}: under KubeRay all pods have one image",
            "name it with --image; it has llmctl and Ray, too",
        )
    for kind in behind.kinds:
        if not kind.server.python_variable:
            raise InputError(
                f"recipe '{kind.kind.recipe.name}' names the engine's Python of a machine, which a "
                "pod does not have",
                "leave engine.vllm.python out: the image says where it is",
            )


def _explained(order: Order, mounting: Sourced[int]) -> list[ExplainedValue]:
    drift, behind = drift_percent(order), replication(order)
    drain, startup = front_drain(order), reckon.startup_s(order)
    grace, asked = reckon.grace_s(drain, reckon.PROPAGATION_S), _memory()
    limit = _memory_limit()
    watched = [explain_value("drift alert", drift, f"{drift.value:g} %")] if behind is None else []
    return [
        *_explain_cluster(order),
        *(behind.explained_on_ray() if behind else []),
        explain_value("front: memory", asked, f"{asked.value:,} MiB"),
        explain_value("front: memory limit", limit, f"{limit.value:,} MiB"),
        ExplainedValue(
            "front: strategy",
            "Recreate",
            "the next front finds room only after the workers of this one have ended",
        ),
        ExplainedValue(
            "front: --room-timeout",
            f"{startup.value} s",
            "until KubeRay's pods run; then loading begins",
        ),
        ExplainedValue("front: --shutdown-notice", *common.NOTICE),
        explain_value("front: --shutdown-timeout", drain, f"{drain.value} s"),
        explain_value("front: terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *common.explain_probes(order, "front: "),
        *common.explain_models(order, mounting),
        ExplainedValue(
            "probes of Ray's pods",
            "KubeRay's",
            "KubeRay adds its own: the raylet's health, and on the head that of GCS",
        ),
        ExplainedValue(
            "PodDisruptionBudget",
            "minAvailable",
            "one worker at a time; the others continue its requests",
        ),
        ExplainedValue(
            "ScaledObject",
            "none",
            "the placement group has a fixed number of workers; render again to change it",
        ),
        *watched,
    ]


def _explain_cluster(order: Order) -> list[ExplainedValue]:
    workers, head = worker_grace_s(order), head_grace_s(order)
    return [
        explain_value("image", image(order)),
        ExplainedValue(
            "rayVersion",
            RAY,
            "what the image has installed; KubeRay chooses its probes by it",
        ),
        ExplainedValue(
            "authOptions",
            "token",
            f"Secret {order.name}, key {TOKEN_KEY}: every connection to Ray's ports needs it",
        ),
        ExplainedValue(
            "upgradeStrategy",
            "Recreate",
            "all pods have one image: another image replaces all of Ray's pods and the front",
        ),
        *[line for group in groups(order) for line in explain_group(order, group)],
        explain_value("workers: terminationGracePeriodSeconds", workers, f"{workers.value} s"),
        ExplainedValue(
            "workers: preStop",
            "linger worker",
            "its raylet stays until no actor runs on it, so that the front can drain",
        ),
        ExplainedValue(
            "head: num-cpus", "0", "no work runs on it; without the head there is no cluster"
        ),
        ExplainedValue("head: dashboard-host", "127.0.0.1", "only for kubectl port-forward"),
        ExplainedValue(
            "head: memory",
            f"{HEAD_MIB:,} MiB",
            "Ray 2.60's head: 610 MiB when idle, and room for its records",
        ),
        explain_value("head: terminationGracePeriodSeconds", head, f"{head.value} s"),
        ExplainedValue(
            "head: preStop", "linger head", "the head stays until all connected nodes have left"
        ),
    ]


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
        return MachineShare.of(self.kind.recipe)

    @property
    def memory(self) -> Sourced[int]:
        """MiB that a worker's pod requests."""
        engine = self.servers.memory_mib if self.servers else reckon.worker_memory_mib(self.kind)
        ours = f"{NODE_MIB} MiB for Ray's processes and {OBJECT_STORE_MIB} MiB for its object store"
        return Sourced(engine.value + NODE_MIB + OBJECT_STORE_MIB, f"{engine.source} + {ours}")

    @property
    def cores(self) -> Sourced[int]:
        """CPU cores of a worker without Ray's part."""
        return self.servers.cores if self.servers else Sourced(self.share.cpus, "num-cpus")

    @property
    def memory_limit(self) -> Sourced[int]:
        """MiB at which a worker's pod is killed."""
        extra = reckon.worker_extra_memory_mib(self.kind)
        source = f"{reckon.LIMIT_FACTOR} times what it requests"
        source += f" + {extra.source}" if extra.value else ""
        return Sourced(reckon.LIMIT_FACTOR * self.memory.value + extra.value, source)

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


def front_drain(order: Order) -> Sourced[int]:
    """Seconds that running requests get to end."""
    behind = replication(order)
    return reckon.drain_s(order) if behind is None else behind.drain


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
        affinity = common.on_products(order, kind, required=required)
    own = group.servers.environment if group.servers else {}
    millicores = f"{1000 * group.cores.value + NODE_CPU_MILLI}m"
    memory, limit = group.memory.value, group.memory_limit.value
    worker = common.container(
        "ray-worker",
        image(order).value,
        [common.MODELS_MOUNT, common.TMP_MOUNT],
        env=[*common.loading_environment(order), *common.variables(RAY_ENVIRONMENT | own)],
        resources=common.asked(millicores, memory, limit, share.gpus),
        lifecycle=common.before_stop(*LINGER, "worker"),
    )
    spec = common.pod_spec(
        worker_grace_s(order).value,
        worker,
        [common.models_volume(order, kind), common.TMP],
        affinity=affinity,
        nodes=group.machines,
        tolerations=common.tolerations(kind.recipe),
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
    name, share, engine = group.name, group.share, group.kind.recipe.engine
    memory, limit, fitted = group.memory, group.memory_limit, group.kind.fit.engine
    counted = f"{name}: replicas, and serve --workers" if group.alone else f"{name}: replicas"
    shared = "recipe: engine.tensor_parallel_size, or none on CPUs"
    threads = f"recipe: {engine.threads or 1} threads x {engine.tensor_parallel_size} processes"
    lines = [
        explain_value(counted, group.count),
        ExplainedValue(f"{name}: nvidia.com/gpu", str(share.gpus), shared),
        ExplainedValue(f"{name}: num-cpus", str(share.cpus), threads),
        *([explain_value(f"{name}: cpu", group.cores)] if group.servers else []),
        explain_value(f"{name}: memory", memory, f"{memory.value:,} MiB"),
        explain_value(f"{name}: memory limit", limit, f"{limit.value:,} MiB"),
    ]
    if group.labels:
        shown = ", ".join(f"{key}={value}" for key, value in group.labels.items())
        why = "the front finds its kind's pods by these labels"
        lines.append(ExplainedValue(f"{name}: nodes of Ray", shown, why))
    if group.alone and not group.machines:
        if share.gpus:
            known = products(order, group.kind)
            lines.append(explain_value(f"{name}: node affinity", known, ", ".join(known.value)))
        return lines
    if group.machines:
        shown = ", ".join(f"{key}={value}" for key, value in group.machines.items())
        why = "fleet: nodes"
    elif not share.gpus:
        shown, why = "any", "the fleet names no labels of its machines: nodes"
    elif fitted.analytic:
        why = "the fit is not measured, so the GPU's product is not known; name nodes in the fleet"
        shown = "any with a GPU"
    else:
        shown, why = fitted.device.replace(" ", "-"), "only the GPU that was measured"
    return [*lines, ExplainedValue(f"{name}: machines", shown, why)]


def ray_cluster(order: Order) -> Object:
    """The RayCluster, which has the deployment's name.

    Every connection to Ray needs the token in the Secret's key `auth_token`. A changed template
    recreates all pods; by default, only newly made pods would get it.
    """
    head = common.container(
        "ray-head",
        image(order).value,
        [common.TMP_MOUNT],
        ports=[
            {"name": "gcs-server", "containerPort": GCS_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": 8080, "protocol": "TCP"},
        ],
        env=common.variables({"HOME": common.FOLDERS["HOME"]} | RAY_ENVIRONMENT),
        resources=common.asked(HEAD_CPU, HEAD_MIB, HEAD_MIB),
        lifecycle=common.before_stop(*LINGER, "head", str(GCS_PORT)),
    )
    template = {
        "metadata": {"labels": member(order), "annotations": STAYS},
        "spec": common.pod_spec(head_grace_s(order).value, head, [common.TMP]),
    }
    parameters = {
        "num-cpus": "0",  # no work runs on the head
        "dashboard-host": "127.0.0.1",  # for `kubectl port-forward`
        "object-store-memory": str(OBJECT_STORE_MIB * MIB),
    }
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {**common.metadata(order), "annotations": common.digests(order)},
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


def worker_grace_s(order: Order) -> Sourced[int]:
    """Seconds that a worker's pod may wait for the front's drain."""
    behind = replication(order)
    longest = reckon.drain_s(order) if behind is None else behind.longest_drain
    front = reckon.grace_s(longest, reckon.PROPAGATION_S).value
    source = f"the front's {front} + {AFTER_FRONT_S} for the end of the actor"
    return Sourced(front + AFTER_FRONT_S, source)


def head_grace_s(order: Order) -> Sourced[int]:
    """Seconds that the head's pod may wait for the workers' pods."""
    workers = worker_grace_s(order).value
    source = f"the workers' {workers} + {AFTER_FRONT_S} for the end of their raylets"
    return Sourced(workers + AFTER_FRONT_S, source)
