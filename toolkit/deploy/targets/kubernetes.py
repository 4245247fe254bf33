"""Target `kubernetes`: a Deployment with its objects (core/), and objects that need operators.

`kubectl apply -k DIR` applies all; `kubectl apply -k DIR/core` needs neither Prometheus' operator
nor KEDA. Network policies (deny by default, a few named ways in and out) and the PodMonitor are for
the target `kuberay` too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from toolkit.deploy.alerts import drift_percent, rules, series
from toolkit.deploy.manifests import (
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
from toolkit.deploy.operators import (
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
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    llmctl_image,
    products,
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
    explain_models,
    explain_probes,
    labels,
    metadata,
    plan_map,
    pod,
    pod_metadata,
    preparation,
    selector,
    service,
)
from toolkit.files.strict import dump_yaml

CLUSTER_DNS = Peer(  # CoreDNS and kube-dns both have this label
    namespace_selector=AnyPods(match_labels={"kubernetes.io/metadata.name": "kube-system"}),
    pod_selector=AnyPods(match_labels={"k8s-app": "kube-dns"}),
)
API_SERVER_PORTS = (443, 6443)  # of its Service, and of the servers behind it
CLIENT = {"llmctl.io/client": "true"}


def network_policy(order: Order) -> NetworkPolicy:
    """Allow traffic from its namespace, namespaces labelled as clients, and that of Prometheus; to
    the cluster's DNS, and to the hub if needed.
    """
    callers = Ingress(sender=_callers(order), ports=[PolicyPort(port="http")])
    return _policy(
        order, order.name, {"app.kubernetes.io/name": order.name}, [callers], _egress(order)
    )


def front_policy(order: Order, members: dict[str, str]) -> NetworkPolicy:
    """As `network_policy`, plus all ports from and to the deployment's `members`, for Ray."""
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
    """For the pods of a Ray cluster: only the deployment's `members` may connect, since every
    connection to Ray can run code.
    """
    ours = [Peer(pod_selector=AnyPods(match_labels=members))]
    return _policy(
        order,
        f"{order.name}-ray",
        cluster,
        [Ingress(sender=ours)],
        [*_egress(order), Egress(to=ours)],
    )


def replica_policies(order: Order, replicas: Mapping[str, str]) -> dict[str, NetworkPolicy]:
    """The policies of a front and of its replicas: the names of their pods, by the policy's file.

    A front has the ways in of `network_policy`, and the ways out to the replicas, to DNS and to the
    API server, which no label selects. Only the front and Prometheus may call replicas, since they
    ask for no key.
    """
    web = [PolicyPort(port="http")]
    front, *behind = (
        AnyPods(match_labels=labels(order, name)) for name in (order.name, *replicas.values())
    )
    callers = Ingress(sender=_callers(order), ports=web)
    ours = Ingress(sender=[Peer(pod_selector=front), *_prometheus(order)], ports=web)
    to_replicas = Egress(to=[Peer(pod_selector=one) for one in behind], ports=web)
    to_servers = Egress(ports=[PolicyPort(port=port) for port in API_SERVER_PORTS])
    return {
        "networkpolicy.yaml": _policy(
            order,
            order.name,
            selector(order).match_labels,
            [callers],
            [_to_dns(), to_servers, to_replicas],
        ),
    } | {
        file: _policy(order, name, selector(order, name).match_labels, [ours], _egress(order))
        for file, name in replicas.items()
    }


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
    """Prometheus' namespace, from its address in the cluster's DNS; none for other addresses."""
    found = re.match(r"https?://[a-z0-9-]+\.([a-z0-9-]+)\.svc", order.options.prometheus)
    name = {"kubernetes.io/metadata.name": found[1]} if found else None
    return [Peer(namespace_selector=AnyPods(match_labels=name))] if name else []


def _to_dns() -> Egress:
    ports = [PolicyPort(protocol="UDP", port=53), PolicyPort(protocol="TCP", port=53)]
    return Egress(to=[CLUSTER_DNS], ports=ports)


def _egress(order: Order) -> list[Egress]:
    hub = [Egress(ports=[PolicyPort(port=443)])] if from_hub(order.plan.recipe) else []
    return [_to_dns(), *hub]


def pod_monitor(order: Order, pods: str = "") -> PodMonitor:
    """Has Prometheus scrape /metrics of every pod with the API key, which /metrics needs too; those
    named `pods` need none.
    """
    key = TypedSecretKey(credentials=SecretKey(name=order.name, key=SECRET_KEY))
    endpoint = MetricsEndpoint(
        port="http", path="/metrics", interval="15s", authorization=None if pods else key
    )
    return PodMonitor(
        metadata=metadata(order, pods, pods),
        spec=PodMonitorSpec(selector=selector(order, pods), pod_metrics_endpoints=[endpoint]),
    )


def scaled_object(
    order: Order, target: ScaleTarget, waiting: str, threshold: int, fewest: int, name: str = ""
) -> ScaledObject:
    """Has KEDA keep the mean of `waiting`, a PromQL expression, per pod of `target` below
    `threshold`, with `fewest` pods or more. By default it has the deployment's `name`.
    """
    return ScaledObject(
        metadata=metadata(order, name),
        spec=ScaledObjectSpec(
            scale_target_ref=target,
            polling_interval=15,
            cooldown_period=300,
            min_replica_count=fewest,
            max_replica_count=max_replicas(order, fewest).value,
            triggers=[
                Trigger(
                    metadata=PrometheusQuery(
                        server_address=order.options.prometheus,
                        query=f"sum({waiting})",
                        threshold=str(threshold),
                    )
                )
            ],
        ),
    )


def max_replicas(order: Order, fewest: int) -> Sourced[int]:
    """The greatest number of replicas for the autoscaler."""
    if order.options.max_replicas:
        return Sourced(max(order.options.max_replicas, fewest), "--max-replicas")
    return Sourced(2 * fewest, "twice the replicas; change it with --max-replicas")


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need operators, each with a kustomization.yaml."""
    check_podable(order)
    threshold = waiting_threshold(order.plan, order.trace)
    core: dict[str, BaseModel] = {
        "deployment.yaml": _deployment(order),
        "service.yaml": service(order),
        "poddisruptionbudget.yaml": _budget(order),
        "networkpolicy.yaml": network_policy(order),
    }
    operated: dict[str, BaseModel] = {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": PrometheusRule(
            metadata=metadata(order), spec=rules(order, series(order, monitored=True), threshold)
        ),
    }
    if threshold.value is not None:
        waiting = f"llmctl_requests_waiting{{{series(order, monitored=True)}}}"
        operated["scaledobject.yaml"] = scaled_object(
            order, ScaleTarget(name=order.name), waiting, threshold.value, replicas(order).value
        )
    objects = {f"core/{name}": content for name, content in core.items()} | operated
    objects["core/kustomization.yaml"] = Kustomization(
        namespace=order.options.namespace,
        resources=sorted(core),
        config_map_generator=[plan_map(order)],
    )
    scaled = [("Deployment", order.name)] if threshold.value is not None else []
    objects["kustomization.yaml"] = outer(order, sorted(operated), scaled)
    files = {name: dump_yaml([content], order.comment()) for name, content in objects.items()}
    files |= claim_files(order, _mounting(order, threshold)) | {"core/plan.json": order.text}
    return Rendered(files, _explained(order, threshold), _start(order), FORWARDED)


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
    """Replace pods first on GPUs, where a spare one is rare; add pods first on CPUs."""
    if gpus(order.plan.recipe).value > 0:
        return RollingUpdate(max_surge=0, max_unavailable=1)
    return RollingUpdate(max_surge=1, max_unavailable=0)


def _mounting(order: Order, threshold: Sourced[int | None]) -> Sourced[int]:
    """The number of pods that may mount the volume of models at once."""
    fewest = replicas(order)
    highest = fewest if threshold.value is None else max_replicas(order, fewest.value)
    count = highest.value + _rolling(order).max_surge
    if count == 1:
        return Sourced(1, "one pod at a time")
    return Sourced(count, f"up to {count} pods at once: replicas and those of a rollout")


def _budget(order: Order) -> PodDisruptionBudget:
    return PodDisruptionBudget(
        metadata=metadata(order), spec=DisruptionSpec(max_unavailable=1, selector=selector(order))
    )


def outer(order: Order, names: list[str], scaled: Sequence[tuple[str, str]]) -> Kustomization:
    """The outer kustomization. It removes the number of replicas of what the autoscaler scales
    (`scaled`, kinds and names), so that applying it again does not undo the autoscaler's.
    """
    remove = json.dumps([{"op": "remove", "path": "/spec/replicas"}])
    return Kustomization(
        namespace=order.options.namespace,
        resources=["core", *names],
        config_map_generator=[dashboard_map(order)],
        patches=[
            Patch(target=PatchTarget(kind=kind, name=name), patch=remove) for kind, name in scaled
        ]
        or None,
    )


def _explained(order: Order, threshold: Sourced[int | None]) -> list[ExplainedValue]:
    drain, recipe = drain_s(order), order.plan.recipe
    where = products(order, order.plan.kinds[0])
    grace = grace_s(drain, PROPAGATION_S)
    memory, limit = memory_mib(order), memory_limit_mib(order)
    lines = [
        explain_value("image", llmctl_image(order)),
        explain_value("replicas", replicas(order)),
        ExplainedValue(
            "args --shutdown-notice",
            f"{PROPAGATION_S} s",
            "until the cluster's proxies know that the pod is leaving",
        ),
        explain_value("args --shutdown-timeout", drain, f"{drain.value} s"),
        explain_value("terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *explain_probes(order),
        explain_value("nvidia.com/gpu", gpus(recipe)),
        *(
            [explain_value("node affinity", where, ", ".join(where.value))]
            if gpus(recipe).value
            else []
        ),
        *explain_models(order, _mounting(order, threshold)),
        explain_value("cpu", cpus(recipe)),
        explain_value("memory", memory, f"{memory.value:,} MiB"),
        explain_value("memory limit", limit, f"{limit.value:,} MiB"),
        explain_value("drift alert", drift_percent(order), f"{drift_percent(order).value:g} %"),
    ]
    if threshold.value is None:
        return [*lines, explain_value("ScaledObject", threshold, "none")]
    most = max_replicas(order, replicas(order).value)
    return [
        *lines,
        explain_value("ScaledObject threshold", threshold),
        explain_value("ScaledObject maxReplicaCount", most),
    ]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
```bash
{preparation(order)}
kubectl apply -k .    # needs the CRDs of Prometheus' operator and KEDA; without them: -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # drains
```

Pods of other namespaces may call it if their namespace has the label `llmctl.io/client: "true"`."""
