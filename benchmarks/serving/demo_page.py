"""The demo's output for the docs: a picture of its tables, and a shortened transcript.

    make demo 2>&1 | tee demo.log; python -m benchmarks.serving.demo_page demo.log

Takes seconds. Needs the log of `make demo`, which takes about five minutes.

Writes docs/pictures/demo.svg, and the transcript in docs/results/demo.md. Dots there mark what is
left out; nothing else is edited. Write the page's tables by hand, from the same output.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser

DOCS = ROOT / "docs"
DOTS = "..."
WIDTH = 82
TRANSCRIPT = re.compile(r"(?<=^```text\n).*?(?=\n```$)", re.DOTALL | re.MULTILINE)
PROMISE = "^what tune promised"
END = r"^rc \d|^real\t"
# Parts of the output: from a line that matches the first pattern to before the next line that
# matches the second.
TEXT = [(PROMISE, END)]
PICTURE = [(r"== 4/\d", r"^\$ "), ("^warm-up: batches", "^during the replay"), (PROMISE, END)]


def part(lines: Sequence[str], start: str, end: str, after: int) -> tuple[list[str], int]:
    """The lines of a part that begins after line `after`, and where it ends. `SystemExit` where
    there is none.
    """
    begin = next((k for k in range(after, len(lines)) if re.search(start, lines[k])), None)
    if begin is None:
        raise SystemExit(
            f"not the output of a whole `make demo`: no line behind {after} matches {start!r}"
        )
    stop = next((k for k in range(begin + 1, len(lines)) if re.search(end, lines[k])), len(lines))
    return list(lines[begin:stop]), stop


def parts(lines: Sequence[str], wanted: Sequence[tuple[str, str]], dots: bool) -> Iterator[str]:
    """The lines of the parts in sequence, without two empty lines in a row."""
    position = 0
    last = ""
    for number, (start, end) in enumerate(wanted):
        found, position = part(lines, start, end, position)
        for line in ([DOTS] if dots and number else []) + found:
            if line.strip() or last.strip():
                yield line
            last = line


def picture(lines: Sequence[str]) -> str:
    """The tables of the tuned server and of the end, as the SVG of a terminal."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in parts(lines, PICTURE, dots=False):
        console.print(Text(line, style="bold" if line.startswith("==") else ""))
    return console.export_svg(title="make demo")


def transcript(lines: Sequence[str]) -> str:
    """The fit, the tuning and the comparison, shortened."""
    return "\n".join(parts(lines, TEXT, dots=True)).rstrip()


def read(path: Path) -> list[str]:
    """The lines of an output, without the folders of recipes."""
    text = re.sub(r"\S*/recipes/(\S+)\.yaml", r"\1", path.read_text(encoding="utf-8"))
    return [line.rstrip() for line in text.splitlines()]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("log", type=Path)
    given = parser.parse_args()
    lines = read(given.log)
    (DOCS / "pictures" / "demo.svg").write_text(picture(lines), encoding="utf-8")
    page = DOCS / "results" / "demo.md"
    before = page.read_text(encoding="utf-8")
    page.write_text(TRANSCRIPT.sub(lambda _: transcript(lines), before, count=1), encoding="utf-8")


if __name__ == "__main__":
    main()
