"""Target `kuberay`: a front as a Deployment, which joins a RayCluster with pods for the workers, or
for the servers of an engine's own.

The front is a Deployment of one pod that joins the cluster without offering it resources, and
serves. docs/decisions/ says why it is not a container of the head's pod, and why there is no
RayJob or RayService.
"""

from __future__ import annotations

import hashlib

from pydantic import BaseModel

from toolkit.deploy import manifests as k8s
from toolkit.deploy import operators, reckon
from toolkit.deploy.alerts import drift_percent, replica_rules, series
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    fill,
)
from toolkit.deploy.replicas import Replication
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets import raycluster
from toolkit.deploy.targets.kubernetes import (
    cluster_policy,
    monitors,
    network_policy,
    pod_monitor,
)
from toolkit.endpoints.target import REPLICA_METRICS
from toolkit.errors import InputError
from toolkit.units import MIB

SCRIPT = "front.sh"
TOKEN_KEY = "auth_token"  # KubeRay's name
CPU = "2"  # for the server's loop and Ray's processes


def front_script(order: Order) -> str:
    """front.sh: joins the cluster and serves."""
    flags: list[tuple[str, object]] = [
        ("--ray", "auto"),
        *([] if order.plan.others else [("--workers", raycluster.worker_count(order).value)]),
        ("--room-timeout", reckon.startup_s(order).value),
        ("--host", "0.0.0.0"),
        ("--port", common.PORT),
        ("--shutdown-notice", reckon.PROPAGATION_S),
        ("--shutdown-timeout", raycluster.drain(order).value),
    ]
    return fill(
        SCRIPT,
        comment=order.comment(),
        object_store_bytes=raycluster.OBJECT_STORE_MIB * MIB,
        flags=flags,
        allowances=order.allowances,
    )


def head_address(order: Order) -> str:
    """The address of KubeRay's Service for the head."""
    return f"{order.name}-head-svc.{order.options.namespace}.svc:{raycluster.GCS_PORT}"


def front(order: Order) -> k8s.Deployment:
    """The Deployment of the front. There is never a second pod: both would claim the same room."""
    cluster = hashlib.sha256(raycluster.fingerprint(order).encode()).hexdigest()
    about = common.pod_metadata(order, **{"llmctl.io/raycluster-sha256": cluster})
    template = k8s.PodTemplate(
        metadata=about.model_copy(
            update={
                "labels": about.labels | raycluster.member(order),
                "annotations": (about.annotations or {}) | raycluster.STAYS,
            }
        ),
        spec=_pod(order),
    )
    strategy = k8s.Strategy(type="Recreate")
    return common.deployment(order, template, strategy, reckon.startup_s(order).value)


def _pod(order: Order) -> k8s.PodSpec:
    shared = k8s.Volume(
        name="shm",
        empty_dir=k8s.EmptyDir(medium="Memory", size_limit=f"{raycluster.OBJECT_STORE_MIB + 64}Mi"),
    )
    container = k8s.Container(
        name="llmctl",
        image=raycluster.image(order).value,
        command=["bash", f"{common.PLAN_FOLDER}/{SCRIPT}"],
        ports=[common.HTTP],
        env=[
            *common.environment(order),
            k8s.EnvVar(name="RAY_ADDRESS", value=head_address(order)),
            k8s.EnvVar(name="RAY_AUTH_MODE", value="token"),
            common.by_reference(order, "RAY_AUTH_TOKEN", TOKEN_KEY),
            *raycluster.RAY_ENVIRONMENT,
        ],
        resources=k8s.Resources(
            requests={"cpu": CPU, "memory": f"{front_memory().value}Mi"},
            limits={"memory": f"{front_memory_limit().value}Mi"},
        ),
        startup_probe=common.started(order),
        readiness_probe=common.READY,
        liveness_probe=common.ALIVE,
        volume_mounts=[*common.mounts(), k8s.VolumeMount(name="shm", mount_path="/dev/shm")],
    )
    return k8s.PodSpec(
        termination_grace_period_seconds=reckon.grace_s(
            raycluster.drain(order), reckon.PROPAGATION_S
        ).value,
        containers=[container],
        volumes=[*common.volumes(order), shared],
    )


def front_memory() -> Sourced[int]:
    """MiB that the front's pod requests."""
    ray = (
        f"{raycluster.NODE_MIB} for its raylet, {raycluster.OBJECT_STORE_MIB} for the object store"
    )
    return Sourced(
        reckon.FRONT_MIB + raycluster.NODE_MIB + raycluster.OBJECT_STORE_MIB,
        f"{reckon.FRONT_MIB} MiB for the front, {ray}",
    )


def front_memory_limit() -> Sourced[int]:
    """MiB at which the front's pod is killed."""
    return Sourced(
        reckon.LIMIT_FACTOR * front_memory().value, f"{reckon.LIMIT_FACTOR} times what it requests"
    )


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need Prometheus' operator.

    Raises `InputError` for options that do not suit this target.
    """
    _check(order)
    core: dict[str, BaseModel] = {
        "raycluster.yaml": raycluster.ray_cluster(order),
        "deployment.yaml": front(order),
        "service.yaml": common.service(order),
        "networkpolicy.yaml": network_policy(order, raycluster.member(order)),
        "networkpolicy-ray.yaml": cluster_policy(
            order, raycluster.ray_member(order), raycluster.member(order)
        ),
    }
    if raycluster.worker_count(order).value > 1:
        core["poddisruptionbudget.yaml"] = _budget(order)
    operated = _operated(order)
    files = common.kustomized(order, core, operated, [common.plan_map(order, SCRIPT)])
    files |= common.claim_files(order, _mounting(order))
    files |= {"core/plan.json": order.text, f"core/{SCRIPT}": front_script(order)}
    return Rendered(files, _explained(order), _start(order), common.FORWARDED)


def _operated(order: Order) -> dict[str, BaseModel]:
    """The objects that need Prometheus' operator. Replicas are scraped at the front's own page, for
    their ports change; without a fleet's kinds, so that no alert is about the queue of one.
    """
    behind = raycluster.replication(order)
    if behind is None:
        return monitors(order, reckon.waiting_threshold(order.plan, order.trace))
    alone = behind.kinds if len(behind.kinds) == 1 else []
    name = alone[0].name if alone else f"{order.name}-replicas"
    queues = [(series(order, monitored=True, of=kind.name), kind.threshold) for kind in alone]
    return {
        "podmonitor.yaml": pod_monitor(order),
        "podmonitor-replicas.yaml": pod_monitor(order, page=REPLICA_METRICS, name=name),
        "prometheusrule.yaml": operators.PrometheusRule(
            metadata=common.metadata(order),
            spec=replica_rules(order, series(order, monitored=True), queues),
        ),
    }


def _check(order: Order) -> None:
    reckon.check_podable(order)
    behind, options = raycluster.replication(order), order.options
    if options.gpu_products and order.plan.others:
        raise InputError(
            "--gpu-product names the GPU of one kind of workers; the fleet has several",
            "name the nodes of each kind in the fleet: nodes",
        )
    if behind is not None:
        _check_servers(order, behind)
    elif options.replicas > 1:
        raise InputError(
            f"--replicas {options.replicas}: under KubeRay one front has all workers",
            "tune with --workers auto for more workers, or render the target 'kubernetes'",
        )


def _check_servers(order: Order, behind: Replication) -> None:
    behind.check_containable()
    if order.options.replica_image:
        raise InputError(
            f"--replica-image {order.options.replica_image}: under KubeRay all pods have one image",
            "name it with --image; it has llmctl and Ray, too",
        )
    for kind in behind.kinds:
        if not kind.server.python_variable:
            raise InputError(
                f"recipe '{kind.kind.recipe.name}' names the engine's Python of a machine, which a "
                "pod does not have",
                "leave engine.vllm.python out: the image says where it is",
            )


def _mounting(order: Order) -> Sourced[int]:
    """Pods that mount the volume of models: the workers', and the front's for the tokenizer."""
    workers = sum(group.count.value for group in raycluster.groups(order))
    return Sourced(workers + 1, f"{workers + 1} pods: the workers' and the front's")


def _budget(order: Order) -> k8s.PodDisruptionBudget:
    """Disrupts one worker at a time. It is a number of pods that stay, because a RayCluster has no
    scale subresource, of which the number of disrupted pods could be taken.
    """
    workers = {**raycluster.ray_member(order), "ray.io/node-type": "worker"}
    return k8s.PodDisruptionBudget(
        metadata=common.metadata(order),
        spec=k8s.DisruptionSpec(
            min_available=raycluster.worker_count(order).value - 1,
            selector=k8s.Selector(match_labels=workers),
        ),
    )


def _explained(order: Order) -> list[ExplainedValue]:
    drift, behind = drift_percent(order), raycluster.replication(order)
    watched = [explain_value("drift alert", drift, f"{drift.value:g} %")] if behind is None else []
    return [
        *_explain_cluster(order),
        *(behind.explained_on_ray() if behind else []),
        *_explain_front(order),
        *common.explain_models(order, _mounting(order)),
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
    workers, head = raycluster.worker_grace_s(order), raycluster.head_grace_s(order)
    return [
        explain_value("image", raycluster.image(order)),
        ExplainedValue(
            "rayVersion",
            raycluster.RAY,
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
        *[
            line
            for group in raycluster.groups(order)
            for line in raycluster.explain_group(order, group)
        ],
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
            f"{raycluster.HEAD_MIB:,} MiB",
            "Ray 2.60's head: 610 MiB when idle, and room for its records",
        ),
        explain_value("head: terminationGracePeriodSeconds", head, f"{head.value} s"),
        ExplainedValue(
            "head: preStop", "linger head", "the head stays until all connected nodes have left"
        ),
    ]


def _explain_front(order: Order) -> list[ExplainedValue]:
    drain, startup = raycluster.drain(order), reckon.startup_s(order)
    grace, asked, limit = (
        reckon.grace_s(drain, reckon.PROPAGATION_S),
        front_memory(),
        front_memory_limit(),
    )
    return [
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
        ExplainedValue(
            "front: --shutdown-notice",
            f"{reckon.PROPAGATION_S} s",
            "until the cluster's proxies know that the pod is leaving",
        ),
        explain_value("front: --shutdown-timeout", drain, f"{drain.value} s"),
        explain_value("front: terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *common.explain_probes(order, "front: "),
    ]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
Needs KubeRay 1.6 or newer. One Secret has the clients' key and the token of Ray's own connections:

```bash
{common.preparation(order, TOKEN_KEY)}
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

Pods of other namespaces may call it if their namespace has the label `llmctl.io/client: "true"`."""
