"""What all kinds share: strictness, camelCase, names that a cluster takes, metadata."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class Kind(BaseModel):
    """A model that refuses unknown keys, on the way out as on the way back in; keys are camelCase in the file."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, alias_generator=to_camel, populate_by_name=True
    )


DnsName = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]  # RFC 1035: what Services ask for
Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0)]
Image = Annotated[str, Field(pattern=r"^[a-z0-9][a-zA-Z0-9._/:@-]{0,254}$")]


class Metadata(Kind):
    """metadata of an object."""

    name: DnsName
    namespace: DnsName | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class PodMetadata(Kind):
    """metadata of a pod template."""

    labels: dict[str, str]
    annotations: dict[str, str] | None = None


class Selector(Kind):
    """metav1.LabelSelector by labels alone."""

    match_labels: dict[str, str]


class SecretKey(Kind):
    """A key of a Secret, named and never held."""

    name: DnsName
    key: str
    optional: bool | None = None


class TypedSecretKey(Kind):
    """Prometheus operator's SafeAuthorization: a bearer token that lies in a Secret."""

    type: Literal["Bearer"] = "Bearer"
    credentials: SecretKey
