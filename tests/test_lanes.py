"""The suite's lanes: what lacks the mark is found, and a parallel run gives a worker whole
files.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import lanes
import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SETTINGS = (
    "[pytest]\nmarkers = slow\naddopts = -p lanes -p no:cacheprovider -q -rA --strict-markers\n"
)
LANES = """
import asyncio, multiprocessing, os, signal, subprocess, sys
import lanes, pytest, uvloop

lanes.LONG_S = -1.0  # everything takes long

def test_starts_nothing(): pass

def test_starts_a_program(): subprocess.run([sys.executable, "-c", ""])

def test_forks():
    child = os.fork()
    if not child: os._exit(0)
    os.waitpid(child, 0)

def test_starts_another_python():
    other = multiprocessing.get_context("spawn").Process(target=len, args=("",))
    other.start()
    other.join()

def test_starts_one_on_uvloop():
    async def start(): await (await asyncio.create_subprocess_exec(sys.executable, "-c", "")).wait()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner: runner.run(start())

def test_leaves_a_handler(): signal.signal(signal.SIGINT, signal.SIG_IGN)

@pytest.mark.slow
def test_is_marked(): subprocess.run([sys.executable, "-c", ""])
"""
ONE_OF_MANY = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(3))
def test_writes_where_it_runs(number):
    pathlib.Path(__file__).with_suffix(f".{number}").write_text(os.environ["PYTEST_XDIST_WORKER"])
"""


def run(folder: Path, *options: str) -> str:
    """What pytest says of the tests in `folder`."""
    (folder / "pytest.ini").write_text(SETTINGS)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def test_a_test_that_starts_a_process_needs_the_mark(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(LANES)
    said = run(tmp_path)
    assert re.findall(r"^ERROR test_some.py::(\w+)", said, re.M) == [
        "test_starts_a_program",
        "test_forks",
        "test_starts_another_python",
        "test_starts_one_on_uvloop",
        "test_leaves_a_handler",
    ]
    assert "it starts a process, so mark it @pytest.mark.slow: subprocess.Popen ['" in said
    assert "it leaves a handler of SIGINT" in said
    assert "7 passed, 5 errors" in said
    assert "took longer" not in said  # nothing was left out


def test_the_quick_lane_names_what_took_long(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(LANES)
    said = run(tmp_path, "-m", "not slow", "-k", "nothing or marked")
    assert "1 passed, 6 deselected" in said
    assert "1 tests took longer than -1 s and are not marked slow" in said
    assert re.search(r"^ +\d+\.\d s  test_some.py::test_starts_nothing$", said, re.M)


def test_a_parallel_run_gives_a_worker_whole_files(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    for name in ("one", "two", "three", "four"):
        (tmp_path / f"test_{name}.py").write_text(ONE_OF_MANY)
    assert "12 passed" in run(tmp_path, "-n", "2")
    where = {
        name: {path.read_text() for path in tmp_path.glob(f"test_{name}.[012]")}
        for name in ("one", "two")
    }
    assert all(len(workers) == 1 for workers in where.values())


def test_a_thinned_test_has_all_its_parameters_and_compiled_code_gets_all(monkeypatch) -> None:
    cases = [(1, 2), (3, 4), (5, 6), (7, 8)]
    monkeypatch.setattr(lanes, "COMPILED", False)
    first, second, third, fourth = lanes.thinned(cases)
    assert (first, second.values, third.values, fourth) == tuple(cases)
    assert [mark.name for mark in (*second.marks, *third.marks)] == ["slow", "slow"]
    monkeypatch.setattr(lanes, "COMPILED", True)
    assert lanes.thinned(cases) == cases
