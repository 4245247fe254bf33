"""What a benchmark leaves behind: tables in Markdown, and raw data as JSON."""

from __future__ import annotations

import atexit
import io
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

Cell = str | float | None


class Table(TypedDict):
    """A Markdown table; cells that are numbers are numbers."""

    columns: list[str]
    rows: list[list[Cell]]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]], words: int = 1) -> str:
    """A Markdown table, of so many columns of words and then of numbers."""
    rules = ["---"] * words + ["---:"] * (len(columns) - words)
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (columns, rules, *rows))


def tables_of(text: str) -> list[Table]:
    """The Markdown tables in `text`, in order."""
    found: list[Table] = []
    before = ""
    for line in text.splitlines():
        if not line.startswith("|"):
            before = ""
            continue
        if re.fullmatch(r"\|[ :|-]+\|", line) and before:
            columns = [
                cell.strip() for cell in before.removeprefix("|").removesuffix("|").split("|")
            ]
            found.append({"columns": columns, "rows": []})
        elif found and before:
            found[-1]["rows"].append(_cells(line))
        before = line
    return found


def _cells(line: str) -> list[Cell]:
    return [_cell(cell.strip()) for cell in line.removeprefix("|").removesuffix("|").split("|")]


def _cell(text: str) -> Cell:
    with suppress(ValueError):
        return float(text.replace(",", "")) if "." in text else int(text.replace(",", ""))
    return text or None


class Recorder(io.TextIOBase):
    """A stdout that also keeps what was printed, and at the end of a run that did not fail writes
    it to `path` with the command, the machine and the date.
    """

    def __init__(self, path: Path, module: str, words: Sequence[str]) -> None:
        self._path = path
        self._stdout = sys.stdout
        self._text = io.StringIO()
        self._command = " ".join(["python -m", module, *map(_public, words)])
        self._started_s = time.monotonic()
        self.kept: dict[str, Any] = {}
        path.touch()  # an error now, not after the run
        sys.stdout = self
        atexit.register(self.finish)

    def write(self, text: str) -> int:
        self._text.write(text)
        return self._stdout.write(text)

    def flush(self) -> None:
        self._stdout.flush()

    def finish(self) -> None:
        """Give stdout back, and save the file unless an exception ended the run."""
        sys.stdout = self._stdout
        if not hasattr(sys, "last_value"):  # no exception ended the run
            self.save()

    def save(self) -> None:
        """Write the file."""
        from toolkit.files.io import environment  # not where a benchmark runs in another venv

        text = self._text.getvalue()
        lines = [
            " ".join(_public(word) if Path(word).exists() else word for word in line.split(" "))
            for line in text.splitlines()
            if line.strip() and line[0] != "|"
        ]
        found = {
            "command": self._command,
            "date": datetime.now(UTC).date().isoformat(),
            "took_s": round(time.monotonic() - self._started_s, 1),
            "machine": environment().model_dump(mode="json", exclude_none=True),
            "tables": tables_of(text),
            "lines": lines,
        } | self.kept
        written = json.dumps(found, indent=1, ensure_ascii=False)
        flat = re.sub(
            r"\[\s+([^][{}]*?)\s+\]", lambda row: f"[{' '.join(row[1].split())}]", written
        )
        self._path.write_text(flat + "\n", encoding="utf-8")


def _public(word: str) -> str:
    """An argument without the folders of this machine."""
    return Path(word).name if word.startswith("/") else word


def keep(name: str, data: object) -> None:
    """Add what no table shows, such as samples, to the file of `--json`, if there is one."""
    if isinstance(sys.stdout, Recorder):
        sys.stdout.kept[name] = data
