"""Pictures for the docs: the report of a demo.

    python -m benchmarks.serving.pictures [DEMO_FOLDER]

Takes about ten seconds. Needs Chromium at /usr/bin/chromium, playwright, and the folder of `make
demo`.

Writes docs/pictures/report-light.webp and report-dark.webp (the top of the page, 1200 by 834).
"""

from __future__ import annotations

import base64
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from benchmarks.common import ROOT
from benchmarks.common.command import llmctl, make_parser

PICTURES = ROOT / "docs" / "pictures"
REPORT = {"width": 1200, "height": 834}
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
QUALITY = 90


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("demo-out"), help="the demo's folder"
    )
    folder = parser.parse_args().folder
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        page = Path(scratch) / "report.html"
        llmctl("report", str(folder / "plan.json"), "--out", str(page))
        take(browser, page.as_uri())
        browser.close()


def take(browser: Any, url: str) -> None:
    """A picture for each colour scheme. WebP comes from the browser itself; playwright offers PNG
    and JPEG.
    """
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=REPORT, color_scheme=scheme)
        page = context.new_page()
        page.goto(url)
        page.wait_for_timeout(1500)
        shot = context.new_cdp_session(page).send(
            "Page.captureScreenshot", {"format": "webp", "quality": QUALITY}
        )
        (PICTURES / f"report-{scheme}.webp").write_bytes(base64.b64decode(shot["data"]))
        context.close()


if __name__ == "__main__":
    main()
