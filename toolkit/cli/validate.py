"""`llmctl validate`: windows of a trace replayed against a server; the prediction's errors, with
their signs.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import (
    ApiKeyOption,
    ForeignOption,
    JsonOption,
    MaxErrorOption,
    ModelOption,
)
from toolkit.cli.basis import VALIDATION, plan_address, warn_of_foreign

if TYPE_CHECKING:
    from toolkit.files.bench import Validation
    from toolkit.files.tuning import Tuning
    from toolkit.traces.types import Trace
    from toolkit.traces.windows import TraceWindow


def command(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.json", help="What the server runs, from `llmctl render`."),
    ],
    url: Annotated[
        str | None,
        typer.Option(help="The server; default: the recipe's engine.url, or its serve.port here."),
    ] = None,
    trace: Annotated[
        str, typer.Option(help="A trace file, or the name of a shipped trace.")
    ] = "chat-small",
    rate: Annotated[
        float | None, typer.Option(help="Scale arrivals to this many requests per second.")
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows, spread evenly over the trace.")] = 3,
    window_s: Annotated[
        float, typer.Option("--window", min=0.1, help="Seconds of each, where the trace allows it.")
    ] = 20.0,
    tuning: Annotated[
        Path | None,
        typer.Option(
            help="tuning.json: the windows that it held out, at its rate, instead of --windows and --rate."
        ),
    ] = None,
    warmup: Annotated[
        float, typer.Option(min=0.0, help="Seconds of other requests before each window; 0: none.")
    ] = 15.0,
    max_error: MaxErrorOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Default: validation.json beside the plan.")
    ] = None,
    model: ModelOption = None,
    api_key: ApiKeyOption = "",
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the windows' places and of the prompts.")
    ] = 0,
    save_requests: Annotated[
        Path | None,
        typer.Option(
            help="JSONL: every request, those of warm-ups too, as measured and as predicted."
        ),
    ] = None,
    force: ForeignOption = False,
    as_json: JsonOption = False,
) -> None:
    """Hold a plan's predictions against the server that runs it.

    Windows of a trace are replayed, each after some other requests which show how fast the machine
    is now. What was measured and predicted is written beside the plan; `tune` and `render` show it
    where it is about their fit. Ctrl-C ends it early: the windows that were replayed are reported.
    """
    from toolkit.bench.session import Session, Wanted, hold, look_at
    from toolkit.cli.basis import note_trace
    from toolkit.cli.output import emit, note, progress
    from toolkit.endpoints.target import find_target
    from toolkit.errors import LlmctlError
    from toolkit.files.io import check_writable, read_file, write_file, write_text
    from toolkit.files.plan import Plan
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import fit_windows

    written = out or plan.with_name(VALIDATION)
    for file in filter(None, (written, save_requests)):
        check_writable(file)
    planned = read_file(Plan, plan)
    path = trace_path(trace)
    target = find_target(
        url or plan_address(planned), model or planned.recipe.engine.served_model, api_key
    )
    tuned = _tuning(tuning, path) if tuning else None
    wanted = Wanted(tuned.request_rate_rps if tuned else rate, seed=seed)
    subject = look_at(
        target, read_trace(path)[0], planned, wanted, warn_of_foreign if force else None
    )
    if tuned:
        chosen = _held_out(tuned, subject.trace)
    else:
        cut = fit_windows(subject.trace, window_s, windows, 0, seed)
        subject, chosen = replace(subject, trace=cut.trace), cut.search
    note_trace(subject.trace)
    for line in subject.notes:
        note(line)
    session = Session(subject, planned, warmup, progress)
    interrupted = session.run(chosen)
    if not session.results:
        raise LlmctlError("not one window was replayed to its end", "nothing was written")
    result = session.validation(path, plan)
    write_file(result, written)
    if save_requests:
        write_text(save_requests, "".join(session.lines))
    emit(as_json, result, lambda: show(result))
    note(f"wrote {written}")
    if interrupted:
        raise typer.Exit(130)
    if max_error is not None:
        hold(((each.metric, each.error_percent) for each in result.metrics), max_error)


def _tuning(file: Path, trace: Path) -> Tuning:
    """The tuning that tells the windows. `InputError` where it was made with another trace."""
    from toolkit.files.io import read_file
    from toolkit.files.tuning import Tuning

    return read_file(Tuning, file, {"trace": trace})


def _held_out(tuned: Tuning, whole: Trace) -> list[TraceWindow]:
    from toolkit.traces.windows import TraceWindow, cut

    spans = [(window.start_s, window.end_s) for window in tuned.held_out_windows]
    return [TraceWindow(start_s, end_s, cut(whole, start_s, end_s)) for start_s, end_s in spans]


def show(result: Validation) -> None:
    """Print the errors for people."""
    from toolkit.cli.output import note, percent, table

    rows = [
        [
            each.metric,
            each.measured,
            each.predicted,
            percent(each.error_percent),
            percent(each.worst_percent),
        ]
        for each in result.metrics
    ]
    table(
        ["metric", ">measured", ">predicted", ">its error", ">worst window"],
        rows,
        "means over the windows",
    )
    requests = [
        [
            each.latency,
            percent(each.median_percent),
            f"{each.median_absolute_percent:.1f} %",
            each.requests,
        ]
        for each in result.requests
    ]
    table(["request by request", ">median error", ">median size of it", ">requests"], requests)
    slow = ", ".join(f"{window.slowdown:.2f}" for window in result.windows)
    note(
        f"before the windows, batches took {slow} times as long as fitted; the predictions take that over"
    )
    failed, refused = (
        sum(getattr(window, name) for window in result.windows) for name in ("failed", "refused")
    )
    if failed:
        note(f"{failed:,} requests failed")
    if refused:
        note(f"of these {refused:,} were refused for load; the prediction serves every request")
