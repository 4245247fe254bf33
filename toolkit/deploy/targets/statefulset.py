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

from pydantic import BaseModel

from toolkit.deploy import manifests as k8s
from toolkit.deploy import operators
from toolkit.deploy.alerts import replica_rules, series
from toolkit.deploy.order import (
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    products,
)
from toolkit.deploy.reckon import (
    FRONT_MIB,
    LIMIT_FACTOR,
    PROPAGATION_S,
    check_podable,
    from_hub,
    grace_s,
    models_gib,
)
from toolkit.deploy.replicas import ALIVE as ALIVE_FILE
from toolkit.deploy.replicas import CHECK_S, KindReplicas, Replication, discovered
from toolkit.deploy.targets import objects as common
from toolkit.deploy.targets.kubernetes import (
    max_replicas,
    pod_monitor,
    replica_policies,
    scaled_object,
)
from toolkit.files.strict import dump_yaml
from toolkit.routing.routers import LlmdRouter, router_defaults

ANY = "0.0.0.0"
ALIVE_MOUNT = k8s.VolumeMount(name="alive", mount_path="/etc/llmctl-alive", read_only=True)
FRONT_CORES = 2  # its loop, and its helper processes
WAITING = "vllm:num_requests_waiting"
PICKER = "endpointpicker.yaml"
SCORERS: tuple[tuple[operators.Scorer, str], ...] = (  # and the parameters of llm-d's router
    ("prefix-cache-scorer", "prefix"),
    ("queue-scorer", "queue"),
    ("kv-cache-utilization-scorer", "kv"),
)


def render(order: Order) -> Rendered:
    """Render core/ and the objects that need operators, each with a kustomization.yaml."""
    check_podable(order)
    replicas = Replication(order)
    replicas.check_containable()
    core = _core(replicas)
    operated, scaled = _operated(replicas)
    alive_map = k8s.ConfigMapGenerator(name=_alive_map(order), files=[ALIVE_FILE])
    files = common.kustomized(order, core, operated, [common.plan_map(order), alive_map], scaled)
    files |= common.claim_files(order, _mounting(replicas)) | {"core/plan.json": order.text}
    files[f"core/{ALIVE_FILE}"] = replicas.alive
    if (picker := _picker(order)) is not None:
        files[PICKER] = dump_yaml([picker], order.comment())
    return Rendered(files, _explained(replicas), _start(replicas), common.FORWARDED)


def _core(replicas: Replication) -> dict[str, BaseModel]:
    """The objects that need no operators, by file."""
    order = replicas.order
    policies = {
        kind.file("networkpolicy", ".yaml", "replicas"): kind.name for kind in replicas.kinds
    }
    core: dict[str, BaseModel] = {
        "deployment.yaml": _front(replicas),
        "service.yaml": common.service(order),
        **replica_policies(order, policies),
        **_permission(replicas),
    }
    for kind in replicas.kinds:
        core[kind.file("statefulset", ".yaml")] = _set(kind)
        core[kind.file("service", ".yaml", "replicas")] = _headless(kind)
        core[kind.file("poddisruptionbudget", ".yaml")] = k8s.PodDisruptionBudget(
            metadata=common.metadata(order, kind.name, kind.name),
            spec=k8s.DisruptionSpec(max_unavailable=1, selector=common.selector(order, kind.name)),
        )
    return core


def _operated(replicas: Replication) -> tuple[dict[str, BaseModel], list[tuple[str, str]]]:
    """The objects that need operators, by file, and what the autoscaler scales."""
    order = replicas.order
    found: dict[str, BaseModel] = {"podmonitor.yaml": pod_monitor(order)}
    scaled, queues = [], []
    for kind in replicas.kinds:
        found[kind.file("podmonitor", ".yaml", "replicas")] = pod_monitor(order, kind.name)
        behind, threshold = series(order, monitored=True, of=kind.name), kind.threshold
        queues.append((behind, threshold))
        if threshold.value is None:
            continue
        scaled.append(("StatefulSet", kind.name))
        found[kind.file("scaledobject", ".yaml")] = scaled_object(
            order,
            operators.ScaleTarget(kind="StatefulSet", name=kind.name),
            f"{WAITING}{{{behind}}}",
            threshold.value,
            kind.count.value,
            kind.name if order.plan.others else "",
        )
    found["prometheusrule.yaml"] = operators.PrometheusRule(
        metadata=common.metadata(order),
        spec=replica_rules(order, series(order, monitored=True), queues),
    )
    return found, scaled


def _picker(order: Order) -> operators.EndpointPickerConfig | None:
    """A Gateway's endpoint picker with the weights of the plan's router, where that is llm-d's."""
    router = order.plan.replica_router
    if router is None or router.name != LlmdRouter.name:
        return None
    weights = router_defaults(LlmdRouter) | dict(router.parameters)
    scorers = [operators.EndpointPlugin(type=kind) for kind, _ in SCORERS[1:]]
    cache = operators.EndpointPlugin(
        type="prefix-cache-scorer", parameters={"lruCapacityPerServer": LlmdRouter.index_blocks}
    )
    others = [
        operators.EndpointPlugin(type="max-score-picker"),
        operators.EndpointPlugin(type="single-profile-handler"),
    ]
    profile = [
        operators.WeightedPlugin(plugin_ref=kind, weight=float(weights[knob]))
        for kind, knob in SCORERS
    ]
    chosen = [*profile, operators.WeightedPlugin(plugin_ref="max-score-picker")]
    return operators.EndpointPickerConfig(
        plugins=[cache, *scorers, *others],
        scheduling_profiles=[operators.SchedulingProfile(name="default", plugins=chosen)],
    )


def _explained_picker(order: Order) -> list[ExplainedValue]:
    picker = _picker(order)
    if picker is None:
        return []
    knobs = dict[str, str](SCORERS)
    (profile,) = picker.scheduling_profiles
    whole = "a file for the picker of Gateway API's inference extension, instead of the front"
    lines = [ExplainedValue(PICKER, picker.api_version, f"{whole}; llm-d 0.8: llm-d.ai/v1alpha1")]
    lines += [
        ExplainedValue(
            f"{PICKER}: {one.plugin_ref}",
            f"{one.weight:g}",
            f"plan: parameter '{knobs[one.plugin_ref]}' of router '{LlmdRouter.name}'",
        )
        for one in profile.plugins
        if one.weight is not None
    ]
    blocks = str(LlmdRouter.index_blocks)
    kept = "blocks remembered of each replica, llm-d's default, as simulated"
    return [*lines, ExplainedValue(f"{PICKER}: lruCapacityPerServer", blocks, kept)]


def _address(replicas: KindReplicas) -> str:
    """Where the front looks for its replicas: the endpoints of the headless Service."""
    return f"k8s://{replicas.order.options.namespace}/{_service_name(replicas)}:{common.PORT}"


def _service_name(replicas: KindReplicas) -> str:
    return f"{replicas.name}s"


def _permission(replicas: Replication) -> dict[str, BaseModel]:
    """The front may list the EndpointSlices of its namespace, and nothing else."""
    order = replicas.order
    rule = k8s.RoleRule(
        api_groups=["discovery.k8s.io"],
        resources=["endpointslices"],
        verbs=["get", "list", "watch"],
    )
    subject = k8s.RoleSubject(name=order.name, namespace=order.options.namespace)
    return {
        "serviceaccount.yaml": k8s.ServiceAccount(metadata=common.metadata(order)),
        "role.yaml": k8s.Role(metadata=common.metadata(order), rules=[rule]),
        "rolebinding.yaml": k8s.RoleBinding(
            metadata=common.metadata(order),
            role_ref=k8s.RoleReference(name=order.name),
            subjects=[subject],
        ),
    }


def _front(replicas: Replication) -> k8s.Deployment:
    """The front. It has one pod, since each front knows only the requests that it routed; a second
    is there only during a rollout.
    """
    order = replicas.order
    where = discovered([kind.at(_address(kind)) for kind in replicas.kinds])
    notice = ("--shutdown-notice", str(PROPAGATION_S))
    args = replicas.front(f"{common.PLAN_FOLDER}/plan.json", where, ANY, common.PORT, *notice)
    container = k8s.Container(
        name="llmctl",
        image=replicas.front_image.value,
        command=["llmctl"],
        args=args,
        ports=[common.HTTP],
        env=[
            common.by_reference(order, "LLMCTL_API_KEY", common.SECRET_KEY),
            *(
                k8s.EnvVar(name=name, value=common.FOLDERS[name])
                for name in ("HOME", "NUMBA_CACHE_DIR")
            ),
        ],
        resources=common.asked(FRONT_CORES, FRONT_MIB, LIMIT_FACTOR * FRONT_MIB),
        startup_probe=common.started(order),
        readiness_probe=common.READY,
        liveness_probe=common.ALIVE,
        volume_mounts=[common.PLAN_MOUNT, common.TMP_MOUNT],
    )
    spec = k8s.PodSpec(
        service_account_name=order.name,
        automount_service_account_token=True,
        termination_grace_period_seconds=grace_s(replicas.drain, PROPAGATION_S).value,
        containers=[container],
        volumes=[common.plan_volume(order), common.TMP],
    )
    template = k8s.PodTemplate(metadata=common.pod_metadata(order), spec=spec)
    strategy = k8s.Strategy(rolling_update=k8s.RollingUpdate(max_surge=1, max_unavailable=0))
    return common.deployment(order, template, strategy, replicas.startup.value)


def _set(replicas: KindReplicas) -> k8s.StatefulSet:
    """The replicas. Digests of plan and fit are not among a pod's annotations: a plan with another
    router or other predictions does not start the replicas again.
    """
    order, name, claims = replicas.order, replicas.name, _claims(replicas)
    kind = {"llmctl.io/kind": replicas.kind.recipe.name} if order.plan.others else {}
    about = k8s.PodMetadata(
        labels=common.labels(order, name),
        annotations={"llmctl.io/model": common.digests(order)["llmctl.io/model"]} | kind,
    )
    return k8s.StatefulSet(
        metadata=common.metadata(order, name, name),
        spec=k8s.StatefulSetSpec(
            replicas=replicas.count.value,
            service_name=_service_name(replicas),
            persistent_volume_claim_retention_policy=k8s.ClaimRetention() if claims else None,
            selector=common.selector(order, name),
            template=k8s.PodTemplate(metadata=about, spec=_pod(replicas)),
            volume_claim_templates=claims,
        ),
    )


def _pod(replicas: KindReplicas) -> k8s.PodSpec:
    """The pod of a replica. Its image's root is read-only, too: HOME and HF_HOME are volumes."""
    order, server, devices = replicas.order, replicas.server, replicas.gpus.value
    recipe, plan_file = replicas.kind.recipe, f"{common.PLAN_FOLDER}/plan.json"
    more = replicas.environment | (
        {server.plan_variable: plan_file} if server.plan_variable else {}
    )
    shared = recipe.engine.tensor_parallel_size > 1
    with_plan = bool(server.plan_variable)
    container = k8s.Container(
        name="replica",
        image=replicas.image.value,
        command=list(server.command),
        args=replicas.arguments(ANY, common.PORT),
        ports=[common.HTTP],
        env=[
            *common.loading_environment(order),
            *(k8s.EnvVar(name=name, value=value) for name, value in more.items()),
        ],
        resources=common.asked(
            replicas.cores.value,
            replicas.memory_mib.value,
            replicas.memory_limit_mib.value,
            devices,
        ),
        startup_probe=common.probe(server.health, 5, replicas.startup.value // 5),
        readiness_probe=common.probe(server.health, 5, 3),
        liveness_probe=_generates(replicas),
        # Until the front has left it; a request that comes later is refused and goes elsewhere.
        lifecycle=k8s.Lifecycle(
            pre_stop=k8s.Handler(exec=k8s.Exec(command=["sleep", str(PROPAGATION_S)]))
        ),
        volume_mounts=[
            *([common.PLAN_MOUNT] if with_plan else []),
            *(common.MODELS_MOUNT, common.TMP_MOUNT, ALIVE_MOUNT),
            *([common.SHARED_MOUNT] if shared else []),
        ],
    )
    volumes = [
        *([common.plan_volume(order)] if with_plan else []),
        *([] if _claims(replicas) else [common.models_volume(order, replicas.kind)]),
        *(
            common.TMP,
            k8s.Volume(name="alive", config_map=k8s.ConfigMapVolume(name=_alive_map(order))),
        ),
        *([common.SHARED] if shared else []),
    ]
    return k8s.PodSpec(
        termination_grace_period_seconds=grace_s(replicas.drain, PROPAGATION_S).value,
        affinity=_affinity(replicas),
        node_selector=replicas.kind.nodes or None,
        tolerations=common.tolerations(recipe),
        containers=[container],
        volumes=volumes,
    )


def _affinity(replicas: KindReplicas) -> k8s.Affinity | None:
    """For the nodes with the kind's GPU: in a fleet these alone, unless it names its nodes."""
    if not replicas.gpus.value or replicas.kind.nodes:
        return None
    others = bool(replicas.order.plan.others)
    return common.on_products(replicas.order, replicas.kind, required=others)


def _alive_map(order: Order) -> str:
    return f"{order.name}-replica-alive"


def _generates(replicas: KindReplicas) -> k8s.Probe:
    """The liveness probe: the pod is restarted after its first failure, for which a replica was
    silent for a period and gave no token for as long. It could not drain, either.
    """
    return k8s.Probe(
        exec=k8s.Exec(command=replicas.asking(ALIVE_MOUNT.mount_path, common.PORT)),
        period_seconds=replicas.hang_s,
        timeout_seconds=replicas.hang_s + CHECK_S,
        failure_threshold=1,
        termination_grace_period_seconds=common.PROBE_S,
    )


def _claims(replicas: KindReplicas) -> list[k8s.PersistentVolumeClaim] | None:
    """A claim of each replica for its model; None where one is named, the model is not from the
    hub, or its size is not known.
    """
    order = replicas.order
    size = models_gib([replicas.kind])
    if order.options.model_claim or size is None or not from_hub(replicas.kind.recipe):
        return None
    asked_for = k8s.ClaimResources(requests={"storage": f"{size.value}Gi"})
    spec = k8s.ClaimSpec(access_modes=["ReadWriteOnce"], resources=asked_for)
    return [k8s.PersistentVolumeClaim(metadata=k8s.Metadata(name="models"), spec=spec)]


def _headless(replicas: KindReplicas) -> k8s.Service:
    order, name = replicas.order, replicas.name
    return k8s.Service(
        metadata=common.metadata(order, _service_name(replicas), name),
        spec=k8s.ServiceSpec(
            cluster_ip="None",
            selector=common.selector(order, name).match_labels,
            ports=[k8s.ServicePort(name="http", port=common.PORT, target_port="http")],
        ),
    )


def _most(kind: KindReplicas) -> Sourced[int]:
    """The greatest number of a kind's replicas."""
    scaled = kind.threshold.value is not None
    return max_replicas(kind.order, kind.count.value) if scaled else kind.count


def _mounting(replicas: Replication) -> Sourced[int]:
    """The number of pods that may mount a named claim."""
    highest = sum(_most(kind).value for kind in replicas.kinds)
    return Sourced(highest, f"up to {highest} replicas")


def _explained(replicas: Replication) -> list[ExplainedValue]:
    order, kinds = replicas.order, replicas.kinds
    addresses = " ".join(kind.at(_address(kind)) for kind in kinds)
    services = "the headless Service" if len(kinds) == 1 else "each kind's headless Service"
    return [
        *replicas.explained(),
        ExplainedValue(
            "front: --replicas",
            addresses,
            f"the EndpointSlices of {services}: a replica that ends is left at once",
        ),
        ExplainedValue(
            "Role",
            "get, list, watch endpointslices",
            "the front's only permission, in its own namespace",
        ),
        explain_value("front: image", replicas.front_image),
        ExplainedValue(
            "front: replicas", "1", "a front knows only what it routed; it starts in seconds"
        ),
        *replicas.explained_flags(),
        *(line for kind in kinds for line in kind.about(_explained_pod(kind))),
        ExplainedValue(
            "front: cpu, memory",
            f"{FRONT_CORES}, {FRONT_MIB} MiB",
            "its loop and its helpers; the memory of the front of llmctl's own engines",
        ),
        ExplainedValue(
            "StatefulSet podManagementPolicy", "Parallel", "replicas do not wait for each other"
        ),
        *_explained_claims(replicas),
        *_explained_picker(order),
        *(line for kind in kinds for line in kind.about(_explained_scaling(kind))),
    ]


def _explained_pod(kind: KindReplicas) -> list[ExplainedValue]:
    grace = grace_s(kind.drain, PROPAGATION_S)
    health, load, memory = kind.server.health, kind.startup, kind.memory_mib
    return [
        explain_value("terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        explain_value(f"replica: startupProbe on {health}", load, f"{load.value} s"),
        ExplainedValue(f"replica: readinessProbe on {health}", "3 x 5 s", "then no new requests"),
        ExplainedValue(
            f"replica: livenessProbe, {ALIVE_FILE}",
            f"{kind.hang_s} s, then {kind.hang_s} s for a token",
            "recipe: serve.hang_s; its figures in /metrics stand still, and it generates nothing "
            f"when asked, though {health} may answer; its requests go on elsewhere",
        ),
        explain_value("replica: cpu", kind.cores),
        explain_value("replica: memory", memory, f"{memory.value:,} MiB"),
    ]


def _explained_scaling(kind: KindReplicas) -> list[ExplainedValue]:
    """Where the replicas of a kind run, and how many."""
    lines, nodes = [], ", ".join(f"{key}={value}" for key, value in kind.kind.nodes.items())
    if nodes:
        lines.append(ExplainedValue("nodeSelector", nodes, "fleet: nodes"))
    elif kind.gpus.value:
        where = products(kind.order, kind.kind)
        named = "node affinity, required" if kind.order.plan.others else "node affinity"
        lines.append(explain_value(named, where, ", ".join(where.value)))
    threshold = kind.threshold
    if threshold.value is None:
        return [*lines, explain_value("ScaledObject", threshold, "none")]
    return [
        *lines,
        explain_value(f"ScaledObject threshold of {WAITING}", threshold),
        explain_value("ScaledObject maxReplicaCount", _most(kind)),
    ]


def _explained_claims(replicas: Replication) -> list[ExplainedValue]:
    claims, order = _claims(replicas.kinds[0]), replicas.order
    if claims is None:
        return common.explain_models(order, _mounting(replicas))
    size = models_gib(order.plan.kinds)
    assert size is not None
    kept = "of the default storage class, one for each replica; it stays when the replica goes"
    token = f"Secret {order.name}, key hf-token"
    return [
        explain_value("volumeClaimTemplates: storage", size, f"{size.value} GiB"),
        ExplainedValue("volumeClaimTemplates: accessModes", "ReadWriteOnce", kept),
        ExplainedValue("HF_TOKEN", token, "optional: gated models need it; it is in no file here"),
    ]


def _start(replicas: Replication) -> str:
    order, namespace = replicas.order, replicas.order.options.namespace
    waits = "\n".join(
        f"kubectl -n {namespace} rollout status statefulset/{kind.name}" for kind in replicas.kinds
    )
    return f"""\
```bash
{common.preparation(order)}
kubectl apply -k .    # needs the CRDs of Prometheus' operator and KEDA; without them: -k core
{waits}
kubectl -n {namespace} rollout status deployment/{order.name}
kubectl -n {namespace} port-forward service/{order.name} 8000
kubectl delete -k .         # drains; the claims of the models stay
```

Pods of other namespaces may call it if their namespace has the label `llmctl.io/client: "true"`."""
