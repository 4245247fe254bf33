"""README's "Your own model", line by line, live: its lines as they stand there, with a recipe of
the test's own.
"""

import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from samples import computes_nothing

from toolkit.traces.write import TraceLine, write_lines

pytestmark = pytest.mark.slow

README = Path(__file__).parent.parent / "README.md"
RECIPE = "own.yaml"
TRACE = "traffic.jsonl"
SHORT = {"bench": ["--warmup", "1"]}  # its 15 s of other requests would be most of this test's time


def lines_of_the_readme() -> list[list[str]]:
    """The commands of the section's first block, in words; the recipe that they name is the
    test's.
    """
    section = README.read_text(encoding="utf-8").split("\n## Your own model\n")[1]
    block = re.search(r"\n\n((?:    .*\n)+)", section)
    assert block
    lines = [shlex.split(line, comments=True) for line in block[1].splitlines() if line.strip()]
    named = next(words[2] for words in lines if words[1] == "profile")
    return [[RECIPE if word == named else word for word in words] for words in lines]


def command(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    assert words[0] == "llmctl"
    line = [sys.executable, "-m", "toolkit", *words[1:], *SHORT.get(words[1], [])]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)


@contextmanager
def server(words: list[str], folder: Path) -> Iterator[None]:
    """`llmctl serve` until the block ends; its one line says that it is ready."""
    line = [sys.executable, "-m", "toolkit", *words[1:]]
    with subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise AssertionError(process.communicate()[1])
        try:
            yield
        finally:
            process.terminate()
            process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recipe = computes_nothing("own", tune="windows: 2, held_out_windows: 2, draws: 2", port=port)
    (tmp_path / RECIPE).write_text(recipe, encoding="utf-8")
    write_lines([TraceLine(50 * k, 20 + k % 90, 3 + k % 40) for k in range(240)], tmp_path / TRACE)
    return tmp_path


def test_the_lines_of_your_own_model_run_to_the_end(folder: Path):
    lines = lines_of_the_readme()
    names = [words[1] for words in lines]
    serve = names.index("serve")
    assert {"profile", "fit", "tune", "render", "bench"} < set(names)
    for words in lines[:serve]:
        ran = command(words, folder)
        assert ran.returncode == 0, (words, ran.stderr)
    with server(lines[serve], folder):
        for words in lines[serve + 1 :]:
            ran = command([*words, "--out", "bench.json"] if words[1] == "bench" else words, folder)
            assert ran.returncode == 0, (words, ran.stderr)
        validate = [
            "llmctl",
            "validate",
            "plan.json",
            "--trace",
            TRACE,
            "--windows",
            "1",
            "--window",
            "1",
        ]
        ran = command([*validate, "--warmup", "1"], folder)
        assert ran.returncode == 0, ran.stderr
    report = json.loads((folder / "bench.json").read_text())
    assert (report["requests"], report["answered"], report["failures"], report["wrong_length"]) == (
        240,
        240,
        {},
        0,
    )
    assert report["lengths"] == "given"
    assert {row["metric"] for row in report["compared"]} >= {
        "throughput_rps",
        "goodput_rps",
        "ttft_mean_s",
    }
    assert {row["target"]: row["kept"] for row in report["targets"]} == {
        "ttft_p99_s": True,
        "e2e_p95_s": True,
    }
    validation = json.loads((folder / "validation.json").read_text())
    assert validation["windows"][0]["failed"] == 0
    assert "knows the lengths" in " ".join(validation["notes"])
