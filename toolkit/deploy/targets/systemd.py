"""A machine with systemd: one system unit, hardened, that drains on stop and gets its key as a
credential.
"""

from __future__ import annotations

from toolkit.deploy.order import ExplainedValue, Order, Reckoned, Rendered, fill, told
from toolkit.deploy.reckon import check_plan_size, drain_s, gpus, grace_s, startup_s

KEY_FOLDER = "/etc/llmctl"
WATCHDOG_S = 60  # a batch is planned in well under a second


def render(order: Order) -> Rendered:
    """NAME.service. Paths in it are absolute: it starts the plan in the folder that it was rendered
    to.
    """
    check_plan_size(order.text, "systemd's credentials hold")
    drain, startup, recipe = drain_s(order), startup_s(order), order.plan.recipe
    grace, key_file = grace_s(drain), f"{KEY_FOLDER}/{order.name}.key"
    unit = fill(
        "unit.service",
        comment=order.comment(),
        name=order.name,
        recipe=recipe.name,
        program=order.options.program,
        host=recipe.serve.host,
        port=recipe.serve.port or 8000,
        drain_s=drain.value,
        allowances=order.allowances,
        plan_file=f"{order.options.folder}/plan.json",
        key_file=key_file,
        model_folder=recipe.model.source if recipe.model.source.startswith("/") else "",
        startup_s=startup.value,
        grace_s=grace.value,
        watchdog_s=WATCHDOG_S,
        gpus=gpus(recipe).value,
    )
    return Rendered(
        {f"{order.name}.service": unit},
        _told(order, drain, grace, startup),
        _start(order, key_file),
    )


def _told(
    order: Order, drain: Reckoned[int], grace: Reckoned[int], startup: Reckoned[int]
) -> list[ExplainedValue]:
    program = Reckoned(
        order.options.program, "--program: where llmctl is installed on that machine"
    )
    killing = (
        "SIGTERM to the server alone; what is left after TimeoutStopSec is killed, its workers too"
    )
    waiting = "`systemctl start` waits until all workers are loaded; the server says so"
    return [
        told("ExecStart", program),
        ExplainedValue("ExecStart --host", order.plan.recipe.serve.host, "recipe: serve.host"),
        told("ExecStart --shutdown-timeout", drain, f"{drain.value} s"),
        told("TimeoutStopSec", grace, f"{grace.value} s"),
        told("TimeoutStartSec", startup, f"{startup.value} s"),
        ExplainedValue("Type", "notify", waiting),
        ExplainedValue(
            "WatchdogSec",
            str(WATCHDOG_S),
            "seconds that the server's loop may stand still; workers are its own to watch",
        ),
        ExplainedValue("KillMode", "mixed", killing),
        ExplainedValue(
            "LoadCredential",
            "plan.json, api-key",
            "read by root before the start; the key is in no environment",
        ),
        ExplainedValue(
            "PrivateDevices",
            "no" if gpus(order.plan.recipe).value else "yes",
            gpus(order.plan.recipe).source,
        ),
    ]


def _start(order: Order, key_file: str) -> str:
    name, serve = order.name, " ".join(["llmctl serve . --target systemd", *order.allowances])
    return f"""\
```sh
sudo install -d -m 0700 {KEY_FOLDER}
openssl rand -hex 32 | sudo install -m 0400 /dev/stdin {key_file}
sudo systemctl link "$PWD/{name}.service"
sudo systemctl enable --now {name}.service    # or: {serve}
systemctl status {name}.service
sudo systemctl stop {name}.service            # drains
```"""
