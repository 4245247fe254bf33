"""`llmctl recipes`: the recipes that ship, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import aligned, emit


@dataclass(frozen=True, slots=True)
class RecipeLine:
    """A recipe. `fit` is what its shipped fit rests on: measured, analytic, or none ships."""

    name: str
    description: str
    model: str
    hardware: str
    engine: str
    policy: str
    fit: str

    @property
    def subject(self) -> str:
        """What it serves, and on what."""
        return f"{self.model} on {self.hardware}"


def command(as_json: JsonOption = False) -> None:
    """List the recipes that ship: model, hardware, engine, policy, and what the fit that ships with
    each rests on.

    An analytic fit was computed from data sheets; a measured one comes from a profile of that
    hardware.
    """
    from toolkit.files.shipped import shipped_names

    lines = sorted(
        (_line(name) for name in shipped_names()), key=lambda line: (line.subject, line.name)
    )
    emit(as_json, {"recipes": lines}, lambda: _show(lines))


def _line(name: str) -> RecipeLine:
    from toolkit.files.fit import Fit
    from toolkit.files.io import load_recipe, read_file, shipped_fit

    recipe, path = load_recipe(name), shipped_fit(name)
    basis = (
        "none"
        if path is None
        else "analytic"
        if read_file(Fit, path).engine.analytic
        else "measured"
    )
    source = recipe.model.source
    model = (
        f"random {recipe.model.config['model_type']}"
        if source == "random"
        else source.rpartition("/")[2]
    )
    policy = recipe.policy.name
    return RecipeLine(
        name, recipe.description, model, recipe.hardware.name, recipe.engine.name, policy, basis
    )


def _show(lines: list[RecipeLine]) -> None:
    heads = ("recipe", "engine", "policy", "fit")
    cells = [(f"  {line.name}", line.engine, line.policy, line.fit) for line in lines]
    show = aligned([heads, *cells])
    show(heads)
    for subject, group in groupby(zip(lines, cells, strict=True), key=lambda pair: pair[0].subject):
        print(f"\n{subject}")
        for _, row in group:
            show(row)
