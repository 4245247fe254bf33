"""Target `systemd`: a hardened system unit that drains on stop and gets its key as credential."""

from __future__ import annotations

from toolkit.deploy.order import (
    KEY_FOLDER,
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    fill,
)
from toolkit.deploy.reckon import check_plan_size, drain_s, gpus, grace_s, startup_s

WATCHDOG_S = 60  # the server's loop never blocks this long: it plans a batch in under a second


def render(order: Order) -> Rendered:
    """Render NAME.service. Its paths are absolute: it starts the plan in the rendered folder."""
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
        _explained(order, drain, grace, startup),
        _start(order, key_file),
    )


def _explained(
    order: Order, drain: Sourced[int], grace: Sourced[int], startup: Sourced[int]
) -> list[ExplainedValue]:
    program = Sourced(order.options.program, "--program: where llmctl is installed on that machine")
    killing = (
        "SIGTERM goes only to the server; after TimeoutStopSec all its processes are killed, also "
        "its workers"
    )
    waiting = "`systemctl start` waits until the server reports that all workers are loaded"
    return [
        explain_value("ExecStart", program),
        ExplainedValue("ExecStart --host", order.plan.recipe.serve.host, "recipe: serve.host"),
        explain_value("ExecStart --shutdown-timeout", drain, f"{drain.value} s"),
        explain_value("TimeoutStopSec", grace, f"{grace.value} s"),
        explain_value("TimeoutStartSec", startup, f"{startup.value} s"),
        ExplainedValue("Type", "notify", waiting),
        ExplainedValue(
            "WatchdogSec",
            str(WATCHDOG_S),
            "seconds that the server's loop may block; the server itself watches its workers",
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
