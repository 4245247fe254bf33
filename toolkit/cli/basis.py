"""What predictions rest on: fits, benches and traces, read and printed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.catalogue.classes import of_resolved
from toolkit.cli.arguments import open_recipe
from toolkit.cli.output import note
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, StaleError
from toolkit.files.bench import BENCH, BenchReport
from toolkit.files.capacity import Requests
from toolkit.files.fit import Fit
from toolkit.files.io import digest, head, read_file, shipped_fit
from toolkit.files.modelled import refuse_recipe
from toolkit.files.plan import Plan
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Settings, Tuning, breaks, broken

if TYPE_CHECKING:
    from toolkit.traces.types import Trace

FIT_USUAL = (
    "Default: fit.json in this folder, else the shipped one, else for vLLM on a GPU laws that are "
    "computed from measured operators."
)


def warn(text: str) -> None:
    """Print a warning, such as the one of `--force` in place of a refusal."""
    note(f"warning: {text}")


def warn_broken(plan: Plan, file: str) -> None:
    """Print a warning where the settings of a plan are predicted to break limits."""
    if broken(plan.limits):
        warn(f"{file}: its settings are predicted to {breaks(plan.limits)}")


def read_fit(path: Path, recipe: Path, *, force: bool) -> Fit:
    """The fit of `recipe`. `StaleError` for a fit of another recipe, or of sections that changed;
    with `force` a warning.
    """
    ships = ""
    if shipped_fit(recipe.stem) not in (None, path):
        ships = f", or take the one that ships: --fit {recipe.stem}"
        if not path.exists():
            hint = f"make it with `llmctl profile` and `llmctl fit`{ships}"
            raise InputError(f"{path}: no such file", hint)
    try:
        return read_file(Fit, path, {"recipe": recipe})
    except StaleError as error:
        if not force:
            raise StaleError(error.message, f"{error.hint}{ships}") from None
        warn(error.message)
        return read_file(Fit, path)


@dataclass(frozen=True, slots=True)
class FoundFit:
    """A recipe's fit, and its file; None: it was computed for this command, and nowhere written."""

    fit: Fit
    file: Path | None

    def inputs(self, recipe: Path) -> dict[str, Path]:
        """Role to file, for an envelope's inputs."""
        return {"recipe": recipe} | ({"fit": self.file} if self.file else {})


def note_found(found: Iterable[FoundFit]) -> None:
    """Print what predictions from these fits rest on: each fact once."""
    lines = []
    for one in found:
        lines += [*analytic_notes(one.fit.engine), *agreement_notes(one.fit)]
        if one.file is not None:
            bench = find_bench(one.file, digest(one.file).sha256)
            lines += [bench.summary()] if bench else []
    note(*dict.fromkeys(lines))


def find_fit(file: Path, recipe: Recipe, given: Path | None, *, force: bool = False) -> FoundFit:
    """The fit of the recipe in `file`: the one that is `given`, fit.json of this folder, the
    shipped one, or computed.

    Raises `InputError` where none of these is possible, for what is not modelled, and as
    `read_fit`.
    """
    refuse_recipe(recipe)
    path = given or _fit_here(recipe) or shipped_fit(file.stem)
    if path is not None:
        return FoundFit(read_fit(path, file, force=force), path)
    from toolkit.profiling.analytic import by_operators

    if not by_operators(recipe):
        raise InputError(
            f"recipe '{recipe.name}' has no shipped fit, and there is no fit.json of it here",
            "llmctl profile RECIPE and llmctl fit profile.json give one, for --fit fit.json",
        )
    found = FoundFit(computed_fit(file, recipe), None)
    note(f"{recipe.name}: there is no fit of it, so its laws are computed; nothing is measured")
    return found


def _fit_here(recipe: Recipe) -> Path | None:
    """fit.json in the current folder, if it is a fit of this recipe."""
    here = Path("fit.json")
    if not here.is_file():
        return None
    other = read_file(Fit, here).recipe_name
    if other != recipe.name:
        note(f"fit.json of this folder is of recipe '{other}', and is not used")
        return None
    return here


def computed_fit(file: Path, recipe: Recipe) -> Fit:
    """The analytic fit of a recipe, which may differ from its file. `InputError` as
    `analytic_fit`.
    """
    from toolkit.profiling.analytic import analytic_fit

    made_from = head(inputs={"recipe": file}, device=recipe.hardware.name)
    return analytic_fit(recipe.measured, made_from)


def read_tuning(path: Path | None, made_from: Mapping[str, Path] | None = None) -> Tuning | None:
    """The tuning, if a file is given. `StaleError` where it was made from other files."""
    return read_file(Tuning, path, made_from) if path else None


def note_other_count(measured: str, fit: Fit, workers: int) -> None:
    """Print that the fit holds for another number of workers."""
    note(
        f"note: {measured} with {fit.workers} workers at once; with {workers} the times may differ"
    )


def plan_from(
    source: str | Path,
    fit: Path | None,
    tuning: Path | None,
    settings: Settings | None = None,
) -> tuple[Plan, Path]:
    """Make the plan of a recipe and its fit; with a tuning or settings, if given. Returns the plan
    and the file beside which its bench may lie: its fit, or the recipe where the laws are computed.

    A recipe without a given fit has the one of `find_fit`; with a tuning by computed laws, these.
    Raises the errors of `find_fit` and `make_plan`.
    """
    from toolkit.deploy.plan import make_plan

    file = recipe_path(source)  # a missing recipe is reported first
    recipe = open_recipe(file)
    tuned = read_tuning(tuning, {"recipe": file})
    if tuned and "fit" not in tuned.inputs and fit is None:
        found = FoundFit(computed_fit(file, recipe), None)
    else:
        found = find_fit(file, recipe, fit)
        inputs = found.inputs(file)
        tuned = read_tuning(tuning, inputs)
    made_from = found.inputs(file) | ({"tuning": tuning} if tuning else {})
    return make_plan(recipe, found.fit, tuned, made_from, settings), found.file or file


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


def agreement_notes(fit: Fit) -> list[str]:
    """A line that says how far the simulator agrees with vLLM's own scheduler: of the version that
    was measured, or where none was, of the last one that was compared; none for other engines.
    """
    if not traits_of(fit.engine.engine).timed_by_pass:
        return []
    from toolkit.backends.vllm.conformance.results import agreement, last_compared

    resolved = fit.steps.resolved if fit.steps else None
    classes = {one.name for one in of_resolved(resolved)} if resolved else set()
    version = fit.engine.engine_version or last_compared()
    return [agreement(version, classes)] if version else []


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
    """Print what was done to `trace`, the scaling of its lengths first."""
    note_scaling(trace)
    note_rest(trace)


def note_scaling(trace: Trace) -> None:
    """Print how the requests were fitted, in one line; nothing where they are as read."""
    if trace.scaling is not None:
        mark = "warning: " if trace.scaling.warnings() else ""
        note(f"{mark}trace: {trace.scaling.summary()}")


def note_rest(trace: Trace) -> None:
    """Print everything but the scaling of lengths, a line each."""
    lengths = trace.scaling.summary() if trace.scaling else None
    for line in trace.notes:
        if line != lengths:
            note(f"trace: {line}")


def plain(trace: Trace) -> Requests:
    """The trace as `--json` shows it."""
    notes = list(trace.notes)
    return Requests(
        source=trace.source,
        requests=len(trace),
        notes=notes,
        scaling=trace.scaling,
        changes=trace.changes,
    )
