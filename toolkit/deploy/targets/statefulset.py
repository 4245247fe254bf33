"""Target `kubernetes` for an engine that is a server of its own: its replicas, and the front.

The replicas of a kind are a StatefulSet, so that each has a claim for its model, behind a headless
Service. In a fleet, each kind's objects have its name, and its pods only nodes with its GPU.
The liveness probe of a replica asks its engine, which may hang while its server answers /health.
The front is a Deployment of one pod behind the deployment's Service. It finds the replicas by their
EndpointSlices, so that it leaves one that ends at once; DNS would be as old as its caches, and has
no name at all before the first replica is ready. A new plan rolls the front alone, unless it
changes a replica's flags.
"""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.deploy import reckon
from toolkit.deploy.monitoring import WAITING, replica_rules, series
from toolkit.deploy.order import (
    MEBIBYTES,
    SECONDS,
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    products,
)
from toolkit.deploy.reckon import explain_caches
from toolkit.deploy.replicas import ALIVE as ALIVE_FILE
from toolkit.deploy.replicas import CHECK_S, KindReplicas, Replication, each
from toolkit.deploy.targets import kubernetes
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets.autoscaling import Autoscaling
from toolkit.deploy.targets.objects import Object
from toolkit.files.strict import dump_yaml
from toolkit.routing.routers import LlmdRouter
from toolkit.sched.policies.parameters import defaults

ANY = "0.0.0.0"
ALIVE_FOLDER = "/etc/llmctl-alive"
FRONT_CORES = 2  # its loop, and its helper processes
# After a replica is ready: the front finds it up within 5 s, and 10 s later gives it its full share
# (toolkit/gateway/replicas.py).
SETTLED_S = 15
PICKER = "endpointpicker.yaml"
PICKER_API = "inference.networking.x-k8s.io/v1alpha1"
SCORERS = {  # and the parameters of llm-d's router
    "prefix-cache-scorer": "prefix",
    "queue-scorer": "queue",
    "kv-cache-utilization-scorer": "kv",
}
START = """\
```bash
{preparation}
kubectl apply -k .    # needs the CRDs of Prometheus' operator and KEDA; without them: -k core
{waits}
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # drains; the claims of the models stay
```"""


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need operators, each with a kustomization.yaml."""
    reckon.check_podable(order)
    replicas = Replication(order)
    replicas.check_containable()
    (operated, scaled) = _operated(replicas)
    mounting = _mounting(replicas)
    maps = [common.plan_map(order), {"name": _alive_map(order), "files": [ALIVE_FILE]}]
    files = common.kustomized(order, _core(replicas), operated, maps, mounting, scaled)
    files[f"core/{ALIVE_FILE}"] = replicas.alive
    weights: dict[str, float] = {}  # of a picker's scorers, where the plan's router is llm-d's
    router = order.plan.replica_router
    if router is not None and router.name == LlmdRouter.name:
        given = defaults(LlmdRouter) | dict(router.parameters)
        weights = {scorer: float(given[parameter]) for scorer, parameter in SCORERS.items()}
        # What a Gateway's endpoint picker reads when it starts: no object of the cluster.
        cache, *others = ({"type": scorer} for scorer in weights)
        remembered = {"parameters": {"lruCapacityPerServer": LlmdRouter.index_blocks}}
        more = [{"type": "max-score-picker"}, {"type": "single-profile-handler"}]
        chosen = [{"pluginRef": scorer, "weight": weight} for scorer, weight in weights.items()]
        profile = {"name": "default", "plugins": [*chosen, {"pluginRef": "max-score-picker"}]}
        picker = {
            "apiVersion": PICKER_API,
            "kind": "EndpointPickerConfig",
            "plugins": [cache | remembered, *others, *more],
            "schedulingProfiles": [profile],
        }
        files[PICKER] = dump_yaml(picker, order.comment())
    status = f"kubectl -n {order.options.namespace} rollout status statefulset/"
    waits = "\n".join(f"{status}{kind.name}" for kind in replicas.kinds)
    start = common.start_commands(order, START, waits=waits)
    return Rendered(files, _explained(replicas, weights), start, common.FORWARDED)


def _core(replicas: Replication) -> dict[str, Object]:
    """The objects that need no operators, by file.

    The front may list the EndpointSlices of its namespace, and nothing else.
    """
    order = replicas.order
    group = "rbac.authorization.k8s.io"
    policies = {
        kind.file("networkpolicy", ".yaml", "replicas"): kind.name for kind in replicas.kinds
    }
    about = common.metadata(order)
    verbs = ["get", "list", "watch"]
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": verbs}
    account = {"kind": "ServiceAccount", "name": order.name, "namespace": order.options.namespace}
    api = {"apiVersion": f"{group}/v1"}
    core = {
        "deployment.yaml": _front(replicas),
        "service.yaml": common.service(order),
        **kubernetes.replica_policies(order, policies),
        "serviceaccount.yaml": {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": about,
            "automountServiceAccountToken": False,  # pods that need its token say so themselves
        },
        "role.yaml": {**api, "kind": "Role", "metadata": about, "rules": [rule]},
        "rolebinding.yaml": {
            **api,
            "kind": "RoleBinding",
            "metadata": about,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": order.name},
            "subjects": [account],
        },
    }
    if order.options.fronts > 1:
        core["front-poddisruptionbudget.yaml"] = common.disruption_budget(order)
    for kind in replicas.kinds:
        core[kind.file("statefulset", ".yaml")] = _set(kind)
        core[kind.file("service", ".yaml", "replicas")] = common.service(
            order, _service_name(kind), kind.name, clusterIP="None"
        )
        core[kind.file("poddisruptionbudget", ".yaml")] = common.disruption_budget(order, kind.name)
    return core


def _operated(replicas: Replication) -> tuple[dict[str, Object], list[tuple[str, str]]]:
    """The objects that need operators, by file, and what the autoscaler scales."""
    order = replicas.order
    objects = {"podmonitor.yaml": kubernetes.pod_monitor(order)} | kubernetes.routes(order)
    scaled = []
    queues = []
    for kind in replicas.kinds:
        monitor = kubernetes.pod_monitor(order, kind.name)
        objects[kind.file("podmonitor", ".yaml", "replicas")] = monitor
        behind = series(order, monitored=True, of=kind.name)
        queues.append((behind, kind.threshold))
        scaling = _scaling(kind)
        if scaling.threshold.value is None:
            continue
        scaled.append(("StatefulSet", kind.name))
        objects[kind.file("scaledobject", ".yaml")] = scaling.scaled_object(
            {"kind": "StatefulSet", "name": kind.name},
            f"{WAITING}{{{behind}}}",
            kind.name if order.plan.others else "",
        )
    rules = replica_rules(order, series(order, monitored=True), queues)
    return objects | {"prometheusrule.yaml": kubernetes.prometheus_rule(order, rules)}, scaled


def _address(replicas: KindReplicas) -> str:
    """Where the front looks for its replicas: the endpoints of the headless Service."""
    return f"k8s://{replicas.order.options.namespace}/{_service_name(replicas)}:{common.PORT}"


def _service_name(replicas: KindReplicas) -> str:
    return f"{replicas.name}s"


def _alive_map(order: Order) -> str:
    return f"{order.name}-replica-alive"


def _front(replicas: Replication) -> Object:
    """The front: by default one pod, since each knows only the requests that it routed."""
    order = replicas.order
    where = each("--replicas", [kind.at(_address(kind)) for kind in replicas.kinds])
    notice = ["--shutdown-notice", str(reckon.PROPAGATION_S), *kubernetes.behind_proxy(order)]
    folders = {name: common.FOLDERS[name] for name in ("HOME", "NUMBA_CACHE_DIR")}
    key = common.by_reference(order, "LLMCTL_API_KEY", common.SECRET_KEY)
    memory = reckon.FRONT_MIB
    container = common.container(
        "llmctl",
        replicas.front_image.value,
        [common.PLAN_MOUNT, common.TMP_MOUNT],
        command=["llmctl"],
        args=replicas.front(common.PLAN_FILE, where, ANY, common.PORT, *notice),
        ports=[common.HTTP],
        env=[key, *common.variables(folders)],
        resources=common.asked(FRONT_CORES, memory, reckon.LIMIT_FACTOR * memory),
        **common.probes(order),
    )
    spec = common.pod_spec(
        order,
        reckon.grace_s(replicas.drain, reckon.PROPAGATION_S).value,
        container,
        [common.plan_volume(order), common.TMP],
        account=order.name,
    )
    rolling = common.rolling(1)
    pods = order.options.fronts
    return common.deployment(order, spec, rolling, replicas.startup.value, pods)


def _set(replicas: KindReplicas) -> Object:
    """The replicas. Digests of plan and fit are not among a pod's annotations: a plan with another
    router or other predictions does not start the replicas again.

    All pods start at once; a rollout replaces one after the other, from the last, each once the one
    before has been ready for `SETTLED_S`. A StatefulSet cannot add a pod first. Claims stay when
    their pod or the whole set goes: the next pod has its model at once.
    """
    order = replicas.order
    name = replicas.name
    claimed = _claimed(replicas)
    annotations = {"llmctl.io/model": order.plan.recipe.model.source}
    if order.plan.others:
        annotations["llmctl.io/kind"] = replicas.kind.recipe.name
    kept: Object = {}
    claims: Object = {}
    if claimed:
        retention = {"whenDeleted": "Retain", "whenScaled": "Retain"}
        kept["persistentVolumeClaimRetentionPolicy"] = retention
        claim = common.claim(order, {"name": "models"}, "ReadWriteOnce", claimed)
        claims["volumeClaimTemplates"] = [claim]
    about = {"labels": common.labels(order, name), "annotations": annotations}
    spec = {
        "replicas": replicas.count.value,
        "serviceName": _service_name(replicas),
        "podManagementPolicy": "Parallel",
        "revisionHistoryLimit": common.REVISIONS,
        "updateStrategy": {"type": "RollingUpdate"},
        "minReadySeconds": SETTLED_S,
        **kept,
        "selector": common.selector(order, name),
        "template": {"metadata": about, "spec": _pod(replicas)},
        **claims,
    }
    about_set = common.metadata(order, name, name)
    return common.api_object("apps/v1", "StatefulSet", about_set, spec)


def _pod(replicas: KindReplicas) -> Object:
    """The pod of a replica. Its image's root is read-only, too: HOME and HF_HOME are volumes.

    Its liveness probe restarts it after the first failure, for which a replica was silent for a
    period and gave no token for as long. It could not drain, either.
    """
    order = replicas.order
    server = replicas.server
    recipe = replicas.kind.recipe
    devices = replicas.gpus.value
    nodes = replicas.kind.nodes
    variables = dict(replicas.environment)
    mounts = []
    volumes = []
    if server.plan_variable:
        variables[server.plan_variable] = common.PLAN_FILE
        mounts.append(common.PLAN_MOUNT)
        volumes.append(common.plan_volume(order))
    if not _claimed(replicas):
        volumes.append(common.models_volume(order, replicas.kind))
    mounts += [common.MODELS_MOUNT, common.TMP_MOUNT]
    mounts.append({"name": "alive", "mountPath": ALIVE_FOLDER, "readOnly": True})
    volumes += [common.TMP, {"name": "alive", "configMap": {"name": _alive_map(order)}}]
    if recipe.engine.tensor_parallel_size > 1:
        mounts.append(common.SHARED_MOUNT)
        volumes.append(common.SHARED)
    memory = replicas.memory_mib.value
    container = common.container(
        "replica",
        replicas.image.value,
        mounts,
        command=list(server.command),
        args=replicas.arguments(ANY, common.PORT),
        ports=[common.HTTP],
        env=[*common.loading_environment(order), *common.variables(variables)],
        resources=common.asked(replicas.cores.value, memory, reckon.LIMIT_FACTOR * memory, devices),
        startupProbe=common.probe(server.health, 5, replicas.startup.value // 5),
        readinessProbe=common.probe(server.health, 5, 3),
        livenessProbe={
            "exec": {"command": replicas.asking(ALIVE_FOLDER, common.PORT)},
            "periodSeconds": replicas.hang_s,
            "timeoutSeconds": replicas.hang_s + CHECK_S,
            "failureThreshold": 1,
            "terminationGracePeriodSeconds": common.PROBE_S,
        },
        # Until the front has left it; a request that comes later is refused and goes elsewhere.
        lifecycle={"preStop": {"exec": {"command": ["sleep", str(reckon.PROPAGATION_S)]}}},
    )
    affinity = None
    if devices and not nodes:  # in a fleet only nodes with the kind's GPU
        required = bool(order.plan.others)
        affinity = common.on_products(order, replicas.kind, required=required)
    return common.pod_spec(
        order,
        reckon.grace_s(replicas.drain, reckon.PROPAGATION_S).value,
        container,
        volumes,
        affinity=affinity,
        nodes=nodes,
        tolerations=common.tolerations(recipe),
        name=replicas.name,
    )


def _claimed(replicas: KindReplicas) -> Sourced[int] | None:
    """GiB that each replica claims; None: a claim is named, no hub's model, or no known size."""
    if replicas.order.options.model_claim or not replicas.kind.recipe.model.from_hub:
        return None
    return reckon.models_gib([replicas.kind])


def _scaling(kind: KindReplicas) -> Autoscaling:
    """The autoscaler of a kind's replicas."""
    grace_s = reckon.grace_s(kind.drain, reckon.PROPAGATION_S).value
    load = reckon.load_s(kind.own)
    return Autoscaling(kind.order, load, kind.threshold, kind.count.value, grace_s)


def _mounting(replicas: Replication) -> Sourced[int]:
    """The number of pods that may mount a named claim."""
    highest = sum(_scaling(kind).most.value for kind in replicas.kinds)
    return Sourced(highest, f"up to {highest} replicas")


def _explained(replicas: Replication, weights: Mapping[str, float]) -> list[ExplainedValue]:
    order = replicas.order
    kinds = replicas.kinds
    addresses = " ".join(kind.at(_address(kind)) for kind in kinds)
    services = "the headless Service" if len(kinds) == 1 else "each kind's headless Service"
    slices = f"the EndpointSlices of {services}: a replica that ends is left at once"
    verbs = "get, list, watch endpointslices"
    role = "the front's only permission, in its own namespace"
    fronts = (
        "--fronts; shared: the replicas, what they report, the key, and where router session-hash "
        "sends a session; each front's own: what it routed, the prefixes that it remembers, its "
        "forecasts, the limits of keys; predictions are of one front, which starts in seconds"
    )
    helpers = "its loop and its helpers; the memory of the front of llmctl's own engines"
    parallel = "replicas do not wait for each other"
    lines = [
        *replicas.explained(),
        ExplainedValue("front: --replicas", addresses, slices),
        ExplainedValue("Role", verbs, role),
        explain_value("front: image", replicas.front_image),
        ExplainedValue("front: replicas", str(order.options.fronts), fronts),
        *replicas.of_kinds(KindReplicas.explained_flags),
        *replicas.of_kinds(_explained_pod),
        ExplainedValue("front: cpu, memory", f"{FRONT_CORES}, {reckon.FRONT_MIB} MiB", helpers),
        ExplainedValue("StatefulSet podManagementPolicy", "Parallel", parallel),
        *replicas.of_kinds(_explained_rollout),
        explain_caches(reckon.MODELS),
        kubernetes.explain_release(order),
        *common.explain_push(replicas.front_image, "--image"),
        *common.explain_push(kinds[0].image, "--replica-image"),
        *common.explain_pods(order),
        *kubernetes.explain_outside(order),
    ]
    size = reckon.models_gib(order.plan.kinds)
    if _claimed(kinds[0]) and size:
        kept = "one for each replica; it stays when the replica goes"
        lines += [
            explain_value("volumeClaimTemplates: storage", size, "{} GiB"),
            ExplainedValue("volumeClaimTemplates: accessModes", "ReadWriteOnce", kept),
            common.explain_storage_class(order),
            common.explain_token(order),
        ]
    else:
        lines += common.explain_models(order, _mounting(replicas))
    if weights:
        whole = "a file for the picker of Gateway API's inference extension, instead of the front"
        lines.append(ExplainedValue(PICKER, PICKER_API, f"{whole}; llm-d 0.8: llm-d.ai/v1alpha1"))
        for scorer, weight in weights.items():
            source = f"plan: parameter '{SCORERS[scorer]}' of router '{LlmdRouter.name}'"
            lines.append(ExplainedValue(f"{PICKER}: {scorer}", f"{weight:g}", source))
        blocks = str(LlmdRouter.index_blocks)
        kept = "blocks remembered of each replica, llm-d's default, as simulated"
        lines.append(ExplainedValue(f"{PICKER}: lruCapacityPerServer", blocks, kept))
    return [*lines, *replicas.of_kinds(_explained_scaling)]


def _explained_pod(kind: KindReplicas) -> list[ExplainedValue]:
    grace = reckon.grace_s(kind.drain, reckon.PROPAGATION_S)
    health = kind.server.health
    return [
        explain_value("terminationGracePeriodSeconds", grace, SECONDS),
        explain_value(f"replica: startupProbe on {health}", kind.startup, SECONDS),
        ExplainedValue(f"replica: readinessProbe on {health}", "3 x 5 s", "then no new requests"),
        ExplainedValue(
            f"replica: livenessProbe, {ALIVE_FILE}",
            f"{kind.hang_s} s, then {kind.hang_s} s for a token",
            "recipe: serve.hang_s; its figures in /metrics stand still, and it generates nothing "
            f"when asked, though {health} may answer; its requests go on elsewhere",
        ),
        explain_value("replica: cpu", kind.cores),
        explain_value("replica: memory", kind.memory_mib, MEBIBYTES),
    ]


def _explained_rollout(kind: KindReplicas) -> list[ExplainedValue]:
    """How much of the capacity a rollout takes away."""
    pods = kind.count.value
    source = (
        f"one of {pods} is away at a time, as for the PodDisruptionBudget; the next one goes "
        f"{SETTLED_S} s after it is ready (minReadySeconds)"
    )
    if pods < kubernetes.MANY:
        source += (
            f"; a StatefulSet adds no pod first, and one of {pods} is half or more: for a rollout "
            f"render with --replicas {pods + 1}, which starts a new pod before an old one goes"
        )
    return [ExplainedValue("StatefulSet rollout", f"{common.AWAY} at a time", source)]


def _explained_scaling(kind: KindReplicas) -> list[ExplainedValue]:
    """Where the replicas of a kind run, and how many."""
    lines = []
    nodes = ", ".join(f"{key}={value}" for key, value in kind.kind.nodes.items())
    if nodes:
        lines.append(ExplainedValue("nodeSelector", nodes, "fleet: nodes"))
    elif kind.gpus.value:
        affinity = "node affinity, required" if kind.order.plan.others else "node affinity"
        lines.append(explain_value(affinity, products(kind.order, kind.kind)))
    return [*lines, *_scaling(kind).explained(WAITING)]
