"""`llmctl report`: everything about a recipe on one offline HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli import arguments
from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import emit, note
from toolkit.errors import InputError
from toolkit.files.io import check_writable, keep_sources, write_text
from toolkit.units import size


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|PLAN.json",
            autocompletion=arguments.recipes_and_plans,
            help="A recipe or a plan, with its files beside it.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Write the page to this file.")] = Path("report.html"),
    folder: Annotated[
        Path | None,
        typer.Option(
            help="The folder of profile.json and the other files; default: the plan's,"
            " or the current."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about a recipe: the verdict first, then benches, tuning, fit
    and plan.

    Files of `llmctl bench --out` are found by their contents. The page needs no network and runs no
    script. A missing file is named with the command that makes it; a file about another fit is not
    shown.
    """
    from toolkit.report.material import gather
    from toolkit.report.page import report

    if folder is not None and not folder.is_dir():
        raise InputError(
            f"--folder {folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}",
            "name the folder of profile.json, fit.json and the other files",
        )
    check_writable(out)
    material = gather(source, folder)
    keep_sources(out, {file.sha256 for file in material.sources})
    page = report(material)
    write_text(out, page)
    for role, why in material.why.items():
        note(f"{role} is not shown: {why}")
    shown = [file.role for file in material.sources]
    length = len(page.encode())
    text = f"wrote {out} ({size(length)}), from: {', '.join(shown)}"
    facts = {"out": str(out), "bytes": length, "shown": shown, "why": material.why}
    emit(as_json, facts, lambda: print(text))
