"""`llmctl serve`: start what a plan says. OpenAI's API in front, the scheduler, workers in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping

from toolkit.cli.arguments import JsonOption, SetOption
from toolkit.cli.basis import accept, warn_of_foreign
from toolkit.cli.output import note
from toolkit.cli.serve_options import (
    AdmissionOption,
    BrokenOption,
    CertificateKeyOption,
    CertificateOption,
    CheckOption,
    EndAfterOption,
    EngineOption,
    EventLogOption,
    FitOption,
    ForceOption,
    HostOption,
    InsecureOption,
    KeyFileOption,
    KeyOption,
    KeysOption,
    NameOption,
    NoticeOption,
    OpenMetricsOption,
    PlanOption,
    PolicyOption,
    PortOption,
    RayOption,
    RequestLogOption,
    RequestTimeoutOption,
    RoomOption,
    Source,
    StatusOption,
    StrictOption,
    TargetOption,
    TimeoutOption,
    TuningOption,
    VllmOption,
    WorkersOption,
)


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
    """Start the server of a plan: `llmctl serve plan.json`, or `llmctl serve RECIPE --fit fit.json`.

    Prints one line when all workers are loaded and a few points of the fit were measured again, and tells systemd where
    that started it. SIGTERM or Ctrl-C ends it in order: /ready turns 503, running requests get --shutdown-timeout
    seconds; a second signal ends it at once. Files of keys and certificates are read again where they change.
    """
    from toolkit.cli.secrets import forget_variable
    from toolkit.cli.serve_plan import changed, check_engine, plan_to_serve
    from toolkit.cli.serve_start import points_to_check, start, start_vllm
    from toolkit.cli.serve_target import find_callers, find_certificate, place_of, serve_managed
    from toolkit.serve.assemble import make_limits, make_settings, model_name
    from toolkit.serve.launch import Launch
    from toolkit.serve.notify import Manager
    from toolkit.serve.server import Ending, is_loopback
    from toolkit.serve.vllm_launch import VllmLaunch

    place = place_of(source, target)
    if place.managed:
        serve_managed(place, as_json, broken=force or allow_broken_limits)
        return
    ray = ray or ("auto" if place.target == "ray" else "")
    forget_variable("LLMCTL_API_KEY")  # the workers inherit the environment, and run models' own code
    manager, ((key, keys), callers) = Manager.take(), find_callers(api_key, api_key_file, api_keys)
    chosen = changed(plan_to_serve(place.plan or source, plan, fit, tuning, force), policy, settings, workers)
    accept(chosen, str(tuning or place.plan or plan or source), broken=force or allow_broken_limits)
    check_engine(chosen, engine)
    spec, foreign = chosen.recipe.serve, warn_of_foreign if force else None
    at = host or spec.host, spec.port if port is None else port
    if chosen.recipe.engine.name == "vllm":
        not_there = {
            "--ray": ray,
            "--api-keys": api_keys,
            "--ssl-certfile": ssl_certfile,
            "--ssl-keyfile": ssl_keyfile,
            "--request-log": request_log,
            "--request-timeout": request_timeout,
            "--allow-end-after": allow_end_after,
            "--vllm-metrics": vllm_metrics,
            "--open-metrics": open_metrics,
            "--check": check,
            "--strict": strict,
            "--status-page": status_page,
        }
        _refuse(not_there)
        name, ending = served_model_name or model_name(chosen), Ending(shutdown_notice, shutdown_timeout)
        start_vllm(VllmLaunch(chosen, name, *at, key, insecure, event_log, ending, foreign), as_json=as_json)
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
        event_log=event_log,
        request_log=request_log,
        ending=Ending(shutdown_notice, shutdown_timeout, note),
        checks=points_to_check(chosen, check),
        on_foreign=foreign,
        ray=ray,
        room_timeout_s=room_timeout,
        callers=callers,
        certificate=find_certificate(ssl_certfile, ssl_keyfile),
        manager=manager,
    )
    start(order, certificate=ssl_certfile, strict=strict, as_json=as_json)


def _refuse(options: Mapping[str, object]) -> None:
    from toolkit.errors import InputError

    given = [name for name, value in options.items() if value]
    if given:
        raise InputError(f"{', '.join(given)}: not with engine vllm, whose server is vLLM's own", "leave it out")
