"""What a command does beside the subject of a test, left out."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TUNE = "toolkit.tuning.tune"
SHIPPED = Path(__file__).parent.parent / "toolkit" / "traces" / "data"
LINES = {  # of a shipped trace that tests take
    "chat-small.jsonl": 600,  # 30 seconds, of 150
    "reason-day.csv": 4001,  # 2.3 hours, of 24; the first line has the names
}


def shorter_traces(folder: Path) -> Path:
    """Return a new folder in `folder` with the shipped traces; the long ones have `LINES`."""
    short = shutil.copytree(SHIPPED, folder / "data")
    for name, count in LINES.items():
        lines = (short / name).read_text().splitlines(keepends=True)
        (short / name).write_text("".join(lines[:count]))
    return short


@contextmanager
def without_capacity() -> Iterator[None]:
    """Tunings search no capacities, which takes two thirds of their time; also a decorator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{TUNE}._capacity", lambda inputs, evaluate, default, recommended: None)
        yield


@contextmanager
def verdict_only() -> Iterator[None]:
    """Tunings search and judge, and neither capacities nor sensitivities follow."""
    with without_capacity(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{TUNE}.sensitivity", lambda setup, runner, space, best, progress: [])
        yield
