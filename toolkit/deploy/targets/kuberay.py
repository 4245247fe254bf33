"""Target `kuberay`: a front as a Deployment, which joins a RayCluster with pods for the workers.

The front is a Deployment of one pod that joins the cluster without offering it resources, and
serves. docs/decisions/ says why it is not a container of the head's pod, and why there is no
RayJob or RayService.
"""

from __future__ import annotations

import hashlib

from pydantic import BaseModel

from toolkit.deploy.alerts import drift_percent, rules, series
from toolkit.deploy.manifests import (
    Container,
    Deployment,
    DeploymentSpec,
    DisruptionSpec,
    EmptyDir,
    EnvVar,
    Kustomization,
    PodDisruptionBudget,
    PodSpec,
    PodTemplate,
    Resources,
    Selector,
    Strategy,
    Volume,
    VolumeMount,
)
from toolkit.deploy.operators import PrometheusRule
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    fill,
    llmctl_image,
)
from toolkit.deploy.reckon import (
    FRONT_MIB,
    LIMIT_FACTOR,
    PROPAGATION_S,
    check_podable,
    drain_s,
    grace_s,
    startup_s,
    waiting_threshold,
)
from toolkit.deploy.targets.kubernetes import cluster_policy, front_policy, pod_monitor
from toolkit.deploy.targets.objects import (
    ALIVE,
    FORWARDED,
    HTTP,
    PLAN_FOLDER,
    PORT,
    READY,
    by_reference,
    claim_files,
    dashboard_map,
    environment,
    explain_models,
    explain_probes,
    metadata,
    mounts,
    plan_map,
    pod_metadata,
    preparation,
    selector,
    service,
    started,
    volumes,
)
from toolkit.deploy.targets.raycluster import (
    EXTRA,
    GCS_PORT,
    HEAD_MIB,
    NODE_MIB,
    OBJECT_STORE_MIB,
    RAY,
    RAY_ENVIRONMENT,
    STAYS,
    explain_group,
    fingerprint,
    groups,
    head_grace_s,
    member,
    ray_cluster,
    ray_member,
    worker_count,
    worker_grace_s,
)
from toolkit.errors import InputError
from toolkit.files.strict import dump_yaml
from toolkit.units import MIB

SCRIPT = "front.sh"
TOKEN_KEY = "auth_token"  # KubeRay's name
CPU = "2"  # for the server's loop and Ray's processes


def front_script(order: Order) -> str:
    """front.sh: joins the cluster and serves."""
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
    """The address of KubeRay's Service for the head."""
    return f"{order.name}-head-svc.{order.options.namespace}.svc:{GCS_PORT}"


def front(order: Order) -> Deployment:
    """The Deployment of the front. There is never a second pod: both would claim the same room."""
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
    container = Container(
        name="llmctl",
        image=llmctl_image(order, EXTRA).value,
        command=["bash", f"{PLAN_FOLDER}/{SCRIPT}"],
        ports=[HTTP],
        env=[
            *environment(order),
            EnvVar(name="RAY_ADDRESS", value=head_address(order)),
            EnvVar(name="RAY_AUTH_MODE", value="token"),
            by_reference(order, "RAY_AUTH_TOKEN", TOKEN_KEY),
            *RAY_ENVIRONMENT,
        ],
        resources=Resources(
            requests={"cpu": CPU, "memory": f"{front_memory().value}Mi"},
            limits={"memory": f"{front_memory_limit().value}Mi"},
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


def front_memory() -> Sourced[int]:
    """MiB that the front's pod requests."""
    ray = f"{NODE_MIB} for its raylet, {OBJECT_STORE_MIB} for the object store"
    return Sourced(FRONT_MIB + NODE_MIB + OBJECT_STORE_MIB, f"{FRONT_MIB} MiB for the front, {ray}")


def front_memory_limit() -> Sourced[int]:
    """MiB at which the front's pod is killed."""
    return Sourced(LIMIT_FACTOR * front_memory().value, f"{LIMIT_FACTOR} times what it requests")


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need Prometheus' operator.

    Raises `InputError` for options that do not suit this target.
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
    operated: dict[str, BaseModel] = {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": PrometheusRule(
            metadata=metadata(order), spec=rules(order, series(order, monitored=True), threshold)
        ),
    }
    objects = {f"core/{name}": content for name, content in core.items()} | operated
    namespace = order.options.namespace
    objects["core/kustomization.yaml"] = Kustomization(
        namespace=namespace, resources=sorted(core), config_map_generator=[plan_map(order, SCRIPT)]
    )
    objects["kustomization.yaml"] = Kustomization(
        namespace=namespace,
        resources=["core", *sorted(operated)],
        config_map_generator=[dashboard_map(order)],
    )
    files = {name: dump_yaml([content], order.comment()) for name, content in objects.items()}
    files |= claim_files(order, _mounting(order))
    files |= {"core/plan.json": order.text, f"core/{SCRIPT}": front_script(order)}
    return Rendered(files, _explained(order), _start(order), FORWARDED)


def _check(order: Order) -> None:
    check_podable(order)
    if order.options.gpu_products and order.plan.others:
        raise InputError(
            "--gpu-product names the GPU of one kind of workers; the fleet has several",
            "name the nodes of each kind in the fleet: nodes",
        )
    if order.options.replicas > 1:
        raise InputError(
            f"--replicas {order.options.replicas}: under KubeRay one front has all workers",
            "tune with --workers auto for more workers, or render the target 'kubernetes'",
        )


def _mounting(order: Order) -> Sourced[int]:
    """Pods that mount the volume of models: the workers', and the front's for the tokenizer."""
    workers = sum(group.count.value for group in groups(order))
    return Sourced(workers + 1, f"{workers + 1} pods: the workers' and the front's")


def _budget(order: Order) -> PodDisruptionBudget:
    """Disrupts one worker at a time. It is a number of pods that stay, because a RayCluster has no
    scale subresource, of which the number of disrupted pods could be taken.
    """
    workers = {**ray_member(order), "ray.io/node-type": "worker"}
    return PodDisruptionBudget(
        metadata=metadata(order),
        spec=DisruptionSpec(
            min_available=worker_count(order).value - 1, selector=Selector(match_labels=workers)
        ),
    )


def _explained(order: Order) -> list[ExplainedValue]:
    drift = drift_percent(order)
    return [
        *_explain_cluster(order),
        *_explain_front(order),
        *explain_models(order, _mounting(order)),
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
        explain_value("drift alert", drift, f"{drift.value:g} %"),
    ]


def _explain_cluster(order: Order) -> list[ExplainedValue]:
    workers, head = worker_grace_s(order), head_grace_s(order)
    return [
        explain_value("image", llmctl_image(order, EXTRA)),
        ExplainedValue(
            "rayVersion", RAY, "what the image has installed; KubeRay chooses its probes by it"
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


def _explain_front(order: Order) -> list[ExplainedValue]:
    drain, startup = drain_s(order), startup_s(order)
    grace, asked, limit = grace_s(drain, PROPAGATION_S), front_memory(), front_memory_limit()
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
            f"{PROPAGATION_S} s",
            "until the cluster's proxies know that the pod is leaving",
        ),
        explain_value("front: --shutdown-timeout", drain, f"{drain.value} s"),
        explain_value("front: terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *explain_probes(order, "front: "),
    ]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
Needs KubeRay 1.6 or newer. One Secret has the clients' key and the token of Ray's own connections:

```bash
{preparation(order, TOKEN_KEY)}
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
