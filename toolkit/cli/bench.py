"""`llmctl bench` and `validate`: a trace, or some windows of it, replayed against a running server,
measured beside predicted.

Each reads its files, warms the server up, replays, and writes and prints the result; the helpers
below it print the tables and the notes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    command_of,
    option,
    parse_sla,
)
from toolkit.cli.basis import VALIDATION, note_trace, plan_address, warn_of_foreign
from toolkit.cli.output import emit, note, progress, table
from toolkit.errors import LlmctlError
from toolkit.units import percent, seconds

if TYPE_CHECKING:
    from toolkit.bench.session import RequestSettings, Subject
    from toolkit.files.bench import BenchReport, Validation
    from toolkit.files.plan import Plan
    from toolkit.traces.types import Trace

LOCAL = "http://127.0.0.1:8000"
LATE_S = 0.05  # a larger delay in the client itself is worth a warning


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The command line of `llmctl bench`."""

    url: str | None = option(
        None, help="URL of the server; default: the plan's, or http://127.0.0.1:8000."
    )
    trace: TraceOption = "chat-small"
    plan: Path | None = option(
        None, help="The server's plan: lengths are scaled to its model, metrics predicted from it."
    )
    rate: RateOption = None
    start: float = option(0.0, min=0.0, help="Skip this many seconds of the (scaled) trace.")
    duration: float | None = option(
        None, min=0.0, help="Replay this many seconds; default: to the end of the trace."
    )
    warmup: float = option(
        15.0,
        min=0.0,
        help="Seconds of other requests before the replay, which tell the prediction how fast "
        "the machine is; 0: no warm-up. Only with --plan.",
    )
    max_error: MaxErrorOption = None
    out: Path | None = option(None, help="Write the report to this file, as JSON.")
    save_requests: Path | None = option(
        None, help="Write the times of every request to this file, as a canonical trace."
    )
    sla: SlaOption = None
    lengths: Literal["hidden", "given"] | None = option(
        None,
        help="Whether the server's scheduler knows the output lengths: 'given' sends each as "
        "max_tokens. Default: 'hidden' if the server allows it (llmctl serve "
        "--allow-end-after), else 'given'.",
    )
    max_new_tokens: int | None = option(
        None,
        min=1,
        help="The limit of requests without one in the trace; default: the plan's, or 256.",
    )
    vocab_size: int | None = option(
        None, min=1, help="Draw the prompts' tokens below this number; default: the plan's, or 256."
    )
    model: ModelOption = None
    api_key: ApiKeyOption = ""
    timeout: float = option(600.0, min=0.001, help="Give up a request after this many seconds.")
    seed: int = option(0, min=0, help="Draw the prompts from this seed.")
    loop: LoopOption = None
    force: ForeignOption = False
    as_json: JsonOption = False


@command_of(BenchOptions)
def bench(given: BenchOptions) -> None:
    """Replay a trace against a running server, and print measured values beside the plan's
    predictions.

    Requests are sent at the trace's times, whatever the server does, and latencies count from these
    times. Ctrl-C ends the replay early and reports the requests that were answered.
    """
    from toolkit.bench.client import InterruptedReplayError
    from toolkit.bench.report import request_lines
    from toolkit.bench.session import Measurement, RequestSettings, hold
    from toolkit.files.io import check_writable, read_file, write_file
    from toolkit.files.plan import Plan
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import excerpt
    from toolkit.traces.write import write_lines

    for written in filter(None, (given.out, given.save_requests)):
        check_writable(written)
    planned = read_file(Plan, given.plan) if given.plan else None
    targets = parse_sla(given.sla) or (planned.recipe.sla if planned else {})
    path = trace_path(given.trace)
    of_prompts = (given.lengths, given.max_new_tokens, given.vocab_size)
    settings = RequestSettings(given.rate, *of_prompts, given.timeout, given.seed, given.loop)
    subject = _look_at_server(given, path, planned, settings)
    part = excerpt(subject.trace, given.start, given.duration)
    note_trace(part)
    for line in (*subject.notes, *_rate_notes(planned, subject.trace)):
        note(line)
    measurement = Measurement(subject, part, planned, targets, note, progress)
    try:
        measurement.warm_up(given.warmup, given.start + float(part.arrival_s[-1]))
    except InterruptedReplayError:
        note("interrupted during the warm-up: nothing was measured")
        raise typer.Exit(130) from None
    watched = measurement.replay()
    made_from = {"trace": path} | ({"plan": given.plan} if given.plan else {})
    result = measurement.report(watched, made_from)
    if given.save_requests:
        write_lines(request_lines(watched.replay.samples), given.save_requests)
    if given.out:
        write_file(result, given.out)
    emit(given.as_json, result, lambda: _show(result))
    _print_notes(result)
    if result.interrupted:
        raise typer.Exit(130)
    if not result.measured["throughput_rps"]:
        raise LlmctlError(
            f"none of {result.requests:,} requests was served", "the reasons are above"
        )
    if given.max_error is not None:
        hold(((row.metric, row.error_percent) for row in result.compared), given.max_error)


def _look_at_server(
    given: BenchOptions | ValidateOptions,
    path: Path,
    planned: Plan | None,
    settings: RequestSettings,
) -> Subject:
    """The server, and the requests of the trace at `path` as they can be replayed against it."""
    from toolkit.bench.session import look_at
    from toolkit.endpoints.target import find_target
    from toolkit.traces.read import read_trace

    loaded, _ = read_trace(path)
    address = given.url or (plan_address(planned) if planned else LOCAL)
    served_model = given.model or (planned.recipe.engine.served_model if planned else None)
    target = find_target(address, served_model, given.api_key)
    return look_at(target, loaded, planned, settings, warn_of_foreign if given.force else None)


def _rate_notes(plan: Plan | None, trace: Trace) -> list[str]:
    """A line, if the trace's rate differs from the rate that the plan was tuned for: its promise
    holds for that rate only.
    """
    from toolkit.files.bench import SAME_RATE
    from toolkit.traces.windows import mean_rate

    if plan is None or plan.workload is None:
        return []
    tuned_rps, rate_rps = plan.workload.request_rate_rps, mean_rate(trace)
    if abs(rate_rps / tuned_rps - 1.0) < SAME_RATE:
        return []
    rates = f"the plan was tuned for {tuned_rps:.4g} requests/s, and this replays {rate_rps:.4g}"
    return [f"{rates}; for the tuned rate: --rate {tuned_rps:.6g}"]


def _show(result: BenchReport) -> None:
    """Print the metrics, and the targets where there are any."""

    def error(value: float | None) -> str | None:
        return None if value is None else percent(value)

    predicted = bool(result.predicted)
    warm = predicted and result.warmup is not None
    rows: list[list[object]] = []
    for row in result.compared:
        rows.append([row.metric, row.measured])
        rows[-1] += [row.predicted, error(row.error_percent)] if predicted else []
        rows[-1] += [row.as_fitted, error(row.as_fitted_error_percent)] if warm else []
    columns = ["metric", ">measured", ">predicted", ">its error", ">as fitted", ">its error"]
    table(columns[: 2 + 2 * predicted + 2 * warm], rows)
    if not result.targets:
        return
    words = {True: "yes", False: "NO", None: None}
    rows = []
    for one in result.targets:
        rows.append([one.target, one.limit_s, one.measured_s, words[one.kept]])
        rows[-1] += [one.predicted_s, words[one.predicted_kept]] if predicted else []
    attained = [side.get("sla_attainment_percent") for side in (result.measured, result.predicted)]
    rows.append(["requests within all", None, _share(attained[0]), None])
    rows[-1] += [_share(attained[1]), None] if predicted else []
    columns = ["target", ">limit", ">measured", "kept", ">predicted", "kept"]
    table(columns[: 4 + 2 * predicted], rows)


def _share(percent: float | None) -> str | None:
    return None if percent is None else f"{percent:.1f} %"


def _print_notes(result: BenchReport) -> None:
    """Print what a reader must know before trusting the table."""
    if result.warmup and result.replay_slowdown:
        slow = f"{result.replay_slowdown:.2f} times as long as fitted"
        note(f"during the replay batches took {slow}; in the warm-up {result.warmup.slowdown:.2f}")
        cost_s, before_s = result.replay_arrival_cost_s, result.warmup.arrival_cost_s
        if cost_s or before_s:
            added = f"{seconds(cost_s)} to each; in the warm-up {seconds(before_s)}"
            note(f"a request that arrived added {added}")
        metrics = ("throughput_rps", "ttft_mean_s", "e2e_mean_s")
        predicted, measured = result.predicted_in_hindsight, result.measured
        errors = [
            f"{name} {percent(100.0 * (predicted[name] / measured[name] - 1.0))}"
            for name in metrics
            if measured.get(name)
        ]
        note(f"at that speed the prediction's errors would be: {', '.join(errors)}")
    if result.scheduling:
        note(result.scheduling.text())
    if result.cache:
        note(result.cache.text())
    if result.interrupted:
        answered = f"{result.answered:,} of {result.requests:,} requests were answered"
        note(f"interrupted: {answered}, and are reported")
    for reason, count in result.failures.items():
        note(f"{count:,} requests failed: {reason}")
    if result.refused:
        prediction = "; the prediction serves every request" if result.predicted else ""
        note(
            f"{result.refused:,} of {result.requests:,} requests were refused for load:"
            f" attainment and goodput count them as missed{prediction}"
        )
    if result.wrong_length:
        note(f"{result.wrong_length:,} outputs had another length than in the trace")
    if result.send_lag_p99_s > LATE_S:
        late = f"requests left up to {seconds(result.send_lag_p99_s)} late (p99)"
        note(f"the client was short of CPU: {late}")


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """The command line of `llmctl validate`."""

    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.json", help="The plan of the server, from `llmctl render`."),
    ]
    url: str | None = option(
        None,
        help="URL of the server; default: the recipe's engine.url, or its serve.port on this "
        "machine.",
    )
    trace: TraceOption = "chat-small"
    rate: RateOption = None
    windows: int = option(3, min=1, help="Replay this many windows, spread evenly over the trace.")
    window_s: float = option(
        20.0, "--window", min=0.1, help="Seconds of each window, if the trace is long enough."
    )
    tuning: Path | None = option(
        None,
        help="Replay the held-out windows of this tuning.json at its rate, instead of "
        "--windows and --rate.",
    )
    warmup: float = option(
        15.0, min=0.0, help="Seconds of other requests before each window; 0: no warm-up."
    )
    max_error: MaxErrorOption = None
    out: Path | None = option(
        None, help="Write the result to this file; default: validation.json beside the plan."
    )
    model: ModelOption = None
    api_key: ApiKeyOption = ""
    seed: int = option(0, min=0, help="Draw the windows' positions and the prompts from this seed.")
    save_requests: Path | None = option(
        None,
        help="Write every request, also of warm-ups, as measured and as predicted to this file "
        "(JSONL).",
    )
    loop: LoopOption = None
    force: ForeignOption = False
    as_json: JsonOption = False


@command_of(ValidateOptions)
def validate(given: ValidateOptions) -> None:
    """Compare a plan's predictions with the server that runs it.

    Windows of a trace are replayed, each after some other requests that show how fast the machine
    is now. The result is written beside the plan; `tune` and `render` show it if it is about their
    fit. Ctrl-C ends the command early; the windows that were replayed are reported.
    """
    from toolkit.bench.session import RequestSettings, Session, hold
    from toolkit.files.io import check_writable, read_file, write_file, write_text
    from toolkit.files.plan import Plan
    from toolkit.files.tuning import Tuning
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import TraceWindow, cut, fit_windows

    written = given.out or given.plan.with_name(VALIDATION)
    for file in filter(None, (written, given.save_requests)):
        check_writable(file)
    planned = read_file(Plan, given.plan)
    path = trace_path(given.trace)
    tuned = read_file(Tuning, given.tuning, {"trace": path}) if given.tuning else None
    rate = tuned.request_rate_rps if tuned else given.rate
    settings = RequestSettings(rate, seed=given.seed, loop=given.loop)
    subject = _look_at_server(given, path, planned, settings)
    if tuned:
        spans = [(window.start_s, window.end_s) for window in tuned.held_out_windows]
        chosen = [TraceWindow(*span, cut(subject.trace, *span)) for span in spans]
    else:
        found = fit_windows(subject.trace, given.window_s, given.windows, 0, given.seed)
        subject, chosen = replace(subject, trace=found.trace), found.search
    note_trace(subject.trace)
    for line in subject.notes:
        note(line)
    session = Session(subject, planned, given.warmup, progress)
    interrupted = session.run(chosen)
    if not session.results:
        raise LlmctlError("no window was replayed to its end", "nothing was written")
    result = session.validation(path, given.plan)
    write_file(result, written)
    if given.save_requests:
        write_text(given.save_requests, "".join(session.lines))
    emit(given.as_json, result, lambda: _show_validation(result))
    note(f"wrote {written}")
    if interrupted:
        raise typer.Exit(130)
    if given.max_error is not None:
        hold(((each.metric, each.error_percent) for each in result.metrics), given.max_error)


def _show_validation(result: Validation) -> None:
    """Print the errors for people."""
    rows = [
        [
            one.metric,
            one.measured,
            one.predicted,
            *map(percent, (one.error_percent, one.worst_percent)),
        ]
        for one in result.metrics
    ]
    columns = ["metric", ">measured", ">predicted", ">its error", ">worst window"]
    table(columns, rows, "means over the windows")
    requests = [
        [
            one.latency,
            percent(one.median_percent),
            f"{one.median_absolute_percent:.1f} %",
            one.requests,
        ]
        for one in result.requests
    ]
    table(["request by request", ">median error", ">median size of it", ">requests"], requests)
    slow = ", ".join(f"{window.slowdown:.2f}" for window in result.windows)
    took = f"batches took {slow} times as long as fitted"
    note(f"before the windows, {took}; the predictions include that")
    for number, window in enumerate(result.windows, start=1):
        if window.cache:
            note(f"window {number}: {window.cache.text()}")
    failed = sum(window.failed for window in result.windows)
    refused = sum(window.refused for window in result.windows)
    if failed:
        note(f"{failed:,} requests failed")
    if refused:
        note(f"of these {refused:,} were refused for load; the prediction serves every request")
