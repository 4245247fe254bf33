"""A Compose file with one service, after the Compose specification, in which keys are snake_case."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from toolkit.deploy.kinds.kubernetes import Count, Image, StrictObject


class ComposeKind(StrictObject):
    """A model with its fields' names as keys in the file."""

    model_config = ConfigDict(alias_generator=None)


class Healthcheck(ComposeKind):
    test: list[str]
    interval: str
    timeout: str
    retries: Count
    start_period: str
    start_interval: str


class Device(ComposeKind):
    driver: Literal["nvidia"] = "nvidia"
    count: Count
    capabilities: list[Literal["gpu"]] = Field(default=["gpu"])


class Reservations(ComposeKind):
    devices: list[Device]


class DeployResources(ComposeKind):
    reservations: Reservations


class Deploy(ComposeKind):
    resources: DeployResources


class Mount(ComposeKind):
    """A bind mount or a named volume in the long form, where a colon has no meaning."""

    type: Literal["bind", "volume"]
    source: str
    target: str
    read_only: bool = False


class ComposeService(ComposeKind):
    image: Image
    command: list[str]
    restart: Literal["unless-stopped"] = "unless-stopped"
    init: Literal[True] = True
    user: str = "10001:10001"
    read_only: Literal[True] = True
    cap_drop: list[Literal["ALL"]] = Field(default=["ALL"])
    security_opt: list[str] = Field(default=["no-new-privileges:true"])
    tmpfs: list[str] = Field(default=["/tmp"])
    environment: dict[str, str]
    secrets: list[str]
    volumes: list[Mount]
    ports: list[str]
    stop_signal: Literal["SIGTERM"] = "SIGTERM"
    stop_grace_period: str
    healthcheck: Healthcheck
    deploy: Deploy | None = None
    labels: dict[str, str]


class SecretFile(ComposeKind):
    file: str


class NamedVolume(ComposeKind):
    """A volume with the engine's defaults."""


class ComposeFile(ComposeKind):
    name: str
    services: dict[str, ComposeService]
    secrets: dict[str, SecretFile]
    volumes: dict[str, NamedVolume]
