"""`benchmarks.gpu.run` without a GPU: its stages, and the live replay on the fake engine."""

import contextlib
import json
import math
import random
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import samples
from said import says

from benchmarks.gpu import live as gpu_live
from benchmarks.gpu import preflight
from benchmarks.gpu import run as gpu
from benchmarks.gpu.dry_run import GPU_TESTS
from benchmarks.gpu.stages import ROUNDS, SLICES, derive, write_recipes
from benchmarks.gpu.table import tables
from benchmarks.gpu.wheels import LOCK, locked
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
    "name", ["llama-3.1-8b-h200", "llama-3.1-8b-h200-transformers", "tiny-llama-cpu-rebatch"]
)
@pytest.mark.parametrize("quick", [False, True])
def test_a_recipe_gets_random_weights_and_a_small_cache(name, quick):
    recipe = load_recipe(name)
    derived = derive(recipe, "rebatch", "cuda", "NVIDIA H200", quick=quick)
    assert derived.model.source == "random" or derived.model.load_format == "dummy"
    assert (derived.engine.name, derived.workers, derived.hardware.device) == ("rebatch", 1, "cuda")
    tokens = derived.engine.kv_cache_memory_mib * 2**20 / recipe.model.kv_bytes_per_token
    longest = min(recipe.model.max_model_len, 2048) if quick else recipe.model.max_model_len
    assert derived.model.max_model_len == longest
    assert tokens == 32 * longest
    assert max(derived.profile.input_lengths) + 1 <= longest
    assert derived.serve.max_new_tokens <= (256 if quick else longest // 4)


def test_quick_is_one_model_of_the_shape_of_llama_3_1_8b(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run", "--quick"])
    assert gpu._options().recipe is None
    derived = derive(load_recipe(gpu.RECIPE), "rebatch", "cuda", "NVIDIA H200", quick=True)
    assert derived.model.config["hidden_size"] == 4096
    assert derived.model.load_format == "dummy"


def test_a_folder_holds_one_recipe(tmp_path):
    recipe = load_recipe("tiny-llama-cpu")
    for _ in range(2):
        write_recipes(recipe, tmp_path, "cpu", "cpu", quick=True)
    with pytest.raises(InputError, match=r"recipe-transformers\.json"):
        write_recipes(recipe, tmp_path, "cpu", "cpu", quick=False)


def test_finished_stages_and_those_after_a_failure_are_skipped(run, monkeypatch):
    run.folder.mkdir()
    (run.folder / "profile-transformers.json").touch()
    started = []
    kept = []

    def fake_run(command, limit_s, variables):
        started.append(command[command.index("--stage") + 1])
        return "exit code 1" if started[-1] == "profile-rebatch" else ""

    monkeypatch.setattr(gpu, "_run", fake_run)
    undone = gpu.go(run, gpu.Budget(math.inf), lambda: kept.append(len(started)))
    assert undone == ["profile-rebatch", "fit-rebatch", "rounds"]
    assert started == ["fit-transformers", "slices", "profile-rebatch", "swap"]
    assert kept == [1, 2, 3, 4]


def test_no_stage_is_started_that_does_not_fit_into_the_budget(run, monkeypatch, capsys):
    now_s = [0.0]
    limits = {}

    def fake_run(command, limit_s, variables):
        name = command[command.index("--stage") + 1]
        limits[name] = limit_s
        now_s[0] += 150.0 if name == "profile-rebatch" else 40.0
        return ""

    monkeypatch.setattr(gpu, "_run", fake_run)
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now_s[0])
    assert gpu.go(run, gpu.Budget(335.0, 0.0)) == ["rounds", "swap"]
    assert list(limits) == [
        *("profile-transformers", "fit-transformers", "slices", "profile-rebatch", "fit-rebatch")
    ]
    assert limits["profile-transformers"] == 130.0
    assert limits["profile-rebatch"] == 200.0
    assert says(capsys.readouterr().out, "rounds", "80 s", "25 s")
    now_s[0] = 40.0
    gpu.go(run, gpu.Budget(200.0, 0.0))
    assert limits["slices"] == 200.0 - 120.0 - gpu.GRACE_S  # what is left, less the clean-up


def test_quick_estimates_come_to_less_than_ten_minutes():
    assert sum(stage.about_s for stage in gpu.STAGES) <= 480
    assert all(stage.about_s <= stage.quick_limit_s <= stage.limit_s for stage in gpu.STAGES)


def filled(folder: Path) -> Path:
    (folder / "h200" / "8b").mkdir(parents=True)
    (folder / "h200" / "8b" / "fit.json").write_text("{}")
    (folder / "h200" / "8b" / "profile.json.partial").write_text("lines")
    return folder


def test_results_travel_as_one_archive_with_their_journals(tmp_path):
    results = filled(tmp_path / "results")
    for _ in range(2):  # renewed, not added to
        gpu.keep(results / "h200", results, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [gpu.ARCHIVE]
    gpu.unpack(tmp_path / "out" / gpu.ARCHIVE, tmp_path / "other")
    assert (tmp_path / "other" / "h200" / "8b" / "profile.json.partial").read_text() == "lines"
    with pytest.raises(SystemExit, match="nothing"):
        gpu.unpack(tmp_path / "nothing.tar.gz", tmp_path / "other")


def test_a_large_archive_is_cut_into_parts(tmp_path):
    results = filled(tmp_path / "results")
    (results / "h200" / "noise").write_bytes(random.Random(0).randbytes(3000))
    out = tmp_path / "out"
    out.mkdir()
    (out / gpu.ARCHIVE).touch()  # of an earlier stage
    parts = gpu.pack(results / "h200", results, out, part_bytes=1 << 10)
    assert sorted(out.iterdir()) == parts
    assert 3 <= len(parts) <= gpu.PARTS_MAX
    assert all(part.stat().st_size <= 1 << 10 for part in parts)
    joined = tmp_path / "joined.tar.gz"
    joined.write_bytes(b"".join(part.read_bytes() for part in parts))
    gpu.unpack(joined, tmp_path / "other")
    assert (tmp_path / "other" / "h200" / "8b" / "fit.json").is_file()


def test_the_preflight_names_all_that_is_missing_in_one_line(monkeypatch, tmp_path, capsys):
    versions = {"torch": "2.9.0", "numpy": "2.5.2"}

    def version(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(preflight.metadata, "version", version)
    monkeypatch.setattr(preflight, "_available_bytes", lambda: 2 << 30)
    monkeypatch.setattr(sys, "argv", ["preflight", "--results", str(tmp_path)])
    assert preflight.main() == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert says(line, "torch>=2.11,<2.14", "2.9.0")
    for word in ("pydantic>=2.11", "pydantic-core", "msgspec>=0.19", "annotated-types"):
        assert f"; {word}" in line
    assert says(line, "8 GiB", "2.0 GiB")
    assert "numpy" not in line


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (
            {"missing": [], "notes": [], "facts": ["H200"]},
            None,
            ([], {preflight.EXPANDABLE: "expandable_segments:True"}),
        ),
        (
            "no such mapping",
            {"missing": [], "notes": [], "facts": ["H200"]},
            ([], {preflight.EXPANDABLE: "expandable_segments:False"}),
        ),
        ("import failed", "import failed again", (["import failed"], {})),
    ],
)
def test_expandable_segments_are_left_out_where_they_alone_fail(
    first, second, expected, monkeypatch
):
    monkeypatch.delenv(preflight.EXPANDABLE, raising=False)
    answers = [first, second]
    monkeypatch.setattr(preflight, "_child", lambda *_: answers.pop(0))
    found = preflight.Found()
    preflight._ask_child(found, "cuda", [], quick=True)
    assert (found.missing, found.variables) == expected


@pytest.mark.slow
def test_a_slow_stage_ends_with_its_processes(tmp_path):
    """Its grandchild has a session of its own and ignores SIGTERM, as a worker that computes."""
    started = tmp_path / "started"
    grandchild = (
        "import os, pathlib, signal, time; signal.signal(15, signal.SIG_IGN); "
        f"pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    child = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        f"{grandchild!r}], start_new_session=True)"
    )
    assert "not done within" in gpu._run([sys.executable, "-c", child], 2.0)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(started.read_text())).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_it_needs_no_more_than_a_bare_gpu_machine_has():
    code = (
        "import sys\n"
        f"for name in {NOT_ON_BARE_MACHINES!r}: sys.modules[name] = None\n"
        "import benchmarks.gpu.run, benchmarks.gpu.live, benchmarks.gpu.table, importlib\n"
        "from benchmarks.gpu.preflight import STAGES_IMPORT\n"
        "for name in STAGES_IMPORT: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=gpu._environment(), cwd=gpu.ROOT)


@pytest.mark.slow
def test_the_preflight_knows_every_import_of_the_stages():
    code = (
        "import ast, importlib, pathlib, sys\n"
        "from benchmarks.gpu.preflight import STAGES_IMPORT\n"
        "for name in STAGES_IMPORT: importlib.import_module(name)\n"
        "ours = ('toolkit', 'benchmarks')\n"
        "files = [m.__file__ for n, m in sys.modules.items() if n.partition('.')[0] in ours]\n"
        "for file in files:\n"
        "    for node in ast.parse(pathlib.Path(file).read_text()).body:\n"
        "        if isinstance(node, ast.Import): print(*(each.name for each in node.names))\n"
        "        elif isinstance(node, ast.ImportFrom): print(node.module)\n"
    )
    environment = gpu._environment() | {"LLMCTL_COMPILED": "0"}  # compiled modules are no source
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, check=True, env=environment, cwd=gpu.ROOT, capture_output=True)
    imported = {name.partition(".")[0] for name in run.stdout.decode().split()}
    imported -= {*sys.stdlib_module_names, "toolkit", "benchmarks"}
    packages = {name.replace("-", "_") for name in preflight.PACKAGES}
    assert imported - {"yaml", "jinja2"} <= packages  # torch brings jinja2
    assert {"pydantic", "mypy_extensions", "torch", "yaml"} <= imported


def test_the_page_names_the_command_of_the_dry_run():
    page = (gpu.ROOT / "docs/how-to/gpu.md").read_text()
    assert f"    python3 {' '.join(GPU_TESTS)}\n" in page


def test_what_images_often_lack_can_be_collected():
    pins = dict(locked(preflight.OFTEN_LACKING, LOCK))
    assert pins.keys() == set(preflight.OFTEN_LACKING) < set(preflight.PACKAGES)


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
    # The prediction is cut off at the same time.
    assert [one["predicted"]["throughput_rps"] for one in found["outcomes"]] == [0.0, 0.0, 0.0]
    assert all(one["predicted"]["failed"] == one["requests"] for one in found["outcomes"])


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


def test_the_table_shows_predictions_beside_measurements(tmp_path):
    folder = tmp_path / "cpu" / "tiny"
    folder.mkdir(parents=True)
    times = {"throughput_rps": 2.0, "ttft_mean_s": 0.5, "e2e_mean_s": 3.0}
    outcome = {
        "title": "SLS",
        "policy": {"name": "sequence", "parameters": {"batch_size": 28}},
        "served": 10,
        "requests": 12,
        "measured": times,
        "predicted": {"throughput_rps": 2.25},
        "evictions": 0,
        "oom_events": 0,
        "deciding_percent": 0.1,
        "hop_percent": 0.2,
        "step_mean_s": 0.02,
    }
    live = {"limit_s": 60.0, "trace": ["made up"], "outcomes": [outcome]}
    (folder / "slices.json").write_text(json.dumps(live))
    text = tables(tmp_path / "cpu")
    assert "| SLS, 28 rows | 10 / 12 | 2.00 (2.25) | 0.50 (nan) | 3.00 (nan) |" in text


@pytest.mark.slow
def test_the_probe_runs_on_a_cpu_and_says_so(tmp_path, monkeypatch, capsys):
    # loads torch and transformers, four seconds that not every run should take
    from benchmarks.gpu import probe as gpu_probe

    monkeypatch.setattr(gpu_probe, "SIZES_ON_CPU", (2,))
    monkeypatch.setattr(gpu_probe, "LENGTHS_ON_CPU", (16,))
    monkeypatch.setattr(gpu_probe, "COPY_BYTES_ON_CPU", 1 << 20)
    monkeypatch.setattr(gpu_probe, "PINNED_BYTES_ON_CPU", 1 << 20)
    recipe = gpu.ROOT / "recipes" / "tiny-llama-cpu-rebatch.yaml"
    words = ["--recipe", str(recipe), "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["probe", *words])
    assert gpu_probe.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert says(lines[1], "CPU", "cuDNN")
    columns = ["floor", "eager", "fixed", "slices", "their", "floor"]
    assert lines[3].split() == ["ms", "per", "step", *columns]
    assert lines[4].startswith("N 2, L 16")
    assert "-" not in lines[4]
    found = json.loads((tmp_path / "probe.json").read_text())
    assert [point["way"] for point in found["points"]] == ["eager", "fixed", "slices"]


@pytest.mark.slow
def test_the_probe_says_whether_cudnn_is_rightly_left_out():
    from benchmarks.gpu import probe as gpu_probe

    def point(way, seconds):
        return {"way": way, "rows": 16, "length": 512, "floor_s": 0.004, "seconds": seconds}

    found = {
        "recipe": "8b",
        "environment": {"device": "NVIDIA H200"},
        "copy_bytes_per_s": 4.3e12,
        "pinned_bytes_per_s": {"out": 5e10, "in": 5.5e10},
        "captured": True,
        "points": [
            point("eager", [0.015, 0.014, 0.5]),
            point("eager, cuDNN", [0.045] * 3),
            point("fixed", []),
            point("slices", [0.005]),
        ],
    }
    text = gpu_probe.table(found)
    assert says(text, "4300.0", "GB/s", "50.0", "55.0")
    cells = ["4.00", "15.00", "45.00", "-", "5.00", "4.00"]
    assert text.splitlines()[-3].split() == ["N", "16,", "L", "512", *cells]
    assert says(text, "3.00")
    assert "CUDA graphs" in text
