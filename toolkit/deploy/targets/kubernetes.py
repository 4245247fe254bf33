"""Target `kubernetes`: a Deployment with its objects (core/), and objects that need operators.

`kubectl apply -k DIR` applies all; `kubectl apply -k DIR/core` needs neither Prometheus' operator
nor KEDA. Network policies (deny by default, a few named ways in and out) and the PodMonitor are for
the target `kuberay` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import BaseModel

from toolkit.deploy import manifests as k8s
from toolkit.deploy import operators, reckon
from toolkit.deploy.alerts import drift_percent, rules, series
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    llmctl_image,
    products,
)
from toolkit.deploy.targets import objects as common

CLUSTER_DNS = k8s.Peer(  # CoreDNS and kube-dns both have this label
    namespace_selector=k8s.AnyPods(match_labels={"kubernetes.io/metadata.name": "kube-system"}),
    pod_selector=k8s.AnyPods(match_labels={"k8s-app": "kube-dns"}),
)
API_SERVER_PORTS = (443, 6443)  # of its Service, and of the servers behind it
CLIENT = {"llmctl.io/client": "true"}


def network_policy(order: Order, members: dict[str, str] | None = None) -> k8s.NetworkPolicy:
    """Allow traffic from its namespace, namespaces labelled as clients, and that of Prometheus; to
    the cluster's DNS, and to the hub if needed. With `members`, the labels of the pods of a Ray
    cluster, also all ports from and to these.
    """
    ways_in = [k8s.Ingress(sender=_callers(order), ports=[k8s.PolicyPort(port="http")])]
    ways_out = _egress(order)
    if members:
        ours = [k8s.Peer(pod_selector=k8s.AnyPods(match_labels=members))]
        ways_in.append(k8s.Ingress(sender=ours))
        ways_out.append(k8s.Egress(to=ours))
    return _policy(order, order.name, common.selector(order).match_labels, ways_in, ways_out)


def cluster_policy(
    order: Order, cluster: dict[str, str], members: dict[str, str]
) -> k8s.NetworkPolicy:
    """For the pods of a Ray cluster: only the deployment's `members` may connect, since every
    connection to Ray can run code.
    """
    ours = [k8s.Peer(pod_selector=k8s.AnyPods(match_labels=members))]
    return _policy(
        order,
        f"{order.name}-ray",
        cluster,
        [k8s.Ingress(sender=ours)],
        [*_egress(order), k8s.Egress(to=ours)],
    )


def replica_policies(order: Order, replicas: Mapping[str, str]) -> dict[str, k8s.NetworkPolicy]:
    """The policies of a front and of its replicas: the names of their pods, by the policy's file.

    A front has the ways in of `network_policy`, and the ways out to the replicas, to DNS and to the
    API server, which no label selects. Only the front and Prometheus may call replicas, since they
    ask for no key.
    """
    web = [k8s.PolicyPort(port="http")]
    front, *behind = (
        k8s.AnyPods(match_labels=common.labels(order, name))
        for name in (order.name, *replicas.values())
    )
    callers = k8s.Ingress(sender=_callers(order), ports=web)
    ours = k8s.Ingress(sender=[k8s.Peer(pod_selector=front), *_prometheus(order)], ports=web)
    to_replicas = k8s.Egress(to=[k8s.Peer(pod_selector=one) for one in behind], ports=web)
    to_servers = k8s.Egress(ports=[k8s.PolicyPort(port=port) for port in API_SERVER_PORTS])
    return {
        "networkpolicy.yaml": _policy(
            order,
            order.name,
            common.selector(order).match_labels,
            [callers],
            [_to_dns(), to_servers, to_replicas],
        ),
    } | {
        file: _policy(
            order, name, common.selector(order, name).match_labels, [ours], _egress(order)
        )
        for file, name in replicas.items()
    }


def _policy(
    order: Order,
    name: str,
    pods: dict[str, str],
    ways_in: list[k8s.Ingress],
    ways_out: list[k8s.Egress],
) -> k8s.NetworkPolicy:
    return k8s.NetworkPolicy(
        metadata=common.metadata(order, name),
        spec=k8s.NetworkPolicySpec(
            pod_selector=k8s.Selector(match_labels=pods), ingress=ways_in, egress=ways_out
        ),
    )


def _callers(order: Order) -> list[k8s.Peer]:
    from_here = k8s.Peer(pod_selector=k8s.AnyPods())
    clients = k8s.Peer(namespace_selector=k8s.AnyPods(match_labels=CLIENT))
    return [from_here, clients, *_prometheus(order)]


def _prometheus(order: Order) -> list[k8s.Peer]:
    """Prometheus' namespace, from its address in the cluster's DNS; none for other addresses."""
    found = re.match(r"https?://[a-z0-9-]+\.([a-z0-9-]+)\.svc", order.options.prometheus)
    name = {"kubernetes.io/metadata.name": found[1]} if found else None
    return [k8s.Peer(namespace_selector=k8s.AnyPods(match_labels=name))] if name else []


def _to_dns() -> k8s.Egress:
    ports = [k8s.PolicyPort(protocol="UDP", port=53), k8s.PolicyPort(protocol="TCP", port=53)]
    return k8s.Egress(to=[CLUSTER_DNS], ports=ports)


def _egress(order: Order) -> list[k8s.Egress]:
    hub = (
        [k8s.Egress(ports=[k8s.PolicyPort(port=443)])] if reckon.from_hub(order.plan.recipe) else []
    )
    return [_to_dns(), *hub]


def pod_monitor(
    order: Order, pods: str = "", *, page: str = "/metrics", name: str = ""
) -> operators.PodMonitor:
    """Has Prometheus scrape `page` of every pod with the API key, which pages need too; those named
    `pods` need none. It has the `name`, by default that of the pods.
    """
    key = k8s.TypedSecretKey(credentials=k8s.SecretKey(name=order.name, key=common.SECRET_KEY))
    endpoint = operators.MetricsEndpoint(
        port="http", path=page, interval="15s", authorization=None if pods else key
    )
    return operators.PodMonitor(
        metadata=common.metadata(order, name or pods, pods),
        spec=operators.PodMonitorSpec(
            selector=common.selector(order, pods), pod_metrics_endpoints=[endpoint]
        ),
    )


def monitors(order: Order, threshold: Sourced[int | None]) -> dict[str, BaseModel]:
    """The PodMonitor and the PrometheusRule of a server, by file. `threshold` is as for `rules`."""
    return {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": operators.PrometheusRule(
            metadata=common.metadata(order),
            spec=rules(order, series(order, monitored=True), threshold),
        ),
    }


def scaled_object(
    order: Order,
    target: operators.ScaleTarget,
    waiting: str,
    threshold: int,
    fewest: int,
    name: str = "",
) -> operators.ScaledObject:
    """Has KEDA keep the mean of `waiting`, a PromQL expression, per pod of `target` below
    `threshold`, with `fewest` pods or more. By default it has the deployment's `name`.
    """
    return operators.ScaledObject(
        metadata=common.metadata(order, name),
        spec=operators.ScaledObjectSpec(
            scale_target_ref=target,
            polling_interval=15,
            cooldown_period=300,
            min_replica_count=fewest,
            max_replica_count=max_replicas(order, fewest).value,
            triggers=[
                operators.Trigger(
                    metadata=operators.PrometheusQuery(
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
    reckon.check_podable(order)
    threshold = reckon.waiting_threshold(order.plan, order.trace)
    core: dict[str, BaseModel] = {
        "deployment.yaml": _deployment(order),
        "service.yaml": common.service(order),
        "poddisruptionbudget.yaml": _budget(order),
        "networkpolicy.yaml": network_policy(order),
    }
    operated = monitors(order, threshold)
    if threshold.value is not None:
        waiting = f"llmctl_requests_waiting{{{series(order, monitored=True)}}}"
        operated["scaledobject.yaml"] = scaled_object(
            order,
            operators.ScaleTarget(name=order.name),
            waiting,
            threshold.value,
            reckon.replicas(order).value,
        )
    scaled = [("Deployment", order.name)] if threshold.value is not None else []
    files = common.kustomized(order, core, operated, [common.plan_map(order)], scaled)
    files |= common.claim_files(order, _mounting(order, threshold)) | {"core/plan.json": order.text}
    return Rendered(files, _explained(order, threshold), _start(order), common.FORWARDED)


def _deployment(order: Order) -> k8s.Deployment:
    template = k8s.PodTemplate(
        metadata=common.pod_metadata(order), spec=common.pod(order, reckon.PROPAGATION_S)
    )
    strategy = k8s.Strategy(rolling_update=_rolling(order))
    startup_s, pods = reckon.startup_s(order).value, reckon.replicas(order).value
    return common.deployment(order, template, strategy, startup_s, pods)


def _rolling(order: Order) -> k8s.RollingUpdate:
    """Replace pods first on GPUs, where a spare one is rare; add pods first on CPUs."""
    if reckon.gpus(order.plan.recipe).value > 0:
        return k8s.RollingUpdate(max_surge=0, max_unavailable=1)
    return k8s.RollingUpdate(max_surge=1, max_unavailable=0)


def _mounting(order: Order, threshold: Sourced[int | None]) -> Sourced[int]:
    """The number of pods that may mount the volume of models at once."""
    fewest = reckon.replicas(order)
    highest = fewest if threshold.value is None else max_replicas(order, fewest.value)
    count = highest.value + _rolling(order).max_surge
    if count == 1:
        return Sourced(1, "one pod at a time")
    return Sourced(count, f"up to {count} pods at once: replicas and those of a rollout")


def _budget(order: Order) -> k8s.PodDisruptionBudget:
    return k8s.PodDisruptionBudget(
        metadata=common.metadata(order),
        spec=k8s.DisruptionSpec(max_unavailable=1, selector=common.selector(order)),
    )


def _explained(order: Order, threshold: Sourced[int | None]) -> list[ExplainedValue]:
    drain, recipe = reckon.drain_s(order), order.plan.recipe
    where = products(order, order.plan.kinds[0])
    grace = reckon.grace_s(drain, reckon.PROPAGATION_S)
    memory, limit = reckon.memory_mib(order), reckon.memory_limit_mib(order)
    lines = [
        explain_value("image", llmctl_image(order)),
        explain_value("replicas", reckon.replicas(order)),
        ExplainedValue(
            "args --shutdown-notice",
            f"{reckon.PROPAGATION_S} s",
            "until the cluster's proxies know that the pod is leaving",
        ),
        explain_value("args --shutdown-timeout", drain, f"{drain.value} s"),
        explain_value("terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *common.explain_probes(order),
        explain_value("nvidia.com/gpu", reckon.gpus(recipe)),
        *(
            [explain_value("node affinity", where, ", ".join(where.value))]
            if reckon.gpus(recipe).value
            else []
        ),
        *common.explain_models(order, _mounting(order, threshold)),
        explain_value("cpu", reckon.cpus(recipe)),
        explain_value("memory", memory, f"{memory.value:,} MiB"),
        explain_value("memory limit", limit, f"{limit.value:,} MiB"),
        explain_value("drift alert", drift_percent(order), f"{drift_percent(order).value:g} %"),
    ]
    if threshold.value is None:
        return [*lines, explain_value("ScaledObject", threshold, "none")]
    most = max_replicas(order, reckon.replicas(order).value)
    return [
        *lines,
        explain_value("ScaledObject threshold", threshold),
        explain_value("ScaledObject maxReplicaCount", most),
    ]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
```bash
{common.preparation(order)}
kubectl apply -k .    # needs the CRDs of Prometheus' operator and KEDA; without them: -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # drains
```

Pods of other namespaces may call it if their namespace has the label `llmctl.io/client: "true"`."""
