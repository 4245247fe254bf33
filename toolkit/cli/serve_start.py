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

from toolkit.cli.arguments import CONTROL_KEY_VARIABLE
from toolkit.cli.basis import note_other_count, warn_broken
from toolkit.cli.output import emit, note, paragraph
from toolkit.errors import InputError
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.shipped import is_recipe
from toolkit.files.tuning import broken
from toolkit.units import counted

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from toolkit.backends import ServerOrder, Serves
    from toolkit.cli.serve import ServeOptions
    from toolkit.serve.access import Callers
    from toolkit.serve.launch import FrontConfig, FrontServer, Manager, OpenedFront
    from toolkit.serve.server import WatchedFiles


class Prepared(NamedTuple):
    """What every server needs, checked."""

    plan: Plan
    keys: WatchedFiles[Callers]
    manager: Manager


def prepare(args: ServeOptions) -> Prepared:
    """The plan, the keys and the service manager. `InputError` for what cannot be used."""
    from toolkit.serve.launch import Manager

    # the workers inherit the environment, and run models' own code
    forget_variable("LLMCTL_API_KEY")
    forget_variable(CONTROL_KEY_VARIABLE)
    manager = Manager.take()
    keys = find_keys(args.api_key, args.api_key_file)
    return Prepared(plan_to_serve(args.plan, args.workers), keys, manager)


def plan_to_serve(file: Path, workers: int | None) -> Plan:
    """Return the plan of a file, with another number of workers if one is given. Print a warning
    where it is predicted to break limits.

    Raises InputError for a recipe.
    """
    from toolkit.deploy.plan import with_workers

    if is_recipe(file):
        raise InputError(f"{file} is no plan", f"make one with: llmctl render {file}")
    plan = read_file(Plan, file)
    if workers not in (None, plan.workers):
        if workers != plan.fit.workers:
            note_other_count("the fit was measured", plan.fit, workers)
        made = with_workers(plan, workers)
        if plan.outcome.metrics and not made.outcome.metrics:
            note("note: the tuning's predictions are for another number of workers")
        plan = made
    warn_broken(plan, str(file))
    return plan


def find_keys(key: str, file: Path | None) -> WatchedFiles[Callers]:
    """Return the API key, or the keys of a file, which may change while the server runs.

    Raises InputError if both are given, and for a file without a key.
    """
    from toolkit.serve.access import read_callers
    from toolkit.serve.server import WatchedFiles

    if file is None:
        return WatchedFiles([], lambda: (key.strip(), ()))
    if key:
        raise InputError(
            "the API key is given twice",
            "keep one of --api-key-file and --api-key or LLMCTL_API_KEY",
        )
    return WatchedFiles([file], partial(read_callers, file))


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
    """A front: `make` builds what its config serves, `announce` gets its URL once it is ready."""

    config: FrontConfig
    make: Callable[[OpenedFront], AbstractContextManager[FrontServer]]
    announce: Callable[[str], None]


def start(front: FrontToStart, given: Prepared) -> None:
    """Serve through a front until a signal ends it."""
    from toolkit.serve.launch import launch

    serve = partial(launch, front.config, front.make)
    serve_until_signal(serve, front.announce, given)


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
    refuse_unservable(make_any(plan.settings.policy, plan.settings.parameters), engine)
    note(f"starting {engine} for {plan.recipe.name}")

    announce = partial(announce_plan, args.as_json, plan, order.served_model)
    launch = partial(backend.launch, replace(order, beat=given.manager.beat))
    serve_until_signal(launch, announce, given, order.control_key)


def serve_until_signal(
    launch: Callable[[Callable[[str], None]], Mapping[str, int]],
    announce: Callable[[str], None],
    given: Prepared,
    control_key: str = "",
) -> None:
    """Serve until a signal ends the server, and print how its requests ended.

    `launch` calls its argument with the URL once the server is ready, which `announce` prints, and
    returns the number of ended requests by finish reason. `control_key` is the key of its settings,
    kept for `llmctl set` while the server runs; '': they cannot be changed.
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
    """Print that the server of the plan is ready, and what it serves."""
    page = f"{url}/" if status_page else None
    facts = {
        "url": url,
        "model": model,
        "workers": plan.workers,
        "policy": plan.settings.policy,
        "parameters": plan.settings.parameters,
        "status_page": page,
        "broken_limits": broken(plan.limits),
    }

    def show() -> None:
        parameters = ", ".join(
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in plan.settings.parameters.items()
        )
        print(f"ready: {url} serves {model} on {counted(plan.workers, 'worker')}")
        paragraph(f"policy: {plan.settings.policy} ({parameters})")
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
