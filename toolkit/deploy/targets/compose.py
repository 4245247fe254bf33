"""Target `compose`: one unprivileged service, its key as a secret file, its port on loopback.

For an engine that is a server of its own: a service for each replica, which only the front reaches,
and the front, which alone has the key.

First strict models of the file, after the Compose specification, in which keys are snake_case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from toolkit.deploy.manifests import Count, Image, StrictObject
from toolkit.deploy.order import (
    KEY_FOLDER,
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    llmctl_image,
)
from toolkit.deploy.reckon import SHARED_GIB, drain_s, from_hub, gpus, grace_s, startup_s
from toolkit.deploy.replicas import ALIVE, CHECK_S, KindReplicas, Replication, at
from toolkit.files.recipe import Recipe
from toolkit.files.strict import dump_yaml

ASKS = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout=3)"
SECRET = "llmctl_api_key"
FOLDER, PORT, ANY = "/etc/llmctl", 8000, "0.0.0.0"  # in a container
PLAN = f"{FOLDER}/plan.json"
PREPARES = "models"  # the service that makes the volume of models
KEY = ("--api-key-file", f"/run/secrets/{SECRET}")
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
    """`count` of any devices, or the named ones."""

    driver: Literal["nvidia"] = "nvidia"
    count: Count | None = None
    device_ids: list[str] | None = None
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


class Dependence(ComposeKind):
    """Starts after another service, or after its end; and stops before it."""

    condition: Literal["service_started", "service_completed_successfully"]


class Preparation(ComposeKind):
    """A service that ends at once: its image's folder gives an empty volume its owner."""

    image: Image
    command: list[Literal["true"]] = Field(default=["true"])
    network_mode: Literal["none"] = "none"
    read_only: Literal[True] = True
    cap_drop: list[Literal["ALL"]] = Field(default=["ALL"])
    volumes: list[Mount]


class ComposeService(ComposeKind):
    image: Image
    entrypoint: list[str] | None = None
    command: list[str]
    restart: Literal["unless-stopped"] = "unless-stopped"
    init: Literal[True] = True
    user: str = "10001:10001"
    read_only: Literal[True] = True
    cap_drop: list[Literal["ALL"]] = Field(default=["ALL"])
    security_opt: list[str] = Field(default=["no-new-privileges:true"])
    tmpfs: list[str] = Field(default=["/tmp"])
    environment: dict[str, str]
    secrets: list[str] | None = None
    volumes: list[Mount]
    ports: list[str] | None = None
    shm_size: str | None = None
    stop_signal: Literal["SIGTERM"] = "SIGTERM"
    stop_grace_period: str
    healthcheck: Healthcheck
    deploy: Deploy | None = None
    depends_on: dict[str, Dependence] | None = None
    labels: dict[str, str]


class SecretFile(ComposeKind):
    file: str


class NamedVolume(ComposeKind):
    """A volume with the engine's defaults."""


class ComposeFile(ComposeKind):
    name: str
    services: dict[str, ComposeService | Preparation]
    secrets: dict[str, SecretFile]
    volumes: dict[str, NamedVolume]


def render(order: Order) -> Rendered:
    """Render compose.yaml."""
    text = _file(order, {"llmctl": _service(order)})
    return Rendered({"compose.yaml": text}, _explained(order), _start(order))


def _file(order: Order, services: dict[str, ComposeService | Preparation]) -> str:
    file = ComposeFile(
        name=order.name,
        services=services,
        secrets={SECRET: SecretFile(file=order.key_file)},
        volumes={"models": NamedVolume()},
    )
    return dump_yaml([file], order.comment())


def _service(order: Order) -> ComposeService:
    drain, devices = drain_s(order), gpus(order.plan.recipe).value
    command = ["serve", PLAN, "--host", ANY, "--port", str(PORT), *KEY]
    command += ["--shutdown-timeout", str(drain.value), *order.allowances]
    reservation = reserved([Device(count=devices)]) if devices else None
    return _ours(order, command, llmctl_image(order).value, drain, reservation)


def _ours(
    order: Order,
    command: list[str],
    image: str,
    drain: Sourced[int],
    devices: Deploy | None = None,
    replicas: Sequence[str] = (),
) -> ComposeService:
    """The service of llmctl: a server with its workers, or the front before these services, which
    loads no model.
    """
    environment = {"HOME": "/tmp"} if replicas else _environment(order)
    return ComposeService(
        image=image,
        command=["llmctl", *command],
        environment=environment | {"NUMBA_CACHE_DIR": "/tmp/numba"},
        secrets=[SECRET],
        volumes=[_plan_mount(PLAN), *([] if replicas else _model_mounts(order))],
        ports=[f"127.0.0.1:{order.plan.recipe.serve.port or 8000}:{PORT}"],
        stop_grace_period=f"{grace_s(drain).value}s",
        healthcheck=_health(order, "python", "/ready"),
        deploy=devices,
        depends_on={name: Dependence(condition="service_started") for name in replicas} or None,
        labels={f"llmctl.{role}.sha256": digest for role, digest in order.stamp().items()}
        | {"llmctl.model": uninterpolated(order.plan.recipe.model.source)},
    )


def reserved(devices: list[Device]) -> Deploy:
    """The reservation of devices."""
    return Deploy(resources=DeployResources(reservations=Reservations(devices=devices)))


def _environment(order: Order) -> dict[str, str]:
    """Writable folders, and the hub's token, which Compose takes from its own environment."""
    token = {"HF_TOKEN": "${HF_TOKEN-}"} if from_hub(order.plan.recipe) else {}
    return token | {"HOME": "/tmp", "HF_HOME": "/models"}


def _plan_mount(target: str) -> Mount:
    return Mount(type="bind", source="./plan.json", target=target, read_only=True)


def _model_mounts(order: Order) -> list[Mount]:
    mounts, model = [Mount(type="volume", source="models", target="/models")], order.plan.recipe
    if model.model.source.startswith("/"):
        folder = uninterpolated(model.model.source)
        mounts.append(Mount(type="bind", source=folder, target=folder, read_only=True))
    return mounts


def _health(order: Order, python: str, path: str) -> Healthcheck:
    return Healthcheck(
        test=["CMD", python, "-c", ASKS.format(port=PORT, path=path)],
        interval="10s",
        timeout="5s",
        retries=3,
        start_period=f"{startup_s(order).value}s",
        start_interval="5s",
    )


def render_replicas(order: Order) -> Rendered:
    """Render compose.yaml with a service for each replica, and the front."""
    replicas = Replication(order)
    replicas.check_containable()
    where = at([kind.at(f"http://{name}:{PORT}") for kind, _, name in replicas.named])
    words = replicas.front(PLAN, where, ANY, PORT, *KEY)
    services = {name: _replica(kind, number) for kind, number, name in replicas.named}
    names = list(services)
    front = _ours(order, words, replicas.front_image.value, replicas.drain, replicas=names)
    # The engine's image has no folder for models: a volume that a replica made would be root's.
    models = Mount(type="volume", source="models", target="/models")
    prepares = Preparation(image=replicas.front_image.value, volumes=[models])
    text = _file(order, {"llmctl": front, PREPARES: prepares, **services})
    return Rendered(
        {"compose.yaml": text, ALIVE: replicas.alive},
        [*replicas.explained(), *_explained_replicas(order, replicas)],
        _start(order),
    )


def _replica(replicas: KindReplicas, number: int) -> ComposeService:
    """The service of a replica: no key, no port on the host."""
    order, server, group = replicas.order, replicas.server, replicas.devices(number)
    words = [uninterpolated(word) for word in [*server.command, *replicas.arguments(ANY, PORT)]]
    mounts = [*_model_mounts(order), *([_plan_mount(PLAN)] if server.plan_variable else [])]
    program = f"{FOLDER}/{ALIVE}"
    mounts.append(Mount(type="bind", source=f"./{ALIVE}", target=program, read_only=True))
    plan = {server.plan_variable: PLAN} if server.plan_variable else {}
    devices = Device(device_ids=[str(one) for one in group])
    return ComposeService(
        image=replicas.image.value,
        entrypoint=[],
        command=words,
        environment=_environment(order) | replicas.environment | plan,
        volumes=mounts,
        shm_size=f"{SHARED_GIB}gb" if len(group) > 1 else None,
        stop_grace_period=f"{grace_s(replicas.drain).value}s",
        healthcheck=_generates(replicas),
        deploy=reserved([devices]) if group else None,
        depends_on={PREPARES: Dependence(condition="service_completed_successfully")},
        labels={"llmctl.model": uninterpolated(order.plan.recipe.model.source)},
    )


def _generates(replicas: KindReplicas) -> Healthcheck:
    """The check of a replica. Docker restarts what has ended, not what is unhealthy: where the
    replica hangs, the check ends its processes.
    """
    words = [uninterpolated(word) for word in replicas.asking(FOLDER, PORT, "end")]
    return Healthcheck(
        test=["CMD", *words],
        interval=f"{replicas.hang_s}s",
        timeout=f"{replicas.hang_s + CHECK_S}s",
        retries=1,
        start_period=f"{replicas.startup.value}s",
        start_interval="5s",
    )


def _explained_replicas(order: Order, replicas: Replication) -> list[ExplainedValue]:
    grace, recipe = grace_s(replicas.drain), order.plan.recipe
    hang_s = replicas.kinds[0].hang_s
    lines = [
        explain_value("front: image", replicas.front_image),
        *replicas.explained_flags(),
        explain_value("stop_grace_period", grace, f"{grace.value} s"),
        explain_value("healthcheck.start_period", replicas.startup, f"{replicas.startup.value} s"),
        ExplainedValue(
            "healthcheck",
            f"/ready of the front, {ALIVE} in a replica",
            f"recipe: serve.hang_s; where a replica's figures in /metrics stand still for "
            f"{hang_s} s and it generates no token for as long, the check ends it, and "
            "Docker starts it again; the front sends requests to the others",
        ),
        ExplainedValue(
            "depends_on", "service_started", "the front stops first, while it has its replicas"
        ),
        ExplainedValue(
            f"service {PREPARES}", "true", "ends at once; it makes the volume for user 10001"
        ),
        ExplainedValue("ports", *_published(recipe)),
        ExplainedValue("secrets", *_secret(order)),
    ]
    for kind in replicas.kinds:
        numbers = range(kind.count.value if kind.gpus.value else 0)
        if shares := "; ".join(",".join(map(str, kind.devices(number))) for number in numbers):
            line = explain_value("device_ids of the replicas", kind.gpus, shares)
            lines += kind.about([line])
    token = [ExplainedValue("HF_TOKEN", "${HF_TOKEN-}", HUB_TOKEN)] if from_hub(recipe) else []
    return [*lines, *token]


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
        ExplainedValue("ports", *_published(recipe)),
        ExplainedValue("secrets", *_secret(order)),
        ExplainedValue(
            "healthcheck on /ready",
            "3 x 10 s",
            "--wait waits for it; Docker restarts nothing when it fails",
        ),
        *([ExplainedValue("HF_TOKEN", "${HF_TOKEN-}", HUB_TOKEN)] if from_hub(recipe) else []),
    ]


def _published(recipe: Recipe) -> tuple[str, str]:
    """The port on the host, and why."""
    port = f"127.0.0.1:{recipe.serve.port or 8000}"
    return port, "recipe: serve.port; loopback: put a proxy with TLS in front"


def _secret(order: Order) -> tuple[str, str]:
    """The file of the key, and why."""
    why = "a file that you create; the key is in no image and in no rendered file"
    return order.key_file, why


def _start(order: Order) -> str:
    serve = " ".join(["llmctl serve . --target compose", *order.allowances])
    return f"""\
```sh
sudo install -d {KEY_FOLDER}
# The container's user, 10001, reads the key.
openssl rand -hex 32 | sudo install -o 10001 -m 0400 /dev/stdin {order.key_file}
docker compose up --detach --wait      # or: {serve}
docker compose ps
docker compose stop                    # drains
```"""
