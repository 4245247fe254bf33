"""An install without extras: it simulates, tunes, renders, and says what the rest needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import extras
from toolkit.deploy.doctor import check_engines, check_machine
from toolkit.engine_traits import ENGINES
from toolkit.engines.devices import CudaDevice, find_devices
from toolkit.errors import EngineError

ABSENT = ("torch", "transformers", "tokenizers", "safetensors", "deepspeed")
FIT = "llama-3.1-8b-h200"
SMALL = ("--trials", 1, "--jobs", 1, "--policies", "own", "--concurrency", 4)
SIMULATE = ("simulate", FIT, "--trace", "t.jsonl", "--policies", "past-future", "--json")
RENDER = ("render", "tiny-llama-cpu", "--fit", "tiny-llama-cpu", "--target", "compose")
ENGINES_COMMAND = "pip install 'llmctl-toolkit[engines]'"

# Runs commands in one process, and prints what became of each, as JSON.
PROGRAM = """
import contextlib, io, json, sys
for name in {absent!r}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
from toolkit.cli.main import run
ended = []
for words in {commands!r}:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            run([str(word) for word in words])
        except SystemExit as end:
            code = end.code
    for stream in streams:
        stream.seek(0)
    ended.append((code, *(stream.read() for stream in streams)))
print(json.dumps(ended))
"""


def run_without(folder: Path, *commands: tuple[object, ...]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each command, all in one process without `ABSENT`."""
    code = PROGRAM.format(absent=ABSENT, commands=commands)
    environment = os.environ | {"PYTHONPATH": str(Path(extras.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ended: list[tuple[int, str, str]] = json.loads(done.stdout)
    return ended


@pytest.mark.slow
def test_the_core_works_without_the_engines(tmp_path: Path) -> None:
    generate = ("trace", "generate", "--out", "t.jsonl", "--duration", 40, "--rate", 2)
    ended = run_without(
        tmp_path,
        ("recipes",),
        ("policies",),
        ("doctor",),
        ("doctor", "llama-3.1-8b-h200"),
        generate,
        ("trace", "inspect", "t.jsonl"),
        SIMULATE,
        ("profile", "llama-3.1-8b-h200", "--analytic"),
        ("fit", "profile.json"),
        ("tune", FIT, "--fit", FIT, "--trace", "t.jsonl", *SMALL),
        ("render", FIT, "--fit", FIT, "--tuning", "tuning.json", "--target", "compose"),
        ("capacity", "--help"),
        ("bench", "--help"),
        ("serve", "--help"),
    )
    assert [(code, err) for code, _, err in ended if code] == []


@pytest.mark.slow
def test_what_needs_an_engine_says_how_to_install_it(tmp_path: Path) -> None:
    of_deepspeed = "pip install 'llmctl-toolkit[deepspeed]'"
    wanted: dict[tuple[object, ...], str] = {
        ("profile", "tiny-llama-cpu"): ENGINES_COMMAND,
        ("profile", "tiny-llama-cpu-rebatch"): ENGINES_COMMAND,
        ("profile", "tiny-llama-cpu-deepspeed"): of_deepspeed,
        ("serve", "compose/plan.json", "--port", 0): ENGINES_COMMAND,
    }
    ended = run_without(tmp_path, RENDER, *wanted)[1:]
    assert [code for code, _, _ in ended] == [EngineError.exit_code] * len(wanted)
    for (_, _, error), command in zip(ended, wanted.values(), strict=True):
        assert [line for line in error.splitlines() if line.startswith("hint: ")] == [
            f"hint: {command}"
        ]


def test_an_absent_library_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineError) as refused:
        ENGINES["rebatch"].require()
    assert "torch" in refused.value.message
    assert "transformers" not in refused.value.message
    assert refused.value.hint == ENGINES_COMMAND


@pytest.mark.slow
def test_doctor_notes_what_is_absent_and_is_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    devices = find_devices()
    assert devices.torch == ""
    checks = {each.name: each for each in [*check_machine(devices, tmp_path), *check_engines()]}
    assert {each.status for each in checks.values()} <= {"ok", "note"}
    assert checks["engines"].remedy == ENGINES_COMMAND


SMI = """#!/bin/sh
echo "0, NVIDIA H200, 143771, 143000"
echo "1, NVIDIA H200, 143771, 12"
"""


@pytest.mark.slow
def test_without_torch_the_driver_lists_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "torch", None)
    mib = 1 << 20
    assert find_devices().gpus == (
        CudaDevice(0, "NVIDIA H200", 143771 * mib, 143000 * mib),
        CudaDevice(1, "NVIDIA H200", 143771 * mib, 12 * mib),
    )
