"""What a report is made from: the files of a recipe that lie in one folder, and belong together.

A file that is about another fit, or cannot be read, is not shown; the page says why, and which command makes it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from toolkit.errors import InputError
from toolkit.files.envelope import Envelope
from toolkit.files.fit import Fit
from toolkit.files.io import digest, load_recipe, read_file, recipe_path
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe
from toolkit.files.recipes import is_recipe
from toolkit.files.tuning import Tuning
from toolkit.files.validation import Validation

EnvelopeT = TypeVar("EnvelopeT", bound=Envelope)


@dataclass(frozen=True, slots=True)
class Source:
    """A file that the page shows."""

    role: str
    name: str
    sha256: str


@dataclass(slots=True)
class Material:
    """All there is. `why` says of a role whose file is there why it is not used."""

    recipe: Recipe
    profile: Profile | None = None
    fit: Fit | None = None
    tuning: Tuning | None = None
    plan: Plan | None = None
    validation: Validation | None = None
    sources: list[Source] = field(default_factory=list)
    why: dict[str, str] = field(default_factory=dict)


def gather(source: str, folder: Path | None = None) -> Material:
    """The material about `source`, a plan.json or a recipe; its files are in the plan's folder, in `folder`, or here.

    `InputError` where `source` itself cannot be read.
    """
    if not is_recipe(source):
        path = Path(source)
        plan = read_file(Plan, path)
        found = Material(plan.recipe, fit=plan.fit, plan=plan, sources=[_source("plan", path)])
        fit_sha256 = _sha256_of(plan, "fit")
        folder = folder or path.parent
    else:
        recipe = recipe_path(source)
        found = Material(load_recipe(recipe), sources=[_source("recipe", recipe)])
        folder = folder or Path()
        found.fit = _take(found, Fit, "fit", folder, {}, {"recipe": recipe})
        fit_sha256 = found.sources[-1].sha256
        if found.fit:
            found.plan = _take(found, Plan, "plan", folder, {"fit": fit_sha256})
    if found.fit is None:
        return found
    found.profile = _take(found, Profile, "profile", folder, {}, itself=_sha256_of(found.fit, "profile"))
    found.tuning = _take(found, Tuning, "tuning", folder, {"fit": fit_sha256})
    found.validation = _take(found, Validation, "validation", folder, {"fit": fit_sha256})
    return found


def _take(
    found: Material,
    kind: type[EnvelopeT],
    role: str,
    folder: Path,
    made_from: Mapping[str, str],
    inputs: Mapping[str, Path] | None = None,
    itself: str | None = None,
) -> EnvelopeT | None:
    """The file of a role, where there is one that belongs to the rest: made from files of these digests."""
    path = folder / f"{role}.json"
    if not path.is_file():
        return None
    source = _source(role, path)
    try:
        content = read_file(kind, path, inputs=inputs)
    except InputError as error:
        found.why[role] = f"{error.message}; {error.hint}" if error.hint else error.message
        return None
    other = [name for name, sha256 in made_from.items() if _sha256_of(content, name) != sha256]
    if other or itself not in (None, source.sha256):
        found.why[role] = f"{path.name} is about another {other[0] if other else role}, not the one that is shown here"
        return None
    found.sources.append(source)
    return content


def _sha256_of(content: Envelope, role: str) -> str:
    """Of the input that `content` was made from; '' where it does not say."""
    return content.inputs[role].sha256 if role in content.inputs else ""


def _source(role: str, path: Path) -> Source:
    found = digest(path)
    return Source(role, found.name, found.sha256)
