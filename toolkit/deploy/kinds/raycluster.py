"""KubeRay's RayCluster, as far as we emit it: the models here are strict, and the CRD's own schema is held in tests.

After ray.io/v1 of KubeRay 1.7 (helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml); 1.6 is the first with
`authOptions.secretName` and `upgradeStrategy`.
"""

from __future__ import annotations

from typing import Literal

from toolkit.deploy.kinds.base import Count, DnsName, Kind, Metadata
from toolkit.deploy.kinds.kubernetes import PodTemplate

StartParams = dict[str, str]  # options of `ray start` without their dashes


class AuthOptions(Kind):
    """Every connection to Ray shows the token that lies in the Secret under `auth_token`."""

    mode: Literal["token"] = "token"
    secret_name: DnsName


class UpgradeStrategy(Kind):
    """Without this, a changed pod template reaches only pods that are replaced for other reasons."""

    type: Literal["Recreate"] = "Recreate"


class HeadGroup(Kind):
    ray_start_params: StartParams
    template: PodTemplate


class WorkerGroup(Kind):
    group_name: DnsName
    replicas: Count
    min_replicas: Count
    max_replicas: Count
    labels: dict[str, str] | None = None  # of Ray's nodes; KubeRay refuses them among the parameters
    ray_start_params: StartParams
    template: PodTemplate


class RayClusterSpec(Kind):
    ray_version: str
    auth_options: AuthOptions
    upgrade_strategy: UpgradeStrategy = UpgradeStrategy()
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayCluster(Kind):
    api_version: Literal["ray.io/v1"] = "ray.io/v1"
    kind: Literal["RayCluster"] = "RayCluster"
    metadata: Metadata
    spec: RayClusterSpec
