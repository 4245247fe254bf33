"""Which GPUs each worker sees: different ones, as far as there are any."""

from pathlib import Path

import orders
import pytest
import samples
from commands import llmctl

from toolkit.backends.local import LocalBackend
from toolkit.backends.vllm import backend as vllm_backend
from toolkit.backends.vllm.backend import VllmBackend
from toolkit.errors import EngineError
from toolkit.files.io import write_file
from toolkit.files.plan import PlannedPolicy
from toolkit.files.recipe import Recipe
from toolkit.serve import launch
from toolkit.workers.process import require_gpu, share_gpus, visible_gpus


@pytest.mark.parametrize(
    ("sizes", "visible", "expected"),
    [
        ([1, 1], ["0", "1"], ["0", "1"]),
        ([2, 2], ["0", "1", "2", "3"], ["0,1", "2,3"]),
        ([1, 1, 1], ["4", "7"], ["4", "7", "4"]),
        ([2, 2], ["0", "1", "2"], ["0,1", "0,1"]),
        ([2], ["0"], [None]),
        ([1], [], [None]),
        ([2, 1, 0, 1], ["0", "1", "2", "3"], ["0,1", "2", None, "3"]),
    ],
)
def test_each_worker_has_its_own_gpus(
    sizes: list[int], visible: list[str], expected: list[str | None]
):
    assert share_gpus(sizes, visible) == expected


def test_the_environment_takes_precedence_over_the_driver(tmp_path: Path):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:02:00.0").mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-5f"}, tmp_path) == ["3", "GPU-5f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({}, tmp_path / "none") == []


GPU_RECIPE = samples.recipe(**orders.GPU)


@pytest.mark.parametrize(
    ("recipe", "environment", "device_file", "refused"),
    [
        (GPU_RECIPE, {}, None, "recipe 'test' needs a GPU, H200: this machine has none"),
        (GPU_RECIPE, {}, "nvidia-uvm", "this machine has none"),
        (GPU_RECIPE, {}, "nvidia0", ""),
        (GPU_RECIPE, {}, "dxg", ""),
        (GPU_RECIPE, {}, "kfd", ""),
        (
            GPU_RECIPE,
            {"CUDA_VISIBLE_DEVICES": ""},
            "nvidia0",
            "CUDA_VISIBLE_DEVICES hides all GPUs",
        ),
        (
            GPU_RECIPE,
            {"CUDA_VISIBLE_DEVICES": "-1"},
            "nvidia0",
            "CUDA_VISIBLE_DEVICES hides all GPUs",
        ),
        (GPU_RECIPE, {"CUDA_VISIBLE_DEVICES": "1"}, "nvidia1", ""),
        (samples.recipe(**orders.GPU | {"engine": {"name": "fake"}}), {}, None, ""),
        (samples.recipe(), {}, None, ""),
    ],
)
def test_a_recipe_for_a_gpu_is_refused_without_one(
    recipe: Recipe,
    environment: dict[str, str],
    device_file: str | None,
    refused: str,
    tmp_path: Path,
) -> None:
    if device_file:
        (tmp_path / device_file).touch()
    nothing = tmp_path / "none"
    if not refused:
        require_gpu([samples.recipe(), recipe], environment, nothing, tmp_path)
        return
    with pytest.raises(EngineError) as caught:
        require_gpu([samples.recipe(), recipe], environment, nothing, tmp_path)
    assert refused in caught.value.message


def test_a_gpu_that_only_the_driver_lists_is_enough(tmp_path: Path) -> None:
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    require_gpu([GPU_RECIPE], {}, tmp_path / "gpus", tmp_path / "none")


def never(*_: object, **__: object) -> None:
    pytest.fail("the command went on without a GPU")


@pytest.mark.parametrize("engine", ["transformers", "rebatch", "deepspeed", "vllm"])
def test_serve_checks_for_a_gpu_before_slow_work(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(launch, "load_tokenizer", never)
    monkeypatch.setattr(vllm_backend, "vllm_version", never)
    monkeypatch.setattr("toolkit.engines.loading.saved_model", never)
    changes = orders.GPU | {"workers": 1, "engine": {"name": engine}}
    policy = PlannedPolicy(name="past-future" if engine == "vllm" else "slice", parameters={})
    write_file(
        orders.plan(tmp_path, policy, samples.fit(workers=1), **changes), tmp_path / "plan.json"
    )
    assert llmctl("serve", tmp_path / "plan.json", "--port", 0) == 3
    assert (
        "error: recipe 'test' needs a GPU, H200: CUDA_VISIBLE_DEVICES hides all GPUs"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_profile_checks_for_a_gpu_first(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(LocalBackend, "timed", never)
    monkeypatch.setattr(VllmBackend, "timed", never)
    changes = orders.GPU | {"workers": 1, "engine": {"name": engine}}
    write_file(samples.recipe(**changes), tmp_path / "recipe.json")
    assert llmctl("profile", tmp_path / "recipe.json", "--out", tmp_path / "profile.json") == 3
    assert "needs a GPU" in capsys.readouterr().err
