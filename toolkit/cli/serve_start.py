"""`llmctl serve`: from an order to a server that people, systemd, `llmctl status` and `llmctl stop`
know of.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from toolkit.cli.arguments import parse_settings
from toolkit.cli.basis import plan_of_recipe
from toolkit.cli.output import WIDTH, emit, note

if TYPE_CHECKING:
    from ssl import SSLContext

    from toolkit.backends import ServerOrder, Serves
    from toolkit.deploy.folder import Manifest
    from toolkit.deploy.running import Running, Where
    from toolkit.files.plan import Plan, PlannedPolicy
    from toolkit.serve.access import Callers
    from toolkit.serve.drift import DriftCheck
    from toolkit.serve.launch import Launch
    from toolkit.serve.rereading import WatchedFiles

# `llmctl serve --target`: where a server is to run, from what was rendered, and remembering those
# that run.

HERE = ("local", "ray")  # the server is this process
MANAGED = ("systemd", "compose")
ELSEWHERE = {
    "kubernetes": "kubectl apply -k {folder}",
    "vllm": "{folder}/serve.sh",
    "sglang": "{folder}/serve.sh",
}


@dataclass(frozen=True, slots=True)
class ServeLocation:
    """Where to serve; `plan` is the plan's file in a rendered folder, and None where none was
    given.
    """

    target: str
    folder: Path | None = None
    manifest: Manifest | None = None

    @property
    def plan(self) -> str | None:
        return None if self.folder is None else str(self.folder / "plan.json")

    @property
    def managed(self) -> bool:
        return self.target in MANAGED


def place_of(source: str | None, target: str | None) -> ServeLocation:
    """Where `source` is to be served. `InputError` for a target that serve cannot start, or that
    was not rendered.
    """
    from toolkit.deploy.folder import read_manifest
    from toolkit.errors import InputError, nearest

    folder = Path(source) if source and Path(source).is_dir() else None
    manifest = read_manifest(folder) if folder else None
    if folder and manifest is None:
        raise InputError(
            f"{folder}: nothing was rendered to this folder",
            "llmctl render PLAN.json --target TARGET",
        )
    chosen = target or (manifest.target if manifest else "local")
    if chosen in ELSEWHERE:
        command = ELSEWHERE[chosen].format(folder=folder or "FOLDER")
        raise InputError(f"serve does not start the target '{chosen}'", f"start it with: {command}")
    if chosen not in HERE + MANAGED:
        raise InputError(f"there is no target '{chosen}' to serve", nearest(chosen, HERE + MANAGED))
    if chosen in MANAGED and (manifest is None or manifest.target != chosen):
        raise InputError(
            f"the target '{chosen}' is served from a folder that was rendered for it",
            f"llmctl render PLAN.json --target {chosen}; then: llmctl serve {chosen}",
        )
    return ServeLocation(chosen, folder, manifest)


def serve_managed(place: ServeLocation, as_json: bool, *, broken: bool) -> None:
    """Hand the folder to its service manager, and remember the server.

    `InputError` where its plan is predicted to break limits, unless `broken` ones may be.
    """
    from toolkit.cli.basis import accept
    from toolkit.deploy.running import Running, name_of, remember, start
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan
    from toolkit.files.tuning import breaks
    from toolkit.serve.assemble import model_name

    assert place.folder is not None
    assert place.manifest is not None
    plan = read_file(Plan, place.folder / "plan.json")
    accept(plan, str(place.folder / "plan.json"), broken=broken)
    start(place.folder, place.manifest)
    url = f"http://127.0.0.1:{plan.recipe.serve.port or 8000}"
    server = Running(
        name=name_of(plan.recipe.name, url),
        target="systemd" if place.target == "systemd" else "compose",
        url=url,
        model=model_name(plan),
        workers=plan.workers,
        policy=plan.policy.name,
        folder=str(place.folder.absolute()),
        breaks=breaks(plan.limits),
    )
    remember(server)
    emit(as_json, server, lambda: _show_managed(server))


def _show_managed(server: Running) -> None:
    print(f"ready: {server.url} serves {server.model}, by {server.target}")
    if server.breaks:
        print(fill(f"warning: predicted to {server.breaks}", WIDTH, subsequent_indent="  "))


class ServerRecord:
    """What this process is remembered as while it serves."""

    def __init__(self, target: Where) -> None:
        self._target = target
        self._server: Running | None = None

    def ready(self, url: str, model: str, plan: Plan, certificate: Path | None = None) -> None:
        """Write the file; `certificate` is what the server shows.

        A folder that cannot be written, as in a container, costs `llmctl status`, not the server.
        """
        from toolkit.deploy.running import name_of, remember, this_process
        from toolkit.errors import InputError
        from toolkit.files.tuning import breaks

        name = name_of(plan.recipe.name, url)
        server = this_process(name, self._target, url, model, plan.workers, plan.policy.name)
        server = server.model_copy(update={"breaks": breaks(plan.limits)})
        if certificate is not None:
            server = server.model_copy(update={"certificate": str(certificate.absolute())})
        try:
            remember(server)
        except InputError as error:
            note(f"llmctl status will not know this server: {error.message}")
            return
        self._server = server

    def ended(self, requests: Mapping[str, int]) -> None:
        """Say how its requests ended, for `llmctl stop`, which waits for that."""
        from toolkit.deploy.running import remember

        if self._server is not None:
            remember(self._server.model_copy(update={"ended": dict(requests)}))
            self._server = None

    def forget(self) -> None:
        """Remove the file of a server that did not end in order."""
        from toolkit.deploy.running import forget

        if self._server is not None:
            forget(self._server)


@contextlib.contextmanager
def remembering(target: str) -> Iterator[ServerRecord]:
    """A memory that leaves nothing behind where the server fails."""
    memory = ServerRecord("ray" if target == "ray" else "local")
    try:
        yield memory
    finally:
        memory.forget()


def read_key(given: str, file: Path | None) -> str:
    """The API key: given, or the one line of a file. `InputError` for both, and for a file that
    holds none.
    """
    from toolkit.errors import InputError

    if file is None:
        return given.strip()
    if given:
        raise InputError(
            "the API key is given twice",
            "keep one of --api-key-file and --api-key or LLMCTL_API_KEY",
        )
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise InputError(
            f"{file}: cannot be read: {reason}", "it holds the API key, in one line"
        ) from None
    if not key or len(key.split()) != 1:
        raise InputError(f"{file}: no API key in it", "it holds the key alone, in one line")
    return key


def find_callers(
    given: str, file: Path | None, keys: Path | None
) -> tuple[Callers, WatchedFiles[Callers] | None]:
    """The API key, or the keys of a file; and where a file may change while the server runs, that
    file.

    `InputError` for both, and for a file that holds none.
    """
    from toolkit.errors import InputError
    from toolkit.files.keys import read_keys
    from toolkit.serve.rereading import WatchedFiles

    if keys is not None and (given or file is not None):
        raise InputError(
            "there is an API key, and a file of keys",
            "keep one of --api-keys and --api-key or its kin",
        )
    if keys is not None:
        source: WatchedFiles[Callers] = WatchedFiles([keys], lambda: ("", read_keys(keys)))
    elif file is not None and not given:
        source = WatchedFiles([file], lambda: (read_key("", file), ()))
    else:
        return (read_key(given, file), ()), None
    return source.value, source


def find_certificate(certificate: Path | None, key: Path | None) -> WatchedFiles[SSLContext] | None:
    """What TLS is spoken with; None: it is not. `InputError` for a key alone, and for files that
    hold no such thing.
    """
    from toolkit.errors import InputError
    from toolkit.serve.rereading import certificate_source

    if certificate is None:
        if key is not None:
            raise InputError("--ssl-keyfile without a certificate", "give --ssl-certfile as well")
        return None
    return certificate_source(certificate, key)


def start(order: Launch, *, certificate: Path | None, strict: bool, as_json: bool) -> None:
    """Serve until a signal ends it.

    With `strict` points of the fit that do not hold any more end it before it serves.
    """
    from toolkit.serve.drift import judge
    from toolkit.serve.launch import launch

    plan, front = order.plan, order.settings
    with remembering("ray" if order.ray else "local") as memory:

        def on_ready(url: str) -> None:
            memory.ready(url, front.model, plan, certificate)
            order.manager.tell("READY=1")
            _announce(as_json, url, front.model, plan, status_page=front.status_page)

        memory.ended(launch(order, on_ready, lambda found: judge(found, strict=strict, say=note)))


def start_server(backend: Serves, order: ServerOrder, *, as_json: bool) -> None:
    """The same of an engine that is a server of its own."""
    from toolkit.sched.policies import make_any, refuse_unservable

    plan = order.plan
    engine = plan.recipe.engine.name
    refuse_unservable(make_any(plan.policy.name, plan.policy.parameters), engine)
    note(f"starting {engine} for {plan.recipe.name}")
    with remembering("local") as memory:

        def on_ready(url: str) -> None:
            memory.ready(url, order.served_model, plan)
            _announce(as_json, url, order.served_model, plan)

        memory.ended(backend.launch(order, on_ready))


def points_to_check(plan: Plan, seconds: float | None) -> list[DriftCheck]:
    """What of the fits is measured again before the first request, in so many seconds; None: as
    many as is usual.
    """
    from toolkit.engine_traits import traits_of
    from toolkit.serve.drift import BUDGET_S, checks_of

    if seconds is None:
        fake = all(traits_of(kind.recipe.engine.name).for_tests for kind in plan.kinds)
        seconds = 0.0 if fake else BUDGET_S  # a fake's times are what it was told
    return checks_of(plan, seconds) if seconds else []


def _announce(
    as_json: bool, url: str, model: str, plan: Plan, *, status_page: bool = False
) -> None:
    from toolkit.files.tuning import breaks, broken

    page, broken_limits = f"{url}/" if status_page else None, broken(plan.limits)
    facts: dict[str, Any] = {
        "url": url,
        "model": model,
        "workers": plan.workers,
        "policy": plan.policy.name,
        "parameters": plan.policy.parameters,
        "status_page": page,
        "broken_limits": broken_limits,
    }

    def show() -> None:
        parameters = ", ".join(f"{name}={value}" for name, value in plan.policy.parameters.items())
        print(f"ready: {url} serves {model} on {plan.workers} worker{'s' * (plan.workers > 1)}")
        print(fill(f"policy: {plan.policy.name} ({parameters})", WIDTH, subsequent_indent="  "))
        if broken_limits:
            print(
                fill(f"warning: predicted to {breaks(plan.limits)}", WIDTH, subsequent_indent="  ")
            )
        if page:
            print(f"status page: {page}")

    emit(as_json, facts, show)
    sys.stdout.flush()


# `llmctl serve`: the plan that is served, from a file or made here, with what the command line
# says otherwise.


def plan_to_serve(
    source: str | None, plan: Path | None, fit: Path | None, tuning: Path | None, force: bool
) -> Plan:
    """A plan's file, or what a recipe or a fleet with its fits makes. `InputError` for both, and
    for neither.
    """
    from toolkit.cli.basis import plan_of_fleet
    from toolkit.errors import InputError
    from toolkit.files.fleet import is_fleet
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan
    from toolkit.files.shipped import is_recipe

    usage = "llmctl serve plan.json, or llmctl serve RECIPE --fit fit.json [--tuning tuning.json]"
    if plan is None and source and not is_recipe(source):
        plan, source = Path(source), None
    if plan is not None:
        if source or fit or tuning:
            raise InputError(
                "a plan holds the recipe, the fit and the tuning; give one or the other", usage
            )
        return read_file(Plan, plan)
    if source and is_fleet(source):
        if fit:
            raise InputError("a fleet names its fits", "leave --fit out")
        return plan_of_fleet(Path(source), tuning, force=force)[0]
    if source is None or fit is None:
        raise InputError("there is no plan to serve", usage)
    return plan_of_recipe(source, fit, tuning, force=force)


def changed(
    plan: Plan, policy: str | None, settings: list[str] | None, workers: int | None
) -> Plan:
    """The plan with what the command line says otherwise. `InputError` for a policy or parameter
    that is unknown.
    """
    from toolkit.cli.basis import refuse_workers
    from toolkit.deploy.plan import replaced

    if plan.others:
        refuse_workers(workers)
    if workers is not None and workers != plan.fit.workers:
        note(
            f"note: the fit was measured with {plan.fit.workers} workers at once; {workers} may take other times"
        )
    chosen = _policy(plan, policy, changes := parse_settings(settings))
    if policy is None and not changes and workers is None:
        return plan
    made = replaced(plan, chosen, policy is not None, changes, workers or plan.workers)
    if plan.predicted and not made.predicted:
        note(
            "note: what the tuning predicts does not hold for these settings; nothing is predicted"
        )
    return made


def _policy(
    plan: Plan, name: str | None, changes: dict[str, bool | int | float | str]
) -> PlannedPolicy:
    from toolkit.files.plan import PlannedPolicy
    from toolkit.sched.policies import make_any
    from toolkit.sched.policies.parameters import parameters

    same = name is None or name == plan.policy.name
    chosen = make_any(
        plan.policy.name if same else str(name), (plan.policy.parameters if same else {}) | changes
    )
    return PlannedPolicy(name=chosen.name, parameters=parameters(chosen))


def check_engine(plan: Plan, engine: str | None) -> None:
    """`InputError` where somebody expects another engine than the plan's."""
    from toolkit.errors import InputError

    planned = " and ".join(dict.fromkeys(kind.recipe.engine.name for kind in plan.kinds))
    if engine is not None and engine != planned:
        raise InputError(
            f"--engine {engine}: this plan is for engine '{planned}'",
            f"set engine.name to {engine} in the recipe; then: llmctl profile, fit, tune and render",
        )


# A secret that was handed over in the environment, and should not stay there.


def forget_variable(name: str) -> None:
    """Remove a variable from this process's environment, and from what Linux shows of it in
    /proc/PID/environ.

    That is the memory that the process was started with, which unsetting a variable does not touch.
    """
    value = os.environ.get(name)
    if value is None:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        address, size = libc.getenv(os.fsencode(name)), len(os.fsencode(value))
        if address and ctypes.string_at(address) == os.fsencode(value):
            ctypes.memset(address, 0, size)
    del os.environ[name]
