"""Kinds of operators that a cluster may have: Prometheus' monitors and rules, KEDA's autoscaling.

No schema of these ships with Kubernetes: the models here are the schema, after the operators' own documentation
(prometheus-operator API reference, monitoring.coreos.com/v1; KEDA 2.x, `ScaledObject` and the prometheus scaler).
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict

from toolkit.deploy.kinds.base import Count, DnsName, Kind, Metadata, Selector, TypedSecretKey


class MetricsEndpoint(Kind):
    port: str
    path: str
    interval: str
    authorization: TypedSecretKey


class PodMonitorSpec(Kind):
    selector: Selector
    pod_metrics_endpoints: list[MetricsEndpoint]


class PodMonitor(Kind):
    api_version: Literal["monitoring.coreos.com/v1"] = "monitoring.coreos.com/v1"
    kind: Literal["PodMonitor"] = "PodMonitor"
    metadata: Metadata
    spec: PodMonitorSpec


class Rule(Kind):
    """An alert; `for_` is `for` in the file."""

    alert: str
    expr: str
    for_: str
    labels: dict[str, str]
    annotations: dict[str, str]

    model_config = ConfigDict(alias_generator=lambda name: name.rstrip("_"))  # `for` is a keyword here


class RuleGroup(Kind):
    name: str
    rules: list[Rule]


class RulesFile(Kind):
    """What Prometheus itself reads, and the spec of a PrometheusRule."""

    groups: list[RuleGroup]


class PrometheusRule(Kind):
    api_version: Literal["monitoring.coreos.com/v1"] = "monitoring.coreos.com/v1"
    kind: Literal["PrometheusRule"] = "PrometheusRule"
    metadata: Metadata
    spec: RulesFile


class ScaleTarget(Kind):
    name: DnsName


class PrometheusQuery(Kind):
    """The prometheus scaler's metadata; KEDA wants all of it as text."""

    server_address: str
    query: str
    threshold: str


class Trigger(Kind):
    type: Literal["prometheus"] = "prometheus"
    metric_type: Literal["AverageValue"] = "AverageValue"
    metadata: PrometheusQuery


class ScaledObjectSpec(Kind):
    scale_target_ref: ScaleTarget
    polling_interval: Count
    cooldown_period: Count
    min_replica_count: Count
    max_replica_count: Count
    triggers: list[Trigger]


class ScaledObject(Kind):
    api_version: Literal["keda.sh/v1alpha1"] = "keda.sh/v1alpha1"
    kind: Literal["ScaledObject"] = "ScaledObject"
    metadata: Metadata
    spec: ScaledObjectSpec
