"""`llmctl serve`: start what a plan says. OpenAI's API in front, the scheduler, workers in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.cli.arguments import JsonOption, SetOption, open_recipe, parse_settings
from toolkit.cli.basis import read_fit, warn_of_foreign
from toolkit.cli.output import WIDTH, emit, note
from toolkit.cli.serve_options import (
    AdmissionOption,
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

if TYPE_CHECKING:
    from toolkit.cli.serve_target import Memory
    from toolkit.files.plan import Plan, PlannedPolicy
    from toolkit.serve.vllm_launch import VllmLaunch


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
    shutdown_timeout: TimeoutOption = 30.0,
    shutdown_notice: NoticeOption = 0.0,
    check: CheckOption = None,
    strict: StrictOption = False,
    insecure: InsecureOption = False,
    engine: EngineOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start the server of a plan: `llmctl serve plan.json`, or `llmctl serve RECIPE --fit fit.json`.

    Prints one line when all workers are loaded and a few points of the fit were measured again, and tells systemd where
    that started it. SIGTERM or Ctrl-C ends it in order: /ready turns 503, running requests get --shutdown-timeout
    seconds; a second signal ends it at once. Files of keys and certificates are read again where they change.
    """
    import os

    from toolkit.cli.serve_target import find_callers, find_certificate, place_of, remembering, serve_managed
    from toolkit.serve.assemble import make_limits, make_settings, model_name
    from toolkit.serve.drift import checks_of, judge
    from toolkit.serve.launch import Launch, launch
    from toolkit.serve.notify import notify, take_notify_socket
    from toolkit.serve.server import Ending, is_loopback
    from toolkit.serve.vllm_launch import VllmLaunch

    place = place_of(source, target)
    if place.managed:
        serve_managed(place, as_json)
        return
    source = place.plan or source
    ray = ray or ("auto" if place.target == "ray" else "")
    os.environ.pop("LLMCTL_API_KEY", None)  # the workers inherit the environment, and run models' own code
    manager, ((key, keys), callers) = take_notify_socket(), find_callers(api_key, api_key_file, api_keys)
    chosen = _change(_plan(source, plan, fit, tuning, force), policy, settings, workers)
    _check_engine(chosen, engine)
    address = host or chosen.recipe.serve.host
    if chosen.recipe.engine.name == "vllm":
        not_there = {
            "--ray": ray,
            "--api-keys": api_keys,
            "--ssl-certfile": ssl_certfile,
            "--ssl-keyfile": ssl_keyfile,
            "--request-log": request_log,
            "--allow-end-after": allow_end_after,
            "--vllm-metrics": vllm_metrics,
            "--open-metrics": open_metrics,
            "--check": check,
            "--strict": strict,
            "--status-page": status_page,
        }
        _refuse(not_there)
        name, spec = served_model_name or model_name(chosen), chosen.recipe.serve
        foreign, ending = warn_of_foreign if force else None, Ending(shutdown_notice, shutdown_timeout)
        at = address, spec.port if port is None else port
        with remembering("local") as memory:
            vllm = VllmLaunch(chosen, name, *at, key, insecure, event_log, ending, foreign)
            memory.ended(_launch_vllm(vllm, memory, as_json))
        return
    front = make_settings(
        chosen,
        model=served_model_name,
        api_key=key,
        keys=keys,
        allow_end_after=allow_end_after,
        vllm_metrics=vllm_metrics,
        open_metrics=open_metrics,
        status_page=is_loopback(address) if status_page is None else status_page,
    )
    order = Launch(
        chosen,
        front,
        address,
        chosen.recipe.serve.port if port is None else port,
        insecure,
        make_limits(chosen, admission, replays=allow_end_after),
        event_log,
        request_log,
        Ending(shutdown_notice, shutdown_timeout, note),
        checks_of(chosen, seconds) if (seconds := _seconds_of_check(chosen, check)) else (),
        warn_of_foreign if force else None,
        ray,
        room_timeout,
        callers,
        find_certificate(ssl_certfile, ssl_keyfile),
    )
    where = f" on Ray ({ray})" if ray else ""
    note(f"loading {chosen.workers} workers of {chosen.recipe.name}{where}")
    with remembering("ray" if ray else "local") as memory:

        def on_ready(url: str) -> None:
            memory.ready(url, front.model, chosen, ssl_certfile)
            notify(manager, "READY=1")
            _announce(as_json, url, front.model, chosen, status_page=front.status_page)

        memory.ended(launch(order, on_ready, lambda found: judge(found, strict=strict, say=note)))


def _seconds_of_check(plan: Plan, asked: float | None) -> float:
    from toolkit.serve.drift import BUDGET_S

    if asked is not None:
        return asked
    fake = all(kind.recipe.engine.name == "fake" for kind in plan.kinds)
    return 0.0 if fake else BUDGET_S  # a fake's times are what it was told


def _check_engine(plan: Plan, engine: str | None) -> None:
    from toolkit.errors import InputError

    planned = " and ".join(dict.fromkeys(kind.recipe.engine.name for kind in plan.kinds))
    if engine is not None and engine != planned:
        raise InputError(
            f"--engine {engine}: this plan is for engine '{planned}'",
            f"set engine.name to {engine} in the recipe; then: llmctl profile, fit, tune and render",
        )


def _refuse(options: Mapping[str, object]) -> None:
    from toolkit.errors import InputError

    given = [name for name, value in options.items() if value]
    if given:
        raise InputError(f"{', '.join(given)}: not with engine vllm, whose server is vLLM's own", "leave it out")


def _launch_vllm(order: VllmLaunch, memory: Memory, as_json: bool) -> dict[str, int]:
    from toolkit.sched.policies import make_any, refuse_unservable
    from toolkit.serve.vllm_launch import launch_vllm

    plan = order.plan
    refuse_unservable(make_any(plan.policy.name, plan.policy.parameters), "vllm")
    note(f"starting vLLM for {plan.recipe.name}")

    def on_ready(url: str) -> None:
        memory.ready(url, order.served_model, plan)
        _announce(as_json, url, order.served_model, plan)

    return launch_vllm(order, on_ready)


def _announce(as_json: bool, url: str, model: str, plan: Plan, *, status_page: bool = False) -> None:
    import sys
    from textwrap import fill

    page = f"{url}/" if status_page else None
    facts: dict[str, Any] = {
        "url": url,
        "model": model,
        "workers": plan.workers,
        "policy": plan.policy.name,
        "parameters": plan.policy.parameters,
        "status_page": page,
    }

    def show() -> None:
        parameters = ", ".join(f"{name}={value}" for name, value in plan.policy.parameters.items())
        print(f"ready: {url} serves {model} on {plan.workers} worker{'s' * (plan.workers > 1)}")
        print(fill(f"policy: {plan.policy.name} ({parameters})", WIDTH, subsequent_indent="  "))
        if page:
            print(f"status page: {page}")

    emit(as_json, facts, show)
    sys.stdout.flush()


def _plan(source: str | None, plan: Path | None, fit: Path | None, tuning: Path | None, force: bool) -> Plan:
    from toolkit.cli.fleet import plan_of_fleet
    from toolkit.errors import InputError
    from toolkit.files.fleet import is_fleet
    from toolkit.files.io import read_file
    from toolkit.files.plan import Plan
    from toolkit.files.recipes import is_recipe

    usage = "llmctl serve plan.json, or llmctl serve RECIPE --fit fit.json [--tuning tuning.json]"
    if plan is None and source and not is_recipe(source):
        plan, source = Path(source), None
    if plan is not None:
        if source or fit or tuning:
            raise InputError("a plan holds the recipe, the fit and the tuning; give one or the other", usage)
        return read_file(Plan, plan)
    if source and is_fleet(source):
        if fit:
            raise InputError("a fleet names its fits", "leave --fit out")
        return plan_of_fleet(Path(source), tuning, force=force)[0]
    if source is None or fit is None:
        raise InputError("there is no plan to serve", usage)
    return _render(source, fit, tuning, force)


def _render(recipe: str, fit: Path, tuning: Path | None, force: bool) -> Plan:
    """As `llmctl render` does; with `force` from a fit of another recipe, too."""
    from toolkit.deploy.plan import make_plan
    from toolkit.files.io import read_file, recipe_path
    from toolkit.files.tuning import Tuning

    made_from = {"recipe": recipe_path(recipe), "fit": fit}
    tuned = read_file(Tuning, tuning, inputs=made_from) if tuning else None
    inputs = made_from | ({"tuning": tuning} if tuning else {})
    fitted = read_fit(fit, made_from["recipe"], force=force)
    return make_plan(open_recipe(made_from["recipe"]), fitted, tuned, inputs)


def _change(plan: Plan, policy: str | None, settings: list[str] | None, workers: int | None) -> Plan:
    """The plan with what the command line says otherwise. `InputError` for a policy or parameter that is unknown."""
    from toolkit.errors import InputError

    if workers is not None and plan.others:
        raise InputError("--workers: a fleet says how many workers there are of each kind", "change them in its file")
    if workers is not None and workers != plan.fit.workers:
        note(f"note: the fit was measured with {plan.fit.workers} workers at once; {workers} may take other times")
    return plan.model_copy(
        update={"workers": workers or plan.workers, "policy": _policy(plan, policy, parse_settings(settings))}
    )


def _policy(plan: Plan, name: str | None, changes: dict[str, bool | int | float | str]) -> PlannedPolicy:
    from toolkit.files.plan import PlannedPolicy
    from toolkit.sched.policies import make_any
    from toolkit.sched.policies.parameters import parameters

    same = name is None or name == plan.policy.name
    chosen = make_any(plan.policy.name if same else str(name), (plan.policy.parameters if same else {}) | changes)
    return PlannedPolicy(name=chosen.name, parameters=parameters(chosen))
