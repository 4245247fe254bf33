"""What predictions rest on, for people: fits, benches and traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.output import note
from toolkit.errors import InputError
from toolkit.files.bench import BENCH, BenchReport
from toolkit.files.capacity import Requests
from toolkit.files.fit import Fit
from toolkit.files.io import digest, read_file
from toolkit.files.new_recipe import TraceLengths
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts
from toolkit.files.tuning import Tuning, breaks, broken
from toolkit.report.rows import agreement_notes

if TYPE_CHECKING:
    from toolkit.traces.types import Trace


def warn(text: str) -> None:
    """Print a warning, for example in place of a refusal (`--force`)."""
    note(f"warning: {text}")


def warn_broken(plan: Plan, file: str) -> None:
    """Print a warning where the settings of a plan are predicted to break limits."""
    if broken(plan.limits):
        warn(f"{file}: its settings are predicted to {breaks(plan.limits)}")


def note_basis(*found: tuple[Fit, Path | None]) -> None:
    """Print what predictions from these fits rest on, each fact once. A fit has its file beside it;
    None: it was computed for this command, and nowhere written.
    """
    lines = []
    for fit, file in found:
        lines += [*analytic_notes(fit.engine), *agreement_notes(fit)]
        if file is not None:
            bench = find_bench(file, digest(file).sha256)
            lines += [bench.summary()] if bench else []
    note(*dict.fromkeys(lines))


def note_other_count(measured: str, fit: Fit, workers: int) -> None:
    """Print that the fit holds for another number of workers."""
    note(
        f"note: {measured} with {fit.workers} workers at once; with {workers} the times may differ"
    )


def plan_address(plan: Plan) -> str:
    """The URL of the plan's server: the recipe's engine.url, else its serve.host and serve.port."""
    serve = plan.recipe.serve
    # a server that listens on all addresses listens on the loopback address, too
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = loopback.get(serve.host, serve.host)
    return plan.recipe.engine.url or f"http://{f'[{host}]' if ':' in host else host}:{serve.port}"


def analytic_notes(facts: EngineFacts | Tuning) -> list[str]:
    """Return a line that nothing was measured, for analytic laws; else none. It is a warning where
    no server like the recipe's was compared.
    """
    if not facts.analytic:
        return []
    error = facts.analytic_error
    mark = "warning: " if error is None or error.guessed else ""
    return [f"{mark}analytic, nothing was measured: {facts.analytic}"]


def find_bench(near: Path, fit_sha256: str) -> BenchReport | None:
    """Return bench.json beside the file `near`, if it compares predictions of the fit with this
    digest; else print the reason.
    """
    beside = near.with_name(BENCH)
    if not beside.is_file():
        return None
    try:
        bench = read_file(BenchReport, beside)
    except InputError as error:
        note(f"{beside.name} is not used: {error.message}")
        return None
    about = bench.inputs.get("fit")
    if about is None or about.sha256 != fit_sha256:
        note(f"{beside.name} is not used: it is about another fit")
        return None
    if bench.late:
        note(f"{beside.name} is not used: {bench.late}")
        return None
    return bench if bench.summary() else None


def note_trace(trace: Trace) -> None:
    """Print what was done to `trace`, a line each, the scaling of its lengths first."""
    lengths = None
    if trace.scaling is not None:
        lengths = trace.scaling.summary()
        mark = "warning: " if trace.scaling.warnings() else ""
        note(f"{mark}trace: {lengths}")
    for line in trace.notes:
        if line != lengths:
            note(f"trace: {line}")


def sharing_notes(trace: Trace, policies: Sequence[str]) -> list[str]:
    """A line on the policies that ignore what the trace says that prompts share; else none."""
    from toolkit.sched.policies import BUILT_IN

    if trace.shared is None and trace.sessions is None:
        return []
    without = [name for name in policies if name not in BUILT_IN]
    named = f"simulated as if prompts shared nothing: {', '.join(without)}"
    return [f"{named}, which reuse none"] if without else []


def lengths_of(name: str | None) -> TraceLengths | None:
    """The lengths of the trace of --trace."""
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    if name is None:
        return None
    trace, _ = read_trace(trace_path(name))
    totals = sorted((trace.prompt_tokens + trace.output_tokens).tolist())
    return TraceLengths(name, totals, int(trace.output_tokens.max()))


def plain(trace: Trace) -> Requests:
    """Return what `--json` shows of the trace."""
    return Requests(
        source=trace.source,
        requests=len(trace),
        notes=list(trace.notes),
        scaling=trace.scaling,
        changes=trace.changes,
    )
