"""Target `compose`: one unprivileged service, its key as a secret file, its port on loopback.

For an engine that is a server of its own: a service for each replica, which only the front reaches,
and the front, which alone has the key.

The file is plain data with the keys of the Compose specification, which tests hold it against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.deploy.order import (
    KEY_FOLDER,
    SECONDS,
    USER_ID,
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    llmctl_image,
    proxy_file,
)
from toolkit.deploy.reckon import (
    SHARED_GIB,
    compile_caches,
    drain_s,
    explain_caches,
    gpus,
    grace_s,
    startup_s,
)
from toolkit.deploy.replicas import ALIVE, CHECK_S, KindReplicas, Replication, each
from toolkit.files.strict import dump_yaml

Service = dict[str, Any]  # a part of the file, or one of its services

ASKS = "import urllib.request as r; r.urlopen('http://127.0.0.1:{port}{path}', timeout=3)"
SECRET = "llmctl_api_key"
# in a container
FOLDER = "/etc/llmctl"
PORT = 8000
ANY = "0.0.0.0"
PLAN = f"{FOLDER}/plan.json"
PREPARES = "models"  # the service that makes the volume of models
KEY = ("--api-key-file", f"/run/secrets/{SECRET}")
UNPRIVILEGED: Service = {"read_only": True, "cap_drop": ["ALL"]}
USER = f"{USER_ID}:{USER_ID}"
# Mounts are in the long form, where a colon has no meaning.
MODELS_FOLDER = "/models"
MODELS: Service = {
    "type": "volume",
    "source": "models",
    "target": MODELS_FOLDER,
    "read_only": False,
}
LOG_FILES = 5
LOG_FILE_MB = 20
# Docker's default driver keeps one file without a limit.
LOGGING: Service = {
    "driver": "json-file",
    "options": {"max-size": f"{LOG_FILE_MB}m", "max-file": str(LOG_FILES)},
}


def render(order: Order) -> Rendered:
    """Render compose.yaml."""
    drain = drain_s(order)
    image = llmctl_image(order)
    devices = gpus(order.plan.recipe)
    grace = grace_s(drain)
    startup = startup_s(order)
    command = ["serve", PLAN, "--host", ANY, "--port", str(PORT), *KEY]
    command += ["--shutdown-timeout", str(drain.value), *order.allowances]
    reserved = _reserved({"count": devices.value}) if devices.value else {}
    services = {"llmctl": _ours(order, command, image.value, drain, reserved)}
    waits = "--wait waits for it; Docker restarts nothing when it fails"
    lines = [
        explain_value("image", image),
        explain_value("command --shutdown-timeout", drain, SECONDS),
        explain_value("stop_grace_period", grace, SECONDS),
        explain_value("healthcheck.start_period", startup, SECONDS),
        explain_value("deploy.resources.reservations.devices.count", devices),
        *_explained(order),
        ExplainedValue("healthcheck on /ready", "3 x 10 s", waits),
        *_explained_token(order),
    ]
    files = {"compose.yaml": _file(order, services), **proxy_file(order)}
    return Rendered(files, lines, _start(order))


def render_replicas(order: Order) -> Rendered:
    """Render compose.yaml with a service for each replica, and the front."""
    replicas = Replication(order)
    replicas.check_containable()
    urls = [kind.at(f"http://{name}:{PORT}") for kind, _, name in replicas.named]
    command = replicas.front(PLAN, each("--replica", urls), ANY, PORT, *KEY)
    image = replicas.front_image
    behind = {name: _replica(kind, number) for kind, number, name in replicas.named}
    # The engine's image has no folder for models: a volume that a replica made would be root's. The
    # folder of this service's image gives an empty volume its owner.
    prepares = {
        "image": image.value,
        "command": ["true"],
        "network_mode": "none",
        **UNPRIVILEGED,
        "volumes": [MODELS],
    }
    front = _ours(order, command, image.value, replicas.drain, replicas=list(behind))
    text = _file(order, {"llmctl": front, PREPARES: prepares, **behind})
    grace = grace_s(replicas.drain)
    startup = replicas.startup
    hang_s = replicas.kinds[0].hang_s
    checked = (
        f"recipe: serve.hang_s; where a replica's figures in /metrics stand still for {hang_s} s "
        "and it generates no token for as long, the check ends it, and Docker starts it again; the "
        "front sends requests to the others"
    )
    first = "the front stops first, while it has its replicas"
    made = f"ends at once; it makes the volume for user {USER_ID}"
    lines = [
        *replicas.explained(),
        explain_value("front: image", image),
        *replicas.of_kinds(KindReplicas.explained_flags),
        explain_value("stop_grace_period", grace, SECONDS),
        explain_value("healthcheck.start_period", startup, SECONDS),
        ExplainedValue("healthcheck", f"/ready of the front, {ALIVE} in a replica", checked),
        ExplainedValue("depends_on", "service_started", first),
        ExplainedValue(f"service {PREPARES}", "true", made),
        *_explained(order),
    ]
    for kind in replicas.kinds:
        if kind.gpus.value:
            shares = "; ".join(kind.devices)
            source = kind.gpus.source
            lines += kind.about([ExplainedValue("device_ids of the replicas", shares, source)])
    lines += _explained_token(order)
    files = {"compose.yaml": text, ALIVE: replicas.alive, **proxy_file(order)}
    return Rendered(files, lines, _start(order))


def _file(order: Order, services: Mapping[str, Service]) -> str:
    content = {
        "name": order.name,
        "services": dict(services),
        "secrets": {SECRET: {"file": order.key_file}},
        "volumes": {"models": {}},  # with the engine's defaults
    }
    return dump_yaml(content, order.comment())


def _ours(
    order: Order,
    command: Sequence[str],
    image: str,
    drain: Sourced[int],
    devices: Service | None = None,
    replicas: Sequence[str] = (),
) -> Service:
    """The service of a server with its workers, or of the front, which loads no model."""
    environment = {"HOME": "/tmp"} if replicas else _environment(order)
    asks = ASKS.format(port=PORT, path="/ready")
    # It starts after the replicas, and stops before them.
    depends = {name: {"condition": "service_started"} for name in replicas}
    labels = {f"llmctl.{role}.sha256": digest for role, digest in order.stamp().items()}
    return {
        "image": image,
        "command": ["llmctl", *command],
        **_container(environment | {"NUMBA_CACHE_DIR": "/tmp/numba"}),
        "secrets": [SECRET],
        "volumes": [_mount("./plan.json", PLAN), *([] if replicas else _models(order))],
        "ports": [f"{_published(order)}:{PORT}"],
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{grace_s(drain).value}s",
        "healthcheck": {
            "test": ["CMD", "python", "-c", asks],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{startup_s(order).value}s",
            "start_interval": "5s",
        },
        **(devices or {}),
        **({"depends_on": depends} if depends else {}),
        "labels": labels | {"llmctl.model": uninterpolated(order.plan.recipe.model.source)},
    }


def _replica(replicas: KindReplicas, number: int) -> Service:
    """The service of a replica: no key, no port on the host.

    Docker restarts what has ended, not what is unhealthy: where the replica hangs, the check ends
    its processes.
    """
    order = replicas.order
    server = replicas.server
    devices = replicas.devices[number].split(",") if replicas.gpus.value else []
    variables = _environment(order) | replicas.environment
    mounts = _models(order)
    if server.plan_variable:
        variables[server.plan_variable] = PLAN
        mounts.append(_mount("./plan.json", PLAN))
    mounts.append(_mount(f"./{ALIVE}", f"{FOLDER}/{ALIVE}"))
    words = [*server.command, *replicas.arguments(ANY, PORT)]
    asks = replicas.asking(FOLDER, PORT, "end")
    shared = {"shm_size": f"{SHARED_GIB}gb"} if len(devices) > 1 else {}
    return {
        "image": replicas.image.value,
        "entrypoint": [],
        "command": [uninterpolated(word) for word in words],
        **_container(variables),
        "volumes": mounts,
        **shared,
        "stop_signal": "SIGTERM",
        "stop_grace_period": f"{grace_s(replicas.drain).value}s",
        "healthcheck": {
            "test": ["CMD", *(uninterpolated(word) for word in asks)],
            "interval": f"{replicas.hang_s}s",
            "timeout": f"{replicas.hang_s + CHECK_S}s",
            "retries": 1,
            "start_period": f"{replicas.startup.value}s",
            "start_interval": "5s",
        },
        **(_reserved({"device_ids": devices}) if devices else {}),
        "depends_on": {PREPARES: {"condition": "service_completed_successfully"}},
        "labels": {"llmctl.model": uninterpolated(order.plan.recipe.model.source)},
    }


def _container(environment: Mapping[str, str]) -> Service:
    """What all services have that stay: an unprivileged container, started again at its end."""
    return {
        "restart": "unless-stopped",
        "init": True,
        "user": USER,
        **UNPRIVILEGED,
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp"],
        "logging": LOGGING,
        "environment": dict(environment),
    }


def _reserved(which: Service) -> Service:
    """The reservation of GPUs: `count` of any, or the ones with `device_ids`."""
    devices = [{"driver": "nvidia", **which, "capabilities": ["gpu"]}]
    return {"deploy": {"resources": {"reservations": {"devices": devices}}}}


def _environment(order: Order) -> dict[str, str]:
    """Writable folders, and the hub's token, which Compose takes from its own environment."""
    token = {"HF_TOKEN": "${HF_TOKEN-}"} if order.plan.recipe.model.from_hub else {}
    return token | {"HOME": "/tmp", "HF_HOME": MODELS_FOLDER, **compile_caches(MODELS_FOLDER)}


def _mount(source: str, target: str) -> Service:
    return {"type": "bind", "source": source, "target": target, "read_only": True}


def _models(order: Order) -> list[Service]:
    """The volume of downloaded models, and the model's folder if it is one."""
    mounts = [MODELS]
    source = order.plan.recipe.model.source
    if source.startswith("/"):
        folder = uninterpolated(source)
        mounts.append(_mount(folder, folder))
    return mounts


def uninterpolated(text: str) -> str:
    """Quote text so that Compose finds no variables in it."""
    return text.replace("$", "$$")


def _published(order: Order) -> str:
    """The address and port on the host."""
    return f"127.0.0.1:{order.plan.recipe.serve.port or 8000}"


def _explained(order: Order) -> list[ExplainedValue]:
    """The lines about ports, the key, logs and caches."""
    port = "recipe: serve.port; loopback: put a proxy with TLS in front, as nginx.conf"
    key = "a file that you create; the key is in no image and in no rendered file"
    logs = "of each container: the oldest file goes; Docker's default has no limit"
    return [
        ExplainedValue("ports", _published(order), port),
        ExplainedValue("logging", f"{LOG_FILES} x {LOG_FILE_MB} MB", logs),
        explain_caches(MODELS_FOLDER),
        ExplainedValue("secrets", order.key_file, key),
    ]


def _explained_token(order: Order) -> list[ExplainedValue]:
    why = "optional, from the shell that runs docker compose: gated models of the hub need it"
    given = [ExplainedValue("HF_TOKEN", "${HF_TOKEN-}", why)]
    return given if order.plan.recipe.model.from_hub else []


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
```

{order.reading_the_key}"""
