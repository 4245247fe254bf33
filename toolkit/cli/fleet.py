"""What commands do alike with a fleet: read the recipes and the fits that it names, and say what they rest on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.output import note

if TYPE_CHECKING:
    from toolkit.files.fit import Fit
    from toolkit.files.plan import Kind, Plan, PlannedPolicy

FleetOption = Annotated[
    Path | None,
    typer.Option("--fleet", help="Workers of several kinds, instead of --fit; see docs/fleets.md."),
]


@dataclass(frozen=True, slots=True)
class Fleet:
    """Its kinds of workers, and the files that they come from by role; `bases` are the fits by file."""

    kinds: list[Kind]
    inputs: dict[str, Path]
    bases: dict[Path, Fit]

    @property
    def others(self) -> list[Kind]:
        """All kinds but the first."""
        return self.kinds[1:]

    def note_bases(self) -> None:
        """Say of each kind what its predictions rest on."""
        from toolkit.cli.basis import note_basis

        note(f"fleet: {', '.join(f'{kind.workers} of {kind.recipe.name}' for kind in self.kinds)}")
        for path, fit in self.bases.items():
            note_basis(fit, path)


def refuse_workers(workers: object) -> None:
    """`InputError` where --workers was given beside a fleet."""
    from toolkit.errors import InputError

    if workers is not None:
        raise InputError("--workers: a fleet says how many workers there are of each kind", "change them in its file")


def open_fleet(path: Path, *, force: bool = False) -> Fleet:
    """The fleet at `path`. `InputError` where its kinds cannot be behind one scheduler, `StaleError` for a fit of
    another recipe; with `force` a warning."""
    from toolkit.cli.arguments import open_recipe
    from toolkit.cli.basis import read_fit
    from toolkit.files.fleet import fleet_sources, inputs_of, merged
    from toolkit.files.plan import Kind

    sources = fleet_sources(path)
    kinds = []
    for source in sources:
        recipe = open_recipe(source.recipe)
        fit = read_fit(source.fit, source.recipe, force=force)
        kinds.append(Kind(recipe=recipe, fit=fit, workers=source.workers or recipe.workers, nodes=source.nodes))
        if kinds[-1].workers != fit.workers:
            count, measured = kinds[-1].workers, fit.workers
            note(f"note: {recipe.name} was measured with {measured} workers at once; {count} may take other times")
    bases = {source.fit: kind.fit for source, kind in zip(sources, kinds, strict=True)}
    return Fleet(merged(kinds), inputs_of(path, sources), bases)


def plan_of_fleet(
    path: Path, tuning: Path | None, given: PlannedPolicy | None = None, *, force: bool = False
) -> tuple[Plan, Path]:
    """The plan for serving a fleet, and its first fit's file. Raises as `open_fleet` and `make_plan`."""
    from toolkit.deploy.plan import make_plan
    from toolkit.files.io import read_file
    from toolkit.files.tuning import Tuning

    fleet = open_fleet(path, force=force)
    first = fleet.kinds[0]
    tuned = read_file(Tuning, tuning, inputs=fleet.inputs) if tuning else None
    inputs = fleet.inputs | ({"tuning": tuning} if tuning else {})
    plan = make_plan(first.recipe, first.fit, tuned, inputs, given, fleet.others, first.workers)
    return plan.model_copy(update={"nodes": first.nodes}), fleet.inputs["fit"]
