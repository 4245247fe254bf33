"""Strict models of the kinds of operators and of kustomize, of which Kubernetes ships no schema,
and the check of a rendered object.

They follow the operators' own documentation: prometheus-operator's API reference,
monitoring.coreos.com/v1; KEDA 2.x, `ScaledObject` and the prometheus scaler.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import kubernetes_validate
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
# A label of RFC 1035, as the names of Services must be.
DnsName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]
Count = Annotated[int, Field(ge=0)]


class StrictObject(BaseModel):
    """A model that refuses unknown keys. Its keys are camelCase in the file."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        populate_by_name=True,
    )


class Metadata(StrictObject):
    """The metadata of an object."""

    name: DnsName
    namespace: DnsName | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class KubernetesObject(StrictObject):
    """An object of the cluster."""

    api_version: str
    kind: str
    metadata: Metadata


class Selector(StrictObject):
    """metav1.LabelSelector with labels only."""

    match_labels: dict[str, str]


class SecretKey(StrictObject):
    """A reference to a key of a Secret."""

    name: DnsName
    key: str
    optional: bool | None = None


class TypedSecretKey(StrictObject):
    """SafeAuthorization of Prometheus' operator: a bearer token in a Secret."""

    type: Literal["Bearer"] = "Bearer"
    credentials: SecretKey


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


class Fallback(StrictObject):
    """`behavior`: of KEDA 2.17 or newer."""

    failure_threshold: Count
    replicas: Count
    behavior: Literal[
        "static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"
    ]


class ScalingPolicy(StrictObject):
    type: Literal["Pods", "Percent"]
    value: Annotated[int, Field(gt=0)]
    period_seconds: Annotated[int, Field(gt=0, le=1800)]


class ScalingRules(StrictObject):
    """HPAScalingRules of autoscaling/v2, with its bounds."""

    stabilization_window_seconds: Annotated[int, Field(ge=0, le=3600)]
    policies: list[ScalingPolicy]


class Behavior(StrictObject):
    scale_up: ScalingRules
    scale_down: ScalingRules


class AutoscalerConfig(StrictObject):
    behavior: Behavior


class Advanced(StrictObject):
    horizontal_pod_autoscaler_config: AutoscalerConfig


class ScaledObjectSpec(StrictObject):
    """It has no cooldownPeriod, which KEDA uses only on the way to zero replicas."""

    scale_target_ref: ScaleTarget
    polling_interval: Count
    fallback: Fallback
    advanced: Advanced
    min_replica_count: Annotated[int, Field(gt=0)]
    max_replica_count: Count
    triggers: list[Trigger]


class ScaledObject(KubernetesObject):
    api_version: Literal["keda.sh/v1alpha1"] = "keda.sh/v1alpha1"
    kind: Literal["ScaledObject"] = "ScaledObject"
    spec: ScaledObjectSpec


class GeneratorOptions(StrictObject):
    labels: dict[str, str]
    disable_name_suffix_hash: bool


class ConfigMapGenerator(StrictObject):
    """A ConfigMap from files. Unless `options` forbid it, its name gets a hash of the content, so
    that new content rolls the pods.
    """

    name: DnsName
    files: list[str]
    options: GeneratorOptions | None = None


class PatchTarget(StrictObject):
    kind: str
    name: DnsName


class Patch(StrictObject):
    target: PatchTarget
    patch: str


class Kustomization(StrictObject):
    api_version: Literal["kustomize.config.k8s.io/v1beta1"] = "kustomize.config.k8s.io/v1beta1"
    kind: Literal["Kustomization"] = "Kustomization"
    namespace: DnsName | None = None
    resources: list[str]
    config_map_generator: list[ConfigMapGenerator] | None = None
    patches: list[Patch] | None = None


OWN_MODELS: dict[str, type[BaseModel]] = {
    "Kustomization": Kustomization,
    "PodMonitor": PodMonitor,
    "PrometheusRule": PrometheusRule,
    "ScaledObject": ScaledObject,
}


def check_object(data: dict[str, Any]) -> None:
    """What `kubernetes-validate --strict` checks; a kind that it does not know must be one of
    ours. Pods have no privileges.
    """
    try:
        kubernetes_validate.validate(data, "1.37", strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        read = OWN_MODELS[data["kind"]].model_validate(data)
        assert read.model_dump(by_alias=True, exclude_none=True) == data
    if "template" in data.get("spec", {}):
        check_pod(data["spec"]["template"])


def check_pod(template: dict[str, Any]) -> None:
    """The template of a pod: as Kubernetes knows it, and without privileges."""
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
    kubernetes_validate.validate(whole | {"template": template}, "1.37", strict=True)
    pod = template["spec"]
    assert pod["securityContext"] == POD_SECURITY
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"] == CONTAINER_SECURITY
        assert container["imagePullPolicy"] == "IfNotPresent"
