"""fleet.yaml: kinds of workers behind one scheduler, which serve one model on different hardware.

It names recipes and their fits, and how many workers of each there are. The first recipe also says
what is served and how: its name, targets, policy, tuning and server. All have the same `model`, or
requests could not move between workers and clients would not know what they get.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.io import fit_path
from toolkit.files.plan import Kind
from toolkit.files.recipe import MAX_WORKERS, MORE_WORKERS, WORKERS_LIMIT, Labels, Recipe, Workers
from toolkit.files.shipped import recipe_path
from toolkit.files.strict import Strict, load_yaml, validate

AnyPath = str | os.PathLike[str]
SAME_FACTS = ("model_type", "parameters", "config_sha256", "vocab_size", "max_model_len")


class Member(Strict):
    """Workers of one kind."""

    recipe: str = Field(
        description="a file, beside this one if it has no path, or the name of a shipped recipe"
    )
    fit: str = Field(description="likewise: the fit of that recipe")
    workers: Workers | None = Field(
        default=None, description="of this kind; None: as the recipe has it"
    )
    nodes: Labels = Field(
        default={},
        description="labels of the machines that it runs on in a cluster; none: Ray's own, or the recipe's name",
    )


class FleetFile(Strict):
    """fleet.yaml, whole."""

    schema_version: Literal[1] = 1
    fleet: Annotated[list[Member], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class KindSource:
    """Where a kind comes from: the files of its recipe and its fit; how many workers it has, and on
    which machines.
    """

    recipe: Path
    fit: Path
    workers: int | None
    nodes: Labels


def is_fleet(source: AnyPath) -> bool:
    """Whether a command that takes a recipe was given a fleet. What cannot be read is left for
    whoever reads it.
    """
    path = Path(source)
    if not path.is_file() or path.suffix not in (".yaml", ".yml"):
        return False
    try:
        data = load_yaml(path)
    except InputError:
        return False
    return isinstance(data, dict) and "fleet" in data


def fleet_sources(path: AnyPath) -> list[KindSource]:
    """The files that the fleet at `path` names. `InputError` for what is no fleet, and a recipe
    that is not there.
    """
    file = Path(path)
    content = validate(FleetFile, json.dumps(load_yaml(file)), file, "see docs/fleets.md")
    return [
        KindSource(
            recipe_path(_beside(file, one.recipe)),
            fit_path(_beside(file, one.fit)),
            one.workers,
            one.nodes,
        )
        for one in content.fleet
    ]


def inputs_of(path: AnyPath, sources: Sequence[KindSource]) -> dict[str, Path]:
    """Role to file, for an envelope's inputs: `recipe` and `fit` of the first kind, then
    `recipe.2`, `fit.2`, ...
    """
    found = {"fleet": Path(path)}
    for number, source in enumerate(sources, start=1):
        mark = f".{number}" if number > 1 else ""
        found |= {f"recipe{mark}": source.recipe, f"fit{mark}": source.fit}
    return found


def merged(kinds: Sequence[Kind]) -> list[Kind]:
    """The same workers, equal kinds as one: so a fleet of one kind is what its recipe is.

    `InputError` where they cannot be behind one scheduler.
    """
    workers = sum(kind.workers for kind in kinds)
    if workers > MAX_WORKERS:
        raise InputError(f"the fleet has {workers:,} workers; {WORKERS_LIMIT}", MORE_WORKERS)
    found: list[Kind] = []
    for kind in kinds:
        like = next((k for k, other in enumerate(found) if _same(kind, other)), None)
        if like is None:
            found.append(kind)
        else:
            both = found[like].workers + kind.workers
            found[like] = found[like].model_copy(update={"workers": both})
    for number, kind in enumerate(found):
        _check_engine(kind, found)
        for other in found[:number]:
            _check_pair(other, kind)
    return found


def _same(kind: Kind, other: Kind) -> bool:
    """But for the number of workers."""
    return (kind.recipe, kind.fit, kind.nodes) == (other.recipe, other.fit, other.nodes)


def _beside(file: Path, name: str) -> AnyPath:
    """A file in the fleet's folder, where there is one of that name."""
    path = file.parent / name
    return path if path.is_file() else name


def _check_engine(kind: Kind, kinds: Sequence[Kind]) -> None:
    if len(kinds) > 1 and traits_of(kind.recipe.engine.name).server:
        raise InputError(
            f"recipe '{kind.recipe.name}': engine '{kind.recipe.engine.name}' is a server with a scheduler of its own; "
            "it cannot be one of a fleet's kinds of workers",
            "set engine.name to transformers, rebatch or deepspeed, or put a router in front of the servers",
        )


def _check_pair(one: Kind, other: Kind) -> None:
    """`InputError` naming the first key in which they do not serve the same."""
    if one.recipe.name == other.recipe.name:
        raise InputError(
            f"two kinds of workers are called '{one.recipe.name}'",
            "give their recipes names of their own",
        )
    before, after = _of_model(one.recipe), _of_model(other.recipe)
    key = next((key for key in before if before[key] != after[key]), None)
    if key is None:
        facts = one.fit.engine.model_dump(), other.fit.engine.model_dump()
        key = next(
            (
                key
                for key in SAME_FACTS
                if facts[0][key] and facts[1][key] and facts[0][key] != facts[1][key]
            ),
            None,
        )
        before, after = facts
    if key is not None:
        raise InputError(
            f"a fleet serves one model: {key} is {before[key]!r} in '{one.recipe.name}' and {after[key]!r} in "
            f"'{other.recipe.name}'",
            "make the recipes' `model` sections equal; profile and fit what has changed",
        )


def _of_model(recipe: Recipe) -> dict[str, object]:
    """Its model section, as `model.key`."""
    return {f"model.{key}": value for key, value in recipe.model.model_dump().items()}
