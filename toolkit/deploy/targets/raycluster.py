"""The RayCluster of a plan: a head that only keeps the books, and a pod for each worker (`raygroups`).

Commands, probes and the wait for the head are KubeRay's own. Nothing here changes with the plan alone: pod templates
that did would have the cluster built anew for a new plan.
"""

from __future__ import annotations

import json

from toolkit.deploy.images import llmctl_image
from toolkit.deploy.kinds.base import PodMetadata
from toolkit.deploy.kinds.kubernetes import PodTemplate
from toolkit.deploy.kinds.pods import Container, ContainerPort, EnvVar, Exec, Handler, Lifecycle, PodSpec, Resources
from toolkit.deploy.kinds.raycluster import (
    AuthOptions,
    HeadGroup,
    RayCluster,
    RayClusterSpec,
    StartParams,
    UpgradeStrategy,
)
from toolkit.deploy.order import Order, Reckoned
from toolkit.deploy.reckon import MIB, PROPAGATION_S, drain_s, grace_s
from toolkit.deploy.targets.objects import digests, metadata
from toolkit.deploy.targets.pods import FOLDERS, TMP, TMP_MOUNT
from toolkit.deploy.targets.raygroups import EXTRA, OBJECT_STORE_MIB, RAY_ENVIRONMENT, groups, worker_group

RAY = "2.60.0"  # what constraints.txt has the image install; KubeRay chooses its probes by it
GCS_PORT = 6379
TOKEN_KEY = "auth_token"  # KubeRay's name of it
HEAD_MIB = 4096  # and of the head: 610 MiB idle; what it remembers of calls and lost actors grows
HEAD_CPU = "1"
AFTER_FRONT_S = 15  # an actor's end, and a raylet's
STAYS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}


def ray_cluster(order: Order) -> RayCluster:
    """The cluster; called as the deployment is."""
    about = metadata(order)
    return RayCluster(
        metadata=about.model_copy(update={"annotations": digests(order)}),
        spec=RayClusterSpec(
            ray_version=RAY,
            auth_options=AuthOptions(secret_name=order.name),
            upgrade_strategy=UpgradeStrategy(),
            head_group_spec=HeadGroup(ray_start_params=_head_params(), template=_head(order)),
            worker_group_specs=[
                worker_group(order, group, member(order), worker_grace_s(order).value, _lingering("worker"))
                for group in groups(order)
            ],
        ),
    )


def member(order: Order) -> dict[str, str]:
    """The label of all pods of the deployment, Ray's and the front's. The name's label is the front's alone."""
    return {"app.kubernetes.io/part-of": order.name}


def ray_member(order: Order) -> dict[str, str]:
    """The label that KubeRay puts on the pods of this cluster."""
    return {"ray.io/cluster": order.name}


def worker_grace_s(order: Order) -> Reckoned[int]:
    """How long a worker's pod may wait for the front's drain."""
    front = grace_s(drain_s(order), PROPAGATION_S).value
    return Reckoned(front + AFTER_FRONT_S, f"the front's {front} + {AFTER_FRONT_S} for the actor's end")


def head_grace_s(order: Order) -> Reckoned[int]:
    """How long the head may wait for everybody else."""
    workers = worker_grace_s(order).value
    return Reckoned(workers + AFTER_FRONT_S, f"the workers' {workers} + {AFTER_FRONT_S} for their raylets' end")


def fingerprint(order: Order) -> str:
    """The cluster's spec as text: with another one the front has to start anew."""
    return json.dumps(ray_cluster(order).spec.model_dump(by_alias=True, exclude_none=True), sort_keys=True)


def _head_params() -> StartParams:
    """Nothing runs on the head; its dashboard listens on loopback, for `kubectl port-forward`."""
    return {"num-cpus": "0", "dashboard-host": "127.0.0.1", "object-store-memory": str(OBJECT_STORE_MIB * MIB)}


def _head(order: Order) -> PodTemplate:
    folders = [EnvVar(name="HOME", value=FOLDERS["HOME"]), *RAY_ENVIRONMENT]
    size = {"memory": f"{HEAD_MIB}Mi"}
    container = Container(
        name="ray-head",
        image=llmctl_image(order, EXTRA).value,
        ports=[
            ContainerPort(name="gcs-server", container_port=GCS_PORT),
            ContainerPort(name="metrics", container_port=8080),
        ],
        env=folders,
        resources=Resources(requests={"cpu": HEAD_CPU} | size, limits=size),
        lifecycle=_lingering("head", str(GCS_PORT)),
        volume_mounts=[TMP_MOUNT],
    )
    return PodTemplate(
        metadata=PodMetadata(labels=member(order), annotations=STAYS),
        spec=PodSpec(termination_grace_period_seconds=head_grace_s(order).value, containers=[container], volumes=[TMP]),
    )


def _lingering(*words: str) -> Lifecycle:
    """The hook that has a pod end after those who need it."""
    command = ["python", "-m", "toolkit.cluster.linger", *words]
    return Lifecycle(pre_stop=Handler(exec=Exec(command=command)))
