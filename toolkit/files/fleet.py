"""fleet.yaml: kinds of workers behind one scheduler, which serve one model on different hardware.

A fleet names recipes, their fits, and the number of workers of each. The first recipe also sets
what is served and how: name, targets, policy, tuning and server. All recipes have the same `model`,
so that requests can move between workers. This module reads the file, then merges and checks the
loaded kinds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.io import fit_path
from toolkit.files.plan import Kind
from toolkit.files.recipe import MAX_WORKERS, MORE_WORKERS, WORKERS_LIMIT, Labels, Recipe, Workers
from toolkit.files.shipped import AnyPath, recipe_path
from toolkit.files.strict import Strict, load_yaml, optional, validate
from toolkit.files.tuning import Tuning

SAME_FACTS = ("model_type", "parameters", "config_sha256", "vocab_size", "max_model_len")


class Member(Strict):
    """Workers of one kind."""

    recipe: str = Field(
        description="a file, relative to this file's folder, or the name of a shipped recipe"
    )
    fit: str = Field(description="the fit of that recipe, given in the same way")
    workers: Workers | None = optional("of this kind; None: as many as the recipe says")
    min_workers: Annotated[int, Field(ge=0)] | None = optional(
        "the fewest that `tune --workers auto` tries; None: 1 of the first kind, 0 of the others"
    )
    max_workers: Workers | None = optional(
        "the most that it tries; None: 256, of all kinds together"
    )
    nodes: Labels = Field(
        {}, description="its machines' labels; none: Ray's own, or the recipe's name"
    )
    usd_per_hour: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = optional(
        "price of one worker's devices for an hour; None: hardware.usd_per_hour of the recipe"
    )

    @model_validator(mode="after")
    def _the_fewest_are_not_more_than_the_most(self) -> Member:
        least = self.min_workers
        most = self.max_workers
        if least is not None and most is not None and least > most:
            raise ValueError(f"min_workers: {least}: max_workers is {most}")
        return self


class FleetFile(Strict):
    """fleet.yaml, whole."""

    schema_version: Literal[1] = 1
    fleet: Annotated[list[Member], Field(min_length=1)]

    @model_validator(mode="after")
    def _the_first_kind_stays(self) -> FleetFile:
        if self.fleet[0].min_workers == 0:
            raise ValueError(
                "fleet[0].min_workers: 0: the first kind's recipe says what is served, so there is "
                "at least 1; put the kind that may be left out behind another"
            )
        return self


@dataclass(frozen=True, slots=True)
class CountRange:
    """How many workers of a kind a search may propose."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class KindSource:
    """One kind of a fleet file, and the files of its recipe and its fit."""

    member: Member
    recipe: Path
    fit: Path

    def priced(self, recipe: Recipe) -> Recipe:
        """The recipe with this kind's price, if it has one."""
        price = self.member.usd_per_hour
        if price is None:
            return recipe
        hardware = recipe.hardware.model_copy(update={"usd_per_hour": price})
        return recipe.model_copy(update={"hardware": hardware})


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
    content = validate(
        FleetFile, json.dumps(load_yaml(file)), file, "see llmctl docs how-to/fleets"
    )

    def resolved(name: str) -> AnyPath:
        """The file of that name in the fleet's folder, else the name as given."""
        local = file.parent / name
        return local if local.is_file() else name

    return [
        KindSource(member, recipe_path(resolved(member.recipe)), fit_path(resolved(member.fit)))
        for member in content.fleet
    ]


def inputs_of(path: AnyPath, sources: Sequence[KindSource]) -> dict[str, Path]:
    """Role to file, for an envelope's inputs.

    The roles are `recipe` and `fit` for the first kind, then `recipe.2`, `fit.2`, ...
    """
    inputs = {"fleet": Path(path)}
    for number, source in enumerate(sources, start=1):
        suffix = f".{number}" if number > 1 else ""
        inputs |= {f"recipe{suffix}": source.recipe, f"fit{suffix}": source.fit}
    return inputs


def ranges_of(kinds: Sequence[Kind], sources: Sequence[tuple[str, KindSource]]) -> list[CountRange]:
    """The range of each of the merged `kinds`; those of members that were merged are summed.

    `sources` are the members, each with its recipe's name.
    """
    ranges = []
    for number, kind in enumerate(kinds):
        members = [source.member for name, source in sources if name == kind.recipe.name]
        least = sum(member.min_workers or 0 for member in members)
        most = [member.max_workers for member in members]
        limit = MAX_WORKERS if None in most else sum(count or 0 for count in most)
        ranges.append(CountRange(max(least, int(number == 0)), limit))
    return ranges


def sized(kinds: Sequence[Kind], tuning: Tuning | None) -> list[Kind]:
    """The kinds with the tuning's counts, without kinds that it leaves out; unchanged where the
    tuning searched for no counts. `InputError` for a tuning of other kinds.
    """
    counts = tuning.sizing.kinds if tuning and tuning.sizing else []
    if not counts:
        return list(kinds)
    names = [kind.recipe.name for kind in kinds]
    tuned = [count.recipe for count in counts]
    if names != tuned:
        raise InputError(
            f"the tuning is not of this fleet: it has {', '.join(tuned)}, the fleet has "
            f"{', '.join(names)}",
            "tune it again",
        )
    return [
        kind.model_copy(update={"workers": count.workers})
        for kind, count in zip(kinds, counts, strict=True)
        if count.workers
    ]


def merged(kinds: Sequence[Kind]) -> list[Kind]:
    """The same workers with equal kinds merged, so a fleet of one kind equals its recipe.

    Raises `InputError` where the kinds cannot be behind one scheduler.
    """
    workers = sum(kind.workers for kind in kinds)
    if workers > MAX_WORKERS:
        raise InputError(f"the fleet has {workers:,} workers; {WORKERS_LIMIT}", MORE_WORKERS)
    different: list[Kind] = []
    for kind in kinds:
        for number, other in enumerate(different):
            if kind == other.model_copy(update={"workers": kind.workers}):
                both = other.workers + kind.workers
                different[number] = other.model_copy(update={"workers": both})
                break
        else:
            different.append(kind)
    for number, kind in enumerate(different):
        if len(different) > 1:
            _check_server(different[0], kind)
        for other in different[:number]:
            _check_pair(other, kind)
    return different


def _check_server(first: Kind, kind: Kind) -> None:
    """Raise `InputError` for a kind that cannot be beside the first: all are workers of llmctl's
    scheduler, or all are servers with schedulers of their own and laws of their passes.
    """
    names = [one.recipe.name for one in (first, kind)]
    engines = [one.recipe.engine.name for one in (first, kind)]
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
    specs = [kind.recipe.model.model_dump() for kind in (first, second)]
    facts = [kind.fit.engine.model_dump() for kind in (first, second)]
    pairs = [(f"model.{key}", specs[0][key], specs[1][key]) for key in specs[0]]
    # A fact that an engine does not report is not compared.
    pairs += [(key, facts[0][key], facts[1][key]) for key in SAME_FACTS if facts[0][key]]
    for key, one, other in pairs:
        if one != other and (other or key not in SAME_FACTS):
            raise InputError(
                f"a fleet serves one model: {key} is {one!r} in '{names[0]}' and "
                f"{other!r} in '{names[1]}'",
                "make the recipes' `model` sections equal; profile and fit what has changed",
            )
