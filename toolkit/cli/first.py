"""`llmctl` without a command: what lies in this folder, and what to do next. It fits a screen of 80
columns and 24 lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import toolkit
from toolkit.cli.output import ABOUT, paragraph, table
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.profile import Profile
from toolkit.files.strict import Envelope
from toolkit.files.tuning import Tuning
from toolkit.report.material import Material, gather
from toolkit.report.steps import OWN_TRAFFIC, recipe_of

BEGINNINGS = """\
No recipe lies in this folder. Begin with one of these:

  llmctl recipes                                     the recipes that ship
  llmctl tune llama-3.1-8b-h200                      tune one, without a GPU
  llmctl recipe new MODEL --gpu GPU > recipe.yaml    a recipe for your model
  llmctl recipe from-command "vllm serve ..." --gpu GPU > recipe.yaml
                                                     of a server that runs
  llmctl trace inspect LOG                           what your traffic is like"""
MOST_FILES = 6  # that are shown
BY_ROLE: dict[str, type[Envelope]] = {
    "plan": Plan, "tuning": Tuning, "fit": Fit, "profile": Profile,
}  # fmt: skip


def show_first() -> None:
    """Print what to do next, from the files of the current folder."""
    print(f"llmctl {toolkit.__version__}\n{ABOUT}")
    files = _files_here()
    if files is None:
        print(f"\n{BEGINNINGS}")
    else:
        shown = files.sources[:MOST_FILES]
        title = f"What is here about {files.recipe.name}:"
        columns = ["file", "what", "written"]
        table(columns, [[one.name, one.role, one.date] for one in shown], title)
        for why in list(files.why.values())[:1]:
            paragraph(f"not used: {why}")
        what, command = files.next_step
        print(f"{what}: {command}")
        if what == "Tune it":
            print(OWN_TRAFFIC)
    print("\nAll commands: llmctl --help")


def _files_here() -> Material | None:
    """Return the files of the first recipe here that can be read; None where there is none."""
    for recipe in _recipes_here():
        with contextlib.suppress(InputError):
            return gather(str(recipe))
    with contextlib.suppress(InputError):
        return gather("plan.json")
    return None


def _recipes_here() -> Iterator[Path]:
    """Yield the recipes that other files here were made from, then the others, the newest first."""
    for role, model in BY_ROLE.items():
        with contextlib.suppress(InputError):
            yield recipe_of(read_file(model, f"{role}.json"), Path())
    yield from sorted(Path().glob("*.yaml"), key=lambda path: -path.stat().st_mtime)
