"""Target `kuberay`: a front, and a RayCluster with pods for the workers or an engine's own servers.

The front is a Deployment of one pod that joins the cluster without offering it resources, and
serves. docs/decisions/ says why it is not a container of the head's pod, and why there is no RayJob
or RayService.

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
from functools import cached_property

import toolkit
from toolkit.cluster.places import MachineShare, node_labels
from toolkit.deploy import reckon
from toolkit.deploy.monitoring import drift_percent, replica_rules, series
from toolkit.deploy.order import (
    MEBIBYTES,
    SECONDS,
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    llmctl_image,
    object_name,
    products,
)
from toolkit.deploy.replicas import KindReplicas, Replication
from toolkit.deploy.targets import kubernetes
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets.objects import Object
from toolkit.endpoints.target import REPLICA_METRICS
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.plan import Kind
from toolkit.units import MIB

SCRIPT = "front.sh"
TOKEN_KEY = "auth_token"  # KubeRay's name
CPU = "2"  # of the front's pod: for the server's loop and Ray's processes
DOCKERFILE = "Dockerfile.vllm"
EXTRA = "kuberay"  # of the package: Ray with the agents that KubeRay's probes query
OBJECT_STORE_MIB = 256  # it holds only prompts and tokens
NODE_MIB = 512  # raylet and agents of a machine; idle, those of Ray 2.60 used 250 MiB
NODE_CPU_MILLI = 250
# MiB that the front's pod requests, and at which it is killed.
MEMORY = Sourced(
    reckon.FRONT_MIB + NODE_MIB + OBJECT_STORE_MIB,
    f"{reckon.FRONT_MIB} MiB for the front, {NODE_MIB} for its raylet, {OBJECT_STORE_MIB} for the "
    "object store",
)
MEMORY_LIMIT = Sourced(
    reckon.LIMIT_FACTOR * MEMORY.value, f"{reckon.LIMIT_FACTOR} times what it requests"
)
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
start again."""


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need Prometheus' operator.

    Raises `InputError` for options that do not suit this target.
    """
    cluster = RayDeployment(order)
    cluster.check()
    ours = cluster.member
    rays = {"ray.io/cluster": order.name}  # the latter is KubeRay's label
    spec = _ray_cluster(cluster)
    count = cluster.count.value
    core = {
        "raycluster.yaml": spec,
        "deployment.yaml": _front(cluster, spec),
        "service.yaml": common.service(order),
        "networkpolicy.yaml": kubernetes.network_policy(order, ours),
        "networkpolicy-ray.yaml": kubernetes.cluster_policy(order, rays, ours),
    }
    if count > 1:
        # It disrupts one worker at a time. It is a number of pods that stay, because a RayCluster
        # has no scale subresource, of which the number of disrupted pods could be taken.
        workers = {"matchLabels": {**rays, "ray.io/node-type": "worker"}}
        core["poddisruptionbudget.yaml"] = common.disruption_budget(
            order, workers, minAvailable=count - 1
        )
    pods = sum(group.count.value for group in cluster.groups) + 1
    mounting = Sourced(pods, f"{pods} pods: the workers' and the front's")  # for the tokenizer
    maps = [common.plan_map(order, SCRIPT)]
    operated = _operated(cluster) | kubernetes.routes(order)
    files = common.kustomized(order, core, operated, maps, mounting)
    # front.sh joins the cluster and serves.
    flags: list[tuple[str, object]] = [
        ("--ray", "auto"),
        *([] if order.plan.others else [("--workers", count)]),
        ("--room-timeout", reckon.startup_s(order).value),
        ("--host", "0.0.0.0"),
        ("--port", common.PORT),
        ("--shutdown-notice", reckon.PROPAGATION_S),
        ("--shutdown-timeout", cluster.drain.value),
        *([("--client-share", 1)] if order.options.gateway else []),
    ]
    store_bytes = OBJECT_STORE_MIB * MIB
    files[f"core/{SCRIPT}"] = order.fill(
        SCRIPT, object_store_bytes=store_bytes, flags=flags, allowances=order.allowances
    )
    start = common.start_commands(order, START, TOKEN_KEY)
    return Rendered(files, _explained(cluster, mounting), start, common.FORWARDED)


@dataclass(frozen=True)
class RayDeployment:
    """The values of an order that the front, the RayCluster and their explanation share."""

    order: Order

    @cached_property
    def servers(self) -> Replication | None:
        """The plan's workers as servers of an engine's own; None: they are llmctl's."""
        own = traits_of(self.order.plan.recipe.engine.name).server
        return Replication(self.order) if own else None

    def check(self) -> None:
        """Raise `InputError` for options that do not suit this target."""
        reckon.check_podable(self.order)
        servers = self.servers
        options = self.order.options
        if options.fronts > 1:
            raise InputError(
                f"--fronts {options.fronts}: under KubeRay one front starts all workers",
                "leave it out",
            )
        if options.gpu_products and self.order.plan.others:
            raise InputError(
                "--gpu-product names the GPU of one kind of workers; the fleet has several",
                "name the nodes of each kind in the fleet: nodes",
            )
        if servers is None:
            if options.replicas > 1:
                raise InputError(
                    f"--replicas {options.replicas}: under KubeRay one front has all workers",
                    "tune with --workers auto for more workers, or render the target 'kubernetes'",
                )
            return
        servers.check_containable()
        if options.replica_image:
            raise InputError(
                f"--replica-image {options.replica_image}: under KubeRay all pods have one image",
                "name it with --image; it has llmctl and Ray, too",
            )
        for kind in servers.kinds:
            if not kind.server.python_variable:
                raise InputError(
                    f"recipe '{kind.kind.recipe.name}' names the engine's Python of a machine, "
                    "which a pod does not have",
                    "leave engine.vllm.python out: the image says where it is",
                )

    @property
    def member(self) -> dict[str, str]:
        """The label of all pods of the deployment. Only the front has the label of the name."""
        return {"app.kubernetes.io/part-of": self.order.name}

    @cached_property
    def image(self) -> Sourced[str]:
        """The image of all pods: Ray and llmctl, with the engine.

        Raises `InputError` where the image of the command line is not pinned, and where no image
        has the engine for all kinds.
        """
        if self.servers is None or self.order.options.image:
            return llmctl_image(self.order, EXTRA)
        bases = sorted({kind.server.image for kind in self.servers.kinds})
        if len(bases) > 1:
            raise InputError(
                f"all pods have one image, and the kinds need several: {', '.join(bases)}",
                "build one with llmctl, Ray and the engine for all kinds, and name it: --image",
            )
        name = f"llmctl:{toolkit.__version__}-{EXTRA}-{self.order.plan.recipe.engine.name}"
        build = f"docker build -t {name} -f {DOCKERFILE} --build-arg BASE={bases[0]} ."
        source = "the engine's own with llmctl and Ray beside it; it was not built here"
        return Sourced(name, f"{source}: {build}")

    @cached_property
    def count(self) -> Sourced[int]:
        """The number of workers behind the one front: as the tuning found, or the plan's."""
        plan = self.order.plan
        if self.servers is not None and len(self.servers.kinds) == 1:
            return self.servers.kinds[0].count
        if plan.workers_needed is None:
            return Sourced(plan.workers, "plan: workers")
        source = "tuned: this number of workers under one scheduler keeps all limits"
        return Sourced(plan.workers_needed, source)

    @cached_property
    def groups(self) -> list[RayWorkerGroup]:
        """The groups of workers, one per kind, in the plan's order."""
        kinds = self.order.plan.kinds
        alone = len(kinds) == 1
        servers = self.servers.kinds if self.servers else [None for _ in kinds]
        return [
            RayWorkerGroup(
                kind,
                "workers" if alone else object_name(kind.recipe.name),
                self.count if alone else Sourced(kind.workers, "fleet: workers"),
                labels,
                alone,
                replicas,
            )
            for kind, labels, replicas in zip(kinds, node_labels(kinds), servers, strict=True)
        ]

    @cached_property
    def drain(self) -> Sourced[int]:
        """Seconds that running requests get to end."""
        return self.servers.drain if self.servers else reckon.drain_s(self.order)

    @property
    def grace_s(self) -> Sourced[int]:
        """Seconds that the front's pod has for its end."""
        return reckon.grace_s(self.drain, reckon.PROPAGATION_S)

    @property
    def worker_grace_s(self) -> Sourced[int]:
        """Seconds that a worker's pod may wait for the drain of any front of this cluster."""
        longest = self.servers.longest_drain if self.servers else self.drain
        front = reckon.grace_s(longest, reckon.PROPAGATION_S).value
        source = f"the front's {front} + {AFTER_FRONT_S} for the end of the actor"
        return Sourced(front + AFTER_FRONT_S, source)

    @property
    def head_grace_s(self) -> Sourced[int]:
        """Seconds that the head's pod may wait for the workers' pods."""
        workers = self.worker_grace_s.value
        source = f"the workers' {workers} + {AFTER_FRONT_S} for the end of their raylets"
        return Sourced(workers + AFTER_FRONT_S, source)


def _front(cluster: RayDeployment, ray: Object) -> Object:
    """The Deployment of the front. There is never a second pod: both would claim the same room."""
    order = cluster.order
    # For another spec of the cluster, the front must start again.
    spec = json.dumps(ray["spec"], sort_keys=True)
    made_for = {"llmctl.io/raycluster-sha256": hashlib.sha256(spec.encode()).hexdigest()}
    # The address of KubeRay's Service for the head.
    head = f"{order.name}-head-svc.{order.options.namespace}.svc:{GCS_PORT}"
    store = {"medium": "Memory", "sizeLimit": f"{OBJECT_STORE_MIB + 64}Mi"}
    container = common.container(
        "llmctl",
        cluster.image.value,
        [*common.MOUNTS, common.SHARED_MOUNT],
        command=["bash", f"{common.PLAN_FOLDER}/{SCRIPT}"],
        ports=[common.HTTP],
        env=[
            *common.environment(order),
            *common.variables({"RAY_ADDRESS": head, "RAY_AUTH_MODE": "token"}),
            common.by_reference(order, "RAY_AUTH_TOKEN", TOKEN_KEY),
            *common.variables(RAY_ENVIRONMENT),
        ],
        resources=common.asked(CPU, MEMORY.value, MEMORY_LIMIT.value),
        **common.probes(order),
    )
    volumes = [*common.volumes(order), {"name": "shm", "emptyDir": store}]
    return common.deployment(
        order,
        common.pod_spec(order, cluster.grace_s.value, container, volumes),
        {"type": "Recreate"},
        reckon.startup_s(order).value,
        more_labels=cluster.member,
        more_annotations=made_for | STAYS,
    )


def _operated(cluster: RayDeployment) -> dict[str, Object]:
    """The objects that need Prometheus' operator. Replicas are scraped at the front's own page, for
    their ports change; without a fleet's kinds, so that no alert is about the queue of one.
    """
    order = cluster.order
    servers = cluster.servers
    if servers is None:
        return kubernetes.monitors(order, reckon.waiting_threshold(order.plan, order.trace))
    alone = servers.kinds if len(servers.kinds) == 1 else []
    name = alone[0].name if alone else f"{order.name}-replicas"
    queues = [(series(order, monitored=True, of=kind.name), kind.threshold) for kind in alone]
    rules = replica_rules(order, series(order, monitored=True), queues)
    return {
        "podmonitor.yaml": kubernetes.pod_monitor(order),
        "podmonitor-replicas.yaml": kubernetes.pod_monitor(order, page=REPLICA_METRICS, name=name),
        "prometheusrule.yaml": kubernetes.prometheus_rule(order, rules),
    }


def _explained(cluster: RayDeployment, mounting: Sourced[int]) -> list[ExplainedValue]:
    order = cluster.order
    servers = cluster.servers
    drift = explain_value("drift alert", drift_percent(order), "{:g} %")
    room = "until KubeRay's pods run; then loading begins"
    recreate = "the next front finds room only after the workers of this one have ended"
    probes = "KubeRay adds its own: the raylet's health, and on the head that of GCS"
    disrupted = "one worker at a time; the others continue its requests"
    fixed = "the placement group has a fixed number of workers; render again to change it"
    return [
        *_explain_cluster(cluster),
        *(servers.explained_on_ray() if servers else []),
        explain_value("front: memory", MEMORY, MEBIBYTES),
        explain_value("front: memory limit", MEMORY_LIMIT, MEBIBYTES),
        ExplainedValue("front: strategy", "Recreate", recreate),
        ExplainedValue("front: --room-timeout", f"{reckon.startup_s(order).value} s", room),
        ExplainedValue("front: --shutdown-notice", *common.NOTICE),
        explain_value("front: --shutdown-timeout", cluster.drain, SECONDS),
        explain_value("front: terminationGracePeriodSeconds", cluster.grace_s, SECONDS),
        *common.explain_probes(order, "front: "),
        *common.explain_models(order, mounting),
        ExplainedValue("probes of Ray's pods", "KubeRay's", probes),
        ExplainedValue("PodDisruptionBudget", "minAvailable", disrupted),
        ExplainedValue("ScaledObject", "none", fixed),
        *([] if servers else [drift]),
        kubernetes.explain_release(order),
        *common.explain_push(cluster.image, "--image"),
        *common.explain_pods(order),
        *kubernetes.explain_outside(order),
    ]


def _explain_cluster(cluster: RayDeployment) -> list[ExplainedValue]:
    workers = "workers: terminationGracePeriodSeconds"
    version = "what the image has installed; KubeRay chooses its probes by it"
    secret = f"Secret {cluster.order.name}, key {TOKEN_KEY}"
    token = f"{secret}: every connection to Ray's ports needs it"
    recreate = "all pods have one image: another image replaces all of Ray's pods and the front"
    lingers = "its raylet stays until no actor runs on it, so that the front can drain"
    no_work = "no work runs on it; without the head there is no cluster"
    measured = "Ray 2.60's head: 610 MiB when idle, and room for its records"
    stays = "the head stays until all connected nodes have left"
    return [
        explain_value("image", cluster.image),
        ExplainedValue("rayVersion", RAY, version),
        ExplainedValue("authOptions", "token", token),
        ExplainedValue("upgradeStrategy", "Recreate", recreate),
        *(line for group in cluster.groups for line in _explain_group(cluster.order, group)),
        explain_value(workers, cluster.worker_grace_s, SECONDS),
        ExplainedValue("workers: preStop", "linger worker", lingers),
        ExplainedValue("head: num-cpus", "0", no_work),
        ExplainedValue("head: dashboard-host", "127.0.0.1", "only for kubectl port-forward"),
        ExplainedValue("head: memory", f"{HEAD_MIB:,} MiB", measured),
        explain_value("head: terminationGracePeriodSeconds", cluster.head_grace_s, SECONDS),
        ExplainedValue("head: preStop", "linger head", stays),
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
    def machines(self) -> dict[str, str]:
        """The labels of its machines (Kubernetes' nodes) that the fleet names."""
        return _without_rays(self.kind.nodes)


def _without_rays(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels that Ray does not set itself."""
    return {key: value for key, value in labels.items() if not key.startswith(RAY_LABELS)}


def _worker_group(cluster: RayDeployment, group: RayWorkerGroup) -> Object:
    """The worker group of the RayCluster."""
    order = cluster.order
    count = group.count.value
    share = group.share
    kind = group.kind
    # KubeRay refuses labels among the parameters.
    labels = _without_rays(group.labels)
    labelled = {"labels": labels} if labels else {}
    affinity = None
    if share.gpus and not group.machines:
        required = not kind.fit.engine.analytic and not group.alone
        affinity = common.on_products(order, kind, required=required)
    own = group.servers.environment if group.servers else {}
    millicores = f"{1000 * group.cores.value + NODE_CPU_MILLI}m"
    memory = group.memory.value
    limit = group.memory_limit.value
    worker = common.container(
        "ray-worker",
        cluster.image.value,
        [common.MODELS_MOUNT, common.TMP_MOUNT],
        env=[*common.loading_environment(order), *common.variables(RAY_ENVIRONMENT | own)],
        resources=common.asked(millicores, memory, limit, share.gpus),
        lifecycle=common.before_stop(*LINGER, "worker"),
    )
    spec = common.pod_spec(
        order,
        cluster.worker_grace_s.value,
        worker,
        [common.models_volume(order, kind), common.TMP],
        affinity=affinity,
        nodes=group.machines,
        tolerations=common.tolerations(kind.recipe),
        spread={"ray.io/cluster": order.name, "ray.io/group": group.name},  # KubeRay's labels
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
        "template": {"metadata": {"labels": cluster.member}, "spec": spec},
    }


def _explain_group(order: Order, group: RayWorkerGroup) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about a group of workers."""
    name = group.name
    share = group.share
    engine = group.kind.recipe.engine
    fitted = group.kind.fit.engine
    counted = f"{name}: replicas, and serve --workers" if group.alone else f"{name}: replicas"
    shared = "recipe: engine.tensor_parallel_size, or none on CPUs"
    threads = f"recipe: {engine.threads or 1} threads x {engine.tensor_parallel_size} processes"
    lines = [
        explain_value(counted, group.count),
        ExplainedValue(f"{name}: nvidia.com/gpu", str(share.gpus), shared),
        ExplainedValue(f"{name}: num-cpus", str(share.cpus), threads),
        *([explain_value(f"{name}: cpu", group.cores)] if group.servers else []),
        explain_value(f"{name}: memory", group.memory, MEBIBYTES),
        explain_value(f"{name}: memory limit", group.memory_limit, MEBIBYTES),
    ]
    if group.labels:
        shown = ", ".join(f"{key}={value}" for key, value in group.labels.items())
        why = "the front finds its kind's pods by these labels"
        lines.append(ExplainedValue(f"{name}: nodes of Ray", shown, why))
    if group.alone and not group.machines:
        if share.gpus:
            lines.append(explain_value(f"{name}: node affinity", products(order, group.kind)))
        return lines
    if group.machines:
        shown = ", ".join(f"{key}={value}" for key, value in group.machines.items())
        why = "fleet: nodes"
    elif not share.gpus:
        shown = "any"
        why = "the fleet names no labels of its machines: nodes"
    elif fitted.analytic:
        why = "the fit is not measured, so the GPU's product is not known; name nodes in the fleet"
        shown = "any with a GPU"
    else:
        shown = fitted.device.replace(" ", "-")
        why = "only the GPU that was measured"
    return [*lines, ExplainedValue(f"{name}: machines", shown, why)]


def _ray_cluster(cluster: RayDeployment) -> Object:
    """The RayCluster, which has the deployment's name.

    Every connection to Ray needs the token in the Secret's key `auth_token`. A changed template
    recreates all pods; by default, only newly made pods would get it.
    """
    order = cluster.order
    head = common.container(
        "ray-head",
        cluster.image.value,
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
        "metadata": {"labels": cluster.member, "annotations": STAYS},
        "spec": common.pod_spec(order, cluster.head_grace_s.value, head, [common.TMP]),
    }
    parameters = {
        "num-cpus": "0",  # no work runs on the head
        "dashboard-host": "127.0.0.1",  # for `kubectl port-forward`
        "object-store-memory": str(OBJECT_STORE_MIB * MIB),
    }
    about = {**common.metadata(order), "annotations": common.digests(order)}
    spec = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token", "secretName": order.name},
        "upgradeStrategy": {"type": "Recreate"},
        "headGroupSpec": {"rayStartParams": parameters, "template": template},
        "workerGroupSpecs": [_worker_group(cluster, group) for group in cluster.groups],
    }
    return common.api_object("ray.io/v1", "RayCluster", about, spec)
