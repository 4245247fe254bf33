"""Strict models of operators' kinds: Prometheus' monitors and rules, KEDA's scaling, a RayCluster.

Kubernetes ships no schema of these. The models follow the operators' own documentation:
prometheus-operator's API reference, monitoring.coreos.com/v1; KEDA 2.x, `ScaledObject` and the
prometheus scaler; ray.io/v1 of KubeRay 1.7 (helm-chart/kuberay-operator/crds/
ray.io_rayclusters.yaml). Tests check the rendered objects against these schemas. KubeRay 1.6 is
the first version with `authOptions.secretName` and `upgradeStrategy`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from toolkit.deploy.manifests import (
    Count,
    DnsName,
    KubernetesObject,
    PodTemplate,
    Selector,
    StrictObject,
    TypedSecretKey,
)


class MetricsEndpoint(StrictObject):
    port: str
    path: str
    interval: str
    authorization: TypedSecretKey | None = None


class PodMonitorSpec(StrictObject):
    selector: Selector
    pod_metrics_endpoints: list[MetricsEndpoint]


class PodMonitor(KubernetesObject):
    api_version: Literal["monitoring.coreos.com/v1"] = "monitoring.coreos.com/v1"
    kind: Literal["PodMonitor"] = "PodMonitor"
    spec: PodMonitorSpec


class AlertRule(StrictObject):
    """An alert; `for_` is `for` in the file."""

    alert: str
    expr: str
    for_: str
    labels: dict[str, str]
    annotations: dict[str, str]

    # `for` is a keyword of Python.
    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))


class RuleGroup(StrictObject):
    name: str
    rules: list[AlertRule]


class RulesFile(StrictObject):
    """A rules file of Prometheus, and the spec of a PrometheusRule."""

    groups: list[RuleGroup]


class PrometheusRule(KubernetesObject):
    api_version: Literal["monitoring.coreos.com/v1"] = "monitoring.coreos.com/v1"
    kind: Literal["PrometheusRule"] = "PrometheusRule"
    spec: RulesFile


class ScaleTarget(StrictObject):
    """By default a Deployment."""

    kind: Literal["StatefulSet"] | None = None
    name: DnsName


class PrometheusQuery(StrictObject):
    """The metadata of the prometheus scaler; KEDA takes all values as text."""

    server_address: str
    query: str
    threshold: str


class Trigger(StrictObject):
    type: Literal["prometheus"] = "prometheus"
    metric_type: Literal["AverageValue"] = "AverageValue"
    metadata: PrometheusQuery


class ScaledObjectSpec(StrictObject):
    scale_target_ref: ScaleTarget
    polling_interval: Count
    cooldown_period: Count
    min_replica_count: Count
    max_replica_count: Count
    triggers: list[Trigger]


class ScaledObject(KubernetesObject):
    api_version: Literal["keda.sh/v1alpha1"] = "keda.sh/v1alpha1"
    kind: Literal["ScaledObject"] = "ScaledObject"
    spec: ScaledObjectSpec


StartParams = dict[str, str]  # options of `ray start` without their dashes


class AuthOptions(StrictObject):
    """Every connection to Ray needs the token in the Secret's key `auth_token`."""

    mode: Literal["token"] = "token"
    secret_name: DnsName


class UpgradeStrategy(StrictObject):
    """Recreates all pods for a changed template. By default, only newly made pods get it."""

    type: Literal["Recreate"] = "Recreate"


class HeadGroup(StrictObject):
    ray_start_params: StartParams
    template: PodTemplate


class WorkerGroup(StrictObject):
    group_name: DnsName
    replicas: Count
    min_replicas: Count
    max_replicas: Count
    # labels of Ray's nodes; KubeRay refuses them among the parameters
    labels: dict[str, str] | None = None
    ray_start_params: StartParams
    template: PodTemplate


class RayClusterSpec(StrictObject):
    ray_version: str
    auth_options: AuthOptions
    upgrade_strategy: UpgradeStrategy = UpgradeStrategy()
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class RayCluster(KubernetesObject):
    api_version: Literal["ray.io/v1"] = "ray.io/v1"
    kind: Literal["RayCluster"] = "RayCluster"
    spec: RayClusterSpec


Scorer = Literal["prefix-cache-scorer", "queue-scorer", "kv-cache-utilization-scorer"]


class EndpointPlugin(StrictObject):
    type: Scorer | Literal["max-score-picker", "single-profile-handler"]
    parameters: dict[str, int] | None = None


class WeightedPlugin(StrictObject):
    plugin_ref: str
    weight: float | None = None


class SchedulingProfile(StrictObject):
    name: DnsName
    plugins: list[WeightedPlugin]


class EndpointPickerConfig(StrictObject):
    """What the endpoint picker of a Gateway reads when it starts: no object of the cluster."""

    api_version: Literal["inference.networking.x-k8s.io/v1alpha1"] = (
        "inference.networking.x-k8s.io/v1alpha1"
    )
    kind: Literal["EndpointPickerConfig"] = "EndpointPickerConfig"
    plugins: list[EndpointPlugin]
    scheduling_profiles: list[SchedulingProfile]
