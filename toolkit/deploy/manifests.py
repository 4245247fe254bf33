"""Strict models of the objects that Kubernetes and kustomize read.

First what all kinds share, then the pod (one container without privileges, three probes, a plan
from a ConfigMap, a key from a Secret), then Kubernetes' other objects and kustomize's two, which
`kubectl apply -k` reads. Kinds of operators are in `toolkit.deploy.operators`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


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


# A label of RFC 1035, as the names of Services must be.
DnsName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0)]
Image = Annotated[str, Field(pattern=r"^[a-z0-9][a-zA-Z0-9._/:@-]{0,254}$")]


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


class PodMetadata(StrictObject):
    """The metadata of a pod template."""

    labels: dict[str, str]
    annotations: dict[str, str] | None = None


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


class ValueFrom(StrictObject):
    secret_key_ref: SecretKey


class EnvVar(StrictObject):
    """`value` or `value_from`."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class ContainerPort(StrictObject):
    name: str
    container_port: Port
    protocol: Literal["TCP"] = "TCP"


class HttpGet(StrictObject):
    path: str
    port: str


class Exec(StrictObject):
    command: list[str]


class Probe(StrictObject):
    """It asks a path, or runs a command in the container."""

    http_get: HttpGet | None = None
    exec: Exec | None = None
    period_seconds: Count
    timeout_seconds: Count
    failure_threshold: Count
    termination_grace_period_seconds: Count | None = None


class Handler(StrictObject):
    exec: Exec


class Lifecycle(StrictObject):
    """The hook that runs, within the grace period, before a container gets SIGTERM."""

    pre_stop: Handler


class Resources(StrictObject):
    requests: dict[str, str]
    limits: dict[str, str]


class Capabilities(StrictObject):
    drop: list[Literal["ALL"]] = Field(default=["ALL"])


class ContainerSecurity(StrictObject):
    allow_privilege_escalation: Literal[False] = False
    read_only_root_filesystem: Literal[True] = True
    capabilities: Capabilities = Capabilities()


class SeccompProfile(StrictObject):
    type: Literal["RuntimeDefault"] = "RuntimeDefault"


class PodSecurity(StrictObject):
    """`fs_group` lets the pod's user write to volumes."""

    run_as_non_root: Literal[True] = True
    run_as_user: Count = 10001
    run_as_group: Count = 10001
    fs_group: Count = 10001
    seccomp_profile: SeccompProfile = SeccompProfile()


class VolumeMount(StrictObject):
    name: DnsName
    mount_path: str
    read_only: bool | None = None


class ConfigMapVolume(StrictObject):
    name: DnsName


class EmptyDir(StrictObject):
    medium: Literal["Memory"] | None = None
    size_limit: str


class Claim(StrictObject):
    claim_name: str


class Volume(StrictObject):
    """One of its sources."""

    name: DnsName
    config_map: ConfigMapVolume | None = None
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None


class Toleration(StrictObject):
    key: str
    operator: Literal["Exists"] = "Exists"
    effect: Literal["NoSchedule"] = "NoSchedule"


class NodeRequirement(StrictObject):
    key: str
    operator: Literal["In"] = "In"
    values: list[str]


class NodeTerm(StrictObject):
    match_expressions: list[NodeRequirement]


class PreferredNode(StrictObject):
    weight: Count
    preference: NodeTerm


class NodeSelector(StrictObject):
    node_selector_terms: list[NodeTerm]

    @classmethod
    def of(cls, requirement: NodeRequirement) -> NodeSelector:
        """Of one requirement."""
        return cls(node_selector_terms=[NodeTerm(match_expressions=[requirement])])


class NodeAffinity(StrictObject):
    """`required` or `preferred`."""

    required: NodeSelector | None = Field(
        default=None, alias="requiredDuringSchedulingIgnoredDuringExecution"
    )
    preferred: list[PreferredNode] | None = Field(
        default=None, alias="preferredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(StrictObject):
    node_affinity: NodeAffinity


class Container(StrictObject):
    name: DnsName
    image: Image
    image_pull_policy: Literal["IfNotPresent"] = "IfNotPresent"
    command: list[str] | None = None
    args: list[str] | None = None
    ports: list[ContainerPort] | None = None
    env: list[EnvVar]
    resources: Resources
    startup_probe: Probe | None = None
    readiness_probe: Probe | None = None
    liveness_probe: Probe | None = None
    lifecycle: Lifecycle | None = None
    security_context: ContainerSecurity = ContainerSecurity()
    volume_mounts: list[VolumeMount]


class PodSpec(StrictObject):
    service_account_name: DnsName | None = None
    automount_service_account_token: bool = False
    enable_service_links: Literal[False] = False
    termination_grace_period_seconds: Count
    security_context: PodSecurity = PodSecurity()
    affinity: Affinity | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[Toleration] | None = None
    containers: list[Container]
    volumes: list[Volume]


class PodTemplate(StrictObject):
    metadata: PodMetadata
    spec: PodSpec


class RollingUpdate(StrictObject):
    max_surge: Count
    max_unavailable: Count


class Strategy(StrictObject):
    """`rolling_update` where the type is that."""

    type: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    rolling_update: RollingUpdate | None = None


class DeploymentSpec(StrictObject):
    replicas: Count
    revision_history_limit: Count = 5
    progress_deadline_seconds: Count
    strategy: Strategy
    selector: Selector
    template: PodTemplate


class Deployment(KubernetesObject):
    api_version: Literal["apps/v1"] = "apps/v1"
    kind: Literal["Deployment"] = "Deployment"
    spec: DeploymentSpec


class ClaimRetention(StrictObject):
    """Claims stay when their pod or the whole set goes: the next pod has its model at once."""

    when_deleted: Literal["Retain"] = "Retain"
    when_scaled: Literal["Retain"] = "Retain"


class SetStrategy(StrictObject):
    """Replaces one pod after the other, from the last, each once the one before is ready."""

    type: Literal["RollingUpdate"] = "RollingUpdate"


class ClaimResources(StrictObject):
    requests: dict[str, str]


class ClaimSpec(StrictObject):
    """A claim for the cluster's default storage class."""

    access_modes: list[Literal["ReadWriteOnce", "ReadWriteMany"]]
    resources: ClaimResources


class PersistentVolumeClaim(KubernetesObject):
    api_version: Literal["v1"] = "v1"
    kind: Literal["PersistentVolumeClaim"] = "PersistentVolumeClaim"
    spec: ClaimSpec


class ServiceAccount(KubernetesObject):
    """Pods that need its token say so themselves."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["ServiceAccount"] = "ServiceAccount"
    automount_service_account_token: Literal[False] = False


class RoleRule(StrictObject):
    api_groups: list[str]
    resources: list[str]
    verbs: list[Literal["get", "list", "watch"]]


class Role(KubernetesObject):
    api_version: Literal["rbac.authorization.k8s.io/v1"] = "rbac.authorization.k8s.io/v1"
    kind: Literal["Role"] = "Role"
    rules: list[RoleRule]


class RoleReference(StrictObject):
    api_group: Literal["rbac.authorization.k8s.io"] = "rbac.authorization.k8s.io"
    kind: Literal["Role"] = "Role"
    name: DnsName


class RoleSubject(StrictObject):
    kind: Literal["ServiceAccount"] = "ServiceAccount"
    name: DnsName
    namespace: DnsName


class RoleBinding(KubernetesObject):
    api_version: Literal["rbac.authorization.k8s.io/v1"] = "rbac.authorization.k8s.io/v1"
    kind: Literal["RoleBinding"] = "RoleBinding"
    role_ref: RoleReference
    subjects: list[RoleSubject]


class StatefulSetSpec(StrictObject):
    """All pods start at once; `volume_claim_templates` gives each a claim of its own."""

    replicas: Count
    service_name: DnsName
    pod_management_policy: Literal["Parallel"] = "Parallel"
    revision_history_limit: Count = 5
    update_strategy: SetStrategy = SetStrategy()
    persistent_volume_claim_retention_policy: ClaimRetention | None = None
    selector: Selector
    template: PodTemplate
    volume_claim_templates: list[PersistentVolumeClaim] | None = None


class StatefulSet(KubernetesObject):
    api_version: Literal["apps/v1"] = "apps/v1"
    kind: Literal["StatefulSet"] = "StatefulSet"
    spec: StatefulSetSpec


class ServicePort(StrictObject):
    name: str
    port: Port
    target_port: str
    protocol: Literal["TCP"] = "TCP"


class ServiceSpec(StrictObject):
    """`cluster_ip` 'None': its name resolves to the addresses of its ready pods."""

    type: Literal["ClusterIP"] = "ClusterIP"
    cluster_ip: Literal["None"] | None = Field(default=None, alias="clusterIP")
    selector: dict[str, str]
    ports: list[ServicePort]


class Service(KubernetesObject):
    api_version: Literal["v1"] = "v1"
    kind: Literal["Service"] = "Service"
    spec: ServiceSpec


class DisruptionSpec(StrictObject):
    """`max_unavailable`; or `min_available`, for pods of other controllers than Kubernetes'."""

    max_unavailable: Count | None = None
    min_available: Count | None = None
    selector: Selector
    unhealthy_pod_eviction_policy: Literal["AlwaysAllow"] = "AlwaysAllow"


class PodDisruptionBudget(KubernetesObject):
    api_version: Literal["policy/v1"] = "policy/v1"
    kind: Literal["PodDisruptionBudget"] = "PodDisruptionBudget"
    spec: DisruptionSpec


class AnyPods(StrictObject):
    """metav1.LabelSelector that may be empty, which selects everything."""

    match_labels: dict[str, str] | None = None


class Peer(StrictObject):
    """Pods in selected namespaces; without `namespace_selector`, in the policy's namespace."""

    namespace_selector: AnyPods | None = None
    pod_selector: AnyPods | None = None


class PolicyPort(StrictObject):
    protocol: Literal["TCP", "UDP"] = "TCP"
    port: str | Port


class Ingress(StrictObject):
    """Allowed incoming traffic; without `ports`: on all."""

    sender: list[Peer] = Field(alias="from")
    ports: list[PolicyPort] | None = None


class Egress(StrictObject):
    """Allowed outgoing traffic; without `to`: anywhere; without `ports`: on all."""

    to: list[Peer] | None = None
    ports: list[PolicyPort] | None = None


class NetworkPolicySpec(StrictObject):
    pod_selector: Selector
    policy_types: list[Literal["Ingress", "Egress"]] = Field(default=["Ingress", "Egress"])
    ingress: list[Ingress]
    egress: list[Egress]


class NetworkPolicy(KubernetesObject):
    api_version: Literal["networking.k8s.io/v1"] = "networking.k8s.io/v1"
    kind: Literal["NetworkPolicy"] = "NetworkPolicy"
    spec: NetworkPolicySpec


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
