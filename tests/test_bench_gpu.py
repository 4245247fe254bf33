"""`benchmarks.gpu.run` without a GPU: its stages, and the live replay on the fake engine."""

import json
import subprocess
import sys

import psutil
import pytest
import samples

from benchmarks.gpu import live as gpu_live
from benchmarks.gpu import run as gpu
from benchmarks.gpu.stages import ROUNDS, SLICES, derive, write_recipes
from benchmarks.gpu.table import tables
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.files.shipped import load_recipe

NOT_ON_BARE_MACHINES = (
    "deepspeed",
    "optuna",
    "fastapi",
    "starlette",
    "uvicorn",
    "uvloop",
    "httptools",
    "httpx",
)
NOT_ON_BARE_MACHINES += ("typer", "rich", "psutil", "prometheus_client", "matplotlib")


@pytest.fixture
def run(tmp_path):
    return gpu.Run(
        gpu.ROOT / "recipes" / "tiny-llama-cpu.yaml", tmp_path / "tiny", "cpu", "cpu", quick=True
    )


@pytest.mark.parametrize(
    "name", ["llama-2-7b-h200", "llama-2-13b-a100-80gb-transformers", "tiny-llama-cpu-rebatch"]
)
@pytest.mark.parametrize("quick", [False, True])
def test_a_recipe_is_measured_with_random_weights_and_a_cache_that_an_overload_fills(name, quick):
    recipe = load_recipe(name)
    derived = derive(recipe, "rebatch", "cuda", "NVIDIA H200", quick=quick)
    assert derived.model.source == "random" or derived.model.load_format == "dummy"
    assert (derived.engine.name, derived.workers, derived.hardware.device) == ("rebatch", 1, "cuda")
    tokens = derived.engine.kv_cache_memory_mib * 2**20 / recipe.model.kv_bytes_per_token
    assert tokens == 8 * recipe.model.max_model_len
    assert max(derived.profile.input_lengths) + 1 <= recipe.model.max_model_len


def test_a_folder_holds_one_recipe(tmp_path):
    recipe = load_recipe("tiny-llama-cpu")
    for _ in range(2):
        write_recipes(recipe, tmp_path, "cpu", "cpu", quick=True)
    with pytest.raises(
        InputError, match=r"recipe-transformers.json is of another recipe or device"
    ):
        write_recipes(recipe, tmp_path, "cpu", "cpu", quick=False)


def test_finished_stages_are_skipped_and_stages_that_need_a_failed_one_are_left_out(
    run, monkeypatch
):
    run.folder.mkdir()
    (run.folder / "profile-transformers.json").touch()
    started = []

    def fake_run(command, limit_s):
        started.append(command[command.index("--stage") + 1])
        return "exit code 1" if started[-1] == "profile-rebatch" else ""

    monkeypatch.setattr(gpu, "_run", fake_run)
    assert gpu._go(run) == ["profile-rebatch", "fit-rebatch", "rounds"]
    assert started == ["profile-rebatch", "fit-transformers", "swap", "slices"]


def test_quick_limits_come_to_ten_minutes_a_model():
    assert sum(stage.quick_limit_s for stage in gpu.STAGES) <= 600


@pytest.mark.slow
def test_a_stage_that_takes_too_long_is_ended_with_what_it_started(tmp_path):
    started = tmp_path / "started"
    grandchild = f"import time, pathlib; pathlib.Path({str(started)!r}).touch(); time.sleep(600)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    assert "not done within" in gpu._run([sys.executable, "-c", child], 1.0)
    assert not [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(started) in " ".join(one.info["cmdline"] or ())
    ]


@pytest.mark.slow
def test_it_needs_no_more_than_a_bare_gpu_machine_has():
    code = (
        "import sys\n"
        f"for name in {NOT_ON_BARE_MACHINES!r}: sys.modules[name] = None\n"
        "import benchmarks.gpu.run, benchmarks.gpu.live, benchmarks.gpu.stages, "
        "benchmarks.gpu.table\n"
        "import toolkit.estimators.fitting, toolkit.profiling.run, toolkit.profiling.child, "
        "toolkit.workers.child\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=gpu._environment(), cwd=gpu.ROOT)


@pytest.fixture
def fake_folder(tmp_path):
    config = {"model_type": "fake", "decode_s": 0.001, "eos_one_in": 0}
    model = {
        "source": "random",
        "config": config,
        "dtype": "float32",
        "max_model_len": 512,
        "tokenizer": "bytes",
    }
    write_file(samples.recipe(model=model), tmp_path / "recipe-fake.json")
    write_file(samples.fit(), tmp_path / "fit-fake.json")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contenders", "titles"),
    [(SLICES, ["SLS", "SCLS"]), (ROUNDS[:2], ["conservative", "aggressive"])],
)
def test_contenders_serve_the_same_requests_on_live_workers(fake_folder, contenders, titles):
    gpu_live.replay_all(fake_folder, "fake", contenders, gpu_live.Pace(0.5, 30.0), "live.json")
    found = json.loads((fake_folder / "live.json").read_text())
    assert [one["title"] for one in found["outcomes"]] == titles
    for one in found["outcomes"]:
        assert one["served"] == one["requests"] > 0
        assert one["oom_events"] == one["worker_restarts"] == 0
        assert one["measured"]["throughput_rps"] > 0 < one["predicted"]["throughput_rps"]
    assert found["environment"]["packages"].keys() >= {"torch", "transformers"}


@pytest.mark.slow
def test_rows_of_one_contender_are_dropped_before_the_next(fake_folder):
    """No time at all: every request is given up, some of them on their way."""
    gpu_live.replay_all(fake_folder, "fake", ROUNDS, gpu_live.Pace(0.2, 0.0), "live.json")
    found = json.loads((fake_folder / "live.json").read_text())
    assert [one["served"] < one["requests"] for one in found["outcomes"]] == [True, True, True]
    assert [one["worker_restarts"] for one in found["outcomes"]] == [0, 0, 0]


def test_tables_show_the_finished_stages(tmp_path):
    folder = tmp_path / "cpu" / "tiny"
    assert tables(tmp_path / "cpu") == ""
    point = {
        "rows": 2,
        "length": 64,
        "size_bytes": 2 << 20,
        "out_s": [9.0, 0.002, 0.002],
        "in_s": [9.0, 0.001, 0.001],
    }
    folder.mkdir(parents=True)
    (folder / "swap.json").write_text(
        json.dumps({"environment": {"device": "NVIDIA H200"}, "points": [point]})
    )
    assert "| 2 x 64 | 2.0 | 1.05 | 2.10 |" in tables(tmp_path / "cpu")
