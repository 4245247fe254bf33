"""Target `kubernetes`: a Deployment with its objects (core/), and objects that need operators.

`kubectl apply -k DIR` applies all; `kubectl apply -k DIR/core` needs neither Prometheus' operator
nor KEDA. Network policies (deny by default, a few named ways in and out) and the PodMonitor are for
the target `kuberay` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from toolkit.deploy import reckon
from toolkit.deploy.monitoring import drift_percent, rules, series
from toolkit.deploy.order import (
    MEBIBYTES,
    SECONDS,
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    llmctl_image,
    products,
)
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets.autoscaling import Autoscaling
from toolkit.deploy.targets.objects import Object

NAMESPACE = "kubernetes.io/metadata.name"  # the label of a namespace with its name
WEB: list[Object] = [{"protocol": "TCP", "port": "http"}]
TO_DNS: Object = {
    "to": [
        {
            "namespaceSelector": {"matchLabels": {NAMESPACE: "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},  # CoreDNS has this label, too
        }
    ],
    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
}
API_SERVER_PORTS = (443, 6443)  # of its Service, and of the servers behind it
MONITORING = "monitoring.coreos.com/v1"  # of Prometheus' operator
RELEASE = "release"  # the label of kube-prometheus-stack's selectors, version 88.5
WAITING = "llmctl_requests_waiting"
CLIENT = {"llmctl.io/client": "true"}
START = """\
```bash
{preparation}
kubectl apply -k .    # needs the CRDs of Prometheus' operator and KEDA; without them: -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # drains
```"""


def network_policy(order: Order, members: Mapping[str, str] | None = None) -> Object:
    """Allow traffic from its namespace, namespaces labelled as clients, and that of Prometheus; to
    the cluster's DNS, and to the hub if needed. With `members`, the labels of the pods of a Ray
    cluster, also all ports from and to these.
    """
    ways_in, ways_out = [{"from": _callers(order), "ports": WEB}], _egress(order)
    if members:
        ways_in.append({"from": [_pods(members)]})
        ways_out.append({"to": [_pods(members)]})
    return _policy(order, order.name, common.selector(order), ways_in, ways_out)


def cluster_policy(order: Order, cluster: Mapping[str, str], members: Mapping[str, str]) -> Object:
    """Only the deployment's `members` may connect to Ray's pods: a connection can run code."""
    ours, ways_out = [_pods(members)], [*_egress(order), {"to": [_pods(members)]}]
    pods = {"matchLabels": dict(cluster)}
    return _policy(order, f"{order.name}-ray", pods, [{"from": ours}], ways_out)


def replica_policies(order: Order, replicas: Mapping[str, str]) -> dict[str, Object]:
    """The policies of a front and of its replicas: the names of their pods, by the policy's file.

    A front has the ways in of `network_policy`, and the ways out to the replicas, to DNS and to the
    API server, which no label selects. Only the front and Prometheus may call replicas, since they
    ask for no key.
    """
    front, *behind = (
        _pods(common.labels(order, name)) for name in (order.name, *replicas.values())
    )
    to_servers = {"ports": [{"protocol": "TCP", "port": port} for port in API_SERVER_PORTS]}
    ways_out = [TO_DNS, to_servers, {"to": behind, "ports": WEB}]
    ways_in = [{"from": _callers(order), "ports": WEB}]
    policies = {
        "networkpolicy.yaml": _policy(order, order.name, common.selector(order), ways_in, ways_out)
    }
    ways_in = [{"from": [front, *_prometheus(order)], "ports": WEB}]
    for file, name in replicas.items():
        policies[file] = _policy(order, name, common.selector(order, name), ways_in, _egress(order))
    return policies


def _policy(
    order: Order, name: str, pods: Object, ways_in: Sequence[Object], ways_out: Sequence[Object]
) -> Object:
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": list(ways_in),
        "egress": list(ways_out),
    }
    about = common.metadata(order, name)
    return common.api_object("networking.k8s.io/v1", "NetworkPolicy", about, spec)


def _pods(labels: Mapping[str, str]) -> Object:
    return {"podSelector": {"matchLabels": dict(labels)}}


def _callers(order: Order) -> list[Object]:
    """The deployment's namespace, namespaces of clients, and Prometheus'."""
    clients = {"namespaceSelector": {"matchLabels": CLIENT}}
    return [{"podSelector": {}}, clients, *_prometheus(order)]


def _prometheus(order: Order) -> list[Object]:
    """Prometheus' namespace, from its address in the cluster's DNS; none for other addresses."""
    host = re.match(r"https?://[a-z0-9-]+\.([a-z0-9-]+)\.svc", order.options.prometheus)
    return [{"namespaceSelector": {"matchLabels": {NAMESPACE: host[1]}}}] if host else []


def _egress(order: Order) -> list[Object]:
    hub = {"ports": [{"protocol": "TCP", "port": 443}]}
    return [TO_DNS, hub] if order.plan.recipe.model.from_hub else [TO_DNS]


def pod_monitor(order: Order, pods: str = "", *, page: str = "/metrics", name: str = "") -> Object:
    """Has Prometheus scrape `page` of every pod with the API key, which pages need too; those named
    `pods` need none. It has the `name`, by default that of the pods.
    """
    endpoint: Object = {"port": "http", "path": page, "interval": "15s"}
    if not pods:
        key = {"name": order.name, "key": common.SECRET_KEY}
        endpoint["authorization"] = {"type": "Bearer", "credentials": key}
    spec = {"selector": common.selector(order, pods), "podMetricsEndpoints": [endpoint]}
    about = _for_prometheus(order, common.metadata(order, name or pods, pods))
    return common.api_object(MONITORING, "PodMonitor", about, spec)


def prometheus_rule(order: Order, rules: Object) -> Object:
    """Has Prometheus evaluate `rules`, the content of a rules file."""
    about = _for_prometheus(order, common.metadata(order))
    return common.api_object(MONITORING, "PrometheusRule", about, rules)


def _for_prometheus(order: Order, about: Object) -> Object:
    """Metadata with the label by which a Helm release's Prometheus chooses its objects."""
    release = order.options.prometheus_release
    return about | {"labels": about["labels"] | ({RELEASE: release} if release else {})}


def explain_release(order: Order) -> ExplainedValue:
    """The line of EXPLAIN.md about that label."""
    key = f"PodMonitor, PrometheusRule: label {RELEASE}"
    if release := order.options.prometheus_release:
        return ExplainedValue(key, release, "--prometheus-release")
    why = (
        "the Prometheus of a kube-prometheus-stack with default values reads only objects whose "
        "label is the name of its Helm release: --prometheus-release NAME"
    )
    return ExplainedValue(key, "none", why)


def monitors(order: Order, threshold: Sourced[int | None]) -> dict[str, Object]:
    """The PodMonitor and the PrometheusRule of a server, by file. `threshold` is as for `rules`."""
    alerts = rules(order, series(order, monitored=True), threshold)
    return {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": prometheus_rule(order, alerts),
    }


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need operators, each with a kustomization.yaml."""
    reckon.check_podable(order)
    threshold = reckon.waiting_threshold(order.plan, order.trace)
    startup_s, pods = reckon.startup_s(order).value, reckon.replicas(order)
    # Replace pods first on GPUs, where a spare one is rare; add pods first on CPUs.
    surge, unavailable = (0, 1) if reckon.gpus(order.plan.recipe).value else (1, 0)
    strategy = common.rolling(surge, unavailable)
    core = {
        "deployment.yaml": common.deployment(order, _pod(order), strategy, startup_s, pods.value),
        "service.yaml": common.service(order),
        "poddisruptionbudget.yaml": common.disruption_budget(
            order, common.selector(order), maxUnavailable=1
        ),
        "networkpolicy.yaml": network_policy(order),
    }
    operated, scaled = monitors(order, threshold), []
    grace_s = reckon.grace_s(reckon.drain_s(order), reckon.PROPAGATION_S).value
    scaling = Autoscaling(order, reckon.load_s(order), threshold, pods.value, grace_s)
    if scaling.threshold.value is not None:
        waiting = f"{WAITING}{{{series(order, monitored=True)}}}"
        operated["scaledobject.yaml"] = scaling.scaled_object({"name": order.name}, waiting)
        scaled = [("Deployment", order.name)]
    count = scaling.most.value + surge
    why = f"up to {count} pods at once: replicas and those of a rollout"
    mounting = Sourced(count, "one pod at a time" if count == 1 else why)
    files = common.kustomized(order, core, operated, [common.plan_map(order)], mounting, scaled)
    lines = [*_explained(order, mounting), *scaling.explained(WAITING)]
    return Rendered(files, lines, common.start_commands(order, START), common.FORWARDED)


def _pod(order: Order) -> Object:
    """The pod of a server. It accepts requests for some seconds after SIGTERM."""
    recipe, drain = order.plan.recipe, reckon.drain_s(order)
    args = ["serve", common.PLAN_FILE, "--host", "0.0.0.0", "--port", str(common.PORT)]
    args += ["--shutdown-notice", str(reckon.PROPAGATION_S)]
    args += ["--shutdown-timeout", str(drain.value), *order.allowances]
    # Processes of one worker exchange tensors: NCCL needs more than the 64 MB of /dev/shm.
    shared = recipe.engine.tensor_parallel_size > 1
    gpus, memory = reckon.gpus(recipe).value, reckon.memory_mib(order).value
    limit = reckon.memory_limit_mib(order).value
    container = common.container(
        "llmctl",
        llmctl_image(order).value,
        [*common.MOUNTS, *([common.SHARED_MOUNT] if shared else [])],
        command=["llmctl"],
        args=args,
        ports=[common.HTTP],
        env=common.environment(order),
        resources=common.asked(reckon.cpus(recipe).value, memory, limit, gpus),
        **common.probes(order),
    )
    return common.pod_spec(
        reckon.grace_s(drain, reckon.PROPAGATION_S).value,
        container,
        [*common.volumes(order), *([common.SHARED] if shared else [])],
        affinity=common.on_products(order, order.plan.kinds[0]) if gpus else None,
        tolerations=common.tolerations(recipe),
    )


def _explained(order: Order, mounting: Sourced[int]) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md but the autoscaler's; `mounting` pods mount the models at once."""
    drain, gpus = reckon.drain_s(order), reckon.gpus(order.plan.recipe)
    grace = reckon.grace_s(drain, reckon.PROPAGATION_S)
    affinity = explain_value("node affinity", products(order, order.plan.kinds[0]))
    return [
        explain_value("image", llmctl_image(order)),
        explain_value("replicas", reckon.replicas(order)),
        ExplainedValue("args --shutdown-notice", *common.NOTICE),
        explain_value("args --shutdown-timeout", drain, SECONDS),
        explain_value("terminationGracePeriodSeconds", grace, SECONDS),
        *common.explain_probes(order),
        explain_value("nvidia.com/gpu", gpus),
        *([affinity] if gpus.value else []),
        *common.explain_models(order, mounting),
        explain_value("cpu", reckon.cpus(order.plan.recipe)),
        explain_value("memory", reckon.memory_mib(order), MEBIBYTES),
        explain_value("memory limit", reckon.memory_limit_mib(order), MEBIBYTES),
        explain_value("drift alert", drift_percent(order), "{:g} %"),
        explain_release(order),
    ]
