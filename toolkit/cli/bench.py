"""`llmctl bench`: a trace, replayed against a running server, measured beside predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from toolkit.cli.arguments import (
    ScenarioOptions,
    command_of,
    option,
    refuse_useless,
)
from toolkit.cli.basis import note_trace, plan_address, warn
from toolkit.cli.output import emit, note, progress, show
from toolkit.cli.scenario import Scenario
from toolkit.cli.settings import LOCAL
from toolkit.errors import InputError, LlmctlError
from toolkit.files.bench import BENCH, NOT_SERVERS, BenchReport, took_text
from toolkit.files.io import check_writable, read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Tuning
from toolkit.interrupts import EXIT_CODE, InterruptedReplayError, held
from toolkit.report.parts import Sheet
from toolkit.report.rows import bench_notes, bench_tables
from toolkit.report.steps import typed
from toolkit.units import bracketed, number

if TYPE_CHECKING:
    from toolkit.bench.session import ReplaySetup
    from toolkit.traces.types import Trace

# No thread draws it beside the replay: one that holds Python's lock would stop the client.
alone = partial(progress, alone=True)


_replay = partial(option, rich_help_panel="How it is replayed")
_server = partial(option, rich_help_panel="Access to the server")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(ScenarioOptions):
    url: str | None = option(
        None, "URL of the server; default: the plan's, or http://127.0.0.1:8000."
    )
    tuning: Path | None = option(
        None,
        "Replay the first window that the search of this tuning.json did not see, at the tuned "
        "rate; with --rate the same requests at another one.",
    )
    out: Path | None = option(
        None, "Write the report to this file; default: bench.json beside the plan, if there is one."
    )
    save_requests: Path | None = option(
        None, "Write the times of every request to this file, as a canonical trace."
    )
    max_error: float | None = option(
        None, "Exit with 4 where throughput or a mean latency differs by more percent.", min=0.0
    )
    load: float | None = _replay(
        None,
        "Replay at this multiple of the rate at which the plan keeps its targets as fast as the "
        "machine is now, which warm-ups show; at the asked or tuned rate where that is no more, "
        "and at least half of what the plan keeps.",
        min=0.01,
    )
    duration: float | None = _replay(
        None,
        "Replay this many seconds at most; default: to the end of the trace, or of the window.",
        min=0.0,
    )
    warmup: float = _replay(
        20.0,
        "Seconds of other requests before the replay, at its rate, which tell the prediction how "
        "fast the machine is; 0: no warm-up. Only with --plan.",
        min=0.0,
    )
    lengths: Literal["hidden", "given"] | None = _replay(
        None,
        "Whether the server's scheduler knows the output lengths: 'given' sends each as "
        "max_tokens. Default: 'hidden' if the server allows it (llmctl serve --allow-end-after), "
        "else 'given'.",
    )
    seed: int | None = _replay(
        None,
        "Draw the prompts from this seed; default: other prompts in each run, so that a prefix "
        "cache holds none of them.",
        min=0,
    )
    loop: Literal["open", "closed"] | None = _replay(
        None,
        "Send a session's later turns at the trace's times (open), or when the turn before has "
        "ended and been thought about (closed). Default: closed, if the trace has sessions.",
    )
    api_key: str = _server("", "The API key of the server.", envvar="LLMCTL_API_KEY")
    model: str | None = _server(None, "The model's name; default: the first that the server lists.")


@command_of(BenchOptions, "plan", "trace", "sla", "force", "rate", "concurrency")
def bench(args: BenchOptions) -> None:
    """Replay a trace against a running server, and print measured values beside the plan's
    predictions: as fitted, and at the speed that a warm-up shows.

    Requests are sent at the trace's times, whatever the server does, and latencies count from these
    times. With --concurrency the next one is sent when any one ends. Ctrl-C ends the replay early
    and reports the requests that were answered. The client also measures how late it is itself;
    beyond 10 % of what it measures the report is marked, and the exit code is 6.

    With --plan the report is written beside it. `tune`, `simulate`, `capacity` and `render` quote
    the errors of a bench.json that is about their fit.
    """
    from toolkit.bench.rates import held_out_window, rate_notes
    from toolkit.bench.report import request_lines
    from toolkit.bench.session import (
        Measurement,
        RequestSettings,
        hold,
        prepare_replay,
        refuse_late,
        unused_seed,
    )
    from toolkit.endpoints.target import find_target
    from toolkit.traces.windows import excerpt
    from toolkit.traces.write import write_lines

    written = args.out or (args.plan.with_name(BENCH) if args.plan else None)
    for file in filter(None, (written, args.save_requests)):
        check_writable(file)
    scenario = Scenario.of_plan(args)
    planned = scenario.plan
    trace = scenario.read_trace()
    tuned = None
    if args.tuning:
        tuned = read_file(Tuning, args.tuning, {"trace": scenario.trace_file})
    rate = tuned.request_rate_rps if tuned and args.rate is None else args.rate
    if scenario.concurrency:
        refuse_useless({"--loop": args.loop}, "--concurrency is a closed loop of its own")
    settings = RequestSettings(
        rate,
        args.lengths,
        unused_seed() if args.seed is None else args.seed,
        args.loop,
        concurrency=scenario.concurrency,
    )
    address = args.url or (plan_address(planned) if planned else LOCAL)
    served_model = args.model or (planned.recipe.engine.served_model if planned else None)
    target = find_target(address, served_model, args.api_key)
    setup = prepare_replay(target, trace, planned, settings, warn if args.force else None)
    note(*setup.notes)
    try:
        if args.load is not None:
            setup = _at_load(args.load, planned, setup, args.warmup)
        start_s = 0.0
        duration_s = args.duration
        if tuned:
            start_s, lasts_s = held_out_window(tuned, setup.trace)
            duration_s = lasts_s if duration_s is None else min(duration_s, lasts_s)
        part = excerpt(setup.trace, start_s, duration_s)
        note_trace(part)
        if not scenario.concurrency:
            note(*rate_notes(planned, setup.trace))
        measurement = Measurement(setup, part, planned, dict(scenario.targets), note, alone)
        measurement.warm_up(args.warmup, start_s + float(part.arrival_s[-1]))
    except InterruptedReplayError:
        note("interrupted during the warm-up: nothing was measured")
        raise typer.Exit(EXIT_CODE) from None
    made_from = {"trace": scenario.trace_file} | ({"plan": args.plan} if args.plan else {})
    with held():  # what was measured is written and shown
        counted = measurement.replay()
        result = measurement.report(counted, made_from)
        if args.save_requests:
            write_lines(request_lines(counted.replay.samples), args.save_requests)
        if written:
            write_file(result, written)
        emit(args.as_json, result, lambda: _show(result))
        note(*bench_notes(result))
        if written:
            note(f"wrote {written}")
        if args.plan:
            note(f"next: {typed('report', args.plan)}")
    if result.interrupted:
        raise typer.Exit(EXIT_CODE)
    if not result.measured.metrics["throughput_rps"]:
        raise LlmctlError(
            f"none of {result.requests:,} requests was served", "the reasons are above"
        )
    refuse_late(result)
    if args.max_error is not None:
        hold(((row.metric, row.error_percent) for row in result.compared), args.max_error)


def _at_load(load: float, plan: Plan | None, setup: ReplaySetup, about_s: float) -> ReplaySetup:
    """Return the replay at the rate of `find_rate`; each warm-up takes about `about_s` seconds.

    Raises InputError where the speed of the server cannot be found, InterruptedReplayError.
    """
    from toolkit.bench.predict import SEEDS, other_requests, reports_batch_times, warm_up
    from toolkit.bench.rates import find_rate
    from toolkit.traces.windows import mean_rate, scale_rate

    if plan is None or not about_s or not reports_batch_times(plan, setup.target):
        raise InputError(
            "--load: the speed of the server is not known",
            "it needs --plan, a warm-up, and a server that llmctl started",
        )
    trace = setup.trace
    asked_rps = mean_rate(trace)
    seed = setup.load.seed

    def keeps(rate_rps: float) -> tuple[float, float | None]:
        nonlocal seed
        seed += SEEDS  # each warm-up has other prompts
        others = other_requests(trace, 0.0, max(round(about_s * rate_rps), 1), rate_rps)
        with alone("measuring the speed", len(others)) as advance:
            warm = warm_up(setup.target, others, replace(setup.load, seed=seed), advance)
        slowdown = warm.slowdown if warm else 1.0
        kept_rps = _kept_rate(plan, trace, slowdown)
        kept = f"up to {number(kept_rps)} requests/s" if kept_rps else "at no rate"
        note(f"{took_text(slowdown, 'take')}: the plan then keeps its targets {kept}")
        return slowdown, kept_rps

    rate_rps, _ = find_rate(asked_rps, load, keeps)
    if rate_rps == asked_rps:
        return setup
    note(f"replaying {number(rate_rps)} requests/s in place of {number(asked_rps)}")
    return replace(setup, trace=scale_rate(trace, rate_rps))


def _kept_rate(plan: Plan, trace: Trace, slowdown: float) -> float | None:
    """Return the highest rate at which a plan keeps all targets at a speed; None: at none."""
    from toolkit.sim.deployment import Deployment
    from toolkit.tuning.capacity import rate_capacity
    from toolkit.tuning.workload import in_process, whole_task

    deployment = replace(Deployment.of_plan(plan), slowdown=slowdown)
    found = rate_capacity(whole_task(deployment, trace), in_process)
    return found.load if found else None


def _show(result: BenchReport) -> None:
    """Print the metrics, and the targets where there are any; first whether they count."""
    heading = f"{result.answered:,} requests"
    if result.late:
        heading = f"{NOT_SERVERS}: the client was late"
    caption = f"{heading}{bracketed(result.changes)}"
    show(Sheet("bench", "", tables=bench_tables(result, caption)))
