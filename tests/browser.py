"""A headless Chromium for the tests of pages: what it logs, and what it asks the network for.

Skips where there is none: the pages are also tested without, as far as that goes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


# WCAG 2: the contrast of each text with the ground behind it, where it is under 4.5.
CONTRAST = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92
    : ((c + 0.055) / 1.055) ** 2.4).reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const color = channels(getComputedStyle(node).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
  };
  const found = [];
  for (const node of document.querySelectorAll(
    "h1,h2,h3,p,li,b,td,th,dt,dd,a,span,button,summary,figcaption")) {
    if (!node.textContent.trim() || !node.checkVisibility()) continue;
    const both = [light(channels(getComputedStyle(node).color)), light(ground(node))];
    const [a, b] = both.sort((x, y) => y - x);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < 4.5) found.push(`${node.tagName} ${node.textContent} ${contrast}`);
  }
  return found;
}"""


@dataclass
class Seen:
    """What a page did that a user does not see."""

    complaints: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@contextmanager
def chromium() -> Iterator:
    """A browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(browser, url: str, **options) -> Iterator:
    """A page that shows `url`, and what it has done."""
    context = browser.new_context(**options)
    page = context.new_page()
    seen = Seen()
    page.on(
        "console",
        lambda message: seen.complaints.append(message.text) if message.type != "log" else None,
    )
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on(
        "request",
        lambda request: seen.hosts.add(
            urlsplit(request.url).netloc or urlsplit(request.url).scheme
        ),
    )
    page.goto(url, timeout=240_000)  # a busy machine may stand still for minutes
    try:
        yield page, seen
    finally:
        context.close()
