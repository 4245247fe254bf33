"""`llmctl bench`: replay a trace against a running server; measured beside predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from toolkit.cli.arguments import (
    ApiKeyOption,
    ForeignOption,
    JsonOption,
    MaxErrorOption,
    ModelOption,
    SlaOption,
    parse_sla,
)

if TYPE_CHECKING:
    from toolkit.files.bench import BenchReport
    from toolkit.files.plan import Plan
    from toolkit.traces.types import Trace

LOCAL = "http://127.0.0.1:8000"
SAME_RATE = 0.02  # rates that differ by less, as shares, are the same
LATE_S = 0.05  # the client's own delay from which on its figures deserve a warning


def command(
    url: Annotated[
        str | None,
        typer.Option(help="The server; default: the plan's address, or http://127.0.0.1:8000."),
    ] = None,
    trace: Annotated[
        str, typer.Option(help="A trace file, or the name of a shipped trace.")
    ] = "chat-small",
    plan: Annotated[
        Path | None,
        typer.Option(
            help="What the server runs: lengths are fitted to it, metrics predicted from it."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Scale arrivals to this many requests per second.")
    ] = None,
    start: Annotated[
        float, typer.Option(min=0.0, help="First second of the (scaled) trace to replay.")
    ] = 0.0,
    duration: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds to replay; default: to the end.")
    ] = None,
    warmup: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds of other requests first, which show the machine's speed to the prediction; 0: none. "
            "Only with --plan.",
        ),
    ] = 15.0,
    max_error: MaxErrorOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the report here, as JSON.")] = None,
    save_requests: Annotated[
        Path | None, typer.Option(help="Write every request's times here, as a canonical trace.")
    ] = None,
    sla: SlaOption = None,
    lengths: Annotated[
        Literal["hidden", "given"] | None,
        typer.Option(
            help="Whether the server's scheduler may know output lengths (given: max_tokens says them). "
            "Default: hidden where the server allows it (llmctl serve --allow-end-after); else given."
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Limit of requests whose trace names none; default: the plan's, or 256."
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Prompts are random tokens below this; default: the plan's, or 256."
        ),
    ] = None,
    model: ModelOption = None,
    api_key: ApiKeyOption = "",
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Give a request up after so many seconds.")
    ] = 600.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the prompts.")] = 0,
    force: ForeignOption = False,
    as_json: JsonOption = False,
) -> None:
    """Replay a trace against a running server and print what was measured, beside what the plan
    predicts.

    Requests go out at the trace's times, whatever the server does; latencies count from there.
    Ctrl-C ends the replay early and reports what was answered.
    """
    from toolkit.bench.report import request_lines
    from toolkit.bench.session import Measurement, Wanted, hold, look_at
    from toolkit.cli.basis import note_trace, plan_address, warn_of_foreign
    from toolkit.cli.output import emit, note, progress
    from toolkit.endpoints.target import find_target
    from toolkit.errors import LlmctlError
    from toolkit.files.io import check_writable, read_file, write_file
    from toolkit.files.plan import Plan
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.write import write_lines

    for written in filter(None, (out, save_requests)):
        check_writable(written)
    planned = read_file(Plan, plan) if plan else None
    targets = parse_sla(sla) or (planned.recipe.sla if planned else {})
    path = trace_path(trace)
    loaded, _ = read_trace(path)
    wanted = Wanted(rate, lengths, max_new_tokens, vocab_size, timeout, seed)
    address = url or (plan_address(planned) if planned else LOCAL)
    served_model = model or (planned.recipe.engine.served_model if planned else None)
    target = find_target(address, served_model, api_key)
    subject = look_at(target, loaded, planned, wanted, warn_of_foreign if force else None)
    part = _excerpt(subject.trace, start, duration)
    note_trace(part)
    for line in (*subject.notes, *_rate_notes(planned, subject.trace)):
        note(line)
    measurement = Measurement(subject, part, planned, targets, note, progress)
    if not measurement.warm_up(warmup, start + float(part.arrival_s[-1])):
        note("interrupted while it warmed up: nothing was measured")
        raise typer.Exit(130)
    replay = measurement.replay()
    result = measurement.report(replay, {"trace": path} | ({"plan": plan} if plan else {}))
    if save_requests:
        write_lines(request_lines(replay.samples), save_requests)
    if out:
        write_file(result, out)
    emit(as_json, result, lambda: _show(result))
    _remark(result)
    if replay.interrupted:
        raise typer.Exit(130)
    if not result.measured["throughput_rps"]:
        raise LlmctlError(
            f"not one of {result.requests:,} requests was served", "the reasons are above"
        )
    if max_error is not None:
        hold(((row.metric, row.error_percent) for row in result.compared), max_error)


def _excerpt(trace: Trace, start: float, duration: float | None) -> Trace:
    from toolkit.traces.windows import cut

    if start == 0 and duration is None:
        return trace
    return cut(trace, start, float("inf") if duration is None else start + duration)


def _rate_notes(plan: Plan | None, trace: Trace) -> list[str]:
    """A line where the trace's rate is not the one that the plan was tuned for: its promise is
    about that one.
    """
    from toolkit.traces.windows import mean_rate

    if plan is None or plan.workload is None:
        return []
    tuned_rps, rate_rps = plan.workload.request_rate_rps, mean_rate(trace)
    if abs(rate_rps / tuned_rps - 1.0) < SAME_RATE:
        return []
    told = f"the plan was tuned for {tuned_rps:.4g} requests/s, and this replays {rate_rps:.4g}"
    return [f"{told}; its promise: --rate {tuned_rps:.6g}"]


def _show(result: BenchReport) -> None:
    from toolkit.cli.output import percent, table

    def error(value: float | None) -> str | None:
        return None if value is None else percent(value)

    if not result.predicted:
        table(["metric", ">measured"], [[row.metric, row.measured] for row in result.compared])
    else:
        rows = [
            [row.metric, row.measured, row.predicted, error(row.error_percent)]
            + ([row.as_fitted, error(row.as_fitted_error_percent)] if result.warmup else [])
            for row in result.compared
        ]
        columns = ["metric", ">measured", ">predicted", ">its error"]
        table(columns + ([">as fitted", ">its error"] if result.warmup else []), rows)
    if result.targets:
        _show_targets(result)


def _show_targets(result: BenchReport) -> None:
    from toolkit.cli.output import table

    words = {True: "yes", False: "NO", None: None}
    rows = [
        [one.target, one.limit_s, one.measured_s, words[one.kept]]
        + ([one.predicted_s, words[one.predicted_kept]] if result.predicted else [])
        for one in result.targets
    ]
    attained = [told.get("sla_attainment_percent") for told in (result.measured, result.predicted)]
    rows.append(["requests within all", None, _share(attained[0]), None])
    rows[-1] += [_share(attained[1]), None] if result.predicted else []
    columns = ["target", ">limit", ">measured", "kept"]
    table(columns + ([">predicted", "kept"] if result.predicted else []), rows)


def _share(percent: float | None) -> str | None:
    return None if percent is None else f"{percent:.1f} %"


def _remark(result: BenchReport) -> None:
    """What a reader must know before believing the table."""
    from toolkit.cli.output import note, seconds

    if result.warmup and result.replay_slowdown:
        warm, costs_s = result.warmup, (result.replay_arrival_cost_s, result.warmup.arrival_cost_s)
        slow = f"{result.replay_slowdown:.2f} times as long as fitted; in the warm-up {warm.slowdown:.2f}"
        note(f"during the replay batches took {slow}")
        if any(costs_s):
            note(
                f"a request that arrived added {seconds(costs_s[0])} to each; in the warm-up {seconds(costs_s[1])}"
            )
        note(_hindsight(result))
    if result.scheduling:
        note(result.scheduling.text())
    if result.interrupted:
        note(
            f"interrupted: {result.answered:,} of {result.requests:,} requests were answered, and are reported"
        )
    for reason, count in result.failures.items():
        note(f"{count:,} requests failed: {reason}")
    if result.refused:
        counted = "attainment and goodput count them as missed"
        told = "; the prediction serves every request" if result.predicted else ""
        note(
            f"{result.refused:,} of {result.requests:,} requests were refused for load: {counted}{told}"
        )
    if result.wrong_length:
        note(f"{result.wrong_length:,} outputs had another length than in the trace")
    if result.send_lag_p99_s > LATE_S:
        note(
            f"the client was short of CPU: requests left up to {seconds(result.send_lag_p99_s)} late (p99)"
        )


def _hindsight(result: BenchReport) -> str:
    """The prediction's errors had it known how fast the machine would be: what is left is the
    laws'.
    """
    from toolkit.cli.output import percent

    names = ("throughput_rps", "ttft_mean_s", "e2e_mean_s")
    found, told = result.predicted_in_hindsight, result.measured
    errors = [
        f"{name} {percent(100.0 * (found[name] / told[name] - 1.0))}"
        for name in names
        if told.get(name)
    ]
    return f"had it known that speed, the prediction's errors were: {', '.join(errors)}"
