"""Target `compose`: one unprivileged service, its key as a secret file, its port on loopback.

First strict models of the file, after the Compose specification, in which keys are snake_case.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from toolkit.deploy.manifests import Count, Image, StrictObject
from toolkit.deploy.order import (
    KEY_FOLDER,
    ExplainedValue,
    Order,
    Rendered,
    explain_value,
    llmctl_image,
)
from toolkit.deploy.reckon import drain_s, from_hub, gpus, grace_s, startup_s
from toolkit.files.strict import dump_yaml

READY = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=3)"
SECRET = "llmctl_api_key"
HUB_TOKEN = "optional, from the shell that runs docker compose: gated models of the hub need it"


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


def render(order: Order) -> Rendered:
    """Render compose.yaml."""
    file = ComposeFile(
        name=order.name,
        services={"llmctl": _service(order)},
        secrets={SECRET: SecretFile(file=key_file(order))},
        volumes={"models": NamedVolume()},
    )
    return Rendered(
        {"compose.yaml": dump_yaml([file], order.comment())}, _explained(order), _start(order)
    )


def _service(order: Order) -> ComposeService:
    drain, devices = drain_s(order), gpus(order.plan.recipe).value
    reserved = Deploy(
        resources=DeployResources(reservations=Reservations(devices=[Device(count=devices)]))
    )
    model = order.plan.recipe.model.source
    # Compose replaces this by the variable of its own environment.
    token = {"HF_TOKEN": "${HF_TOKEN-}"} if from_hub(order.plan.recipe) else {}
    mounts = [
        Mount(type="bind", source="./plan.json", target="/etc/llmctl/plan.json", read_only=True),
        Mount(type="volume", source="models", target="/models"),
    ]
    if model.startswith("/"):
        folder = uninterpolated(model)
        mounts.append(Mount(type="bind", source=folder, target=folder, read_only=True))
    return ComposeService(
        image=llmctl_image(order).value,
        command=[
            *("llmctl", "serve", "/etc/llmctl/plan.json", "--host", "0.0.0.0", "--port", "8000"),
            *("--api-key-file", f"/run/secrets/{SECRET}", "--shutdown-timeout", str(drain.value)),
            *order.allowances,
        ],
        environment=token | {"HOME": "/tmp", "HF_HOME": "/models", "NUMBA_CACHE_DIR": "/tmp/numba"},
        secrets=[SECRET],
        volumes=mounts,
        ports=[f"127.0.0.1:{order.plan.recipe.serve.port or 8000}:8000"],
        stop_grace_period=f"{grace_s(drain).value}s",
        healthcheck=Healthcheck(
            test=["CMD", "python", "-c", READY],
            interval="10s",
            timeout="5s",
            retries=3,
            start_period=f"{startup_s(order).value}s",
            start_interval="5s",
        ),
        deploy=reserved if devices else None,
        labels={f"llmctl.{role}.sha256": digest for role, digest in order.stamp().items()}
        | {"llmctl.model": uninterpolated(model)},
    )


def key_file(order: Order) -> str:
    """The path of the key on the host."""
    return f"{KEY_FOLDER}/{order.name}.key"


def uninterpolated(text: str) -> str:
    """Quote text so that Compose finds no variables in it."""
    return text.replace("$", "$$")


def _explained(order: Order) -> list[ExplainedValue]:
    drain = drain_s(order)
    grace, startup, recipe = grace_s(drain), startup_s(order), order.plan.recipe
    return [
        explain_value("image", llmctl_image(order)),
        explain_value("command --shutdown-timeout", drain, f"{drain.value} s"),
        explain_value("stop_grace_period", grace, f"{grace.value} s"),
        explain_value("healthcheck.start_period", startup, f"{startup.value} s"),
        explain_value("deploy.resources.reservations.devices.count", gpus(recipe)),
        ExplainedValue(
            "ports",
            f"127.0.0.1:{recipe.serve.port or 8000}",
            "recipe: serve.port; loopback: put a proxy with TLS in front",
        ),
        ExplainedValue(
            "secrets",
            key_file(order),
            "a file that you create; the key is in no image and in no rendered file",
        ),
        ExplainedValue(
            "healthcheck on /ready",
            "3 x 10 s",
            "--wait waits for it; Docker restarts nothing when it fails",
        ),
        *([ExplainedValue("HF_TOKEN", "${HF_TOKEN-}", HUB_TOKEN)] if from_hub(recipe) else []),
    ]


def _start(order: Order) -> str:
    serve = " ".join(["llmctl serve . --target compose", *order.allowances])
    return f"""\
```sh
sudo install -d {KEY_FOLDER}
# The container's user, 10001, reads the key.
openssl rand -hex 32 | sudo install -o 10001 -m 0400 /dev/stdin {key_file(order)}
docker compose up --detach --wait      # or: {serve}
docker compose ps
docker compose stop                    # drains
```"""
