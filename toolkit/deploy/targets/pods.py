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
from toolkit.deploy.order import Order
from toolkit.deploy.reckon import cpus, drain_s, from_hub, gpus, grace_s, memory_mib, startup_s
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe

PORT = 8000
FORWARDED = f"http://127.0.0.1:{PORT}"  # with kubectl port-forward
PROBE_S = 10
GPU = "nvidia.com/gpu"
SECRET_KEY = "api-key"
PLAN_FOLDER = "/etc/llmctl"
TMP = Volume(name="tmp", empty_dir=EmptyDir())
HTTP = ContainerPort(name="http", container_port=PORT)
FOLDERS = {"HOME": "/tmp", "HF_HOME": "/models", "NUMBA_CACHE_DIR": "/tmp/numba"}


def _probe(path: str, period_s: int, failures: int) -> Probe:
    get = HttpGet(path=path, port="http")
    return Probe(http_get=get, period_seconds=period_s, timeout_seconds=3, failure_threshold=failures)


STARTED = _probe("/ready", 5, startup_s().value // 5)
READY = _probe("/ready", 5, 3)
ALIVE = _probe("/health", PROBE_S, 3)


def labels(order: Order) -> dict[str, str]:
    """What all objects of a deployment wear."""
    return {"app.kubernetes.io/name": order.name, "app.kubernetes.io/managed-by": "llmctl"}


def pod(order: Order, notice_s: int) -> PodSpec:
    """The pod; `notice_s` is how long it takes requests still after SIGTERM."""
    return PodSpec(
        termination_grace_period_seconds=grace_s(drain_s(order), notice_s).value,
        affinity=preferred_gpu(order.plan.fit) if gpus(order.plan.recipe).value else None,
        tolerations=tolerations(order.plan.recipe),
        containers=[_container(order, notice_s)],
        volumes=volumes(order),
    )


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
        startup_probe=STARTED,
        readiness_probe=READY,
        liveness_probe=ALIVE,
        volume_mounts=mounts(),
    )


def environment(order: Order) -> list[EnvVar]:
    """The key by reference, and what those who load models need."""
    return [by_reference(order, "LLMCTL_API_KEY", SECRET_KEY), *loading_environment(order)]


def loading_environment(order: Order) -> list[EnvVar]:
    """The hub's token where the Secret has one, and folders that can be written."""
    token = [by_reference(order, "HF_TOKEN", "hf-token", optional=True)] if from_hub(order.plan.recipe) else []
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
    return [plan, models_volume(order), TMP]


def models_volume(order: Order) -> Volume:
    """The models' cache: a claim where one was named, else empty at each start."""
    claim = order.options.model_claim
    if claim:
        return Volume(name="models", persistent_volume_claim=Claim(claim_name=claim))
    return Volume(name="models", empty_dir=EmptyDir())


def tolerations(recipe: Recipe) -> list[Toleration] | None:
    """GPU nodes are often tainted, so that nothing else lands there."""
    return [Toleration(key=GPU)] if gpus(recipe).value else None


def measured_gpu(fit: Fit) -> NodeRequirement:
    """Nodes with the GPU that was measured, as NVIDIA's feature discovery labels them."""
    return NodeRequirement(key="nvidia.com/gpu.product", values=[fit.engine.device.replace(" ", "-")])


def preferred_gpu(fit: Fit) -> Affinity:
    """Nodes with the GPU that was measured are preferred."""
    preference = NodeTerm(match_expressions=[measured_gpu(fit)])
    return Affinity(node_affinity=NodeAffinity(preferred=[PreferredNode(weight=100, preference=preference)]))
