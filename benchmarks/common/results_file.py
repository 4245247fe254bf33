"""Sections of docs/results/index.md that a benchmark writes, between two markers."""

from __future__ import annotations

from pathlib import Path


def put_section(path: Path, name: str, title: str, text: str) -> None:
    """Replace the text between the markers of `name`, or append it under `title` with markers."""
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    old = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    if begin in old:
        before, _, rest = old.partition(begin)
        new = before + begin + text + end + rest.partition(end)[2]
    else:
        new = f"{old.rstrip()}\n\n## {title}\n\n{begin}{text}{end}"
    path.write_text(new, encoding="utf-8")
