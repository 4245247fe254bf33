"""Target `kuberay`: a front as a Deployment, which joins a RayCluster with pods for the workers, or
for the servers of an engine's own.

The front is a Deployment of one pod that joins the cluster without offering it resources, and
serves. docs/decisions/ says why it is not a container of the head's pod, and why there is no
RayJob or RayService.
"""

from __future__ import annotations

import hashlib
import json

from toolkit.deploy import reckon
from toolkit.deploy.monitoring import drift_percent, replica_rules, series
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    fill,
)
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets import raycluster
from toolkit.deploy.targets.kubernetes import (
    cluster_policy,
    monitors,
    network_policy,
    pod_monitor,
    prometheus_rule,
)
from toolkit.deploy.targets.objects import Object
from toolkit.endpoints.target import REPLICA_METRICS
from toolkit.errors import InputError
from toolkit.units import MIB

SCRIPT = "front.sh"
TOKEN_KEY = "auth_token"  # KubeRay's name
CPU = "2"  # for the server's loop and Ray's processes
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
    ours, rays = raycluster.member(order), raycluster.ray_member(order)
    cluster, count = raycluster.ray_cluster(order), raycluster.worker_count(order).value
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
    pods = sum(group.count.value for group in raycluster.groups(order)) + 1
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
        ("--shutdown-timeout", raycluster.drain(order).value),
    ]
    files["core/plan.json"] = order.text
    files[f"core/{SCRIPT}"] = fill(
        SCRIPT,
        comment=order.comment(),
        object_store_bytes=raycluster.OBJECT_STORE_MIB * MIB,
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
    head = f"{order.name}-head-svc.{order.options.namespace}.svc:{raycluster.GCS_PORT}"
    store = {"medium": "Memory", "sizeLimit": f"{raycluster.OBJECT_STORE_MIB + 64}Mi"}
    container = common.container(
        "llmctl",
        raycluster.image(order).value,
        [*common.MOUNTS, common.SHARED_MOUNT],
        command=["bash", f"{common.PLAN_FOLDER}/{SCRIPT}"],
        ports=[common.HTTP],
        env=[
            *common.environment(order),
            *common.variables({"RAY_ADDRESS": head, "RAY_AUTH_MODE": "token"}),
            common.by_reference(order, "RAY_AUTH_TOKEN", TOKEN_KEY),
            *common.variables(raycluster.RAY_ENVIRONMENT),
        ],
        resources=common.asked(CPU, _memory().value, _memory_limit().value),
        **common.probes(order),
    )
    pod = common.pod_spec(
        reckon.grace_s(raycluster.drain(order), reckon.PROPAGATION_S).value,
        container,
        [*common.volumes(order), {"name": "shm", "emptyDir": store}],
    )
    about = {
        "labels": common.labels(order) | raycluster.member(order),
        "annotations": common.digests(order) | made_for | raycluster.STAYS,
    }
    template = {"metadata": about, "spec": pod}
    return common.deployment(order, template, {"type": "Recreate"}, reckon.startup_s(order).value)


def _memory() -> Sourced[int]:
    """MiB that the front's pod requests."""
    front, ray, store = reckon.FRONT_MIB, raycluster.NODE_MIB, raycluster.OBJECT_STORE_MIB
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
    behind = raycluster.replication(order)
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
    behind, options = raycluster.replication(order), order.options
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
    drift, behind = drift_percent(order), raycluster.replication(order)
    drain, startup = raycluster.drain(order), reckon.startup_s(order)
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
