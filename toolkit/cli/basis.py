"""What predictions from a fit rest on, said wherever they are shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.output import note

if TYPE_CHECKING:
    from toolkit.files.fit import Fit
    from toolkit.files.plan import Plan, PlannedPolicy
    from toolkit.files.validation import Validation

VALIDATION = "validation.json"  # beside the fit that it is about


def warn_of_foreign(text: str) -> None:
    """What `--force` says in the place of a refusal."""
    note(f"warning: {text}")


def accept(plan: Plan, which: str, *, broken: bool) -> None:
    """`InputError` where `plan`, which comes from `which`, is predicted to break limits; a warning if that may be."""
    from toolkit.deploy.plan import refuse_broken
    from toolkit.errors import InputError

    try:
        refuse_broken(plan, which)
    except InputError as error:
        if not broken:
            raise
        note(f"warning: {error.message}")


def read_fit(path: Path, recipe: Path, *, force: bool) -> Fit:
    """The fit of `recipe`. `StaleError` for another's, or of sections that changed; with `force` a warning."""
    from toolkit.errors import InputError, StaleError
    from toolkit.files.fit import Fit
    from toolkit.files.fits import shipped_fit
    from toolkit.files.io import read_file

    shipped = shipped_fit(recipe.stem)
    ships = f", or take the one that ships: --fit {recipe.stem}" if shipped not in (None, path) else ""
    if not path.exists() and ships:
        raise InputError(f"{path}: no such file", f"make it with `llmctl profile` and `llmctl fit`{ships}")
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
    """The plan of a recipe, its fit and perhaps its tuning; with `force` from a fit of another recipe, too."""
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
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where it listens on all addresses, it is here, too
    host = everywhere.get(serve.host, serve.host)
    return plan.recipe.engine.url or f"http://{f'[{host}]' if ':' in host else host}:{serve.port}"


def note_basis(fit: Fit, path: Path) -> None:
    """Say that nothing was measured, where that is so, and how good predictions from `fit`, read from `path`, were."""
    from toolkit.files.provenance import digest

    note_analytic(fit)
    found = find_validation(path, digest(path).sha256)
    if found is not None:
        note(found.summary())


def note_analytic(fit: Fit) -> None:
    """Say that nothing was measured, where that is so."""
    if fit.engine.analytic:
        note(f"analytic, nothing of this was measured: {fit.engine.analytic}")


def find_validation(near: Path, fit_sha256: str) -> Validation | None:
    """The validation beside the file `near`, where it is about the fit with this digest; else why not is noted."""
    from toolkit.errors import InputError
    from toolkit.files.io import read_file
    from toolkit.files.validation import Validation

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
