"""Target `kubernetes` for an engine that is a server of its own: its replicas, and the front.

The replicas are a StatefulSet, so that each has a claim for its model, behind a headless Service.
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
from toolkit.deploy.replicas import CHECK_S, Replication, discovered
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
    core: dict[str, BaseModel] = {
        "deployment.yaml": _front(replicas),
        "service.yaml": service(order),
        "statefulset.yaml": _set(replicas),
        "service-replicas.yaml": _headless(replicas),
        "poddisruptionbudget.yaml": PodDisruptionBudget(
            metadata=metadata(order, replicas.name, replicas.name),
            spec=DisruptionSpec(max_unavailable=1, selector=selector(order, replicas.name)),
        ),
        **replica_policies(order, replicas.name),
        **_permission(replicas),
    }
    operated: dict[str, BaseModel] = {
        "podmonitor.yaml": pod_monitor(order),
        "podmonitor-replicas.yaml": pod_monitor(order, replicas.name),
        "prometheusrule.yaml": PrometheusRule(
            metadata=metadata(order),
            spec=replica_rules(
                order,
                series(order, monitored=True),
                series(order, monitored=True, of=replicas.name),
                replicas.threshold,
            ),
        ),
    }
    scaled, threshold = ("StatefulSet", replicas.name), replicas.threshold.value
    if threshold is not None:
        waiting = f"{WAITING}{{{series(order, monitored=True, of=replicas.name)}}}"
        target = ScaleTarget(kind="StatefulSet", name=replicas.name)
        fewest = replicas.count.value
        operated["scaledobject.yaml"] = scaled_object(order, target, waiting, threshold, fewest)
    objects = {f"core/{name}": content for name, content in core.items()} | operated
    objects["core/kustomization.yaml"] = Kustomization(
        namespace=order.options.namespace,
        resources=sorted(core),
        config_map_generator=[
            plan_map(order),
            ConfigMapGenerator(name=_alive_map(replicas), files=[ALIVE_FILE]),
        ],
    )
    objects["kustomization.yaml"] = outer(
        order, sorted(operated), scaled if threshold is not None else None
    )
    files = {name: dump_yaml([content], order.comment()) for name, content in objects.items()}
    files |= claim_files(order, _mounting(replicas)) | {"core/plan.json": order.text}
    files[f"core/{ALIVE_FILE}"] = replicas.server.alive
    if (picker := _picker(order)) is not None:
        files[PICKER] = dump_yaml([picker], order.comment())
    return Rendered(files, _explained(replicas), _start(replicas), FORWARDED)


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


def _address(replicas: Replication) -> str:
    """Where the front looks for its replicas: the endpoints of the headless Service."""
    return f"k8s://{replicas.order.options.namespace}/{_service_name(replicas)}:{PORT}"


def _service_name(replicas: Replication) -> str:
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
    where = discovered(_address(replicas))
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


def _set(replicas: Replication) -> StatefulSet:
    """The replicas. Digests of plan and fit are not among a pod's annotations: a plan with another
    router or other predictions does not start the replicas again.
    """
    order, name, claims = replicas.order, replicas.name, _claims(replicas)
    about = PodMetadata(
        labels=labels(order, name),
        annotations={"llmctl.io/model": digests(order)["llmctl.io/model"]},
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


def _pod(replicas: Replication) -> PodSpec:
    """The pod of a replica. Its image's root is read-only, too: HOME and HF_HOME are volumes."""
    order, server, devices = replicas.order, replicas.server, replicas.gpus.value
    recipe, plan_file = order.plan.recipe, f"{PLAN_FOLDER}/plan.json"
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
        *([] if _claims(replicas) else [models_volume(order, order.plan.kinds[0])]),
        *(TMP, Volume(name="alive", config_map=ConfigMapVolume(name=_alive_map(replicas)))),
        *([SHARED] if shared else []),
    ]
    return PodSpec(
        termination_grace_period_seconds=grace_s(replicas.drain, PROPAGATION_S).value,
        affinity=on_products(order, order.plan.kinds[0]) if devices else None,
        tolerations=tolerations(recipe),
        containers=[container],
        volumes=volumes,
    )


def _alive_map(replicas: Replication) -> str:
    return f"{replicas.name}-alive"


def _generates(replicas: Replication) -> Probe:
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


def _claims(replicas: Replication) -> list[PersistentVolumeClaim] | None:
    """A claim of each replica for its model; None where one is named, the model is not from the
    hub, or its size is not known.
    """
    order = replicas.order
    size = models_gib(order.plan.kinds)
    if order.options.model_claim or size is None or not from_hub(order.plan.recipe):
        return None
    asked_for = ClaimResources(requests={"storage": f"{size.value}Gi"})
    spec = ClaimSpec(access_modes=["ReadWriteOnce"], resources=asked_for)
    return [PersistentVolumeClaim(metadata=Metadata(name="models"), spec=spec)]


def _headless(replicas: Replication) -> Service:
    order, name = replicas.order, replicas.name
    return Service(
        metadata=metadata(order, _service_name(replicas), name),
        spec=ServiceSpec(
            cluster_ip="None",
            selector=selector(order, name).match_labels,
            ports=[ServicePort(name="http", port=PORT, target_port="http")],
        ),
    )


def _mounting(replicas: Replication) -> Sourced[int]:
    """The number of pods that may mount a named claim."""
    fewest = replicas.count.value
    scaled = replicas.threshold.value is not None
    highest = max_replicas(replicas.order, fewest).value if scaled else fewest
    return Sourced(highest, f"up to {highest} replicas")


def _explained(replicas: Replication) -> list[ExplainedValue]:
    order = replicas.order
    grace = grace_s(replicas.drain, PROPAGATION_S)
    health, load = replicas.server.health, replicas.startup
    where, cores, memory = products(order, order.plan.kinds[0]), replicas.cores, replicas.memory_mib
    lines = [
        *replicas.explained(),
        ExplainedValue(
            "front: --replicas",
            _address(replicas),
            "the EndpointSlices of the headless Service: a replica that ends is left at once",
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
        explain_value("terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        explain_value(f"replica: startupProbe on {health}", load, f"{load.value} s"),
        ExplainedValue(f"replica: readinessProbe on {health}", "3 x 5 s", "then no new requests"),
        ExplainedValue(
            f"replica: livenessProbe, {ALIVE_FILE}",
            f"{replicas.hang_s} s, then {replicas.hang_s} s for a token",
            "recipe: serve.hang_s; its figures in /metrics stand still, and it generates nothing "
            f"when asked, though {health} may answer; its requests go on elsewhere",
        ),
        explain_value("replica: cpu", cores),
        explain_value("replica: memory", memory, f"{memory.value:,} MiB"),
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
    ]
    if replicas.gpus.value:
        lines.append(explain_value("node affinity", where, ", ".join(where.value)))
    threshold = replicas.threshold
    if threshold.value is None:
        return [*lines, explain_value("ScaledObject", threshold, "none")]
    most = max_replicas(order, replicas.count.value)
    return [
        *lines,
        explain_value(f"ScaledObject threshold of {WAITING}", threshold),
        explain_value("ScaledObject maxReplicaCount", most),
    ]


def _explained_claims(replicas: Replication) -> list[ExplainedValue]:
    claims, order = _claims(replicas), replicas.order
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
    return f"""\
```bash
{preparation(order)}
kubectl apply -k .    # needs the CRDs of Prometheus' operator and KEDA; without them: -k core
kubectl -n {namespace} rollout status statefulset/{replicas.name}
kubectl -n {namespace} rollout status deployment/{order.name}
kubectl -n {namespace} port-forward service/{order.name} 8000
kubectl delete -k .         # drains; the claims of the models stay
```

Pods of other namespaces may call it if their namespace has the label `llmctl.io/client: "true"`."""
