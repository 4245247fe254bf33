"""Target `kubernetes`: a Deployment with its objects (core/), and objects that need operators.

`kubectl apply -k DIR` applies all; `kubectl apply -k DIR/core` needs neither Prometheus' operator
nor KEDA. Network policies deny by default, with a few named ways in and out.
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
from toolkit.errors import InputError

NAMESPACE = "kubernetes.io/metadata.name"  # the label of a namespace with its name
MANY = 3  # pods: of fewer, one that is away is half or more
WEB: list[Object] = [{"protocol": "TCP", "port": "http"}]


def _dns(port: int, *servers: Object) -> Object:
    """A way out to these DNS servers, by UDP and TCP."""
    ports = [{"protocol": protocol, "port": port} for protocol in ("UDP", "TCP")]
    return {"to": list(servers), "ports": ports}


def _dns_pods(namespace: str, label: str, value: str) -> Object:
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE: namespace}},
        "podSelector": {"matchLabels": {label: value}},
    }


# CoreDNS has the label of kube-dns, too. NodeLocal DNSCache answers on each node at this address;
# OpenShift's DNS in pods of its own, behind a Service that changes the port.
TO_DNS = (
    _dns(
        53,
        _dns_pods("kube-system", "k8s-app", "kube-dns"),
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ),
    _dns(5353, _dns_pods("openshift-dns", "dns.operator.openshift.io/daemonset-dns", "default")),
)
API_SERVER_PORTS = (443, 6443)  # of its Service, and of the servers behind it
GATEWAY = "gateway.networking.k8s.io/v1"
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


def network_policy(order: Order) -> Object:
    """Allow traffic from its namespace, namespaces labelled as clients, and that of Prometheus; to
    the cluster's DNS, and to the hub if needed.
    """
    return _policy(order, order.name, _callers(order), _egress(order))


def replica_policies(order: Order, replicas: Mapping[str, str]) -> dict[str, Object]:
    """The policies of a front and of its replicas: the names of their pods, by the policy's file.

    A front has the ways in of `network_policy`, and the ways out to the replicas, to DNS and to the
    API server, which no label selects. Only the front and Prometheus may call replicas, since they
    ask for no key.
    """
    front, *behind = (
        {"podSelector": {"matchLabels": common.labels(order, name)}}
        for name in (order.name, *replicas.values())
    )
    to_servers = {"ports": [{"protocol": "TCP", "port": port} for port in API_SERVER_PORTS]}
    ways_out = [*TO_DNS, to_servers, {"to": behind, "ports": WEB}]
    policies = {"networkpolicy.yaml": _policy(order, order.name, _callers(order), ways_out)}
    callers = [front, *_prometheus(order)]
    for file, name in replicas.items():
        policies[file] = _policy(order, name, callers, _egress(order))
    return policies


def _policy(
    order: Order, name: str, callers: Sequence[Object], ways_out: Sequence[Object]
) -> Object:
    """The policy of the pods named `name`: what may call them, and their ways out."""
    spec = {
        "podSelector": common.selector(order, name),
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": list(callers), "ports": WEB}],
        "egress": list(ways_out),
    }
    about = common.metadata(order, name)
    return common.api_object("networking.k8s.io/v1", "NetworkPolicy", about, spec)


def _callers(order: Order) -> list[Object]:
    """The deployment's namespace, namespaces of clients, the Gateway's, and Prometheus'."""
    callers: list[Object] = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": CLIENT}}]
    if gateway := order.options.gateway:
        callers.append(_namespace(gateway.partition("/")[0]))
    return [*callers, *_prometheus(order)]


def _namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {NAMESPACE: name}}}


def _prometheus(order: Order) -> list[Object]:
    """Prometheus' namespace, from its address in the cluster's DNS; none for other addresses."""
    host = re.match(r"https?://[a-z0-9-]+\.([a-z0-9-]+)\.svc", order.options.prometheus)
    return [_namespace(host[1])] if host else []


def _egress(order: Order) -> list[Object]:
    hub = {"ports": [{"protocol": "TCP", "port": 443}]}
    return [*TO_DNS, hub] if order.plan.recipe.model.from_hub else [*TO_DNS]


def routes(order: Order) -> dict[str, Object]:
    """The HTTPRoute through the Gateway that was named, by file. Only OpenAI's routes are outside.

    It has no timeout, which would cut streams: a proxy's default may be seconds.
    """
    namespace, _, name = order.options.gateway.partition("/")
    if not name:
        return {}
    hosts = {"hostnames": [order.options.hostname]} if order.options.hostname else {}
    rule = {
        "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
        "timeouts": {"request": "0s"},
        "backendRefs": [{"name": order.name, "port": common.PORT}],
    }
    spec = {"parentRefs": [{"namespace": namespace, "name": name}], **hosts, "rules": [rule]}
    route = common.api_object(GATEWAY, "HTTPRoute", common.metadata(order), spec)
    return {"httproute.yaml": route}


def behind_proxy(order: Order) -> list[str]:
    """The options of a server with one client, the proxy, which may use all of it."""
    return ["--client-share", "1"] if order.options.gateway else []


def explain_outside(order: Order) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about the way in from outside."""
    gateway = order.options.gateway
    if not gateway:
        none = "clients are in the cluster; --gateway NAMESPACE/NAME lets others in, to /v1 alone"
        return [ExplainedValue("HTTPRoute", "none", none)]
    limits = (
        "TLS; connections, requests and bodies of one client, for the server sees the proxy as one "
        "(--client-share 1); it takes bodies of 8 MiB"
    )
    silent = (
        "none here, for a stream may be long; a proxy's limit of silence must exceed the longest "
        "request, since an answer in one piece is silent until its end"
    )
    allowed = (
        "the Gateway must take routes of this namespace (allowedRoutes); where its proxies run in "
        "another namespace than it, label that one llmctl.io/client=true"
    )
    return [
        ExplainedValue("HTTPRoute", gateway, f"--gateway; {allowed}"),
        ExplainedValue("HTTPRoute: hostnames", order.options.hostname or "all", "--hostname"),
        ExplainedValue("HTTPRoute: path", "/v1", "/metrics, /replicas and the like stay inside"),
        ExplainedValue("HTTPRoute: timeouts", "0s", silent),
        ExplainedValue("limits of the proxy", "yours", limits),
    ]


def pod_monitor(order: Order, pods: str = "") -> Object:
    """Has Prometheus scrape every pod with the API key, which pages need too; pods named `pods`
    need none.
    """
    endpoint: Object = {"port": "http", "path": "/metrics", "interval": "15s"}
    if not pods:
        key = {"name": order.name, "key": common.SECRET_KEY}
        endpoint["authorization"] = {"type": "Bearer", "credentials": key}
    spec = {"selector": common.selector(order, pods), "podMetricsEndpoints": [endpoint]}
    about = _for_prometheus(order, common.metadata(order, pods, pods))
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
        "the Prometheus of a kube-prometheus-stack with default values reads only objects with its "
        "Helm release as this label: --prometheus-release NAME"
    )
    return ExplainedValue(key, "none", why)


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need operators, each with a kustomization.yaml."""
    reckon.check_podable(order)
    if order.options.fronts > 1:
        raise InputError(
            f"--fronts {order.options.fronts}: each pod is a whole server here, without a front",
            "add pods with --replicas",
        )
    threshold = reckon.waiting_threshold(order.plan, order.trace)
    startup_s = reckon.startup_s(order).value
    pods = reckon.replicas(order)
    surge = _surge(order)
    strategy = common.rolling(surge.value)
    core = {
        "deployment.yaml": common.deployment(order, _pod(order), strategy, startup_s, pods.value),
        "service.yaml": common.service(order),
        "poddisruptionbudget.yaml": common.disruption_budget(order),
        "networkpolicy.yaml": network_policy(order),
    }
    own = series(order, monitored=True)
    operated = {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": prometheus_rule(order, rules(order, own, threshold)),
        **routes(order),
    }
    scaled = []
    grace_s = reckon.grace_s(reckon.drain_s(order), reckon.PROPAGATION_S).value
    scaling = Autoscaling(order, reckon.load_s(order), threshold, pods.value, grace_s)
    if scaling.threshold.value is not None:
        waiting = f"{WAITING}{{{own}}}"
        operated["scaledobject.yaml"] = scaling.scaled_object({"name": order.name}, waiting)
        scaled = [("Deployment", order.name)]
    count = scaling.most.value + surge.value
    why = f"up to {count} pods at once: replicas and those of a rollout"
    mounting = Sourced(count, "one pod at a time" if count == 1 else why)
    files = common.kustomized(order, core, operated, [common.plan_map(order)], mounting, scaled)
    lines = [
        *_explained(order, mounting),
        ExplainedValue("rollout: maxSurge", str(surge.value), surge.source),
        *scaling.explained(WAITING),
    ]
    return Rendered(files, lines, common.start_commands(order, START), common.FORWARDED)


def _surge(order: Order) -> Sourced[int]:
    """How many pods a rollout adds: it never takes half of the pods away.

    One is added before one goes. On GPUs, where a free one is rare, from `MANY` pods on they are
    replaced one at a time.
    """
    pods = reckon.replicas(order).value
    devices = reckon.gpus(order.plan.recipe).value
    away = f"{common.AWAY} of {pods} pods is away at a time, as for the PodDisruptionBudget"
    if devices and pods >= MANY:
        return Sourced(0, f"{away}: no further GPU is needed")
    source = "a new pod is ready before an old one goes"
    if devices:
        waits = "without them the rollout waits, and the old pods serve"
        source += f"; it needs {devices} free GPUs: {waits}"
    return Sourced(1, source)


def _pod(order: Order) -> Object:
    """The pod of a server. It accepts requests for some seconds after SIGTERM."""
    recipe = order.plan.recipe
    drain = reckon.drain_s(order)
    args = ["serve", common.PLAN_FILE, "--host", "0.0.0.0", "--port", str(common.PORT)]
    args += ["--shutdown-notice", str(reckon.PROPAGATION_S)]
    args += ["--shutdown-timeout", str(drain.value), *behind_proxy(order), *order.allowances]
    # Processes of one worker exchange tensors: NCCL needs more than the 64 MB of /dev/shm.
    shared = recipe.engine.tensor_parallel_size > 1
    gpus = reckon.gpus(recipe).value
    memory = reckon.memory_mib(order).value
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
        order,
        reckon.grace_s(drain, reckon.PROPAGATION_S).value,
        container,
        [*common.volumes(order), *([common.SHARED] if shared else [])],
        affinity=common.on_products(order, order.plan.kinds[0]) if gpus else None,
        tolerations=common.tolerations(recipe),
    )


def _explained(order: Order, mounting: Sourced[int]) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md but the autoscaler's; `mounting` pods mount the models at once."""
    drain = reckon.drain_s(order)
    gpus = reckon.gpus(order.plan.recipe)
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
        reckon.explain_caches(reckon.MODELS),
        explain_value("cpu", reckon.cpus(order.plan.recipe)),
        explain_value("memory", reckon.memory_mib(order), MEBIBYTES),
        explain_value("memory limit", reckon.memory_limit_mib(order), MEBIBYTES),
        explain_value("drift alert", drift_percent(order), "{:g} %"),
        explain_release(order),
        *common.explain_push(llmctl_image(order), "--image"),
        *common.explain_pods(order),
        *explain_outside(order),
    ]
