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

from toolkit.deploy.alerts import replica_rules, series
from toolkit.deploy.manifests import (
    Affinity,
    ClaimResources,
    ClaimRetention,
    ClaimSpec,
    ConfigMapGenerator,
    ConfigMapVolume,
    Container,
    Deployment,
    DeploymentSpec,
    DisruptionSpec,
    EnvVar,
    Exec,
    Handler,
    Kustomization,
    Lifecycle,
    Metadata,
    PersistentVolumeClaim,
    PodDisruptionBudget,
    PodMetadata,
    PodSpec,
    PodTemplate,
    Probe,
    Role,
    RoleBinding,
    RoleReference,
    RoleRule,
    RoleSubject,
    RollingUpdate,
    Service,
    ServiceAccount,
    ServicePort,
    ServiceSpec,
    StatefulSet,
    StatefulSetSpec,
    Strategy,
    Volume,
    VolumeMount,
)
from toolkit.deploy.operators import (
    EndpointPickerConfig,
    EndpointPlugin,
    PrometheusRule,
    ScaleTarget,
    SchedulingProfile,
    Scorer,
    WeightedPlugin,
)
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
from toolkit.deploy.targets.kubernetes import (
    max_replicas,
    outer,
    pod_monitor,
    replica_policies,
    scaled_object,
)
from toolkit.deploy.targets.objects import (
    ALIVE,
    FOLDERS,
    FORWARDED,
    HTTP,
    MODELS_MOUNT,
    PLAN_FOLDER,
    PLAN_MOUNT,
    PORT,
    PROBE_S,
    READY,
    SECRET_KEY,
    SHARED,
    SHARED_MOUNT,
    TMP,
    TMP_MOUNT,
    asked,
    by_reference,
    claim_files,
    digests,
    explain_models,
    labels,
    loading_environment,
    metadata,
    models_volume,
    on_products,
    plan_map,
    plan_volume,
    pod_metadata,
    preparation,
    probe,
    selector,
    service,
    started,
    tolerations,
)
from toolkit.files.strict import dump_yaml
from toolkit.routing.routers import LlmdRouter, router_defaults

ANY = "0.0.0.0"
ALIVE_MOUNT = VolumeMount(name="alive", mount_path="/etc/llmctl-alive", read_only=True)
FRONT_CORES = 2  # its loop, and its helper processes
WAITING = "vllm:num_requests_waiting"
PICKER = "endpointpicker.yaml"
SCORERS: tuple[tuple[Scorer, str], ...] = (  # and the parameters of llm-d's router
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
    objects = {f"core/{name}": content for name, content in core.items()} | operated
    objects["core/kustomization.yaml"] = Kustomization(
        namespace=order.options.namespace,
        resources=sorted(core),
        config_map_generator=[
            plan_map(order),
            ConfigMapGenerator(name=_alive_map(order), files=[ALIVE_FILE]),
        ],
    )
    objects["kustomization.yaml"] = outer(order, sorted(operated), scaled)
    files = {name: dump_yaml([content], order.comment()) for name, content in objects.items()}
    files |= claim_files(order, _mounting(replicas)) | {"core/plan.json": order.text}
    files[f"core/{ALIVE_FILE}"] = replicas.alive
    if (picker := _picker(order)) is not None:
        files[PICKER] = dump_yaml([picker], order.comment())
    return Rendered(files, _explained(replicas), _start(replicas), FORWARDED)


def _core(replicas: Replication) -> dict[str, BaseModel]:
    """The objects that need no operators, by file."""
    order = replicas.order
    policies = {
        kind.file("networkpolicy", ".yaml", "replicas"): kind.name for kind in replicas.kinds
    }
    core: dict[str, BaseModel] = {
        "deployment.yaml": _front(replicas),
        "service.yaml": service(order),
        **replica_policies(order, policies),
        **_permission(replicas),
    }
    for kind in replicas.kinds:
        core[kind.file("statefulset", ".yaml")] = _set(kind)
        core[kind.file("service", ".yaml", "replicas")] = _headless(kind)
        core[kind.file("poddisruptionbudget", ".yaml")] = PodDisruptionBudget(
            metadata=metadata(order, kind.name, kind.name),
            spec=DisruptionSpec(max_unavailable=1, selector=selector(order, kind.name)),
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
            ScaleTarget(kind="StatefulSet", name=kind.name),
            f"{WAITING}{{{behind}}}",
            threshold.value,
            kind.count.value,
            kind.name if order.plan.others else "",
        )
    found["prometheusrule.yaml"] = PrometheusRule(
        metadata=metadata(order),
        spec=replica_rules(order, series(order, monitored=True), queues),
    )
    return found, scaled


def _picker(order: Order) -> EndpointPickerConfig | None:
    """A Gateway's endpoint picker with the weights of the plan's router, where that is llm-d's."""
    router = order.plan.replica_router
    if router is None or router.name != LlmdRouter.name:
        return None
    weights = router_defaults(LlmdRouter) | dict(router.parameters)
    scorers = [EndpointPlugin(type=kind) for kind, _ in SCORERS[1:]]
    cache = EndpointPlugin(
        type="prefix-cache-scorer", parameters={"lruCapacityPerServer": LlmdRouter.index_blocks}
    )
    others = [
        EndpointPlugin(type="max-score-picker"),
        EndpointPlugin(type="single-profile-handler"),
    ]
    profile = [
        WeightedPlugin(plugin_ref=kind, weight=float(weights[knob])) for kind, knob in SCORERS
    ]
    chosen = [*profile, WeightedPlugin(plugin_ref="max-score-picker")]
    return EndpointPickerConfig(
        plugins=[cache, *scorers, *others],
        scheduling_profiles=[SchedulingProfile(name="default", plugins=chosen)],
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
    return f"k8s://{replicas.order.options.namespace}/{_service_name(replicas)}:{PORT}"


def _service_name(replicas: KindReplicas) -> str:
    return f"{replicas.name}s"


def _permission(replicas: Replication) -> dict[str, BaseModel]:
    """The front may list the EndpointSlices of its namespace, and nothing else."""
    order = replicas.order
    rule = RoleRule(
        api_groups=["discovery.k8s.io"],
        resources=["endpointslices"],
        verbs=["get", "list", "watch"],
    )
    subject = RoleSubject(name=order.name, namespace=order.options.namespace)
    return {
        "serviceaccount.yaml": ServiceAccount(metadata=metadata(order)),
        "role.yaml": Role(metadata=metadata(order), rules=[rule]),
        "rolebinding.yaml": RoleBinding(
            metadata=metadata(order), role_ref=RoleReference(name=order.name), subjects=[subject]
        ),
    }


def _front(replicas: Replication) -> Deployment:
    """The front. It has one pod, since each front knows only the requests that it routed; a second
    is there only during a rollout.
    """
    order = replicas.order
    where = discovered([kind.at(_address(kind)) for kind in replicas.kinds])
    notice = ("--shutdown-notice", str(PROPAGATION_S))
    args = replicas.front(f"{PLAN_FOLDER}/plan.json", where, ANY, PORT, *notice)
    container = Container(
        name="llmctl",
        image=replicas.front_image.value,
        command=["llmctl"],
        args=args,
        ports=[HTTP],
        env=[
            by_reference(order, "LLMCTL_API_KEY", SECRET_KEY),
            *(EnvVar(name=name, value=FOLDERS[name]) for name in ("HOME", "NUMBA_CACHE_DIR")),
        ],
        resources=asked(FRONT_CORES, FRONT_MIB, LIMIT_FACTOR * FRONT_MIB),
        startup_probe=started(order),
        readiness_probe=READY,
        liveness_probe=ALIVE,
        volume_mounts=[PLAN_MOUNT, TMP_MOUNT],
    )
    spec = PodSpec(
        service_account_name=order.name,
        automount_service_account_token=True,
        termination_grace_period_seconds=grace_s(replicas.drain, PROPAGATION_S).value,
        containers=[container],
        volumes=[plan_volume(order), TMP],
    )
    return Deployment(
        metadata=metadata(order),
        spec=DeploymentSpec(
            replicas=1,
            progress_deadline_seconds=replicas.startup.value + 60,
            strategy=Strategy(rolling_update=RollingUpdate(max_surge=1, max_unavailable=0)),
            selector=selector(order),
            template=PodTemplate(metadata=pod_metadata(order), spec=spec),
        ),
    )


def _set(replicas: KindReplicas) -> StatefulSet:
    """The replicas. Digests of plan and fit are not among a pod's annotations: a plan with another
    router or other predictions does not start the replicas again.
    """
    order, name, claims = replicas.order, replicas.name, _claims(replicas)
    kind = {"llmctl.io/kind": replicas.kind.recipe.name} if order.plan.others else {}
    about = PodMetadata(
        labels=labels(order, name),
        annotations={"llmctl.io/model": digests(order)["llmctl.io/model"]} | kind,
    )
    return StatefulSet(
        metadata=metadata(order, name, name),
        spec=StatefulSetSpec(
            replicas=replicas.count.value,
            service_name=_service_name(replicas),
            persistent_volume_claim_retention_policy=ClaimRetention() if claims else None,
            selector=selector(order, name),
            template=PodTemplate(metadata=about, spec=_pod(replicas)),
            volume_claim_templates=claims,
        ),
    )


def _pod(replicas: KindReplicas) -> PodSpec:
    """The pod of a replica. Its image's root is read-only, too: HOME and HF_HOME are volumes."""
    order, server, devices = replicas.order, replicas.server, replicas.gpus.value
    recipe, plan_file = replicas.kind.recipe, f"{PLAN_FOLDER}/plan.json"
    more = replicas.environment | (
        {server.plan_variable: plan_file} if server.plan_variable else {}
    )
    shared = recipe.engine.tensor_parallel_size > 1
    with_plan = bool(server.plan_variable)
    container = Container(
        name="replica",
        image=replicas.image.value,
        command=list(server.command),
        args=replicas.arguments(ANY, PORT),
        ports=[HTTP],
        env=[
            *loading_environment(order),
            *(EnvVar(name=name, value=value) for name, value in more.items()),
        ],
        resources=asked(
            replicas.cores.value,
            replicas.memory_mib.value,
            replicas.memory_limit_mib.value,
            devices,
        ),
        startup_probe=probe(server.health, 5, replicas.startup.value // 5),
        readiness_probe=probe(server.health, 5, 3),
        liveness_probe=_generates(replicas),
        # Until the front has left it; a request that comes later is refused and goes elsewhere.
        lifecycle=Lifecycle(pre_stop=Handler(exec=Exec(command=["sleep", str(PROPAGATION_S)]))),
        volume_mounts=[
            *([PLAN_MOUNT] if with_plan else []),
            *(MODELS_MOUNT, TMP_MOUNT, ALIVE_MOUNT),
            *([SHARED_MOUNT] if shared else []),
        ],
    )
    volumes = [
        *([plan_volume(order)] if with_plan else []),
        *([] if _claims(replicas) else [models_volume(order, replicas.kind)]),
        *(TMP, Volume(name="alive", config_map=ConfigMapVolume(name=_alive_map(order)))),
        *([SHARED] if shared else []),
    ]
    return PodSpec(
        termination_grace_period_seconds=grace_s(replicas.drain, PROPAGATION_S).value,
        affinity=_affinity(replicas),
        node_selector=replicas.kind.nodes or None,
        tolerations=tolerations(recipe),
        containers=[container],
        volumes=volumes,
    )


def _affinity(replicas: KindReplicas) -> Affinity | None:
    """For the nodes with the kind's GPU: in a fleet these alone, unless it names its nodes."""
    if not replicas.gpus.value or replicas.kind.nodes:
        return None
    others = bool(replicas.order.plan.others)
    return on_products(replicas.order, replicas.kind, required=others)


def _alive_map(order: Order) -> str:
    return f"{order.name}-replica-alive"


def _generates(replicas: KindReplicas) -> Probe:
    """The liveness probe: the pod is restarted after its first failure, for which a replica was
    silent for a period and gave no token for as long. It could not drain, either.
    """
    return Probe(
        exec=Exec(command=replicas.asking(ALIVE_MOUNT.mount_path, PORT)),
        period_seconds=replicas.hang_s,
        timeout_seconds=replicas.hang_s + CHECK_S,
        failure_threshold=1,
        termination_grace_period_seconds=PROBE_S,
    )


def _claims(replicas: KindReplicas) -> list[PersistentVolumeClaim] | None:
    """A claim of each replica for its model; None where one is named, the model is not from the
    hub, or its size is not known.
    """
    order = replicas.order
    size = models_gib([replicas.kind])
    if order.options.model_claim or size is None or not from_hub(replicas.kind.recipe):
        return None
    asked_for = ClaimResources(requests={"storage": f"{size.value}Gi"})
    spec = ClaimSpec(access_modes=["ReadWriteOnce"], resources=asked_for)
    return [PersistentVolumeClaim(metadata=Metadata(name="models"), spec=spec)]


def _headless(replicas: KindReplicas) -> Service:
    order, name = replicas.order, replicas.name
    return Service(
        metadata=metadata(order, _service_name(replicas), name),
        spec=ServiceSpec(
            cluster_ip="None",
            selector=selector(order, name).match_labels,
            ports=[ServicePort(name="http", port=PORT, target_port="http")],
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
        return explain_models(order, _mounting(replicas))
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
{preparation(order)}
kubectl apply -k .    # needs the CRDs of Prometheus' operator and KEDA; without them: -k core
{waits}
kubectl -n {namespace} rollout status deployment/{order.name}
kubectl -n {namespace} port-forward service/{order.name} 8000
kubectl delete -k .         # drains; the claims of the models stay
```

Pods of other namespaces may call it if their namespace has the label `llmctl.io/client: "true"`."""
