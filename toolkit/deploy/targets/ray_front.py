"""The front of a RayCluster: a Deployment of one pod that joins the cluster, gives it nothing to run on, and serves."""

from __future__ import annotations

import hashlib

from toolkit.deploy.images import llmctl_image
from toolkit.deploy.kinds.kubernetes import Deployment, DeploymentSpec, PodTemplate, Strategy
from toolkit.deploy.kinds.pods import Container, EmptyDir, EnvVar, PodSpec, Resources, Volume, VolumeMount
from toolkit.deploy.order import Order, Reckoned
from toolkit.deploy.reckon import FRONT_MIB, MIB, PROPAGATION_S, drain_s, grace_s, startup_s
from toolkit.deploy.targets.objects import metadata, pod_metadata, selector
from toolkit.deploy.targets.pods import (
    ALIVE,
    HTTP,
    PLAN_FOLDER,
    PORT,
    READY,
    by_reference,
    environment,
    mounts,
    started,
    volumes,
)
from toolkit.deploy.targets.raycluster import (
    GCS_PORT,
    STAYS,
    TOKEN_KEY,
    fingerprint,
    member,
)
from toolkit.deploy.targets.raygroups import EXTRA, NODE_MIB, OBJECT_STORE_MIB, RAY_ENVIRONMENT, worker_count
from toolkit.deploy.templating import fill

SCRIPT = "front.sh"
CPU = "2"  # the server's loop, and Ray's processes beside it


def front_script(order: Order) -> str:
    """front.sh: joins the cluster, and serves."""
    flags: list[tuple[str, object]] = [
        ("--ray", "auto"),
        *([] if order.plan.others else [("--workers", worker_count(order).value)]),
        ("--room-timeout", startup_s(order).value),
        ("--host", "0.0.0.0"),
        ("--port", PORT),
        ("--shutdown-notice", PROPAGATION_S),
        ("--shutdown-timeout", drain_s(order).value),
    ]
    return fill(
        SCRIPT,
        comment=order.comment(),
        object_store_bytes=OBJECT_STORE_MIB * MIB,
        flags=flags,
        allowances=order.allowances,
    )


def head_address(order: Order) -> str:
    """Where KubeRay's Service for the head is."""
    return f"{order.name}-head-svc.{order.options.namespace}.svc:{GCS_PORT}"


def front(order: Order) -> Deployment:
    """One front, never two: they would ask the cluster for the same room."""
    cluster = hashlib.sha256(fingerprint(order).encode()).hexdigest()
    about = pod_metadata(order, **{"llmctl.io/raycluster-sha256": cluster})
    template = PodTemplate(
        metadata=about.model_copy(
            update={"labels": about.labels | member(order), "annotations": (about.annotations or {}) | STAYS}
        ),
        spec=_pod(order),
    )
    return Deployment(
        metadata=metadata(order),
        spec=DeploymentSpec(
            replicas=1,
            progress_deadline_seconds=startup_s(order).value + 60,
            strategy=Strategy(type="Recreate"),
            selector=selector(order),
            template=template,
        ),
    )


def _pod(order: Order) -> PodSpec:
    shared = Volume(name="shm", empty_dir=EmptyDir(medium="Memory", size_limit=f"{OBJECT_STORE_MIB + 64}Mi"))
    container = Container(
        name="llmctl",
        image=llmctl_image(order, EXTRA).value,
        command=["bash", f"{PLAN_FOLDER}/{SCRIPT}"],
        ports=[HTTP],
        env=[*environment(order), *_joining(order)],
        resources=Resources(requests={"cpu": CPU, "memory": f"{front_memory().value}Mi"}, limits={}),
        startup_probe=started(order),
        readiness_probe=READY,
        liveness_probe=ALIVE,
        volume_mounts=[*mounts(), VolumeMount(name="shm", mount_path="/dev/shm")],
    )
    return PodSpec(
        termination_grace_period_seconds=grace_s(drain_s(order), PROPAGATION_S).value,
        containers=[container],
        volumes=[*volumes(order), shared],
    )


def _joining(order: Order) -> list[EnvVar]:
    return [
        EnvVar(name="RAY_ADDRESS", value=head_address(order)),
        EnvVar(name="RAY_AUTH_MODE", value="token"),
        by_reference(order, "RAY_AUTH_TOKEN", TOKEN_KEY),
        *RAY_ENVIRONMENT,
    ]


def front_memory() -> Reckoned[int]:
    """MiB that the front's pod asks for."""
    ray = f"{NODE_MIB} for its raylet, {OBJECT_STORE_MIB} for the object store"
    return Reckoned(FRONT_MIB + NODE_MIB + OBJECT_STORE_MIB, f"{FRONT_MIB} MiB for the front, {ray}")
