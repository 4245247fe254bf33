"""`llmctl validate`: windows of a trace replayed against a server; the prediction's errors, with their signs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption
from toolkit.cli.basis import VALIDATION, warn_of_foreign

if TYPE_CHECKING:
    from toolkit.bench.client import Load
    from toolkit.bench.predict import Conditions
    from toolkit.bench.report import Warmup
    from toolkit.bench.validate import Pair
    from toolkit.endpoints.target import Target
    from toolkit.files.plan import Plan
    from toolkit.files.tuning import Tuning
    from toolkit.files.validation import Validation, WindowResult
    from toolkit.traces.types import Trace
    from toolkit.traces.windows import Window


def command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="What the server runs, from `llmctl render`.")],
    url: Annotated[
        str | None,
        typer.Option(help="The server; default: the recipe's engine.url, or its serve.port here."),
    ] = None,
    trace: Annotated[str, typer.Option(help="A trace file, or the name of a shipped trace.")] = "chat-small",
    rate: Annotated[float | None, typer.Option(help="Scale arrivals to this many requests per second.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows, spread evenly over the trace.")] = 3,
    window_s: Annotated[float, typer.Option("--window", min=0.1, help="Seconds of each.")] = 20.0,
    tuning: Annotated[
        Path | None,
        typer.Option(help="tuning.json: the windows that it held out, at its rate, instead of --windows and --rate."),
    ] = None,
    warmup: Annotated[
        float, typer.Option(min=0.0, help="Seconds of other requests before each window; 0: none.")
    ] = 15.0,
    max_error: Annotated[
        float | None,
        typer.Option(min=0.0, help="Exit code 4 where throughput or a mean latency is off by more percent."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Default: validation.json beside the plan.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name; default: the first that the server has.")] = None,
    api_key: Annotated[str, typer.Option(envvar="LLMCTL_API_KEY", help="The server's key.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the windows' places and of the prompts.")] = 0,
    save_requests: Annotated[
        Path | None,
        typer.Option(help="JSONL: every request, those of warm-ups too, as measured and as predicted."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go on though the plan is of another device, engine, version or model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Hold a plan's predictions against the server that runs it.

    Windows of a trace are replayed, each after some other requests which show how fast the machine is now. What was
    measured and predicted is written beside the plan; `tune` and `render` show it where it is about their fit.
    Ctrl-C ends it early: the windows that were replayed are reported.
    """
    from toolkit.bench.client import Load, try_out
    from toolkit.bench.foreign import check_server
    from toolkit.bench.limits import fitted, limits_of
    from toolkit.bench.validate import beyond
    from toolkit.cli.output import emit, note
    from toolkit.endpoints.target import find_target
    from toolkit.errors import LlmctlError, TargetMissedError
    from toolkit.files.io import check_writable, read_file, write_file, write_text
    from toolkit.files.plan import Plan
    from toolkit.traces.read import read_trace
    from toolkit.traces.shipped import trace_path
    from toolkit.traces.windows import split_windows

    written = out or plan.with_name(VALIDATION)
    for file in filter(None, (written, save_requests)):
        check_writable(file)
    planned = read_file(Plan, plan)
    path = trace_path(trace)
    target = find_target(url or _address(planned), model or planned.recipe.engine.served_model, api_key)
    check_server(planned, target, warn_of_foreign if force else None)
    limits = limits_of(planned, target)
    tuned = _tuning(tuning, path) if tuning else None
    whole = fitted(read_trace(path)[0], limits, tuned.request_rate_rps if tuned else rate)
    dialect = try_out(target, "hidden" if target.own else "given", limits.output)
    load = Load("hidden" if target.own else "given", limits.output, limits.vocabulary, seed=seed, dialect=dialect)
    for lacking in dialect.lacks:
        note(f"the server does not take {lacking}: lengths may differ from the trace's")
    chosen = _held_out(tuned, whole) if tuned else split_windows(whole, window_s, windows, 0, seed)[0]
    session = _Session(target, planned, whole, load, warmup)
    interrupted = session.run(chosen)
    if not session.results:
        raise LlmctlError("not one window was replayed to its end", "nothing was written")
    result = session.validation(path, plan, whole.notes)
    write_file(result, written)
    if save_requests:
        write_text(save_requests, "".join(session.lines))
    emit(as_json, result, lambda: show(result))
    note(f"wrote {written}")
    if interrupted:
        raise typer.Exit(130)
    wrong = beyond(result.metrics, max_error) if max_error is not None else []
    if wrong:
        told = ", ".join(f"{each.metric} {each.error_percent:+.1f} %" for each in wrong)
        raise TargetMissedError(f"beyond {max_error:g} %: {told}", "profile and fit again, on the machine as it is now")


def _address(plan: Plan) -> str:
    serve = plan.recipe.serve
    return plan.recipe.engine.url or f"http://{serve.host}:{serve.port}"


def _tuning(file: Path, trace: Path) -> Tuning:
    """The tuning that tells the windows. `InputError` where it was made with another trace."""
    from toolkit.files.io import read_file
    from toolkit.files.tuning import Tuning

    return read_file(Tuning, file, {"trace": trace})


def _held_out(tuned: Tuning, whole: Trace) -> list[Window]:
    from toolkit.traces.windows import Window, cut

    spans = [(window.start_s, window.end_s) for window in tuned.held_out_windows]
    return [Window(start_s, end_s, cut(whole, start_s, end_s)) for start_s, end_s in spans]


class _Session:
    """Windows replayed one after the other, and what came of them."""

    def __init__(self, target: Target, plan: Plan, whole: Trace, load: Load, warmup_s: float) -> None:
        from toolkit.bench.foreign import tells_of_its_laws

        self._target, self._plan, self._whole, self._load, self._warmup_s = target, plan, whole, load, warmup_s
        self._tells = tells_of_its_laws(plan, target)
        self.results: list[WindowResult] = []
        self.lines: list[str] = []  # the requests, as JSON
        self._pairs: list[Pair] = []
        self._finished: list[int] = []  # output lengths that the server's scheduler has seen

    def run(self, windows: list[Window]) -> bool:
        """Replay them; whether that was interrupted."""
        for number, window in enumerate(windows, start=1):
            shown = self._warm_up(number, window)
            if shown is None or self._replay(number, len(windows), window, shown):
                return True
        return False

    def validation(self, trace: Path, plan: Path, notes: tuple[str, ...]) -> Validation:
        from toolkit.bench.validate import metric_errors, request_errors
        from toolkit.files.io import head
        from toolkit.files.validation import Validation

        return Validation(
            **head({"plan": plan, "trace": trace}),
            model=self._target.model,
            policy=self._plan.policy.name,
            notes=list(notes),
            windows=self.results,
            metrics=metric_errors(self.results),
            requests=request_errors(self._pairs),
        )

    def _warm_up(self, number: int, window: Window) -> Conditions | None:
        """What other requests show of the server as it is now; None: interrupted."""
        from toolkit.bench.predict import Conditions, predict
        from toolkit.bench.warmup import conditions, others, warm_up
        from toolkit.cli.output import progress

        expected = predict(self._plan, window.trace, {})["throughput_rps"]
        count = round(self._warmup_s * expected)
        if not count:
            return Conditions(finished=tuple(self._finished))
        trace = others(self._whole, window.end_s, count)
        with progress("warming up", count) as advance:
            if self._tells:
                warm, interrupted = warm_up(self._target, trace, self._load, advance)
            else:
                warm, interrupted = self._look(number, trace, advance)
        if interrupted:
            return None
        self._finished += trace.output_tokens.tolist()
        return (
            conditions(warm.slowdown, warm.front, self._finished)
            if warm
            else Conditions(finished=tuple(self._finished))
        )

    def _look(self, number: int, trace: Trace, advance: Callable[[], None]) -> tuple[Warmup | None, bool]:
        """`warm_up` of a server that tells nothing of its batches."""
        from toolkit.bench.client import run
        from toolkit.bench.outside import seen_by_clients
        from toolkit.bench.predict import Conditions, predicted
        from toolkit.bench.report import served
        from toolkit.bench.validate import Pair

        finished = tuple(self._finished)
        expected = predicted(self._plan, trace, Conditions(finished=finished)).served
        replay = run(self._target, trace, replace(self._load, seed=self._load.seed + 1), advance)
        if replay.interrupted:
            return None, True
        self._keep(number, "warm-up", trace, Pair(served(replay.samples), expected))
        return seen_by_clients(self._plan, trace, replay.samples, finished), False

    def _keep(self, number: int, part: str, trace: Trace, pair: Pair) -> None:
        from toolkit.bench.validate import request_lines

        self.lines += request_lines(number, part, trace, pair)

    def _replay(self, number: int, count: int, window: Window, shown: Conditions) -> bool:
        from toolkit.bench.client import run
        from toolkit.bench.costs import counts_or_none
        from toolkit.bench.predict import predicted
        from toolkit.bench.report import served
        from toolkit.bench.validate import Pair
        from toolkit.bench.warmup import conditions, times_between
        from toolkit.cli.output import progress
        from toolkit.files.validation import WindowResult
        from toolkit.metrics import summarize

        sla = self._plan.recipe.sla
        simulated = predicted(self._plan, window.trace, shown)
        before = counts_or_none(self._target) if self._tells else {}
        with progress(f"window {number} of {count}", len(window.trace)) as advance:
            replay = run(self._target, window.trace, self._load, advance)
        if replay.interrupted:
            return True
        measured = served(replay.samples)
        times = times_between(before, counts_or_none(self._target), replay.samples) if self._tells else None
        meanwhile = times.slowdown if times else None
        known: dict[str, float] = {}
        if times and meanwhile:
            then = conditions(meanwhile, times.front, shown.finished)
            known = predicted(self._plan, window.trace, then).metrics(sla)
        self._finished += window.trace.output_tokens.tolist()
        self._pairs.append(Pair(measured, simulated.served))
        self._keep(number, "window", window.trace, self._pairs[-1])
        self.results.append(
            WindowResult(
                start_s=window.start_s,
                end_s=window.end_s,
                requests=len(replay.samples),
                failed=sum(bool(sample.failure) for sample in replay.samples),
                slowdown=shown.slowdown,
                front_first_s=shown.front.first_s if shown.front else 0.0,
                front_last_s=shown.front.last_s if shown.front else 0.0,
                measured=summarize(measured, sla),
                predicted=simulated.metrics(sla),
                slowdown_meanwhile=meanwhile,
                predicted_in_hindsight=known,
            )
        )
        return False


def show(result: Validation) -> None:
    """Print the errors for people."""
    from toolkit.cli.output import note, percent, table

    rows = [
        [each.metric, each.measured, each.predicted, percent(each.error_percent), percent(each.worst_percent)]
        for each in result.metrics
    ]
    table(["metric", ">measured", ">predicted", ">its error", ">worst window"], rows, "means over the windows")
    requests = [
        [each.latency, percent(each.median_percent), f"{each.median_absolute_percent:.1f} %", each.requests]
        for each in result.requests
    ]
    table(["request by request", ">median error", ">median size of it", ">requests"], requests)
    slow = ", ".join(f"{window.slowdown:.2f}" for window in result.windows)
    note(f"before the windows, batches took {slow} times as long as fitted; the predictions take that over")
    failed = sum(window.failed for window in result.windows)
    if failed:
        note(f"{failed:,} requests failed")
