"""`llmctl serve`: start the server of a plan.

That is our own server, that of an engine that is a server itself (vLLM), or a front before several
of these. The steps in between are in `serve_start`.
"""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from toolkit.cli import arguments, serve_start
from toolkit.cli.arguments import (
    CONTROL_KEY_VARIABLE,
    JsonOption,
    argument,
    command_of,
    limit_workers,
    option,
)
from toolkit.cli.basis import warn
from toolkit.cli.output import note
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.io import check_writable
from toolkit.files.plan import Plan
from toolkit.units import counted

if TYPE_CHECKING:
    from toolkit.backends import ServerOrder, StartsReplicas
    from toolkit.cli.serve_start import FrontToStart, Prepared
    from toolkit.gateway.sources import ReplicaSource
    from toolkit.routing.routers import Router
    from toolkit.serve.assemble import FrontSettings
    from toolkit.serve.launch import FrontConfig

_plan = partial(option, rich_help_panel="What runs")
_replicas = partial(option, rich_help_panel="Replicas")
_network = partial(option, rich_help_panel="Network and access")
_load = partial(option, rich_help_panel="Overload and shutdown")
_watch = partial(option, rich_help_panel="Logs, metrics and checks")
_live = partial(option, rich_help_panel="Live settings")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    plan: Path = argument(
        "The plan to serve, from `llmctl render`.",
        metavar="PLAN.json",
        autocompletion=arguments.plans,
    )
    workers: int | None = _plan(
        None, "Start this number of workers instead of the plan's.", min=1, callback=limit_workers
    )
    ray: str = _plan(
        "",
        "Run the workers on a Ray cluster: a new one on this machine (local), the one that runs on "
        "it (auto), or the one of a head node.",
        metavar="local|auto|HOST:PORT",
    )
    force: bool = _plan(
        False, "Serve although the fit is for another device, engine, version or model."
    )
    replica: list[str] | None = _replicas(
        None,
        "Serve through this server, which runs already; again for each further one.",
        metavar="URL",
    )
    replicas: str | None = _replicas(
        None,
        "As --replica, with a list that may change: a URL a line in a file, or all addresses of a "
        "name.",
        metavar="FILE|dns://NAME:PORT",
    )
    router: str = _replicas(
        "",
        "What chooses a request's replica; default: the plan's, else round-robin.",
        autocompletion=arguments.router,
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
        "Read the key from this file, as service managers provide secrets; or the sha256 of "
        "several keys, each with a name.",
    )
    ssl_certfile: Path | None = _network(
        None, "Use TLS with this certificate (PEM, with its chain)."
    )
    ssl_keyfile: Path | None = _network(
        None, "Read the certificate's key from this file; default: the certificate's file."
    )
    insecure: bool = _network(False, "Accept other machines without an API key.")
    open_metrics: bool = _network(False, "Let clients read /metrics without the key.")
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
        "Write every call of the scheduler to this file; it replays exactly.",
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
    live: bool = _live(
        False,
        "Engine vllm: let settings change while it serves (`llmctl set`), up to the bounds of the "
        "search (`llmctl tune --live`).",
    )
    control_key: str = _live(
        "",
        "The key of --live, in the environment; default: a new one, which this machine's user "
        "reads.",
        envvar=CONTROL_KEY_VARIABLE,
    )
    as_json: JsonOption = False


@command_of(ServeOptions)
def command(args: ServeOptions) -> None:
    """Start the server of a plan: `llmctl serve plan.json`.

    Prints one line when all workers have loaded, and notifies systemd where it started the server.
    SIGTERM or Ctrl-C shuts the server down: /ready turns 503, and running requests get
    --shutdown-timeout seconds; a second signal ends it at once. Files of keys are read again when
    they change.

    With --replica or --replicas the server is a front before replicas that run already; with
    engine vllm and several workers it starts them.
    """
    from toolkit.backends import Serves, StartsReplicas, backend_of

    given = serve_start.prepare(args)
    engine = given.plan.recipe.engine.name
    backend = backend_of(engine)
    if args.ray and (args.replica or args.replicas or traits_of(engine).server):
        raise InputError(
            f"--ray {args.ray}: a Ray cluster runs workers of llmctl's own engines, and no servers",
            "leave it out; for servers on several machines: llmctl render --target kubernetes",
        )
    several = given.plan.workers > 1
    own = backend if isinstance(backend, StartsReplicas) and several else None
    if args.replica or args.replicas or own is not None:
        _refuse_what_replicas_lack(args)
        serve_start.start(_before_replicas(args, given, own), given)
    elif isinstance(backend, Serves):
        serve_start.start_server(backend, _server_order(args, given), args, given)
    else:
        serve_start.start(_with_workers(args, given), given)


def _config(args: ServeOptions, given: Prepared, settings: FrontSettings) -> FrontConfig:
    """What all fronts have. `settings` are complete but for what the command line decides."""
    from toolkit.serve.launch import FrontConfig
    from toolkit.serve.server import Ending, is_loopback

    host, port = _address(args, given.plan)
    if args.ssl_certfile is None and args.ssl_keyfile is not None:
        raise InputError("--ssl-keyfile without a certificate", "give --ssl-certfile as well")
    page = is_loopback(host) if args.status_page is None else args.status_page
    return FrontConfig(
        settings=replace(settings, open_metrics=args.open_metrics, status_page=page),
        host=host,
        port=port,
        keys=given.keys,
        insecure=args.insecure,
        event_log=args.event_log,
        request_log=args.request_log,
        ending=Ending(args.shutdown_notice, args.shutdown_timeout, note),
        certificate=args.ssl_certfile,
        certificate_key=args.ssl_keyfile,
        manager=given.manager,
    )


def _with_workers(args: ServeOptions, given: Prepared) -> FrontToStart:
    """A front over workers of our own. `InputError` for options that it does not have."""
    from toolkit.serve.assemble import make_limits, make_settings
    from toolkit.serve.engine_front import engine_front

    plan = given.plan
    _refuse(args, f"engine {plan.recipe.engine.name}", "--pass-log", "--live")
    settings = make_settings(
        plan,
        model=args.served_model_name,
        allow_end_after=args.allow_end_after,
    )
    config = _config(args, given, settings)
    announce = partial(
        serve_start.announce_plan,
        args.as_json,
        plan,
        settings.model,
        status_page=config.settings.status_page,
    )
    make = partial(
        engine_front,
        plan,
        limits=make_limits(plan, args.admission, replays=args.allow_end_after),
        on_foreign=warn if args.force else None,
        ray=args.ray,
    )
    return serve_start.FrontToStart(config, make, announce)


def _server_order(args: ServeOptions, given: Prepared) -> ServerOrder:
    """The server of an engine that is one, with a log of its passes. `InputError` for options that
    it does not have.
    """
    from toolkit.backends import ServerOrder
    from toolkit.serve.assemble import model_name
    from toolkit.serve.server import Ending

    plan = given.plan
    what = f"engine {plan.recipe.engine.name}"
    why = ": it has a server of its own"
    _refuse(args, what, "--ssl-certfile", "--ssl-keyfile", "--request-log", "--allow-end-after",
            "--open-metrics", "--status-page", why=why)  # fmt: skip
    key, keys = given.keys.value
    if keys:
        raise InputError(f"{what} has one key{why}", "name a file with one key in one line")
    if args.pass_log is not None:
        check_writable(args.pass_log)
    return ServerOrder(
        plan,
        args.served_model_name or model_name(plan),
        *_address(args, plan),
        Ending(args.shutdown_notice, args.shutdown_timeout, note),
        key,
        args.insecure,
        args.event_log,
        warn if args.force else None,
        pass_log=args.pass_log,
        control_key=(args.control_key or secrets.token_urlsafe(24)) if args.live else "",
    )


def _refuse_what_replicas_lack(args: ServeOptions) -> None:
    """`InputError` for options that a front before several servers does not have."""
    _refuse(args, "a front before replicas", "--allow-end-after", "--pass-log", "--event-log")
    if args.live:
        raise InputError(
            "--live is about one server, and a front has several",
            "start each of them with --live, and change it with: llmctl set --url URL",
        )


def _before_replicas(
    args: ServeOptions, given: Prepared, own: StartsReplicas | None
) -> FrontToStart:
    """A front before several servers."""
    from toolkit.backends.openai import KEY_VARIABLE
    from toolkit.gateway.launch import limits_of_replicas, replica_front, replicas_like
    from toolkit.serve.assemble import FrontSettings

    plan = given.plan
    source = _replica_source(args)
    needs = replicas_like(plan, args.served_model_name, any_version=args.force)
    serve = plan.recipe.serve
    settings = FrontSettings(
        model=needs.model,
        max_new_tokens=serve.max_new_tokens,
        max_waiting=serve.max_waiting,
        request_timeout_s=serve.request_timeout_s or math.inf,
    )
    config = _config(args, given, settings)
    router = _router(args, plan)
    limits = limits_of_replicas(plan, args.admission, note)
    own = None if source is not None else own

    def announce(url: str) -> None:
        page = config.settings.status_page
        serve_start.announce_replicas(args.as_json, needs.model, router.name, url, status_page=page)

    if own is not None:
        note(f"starting {counted(plan.workers, 'server')} of {plan.recipe.engine.name}")
    make = partial(
        replica_front,
        plan,
        router=router,
        needs=needs,
        limits=limits,
        source=source,
        own=own,
        key=os.environ.get(KEY_VARIABLE, ""),
        on_foreign=warn if args.force else None,
        ending=config.ending,
    )
    return serve_start.FrontToStart(config, make, announce)


def _router(args: ServeOptions, plan: Plan) -> Router:
    """The router of --router with the plan's targets, else the plan's."""
    from toolkit.routing.routers import (
        RoundRobinRouter,
        make_router,
        refuse_unknown_router,
        targets_of,
    )

    planned = plan.settings.replica_router
    if planned is not None and args.router in ("", planned.name):
        return make_router(planned.name, planned.parameters)
    name = args.router or RoundRobinRouter.name
    refuse_unknown_router(name)
    return make_router(name, targets_of(name, plan.recipe.sla))


def _replica_source(args: ServeOptions) -> ReplicaSource | None:
    """The replicas that run already; None: none was named."""
    from toolkit.gateway.sources import given_replicas, replica_source

    if args.replica and args.replicas:
        raise InputError("both --replica and --replicas are given", "keep one of them")
    if args.replica:
        return given_replicas(args.replica)
    return replica_source(args.replicas) if args.replicas else None


def _refuse(args: ServeOptions, what: str, *names: str, why: str = "") -> None:
    """`InputError` where one of these options is given."""
    found = [name for name in names if getattr(args, name[2:].replace("-", "_"))]
    if found:
        raise InputError(f"{what} does not support {', '.join(found)}{why}", "leave it out")


def _address(args: ServeOptions, plan: Plan) -> tuple[str, int]:
    """The host and the port to listen on."""
    serve = plan.recipe.serve
    return args.host or serve.host, serve.port if args.port is None else args.port
