"""`llmctl bench` and `validate`: a trace, or some windows of it, replayed against a running server,
measured beside predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from toolkit.cli.arguments import (
    ApiKeyOption,
    ForeignOption,
    JsonOption,
    LoopOption,
    MaxErrorOption,
    ModelOption,
    RateOption,
    SlaOption,
    TraceOption,
    argument,
    command_of,
    option,
    parse_sla,
    refuse_useless,
)
from toolkit.cli.basis import VALIDATION, note_trace, plan_address, read_tuning, warn
from toolkit.cli.output import emit, note, progress, table
from toolkit.cli.traffic import TrafficOptions, read_traffic
from toolkit.errors import LlmctlError
from toolkit.files.bench import NOT_SERVERS, SAME_RATE, BenchReport, Validation, took_text
from toolkit.files.io import check_writable, read_file, write_file, write_text
from toolkit.files.plan import Plan
from toolkit.interrupts import EXIT_CODE, InterruptedReplayError, held
from toolkit.report.rows import compared_rows, mean_rows, request_rows
from toolkit.units import bracketed, percent, seconds

if TYPE_CHECKING:
    from toolkit.bench.session import ReplaySetup, RequestSettings
    from toolkit.traces.types import Trace

LOCAL = "http://127.0.0.1:8000"
# No thread draws it beside the replay: one that holds Python's lock would stop the client.
alone = partial(progress, alone=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(TrafficOptions):
    url: str | None = option(
        None, "URL of the server; default: the plan's, or http://127.0.0.1:8000."
    )
    plan: Path | None = option(
        None, "The server's plan: lengths are scaled to its model, metrics predicted from it."
    )
    rate: RateOption = None
    start: float = option(0.0, "Skip this many seconds of the (scaled) trace.", min=0.0)
    duration: float | None = option(
        None, "Replay this many seconds; default: to the end of the trace.", min=0.0
    )
    warmup: float = option(
        20.0,
        "Seconds of other requests before the replay, at its rate, which tell the prediction how "
        "fast the machine is; 0: no warm-up. Only with --plan.",
        min=0.0,
    )
    max_error: MaxErrorOption = None
    out: Path | None = option(None, "Write the report to this file, as JSON.")
    save_requests: Path | None = option(
        None, "Write the times of every request to this file, as a canonical trace."
    )
    sla: SlaOption = None
    lengths: Literal["hidden", "given"] | None = option(
        None,
        "Whether the server's scheduler knows the output lengths: 'given' sends each as "
        "max_tokens. Default: 'hidden' if the server allows it (llmctl serve --allow-end-after), "
        "else 'given'.",
    )
    max_new_tokens: int | None = option(
        None, "The limit of requests without one in the trace; default: the plan's, or 256.", min=1
    )
    vocab_size: int | None = option(
        None, "Draw the prompts' tokens below this number; default: the plan's, or 256.", min=1
    )
    model: ModelOption = None
    api_key: ApiKeyOption = ""
    timeout: float = option(600.0, "Give up a request after this many seconds.", min=0.001)
    seed: int | None = option(
        None,
        "Draw the prompts from this seed; default: other prompts in each run, so that a prefix "
        "cache holds none of them.",
        min=0,
    )
    loop: LoopOption = None
    force: ForeignOption = False
    as_json: JsonOption = False


@command_of(BenchOptions)
def bench(args: BenchOptions) -> None:
    """Replay a trace against a running server, and print measured values beside the plan's
    predictions.

    Requests are sent at the trace's times, whatever the server does, and latencies count from these
    times. With --concurrency the next one is sent when any one ends. Ctrl-C ends the replay early
    and reports the requests that were answered. The client also measures how late it is itself;
    beyond 10 % of what it measures the report is marked, and the exit code is 6.
    """
    from toolkit.bench.report import request_lines
    from toolkit.bench.session import Measurement, RequestSettings, hold, refuse_late, unused_seed
    from toolkit.traces.windows import excerpt
    from toolkit.traces.write import write_lines

    for file in filter(None, (args.out, args.save_requests)):
        check_writable(file)
    planned = read_file(Plan, args.plan) if args.plan else None
    targets = parse_sla(args.sla) or (planned.recipe.sla if planned else {})
    traffic = read_traffic(args, args.rate)
    if traffic.concurrency:
        refuse_useless({"--loop": args.loop}, "--concurrency is a closed loop of its own")
    of_prompts = (args.lengths, args.max_new_tokens, args.vocab_size)
    settings = RequestSettings(
        args.rate,
        *of_prompts,
        args.timeout,
        unused_seed() if args.seed is None else args.seed,
        args.loop,
        concurrency=traffic.concurrency,
        ramp_s=traffic.ramp_s,
    )
    setup = _prepare_replay(args, traffic.trace, planned, settings)
    part = excerpt(setup.trace, args.start, args.duration)
    note_trace(part)
    note(*setup.notes)
    if not traffic.concurrency:
        note(*_rate_notes(planned, setup.trace))
    measurement = Measurement(setup, part, planned, targets, note, alone)
    try:
        measurement.warm_up(args.warmup, args.start + float(part.arrival_s[-1]))
    except InterruptedReplayError:
        note("interrupted during the warm-up: nothing was measured")
        raise typer.Exit(EXIT_CODE) from None
    made_from = {"trace": traffic.path} | ({"plan": args.plan} if args.plan else {})
    with held():  # what was measured is written and shown
        counted = measurement.replay()
        result = measurement.report(counted, made_from)
        if args.save_requests:
            write_lines(request_lines(counted.replay.samples), args.save_requests)
        if args.out:
            write_file(result, args.out)
        emit(args.as_json, result, lambda: _show(result))
        _print_notes(result)
    if result.interrupted:
        raise typer.Exit(EXIT_CODE)
    if not result.measured["throughput_rps"]:
        raise LlmctlError(
            f"none of {result.requests:,} requests was served", "the reasons are above"
        )
    refuse_late(result)
    if args.max_error is not None:
        hold(((row.metric, row.error_percent) for row in result.compared), args.max_error)


def _prepare_replay(
    args: BenchOptions | ValidateOptions,
    trace: Trace,
    planned: Plan | None,
    settings: RequestSettings,
) -> ReplaySetup:
    """The server, and the requests as they can be replayed against it."""
    from toolkit.bench.session import prepare_replay
    from toolkit.endpoints.target import find_target

    address = args.url or (plan_address(planned) if planned else LOCAL)
    served_model = args.model or (planned.recipe.engine.served_model if planned else None)
    target = find_target(address, served_model, args.api_key)
    return prepare_replay(target, trace, planned, settings, warn if args.force else None)


def _rate_notes(plan: Plan | None, trace: Trace) -> list[str]:
    """A line where the replay's rate is not the one that the plan was tuned and predicted for."""
    from toolkit.traces.windows import mean_rate

    if plan is None or plan.workload is None:
        return []
    tuned_rps = plan.workload.request_rate_rps
    rate_rps = mean_rate(trace)
    if abs(rate_rps / tuned_rps - 1.0) < SAME_RATE:
        return []
    rates = f"the plan was tuned for {tuned_rps:.4g} requests/s, and this replays {rate_rps:.4g}"
    return [f"{rates}; for the tuned rate: --rate {tuned_rps:.6g}"]


def _show(result: BenchReport) -> None:
    """Print the metrics, and the targets where there are any; first whether they count."""

    def attained(metrics: Mapping[str, float]) -> str | None:
        share = metrics.get("sla_attainment_percent")
        return None if share is None else f"{share:.1f} %"

    predicted = bool(result.predicted)
    warm = predicted and result.warmup is not None
    columns = ["metric", ">measured", ">predicted", ">its error", ">as fitted", ">its error"]
    heading = _heading(result, f"{result.answered:,} requests")
    title = f"{heading}{bracketed(result.changes)}"
    table(columns[: 2 + 2 * predicted + 2 * warm], compared_rows(result), title)
    if not result.targets:
        return
    words = {True: "yes", False: "NO", None: None}
    rows: list[list[object]] = []
    for one in result.targets:
        kept = words[one.kept], words[one.predicted_kept]
        rows.append([one.target, one.limit_s, one.measured_s, kept[0], one.predicted_s, kept[1]])
    shares = attained(result.measured), attained(result.predicted)
    rows.append(["requests within all", None, shares[0], None, shares[1], None])
    columns = ["target", ">limit", ">measured", "kept", ">predicted", "kept"]
    table(columns[: 4 + 2 * predicted], rows)


def _heading(result: BenchReport | Validation, otherwise: str = "") -> str:
    """The heading of a table of measurements: `otherwise`, unless the client was late."""
    return f"{NOT_SERVERS}: the client was late" if result.late else otherwise


def _print_notes(result: BenchReport) -> None:
    """Print what a reader must know before trusting the table."""
    if result.warmup and result.replay_slowdown:
        slow = took_text(result.replay_slowdown, result.replay_launch_slowdown)
        before = f"{result.warmup.slowdown:.2f}"
        if result.warmup.launch_slowdown is not None:
            before += f" and {result.warmup.launch_slowdown:.2f}"
        note(f"during the replay {slow}; in the warm-up {before}")
        cost_s = result.replay_arrival_cost_s
        before_s = result.warmup.arrival_cost_s
        if cost_s or before_s:
            added = f"{seconds(cost_s)} to each; in the warm-up {seconds(before_s)}"
            note(f"a request that arrived added {added}")
        metrics = ("throughput_rps", "ttft_mean_s", "e2e_mean_s")
        predicted = result.predicted_in_hindsight
        measured = result.measured
        errors = [
            f"{name} {percent(100.0 * (predicted[name] / measured[name] - 1.0))}"
            for name in metrics
            if name in predicted and measured.get(name)
        ]
        if errors:  # none where the replay was interrupted
            note(f"at that speed the prediction's errors would be: {', '.join(errors)}")
    note(*(facts.text() for facts in (result.scheduling, result.cache) if facts))
    if result.interrupted:
        answered = f"{result.answered:,} of {result.requests:,} requests were answered"
        note(f"interrupted: {answered}, and are reported")
    for reason, count in result.failures.items():
        note(f"{count:,} requests failed: {reason}")
    if result.refused:
        missed = ": attainment and goodput count them as missed" if result.sla else ""
        prediction = "; the prediction serves every request" if result.predicted else ""
        refused = f"{result.refused:,} of {result.requests:,} requests were refused for load"
        note(f"{refused}{missed}{prediction}")
    if result.wrong_length:
        note(f"{result.wrong_length:,} outputs had another length than in the trace")
    if result.client:
        note(result.client.text())


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    plan: Path = argument("The plan of the server, from `llmctl render`.", metavar="PLAN.json")
    url: str | None = option(
        None,
        "URL of the server; default: the recipe's engine.url, or its serve.port on this machine.",
    )
    trace: TraceOption = "chat-small"
    rate: RateOption = None
    windows: int = option(3, "Replay this many windows, spread evenly over the trace.", min=1)
    window_s: float = option(
        20.0, "Seconds of each window, if the trace is long enough.", "--window", min=0.1
    )
    tuning: Path | None = option(
        None,
        "Replay the held-out windows of this tuning.json at its rate, instead of --windows and "
        "--rate.",
    )
    warmup: float = option(
        20.0, "Seconds of other requests before each window, at its rate; 0: no warm-up.", min=0.0
    )
    max_error: MaxErrorOption = None
    out: Path | None = option(
        None, "Write the result to this file; default: validation.json beside the plan."
    )
    model: ModelOption = None
    api_key: ApiKeyOption = ""
    seed: int = option(
        0,
        "Draw the windows' positions from this seed. The prompts are others in each run, so that a "
        "prefix cache holds none of them.",
        min=0,
    )
    save_requests: Path | None = option(
        None,
        "Write every request, also of warm-ups, as measured and as predicted to this file (JSONL).",
    )
    server_passes: Path | None = option(
        None,
        "The server's --pass-log, on this machine: the passes of each window are written beside "
        "the result, and the time of the front is told apart.",
    )
    loop: LoopOption = None
    force: ForeignOption = False
    as_json: JsonOption = False


@command_of(ValidateOptions)
def validate(args: ValidateOptions) -> None:
    """Compare a plan's predictions with the server that runs it.

    Windows of a trace are replayed, each after some other requests that show how fast the machine
    is now. The result is written beside the plan; `tune` and `render` show it if it is about their
    fit. Ctrl-C ends the command early; the windows that were replayed are reported. Where the
    client itself was late in one of them, the file is marked and not used, and the exit code is 6.
    """
    from toolkit.bench.passes import PassLogs
    from toolkit.bench.session import RequestSettings, Session, hold, refuse_late, unused_seed
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import TraceWindow, cut, fit_windows

    written = args.out or args.plan.with_name(VALIDATION)
    for file in filter(None, (written, args.save_requests)):
        check_writable(file)
    planned = read_file(Plan, args.plan)
    logs = PassLogs(args.server_passes, written) if args.server_passes else None
    path = trace_path(args.trace)
    tuned = read_tuning(args.tuning, {"trace": path})
    rate = tuned.request_rate_rps if tuned else args.rate
    settings = RequestSettings(rate, seed=unused_seed(), loop=args.loop)
    setup = _prepare_replay(args, read_trace(path)[0], planned, settings)
    if tuned:
        spans = [(window.start_s, window.end_s) for window in tuned.held_out_windows]
        chosen = [TraceWindow(*span, cut(setup.trace, *span)) for span in spans]
    else:
        windows = fit_windows(setup.trace, args.window_s, args.windows, 0, args.seed)
        setup = replace(setup, trace=windows.trace)
        chosen = windows.search
    note_trace(setup.trace)
    note(*setup.notes)
    session = Session(setup, planned, args.warmup, alone, logs)
    interrupted = session.run(chosen)
    if not session.results:
        note("interrupted before a window was replayed to its end: nothing was written")
        raise typer.Exit(EXIT_CODE)
    with held():  # what was measured is written and shown
        result = session.validation(path, args.plan)
        write_file(result, written)
        if args.save_requests:
            write_text(args.save_requests, "".join(session.lines))
        emit(args.as_json, result, lambda: _show_validation(result))
        note(f"wrote {written}")
    if interrupted:
        done = f"{len(session.results)} of {len(chosen)} windows are replayed and reported"
        note(f"interrupted: {done}")
        raise typer.Exit(EXIT_CODE)
    refuse_late(result)
    if args.max_error is not None:
        hold(((row.metric, row.error_percent) for row in result.metrics), args.max_error)


def _show_validation(result: Validation) -> None:
    """Print the errors for people."""
    columns = ["metric", ">measured", ">predicted", ">its error", ">worst window"]
    title = f"{_heading(result, 'means over the windows')}{bracketed(result.changes)}"
    table(columns, mean_rows(result), title)
    columns = ["request by request", ">median error", ">median size of it", ">requests"]
    table(columns, request_rows(result))
    slow = ", ".join(f"{window.slowdown:.2f}" for window in result.windows)
    took = f"batches took {slow} times as long as fitted"
    launches = [window.launch_slowdown for window in result.windows]
    if any(launches):
        slow_launches = ", ".join(f"{one:.2f}" if one else "unknown" for one in launches)
        took = f"passes took {slow} times as long as fitted on the GPU, launches {slow_launches}"
    note(f"before the windows, {took}; the predictions include that")
    for number, window in enumerate(result.windows, start=1):
        if window.cache:
            note(f"window {number}: {window.cache.text()}")
        if window.front_by_passes_s is not None:
            front, ttft = (
                seconds(each) for each in (window.front_by_passes_s, window.measured["ttft_mean_s"])
            )
            note(f"window {number}: {front} of the TTFT of {ttft} were the front's, by its passes")
        elif window.passes:
            note(f"window {number}: --server-passes has none of its passes: is it this server's?")
    failed = sum(window.failed for window in result.windows)
    refused = sum(window.refused for window in result.windows)
    if failed:
        note(f"{failed:,} requests failed")
    if refused:
        note(f"of these {refused:,} were refused for load; the prediction serves every request")
