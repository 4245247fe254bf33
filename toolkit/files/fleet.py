"""fleet.yaml: kinds of workers behind one scheduler, which serve one model on different hardware.

A fleet names recipes, their fits, and the number of workers of each. The first recipe also sets
what is served and how: name, targets, policy, tuning and server. All recipes have the same
`model`; otherwise requests could not move between workers, and clients would get one model or
another. This module reads the file, then merges and checks the loaded kinds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.io import fit_path
from toolkit.files.plan import Kind
from toolkit.files.recipe import MAX_WORKERS, MORE_WORKERS, WORKERS_LIMIT, Labels, Workers
from toolkit.files.shipped import AnyPath, recipe_path
from toolkit.files.strict import Strict, load_yaml, validate

SAME_FACTS = ("model_type", "parameters", "config_sha256", "vocab_size", "max_model_len")


class Member(Strict):
    """Workers of one kind."""

    recipe: str = Field(
        description="a file, relative to this file's folder, or the name of a shipped recipe"
    )
    fit: str = Field(description="the fit of that recipe, given in the same way")
    workers: Workers | None = Field(
        default=None, description="of this kind; None: as many as the recipe says"
    )
    nodes: Labels = Field(
        default={},
        description="labels of the cluster machines it runs on; none: Ray's own, or the recipe's "
        "name",
    )


class FleetFile(Strict):
    """fleet.yaml, whole."""

    schema_version: Literal[1] = 1
    fleet: Annotated[list[Member], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class KindSource:
    """One kind of a fleet file: the files of its recipe and fit, its workers and machines."""

    recipe: Path
    fit: Path
    workers: int | None
    nodes: Labels


def is_fleet(source: AnyPath) -> bool:
    """Whether `source` is a fleet rather than a recipe.

    False for a file that cannot be read: reading it as a recipe then gives the error.
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
    """The files that the fleet at `path` names.

    Raises `InputError` for a file that is not a fleet, and for a recipe that does not exist.
    """
    file = Path(path)
    content = validate(FleetFile, json.dumps(load_yaml(file)), file, "see docs/how-to/fleets.md")

    def resolved(name: str) -> AnyPath:
        """The file of that name in the fleet's folder, else the name as given."""
        local = file.parent / name
        return local if local.is_file() else name

    return [
        KindSource(
            recipe_path(resolved(member.recipe)),
            fit_path(resolved(member.fit)),
            member.workers,
            member.nodes,
        )
        for member in content.fleet
    ]


def inputs_of(path: AnyPath, sources: Sequence[KindSource]) -> dict[str, Path]:
    """Role to file, for an envelope's inputs.

    The roles are `recipe` and `fit` for the first kind, then `recipe.2`, `fit.2`, ...
    """
    found = {"fleet": Path(path)}
    for number, source in enumerate(sources, start=1):
        suffix = f".{number}" if number > 1 else ""
        found |= {f"recipe{suffix}": source.recipe, f"fit{suffix}": source.fit}
    return found


def merged(kinds: Sequence[Kind]) -> list[Kind]:
    """The same workers with equal kinds merged, so a fleet of one kind equals its recipe.

    Raises `InputError` where the kinds cannot be behind one scheduler.
    """
    workers = sum(kind.workers for kind in kinds)
    if workers > MAX_WORKERS:
        raise InputError(f"the fleet has {workers:,} workers; {WORKERS_LIMIT}", MORE_WORKERS)
    found: list[Kind] = []
    for kind in kinds:
        key = (kind.recipe, kind.fit, kind.nodes)
        for number, other in enumerate(found):
            if key == (other.recipe, other.fit, other.nodes):
                both = other.workers + kind.workers
                found[number] = other.model_copy(update={"workers": both})
                break
        else:
            found.append(kind)
    for number, kind in enumerate(found):
        if len(found) > 1:
            _check_server(found[0], kind)
        for other in found[:number]:
            _check_pair(other, kind)
    return found


def _check_server(first: Kind, kind: Kind) -> None:
    """Raise `InputError` for a kind that cannot be beside the first: all are workers of llmctl's
    scheduler, or all are servers with schedulers of their own and laws of their passes.
    """
    names, engines = (
        [each.recipe.name for each in (first, kind)],
        [each.recipe.engine.name for each in (first, kind)],
    )
    servers = [traits_of(engine).server for engine in engines]
    if servers[0] != servers[1]:
        server = servers.index(True)
        raise InputError(
            f"recipe '{names[server]}': engine '{engines[server]}' is a server with a scheduler of "
            f"its own, and '{names[1 - server]}' has workers of llmctl's scheduler",
            "make a fleet of the servers alone, or set engine.name to transformers, rebatch or "
            "deepspeed in all recipes",
        )
    if servers[1] and kind.fit.steps is None:
        raise InputError(
            f"recipe '{names[1]}': its fit has no law of forward passes, by which a fleet of "
            "servers is simulated",
            "profile and fit engine vllm",
        )


def _check_pair(first: Kind, second: Kind) -> None:
    """Raise `InputError` with the first key in which two kinds do not serve the same model."""
    names = first.recipe.name, second.recipe.name
    if names[0] == names[1]:
        raise InputError(
            f"two kinds of workers are called '{names[0]}'", "give their recipes different names"
        )
    specs = [
        {f"model.{key}": value for key, value in kind.recipe.model.model_dump().items()}
        for kind in (first, second)
    ]
    facts = [kind.fit.engine.model_dump() for kind in (first, second)]
    different = [(key, specs) for key in specs[0] if specs[0][key] != specs[1][key]]
    different += [
        (key, facts)
        for key in SAME_FACTS
        if facts[0][key] and facts[1][key] and facts[0][key] != facts[1][key]
    ]
    if different:
        key, values = different[0]
        raise InputError(
            f"a fleet serves one model: {key} is {values[0][key]!r} in '{names[0]}' and "
            f"{values[1][key]!r} in '{names[1]}'",
            "make the recipes' `model` sections equal; profile and fit what has changed",
        )
