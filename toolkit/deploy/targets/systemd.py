"""Target `systemd`: a hardened system unit that drains on stop and gets its key as credential.

For an engine that is a server of its own: a template unit for its replicas of each kind, a unit for
the front before them, and a target that holds them together.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence

from toolkit.deploy.order import (
    KEY_FOLDER,
    SECONDS,
    ExplainedValue,
    Order,
    Rendered,
    Sourced,
    explain_value,
    proxy_file,
    unit_word,
)
from toolkit.deploy.reckon import (
    check_plan_size,
    compile_caches,
    drain_s,
    explain_caches,
    gpus,
    grace_s,
    startup_s,
)
from toolkit.deploy.replicas import KindReplicas, Replication, each
from toolkit.files.io import file_text

WATCHDOG_S = 60  # the server's loop never blocks this long: it plans a batch in under a second
PLAN = "%d/plan.json"
KEY = "%d/api-key"  # credentials: %d is their folder
LOOPBACK = "127.0.0.1"
# between restarts of a replica
BACK_OFF_S = 5
BACK_OFF_STEPS = 5
LONGEST_BACK_OFF_S = 120
MAX_USER = 31  # characters of a user's name


def render(order: Order) -> Rendered:
    """Render NAME.service. Its paths are absolute: it starts the plan in `_folder`."""
    drain = drain_s(order)
    startup = startup_s(order)
    recipe = order.plan.recipe
    grace = grace_s(drain)
    devices = gpus(recipe)
    host = recipe.serve.host
    words = ["serve", PLAN, "--api-key-file", KEY, "--host", host]
    words += ["--port", str(recipe.serve.port or 8000), "--shutdown-timeout", str(drain.value)]
    unit = _server(order, [*words, *order.allowances], drain, devices.value)
    program = "--program: where llmctl is installed on that machine"
    killing = (
        "SIGTERM goes only to the server; after TimeoutStopSec all its processes are killed, also "
        "its workers"
    )
    waiting = "`systemctl start` waits until the server reports that all workers are loaded"
    blocked = "seconds that the server's loop may block; the server itself watches its workers"
    secret = "read by root before the start; the key is in no environment"
    lines = [
        ExplainedValue("ExecStart", order.options.program, program),
        _explain_folder(order),
        ExplainedValue("ExecStart --host", host, "recipe: serve.host"),
        explain_value("ExecStart --shutdown-timeout", drain, SECONDS),
        explain_value("TimeoutStopSec", grace, SECONDS),
        explain_value("TimeoutStartSec", startup, SECONDS),
        ExplainedValue("Type", "notify", waiting),
        explain_caches(_cache(order)),
        ExplainedValue("WatchdogSec", str(WATCHDOG_S), blocked),
        ExplainedValue("KillMode", "mixed", killing),
        ExplainedValue("LoadCredential", "plan.json, api-key", secret),
        ExplainedValue("PrivateDevices", "no" if devices.value else "yes", devices.source),
    ]
    files = {f"{order.name}.service": unit, **proxy_file(order)}
    return Rendered(files, lines, _start(order, [f"{order.name}.service"]))


def render_replicas(order: Order) -> Rendered:
    """Render the units of the front and of the replicas, and a file with the port and the devices
    of each replica. In a fleet each kind has a plan of its own, too.
    """
    replicas = Replication(order)
    recipe = order.plan.recipe
    name = order.name
    port = recipe.serve.port or 8000
    servers = [
        (kind, number, port + 1 + place) for place, (kind, number, _) in enumerate(replicas.named)
    ]
    urls = [kind.at(f"http://{LOOPBACK}:{own_port}") for kind, _, own_port in servers]
    key = ("--api-key-file", KEY)
    words = replicas.front(PLAN, each("--replica", urls), recipe.serve.host, port, *key)
    units = [f"{kind.name}@{number}.service" for kind, number, _ in servers]
    target = order.fill("replicas.target", name=name, recipe=recipe.name, replicas=units)
    front = _server(order, words, replicas.drain, 0, units)
    files = {f"{name}.target": target, f"{name}.service": front, **proxy_file(order)}
    for kind in replicas.kinds:
        files[f"{kind.name}@.service"] = _replica(order, kind)
        if order.plan.others:
            files[kind.file("plan", ".json")] = file_text(order.plan.alone(kind.number))
    for kind, number, own_port in servers:
        # Kinds of GPU are in the order of their slots, as nvidia-smi lists them; CUDA would list
        # the fastest first.
        variables: dict[str, object] = {"PORT": own_port}
        if kind.gpus.value:
            variables["CUDA_VISIBLE_DEVICES"] = kind.devices[number]
            variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if order.plan.others else {}
        if kind.cpus[number]:
            variables["CPUS"] = kind.cpus[number]
        files[f"{kind.label}-{number}.env"] = order.fill("replica.env", variables=variables)
    lines = [*replicas.explained(), *_explained_replicas(order, replicas)]
    templates = [f"{kind.name}@" for kind in replicas.kinds]
    start = _start(order, [f"{name}.target", f"{name}.service"], templates)
    return Rendered(files, lines, start)


def _replica(order: Order, replicas: KindReplicas) -> str:
    """The template unit of the replicas of a kind."""
    recipe = order.plan.recipe
    drain = replicas.drain
    words = ["serve", PLAN, "--workers", "1", "--host", LOOPBACK]
    words += ["--shutdown-timeout", str(drain.value), *order.allowances]
    command = f"{unit_word(order.options.program)} {_command(words)} --port ${{PORT}}"
    if replicas.cpus[0]:
        command = f"/usr/bin/taskset --cpu-list ${{CPUS}} {command}"
    return order.fill(
        "replica.service",
        name=order.name,
        unit=replicas.name,
        variables=replicas.label,
        recipe=replicas.kind.recipe.name,
        folder=_folder(order),
        command=command,
        plan_file=f"{_folder(order)}/{replicas.file('plan', '.json')}",
        python_variable=replicas.server.python_variable,
        python=order.options.replica_python,
        user=user_name(order.name),
        model_folder=_model_folder(order),
        caches=compile_caches(_cache(order)),
        startup_s=replicas.startup.value,
        grace_s=grace_s(drain).value,
        back_off_s=BACK_OFF_S,
        back_off_steps=BACK_OFF_STEPS,
        longest_back_off_s=LONGEST_BACK_OFF_S,
        hang_s=f"{recipe.serve.hang_s:g}",
        watchdog_s=WATCHDOG_S,
        gpus=replicas.gpus.value,
    )


def user_name(name: str) -> str:
    """A user's name, unique to the deployment's name."""
    if len(name) <= MAX_USER:
        return name
    tail = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: MAX_USER - 7].rstrip('-')}-{tail}"


def _server(
    order: Order,
    words: Sequence[str],
    drain: Sourced[int],
    devices: int,
    replicas: Sequence[str] = (),
) -> str:
    """The unit of a server of llmctl, or of the front before these units."""
    check_plan_size(order.text, "systemd's credentials hold")
    recipe = order.plan.recipe
    return order.fill(
        "unit.service",
        name=order.name,
        recipe=recipe.name,
        program=order.options.program,
        command=_command(words),
        replicas=replicas,
        user=user_name(order.name) if replicas else "",
        plan_file=f"{_folder(order)}/plan.json",
        key_file=order.key_file,
        model_folder=_model_folder(order),
        caches=compile_caches(_cache(order)),
        startup_s=startup_s(order).value,
        grace_s=grace_s(drain).value,
        watchdog_s=WATCHDOG_S,
        gpus=devices,
    )


def _cache(order: Order) -> str:
    """The unit's CacheDirectory."""
    return f"/var/cache/{order.name}"


def _command(words: Sequence[str]) -> str:
    """Words of a command in a unit; credentials' specifiers stay."""
    return " ".join(word if word in (PLAN, KEY) else unit_word(word) for word in words)


def _model_folder(order: Order) -> str:
    """The folder of the model, which the sandbox must show; '' where it is no folder."""
    source = order.plan.recipe.model.source
    return source if source.startswith("/") else ""


def _explained_replicas(order: Order, replicas: Replication) -> list[ExplainedValue]:
    recipe = order.plan.recipe
    grace = grace_s(replicas.drain)
    first = (recipe.serve.port or 8000) + 1
    last = first + len(replicas.named) - 1
    files = "KIND-N.env" if order.plan.others else "replica-N.env"
    source = f"the ports after the front's, {first - 1}, which is the recipe's serve.port"
    restarts = f"{BACK_OFF_S} s, growing to {LONGEST_BACK_OFF_S} s in {BACK_OFF_STEPS} steps"
    hung = (
        "recipe: serve.hang_s; llmctl ends with an error, and the unit is started again, if its "
        "server does not answer /health for so long, or if its figures in /metrics stand still for "
        "so long and it then generates no token for as long"
    )
    blocked = "seconds that the front's loop, or the llmctl that watches a replica, may block"
    order_of = "the front starts after the replicas' loads, and stops before the replicas"
    user = user_name(order.name)
    shared = "one dynamic user, for the shared folder of models"
    secret = "read by root; the key is the front's alone"
    lines = [
        ExplainedValue("ExecStart", order.options.program, "--program: where llmctl is installed"),
        _explain_folder(order),
        ExplainedValue("ExecStart --host of the front", recipe.serve.host, "recipe: serve.host"),
        ExplainedValue(f"{files}: PORT", f"{first} to {last}", source),
        explain_value("TimeoutStopSec", grace, SECONDS),
        explain_value("TimeoutStartSec", replicas.startup, SECONDS),
        explain_caches(_cache(order)),
        ExplainedValue("Restart of a replica", restarts, "it never gives up; the front goes on"),
        ExplainedValue("replica that hangs", f"{recipe.serve.hang_s:g} s", hung),
        ExplainedValue("WatchdogSec", str(WATCHDOG_S), blocked),
        ExplainedValue(f"{order.name}.target", "Requires, Wants, PartOf", order_of),
        ExplainedValue("User", user, shared),
        ExplainedValue("LoadCredential", "plan.json, api-key", secret),
    ]
    if variable := replicas.kinds[0].server.python_variable:
        where = "--replica-python: the Python of the engine's environment on that machine"
        lines.append(ExplainedValue(variable, order.options.replica_python, where))
    if order.plan.others:
        why = "of one kind of plan.json, for its replicas; the front reads plan.json"
        lines.append(ExplainedValue("plan-KIND.json", "a plan", why))
    for kind in replicas.kinds:
        file = f"{kind.label}-N.env"
        own = []
        if kind.gpus.value:
            shares = "; ".join(kind.devices)
            source = kind.gpus.source
            own.append(ExplainedValue(f"{file}: CUDA_VISIBLE_DEVICES", shares, source))
        if kind.gpus.value and order.plan.others:
            why = "as nvidia-smi numbers them; correct the numbers where the fleet's order is "
            own.append(ExplainedValue(f"{file}: CUDA_DEVICE_ORDER", "PCI_BUS_ID", f"{why}another"))
        if kind.cpus[0]:
            why = "recipe: engine.threads for each; give a replica two more where the machine has "
            own.append(ExplainedValue(f"{file}: CPUS", "; ".join(kind.cpus), f"{why}them"))
        lines += kind.about(own)
    return lines


def _folder(order: Order) -> str:
    """The folder of the files on the machine that runs the units."""
    if prefix := order.options.prefix:
        return f"{prefix}/{order.name}"
    return order.options.folder


def _explain_folder(order: Order) -> ExplainedValue:
    why = "where it was rendered; for another machine: --prefix /etc/llmctl"
    if order.options.prefix:
        why = "--prefix, and the deployment's name; the commands above copy the files there"
    return ExplainedValue("folder of the files", _folder(order), why)


def _start(order: Order, units: Sequence[str], templates: Sequence[str] = ()) -> str:
    """How to start the first of `units`, which starts the others and instances of `templates`."""
    here = '"$PWD"'
    place = "."
    copy = ""
    if order.options.prefix:
        here = shlex.quote(_folder(order))
        place = here
        copy = f"sudo install -d {here}\nsudo cp -r . {here}    # again for a new plan\n"
    serve = " ".join(["llmctl serve", place, "--target systemd", *order.allowances])
    files = [*units, *(f"{template}.service" for template in templates)]
    links = " ".join(f"{here}/{file}" for file in files)
    named = " ".join([*units, *(f"'{template}*'" for template in templates)])
    return f"""\
```sh
sudo install -d -m 0700 {KEY_FOLDER}
openssl rand -hex 32 | sudo install -m 0400 /dev/stdin {order.key_file}
{copy}sudo systemctl link {links}
sudo systemctl enable --now {units[0]}    # or: {serve}
systemctl status {named}
sudo systemctl stop {named}            # drains
```

{order.reading_the_key}"""
