"""What predictions from a fit rest on, said wherever they are shown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.output import note

if TYPE_CHECKING:
    from toolkit.cli.results import Requests
    from toolkit.files.bench import Validation
    from toolkit.files.fit import Fit
    from toolkit.files.plan import Kind, Plan, PlannedPolicy
    from toolkit.traces.types import Trace

VALIDATION = "validation.json"  # beside the fit that it is about


def warn_of_foreign(text: str) -> None:
    """What `--force` says in the place of a refusal."""
    note(f"warning: {text}")


def accept(plan: Plan, which: str, *, broken: bool) -> None:
    """`InputError` where `plan`, which comes from `which`, is predicted to break limits; a warning
    if that may be.
    """
    from toolkit.deploy.plan import refuse_broken
    from toolkit.errors import InputError

    try:
        refuse_broken(plan, which)
    except InputError as error:
        if not broken:
            raise
        note(f"warning: {error.message}")


def read_fit(path: Path, recipe: Path, *, force: bool) -> Fit:
    """The fit of `recipe`. `StaleError` for another's, or of sections that changed; with `force` a
    warning.
    """
    from toolkit.errors import InputError, StaleError
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
    """The plan of a recipe, its fit and perhaps its tuning; with `force` from a fit of another
    recipe, too.
    """
    from toolkit.cli.arguments import open_recipe
    from toolkit.deploy.plan import make_plan
    from toolkit.files.io import read_file, recipe_path
    from toolkit.files.tuning import Tuning

    made_from = {"recipe": recipe_path(recipe), "fit": fit}
    tuned = read_file(Tuning, tuning, inputs=made_from) if tuning else None
    inputs = made_from | ({"tuning": tuning} if tuning else {})
    fitted = read_fit(fit, made_from["recipe"], force=force)
    return make_plan(open_recipe(made_from["recipe"]), fitted, tuned, inputs, given)


def plan_address(plan: Plan) -> str:
    """Where the plan's server listens: the recipe's engine.url, else its serve.host and serve.port."""
    serve = plan.recipe.serve
    everywhere = {
        "0.0.0.0": "127.0.0.1",
        "::": "::1",
    }  # where it listens on all addresses, it is here, too
    host = everywhere.get(serve.host, serve.host)
    return plan.recipe.engine.url or f"http://{f'[{host}]' if ':' in host else host}:{serve.port}"


def note_basis(fit: Fit, path: Path) -> None:
    """Say that nothing was measured, where that is so, and how good predictions from `fit`, read
    from `path`, were.
    """
    from toolkit.files.io import digest

    note_analytic(fit)
    found = find_validation(path, digest(path).sha256)
    if found is not None:
        note(found.summary())


def note_analytic(fit: Fit) -> None:
    """Say that nothing was measured, where that is so."""
    if fit.engine.analytic:
        note(f"analytic, nothing of this was measured: {fit.engine.analytic}")


def find_validation(near: Path, fit_sha256: str) -> Validation | None:
    """The validation beside the file `near`, where it is about the fit with this digest; else why
    not is noted.
    """
    from toolkit.errors import InputError
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


# What commands say of the trace that they use: what was done to its lengths first, then the rest.


def note_trace(trace: Trace) -> None:
    """All that was done to `trace`, on stderr; what was done to its lengths comes first."""
    note_scaling(trace)
    note_rest(trace)


def note_scaling(trace: Trace) -> None:
    """What was done to its lengths, in one line; nothing where they are as they were read."""
    if trace.scaling is not None:
        mark = "warning: " if trace.scaling.notable else ""
        note(f"{mark}trace: {trace.scaling.summary()}")


def note_rest(trace: Trace) -> None:
    """Everything but what was done to its lengths, a line each."""
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


# What commands do alike with a fleet: read the recipes and the fits that it names, and say what
# they rest on.

FleetOption = Annotated[
    Path | None,
    typer.Option("--fleet", help="Workers of several kinds, instead of --fit; see docs/fleets.md."),
]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Its kinds of workers, and the files that they come from by role; `bases` are the fits by
    file.
    """

    kinds: list[Kind]
    inputs: dict[str, Path]
    bases: dict[Path, Fit]

    @property
    def others(self) -> list[Kind]:
        """All kinds but the first."""
        return self.kinds[1:]

    def note_bases(self) -> None:
        """Say of each kind what its predictions rest on."""

        note(f"fleet: {', '.join(f'{kind.workers} of {kind.recipe.name}' for kind in self.kinds)}")
        for path, fit in self.bases.items():
            note_basis(fit, path)


def refuse_workers(workers: object) -> None:
    """`InputError` where --workers was given beside a fleet."""
    from toolkit.errors import InputError

    if workers is not None:
        raise InputError(
            "--workers: a fleet says how many workers there are of each kind",
            "change them in its file",
        )


def open_fleet(path: Path, *, force: bool = False) -> Fleet:
    """The fleet at `path`. `InputError` where its kinds cannot be behind one scheduler,
    `StaleError` for a fit of another recipe; with `force` a warning.
    """
    from toolkit.cli.arguments import open_recipe
    from toolkit.files.fleet import fleet_sources, inputs_of, merged
    from toolkit.files.plan import Kind

    sources = fleet_sources(path)
    kinds = []
    for source in sources:
        recipe = open_recipe(source.recipe)
        fit = read_fit(source.fit, source.recipe, force=force)
        kinds.append(
            Kind(
                recipe=recipe, fit=fit, workers=source.workers or recipe.workers, nodes=source.nodes
            )
        )
        if kinds[-1].workers != fit.workers:
            count, measured = kinds[-1].workers, fit.workers
            note(
                f"note: {recipe.name} was measured with {measured} workers at once; {count} may take other times"
            )
    bases = {source.fit: kind.fit for source, kind in zip(sources, kinds, strict=True)}
    return Fleet(merged(kinds), inputs_of(path, sources), bases)


def plan_of_fleet(
    path: Path, tuning: Path | None, given: PlannedPolicy | None = None, *, force: bool = False
) -> tuple[Plan, Path]:
    """The plan for serving a fleet, and its first fit's file. Raises as `open_fleet` and
    `make_plan`.
    """
    from toolkit.deploy.plan import make_plan
    from toolkit.files.io import read_file
    from toolkit.files.tuning import Tuning

    fleet = open_fleet(path, force=force)
    first = fleet.kinds[0]
    tuned = read_file(Tuning, tuning, inputs=fleet.inputs) if tuning else None
    inputs = fleet.inputs | ({"tuning": tuning} if tuning else {})
    plan = make_plan(first.recipe, first.fit, tuned, inputs, given, fleet.others, first.workers)
    return plan.model_copy(update={"nodes": first.nodes}), fleet.inputs["fit"]
