"""Adding an engine takes one folder and one line: a toy package runs through the whole workflow."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import httpx
import orders
import pytest
import samples
from commands import llmctl
from lean import verdict_only
from said import says

from benchmarks.common.serving import Server
from toolkit.backends import Serves, backend_of
from toolkit.backends.vllm import alive
from toolkit.backends.vllm.backend import VllmBackend
from toolkit.engine_traits import ENGINES, traits_of
from toolkit.errors import InputError
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import EngineSpec
from toolkit.files.tuning import Settings

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
    backend="toolkit.backends:LocalBackend",
    load="toy.engine:load",
    loads_model=False,
)
TOY_SERVER = EngineTraits(
    "toyserver", "answers", backend="toy.server:ToyServer", server=True, loads_model=False
)
"""
ENGINE = """\
import llmctl_fake as fake

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

    def launch(self, plan, options, on_ready):
        on_ready(f"http://{options.host}:{options.port}/{plan.settings.policy}")
        return {"stop": 3}

    def check(self, recipe):
        return [Check("engine", "missing", "no toys here", "buy some")]
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
tune: {trials: 2, window_s: 3}
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
        for k in range(200)
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
def test_another_packages_engine_is_tuned_rendered_and_served(folder: Path):
    files = ["recipe.yaml", "--fit", "fit.json"]
    tune = ["--trace", "trace.jsonl", "--policies", "own", "--jobs", "1", "--out", "tuning.json"]
    with verdict_only():
        assert llmctl("tune", *files, *tune) == 0
    assert llmctl("render", *files, "--tuning", "tuning.json", "--out", "plan.json") == 0
    plan = read_file(Plan, folder / "plan.json")
    assert plan.fit.engine.engine == "toy"
    with Server(folder / "plan.json", "--port", "0") as server:
        body = {"prompt": "one two", "max_tokens": 5, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.slow
def test_a_server_of_another_package_is_started_and_checked(folder: Path, capsys):
    assert llmctl("render", "recipe.yaml", "--fit", "fit.json", "--out", "server.json") == 0
    plan = Path("server.json").read_text().replace('"toy"', '"toyserver"')
    Path("server.json").write_text(plan)
    capsys.readouterr()
    assert llmctl("serve", "server.json", "--port", "8123") == 0
    assert "http://127.0.0.1:8123/slice" in capsys.readouterr().out
    assert llmctl("serve", "server.json", "--status-page") == 2
    assert says(capsys.readouterr().err, "--status-page")
    Path("server.yaml").write_text(RECIPE.replace("name: toy,", "name: toyserver,"))
    assert llmctl("doctor", "server.yaml", "--strict") == 3
    assert "no toys here" in capsys.readouterr().out


def test_an_unknown_engine_names_the_nearest():
    with pytest.raises(InputError, match="'vlm'") as refused:
        traits_of("vlm")
    assert "vllm" in refused.value.hint
    with pytest.raises(ValueError, match="'rebach'"):
        EngineSpec(name="rebach")


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_has_a_backend(name: str):
    backend = backend_of(name)
    traits = traits_of(name)
    assert callable(backend.timed)
    assert isinstance(backend, Serves) == (traits.server and traits.started)
    assert bool(traits.load) != traits.server
    assert callable(backend.check)


def test_the_settings_of_drafts_are_one_word(tmp_path: Path):
    """JSON has spaces."""
    engine = {"name": "vllm", "vllm": {"drafts": {"method": "ngram"}}}
    policy = Settings(policy="vllm", parameters={"num_speculative_tokens": 3})
    changes = orders.GPU | {"workers": 1, "engine": engine}
    plan = orders.plan(tmp_path, policy, samples.fit(workers=1), **changes)
    words = {flag[0]: flag[1:] for flag, _ in VllmBackend().described(plan, "toy").flags}
    (drafts,) = words["--speculative-config"]
    assert json.loads(drafts) == {"method": "ngram", "num_speculative_tokens": 3}


class Engine(BaseHTTPRequestHandler):
    """Stands for vLLM: its page is the next of `pages` (the last one stays; '': none), and a
    request for tokens is answered with status `gives`.
    """

    pages: ClassVar[list[str]] = []
    gives: ClassVar[int] = 200
    asked: ClassVar[list[dict[str, object]]] = []

    def do_GET(self) -> None:
        page = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        self.answer(200 if page else 404, page)

    def do_POST(self) -> None:
        self.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.answer(self.gives, "{}")

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def page(tokens: int) -> str:
    return f'vllm:generation_tokens_total{{engine="0"}} {tokens}.0\nhttp_requests_total {tokens}\n'


@pytest.mark.parametrize(
    ("known", "pages", "gives", "code", "kept", "asked"),
    [
        (None, [page(1)], 500, 0, page(1), False),  # the first look
        (page(1), [page(2)], 500, 0, page(2), False),
        (page(1), [page(1)], 200, 0, page(1), True),  # idle
        (page(1), [page(1)], 404, 0, page(1), True),  # it refuses to try
        (page(1), [page(1)], 500, 3, page(1), True),
        (page(1), [page(1), page(2)], 500, 0, page(2), True),  # the token waits behind others
        (page(1), [""], 500, 3, page(1), True),
        (None, [""], 500, 1, None, True),  # it loads
    ],
)
def test_a_probe_finds_an_engine_that_hangs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    known: str | None,
    pages: list[str],
    gives: int,
    code: int,
    kept: str | None,
    asked: bool,
) -> None:
    def line(text: str) -> str:
        return text.split("\n")[0]

    note = tmp_path / "note"
    killed = []
    if known is not None:
        note.write_text(line(known))
    engine = type("Served", (Engine,), {"pages": list(pages), "gives": gives, "asked": []})
    monkeypatch.setattr(os, "kill", lambda *what: killed.append(what))
    with HTTPServer(("127.0.0.1", 0), engine) as server:
        Thread(target=server.serve_forever, args=(0.001,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(sys, "argv", ["alive.py", url, "toy", "5", str(note), "end"])
        try:
            alive.main()
            found = 0
        except SystemExit as end:
            found = end.code
        server.shutdown()
    assert found == code
    assert killed == ([(-1, signal.SIGKILL)] if code == 3 else [])
    assert (note.read_text() if note.exists() else None) == (kept and line(kept))
    assert [one["max_tokens"] for one in engine.asked] == [1] * asked


def test_the_probe_runs_alone_in_any_python(tmp_path: Path) -> None:
    """vLLM's image has no llmctl."""
    imports = re.findall(r"^(?:from|import) (\w+)", Path(alive.__file__).read_text(), re.MULTILINE)
    assert set(imports) <= set(sys.stdlib_module_names)
