"""vLLM's server as a child: its Python, version and flags, its start, death and end."""

from pathlib import Path

import fake_vllm_server
import httpx
import psutil
import pytest
import samples

from toolkit.backends.vllm.command import VllmCommand, vllm_server, vllm_version
from toolkit.errors import EngineError, InputError


def recipe_for(python: str, **engine: object):
    found = {"name": "vllm", "vllm": {"python": python, "block_size": 16}} | engine
    return samples.recipe(engine=found, workers=1, policy={"name": "aggressive"})


@pytest.fixture
def python(tmp_path: Path) -> str:
    return fake_vllm_server.install(tmp_path)


@pytest.mark.slow
def test_flags_follow_the_recipe(python: str):
    recipe = recipe_for(python, kv_cache_memory_mib=16, threads=1)
    command = VllmCommand(recipe, "folder", "toy", ["--max-num-seqs", "8"])
    with vllm_server(command, quiet=True) as server:
        words = httpx.get(f"{server.url}/flags").json()[1:]
    assert words[:2] == ["serve", "folder"]
    joined = " ".join(words)
    for flags in ("--kv-cache-memory-bytes 16777216", "--block-size 16 --max-num-seqs 8"):
        assert flags in joined
    assert f"--dtype {recipe.model.dtype}" in joined
    assert not server.running


def test_threads_are_bound_and_only_llmctls_package_is_visible(python: str, tmp_path: Path):
    environment = VllmCommand(recipe_for(python, threads=1), "folder", "toy").environment(tmp_path)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"].isdecimal()
    assert environment["PYTHONPATH"] == str(tmp_path)


@pytest.mark.slow
def test_a_server_that_does_not_end_is_killed_with_its_engine(
    python: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("toolkit.backends.vllm.command.STOP_S", 0.1)
    command = VllmCommand(recipe_for(python), "engine-stubborn", "toy")
    others = set(
        psutil.Process().children(recursive=True)
    )  # of tests before this one: multiprocessing's tracker
    with vllm_server(command, quiet=True) as server:
        processes = set(psutil.Process().children(recursive=True)) - others
    assert len(processes) == 3  # with the watcher
    assert psutil.wait_procs(processes, timeout=60)[1] == []
    assert not server.running


@pytest.mark.slow
def test_a_server_that_dies_says_why(python: str):
    with (
        pytest.raises(EngineError, match=r"exit code 1.*ValueError"),
        vllm_server(VllmCommand(recipe_for(python), "dies", "toy"), quiet=True),
    ):
        pass


@pytest.mark.slow
def test_a_release_that_lacks_something_is_refused_before_anything_starts(tmp_path: Path):
    python = fake_vllm_server.install(tmp_path, "0.99.0")
    with pytest.raises(InputError, match=r"0\.99\.0") as refusal:
        vllm_version(recipe_for(python))
    assert "0.28 to 0.33" in refusal.value.hint


@pytest.mark.slow
def test_a_build_of_another_name_has_its_version(tmp_path: Path):
    python = fake_vllm_server.install(tmp_path, "0.32.5", "vllm-cpu")
    assert vllm_version(recipe_for(python)) == "0.32.5"


@pytest.mark.slow
def test_a_python_without_vllm_says_where_to_name_another(tmp_path: Path):
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    with pytest.raises(EngineError, match="vLLM") as failure:
        vllm_version(recipe_for(str(script)))
    assert "LLMCTL_VLLM_PYTHON" in failure.value.hint
    with pytest.raises(EngineError, match=str(tmp_path / "none")):
        vllm_version(recipe_for(str(tmp_path / "none")))


def test_flags_are_written_for_policy_vllm_only():
    with pytest.raises(ValueError, match=r"engine\.vllm"):
        samples.recipe(engine={"name": "fake", "vllm": {}})
    with pytest.raises(ValueError, match="engine 'fake' has no replicas"):
        samples.recipe(engine={"name": "fake"}, replica_router={"name": "by-law"})
