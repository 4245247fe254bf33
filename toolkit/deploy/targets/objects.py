"""Objects that every deployment in a cluster has, whatever runs its workers: metadata, Service,
kustomizations.
"""

from __future__ import annotations

from toolkit.deploy.kinds.kubernetes import (
    Affinity,
    Claim,
    ClaimResources,
    ClaimSpec,
    ConfigMapGenerator,
    ConfigMapVolume,
    Container,
    ContainerPort,
    EmptyDir,
    EnvVar,
    GeneratorOptions,
    HttpGet,
    Metadata,
    NodeAffinity,
    NodeRequirement,
    NodeSelector,
    NodeTerm,
    PersistentVolumeClaim,
    PodMetadata,
    PodSpec,
    PreferredNode,
    Probe,
    Resources,
    SecretKey,
    Selector,
    Service,
    ServicePort,
    ServiceSpec,
    Toleration,
    ValueFrom,
    Volume,
    VolumeMount,
)
from toolkit.deploy.order import (
    LABEL,
    ExplainedValue,
    Order,
    Reckoned,
    llmctl_image,
    products,
    told,
)
from toolkit.deploy.reckon import (
    SHARED_GIB,
    UNKNOWN_MODELS_GIB,
    cpus,
    drain_s,
    from_hub,
    gpus,
    grace_s,
    memory_limit_mib,
    memory_mib,
    models_gib,
    startup_s,
)
from toolkit.files.plan import Kind
from toolkit.files.recipe import Recipe
from toolkit.files.strict import dump_yaml

# The pod that serves a plan: for a Deployment, and for whoever else runs pods.

PORT = 8000
FORWARDED = f"http://127.0.0.1:{PORT}"  # with kubectl port-forward
PROBE_S = 10
GPU = "nvidia.com/gpu"
SECRET_KEY = "api-key"
HUB_KEY = "hf-token"
PLAN_FOLDER = "/etc/llmctl"
# compiled kernels: numba's take 20 MB, DeepSpeed's some hundreds
TMP = Volume(name="tmp", empty_dir=EmptyDir(size_limit="4Gi"))
SHARED = Volume(name="shm", empty_dir=EmptyDir(medium="Memory", size_limit=f"{SHARED_GIB}Gi"))
SHARED_MOUNT = VolumeMount(name="shm", mount_path="/dev/shm")
HTTP = ContainerPort(name="http", container_port=PORT)
FOLDERS = {"HOME": "/tmp", "HF_HOME": "/models", "NUMBA_CACHE_DIR": "/tmp/numba"}


def _probe(path: str, period_s: int, failures: int) -> Probe:
    get = HttpGet(path=path, port="http")
    return Probe(
        http_get=get, period_seconds=period_s, timeout_seconds=3, failure_threshold=failures
    )


READY = _probe("/ready", 5, 3)
# A front that does not answer hears no SIGTERM either: waiting for its drain would only cost time.
ALIVE = _probe("/health", PROBE_S, 3).model_copy(
    update={"termination_grace_period_seconds": PROBE_S}
)


def started(order: Order) -> Probe:
    """Until the first /ready the other probes rest; a load that never ends is ended here."""
    return _probe("/ready", 5, startup_s(order).value // 5)


def probes_told(order: Order, whose: str = "") -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about the probes; `whose` stands before each key."""
    startup = startup_s(order)
    away = "503 while no worker is loaded and alive, and once the end is announced: then new requests go elsewhere"
    alive = "the front answers seconds after its start, so 30 s of silence are a hang; workers are not its affair: the "
    alive += (
        "server loads lost ones again, keeps their requests, and ends by itself where it cannot"
    )
    return [
        told(f"{whose}startupProbe on /ready", startup, f"{startup.value} s"),
        ExplainedValue(f"{whose}readinessProbe on /ready", "3 x 5 s", away),
        ExplainedValue(f"{whose}livenessProbe on /health", f"3 x {PROBE_S} s", alive),
        ExplainedValue(
            f"{whose}livenessProbe grace",
            f"{PROBE_S} s",
            "a front that does not answer does not drain either",
        ),
    ]


def labels(order: Order) -> dict[str, str]:
    """What all objects of a deployment wear."""
    return {"app.kubernetes.io/name": order.name, "app.kubernetes.io/managed-by": "llmctl"}


def pod(order: Order, notice_s: int) -> PodSpec:
    """The pod; `notice_s` is how long it takes requests still after SIGTERM."""
    return PodSpec(
        termination_grace_period_seconds=grace_s(drain_s(order), notice_s).value,
        affinity=on_products(order, order.plan.kinds[0]) if gpus(order.plan.recipe).value else None,
        tolerations=tolerations(order.plan.recipe),
        containers=[_container(order, notice_s)],
        volumes=[*volumes(order), *([SHARED] if _shares(order) else [])],
    )


def _shares(order: Order) -> bool:
    """Whether processes of one worker exchange tensors: NCCL asks for more than the 64 MB of a
    pod's /dev/shm.
    """
    return order.plan.recipe.engine.tensor_parallel_size > 1


def _container(order: Order, notice_s: int) -> Container:
    args = ["serve", f"{PLAN_FOLDER}/plan.json", "--host", "0.0.0.0", "--port", str(PORT)]
    args += ["--shutdown-notice", str(notice_s), "--shutdown-timeout", str(drain_s(order).value)]
    args += order.allowances
    return Container(
        name="llmctl",
        image=llmctl_image(order).value,
        command=["llmctl"],
        args=args,
        ports=[HTTP],
        env=environment(order),
        resources=resources(order),
        startup_probe=started(order),
        readiness_probe=READY,
        liveness_probe=ALIVE,
        volume_mounts=[*mounts(), *([SHARED_MOUNT] if _shares(order) else [])],
    )


def environment(order: Order) -> list[EnvVar]:
    """The key by reference, and what those who load models need."""
    return [by_reference(order, "LLMCTL_API_KEY", SECRET_KEY), *loading_environment(order)]


def loading_environment(order: Order) -> list[EnvVar]:
    """The hub's token where the Secret has one, and folders that can be written."""
    token = (
        [by_reference(order, "HF_TOKEN", HUB_KEY, optional=True)]
        if from_hub(order.plan.recipe)
        else []
    )
    return token + [EnvVar(name=name, value=value) for name, value in FOLDERS.items()]


def by_reference(order: Order, variable: str, key: str, *, optional: bool | None = None) -> EnvVar:
    """A variable whose value lies in the deployment's Secret."""
    wanted = SecretKey(name=order.name, key=key, optional=optional)
    return EnvVar(name=variable, value_from=ValueFrom(secret_key_ref=wanted))


def resources(order: Order) -> Resources:
    """CPU and memory are asked for. CPU is not limited, since throttled workers would take other
    times.
    """
    recipe = order.plan.recipe
    most = {"memory": f"{memory_limit_mib(order).value}Mi"}
    asked = {"cpu": str(cpus(recipe).value), "memory": f"{memory_mib(order).value}Mi"}
    devices = {GPU: str(gpus(recipe).value)} if gpus(recipe).value else {}
    return Resources(requests=asked | devices, limits=most | devices)


PLAN_MOUNT = VolumeMount(name="plan", mount_path=PLAN_FOLDER, read_only=True)
MODELS_MOUNT = VolumeMount(name="models", mount_path=FOLDERS["HF_HOME"])
TMP_MOUNT = VolumeMount(name="tmp", mount_path=FOLDERS["HOME"])


def mounts() -> list[VolumeMount]:
    """Everything that is written lies in a volume: the root is read-only."""
    return [PLAN_MOUNT, MODELS_MOUNT, TMP_MOUNT]


def volumes(order: Order) -> list[Volume]:
    """The plan, the models' cache (a claim where one was named), and room for temporary files."""
    plan = Volume(name="plan", config_map=ConfigMapVolume(name=f"{order.name}-plan"))
    return [plan, models_volume(order, order.plan.kinds[0]), TMP]


def models_volume(order: Order, kind: Kind) -> Volume:
    """The models' cache: a claim where one was named, else empty in each new pod, with room for the
    kind's model.
    """
    claim = order.options.model_claim
    if claim:
        return Volume(name="models", persistent_volume_claim=Claim(claim_name=claim))
    size = models_gib([kind])
    return Volume(
        name="models",
        empty_dir=EmptyDir(size_limit=f"{size.value if size else UNKNOWN_MODELS_GIB}Gi"),
    )


def tolerations(recipe: Recipe) -> list[Toleration] | None:
    """GPU nodes are often tainted, so that nothing else lands there."""
    return [Toleration(key=GPU)] if gpus(recipe).value else None


def on_products(order: Order, kind: Kind, *, required: bool = False) -> Affinity:
    """Nodes with a GPU of the kind's products: preferred, or needed where it is `required` or the
    option names them.
    """
    requirement = NodeRequirement(key=LABEL, values=products(order, kind).value)
    if required or order.options.gpu_products:
        return Affinity(node_affinity=NodeAffinity(required=NodeSelector.of(requirement)))
    preference = NodeTerm(match_expressions=[requirement])
    return Affinity(
        node_affinity=NodeAffinity(preferred=[PreferredNode(weight=100, preference=preference)])
    )


DASHBOARD = "dashboard.json"
CLAIM_FILE = "models-claim.yaml"
DASHBOARD_LABEL = {
    "grafana_dashboard": "1"
}  # what the sidecar of Grafana's Helm chart looks for by default


def metadata(order: Order, name: str = "") -> Metadata:
    """Of an object; called as the deployment is, unless it has another `name`."""
    return Metadata(
        name=name or order.name, namespace=order.options.namespace, labels=labels(order)
    )


def digests(order: Order) -> dict[str, str]:
    """Annotations that say what an object was made from."""
    found = {f"llmctl.io/{role}-sha256": digest for role, digest in order.stamp().items()}
    return found | {"llmctl.io/model": order.plan.recipe.model.source}


def selector(order: Order) -> Selector:
    """The pods that callers talk to."""
    return Selector(match_labels={"app.kubernetes.io/name": order.name})


def pod_metadata(order: Order, **more: str) -> PodMetadata:
    """Of those pods, with `more` annotations."""
    return PodMetadata(labels=labels(order), annotations=digests(order) | more)


def service(order: Order) -> Service:
    """One address for those pods."""
    return Service(
        metadata=metadata(order),
        spec=ServiceSpec(
            selector={"app.kubernetes.io/name": order.name},
            ports=[ServicePort(name="http", port=PORT, target_port="http")],
        ),
    )


def claim_files(order: Order, pods: Reckoned[int]) -> dict[str, str]:
    """models-claim.yaml where a claim was named and its size is known.

    It is in no kustomization, so that deleting the deployment leaves the models. `pods` may mount
    it at once.
    """
    size = models_gib(order.plan.kinds)
    if not order.options.model_claim or size is None:
        return {}
    claim = PersistentVolumeClaim(
        metadata=metadata(order, order.options.model_claim),
        spec=ClaimSpec(
            access_modes=["ReadWriteMany" if pods.value > 1 else "ReadWriteOnce"],
            resources=ClaimResources(requests={"storage": f"{size.value}Gi"}),
        ),
    )
    return {CLAIM_FILE: dump_yaml([claim], order.comment())}


def models_told(order: Order, pods: Reckoned[int]) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about the models' volume, and about the hub's token."""
    claim, size = order.options.model_claim, models_gib(order.plan.kinds)
    if not claim:
        held = f"emptyDir, at most {size.value if size else UNKNOWN_MODELS_GIB} GiB"
        why = f"{size.source if size else 'a bound: no size is known (model.weight_bytes)'}; each"
        lines = [
            ExplainedValue(
                "volume models",
                held,
                f"{why} new pod downloads the model: --model-claim NAME keeps it",
            )
        ]
    elif size is None:
        lines = [
            ExplainedValue(
                "volume models",
                claim,
                "--model-claim; no size is known (model.weight_bytes): make it yourself",
            )
        ]
    elif pods.value > 1:
        many = f"{pods.source}: needs a storage class that several nodes mount at once"
        lines = [ExplainedValue(f"{CLAIM_FILE}: accessModes", "ReadWriteMany", many)]
    else:
        lines = [
            ExplainedValue(
                f"{CLAIM_FILE}: accessModes", "ReadWriteOnce", f"{pods.source}: one node mounts it"
            )
        ]
    if claim and size:
        lines.append(told(f"{CLAIM_FILE}: storage", size, f"{size.value} GiB"))
    if from_hub(order.plan.recipe):
        where = f"Secret {order.name}, key {HUB_KEY}"
        lines.append(
            ExplainedValue(
                "HF_TOKEN",
                where,
                "optional: the hub asks for it where a model is gated; in no file here",
            )
        )
    return lines


def preparation(order: Order, *keys: str) -> str:
    """The commands that make what the deployment needs and no file holds: its Secret, with random
    `keys`; the claim.

    For bash. No secret stands in a command: they are read from files, the hub's token from where
    `hf auth login` left it.
    """
    namespace = order.options.namespace
    random = "<(openssl rand -hex 32 | tr -d '\\n')"
    words = [f"kubectl -n {namespace} create secret generic {order.name}"]
    words += [f"--from-file={key}={random}" for key in (SECRET_KEY, *keys)]
    lines = []
    if from_hub(order.plan.recipe):
        words.append(f"--from-file={HUB_KEY}=$HOME/.cache/huggingface/token")
        lines.append(
            f"# {HUB_KEY} is for gated models, as meta-llama's are: accept the licence, then hf auth login."
        )
        lines.append("# Without it, end the command one line earlier.")
    lines.append(" \\\n  ".join(words))
    if order.options.model_claim and models_gib(order.plan.kinds):
        lines.append(
            f"kubectl apply -f {CLAIM_FILE}    # once, if there is no such claim; deleting the rest leaves it"
        )
    return "\n".join(lines)


def plan_map(order: Order, *files: str) -> ConfigMapGenerator:
    """The plan, and what lies beside it in the pod; named after the content, so that another one
    rolls the pods.
    """
    return ConfigMapGenerator(name=f"{order.name}-plan", files=["plan.json", *files])


def dashboard_map(order: Order) -> ConfigMapGenerator:
    """The Grafana dashboard where Grafana's sidecar finds it."""
    options = GeneratorOptions(
        labels=DASHBOARD_LABEL | labels(order), disable_name_suffix_hash=True
    )
    return ConfigMapGenerator(name=f"{order.name}-dashboard", files=[DASHBOARD], options=options)
