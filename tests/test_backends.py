"""Adding an engine takes one folder and one line: a toy package runs through the whole workflow."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from commands import llmctl

from benchmarks.common.serving import Server
from toolkit.backends import Checks, Serves, backend_of
from toolkit.engine_traits import ENGINES, traits_of
from toolkit.errors import InputError
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import EngineSpec

ENTRY_POINTS = """\
[llmctl.engines]
toy = toy:TOY
toyserver = toy:TOY_SERVER
"""
TRAITS = """\
from toolkit.engine_traits import EngineTraits

TOY = EngineTraits(
    "toy",
    "counts",
    backend="toolkit.backends.local:LocalBackend",
    load="toy.engine:load",
    loads_model=False,
)
TOY_SERVER = EngineTraits(
    "toyserver", "answers", backend="toy.server:ToyServer", server=True, loads_model=False
)
"""
ENGINE = """\
from toolkit.engines import fake

def load(model, engine, hardware):
    loaded = fake.load(model, engine, hardware)
    loaded.facts = loaded.facts.model_copy(update={"engine": "toy"})
    return loaded
"""
SERVER = """\
from toolkit.backends import Check

class ToyServer:
    def timed(self, recipe):
        raise NotImplementedError

    def launch(self, order, on_ready):
        on_ready(f"http://{order.host}:{order.port}/{order.plan.policy.name}")
        return {"stop": 3}

    def check(self, recipe):
        return Check("engine", "missing", "no toys here", "buy some")
"""
RECIPE = """\
name: toys
model:
  source: toy
  tokenizer: bytes
  max_model_len: 256
  kv_bytes_per_token: 1024
  config: {model_type: fake, decode_s: 0.0002, prefill_token_s: 0.000001}
hardware: {device: cpu, name: any}
engine: {name: toy, kv_cache_memory_mib: 4}
workers: 1
profile:
  clock: wall
  batch_sizes: [1, 4, 16]
  input_lengths: [16, 64, 128]
  cached_lengths: [16, 64, 128]
  memory_lengths: [32, 64, 128]
  repeats: 1
  slices: 8
policy: {name: slice}
tune: {trials: 2, window_s: 3, draws: 0}
serve: {max_new_tokens: 64}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with profile.json and fit.json of the toy engine.

    An installed package there adds two engines.
    """
    folder = tmp_path_factory.mktemp("toys")
    monkeypatch = pytest.MonkeyPatch()
    site = folder / "site"
    (site / "toy").mkdir(parents=True)
    (site / "toy-1.0.dist-info").mkdir()
    (site / "toy-1.0.dist-info" / "METADATA").write_text("Name: toy\nVersion: 1.0\n")
    (site / "toy-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    for name, text in {"__init__": TRAITS, "engine": ENGINE, "server": SERVER}.items():
        (site / "toy" / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *sys.path[1:]]))
    monkeypatch.chdir(folder)
    Path("recipe.yaml").write_text(RECIPE)
    rows = [
        {"timestamp": 40 * k, "input_length": 20 + 7 * k % 60, "output_length": 8 + 5 * k % 40}
        for k in range(400)
    ]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert llmctl("profile", "recipe.yaml", "--out", "profile.json") == 0
    assert llmctl("fit", "profile.json", "--out", "fit.json") == 0
    yield folder
    monkeypatch.undo()
    for name in ("toy", "toyserver"):
        ENGINES.pop(name, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy"]:
        del sys.modules[name]


@pytest.mark.slow
def test_an_engine_of_another_package_is_tuned_rendered_and_served(folder: Path):
    files = ["recipe.yaml", "--fit", "fit.json"]
    tune = ["--trace", "trace.jsonl", "--policies", "own", "--jobs", "1", "--out", "tuning.json"]
    assert llmctl("tune", *files, *tune) == 0
    assert llmctl("render", *files, "--tuning", "tuning.json", "--out", "plan.json") == 0
    plan = read_file(Plan, folder / "plan.json")
    assert plan.fit.engine.engine == "toy"
    with Server(folder / "plan.json", "--port", "0") as server:
        body = {"prompt": "one two", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.slow
def test_policies_that_the_engine_cannot_run_are_refused_by_its_traits(folder: Path, capsys):
    options = ["--fit", "fit.json", "--policy", "past-future", "--out", "plan.json"]
    assert llmctl("render", "recipe.yaml", *options) == 2
    assert "'toy' runs static batches" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_of_another_package_is_started_and_checked(folder: Path, capsys):
    assert llmctl("render", "recipe.yaml", "--fit", "fit.json", "--out", "server.json") == 0
    plan = Path("server.json").read_text().replace('"toy"', '"toyserver"')
    Path("server.json").write_text(plan)
    capsys.readouterr()
    assert llmctl("serve", "server.json", "--port", "8123") == 0
    assert "http://127.0.0.1:8123/slice" in capsys.readouterr().out
    assert llmctl("serve", "server.json", "--status-page") == 2
    assert "engine toyserver does not support --status-page" in capsys.readouterr().err
    Path("server.yaml").write_text(RECIPE.replace("name: toy,", "name: toyserver,"))
    assert llmctl("doctor", "server.yaml", "--strict") == 3
    assert "no toys here" in capsys.readouterr().out


def test_an_unknown_engine_names_the_nearest():
    with pytest.raises(InputError, match="there is no engine 'vlm'") as refused:
        traits_of("vlm")
    assert "vllm" in refused.value.hint
    with pytest.raises(ValueError, match="there is no engine 'rebach'"):
        EngineSpec(name="rebach")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_a_backend(name: str):
    backend, traits = backend_of(name), traits_of(name)
    assert callable(backend.timed)
    assert isinstance(backend, Serves) == (traits.server and traits.started)
    assert bool(traits.load) != traits.server
    assert not isinstance(backend, Checks) or traits.server


@pytest.mark.slow
def test_the_package_that_runs_inside_vllm_loads_nothing_heavy():
    code = (
        "import sys, toolkit.backends.vllm.setup\n"
        "heavy = {'fastapi', 'uvicorn', 'torch', 'transformers', 'optuna', 'typer'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
