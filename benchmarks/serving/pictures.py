"""Pictures for the docs: the report of a demo, and the status page of its plan under load.

    python -m benchmarks.serving.pictures [DEMO_FOLDER]

Takes about two minutes. Needs Chromium at /usr/bin/chromium, playwright, and the folder of `make
demo`.

Writes docs/pictures/report-light.webp and report-dark.webp (the top of the page, 1200 by 834), and
status-light.webp and status-dark.webp (the whole page, 1280 wide). The server gets 10 requests a
second for 100 s; one of its workers is killed half a minute before the pictures.
"""

from __future__ import annotations

import base64
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import sync_playwright

from benchmarks.common import ROOT
from benchmarks.common.command import LLMCTL, make_parser
from toolkit.cli.demo import Stages

PICTURES = ROOT / "docs" / "pictures"
REPORT = {"width": 1200, "height": 834}
STATUS = {"width": 1280, "height": 800}
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
RATE = 10
LOAD_S = 100  # requests per second, and for how long
KILL_AT_S = 60.0
LOOK_AT_S = 90.0
QUALITY = 90


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("demo-out"), help="the demo's folder"
    )
    folder = parser.parse_args().folder
    stages = Stages(sys.stdout)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=ARGUMENTS)
        page = Path(scratch) / "report.html"
        stages.llmctl("report", folder / "plan.json", "--out", page)
        take(browser, page.as_uri(), "report", REPORT, whole=False)
        with stages.server(folder / "plan.json") as url:
            words = f"bench --trace chat-small --warmup 0 --rate {RATE} --duration {LOAD_S}".split()
            words += ["--url", url, "--plan", str(folder / "plan.json")]
            load = subprocess.Popen([*LLMCTL, *words])
            time.sleep(KILL_AT_S)
            kill_a_worker()
            time.sleep(LOOK_AT_S - KILL_AT_S)
            take(browser, url, "status", STATUS, whole=True)
            load.wait()
        browser.close()


def kill_a_worker() -> None:
    """Kill one worker of the server that this process started."""
    below = psutil.Process().children(recursive=True)
    server = next(one for one in below if "serve" in one.cmdline())
    workers = [
        one for one in server.children() if "resource_tracker" not in " ".join(one.cmdline())
    ]
    workers[-1].send_signal(signal.SIGKILL)


def take(browser: Any, url: str, name: str, size: dict[str, int], *, whole: bool) -> None:
    """A picture for each colour scheme. WebP comes from the browser itself; playwright offers PNG
    and JPEG.
    """
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport=size, color_scheme=scheme)
        page = context.new_page()
        page.goto(url)
        page.wait_for_timeout(1500)  # a status page has its first answer by then
        if whole:
            height = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({"width": size["width"], "height": height})
        shot = context.new_cdp_session(page).send(
            "Page.captureScreenshot", {"format": "webp", "quality": QUALITY}
        )
        (PICTURES / f"{name}-{scheme}.webp").write_bytes(base64.b64decode(shot["data"]))
        context.close()


if __name__ == "__main__":
    main()
