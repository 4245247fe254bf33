"""Kubernetes' own kinds, and kustomize's two: what `kubectl apply -k` reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolkit.deploy.kinds.base import Count, DnsName, Kind, Metadata, PodMetadata, Port, Selector
from toolkit.deploy.kinds.pods import PodSpec


class PodTemplate(Kind):
    metadata: PodMetadata
    spec: PodSpec


class RollingUpdate(Kind):
    max_surge: Count
    max_unavailable: Count


class Strategy(Kind):
    """`rolling_update` where the type is that."""

    type: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    rolling_update: RollingUpdate | None = None


class DeploymentSpec(Kind):
    replicas: Count
    revision_history_limit: Count = 5
    progress_deadline_seconds: Count
    strategy: Strategy
    selector: Selector
    template: PodTemplate


class Deployment(Kind):
    api_version: Literal["apps/v1"] = "apps/v1"
    kind: Literal["Deployment"] = "Deployment"
    metadata: Metadata
    spec: DeploymentSpec


class ServicePort(Kind):
    name: str
    port: Port
    target_port: str
    protocol: Literal["TCP"] = "TCP"


class ServiceSpec(Kind):
    type: Literal["ClusterIP"] = "ClusterIP"
    selector: dict[str, str]
    ports: list[ServicePort]


class Service(Kind):
    api_version: Literal["v1"] = "v1"
    kind: Literal["Service"] = "Service"
    metadata: Metadata
    spec: ServiceSpec


class DisruptionSpec(Kind):
    """`max_unavailable`, or, of pods that no controller of Kubernetes' own made, `min_available` as a number."""

    max_unavailable: Count | None = None
    min_available: Count | None = None
    selector: Selector
    unhealthy_pod_eviction_policy: Literal["AlwaysAllow"] = "AlwaysAllow"


class PodDisruptionBudget(Kind):
    api_version: Literal["policy/v1"] = "policy/v1"
    kind: Literal["PodDisruptionBudget"] = "PodDisruptionBudget"
    metadata: Metadata
    spec: DisruptionSpec


class AnyPods(Kind):
    """metav1.LabelSelector that may be empty: everything."""

    match_labels: dict[str, str] | None = None


class Peer(Kind):
    """Pods, and where; without `namespace_selector`, in the policy's own namespace."""

    namespace_selector: AnyPods | None = None
    pod_selector: AnyPods | None = None


class PolicyPort(Kind):
    protocol: Literal["TCP", "UDP"] = "TCP"
    port: str | Port


class Ingress(Kind):
    """Without `ports`: all."""

    sender: list[Peer] = Field(alias="from")
    ports: list[PolicyPort] | None = None


class Egress(Kind):
    """Without `to`: anywhere; without `ports`: all."""

    to: list[Peer] | None = None
    ports: list[PolicyPort] | None = None


class NetworkPolicySpec(Kind):
    pod_selector: Selector
    policy_types: list[Literal["Ingress", "Egress"]] = Field(default=["Ingress", "Egress"])
    ingress: list[Ingress]
    egress: list[Egress]


class NetworkPolicy(Kind):
    api_version: Literal["networking.k8s.io/v1"] = "networking.k8s.io/v1"
    kind: Literal["NetworkPolicy"] = "NetworkPolicy"
    metadata: Metadata
    spec: NetworkPolicySpec


class ClaimResources(Kind):
    requests: dict[str, str]


class ClaimSpec(Kind):
    """Of the cluster's default storage class."""

    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany"]]
    resources: ClaimResources


class PersistentVolumeClaim(Kind):
    api_version: Literal["v1"] = "v1"
    kind: Literal["PersistentVolumeClaim"] = "PersistentVolumeClaim"
    metadata: Metadata
    spec: ClaimSpec


class GeneratorOptions(Kind):
    labels: dict[str, str]
    disable_name_suffix_hash: bool


class ConfigMapGenerator(Kind):
    """A ConfigMap from files; its name gets their hash, so that new content rolls the pods, unless `options` forbid."""

    name: DnsName
    files: list[str]
    options: GeneratorOptions | None = None


class PatchTarget(Kind):
    kind: str
    name: DnsName


class Patch(Kind):
    target: PatchTarget
    patch: str


class Kustomization(Kind):
    api_version: Literal["kustomize.config.k8s.io/v1beta1"] = "kustomize.config.k8s.io/v1beta1"
    kind: Literal["Kustomization"] = "Kustomization"
    namespace: DnsName | None = None
    resources: list[str]
    config_map_generator: list[ConfigMapGenerator] | None = None
    patches: list[Patch] | None = None
