"""`llmctl report`: everything about a recipe on one offline HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import JsonOption
from toolkit.cli.basis import analytic_notes
from toolkit.cli.output import emit, note
from toolkit.files.io import keep_sources, write_text
from toolkit.units import size


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|PLAN.json",
            autocompletion=arguments.recipes,
            help="A recipe or a plan, with its files beside it.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write the page to this file.")] = Path("report.html"),
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about a recipe: the verdict first, then benches, tuning and fit.

    It is about the files in the plan's folder, or for a recipe in the current one; reports of
    `llmctl bench` are found by their contents. The page needs no network and runs no
    script. A missing file is named with the command that makes it; a file about another fit is not
    shown.
    """
    from toolkit.report.material import gather
    from toolkit.report.page import report

    material = gather(source)
    keep_sources(out, {file.sha256 for file in material.sources})
    page = report(material)
    write_text(out, page)
    for role, why in material.why.items():
        note(f"{role} is not shown: {why}")
    laws = material.fit.engine if material.fit else material.tuning
    note(*(analytic_notes(laws) if laws else []))
    shown = [file.role for file in material.sources]
    length = len(page.encode())
    text = f"wrote {out} ({size(length)}), from: {', '.join(shown)}"
    facts = {"out": str(out), "bytes": length, "shown": shown, "why": material.why}
    emit(as_json, facts, lambda: print(text))
    note(f"next: {material.next_step[1]}")
