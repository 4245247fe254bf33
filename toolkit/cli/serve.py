"""`llmctl serve`: start what a plan says. OpenAI's API in front, the scheduler, workers in
processes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from toolkit.cli import completion
from toolkit.cli.arguments import JsonOption, SetOption, limit_workers, resolve_fit
from toolkit.cli.basis import accept, warn_of_foreign
from toolkit.cli.output import note

# What `llmctl serve` can be told on its command line.

# the headings under which `--help` lists them
WHAT, CALLERS, LOAD, WATCHING = "What runs", "Who may call", "Overload and the end", "Watching it"

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="PLAN.json|RECIPE|FLEET|FOLDER",
        autocompletion=completion.recipes_and_plans,
        help="A plan, a recipe with --fit, a fleet, or what was rendered.",
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        autocompletion=completion.served_targets,
        rich_help_panel=WHAT,
        help="local, or of a rendered folder what it is for: systemd, compose, ray.",
    ),
]
PlanOption = Annotated[
    Path | None,
    typer.Option("--plan", rich_help_panel=WHAT, help="plan.json, from `llmctl render`."),
]
FitOption = Annotated[
    Path | None,
    typer.Option(
        "--fit",
        callback=resolve_fit,
        autocompletion=completion.fits,
        rich_help_panel=WHAT,
        help="With a recipe: its fit.json, or the name of a recipe whose fit ships; the plan is made here.",
    ),
]
TuningOption = Annotated[
    Path | None, typer.Option("--tuning", rich_help_panel=WHAT, help="With --fit: tuning.json.")
]
HostOption = Annotated[
    str | None,
    typer.Option(
        "--host", rich_help_panel=CALLERS, help="Address to listen on; the recipe's by default."
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        rich_help_panel=CALLERS,
        help="Port; 0 takes a free one. The recipe's by default.",
    ),
]
KeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="LLMCTL_API_KEY",
        show_default=False,
        rich_help_panel=CALLERS,
        help="Asked of all clients; better in the environment.",
    ),
]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        rich_help_panel=CALLERS,
        help="A file with the key, as service managers hand out secrets.",
    ),
]
KeysOption = Annotated[
    Path | None,
    typer.Option(
        "--api-keys",
        envvar="LLMCTL_API_KEYS",
        show_default=False,
        rich_help_panel=CALLERS,
        help="A file of several keys' sha256, each with a name and limits of its own.",
    ),
]
CertificateOption = Annotated[
    Path | None,
    typer.Option(
        "--ssl-certfile",
        rich_help_panel=CALLERS,
        help="Speak TLS with this certificate (PEM, with its chain).",
    ),
]
CertificateKeyOption = Annotated[
    Path | None,
    typer.Option(
        "--ssl-keyfile",
        rich_help_panel=CALLERS,
        help="The certificate's key; default: it is in the same file.",
    ),
]
NameOption = Annotated[
    str,
    typer.Option(
        "--served-model-name", rich_help_panel=CALLERS, help="What clients call the model."
    ),
]
PolicyOption = Annotated[
    str | None,
    typer.Option(
        "--policy",
        autocompletion=completion.policy,
        rich_help_panel=WHAT,
        help="Another policy than the plan's, with --set.",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=1,
        callback=limit_workers,
        rich_help_panel=WHAT,
        help="Another number than the plan's.",
    ),
]
EventLogOption = Annotated[
    Path | None,
    typer.Option(
        "--event-log",
        rich_help_panel=WATCHING,
        help="Write every call of the scheduler here; it replays exactly.",
    ),
]
RequestLogOption = Annotated[
    Path | None,
    typer.Option(
        "--request-log",
        rich_help_panel=WATCHING,
        help="Write a trace of the requests here: lengths and times only.",
    ),
]
EndAfterOption = Annotated[
    bool,
    typer.Option(
        "--allow-end-after",
        rich_help_panel=CALLERS,
        help="Let requests say where they end (llmctl_end_after), for replays.",
    ),
]
AdmissionOption = Annotated[
    Literal["targets", "queue"] | None,
    typer.Option(
        "--admission",
        rich_help_panel=LOAD,
        help="Refuse who would miss the targets, or only who finds serve.max_waiting others; the recipe's by default.",
    ),
]
VllmOption = Annotated[
    bool,
    typer.Option(
        "--vllm-metrics",
        rich_help_panel=WATCHING,
        help="Offer the metrics under vLLM's names, too.",
    ),
]
OpenMetricsOption = Annotated[
    bool,
    typer.Option(
        "--open-metrics", rich_help_panel=CALLERS, help="Let /metrics be read without the key."
    ),
]
StatusOption = Annotated[
    bool | None,
    typer.Option(
        "--status-page/--no-status-page",
        show_default=False,
        rich_help_panel=WATCHING,
        help="A page at / for people, without the key: sums, no requests. Default: where only this machine connects.",
    ),
]
RequestTimeoutOption = Annotated[
    float | None,
    typer.Option(
        "--request-timeout",
        min=0.001,
        show_default=False,
        metavar="SECONDS",
        rich_help_panel=LOAD,
        help="Deadline of requests that name none, and the longest that one may name; the recipe's by default.",
    ),
]
ClientShareOption = Annotated[
    float | None,
    typer.Option(
        "--client-share",
        min=0.001,
        max=1,
        show_default=False,
        metavar="SHARE",
        rich_help_panel=LOAD,
        help="Of connections and held bytes, for one address; 0.5 by default. 1 behind a proxy elsewhere.",
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option(
        "--shutdown-timeout",
        min=0,
        rich_help_panel=LOAD,
        help="Seconds that running requests get after a signal.",
    ),
]
NoticeOption = Annotated[
    float,
    typer.Option(
        "--shutdown-notice",
        min=0,
        rich_help_panel=LOAD,
        help="Seconds of /ready 503 before requests are refused.",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        rich_help_panel=WHAT,
        help="What the plan must be for; another engine has other laws.",
    ),
]
CheckOption = Annotated[
    float | None,
    typer.Option(
        "--check",
        min=0,
        show_default=False,
        rich_help_panel=WATCHING,
        help="Seconds of measuring points of the fit again before the first request; 3 by default, 0 for engine fake.",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        rich_help_panel=WATCHING,
        help="Do not serve where these are beyond the fit's stated error: exit code 4.",
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        rich_help_panel=WHAT,
        help="Serve though the fit is of another device, engine, version or model, or the plan breaks limits.",
    ),
]
BrokenOption = Annotated[
    bool,
    typer.Option(
        "--allow-broken-limits",
        rich_help_panel=WHAT,
        help="Serve though the plan is predicted to break limits of the recipe.",
    ),
]
RayOption = Annotated[
    str,
    typer.Option(
        "--ray",
        metavar="local|auto|HOST:PORT",
        rich_help_panel=WHAT,
        help="Run the workers on a Ray cluster: a new one here, this machine's, or that of a head.",
    ),
]
RoomOption = Annotated[
    float,
    typer.Option(
        "--room-timeout",
        min=0,
        metavar="SECONDS",
        rich_help_panel=WHAT,
        help="With --ray: how long the cluster may take to have room for all workers.",
    ),
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure", rich_help_panel=CALLERS, help="Serve other machines without an API key."
    ),
]


def command(
    source: Source = None,
    target: TargetOption = None,
    plan: PlanOption = None,
    fit: FitOption = None,
    tuning: TuningOption = None,
    host: HostOption = None,
    port: PortOption = None,
    api_key: KeyOption = "",
    api_key_file: KeyFileOption = None,
    api_keys: KeysOption = None,
    ssl_certfile: CertificateOption = None,
    ssl_keyfile: CertificateKeyOption = None,
    served_model_name: NameOption = "",
    policy: PolicyOption = None,
    settings: SetOption = None,
    workers: WorkersOption = None,
    ray: RayOption = "",
    room_timeout: RoomOption = 60.0,
    event_log: EventLogOption = None,
    request_log: RequestLogOption = None,
    admission: AdmissionOption = None,
    allow_end_after: EndAfterOption = False,
    vllm_metrics: VllmOption = False,
    open_metrics: OpenMetricsOption = False,
    status_page: StatusOption = None,
    request_timeout: RequestTimeoutOption = None,
    client_share: ClientShareOption = None,
    shutdown_timeout: TimeoutOption = 30.0,
    shutdown_notice: NoticeOption = 0.0,
    check: CheckOption = None,
    strict: StrictOption = False,
    insecure: InsecureOption = False,
    engine: EngineOption = None,
    force: ForceOption = False,
    allow_broken_limits: BrokenOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start the server of a plan: `llmctl serve plan.json`, or `llmctl serve RECIPE --fit
    fit.json`.

    Prints one line when all workers are loaded and a few points of the fit were measured again, and
    tells systemd where that started it. SIGTERM or Ctrl-C ends it in order: /ready turns 503,
    running requests get --shutdown-timeout seconds; a second signal ends it at once. Files of keys
    and certificates are read again where they change.
    """
    from toolkit.backends import ServerOrder, Serves, backend_of
    from toolkit.cli.serve_start import (
        changed,
        check_engine,
        find_callers,
        find_certificate,
        forget_variable,
        place_of,
        plan_to_serve,
        points_to_check,
        serve_managed,
        start,
        start_server,
    )
    from toolkit.serve.assemble import make_limits, make_settings, model_name
    from toolkit.serve.http import CLIENT_SHARE
    from toolkit.serve.launch import Launch, Manager
    from toolkit.serve.server import Ending, is_loopback

    place = place_of(source, target)
    if place.managed:
        serve_managed(place, as_json, broken=force or allow_broken_limits)
        return
    ray = ray or ("auto" if place.target == "ray" else "")
    forget_variable(
        "LLMCTL_API_KEY"
    )  # the workers inherit the environment, and run models' own code
    manager, ((key, keys), callers) = Manager.take(), find_callers(api_key, api_key_file, api_keys)
    chosen = changed(
        plan_to_serve(place.plan or source, plan, fit, tuning, force), policy, settings, workers
    )
    accept(chosen, str(tuning or place.plan or plan or source), broken=force or allow_broken_limits)
    check_engine(chosen, engine)
    spec, foreign = chosen.recipe.serve, warn_of_foreign if force else None
    at = host or spec.host, spec.port if port is None else port
    backend = backend_of(chosen.recipe.engine.name)
    ending = Ending(shutdown_notice, shutdown_timeout, note)
    if isinstance(backend, Serves):
        _refuse(
            chosen.recipe.engine.name,
            {
                "--ray": ray,
                "--api-keys": api_keys,
                "--ssl-certfile": ssl_certfile,
                "--ssl-keyfile": ssl_keyfile,
                "--request-log": request_log,
                "--request-timeout": request_timeout,
                "--client-share": client_share,
                "--allow-end-after": allow_end_after,
                "--vllm-metrics": vllm_metrics,
                "--open-metrics": open_metrics,
                "--check": check,
                "--strict": strict,
                "--status-page": status_page,
            },
        )
        name = served_model_name or model_name(chosen)
        outside = ServerOrder(chosen, name, *at, ending, key, insecure, event_log, foreign)
        start_server(backend, outside, as_json=as_json)
        return
    front = make_settings(
        chosen,
        model=served_model_name,
        api_key=key,
        keys=keys,
        request_timeout_s=request_timeout,
        allow_end_after=allow_end_after,
        vllm_metrics=vllm_metrics,
        open_metrics=open_metrics,
        status_page=is_loopback(at[0]) if status_page is None else status_page,
    )
    order = Launch(
        plan=chosen,
        settings=front,
        host=at[0],
        port=at[1],
        insecure=insecure,
        limits=make_limits(chosen, admission, replays=allow_end_after),
        client_share=CLIENT_SHARE if client_share is None else client_share,
        event_log=event_log,
        request_log=request_log,
        ending=ending,
        checks=points_to_check(chosen, check),
        on_foreign=foreign,
        ray=ray,
        room_timeout_s=room_timeout,
        callers=callers,
        certificate=find_certificate(ssl_certfile, ssl_keyfile),
        manager=manager,
    )
    start(order, certificate=ssl_certfile, strict=strict, as_json=as_json)


def _refuse(engine: str, options: Mapping[str, object]) -> None:
    from toolkit.errors import InputError

    given = [name for name, value in options.items() if value]
    if given:
        raise InputError(
            f"{', '.join(given)}: not with engine {engine}, whose server is its own", "leave it out"
        )
