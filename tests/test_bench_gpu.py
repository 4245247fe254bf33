"""`benchmarks.gpu.run`: the commands that each part types, and its limits of time. None is run."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import samples

from benchmarks.engines.live import Work
from benchmarks.gpu import run as gpu
from toolkit.cli import main
from toolkit.files.io import write_file
from toolkit.files.shipped import load_recipe

Lines = list[tuple[str, ...]]


def options(folder: Path, *words: str) -> Any:
    return gpu.options(["--work", str(folder), *words])


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    """The commands that are typed. Each only makes its file."""
    found: Lines = []

    def llmctl(work: Work, *words: str, **_: object) -> str:
        found.append(words)
        if "--out" in words:
            (work.folder / words[words.index("--out") + 1]).touch()
        return '{"throughput_rps": 10.0}'

    @contextmanager
    def serving(_: Work, plan: str, *words: str) -> Iterator[str]:
        found.append(("serve", plan, *words))
        yield "http://127.0.0.1:9"

    monkeypatch.setattr(Work, "llmctl", llmctl)
    monkeypatch.setattr(Work, "serving", serving)
    return found


@pytest.mark.parametrize("words", [["--dry-run"], ["--model", "here"]])
@pytest.mark.parametrize("name", gpu.PARTS)
def test_a_part_types_commands_of_llmctl_and_none_twice(
    tmp_path: Path, lines: Lines, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the commands run
    given = options(tmp_path, "--parts", name, *words)
    part = gpu.PARTS[name]
    work = Work(given, gpu.make_recipe(part, given))
    part.run(work, given)
    for command, *rest in lines:
        main._load(command).make_context(command, rest)
    assert {line[0] for line in lines} >= {"doctor", "profile", "fit", "render", "serve"}
    done = len(lines)
    part.run(work, given)
    assert {line[0] for line in lines[done:]} <= {"doctor", "simulate"}


def test_our_engines_get_random_weights_and_a_cache_that_an_overload_fills(tmp_path: Path) -> None:
    given = options(tmp_path, "--parts", "rounds", "--gpu", "h100-sxm")
    recipe = load_recipe(gpu.make_recipe(gpu.PARTS["rounds"], given))
    assert (recipe.hardware.device, recipe.hardware.gpu) == ("cuda", "h100-sxm")
    assert (recipe.model.load_format, recipe.model.max_model_len) == ("dummy", 2048)
    assert recipe.engine.kv_cache_memory_mib == 32 * 2048 * 131072 / 2**20
    assert max(recipe.profile.input_lengths) < 2048


def test_vllm_needs_a_folder_with_its_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        options(tmp_path, "--parts", "vllm")
    given = options(tmp_path, "--parts", "vllm", "--model", str(tmp_path))
    recipe = load_recipe(gpu.make_recipe(gpu.PARTS["vllm"], given))
    assert recipe.model.source == str(tmp_path)
    assert recipe.engine.kv_cache_memory_mib is None


def test_what_has_no_time_left_or_fails_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise SystemExit("llmctl profile: exit code 3")

    monkeypatch.setitem(gpu.PARTS, "slices", replace(gpu.PARTS["slices"], run=fails))
    words = ["--dry-run", "--parts", "slices", "live", "--budget-s", "100"]
    given = options(tmp_path / "work", *words, "--out", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        gpu.run(given)
    assert "slices, live" in str(ended.value)
    assert "exit code 3" in capsys.readouterr().err
    assert (tmp_path / "gpu-results.tar.gz").is_file()


def test_a_part_ends_when_its_time_is_over() -> None:
    with pytest.raises(TimeoutError), gpu.at_most(0.01):
        signal.pause()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_steps_stand_beside_the_time_to_read_weights_and_caches(tmp_path: Path) -> None:
    assert gpu.step_times(tmp_path) == ""
    write_file(load_recipe("llama-3.1-8b-h200-rebatch"), tmp_path / "rounds-recipe.json")
    write_file(samples.fit(engine="rebatch"), tmp_path / "rounds-fit.json")
    first = gpu.step_times(tmp_path).splitlines()[2]
    assert first.startswith("| 1 x 512 | 3.36 | ")  # (16.06 + 0.07) GB at 4,800 GB/s
