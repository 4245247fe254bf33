"""The site: `make docs` builds it from these pages with Sphinx, MyST and Furo, offline.

The pages are plain Markdown, which a forge shows as well. Their order stands here, in `NAVIGATION`,
so that no page needs a directive. A warning (a broken link, a page without a place) ends the build.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from toolkit import __version__  # noqa: E402

project = "llmctl"
author = "The llmctl authors"
version = release = __version__
project_copyright = author

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns: list[str] = []
myst_heading_anchors = 4  # headings can be linked to, as on a forge
suppress_warnings = ["misc.highlighting_failure"]
nitpicky = True
smartquotes = False  # `--option` stays as it is typed

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"llmctl {version}"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

NAVIGATION = {
    "Tutorials": ["first-run", "your-model", "your-week", "reading-a-verdict"],
    "How-to": [
        "recipe-for-my-model",
        "install",
        "capacity",
        "serve",
        "deploy",
        "upgrade",
        "alerts",
        "expose",
        "replicas",
        "ray",
        "vllm",
        "live",
        "gpu",
        "measure",
        "record-a-trace",
        "simulate-in-python",
        "add-a-policy",
        "add-an-engine",
        "add-a-target",
    ],
    "Reference": [
        "commands",
        "recipe",
        "recipe-keys",
        "policies",
        "engines",
        "models",
        "vllm-versions",
        "traces",
        "api",
        "metrics",
        "simulation",
        "python",
        "errors",
        "exit-codes",
        "environment",
        "glossary",
    ],
    "Explanation": [
        "how-it-works",
        "structures",
        "policies",
        "profiling",
        "tuning",
        "engines",
        "vllm",
        "reliability",
    ],
    "Results": ["index"],
}
OUTSIDE = re.compile(r"\[([^]]+)\]\((?:\.\./)+(?!pictures/)([A-Za-z.][^)#]*)(?:#[^)]*)?\)")


def toctree(pages: list[str], caption: str = "") -> str:
    """A hidden table of contents: the page's place in the navigation."""
    option = f":caption: {caption}\n" if caption else ""
    return f"\n\n```{{toctree}}\n:hidden:\n{option}\n" + "\n".join(pages) + "\n```\n"


def add_navigation(_: Sphinx, name: str, content: list[str]) -> None:
    """Append the tables of contents of an index page; unlink files of the repository that are no
    pages.
    """
    if name == "index":
        for caption, pages in NAVIGATION.items():
            folder = caption.lower()
            content[0] += toctree([f"{folder}/{page}" for page in pages], caption)
        content[0] += toctree(["decisions"], "Decisions")
    if name == "results/index":
        pages = sorted(page.stem for page in (HERE / "results").glob("*.md"))
        content[0] += toctree([page for page in pages if page != "index"])
    here = (HERE / name).parent

    def unlinked(found: re.Match[str]) -> str:
        steps = found[0].partition("](")[2]
        target = (here / steps.rstrip(")").partition("#")[0]).resolve()
        return found[0] if target.is_relative_to(HERE) else f"{found[1]} (`{found[2]}`)"

    content[0] = OUTSIDE.sub(unlinked, content[0])


def copy_pictures(app: Sphinx, problem: Exception | None) -> None:
    """Pictures that follow the colour scheme are HTML. Sphinx does not copy such files."""
    if problem is None:
        shutil.copytree(HERE / "pictures", Path(app.outdir) / "pictures", dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", copy_pictures)
