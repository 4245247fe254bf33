"""Which GPUs each worker sees: different ones, as far as there are any."""

from pathlib import Path

import orders
import pytest
import samples
import tiny
from commands import llmctl
from said import says

from toolkit.backends import LocalBackend
from toolkit.backends.vllm import backend as vllm_backend
from toolkit.backends.vllm.backend import VllmBackend
from toolkit.cluster.workers import bundle_of
from toolkit.engines.resources import (
    ALLOCATOR_VARIABLES,
    GPUS_VARIABLE,
    GpuShare,
    engine_environment,
    require_gpu,
    share_gpus,
    visible_gpus,
)
from toolkit.errors import EngineError
from toolkit.files.io import write_file
from toolkit.files.recipe import EngineSpec, Recipe
from toolkit.files.tuning import Settings
from toolkit.server import engine as engine_module
from toolkit.workers.pool import ProcessWorkers


@pytest.mark.parametrize(
    ("size", "visible", "expected"),
    [
        (1, ["0", "1"], ["0", "1"]),
        (2, ["0", "1", "2", "3"], ["0,1", "2,3"]),
        (2, ["0"], [None]),
        (1, [], [None, None]),
        (0, ["0", "1"], [None, None]),
    ],
)
def test_each_worker_has_its_own_gpus(size: int, visible: list[str], expected: list[str | None]):
    assert share_gpus(len(expected), size, visible) == [GpuShare(names) for names in expected]


@pytest.mark.parametrize(
    ("size", "visible", "expected"),
    [
        (1, ["4", "7"], [("4", 2), ("7", 1), ("4", 2)]),
        (2, ["0", "1", "2"], [("0,1", 2), ("0,1", 2)]),
        (1, ["0"], [("0", 3), ("0", 3), ("0", 3)]),
    ],
)
def test_gpus_are_shared_only_if_the_recipe_says_so(
    size: int, visible: list[str], expected: list[tuple[str, int]]
):
    workers = len(expected)
    with pytest.raises(EngineError) as refused:
        share_gpus(workers, size, visible)
    counts = f"{workers} workers", f"{workers * size} GPUs", str(len(visible))
    assert says(refused.value.message, *counts, f"CUDA_VISIBLE_DEVICES={','.join(visible)}")
    assert "engine.share_gpus: true" in refused.value.hint
    shares = share_gpus(workers, size, visible, shared=True)
    assert shares == [GpuShare(*each) for each in expected]
    spec = EngineSpec(gpu_memory_utilization=0.9)
    for share in shares:
        part = spec.on_part_of_gpu(share.workers).gpu_memory_utilization
        assert part == pytest.approx(0.9 / share.workers)


def test_a_pool_refuses_to_share_gpus(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    recipe = samples.recipe(**orders.GPU)
    with pytest.raises(EngineError, match=r"2 workers.*2 GPUs.*1"):
        ProcessWorkers(recipe, 2)
    engine = recipe.engine.model_copy(update={"share_gpus": True})
    assert ProcessWorkers(recipe.model_copy(update={"engine": engine}), 2).size == 2


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a machine without GPUs: its `gpus` is the driver's folder, its `dev` /dev."""
    monkeypatch.delenv(GPUS_VARIABLE, raising=False)
    monkeypatch.setattr("toolkit.engines.resources.NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr("toolkit.engines.resources.DEVICES", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_the_environment_takes_precedence_over_the_driver(
    machine: Path, monkeypatch: pytest.MonkeyPatch
):
    assert visible_gpus() == []
    (machine / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (machine / "gpus" / "0000:02:00.0").mkdir()
    assert visible_gpus() == ["0", "1"]
    require_gpu(GPU_RECIPE)
    monkeypatch.setenv(GPUS_VARIABLE, "3,GPU-5f")
    assert visible_gpus() == ["3", "GPU-5f"]
    monkeypatch.setenv(GPUS_VARIABLE, "")
    assert visible_gpus() == []


def test_device_files_count_where_the_driver_is_hidden(machine: Path):
    for name in ("nvidia0", "nvidia1", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (machine / "dev" / name).touch()
    assert visible_gpus() == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("device", "own", "expected"),
    [
        ("cuda", {}, "expandable_segments:True"),
        ("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("cpu", {}, None),
    ],
)
def test_cuda_s_allocator_is_set_before_torch_starts(
    device: str, own: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert engine_environment(1, device).get("PYTORCH_CUDA_ALLOC_CONF") == expected


GPU_RECIPE = samples.recipe(**orders.GPU)


@pytest.mark.parametrize(
    ("recipe", "environment", "device_file", "refused"),
    [
        (GPU_RECIPE, {}, None, "H200"),
        (GPU_RECIPE, {}, "nvidia-uvm", "H200"),
        (GPU_RECIPE, {}, "nvidia0", ""),
        (GPU_RECIPE, {}, "dxg", ""),
        (GPU_RECIPE, {}, "kfd", ""),
        *((GPU_RECIPE, {GPUS_VARIABLE: none}, "nvidia0", GPUS_VARIABLE) for none in ("", "-1")),
        (GPU_RECIPE, {GPUS_VARIABLE: "1"}, "nvidia1", ""),
        (samples.recipe(**orders.GPU | {"engine": {"name": "fake"}}), {}, None, ""),
        (samples.recipe(), {}, None, ""),
    ],
)
def test_a_recipe_for_a_gpu_is_refused_without_one(
    recipe: Recipe,
    environment: dict[str, str],
    device_file: str | None,
    refused: str,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if device_file:
        (machine / "dev" / device_file).touch()
    if not refused:
        require_gpu(recipe)
        return
    with pytest.raises(EngineError) as caught:
        require_gpu(recipe)
    assert says(caught.value.message, "'test'", refused)


def never(*_: object, **__: object) -> None:
    pytest.fail("the command went on without a GPU")


@pytest.mark.parametrize("engine", ["transformers", "rebatch", "deepspeed", "vllm"])
def test_serve_checks_for_a_gpu_before_slow_work(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(engine_module, "load_tokenizer", never)
    monkeypatch.setattr(vllm_backend, "vllm_version", never)
    monkeypatch.setattr("toolkit.backends.vllm.backend.saved_model", never)
    changes = orders.GPU | {"workers": 1, "engine": {"name": engine}}
    policy = Settings(policy="past-future" if engine == "vllm" else "slice", parameters={})
    write_file(
        orders.plan(tmp_path, policy, samples.fit(workers=1), **changes), tmp_path / "plan.json"
    )
    assert llmctl("serve", tmp_path / "plan.json", "--port", 0) == 3
    assert says(capsys.readouterr().err, "'test'", "H200", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("visible", "changes", "named"),
    [
        *(
            ("", {"workers": 1, "engine": {"name": engine}}, ("'test'", "H200", GPUS_VARIABLE))
            for engine in ("transformers", "vllm")
        ),
        ("0", {"workers": 2}, ("2 workers", "2 GPUs", "1")),
    ],
)
def test_profile_checks_the_gpus_first(
    visible: str,
    changes: dict[str, object],
    named: tuple[str, ...],
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(GPUS_VARIABLE, visible)
    (machine / "dev" / "nvidia0").touch()
    monkeypatch.setattr(LocalBackend, "timed", never)
    monkeypatch.setattr(VllmBackend, "timed", never)
    recipe = machine / "recipe.json"
    write_file(samples.recipe(**orders.GPU | changes), recipe)
    assert llmctl("profile", recipe, "--out", machine / "profile.json") == 3
    assert says(capsys.readouterr().err, *named)


def test_a_worker_on_ray_takes_its_threads_and_a_gpu_of_its_machine() -> None:
    engine = tiny.engine_spec("llama", threads=3)
    assert bundle_of(tiny.recipe(tiny.model_spec(), engine)) == {"CPU": 3.0}
    gpus = tiny.CPU.model_copy(update={"device": "cuda"})
    assert bundle_of(tiny.recipe(tiny.model_spec(), engine, gpus)) == {"CPU": 3.0, "GPU": 1.0}
