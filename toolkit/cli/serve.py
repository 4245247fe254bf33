"""`llmctl serve`: start the server of a plan.

It is llmctl's own server, an engine that is a server itself (vLLM), or a front before several of
these. What a server needs to know is in one `ServerOptions`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from toolkit.cli.arguments import (
    CONTROL_KEY_VARIABLE,
    ScenarioOptions,
    argument,
    command_of,
    option,
)
from toolkit.cli.basis import warn, warn_broken
from toolkit.cli.output import emit, note, paragraph
from toolkit.cli.scenario import Scenario
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.files.tuning import broken
from toolkit.report.steps import typed
from toolkit.units import bracketed, counted, words

if TYPE_CHECKING:
    from toolkit.server.options import ServerOptions
    from toolkit.server.watched import Watched

OWN_SERVER = ": it has a server of its own"

_runs = partial(option, rich_help_panel="What runs")
_network = partial(option, rich_help_panel="Network and access")
_load = partial(option, rich_help_panel="Overload and shutdown")
_watch = partial(option, rich_help_panel="Logs, metrics and checks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(ScenarioOptions):
    plan: Path = argument(
        "The plan to serve, from `llmctl render`.",
        metavar="PLAN.json",
    )
    ray: str = _runs(
        "",
        "Run the workers on a Ray cluster: a new one on this machine (local), the one that runs on "
        "it (auto), or the one of a head node.",
        metavar="local|auto|HOST:PORT",
    )
    replica: list[str] | None = _runs(
        None,
        "Serve through this server, which runs already; again for each further one. Or through the "
        "servers of a list that may change: a file with a URL on each line, or all addresses of a "
        "DNS name.",
        metavar="URL|FILE|dns://NAME:PORT",
    )
    router: str = _runs(
        "",
        "What chooses a request's replica; default: the plan's, else round-robin.",
    )
    host: str | None = _network(None, "Listen on this address; default: the recipe's.")
    port: int | None = _network(
        None, "Listen on this port; 0 takes a free one; default: the recipe's.", min=0, max=65535
    )
    api_key: str = _network(
        "",
        "Require this key from all clients. The environment variable hides it better.",
        envvar="LLMCTL_API_KEY",
    )
    api_key_file: Path | None = _network(
        None,
        "Read the key from this file, as service managers provide secrets; or several, one on each "
        "line.",
    )
    ssl_certfile: Path | None = _network(
        None, "Use TLS with this certificate (PEM, with its chain)."
    )
    ssl_keyfile: Path | None = _network(
        None, "Read the certificate's key from this file; default: the certificate's file."
    )
    insecure: bool = _network(False, "Accept other machines without an API key.")
    served_model_name: str = _network("", "The name of the model in the API.")
    allow_end_after: bool = _network(
        False, "Let requests set the length of their output (llmctl_end_after), for replays."
    )
    admission: Literal["targets", "queue"] | None = _load(
        None,
        "Refuse requests that are predicted to miss the targets (targets), or only those that "
        "meet serve.max_waiting waiting ones (queue); default: the recipe's.",
    )
    shutdown_timeout: float = _load(
        30.0, "Give running requests this long after a signal.", min=0, metavar="SECONDS"
    )
    shutdown_notice: float = _load(
        0.0,
        "Answer /ready with 503 for this long before requests are refused.",
        min=0,
        metavar="SECONDS",
    )
    event_log: Path | None = _watch(
        None,
        "Write every call of the scheduler to this file; it replays exactly. Where a rule scales "
        "the servers that are started: every call of the autoscaler.",
    )
    pass_log: Path | None = _watch(
        None,
        "Write a line for each forward pass of engine vllm to this file: lengths and times only.",
    )
    request_log: Path | None = _watch(
        None, "Write a trace of the requests to this file: lengths and times only."
    )
    status_page: bool | None = _watch(
        None,
        "Serve a page at / for people, without the key: totals, no requests. Default: only where "
        "the server listens on this machine alone.",
        "--status-page/--no-status-page",
    )
    live: bool = _runs(
        False,
        "Engine vllm: let settings change while it serves (`llmctl set`), up to the bounds of the "
        "search (`llmctl tune --live`).",
    )


@command_of(ServeOptions, "workers", "force")
def command(args: ServeOptions) -> None:
    """Start the server of a plan: `llmctl serve plan.json`.

    Prints one line when all workers have loaded, and notifies systemd where it started the server.
    SIGTERM or Ctrl-C shuts the server down: /ready turns 503, and running requests get
    --shutdown-timeout seconds; a second signal ends it at once. Files of keys are read again when
    they change.

    With --replica the server is a front before replicas that run already; with
    engine vllm and several workers it starts them.
    """
    from toolkit.backends import Serves, StartsReplicas, backend_of
    from toolkit.sched.policies import make_any, refuse_unservable
    from toolkit.server.process import forget_variable
    from toolkit.server.server import Server

    # the workers inherit the environment, and run models' own code
    control_key = os.environ.get(CONTROL_KEY_VARIABLE, "")
    forget_variable("LLMCTL_API_KEY")
    forget_variable(CONTROL_KEY_VARIABLE)
    plan = Scenario.of_plan(args).plan
    assert plan is not None
    warn_broken(plan, str(args.plan))
    name = plan.recipe.engine.name
    engine = backend_of(name) if traits_of(name).server else None
    several = plan.workers > 1 or plan.settings.scaling is not None
    start = engine.replica if isinstance(engine, StartsReplicas) and several else None
    has_replicas = bool(args.replica or start)
    _refuse_what_it_lacks(args, plan, has_replicas=has_replicas)
    options = _options(args, plan, control_key, has_replicas=has_replicas)
    ready = Announcement(args.plan, plan, options, as_json=args.as_json)
    ended: Mapping[str, int]
    if has_replicas:
        from toolkit.server.pool import pool_backend

        with Server.open(options, pool_backend(plan, options, start)) as server:
            ended = server.run(ready)
    elif isinstance(engine, Serves):
        policy = make_any(plan.settings.policy, plan.settings.parameters)
        refuse_unservable(policy, name)
        note(f"starting {name} for {plan.recipe.name}")
        ended = engine.launch(plan, options, ready)
    else:
        from toolkit.server.engine import engine_backend

        with Server.open(options, engine_backend(plan, options)) as server:
            ended = server.run(ready)
    ready.say_how_it_ended(ended)


def _refuse_what_it_lacks(args: ServeOptions, plan: Plan, *, has_replicas: bool) -> None:
    """Raise InputError for options that this server does not have."""
    name = plan.recipe.engine.name
    is_server = traits_of(name).server
    if args.ray and (has_replicas or is_server):
        raise InputError(
            f"--ray {args.ray}: a Ray cluster runs workers of llmctl's own engines, and no servers",
            "leave it out; for servers on several machines: llmctl render --target kubernetes",
        )
    if has_replicas:
        scales = plan.settings.scaling is not None and not args.replica
        unknown = ["--allow-end-after", "--pass-log", *([] if scales else ["--event-log"])]
        _refuse(args, "a front before replicas", *unknown)
        if args.live:
            raise InputError(
                "--live is about one server, and a front has several",
                "start each of them with --live, and change it with: llmctl set --url URL",
            )
    elif is_server:
        _refuse(args, f"engine {name}", "--ssl-certfile", "--ssl-keyfile", "--request-log",
                "--allow-end-after", "--status-page", why=OWN_SERVER)  # fmt: skip
    else:
        _refuse(args, f"engine {name}", "--pass-log", "--live")
    if args.ssl_certfile is None and args.ssl_keyfile is not None:
        raise InputError("--ssl-keyfile without a certificate", "give --ssl-certfile as well")


def _refuse(args: ServeOptions, what: str, *names: str, why: str = "") -> None:
    """Raise InputError where one of these options is given."""
    found = [name for name in names if getattr(args, name[2:].replace("-", "_"))]
    if found:
        raise InputError(f"{what} does not support {', '.join(found)}{why}", "leave it out")


def _options(
    args: ServeOptions, plan: Plan, control_key: str, *, has_replicas: bool
) -> ServerOptions:
    """Return what the server is told: the command line over the recipe's settings.

    Raises InputError for keys, files or replicas that cannot be used.
    """
    from toolkit.backends.openai import KEY_VARIABLE
    from toolkit.server.options import ServerOptions, find_keys, model_name
    from toolkit.server.process import is_loopback

    if args.live and not control_key:
        raise InputError(
            f"--live needs a key for changes of settings, in {CONTROL_KEY_VARIABLE}",
            f"export {CONTROL_KEY_VARIABLE}=$(openssl rand -hex 16), also where llmctl set runs",
        )
    serve = plan.recipe.serve
    host = args.host or serve.host
    keys = find_keys(args.api_key, args.api_key_file)
    engine = plan.recipe.engine.name
    if len(keys.value) > 1 and traits_of(engine).server and not has_replicas:
        text = f"engine {engine} has one key{OWN_SERVER}"
        raise InputError(text, "name a file with one key")
    name = model_name(plan)
    router = ""
    if has_replicas:
        from toolkit.server.pool import name_of_replicas, planned_router

        name = name_of_replicas(plan)
        router = args.router or planned_router(plan)
    return ServerOptions(
        model=args.served_model_name or name,
        host=host,
        port=serve.port if args.port is None else args.port,
        keys=keys,
        insecure=args.insecure,
        certificate=args.ssl_certfile,
        certificate_key=args.ssl_keyfile,
        status_page=is_loopback(host) if args.status_page is None else args.status_page,
        max_new_tokens=serve.max_new_tokens,
        max_waiting=serve.max_waiting,
        request_timeout_s=serve.request_timeout_s or math.inf,
        admission=args.admission or "",
        allow_end_after=args.allow_end_after,
        notice_s=args.shutdown_notice,
        timeout_s=args.shutdown_timeout,
        event_log=args.event_log,
        pass_log=args.pass_log,
        request_log=args.request_log,
        control_key=control_key if args.live else "",
        ray=args.ray,
        replicas=_replica_source(args.replica) if args.replica else None,
        replica_key=os.environ.get(KEY_VARIABLE, ""),
        router=router,
        on_foreign=warn if args.force else None,
        say=note,
    )


def _replica_source(replicas: Sequence[str]) -> Watched[list[str]]:
    """Return the replicas that run already: URLs, or one list that may change."""
    from toolkit.server.watched import given_replicas, listed_replicas

    if len(replicas) == 1 and not replicas[0].lower().startswith(("http://", "https://")):
        return listed_replicas(replicas[0])
    return given_replicas(replicas)


class Announcement:
    """Prints that a server is ready, and tells its service manager."""

    def __init__(self, file: Path, plan: Plan, options: ServerOptions, *, as_json: bool) -> None:
        self._was_ready = False
        self._as_json = as_json
        self._file = file
        self._plan = plan
        self._options = options

    def __call__(self, url: str) -> None:
        """Say that the server at `url` is ready."""
        from toolkit.server.process import tell_ready

        self._was_ready = True
        options = self._options
        tell_ready()
        plan = self._plan
        has_page = bool(options.router) or not traits_of(plan.recipe.engine.name).server
        page = f"{url}/" if options.status_page and has_page else None
        facts = {
            "url": url,
            "model": options.model,
            "router": options.router or None,
            "workers": plan.workers,
            "policy": plan.settings.policy,
            "parameters": plan.settings.parameters,
            "broken_limits": broken(plan.limits),
            "status_page": page,
        }
        emit(self._as_json, facts, lambda: self._show(url, page))
        sys.stdout.flush()
        note(f"next, in another shell: {typed('bench', '--plan', self._file, '--url', url)}")

    def _show(self, url: str, page: str | None) -> None:
        plan = self._plan
        model = self._options.model
        if router := self._options.router:
            print(f"ready: {url} serves {model or 'the model of its replicas'}")
            print(f"router: {router}; replicas: {url}/replicas")
        else:
            print(f"ready: {url} serves {model} on {counted(plan.workers, 'worker')}")
            own = bracketed(words(plan.settings.parameters))
            paragraph(f"policy: {plan.settings.policy}{own}")
        if page:
            print(f"status page: {page}")

    def say_how_it_ended(self, ended: Mapping[str, int]) -> None:
        """Print how the server's requests ended, by their number of each finish reason."""
        if not self._was_ready:
            note("stopped by a signal before it was ready")
            return
        counts = dict(ended)
        finished = counts.pop("stop", 0) + counts.pop("length", 0)
        others = "".join(f", {count} {reason}" for reason, count in counts.items() if count)
        note(f"ended; requests finished: {finished}{others}")
