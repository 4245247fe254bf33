"""A pod as we deploy it: one container, no privilege, three probes, a plan from a ConfigMap, a key from a Secret."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from toolkit.deploy.kinds.base import Count, DnsName, Image, Kind, Port, SecretKey


class ValueFrom(Kind):
    secret_key_ref: SecretKey


class EnvVar(Kind):
    """`value` or `value_from`."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class ContainerPort(Kind):
    name: str
    container_port: Port
    protocol: Literal["TCP"] = "TCP"


class HttpGet(Kind):
    path: str
    port: str


class Probe(Kind):
    http_get: HttpGet
    period_seconds: Count
    timeout_seconds: Count
    failure_threshold: Count
    termination_grace_period_seconds: Count | None = None


class Exec(Kind):
    command: list[str]


class Handler(Kind):
    exec: Exec


class Lifecycle(Kind):
    """What runs, within the grace period, before a container gets SIGTERM."""

    pre_stop: Handler


class Resources(Kind):
    requests: dict[str, str]
    limits: dict[str, str]


class Capabilities(Kind):
    drop: list[Literal["ALL"]] = Field(default=["ALL"])


class ContainerSecurity(Kind):
    allow_privilege_escalation: Literal[False] = False
    read_only_root_filesystem: Literal[True] = True
    capabilities: Capabilities = Capabilities()


class SeccompProfile(Kind):
    type: Literal["RuntimeDefault"] = "RuntimeDefault"


class PodSecurity(Kind):
    """`fs_group` lets the one user write to volumes."""

    run_as_non_root: Literal[True] = True
    run_as_user: Count = 10001
    run_as_group: Count = 10001
    fs_group: Count = 10001
    seccomp_profile: SeccompProfile = SeccompProfile()


class VolumeMount(Kind):
    name: DnsName
    mount_path: str
    read_only: bool | None = None


class ConfigMapVolume(Kind):
    name: DnsName


class EmptyDir(Kind):
    medium: Literal["Memory"] | None = None
    size_limit: str | None = None


class Claim(Kind):
    claim_name: str


class Volume(Kind):
    """One of its sources."""

    name: DnsName
    config_map: ConfigMapVolume | None = None
    empty_dir: EmptyDir | None = None
    persistent_volume_claim: Claim | None = None


class Toleration(Kind):
    key: str
    operator: Literal["Exists"] = "Exists"
    effect: Literal["NoSchedule"] = "NoSchedule"


class NodeRequirement(Kind):
    key: str
    operator: Literal["In"] = "In"
    values: list[str]


class NodeTerm(Kind):
    match_expressions: list[NodeRequirement]


class PreferredNode(Kind):
    weight: Count
    preference: NodeTerm


class NodeSelector(Kind):
    node_selector_terms: list[NodeTerm]

    @classmethod
    def of(cls, requirement: NodeRequirement) -> NodeSelector:
        """Of one requirement."""
        return cls(node_selector_terms=[NodeTerm(match_expressions=[requirement])])


class NodeAffinity(Kind):
    """`required` or `preferred`."""

    required: NodeSelector | None = Field(default=None, alias="requiredDuringSchedulingIgnoredDuringExecution")
    preferred: list[PreferredNode] | None = Field(default=None, alias="preferredDuringSchedulingIgnoredDuringExecution")


class Affinity(Kind):
    node_affinity: NodeAffinity


class Container(Kind):
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


class PodSpec(Kind):
    automount_service_account_token: Literal[False] = False
    enable_service_links: Literal[False] = False
    termination_grace_period_seconds: Count
    security_context: PodSecurity = PodSecurity()
    affinity: Affinity | None = None
    node_selector: dict[str, str] | None = None
    tolerations: list[Toleration] | None = None
    containers: list[Container]
    volumes: list[Volume]
