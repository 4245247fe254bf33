"""A Kubernetes cluster: a Deployment and what belongs to it (core/), and what needs operators
(beside it).

`kubectl apply -k DIR` takes all of it; `kubectl apply -k DIR/core` does without Prometheus'
operator and KEDA.
"""

from __future__ import annotations

import json
import re

from pydantic import BaseModel

from toolkit.deploy.kinds.kubernetes import (
    AnyPods,
    Deployment,
    DeploymentSpec,
    DisruptionSpec,
    Egress,
    Ingress,
    Kustomization,
    NetworkPolicy,
    NetworkPolicySpec,
    Patch,
    PatchTarget,
    Peer,
    PodDisruptionBudget,
    PodTemplate,
    PolicyPort,
    RollingUpdate,
    SecretKey,
    Selector,
    Strategy,
    TypedSecretKey,
)
from toolkit.deploy.kinds.operators import (
    MetricsEndpoint,
    PodMonitor,
    PodMonitorSpec,
    PrometheusQuery,
    PrometheusRule,
    ScaledObject,
    ScaledObjectSpec,
    ScaleTarget,
    Trigger,
)
from toolkit.deploy.monitoring import drift_percent, rules, series
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Reckoned,
    Rendered,
    llmctl_image,
    products,
    told,
)
from toolkit.deploy.reckon import (
    PROPAGATION_S,
    check_podable,
    cpus,
    drain_s,
    from_hub,
    gpus,
    grace_s,
    memory_limit_mib,
    memory_mib,
    replicas,
    startup_s,
    waiting_threshold,
)
from toolkit.deploy.targets.objects import (
    FORWARDED,
    SECRET_KEY,
    claim_files,
    dashboard_map,
    metadata,
    models_told,
    plan_map,
    pod,
    pod_metadata,
    preparation,
    probes_told,
    selector,
    service,
)
from toolkit.files.strict import dump_yaml

# Who may call a deployment, and whom it may call: deny by default, a few named ways in and out.

CLUSTER_DNS = Peer(  # CoreDNS and kube-dns both wear this label
    namespace_selector=AnyPods(match_labels={"kubernetes.io/metadata.name": "kube-system"}),
    pod_selector=AnyPods(match_labels={"k8s-app": "kube-dns"}),
)
CLIENT = {"llmctl.io/client": "true"}


def network_policy(order: Order) -> NetworkPolicy:
    """In: pods of its namespace, of clients' namespaces, and Prometheus'. Out: the cluster's DNS,
    the hub if needed.
    """
    callers = Ingress(sender=_callers(order), ports=[PolicyPort(port="http")])
    return _policy(
        order, order.name, {"app.kubernetes.io/name": order.name}, [callers], _egress(order)
    )


def front_policy(order: Order, members: dict[str, str]) -> NetworkPolicy:
    """As `network_policy`, and Ray's ports, which are any, for the `members` of the deployment."""
    ours = [Peer(pod_selector=AnyPods(match_labels=members))]
    callers = Ingress(sender=_callers(order), ports=[PolicyPort(port="http")])
    ways_out = [*_egress(order), Egress(to=ours)]
    return _policy(
        order,
        order.name,
        {"app.kubernetes.io/name": order.name},
        [callers, Ingress(sender=ours)],
        ways_out,
    )


def cluster_policy(order: Order, cluster: dict[str, str], members: dict[str, str]) -> NetworkPolicy:
    """For the pods of a Ray cluster: nobody but the `members` of the deployment comes in. Who does
    runs code there.
    """
    ours = [Peer(pod_selector=AnyPods(match_labels=members))]
    return _policy(
        order,
        f"{order.name}-ray",
        cluster,
        [Ingress(sender=ours)],
        [*_egress(order), Egress(to=ours)],
    )


def _policy(
    order: Order, name: str, pods: dict[str, str], ways_in: list[Ingress], ways_out: list[Egress]
) -> NetworkPolicy:
    return NetworkPolicy(
        metadata=metadata(order, name),
        spec=NetworkPolicySpec(
            pod_selector=Selector(match_labels=pods), ingress=ways_in, egress=ways_out
        ),
    )


def _callers(order: Order) -> list[Peer]:
    from_here = Peer(pod_selector=AnyPods())
    clients = Peer(namespace_selector=AnyPods(match_labels=CLIENT))
    return [from_here, clients, *_prometheus(order)]


def _prometheus(order: Order) -> list[Peer]:
    """Prometheus' namespace, read off its address as the cluster's DNS has it; none for other
    addresses.
    """
    found = re.match(r"https?://[a-z0-9-]+\.([a-z0-9-]+)\.svc", order.options.prometheus)
    name = {"kubernetes.io/metadata.name": found[1]} if found else None
    return [Peer(namespace_selector=AnyPods(match_labels=name))] if name else []


def _egress(order: Order) -> list[Egress]:
    cluster_dns = Egress(
        to=[CLUSTER_DNS],
        ports=[PolicyPort(protocol="UDP", port=53), PolicyPort(protocol="TCP", port=53)],
    )
    hub = [Egress(ports=[PolicyPort(port=443)])] if from_hub(order.plan.recipe) else []
    return [cluster_dns, *hub]


# What Prometheus' operator and KEDA are told: where the metrics are, and from how many waiting on
# to add a replica.


def pod_monitor(order: Order) -> PodMonitor:
    """/metrics of every pod, with the key: it is closed like all else."""
    endpoint = MetricsEndpoint(
        port="http",
        path="/metrics",
        interval="15s",
        authorization=TypedSecretKey(credentials=SecretKey(name=order.name, key=SECRET_KEY)),
    )
    return PodMonitor(
        metadata=metadata(order),
        spec=PodMonitorSpec(selector=selector(order), pod_metrics_endpoints=[endpoint]),
    )


def scaled_object(order: Order, threshold: int) -> ScaledObject:
    """As many replicas as keep the mean of those who wait at each below `threshold`."""
    return ScaledObject(
        metadata=metadata(order),
        spec=ScaledObjectSpec(
            scale_target_ref=ScaleTarget(name=order.name),
            polling_interval=15,
            cooldown_period=300,
            min_replica_count=replicas(order).value,
            max_replica_count=max_replicas(order).value,
            triggers=[
                Trigger(
                    metadata=PrometheusQuery(
                        server_address=order.options.prometheus,
                        query=f"sum(llmctl_requests_waiting{{{series(order, monitored=True)}}})",
                        threshold=str(threshold),
                    )
                )
            ],
        ),
    )


def max_replicas(order: Order) -> Reckoned[int]:
    """The most replicas that the autoscaler may ask for."""
    if order.options.max_replicas:
        return Reckoned(max(order.options.max_replicas, replicas(order).value), "--max-replicas")
    return Reckoned(
        2 * replicas(order).value, "twice the replicas; say otherwise with --max-replicas"
    )


def render(order: Order) -> Rendered:
    """core/ and, beside it, what needs operators; a kustomization.yaml for each."""
    check_podable(order)
    threshold = waiting_threshold(order.plan, order.trace)
    core: dict[str, BaseModel] = {
        "deployment.yaml": _deployment(order),
        "service.yaml": service(order),
        "poddisruptionbudget.yaml": _budget(order),
        "networkpolicy.yaml": network_policy(order),
    }
    watched: dict[str, BaseModel] = {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": PrometheusRule(
            metadata=metadata(order), spec=rules(order, series(order, monitored=True), threshold)
        ),
    }
    if threshold.value is not None:
        watched["scaledobject.yaml"] = scaled_object(order, threshold.value)
    objects = {f"core/{name}": one for name, one in core.items()} | watched
    objects["core/kustomization.yaml"] = _core(order, sorted(core))
    objects["kustomization.yaml"] = _all(order, sorted(watched), scaled=threshold.value is not None)
    files = {name: dump_yaml([one], order.comment()) for name, one in objects.items()}
    files |= claim_files(order, _mounting(order, threshold)) | {"core/plan.json": order.text}
    return Rendered(files, _told(order, threshold), _start(order), FORWARDED)


def _deployment(order: Order) -> Deployment:
    return Deployment(
        metadata=metadata(order),
        spec=DeploymentSpec(
            replicas=replicas(order).value,
            progress_deadline_seconds=startup_s(order).value + 60,
            strategy=Strategy(rolling_update=_rolling(order)),
            selector=selector(order),
            template=PodTemplate(metadata=pod_metadata(order), spec=pod(order, PROPAGATION_S)),
        ),
    )


def _rolling(order: Order) -> RollingUpdate:
    """A spare GPU for a second pod is rare; a spare CPU is not."""
    on_gpus = gpus(order.plan.recipe).value > 0
    return (
        RollingUpdate(max_surge=0, max_unavailable=1)
        if on_gpus
        else RollingUpdate(max_surge=1, max_unavailable=0)
    )


def _mounting(order: Order, threshold: Reckoned[int | None]) -> Reckoned[int]:
    """Pods that may have the models' volume at once."""
    most = replicas(order) if threshold.value is None else max_replicas(order)
    count = most.value + _rolling(order).max_surge
    return Reckoned(
        count,
        f"up to {count} pods at once, replicas and a rollout's"
        if count > 1
        else "one pod at a time",
    )


def _budget(order: Order) -> PodDisruptionBudget:
    return PodDisruptionBudget(
        metadata=metadata(order), spec=DisruptionSpec(max_unavailable=1, selector=selector(order))
    )


def _core(order: Order, names: list[str]) -> Kustomization:
    return Kustomization(
        namespace=order.options.namespace, resources=names, config_map_generator=[plan_map(order)]
    )


def _all(order: Order, names: list[str], *, scaled: bool) -> Kustomization:
    """Under an autoscaler the Deployment says no number: applying it again must not undo the
    autoscaler's.
    """
    removal = Patch(
        target=PatchTarget(kind="Deployment", name=order.name),
        patch=json.dumps([{"op": "remove", "path": "/spec/replicas"}]),
    )
    return Kustomization(
        namespace=order.options.namespace,
        resources=["core", *names],
        config_map_generator=[dashboard_map(order)],
        patches=[removal] if scaled else None,
    )


def _told(order: Order, threshold: Reckoned[int | None]) -> list[ExplainedValue]:
    drain, recipe = drain_s(order), order.plan.recipe
    where = products(order, order.plan.kinds[0])
    grace = grace_s(drain, PROPAGATION_S)
    memory, most = memory_mib(order), memory_limit_mib(order)
    lines = [
        told("image", llmctl_image(order)),
        told("replicas", replicas(order)),
        ExplainedValue(
            "args --shutdown-notice",
            f"{PROPAGATION_S} s",
            "until the cluster's proxies know that the pod is leaving",
        ),
        told("args --shutdown-timeout", drain, f"{drain.value} s"),
        told("terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *probes_told(order),
        told("nvidia.com/gpu", gpus(recipe)),
        *([told("node affinity", where, ", ".join(where.value))] if gpus(recipe).value else []),
        *models_told(order, _mounting(order, threshold)),
        told("cpu", cpus(recipe)),
        told("memory", memory, f"{memory.value:,} MiB"),
        told("memory limit", most, f"{most.value:,} MiB"),
        told("drift alert", drift_percent(order), f"{drift_percent(order).value:g} %"),
    ]
    if threshold.value is None:
        return [*lines, told("ScaledObject", threshold, "none")]
    at_most = max_replicas(order)
    return [
        *lines,
        told("ScaledObject threshold", threshold),
        told("ScaledObject maxReplicaCount", at_most),
    ]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
```bash
{preparation(order)}
kubectl apply -k .          # needs the CRDs of Prometheus' operator and KEDA; without them: kubectl apply -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # drains
```

Pods of other namespaces may call it where their namespace is labelled `llmctl.io/client: "true"`."""
