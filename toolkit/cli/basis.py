"""What predictions rest on: fits, fleets, validations and traces, read and printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.arguments import open_recipe
from toolkit.cli.output import note
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, StaleError
from toolkit.files.bench import Validation
from toolkit.files.capacity import Requests
from toolkit.files.fit import Fit
from toolkit.files.fleet import (
    CountRange,
    fleet_sources,
    inputs_of,
    is_fleet,
    merged,
    ranges_of,
    sized,
)
from toolkit.files.io import digest, read_file, shipped_fit
from toolkit.files.plan import Kind, Plan, PlannedPolicy
from toolkit.files.profile import EngineFacts
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Tuning

if TYPE_CHECKING:
    from toolkit.traces.types import Trace

VALIDATION = "validation.json"  # lies beside the fit that it is about


def warn(text: str) -> None:
    """Print a warning, such as the one of `--force` in place of a refusal."""
    note(f"warning: {text}")


def accept(plan: Plan, file: str, *, broken: bool) -> None:
    """`InputError` where this plan is predicted to break limits; with `broken` a warning."""
    from toolkit.deploy.plan import refuse_broken

    try:
        refuse_broken(plan, file)
    except InputError as error:
        if not broken:
            raise
        warn(error.message)


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


def read_tuning(path: Path | None, made_from: Mapping[str, Path] | None = None) -> Tuning | None:
    """The tuning, if a file is given. `StaleError` where it was made from other files."""
    return read_file(Tuning, path, made_from) if path else None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The kinds of workers of a fleet, and the files that they come from, by role. `bases` are the
    fits, by file; `ranges` are how many of each kind `tune --workers auto` may try.
    """

    kinds: list[Kind]
    inputs: dict[str, Path]
    bases: dict[Path, Fit]
    ranges: list[CountRange]

    def note_bases(self, tuned: Tuning | None) -> None:
        """Print the number of workers of each kind, as tuned, and what predictions rest on."""
        kinds = sized(self.kinds, tuned)
        note(f"fleet: {', '.join(f'{kind.workers} of {kind.recipe.name}' for kind in kinds)}")
        note_bases(self.bases)


def open_fleet(path: Path, *, force: bool = False) -> Fleet:
    """The fleet at `path`. `InputError` where its kinds cannot share a scheduler, `StaleError` for
    a fit of another recipe; with `force` a warning.
    """
    sources = fleet_sources(path)
    kinds = []
    for source in sources:
        recipe = source.priced(open_recipe(source.recipe))
        fit = read_fit(source.fit, source.recipe, force=force)
        count = source.member.workers or recipe.workers
        nodes = source.member.nodes
        kinds.append(Kind(recipe=recipe, fit=fit, workers=count, nodes=nodes))
        # servers do not slow each other: their fit is of one
        if count != fit.workers and not traits_of(recipe.engine.name).server:
            note_other_count(f"{recipe.name} was measured", fit, count)
    bases = {source.fit: kind.fit for source, kind in zip(sources, kinds, strict=True)}
    together = merged(kinds)
    names = [kind.recipe.name for kind in kinds]
    ranges = ranges_of(together, list(zip(names, sources, strict=True)))
    return Fleet(together, inputs_of(path, sources), bases, ranges)


def refuse_workers(workers: object) -> None:
    """`InputError` where --workers was given beside a fleet."""
    if workers is not None:
        raise InputError(
            "--workers: a fleet sets the number of workers of each kind",
            "change it in the fleet's file",
        )


def note_other_count(measured: str, fit: Fit, workers: int) -> None:
    """Print that the fit holds for another number of workers."""
    note(
        f"note: {measured} with {fit.workers} workers at once; with {workers} the times may differ"
    )


def plan_from(
    source: str | Path,
    fit: Path | None,
    tuning: Path | None,
    policy: PlannedPolicy | None = None,
    *,
    force: bool = False,
) -> tuple[Plan, Path]:
    """Make the plan of a recipe and its fit, or of a fleet, which names its fits; with a tuning or
    a policy, if given. Returns the plan and the file of its first fit.

    `InputError` for a fit beside a fleet, and for a recipe without one; else as `open_fleet`,
    `read_fit` and `make_plan`.
    """
    from toolkit.deploy.plan import make_plan

    fleet: Fleet | None = None
    if is_fleet(source):
        if fit is not None:
            raise InputError("--fit: a fleet names its fits itself", "leave --fit out")
        fleet = open_fleet(Path(source), force=force)
        inputs = fleet.inputs
    else:
        recipe = recipe_path(source)  # a missing recipe is reported first
        if fit is None:
            raise InputError("a recipe needs its fit", "add --fit fit.json, from `llmctl fit`")
        inputs = {"recipe": recipe, "fit": fit}
    tuned = read_tuning(tuning, inputs)
    near = inputs["fit"]
    made_from = inputs | ({"tuning": tuning} if tuning else {})
    if fleet is None:
        fitted = read_fit(near, inputs["recipe"], force=force)
        return make_plan(open_recipe(inputs["recipe"]), fitted, tuned, made_from, policy), near
    first, *others = sized(fleet.kinds, tuned)
    plan = make_plan(first.recipe, first.fit, tuned, made_from, policy, others, first.workers)
    return plan.model_copy(update={"nodes": first.nodes}), near


def plan_address(plan: Plan) -> str:
    """The URL of the plan's server: the recipe's engine.url, else its serve.host and serve.port."""
    serve = plan.recipe.serve
    # a server that listens on all addresses listens on the loopback address, too
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = loopback.get(serve.host, serve.host)
    return plan.recipe.engine.url or f"http://{f'[{host}]' if ':' in host else host}:{serve.port}"


def note_bases(fits: Mapping[Path, Fit]) -> None:
    """Print what predictions from these fits, by file, rest on: each fact once."""
    lines = []
    for path, fit in fits.items():
        lines += analytic_notes(fit.engine)
        validation = find_validation(path, digest(path).sha256)
        lines += [validation.summary()] if validation else []
    note(*dict.fromkeys(lines))


def analytic_notes(engine: EngineFacts) -> list[str]:
    """A line that nothing was measured, for an analytic profile or fit; else none."""
    return [f"analytic, nothing was measured: {engine.analytic}"] if engine.analytic else []


def find_validation(near: Path, fit_sha256: str) -> Validation | None:
    """The validation beside the file `near`, if it is about the fit with this digest; else the
    reason is printed.
    """
    beside = near.with_name(VALIDATION)
    if not beside.is_file():
        return None
    try:
        validation = read_file(Validation, beside)
    except InputError as error:
        note(f"{beside.name} is not used: {error.message}")
        return None
    about = validation.inputs.get("fit")
    if about is None or about.sha256 != fit_sha256:
        note(f"{beside.name} is not used: it is about another fit")
        return None
    return validation


def note_trace(trace: Trace) -> None:
    """Print what was done to `trace`, the scaling of its lengths first."""
    note_scaling(trace)
    note_rest(trace)


def note_scaling(trace: Trace) -> None:
    """Print how the lengths were scaled, in one line; nothing where they are as read."""
    if trace.scaling is not None:
        mark = "warning: " if trace.scaling.notable else ""
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
    return Requests(source=trace.source, requests=len(trace), notes=notes, scaling=trace.scaling)
