"""What predictions rest on, as several commands read and print it.

In order: warnings in place of refusals; reading a fit and making a plan of a recipe; notes on the
fit, its validation and the trace; fleets, which have several recipes and fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import open_recipe
from toolkit.cli.output import note
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError, StaleError

if TYPE_CHECKING:
    from toolkit.cli.results import Requests
    from toolkit.files.bench import Validation
    from toolkit.files.fit import Fit
    from toolkit.files.fleet import CountRange
    from toolkit.files.plan import Kind, Plan, PlannedPolicy
    from toolkit.files.tuning import Tuning
    from toolkit.traces.types import Trace

VALIDATION = "validation.json"  # lies beside the fit that it is about


def warn_of_foreign(text: str) -> None:
    """The warning that `--force` prints in place of a refusal."""
    note(f"warning: {text}")


def accept(plan: Plan, which: str, *, broken: bool) -> None:
    """`InputError` where `plan`, from the file `which`, is predicted to break limits; with `broken`
    a warning.
    """
    from toolkit.deploy.plan import refuse_broken

    try:
        refuse_broken(plan, which)
    except InputError as error:
        if not broken:
            raise
        note(f"warning: {error.message}")


def read_fit(path: Path, recipe: Path, *, force: bool) -> Fit:
    """The fit of `recipe`. `StaleError` for a fit of another recipe, or of sections that changed;
    with `force` a warning.
    """
    from toolkit.files.fit import Fit
    from toolkit.files.io import read_file, shipped_fit

    shipped = shipped_fit(recipe.stem)
    ships = (
        f", or take the one that ships: --fit {recipe.stem}" if shipped not in (None, path) else ""
    )
    if not path.exists() and ships:
        raise InputError(
            f"{path}: no such file", f"make it with `llmctl profile` and `llmctl fit`{ships}"
        )
    try:
        return read_file(Fit, path, {"recipe": recipe})
    except StaleError as error:
        if not force:
            raise StaleError(error.message, f"{error.hint}{ships}") from None
        warn_of_foreign(error.message)
        return read_file(Fit, path)


def plan_of_recipe(
    recipe: str | Path,
    fit: Path,
    tuning: Path | None,
    given: PlannedPolicy | None = None,
    *,
    force: bool = False,
) -> Plan:
    """The plan of a recipe, its fit and optionally its tuning; with `force` also from a fit of
    another recipe.
    """
    from toolkit.deploy.plan import make_plan
    from toolkit.files.io import read_file
    from toolkit.files.shipped import recipe_path
    from toolkit.files.tuning import Tuning

    made_from = {"recipe": recipe_path(recipe), "fit": fit}
    tuned = read_file(Tuning, tuning, inputs=made_from) if tuning else None
    inputs = made_from | ({"tuning": tuning} if tuning else {})
    fitted = read_fit(fit, made_from["recipe"], force=force)
    return make_plan(open_recipe(made_from["recipe"]), fitted, tuned, inputs, given)


def plan_address(plan: Plan) -> str:
    """The URL of the plan's server: the recipe's engine.url, else its serve.host and serve.port."""
    serve = plan.recipe.serve
    # a server that listens on all addresses listens on the loopback address, too
    loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = loopback.get(serve.host, serve.host)
    return plan.recipe.engine.url or f"http://{f'[{host}]' if ':' in host else host}:{serve.port}"


def note_basis(fit: Fit, path: Path) -> None:
    """Print that nothing was measured, if so, and how good earlier predictions from `fit` were.
    `path` is the fit's file.
    """
    for line in _basis(fit, path):
        note(line)


def _basis(fit: Fit, path: Path) -> list[str]:
    from toolkit.files.io import digest

    found = find_validation(path, digest(path).sha256)
    return analytic_notes(fit) + ([found.summary()] if found else [])


def analytic_notes(fit: Fit) -> list[str]:
    """A line that nothing was measured, for an analytic fit; else none."""
    assumed = fit.engine.analytic
    return [f"analytic, nothing was measured: {assumed}"] if assumed else []


def find_validation(near: Path, fit_sha256: str) -> Validation | None:
    """The validation beside the file `near`, if it is about the fit with this digest; else the
    reason is printed.
    """
    from toolkit.files.bench import Validation
    from toolkit.files.io import read_file

    beside = near.with_name(VALIDATION)
    if not beside.is_file():
        return None
    try:
        found = read_file(Validation, beside)
    except InputError as error:
        note(f"{beside.name} is not used: {error.message}")
        return None
    about = found.inputs.get("fit")
    if about is None or about.sha256 != fit_sha256:
        note(f"{beside.name} is not used: it is about another fit")
        return None
    return found


def note_trace(trace: Trace) -> None:
    """Print what was done to `trace` on stderr, its lengths first."""
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
    from toolkit.cli.results import Requests

    return Requests(
        source=trace.source, requests=len(trace), notes=list(trace.notes), scaling=trace.scaling
    )


FleetOption = Annotated[
    Path | None,
    typer.Option(
        "--fleet", help="Workers of several kinds, in place of --fit; see the docs on fleets."
    ),
]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The kinds of workers of a fleet, and the files that they come from, by role. `bases` are the
    fits, by file; `ranges` are how many of each kind `tune --workers auto` may try.
    """

    kinds: list[Kind]
    inputs: dict[str, Path]
    bases: dict[Path, Fit]
    ranges: list[CountRange]

    @property
    def others(self) -> list[Kind]:
        """All kinds except the first."""
        return self.kinds[1:]

    def note_bases(self, tuned: Tuning | None = None) -> None:
        """Print what the predictions of each kind rest on, with the counts of a tuning."""
        from toolkit.files.fleet import sized

        kinds = sized(self.kinds, tuned)
        note(f"fleet: {', '.join(f'{kind.workers} of {kind.recipe.name}' for kind in kinds)}")
        lines = [line for path, fit in self.bases.items() for line in _basis(fit, path)]
        for line in dict.fromkeys(lines):  # kinds may rest on the same
            note(line)


def refuse_workers(workers: object) -> None:
    """`InputError` where --workers was given beside a fleet."""
    if workers is not None:
        raise InputError(
            "--workers: a fleet sets the number of workers of each kind",
            "change it in the fleet's file",
        )


def kind_names(path: Path | None) -> list[str]:
    """The names of the kinds of the fleet at `path`; none without a fleet."""
    from toolkit.files.fleet import fleet_sources

    sources = fleet_sources(path) if path is not None else []
    return [open_recipe(source.recipe).name for source in sources]


def open_fleet(path: Path, *, force: bool = False) -> Fleet:
    """The fleet at `path`. `InputError` where its kinds cannot share a scheduler, `StaleError` for
    a fit of another recipe; with `force` a warning.
    """
    from toolkit.files.fleet import fleet_sources, inputs_of, merged, ranges_of
    from toolkit.files.plan import Kind

    sources = fleet_sources(path)
    kinds = []
    for source in sources:
        recipe = source.priced(open_recipe(source.recipe))
        fit = read_fit(source.fit, source.recipe, force=force)
        workers, nodes = source.member.workers or recipe.workers, source.member.nodes
        kinds.append(Kind(recipe=recipe, fit=fit, workers=workers, nodes=nodes))
        # servers do not slow each other: their fit is of one
        if kinds[-1].workers != fit.workers and not traits_of(recipe.engine.name).server:
            count, measured = kinds[-1].workers, fit.workers
            note(
                f"note: {recipe.name} was measured with {measured} workers at once;"
                f" with {count} the times may differ"
            )
    bases = {source.fit: kind.fit for source, kind in zip(sources, kinds, strict=True)}
    together = merged(kinds)
    names = [kind.recipe.name for kind in kinds]
    ranges = ranges_of(together, list(zip(names, sources, strict=True)))
    return Fleet(together, inputs_of(path, sources), bases, ranges)


def plan_of_fleet(
    path: Path, tuning: Path | None, given: PlannedPolicy | None = None, *, force: bool = False
) -> tuple[Plan, Path]:
    """The plan for serving a fleet, and its first fit's file. Raises as `open_fleet` and
    `make_plan`.
    """
    from toolkit.deploy.plan import make_plan
    from toolkit.files.fleet import sized
    from toolkit.files.io import read_file
    from toolkit.files.tuning import Tuning

    fleet = open_fleet(path, force=force)
    tuned = read_file(Tuning, tuning, inputs=fleet.inputs) if tuning else None
    inputs = fleet.inputs | ({"tuning": tuning} if tuning else {})
    first, *others = sized(fleet.kinds, tuned)
    plan = make_plan(first.recipe, first.fit, tuned, inputs, given, others, first.workers)
    return plan.model_copy(update={"nodes": first.nodes}), fleet.inputs["fit"]
