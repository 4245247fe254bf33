"""`llmctl validate`: windows of a trace replayed against a server, and the prediction's errors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import (
    ApiKeyOption,
    ForeignOption,
    JsonOption,
    LoopOption,
    MaxErrorOption,
    ModelOption,
    command_of,
)
from toolkit.cli.basis import VALIDATION, plan_address, warn_of_foreign

if TYPE_CHECKING:
    from toolkit.files.bench import Validation
    from toolkit.files.tuning import Tuning
    from toolkit.traces.types import Trace
    from toolkit.traces.windows import TraceWindow


@dataclass(frozen=True, slots=True)
class ValidateOptions:
    """The command line of `llmctl validate`."""

    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.json", help="The plan of the server, from `llmctl render`."),
    ]
    url: Annotated[
        str | None,
        typer.Option(
            help="URL of the server; default: the recipe's engine.url, or its"
            " serve.port on this machine."
        ),
    ] = None
    trace: Annotated[str, typer.Option(help="A trace file, or the name of a shipped trace.")] = (
        "chat-small"
    )
    rate: Annotated[
        float | None, typer.Option(help="Scale arrivals to this many requests per second.")
    ] = None
    windows: Annotated[
        int, typer.Option(min=1, help="Replay this many windows, spread evenly over the trace.")
    ] = 3
    window_s: Annotated[
        float,
        typer.Option(
            "--window", min=0.1, help="Seconds of each window, if the trace is long enough."
        ),
    ] = 20.0
    tuning: Annotated[
        Path | None,
        typer.Option(
            help="Replay the held-out windows of this tuning.json at its rate, instead"
            " of --windows "
            "and --rate."
        ),
    ] = None
    warmup: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds of other requests before each window; 0: no warm-up."),
    ] = 15.0
    max_error: MaxErrorOption = None
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the result to this file; default: validation.json beside the plan."
        ),
    ] = None
    model: ModelOption = None
    api_key: ApiKeyOption = ""
    seed: Annotated[
        int, typer.Option(min=0, help="Draw the windows' positions and the prompts from this seed.")
    ] = 0
    save_requests: Annotated[
        Path | None,
        typer.Option(
            help="Write every request, also of warm-ups, as measured and as predicted to this file "
            "(JSONL)."
        ),
    ] = None
    loop: LoopOption = None
    force: ForeignOption = False
    as_json: JsonOption = False


@command_of(ValidateOptions)
def command(given: ValidateOptions) -> None:
    """Compare a plan's predictions with the server that runs it.

    Windows of a trace are replayed, each after some other requests that show how fast the machine
    is now. The result is written beside the plan; `tune` and `render` show it if it is about their
    fit. Ctrl-C ends the command early; the windows that were replayed are reported.
    """
    from toolkit.bench.session import RequestSettings, Session, hold, look_at
    from toolkit.cli.basis import note_trace
    from toolkit.cli.output import emit, note, progress
    from toolkit.endpoints.target import find_target
    from toolkit.errors import LlmctlError
    from toolkit.files.io import check_writable, read_file, write_file, write_text
    from toolkit.files.plan import Plan
    from toolkit.files.tuning import Tuning
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path
    from toolkit.traces.windows import fit_windows

    written = given.out or given.plan.with_name(VALIDATION)
    for file in filter(None, (written, given.save_requests)):
        check_writable(file)
    planned = read_file(Plan, given.plan)
    path = trace_path(given.trace)
    target = find_target(
        given.url or plan_address(planned),
        given.model or planned.recipe.engine.served_model,
        given.api_key,
    )
    tuned = read_file(Tuning, given.tuning, {"trace": path}) if given.tuning else None
    rate = tuned.request_rate_rps if tuned else given.rate
    settings = RequestSettings(rate, seed=given.seed, loop=given.loop)
    subject = look_at(
        target, read_trace(path)[0], planned, settings, warn_of_foreign if given.force else None
    )
    if tuned:
        chosen = _held_out(tuned, subject.trace)
    else:
        cut = fit_windows(subject.trace, given.window_s, given.windows, 0, given.seed)
        subject, chosen = replace(subject, trace=cut.trace), cut.search
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
    emit(given.as_json, result, lambda: show(result))
    note(f"wrote {written}")
    if interrupted:
        raise typer.Exit(130)
    if given.max_error is not None:
        hold(((each.metric, each.error_percent) for each in result.metrics), given.max_error)


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
        f"before the windows, batches took {slow} times as long as fitted;"
        " the predictions include that"
    )
    for number, window in enumerate(result.windows, start=1):
        if window.cache:
            note(f"window {number}: {window.cache.text()}")
    failed, refused = (
        sum(getattr(window, name) for window in result.windows) for name in ("failed", "refused")
    )
    if failed:
        note(f"{failed:,} requests failed")
    if refused:
        note(f"of these {refused:,} were refused for load; the prediction serves every request")
