"""Pictures of the docs: the last screen of the demo, the report, and the status page.

    make demo 2>&1 | tee demo.log
    python -m benchmarks.serving.pictures demo.log
    python -m benchmarks.serving.pictures --report report.html --status http://127.0.0.1:8000/

Takes ten seconds. Pages need playwright, and Chromium at /usr/bin/chromium.

Of a log it writes docs/pictures/demo.svg and the text in docs/results/demo.md; write the tables of
that page by hand, from the same output. Of a page it writes the top, 1280 and 400 pixels wide,
light and dark: docs/pictures/report-light.webp, report-narrow-light.webp and so on.
"""

from __future__ import annotations

import base64
import io
import re
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser

DOCS = ROOT / "docs"
WIDTH = 82
SCREEN = re.compile(r"^what tune promised.*?(?=^rc \d|^real\t|\Z)", re.DOTALL | re.MULTILINE)
SHOWN = re.compile(r"(?<=^```text\n).*?(?=\n```$)", re.DOTALL | re.MULTILINE)
SIZES = {"": {"width": 1280, "height": 800}, "-narrow": {"width": 400, "height": 900}}
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
QUALITY = 82


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


def take(name: str, url: str) -> None:
    """Take pictures of a page, wide and narrow, light and dark. WebP comes from the browser itself;
    playwright offers PNG and JPEG.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        for scheme, (end, size) in product(("light", "dark"), SIZES.items()):
            how: dict[str, Any] = {"viewport": size, "color_scheme": scheme}
            context = browser.new_context(**how)
            page = context.new_page()
            page.goto(url)
            page.wait_for_timeout(2500)
            asked = {"format": "webp", "quality": QUALITY}
            shot = context.new_cdp_session(page).send("Page.captureScreenshot", asked)
            target = DOCS / "pictures" / f"{name}{end}-{scheme}.webp"
            target.write_bytes(base64.b64decode(shot["data"]))
            context.close()
        browser.close()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("log", type=Path, nargs="?")
    parser.add_argument("--report", type=Path, help="a report of `llmctl report`")
    parser.add_argument("--status", help="the URL of a server with a status page")
    given = parser.parse_args()
    if given.report:
        take("report", given.report.absolute().as_uri())
    if given.status:
        take("status", given.status)
    if not given.log:
        return
    screen = last_screen(given.log.read_text(encoding="utf-8"))
    (DOCS / "pictures" / "demo.svg").write_text(picture(screen), encoding="utf-8")
    page = DOCS / "results" / "demo.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(SHOWN.sub(lambda _: screen, text, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
