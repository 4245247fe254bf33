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

PORT = 8000
PROBE_S = 10
GPU = "nvidia.com/gpu"
SECRET_KEY = "api-key"


def labels(order: Order) -> dict[str, str]:
    """What all objects of a deployment wear."""
    return {"app.kubernetes.io/name": order.name, "app.kubernetes.io/managed-by": "llmctl"}


def pod(order: Order, notice_s: int) -> PodSpec:
    """The pod; `notice_s` is how long it takes requests still after SIGTERM."""
    on_gpus = gpus(order.plan.recipe).value > 0
    return PodSpec(
        termination_grace_period_seconds=grace_s(drain_s(order), notice_s).value,
        affinity=affinity(order) if on_gpus else None,
        tolerations=[Toleration(key=GPU)] if on_gpus else None,
        containers=[_container(order, notice_s)],
        volumes=volumes(order),
    )


def _container(order: Order, notice_s: int) -> Container:
    args = ["serve", "/etc/llmctl/plan.json", "--host", "0.0.0.0", "--port", str(PORT)]
    args += ["--shutdown-notice", str(notice_s), "--shutdown-timeout", str(drain_s(order).value)]
    return Container(
        name="llmctl",
        image=llmctl_image(order).value,
        command=["llmctl"],
        args=args,
        ports=[ContainerPort(name="http", container_port=PORT)],
        env=environment(order),
        resources=resources(order),
        startup_probe=_probe("/ready", 5, startup_s().value // 5),
        readiness_probe=_probe("/ready", 5, 3),
        liveness_probe=_probe("/health", PROBE_S, 3),
        volume_mounts=mounts(),
    )


def environment(order: Order) -> list[EnvVar]:
    """The key by reference, the hub's token where the Secret has one, and folders that can be written."""
    secrets = {"LLMCTL_API_KEY": SecretKey(name=order.name, key=SECRET_KEY)}
    if from_hub(order.plan.recipe):
        secrets["HF_TOKEN"] = SecretKey(name=order.name, key="hf-token", optional=True)
    folders = {"HOME": "/tmp", "HF_HOME": "/models", "NUMBA_CACHE_DIR": "/tmp/numba"}
    referred = [EnvVar(name=name, value_from=ValueFrom(secret_key_ref=key)) for name, key in secrets.items()]
    return referred + [EnvVar(name=name, value=value) for name, value in folders.items()]


def resources(order: Order) -> Resources:
    """CPU and memory are asked for; only GPUs are limited, since throttled workers would take other times."""
    recipe = order.plan.recipe
    asked = {"cpu": str(cpus(recipe).value), "memory": f"{memory_mib(order).value}Mi"}
    devices = {GPU: str(gpus(recipe).value)} if gpus(recipe).value else {}
    return Resources(requests=asked | devices, limits=devices)


def mounts() -> list[VolumeMount]:
    """Everything that is written lies in a volume: the root is read-only."""
    return [
        VolumeMount(name="plan", mount_path="/etc/llmctl", read_only=True),
        VolumeMount(name="models", mount_path="/models"),
        VolumeMount(name="tmp", mount_path="/tmp"),
    ]


def volumes(order: Order) -> list[Volume]:
    """The plan, the models' cache (a claim where one was named), and room for temporary files."""
    claim = order.options.model_claim
    cache = (
        Volume(name="models", persistent_volume_claim=Claim(claim_name=claim))
        if claim
        else Volume(name="models", empty_dir=EmptyDir())
    )
    plan = Volume(name="plan", config_map=ConfigMapVolume(name=f"{order.name}-plan"))
    return [plan, cache, Volume(name="tmp", empty_dir=EmptyDir())]


def affinity(order: Order) -> Affinity:
    """Nodes with the GPU that was measured are preferred; NVIDIA's feature discovery labels them so."""
    product = order.plan.fit.engine.device.replace(" ", "-")
    wanted = NodeRequirement(key="nvidia.com/gpu.product", values=[product])
    return Affinity(
        node_affinity=NodeAffinity(
            preferred=[PreferredNode(weight=100, preference=NodeTerm(match_expressions=[wanted]))]
        )
    )


def _probe(path: str, period_s: int, failures: int) -> Probe:
    return Probe(
        http_get=HttpGet(path=path, port="http"), period_seconds=period_s, timeout_seconds=3, failure_threshold=failures
    )
