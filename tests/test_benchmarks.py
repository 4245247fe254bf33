"""Every benchmark has a `--help`, and its docstring says the command, the time and the needs."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(benchmarks.__file__).parent
SCRIPTS = sorted(
    ".".join(("benchmarks", *path.relative_to(FOLDER).with_suffix("").parts))
    for path in FOLDER.glob("*/*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)
# started by another benchmark, in the environment of the system that it measures
STARTED_BY_OTHERS = ("front_granian", "offline_llama", "offline_ours", "offline_vllm")


@pytest.mark.parametrize("module", SCRIPTS)
def test_help_shows_what_it_measures_its_command_its_time_and_its_needs(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, module, raising=False)  # another benchmark imported it
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"-m {module}" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    if not module.endswith(("_child", *STARTED_BY_OTHERS)):
        assert "\nTakes " in text
        assert "Needs " in text


def test_each_group_has_benchmarks():
    assert {module.split(".")[1] for module in SCRIPTS} == {
        "papers",
        "serving",
        "engines",
        "gpu",
        "public",
    }


def test_no_benchmark_imports_the_tests_or_edits_the_path():
    for path in FOLDER.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "sys.path" not in text, path
        assert "from tests" not in text, path
    assert FOLDER.parent == importlib.import_module("benchmarks.common").ROOT
