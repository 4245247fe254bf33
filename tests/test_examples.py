"""The scripts for researchers: they run, they are short, and the page shows them as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "how-to" / "simulate-in-python.md").read_text(encoding="utf-8")
PRINTS = {
    "two_policies.py": ["past-future", "fcfs"],
    "own_policy.py": ["conservative", "past-future", "half-promised 0.5", "half-promised 0.1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_runs_as_the_page_shows_it(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(" goodput ")[0].strip() for line in lines] == PRINTS[script.name]
    if script.name == "two_policies.py":
        assert (tmp_path / "ttft.svg").read_text(encoding="utf-8").count("<path") > 2
    else:  # what the page says that it prints
        assert all(f"    {line.partition(',')[0]}, ..." in PAGE for line in lines)
