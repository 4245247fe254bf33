"""The pod that serves a plan: for a Deployment, and for whoever else runs pods."""

from __future__ import annotations

from toolkit.deploy.images import llmctl_image
from toolkit.deploy.kinds.base import SecretKey
from toolkit.deploy.kinds.pods import (
    Affinity,
    Claim,
    ConfigMapVolume,
    Container,
    ContainerPort,
    EmptyDir,
    EnvVar,
    HttpGet,
    NodeAffinity,
    NodeRequirement,
    NodeSelector,
    NodeTerm,
    PodSpec,
    PreferredNode,
    Probe,
    Resources,
    Toleration,
    ValueFrom,
    Volume,
    VolumeMount,
)
from toolkit.deploy.order import Order, Told, told
from toolkit.deploy.products import LABEL, products
from toolkit.deploy.reckon import cpus, drain_s, from_hub, gpus, grace_s, memory_mib, models_gib, startup_s
from toolkit.files.plan import Kind
from toolkit.files.recipe import Recipe

PORT = 8000
FORWARDED = f"http://127.0.0.1:{PORT}"  # with kubectl port-forward
PROBE_S = 10
GPU = "nvidia.com/gpu"
SECRET_KEY = "api-key"
HUB_KEY = "hf-token"
PLAN_FOLDER = "/etc/llmctl"
TMP = Volume(name="tmp", empty_dir=EmptyDir())
SHARED = Volume(name="shm", empty_dir=EmptyDir(medium="Memory", size_limit="1Gi"))
SHARED_MOUNT = VolumeMount(name="shm", mount_path="/dev/shm")
HTTP = ContainerPort(name="http", container_port=PORT)
FOLDERS = {"HOME": "/tmp", "HF_HOME": "/models", "NUMBA_CACHE_DIR": "/tmp/numba"}


def _probe(path: str, period_s: int, failures: int) -> Probe:
    get = HttpGet(path=path, port="http")
    return Probe(http_get=get, period_seconds=period_s, timeout_seconds=3, failure_threshold=failures)


READY = _probe("/ready", 5, 3)
# A front that does not answer hears no SIGTERM either: waiting for its drain would only cost time.
ALIVE = _probe("/health", PROBE_S, 3).model_copy(update={"termination_grace_period_seconds": PROBE_S})


def started(order: Order) -> Probe:
    """Until the first /ready the other probes rest; a load that never ends is ended here."""
    return _probe("/ready", 5, startup_s(order).value // 5)


def probes_told(order: Order, whose: str = "") -> list[Told]:
    """The lines of EXPLAIN.md about the probes; `whose` stands before each key."""
    startup = startup_s(order)
    away = "503 while no worker is loaded and alive, and once the end is announced: then new requests go elsewhere"
    alive = "the front answers seconds after its start, so 30 s of silence are a hang; workers are not its affair: the "
    alive += "server loads lost ones again, keeps their requests, and ends by itself where it cannot"
    return [
        told(f"{whose}startupProbe on /ready", startup, f"{startup.value} s"),
        Told(f"{whose}readinessProbe on /ready", "3 x 5 s", away),
        Told(f"{whose}livenessProbe on /health", f"3 x {PROBE_S} s", alive),
        Told(f"{whose}livenessProbe grace", f"{PROBE_S} s", "a front that does not answer does not drain either"),
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
    """Whether processes of one worker exchange tensors: NCCL asks for more than the 64 MB of a pod's /dev/shm."""
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
    token = [by_reference(order, "HF_TOKEN", HUB_KEY, optional=True)] if from_hub(order.plan.recipe) else []
    return token + [EnvVar(name=name, value=value) for name, value in FOLDERS.items()]


def by_reference(order: Order, variable: str, key: str, *, optional: bool | None = None) -> EnvVar:
    """A variable whose value lies in the deployment's Secret."""
    wanted = SecretKey(name=order.name, key=key, optional=optional)
    return EnvVar(name=variable, value_from=ValueFrom(secret_key_ref=wanted))


def resources(order: Order) -> Resources:
    """CPU and memory are asked for; only GPUs are limited, since throttled workers would take other times."""
    recipe = order.plan.recipe
    asked = {"cpu": str(cpus(recipe).value), "memory": f"{memory_mib(order).value}Mi"}
    devices = {GPU: str(gpus(recipe).value)} if gpus(recipe).value else {}
    return Resources(requests=asked | devices, limits=devices)


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
    """The models' cache: a claim where one was named, else empty in each new pod, with room for the kind's model."""
    claim = order.options.model_claim
    if claim:
        return Volume(name="models", persistent_volume_claim=Claim(claim_name=claim))
    size = models_gib([kind])
    return Volume(name="models", empty_dir=EmptyDir(size_limit=f"{size.value}Gi" if size else None))


def tolerations(recipe: Recipe) -> list[Toleration] | None:
    """GPU nodes are often tainted, so that nothing else lands there."""
    return [Toleration(key=GPU)] if gpus(recipe).value else None


def on_products(order: Order, kind: Kind, *, required: bool = False) -> Affinity:
    """Nodes with a GPU of the kind's products: preferred, or needed where it is `required` or the option names them."""
    requirement = NodeRequirement(key=LABEL, values=products(order, kind).value)
    if required or order.options.gpu_products:
        return Affinity(node_affinity=NodeAffinity(required=NodeSelector.of(requirement)))
    preference = NodeTerm(match_expressions=[requirement])
    return Affinity(node_affinity=NodeAffinity(preferred=[PreferredNode(weight=100, preference=preference)]))
