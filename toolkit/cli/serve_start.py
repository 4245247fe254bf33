"""The steps of `llmctl serve`: the plan, keys, and running a server."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from toolkit.cli.arguments import CONTROL_KEY_VARIABLE, parse_settings
from toolkit.cli.basis import accept, note_other_count, plan_from
from toolkit.cli.output import emit, note, paragraph
from toolkit.errors import InputError
from toolkit.files.io import read_file
from toolkit.files.plan import Plan, PlannedPolicy
from toolkit.files.shipped import is_recipe
from toolkit.files.tuning import breaks, broken
from toolkit.units import counted

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from toolkit.backends import ServerOrder, Serves
    from toolkit.cli.serve import ServeOptions
    from toolkit.serve.access import Callers
    from toolkit.serve.launch import FrontConfig, FrontServer, Manager, OpenedFront
    from toolkit.serve.server import WatchedFiles


class Prepared(NamedTuple):
    """What every server needs, checked.

    Attributes:
        file: of the plan, or of what it was made of.
    """

    plan: Plan
    file: Path
    keys: WatchedFiles[Callers]
    manager: Manager


def prepare(args: ServeOptions) -> Prepared:
    """The plan, the keys and the service manager. `InputError` for what cannot be used, and for a
    plan that is predicted to break limits where that is not allowed.
    """
    from toolkit.serve.launch import Manager

    # the workers inherit the environment, and run models' own code
    forget_variable("LLMCTL_API_KEY")
    forget_variable(CONTROL_KEY_VARIABLE)
    manager = Manager.take()
    keys = find_keys(args.api_key, args.api_key_file, args.api_keys)
    plan = plan_to_serve(args)
    plan = override(plan, args.policy, args.settings, args.workers)
    broken = args.force or args.allow_broken_limits
    accept(plan, str(args.tuning or args.plan or args.source), broken=broken)
    check_engine(plan, args.engine)
    file = args.plan or Path(args.source or "")
    return Prepared(plan, file, keys, manager)


def plan_to_serve(args: ServeOptions) -> Plan:
    """The plan that is given, or made of a recipe. `InputError` for both and neither."""
    usage = "llmctl serve plan.json, or llmctl serve RECIPE --fit fit.json [--tuning tuning.json]"
    source = args.source
    plan = args.plan
    fit = args.fit
    tuning = args.tuning
    if plan is None and source and not is_recipe(source):
        plan = Path(source)
        source = None
    if plan is not None:
        if source or fit or tuning:
            raise InputError(
                "a plan holds its recipe, fit and tuning; give either the plan or these", usage
            )
        return read_file(Plan, plan)
    if source is None or fit is None:
        raise InputError("neither a plan nor a recipe with --fit is given", usage)
    return plan_from(source, fit, tuning, force=args.force)[0]


def override(
    plan: Plan, policy: str | None, settings: list[str] | None, workers: int | None
) -> Plan:
    """The plan with these parts replaced. `InputError` for an unknown policy or parameter."""
    from toolkit.deploy.plan import replaced
    from toolkit.sched.policies import make_any
    from toolkit.sched.policies.parameters import parameters

    if workers is not None and workers != plan.fit.workers:
        note_other_count("the fit was measured", plan.fit, workers)
    changes = parse_settings(settings)
    planned = plan.policy
    name = planned.name if policy is None else policy
    chosen = make_any(name, (planned.parameters if name == planned.name else {}) | changes)
    if policy is None and not changes and workers is None:
        return plan
    new = PlannedPolicy(name=chosen.name, parameters=parameters(chosen))
    made = replaced(plan, new, policy is not None, changes, workers or plan.workers)
    if plan.predicted and not made.predicted:
        note("note: the tuning's predictions are for other settings; this plan has no predictions")
    return made


def check_engine(plan: Plan, engine: str | None) -> None:
    """`InputError` where the plan is for another engine than `engine`."""
    planned = plan.recipe.engine.name
    if engine is not None and engine != planned:
        hint = f"set engine.name to {engine} in the recipe"
        raise InputError(
            f"--engine {engine}: this plan is for engine '{planned}'",
            f"{hint}; then: llmctl profile, fit, tune and render",
        )


def read_key(key: str, file: Path | None) -> str:
    """The given key, or that of a file with one line. `InputError` for both, or a file without."""
    if file is None:
        return key.strip()
    if key:
        raise InputError(
            "the API key is given twice",
            "keep one of --api-key-file and --api-key or LLMCTL_API_KEY",
        )
    try:
        words = file.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII text"
        raise InputError(
            f"{file}: cannot be read: {reason}", "the file must hold the API key in one line"
        ) from None
    if len(words) != 1:
        raise InputError(
            f"{file}: the file holds no API key", "write the key alone into it, in one line"
        )
    return words[0]


def find_keys(key: str, file: Path | None, keys: Path | None) -> WatchedFiles[Callers]:
    """Return the API key, or the keys of a file, which may change while the server runs.

    Raises InputError if both a key and a file of keys are given, and for a file without a key.
    """
    from toolkit.serve.access import read_keys
    from toolkit.serve.server import WatchedFiles

    if keys is not None and (key or file is not None):
        raise InputError(
            "an API key and a file of keys are given",
            "keep --api-keys, or the key of --api-key, --api-key-file or LLMCTL_API_KEY",
        )
    if keys is not None:
        return WatchedFiles([keys], lambda: ("", read_keys(keys)))
    return WatchedFiles([file] if file else [], lambda: (read_key(key, file), ()))


def forget_variable(name: str) -> None:
    """Remove a variable from this process's environment, and from /proc/PID/environ on Linux.

    The latter shows the memory that the process was started with, which unsetting a variable does
    not touch.
    """
    value = os.environ.get(name)
    if value is None:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        address = libc.getenv(os.fsencode(name))
        size = len(os.fsencode(value))
        if address and ctypes.string_at(address) == os.fsencode(value):
            ctypes.memset(address, 0, size)
    del os.environ[name]


class FrontToStart(NamedTuple):
    """A front: `make` builds what its config serves, `announce` gets its URL once it is ready.
    `control_key` is the key of its settings.
    """

    config: FrontConfig
    make: Callable[[OpenedFront], AbstractContextManager[FrontServer]]
    announce: Callable[[str], None]
    control_key: str


def start(front: FrontToStart, given: Prepared) -> None:
    """Serve through a front until a signal ends it."""
    from toolkit.serve.launch import launch

    serve = partial(launch, front.config, front.make)
    serve_until_signal(serve, front.announce, given, front.control_key)


def start_server(
    backend: Serves,
    order: ServerOrder,
    args: ServeOptions,
    given: Prepared,
) -> None:
    """Start the server of an engine that is one itself, and serve until a signal ends it."""
    from toolkit.sched.policies import make_any, refuse_unservable

    plan = order.plan
    engine = plan.recipe.engine.name
    refuse_unservable(make_any(plan.policy.name, plan.policy.parameters), engine)
    note(f"starting {engine} for {plan.recipe.name}")

    announce = partial(announce_plan, args.as_json, plan, order.served_model)
    launch = partial(backend.launch, replace(order, beat=given.manager.beat))
    serve_until_signal(launch, announce, given, order.control_key)


def serve_until_signal(
    launch: Callable[[Callable[[str], None]], Mapping[str, int]],
    announce: Callable[[str], None],
    given: Prepared,
    control_key: str,
) -> None:
    """Serve until a signal ends the server, and print how its requests ended.

    `launch` calls its argument with the URL once the server is ready, which `announce` prints, and
    returns the number of ended requests by finish reason. `control_key` is the key of its settings,
    kept for `llmctl set` while the server runs.
    """
    from toolkit.cli.control_keys import kept_key

    was_ready = False
    with ExitStack() as stack:

        def on_ready(url: str) -> None:
            nonlocal was_ready
            was_ready = True
            if control_key:
                try:
                    stack.enter_context(kept_key(url, control_key))
                except OSError as error:
                    note(f"llmctl set will need --control-key: {error}")
            given.manager.tell("READY=1")
            announce(url)
            sys.stdout.flush()

        ended = dict(launch(on_ready))
    if not was_ready:
        note("stopped by a signal before it was ready")
        return
    finished = ended.pop("stop", 0) + ended.pop("length", 0)
    others = "".join(f", {count} {reason}" for reason, count in ended.items() if count)
    note(f"ended; requests finished: {finished}{others}")


def announce_plan(
    as_json: bool, plan: Plan, model: str, url: str, *, status_page: bool = False
) -> None:
    """Print that the server of the plan is ready, what it serves, and limits that it will break."""
    page = f"{url}/" if status_page else None
    broken_limits = broken(plan.limits)
    facts = {
        "url": url,
        "model": model,
        "workers": plan.workers,
        "policy": plan.policy.name,
        "parameters": plan.policy.parameters,
        "status_page": page,
        "broken_limits": broken_limits,
    }

    def show() -> None:
        parameters = ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in plan.policy.parameters.items()
        )
        print(f"ready: {url} serves {model} on {counted(plan.workers, 'worker')}")
        paragraph(f"policy: {plan.policy.name} ({parameters})")
        if broken_limits:
            paragraph(f"warning: predicted to {breaks(plan.limits)}")
        if page:
            print(f"status page: {page}")

    emit(as_json, facts, show)


def announce_replicas(
    as_json: bool, model: str, router: str, url: str, *, status_page: bool
) -> None:
    """Print that a front is ready, and where its replicas are shown."""
    page = f"{url}/" if status_page else None
    facts = {"url": url, "model": model, "router": router, "status_page": page}
    lines = [
        f"ready: {url} serves {model or 'the model of its replicas'}",
        f"router: {router}; replicas: {url}/replicas",
        *([f"status page: {page}"] if page else []),
    ]
    emit(as_json, facts, lambda: print("\n".join(lines)))
