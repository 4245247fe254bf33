"""The demo in the docs: a picture of its last screen, its text, and pictures of the report.

    make demo 2>&1 | tee demo.log
    python -m benchmarks.serving.pictures demo.log [--report demo-out]

Takes ten seconds. Needs the log of `make demo`; with --report also the folder of the demo,
playwright, and Chromium at /usr/bin/chromium.

Writes docs/pictures/demo.svg and the text in docs/results/demo.md. With --report it writes
docs/pictures/report-light.webp and report-dark.webp (the top of the page, 1200 by 834). Write the
tables of docs/results/demo.md by hand, from the same output.
"""

from __future__ import annotations

import base64
import io
import re
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.common import ROOT
from benchmarks.common.command import llmctl, make_parser

DOCS = ROOT / "docs"
WIDTH = 82
SCREEN = re.compile(r"^what tune promised.*?(?=^rc \d|^real\t|\Z)", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"(?<=^```text\n).*?(?=\n```$)", re.DOTALL | re.MULTILINE)
REPORT = {"width": 1200, "height": 834}
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
QUALITY = 90


def last_screen(log: str) -> str:
    """What the demo prints in the end. `SystemExit` where the log is not of a whole demo."""
    found = SCREEN.search(log)
    if found is None:
        raise SystemExit("not the output of a whole `make demo`: it has no verdict")
    return "\n".join(line.rstrip() for line in found[0].rstrip().splitlines())


def picture(screen: str) -> str:
    """The screen as the SVG of a terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(screen))
    return console.export_svg(title="make demo")


def take_report(plan: Path) -> None:
    """Make the report of a plan, and take a picture of it for each colour scheme. WebP comes from
    the browser itself; playwright offers PNG and JPEG.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        file = Path(scratch) / "report.html"
        llmctl("report", str(plan), "--out", str(file))
        for scheme in ("light", "dark"):
            how: dict[str, Any] = {"viewport": REPORT, "color_scheme": scheme}
            context = browser.new_context(**how)
            page = context.new_page()
            page.goto(file.as_uri())
            page.wait_for_timeout(1500)
            asked = {"format": "webp", "quality": QUALITY}
            shot = context.new_cdp_session(page).send("Page.captureScreenshot", asked)
            target = DOCS / "pictures" / f"report-{scheme}.webp"
            target.write_bytes(base64.b64decode(shot["data"]))
            context.close()
        browser.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--report", type=Path, help="the demo's folder")
    given = parser.parse_args()
    screen = last_screen(given.log.read_text(encoding="utf-8"))
    (DOCS / "pictures" / "demo.svg").write_text(picture(screen), encoding="utf-8")
    page = DOCS / "results" / "demo.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(SHOWN.sub(lambda _: screen, text, count=1), encoding="utf-8")
    if given.report:
        take_report(given.report / "plan.json")


if __name__ == "__main__":
    main()
