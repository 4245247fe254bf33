"""One machine with Docker Compose: one service, no privilege, its key as a secret file, its port on
loopback.
"""

from __future__ import annotations

from toolkit.deploy.kinds.compose import (
    ComposeFile,
    ComposeService,
    Deploy,
    DeployResources,
    Device,
    Healthcheck,
    Mount,
    NamedVolume,
    Reservations,
    SecretFile,
)
from toolkit.deploy.order import ExplainedValue, Order, Rendered, llmctl_image, told
from toolkit.deploy.reckon import drain_s, from_hub, gpus, grace_s, startup_s
from toolkit.files.strict import dump_yaml

READY = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=3)"
SECRET = "llmctl_api_key"
KEY_FOLDER = "/etc/llmctl"
HUB_TOKEN = (
    "optional, of the shell that runs docker compose: the hub asks for it where a model is gated"
)


def render(order: Order) -> Rendered:
    """compose.yaml."""
    file = ComposeFile(
        name=order.name,
        services={"llmctl": _service(order)},
        secrets={SECRET: SecretFile(file=key_file(order))},
        volumes={"models": NamedVolume()},
    )
    return Rendered(
        {"compose.yaml": dump_yaml([file], order.comment())}, _told(order), _start(order)
    )


def _service(order: Order) -> ComposeService:
    drain, devices = drain_s(order), gpus(order.plan.recipe).value
    reserved = Deploy(
        resources=DeployResources(reservations=Reservations(devices=[Device(count=devices)]))
    )
    model = order.plan.recipe.model.source
    token = (
        {"HF_TOKEN": "${HF_TOKEN-}"} if from_hub(order.plan.recipe) else {}
    )  # Compose's own environment has it
    mounts = [
        Mount(type="bind", source="./plan.json", target="/etc/llmctl/plan.json", read_only=True),
        Mount(type="volume", source="models", target="/models"),
    ]
    if model.startswith("/"):
        mounts.append(
            Mount(
                type="bind",
                source=uninterpolated(model),
                target=uninterpolated(model),
                read_only=True,
            )
        )
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
    """Where the key lies on the host."""
    return f"{KEY_FOLDER}/{order.name}.key"


def uninterpolated(text: str) -> str:
    """Text in which Compose finds no variables."""
    return text.replace("$", "$$")


def _told(order: Order) -> list[ExplainedValue]:
    drain = drain_s(order)
    grace, startup, recipe = grace_s(drain), startup_s(order), order.plan.recipe
    return [
        told("image", llmctl_image(order)),
        told("command --shutdown-timeout", drain, f"{drain.value} s"),
        told("stop_grace_period", grace, f"{grace.value} s"),
        told("healthcheck.start_period", startup, f"{startup.value} s"),
        told("deploy.resources.reservations.devices.count", gpus(recipe)),
        ExplainedValue(
            "ports",
            f"127.0.0.1:{recipe.serve.port or 8000}",
            "recipe: serve.port; loopback: put a proxy with TLS in front",
        ),
        ExplainedValue(
            "secrets",
            key_file(order),
            "a file that you make; it is in no image and in no rendered file",
        ),
        ExplainedValue(
            "healthcheck on /ready",
            "3 x 10 s",
            "what --wait waits for; Docker restarts nothing for it",
        ),
        *([ExplainedValue("HF_TOKEN", "${HF_TOKEN-}", HUB_TOKEN)] if from_hub(recipe) else []),
    ]


def _start(order: Order) -> str:
    serve = " ".join(["llmctl serve . --target compose", *order.allowances])
    return f"""\
```sh
sudo install -d {KEY_FOLDER}
openssl rand -hex 32 | sudo install -o 10001 -m 0400 /dev/stdin {key_file(order)}    # the container's user reads it
docker compose up --detach --wait      # or: {serve}
docker compose ps
docker compose stop                    # drains
```"""
