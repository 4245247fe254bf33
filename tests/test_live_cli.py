"""`llmctl set`, `fit --from-log` and the refusals of `tune --live` and `serve --live`."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import commands
import pass_logs
import pytest
import samples
from said import says
from test_live_control import KEY, scheduler

from toolkit.backends.vllm import control as module
from toolkit.backends.vllm.control import EngineControl
from toolkit.backends.vllm.knobs import LiveSettings
from toolkit.deploy.plan import make_plan
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, write_file


@pytest.fixture
def server(monkeypatch):
    """The control of a fake scheduler over HTTP; answers as `Control` does. `lacks` it: 404."""
    monkeypatch.setattr(module, "_show", lambda values, changes: None)
    engine = EngineControl(LiveSettings(scheduler()))

    class Handler(BaseHTTPRequestHandler):
        lacks = False

        def answer(self, fields):
            status = 200
            found = {"error": "no", "hint": ""}
            if self.lacks:
                status = 404
            elif self.headers["authorization"] != f"Bearer {KEY}":
                status = 401
            else:
                found = engine.handle(fields)
                status = found.pop("status", 200)
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer({})

        def do_POST(self):
            self.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def log_message(self, *_):
            pass

    one = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=one.serve_forever, args=(0.001,), daemon=True).start()
    one.engine = engine
    one.handler = Handler
    one.url = f"http://127.0.0.1:{one.server_port}"
    yield one
    one.shutdown()
    one.server_close()


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("LLMCTL_CONTROL_KEY", raising=False)


def llmctl(capsys, *words: object) -> tuple[int, str, str]:
    return (commands.llmctl(*words), *capsys.readouterr())


def test_set_shows_and_changes_settings(capsys, server, monkeypatch):
    monkeypatch.setenv("LLMCTL_CONTROL_KEY", KEY)
    where = ("--url", server.url)
    code, printed, _ = llmctl(capsys, "set", *where)
    assert code == 0
    assert says(printed, "max_num_seqs", "16")
    code, printed, noted = llmctl(
        capsys, "set", "max_num_seqs=4", "watermark=0.1", *where, "--json"
    )
    assert (code, json.loads(printed)["changed"]) == (0, {"max_num_seqs": 4, "watermark": 0.1})
    assert says(noted, "max_num_seqs=4")
    assert server.engine._live.values()["max_num_seqs"] == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["max_num_seqs=99"], "16"),
        (["block_size=8"], "restart"),
        (["max_num_seqs"], "KEY=VALUE"),
    ],
)
def test_wrong_values_are_one_line_and_change_nothing(capsys, server, monkeypatch, words, said):
    monkeypatch.setenv("LLMCTL_CONTROL_KEY", KEY)
    before = server.engine._live.values()
    code, _, noted = llmctl(capsys, "set", *words, "--url", server.url)
    assert code == 2
    assert says(noted, said)
    assert server.engine._live.values() == before


def test_a_missing_key_another_server_and_no_server_are_said(capsys, server, monkeypatch):
    code, _, noted = llmctl(capsys, "set", "max_num_seqs=4", "--url", server.url)
    assert (code, says(noted, "LLMCTL_CONTROL_KEY")) == (2, True)
    server.handler.lacks = True
    with monkeypatch.context() as keyed:
        keyed.setenv("LLMCTL_CONTROL_KEY", KEY)
        code, _, noted = llmctl(capsys, "set", "--url", server.url)
    assert (code, says(noted, "--live")) == (2, True)
    code, _, _ = llmctl(capsys, "set", "--url", "http://127.0.0.1:9")
    assert code == 2


@pytest.mark.slow
def test_a_fit_from_a_log_is_a_fit(capsys, tmp_path):
    light = pass_logs.requests(60, 4.0, seed=1)
    last_s = light[-1][0]
    heavy = [(last_s + at_s, *rest) for at_s, *rest in pass_logs.requests(300, 60.0, seed=2)]
    pass_logs.write(tmp_path / "passes.jsonl", pass_logs.passes([*light, *heavy]))
    words = ["--from-log", tmp_path / "passes.jsonl", "--recipe", "tiny-llama-vllm"]
    code, _, _ = llmctl(capsys, "fit", *words, "--out", tmp_path / "fit.json")
    assert code == 0
    fit = read_file(Fit, tmp_path / "fit.json")
    assert fit.steps is not None
    assert fit.prefill.error == fit.steps.error


def test_fit_takes_a_profile_or_a_log(capsys, tmp_path):
    log = tmp_path / "passes.jsonl"
    pass_logs.write(log, [])
    assert llmctl(capsys, "fit")[0] == 2
    assert llmctl(capsys, "fit", "--from-log", log)[0] == 2
    assert llmctl(capsys, "fit", log, "--from-log", log, "--recipe", "tiny-llama-vllm")[0] == 2
    code, _, noted = llmctl(capsys, "fit", "--from-log", log, "--recipe", "tiny-llama-vllm")
    assert (code, says(noted, "200")) == (2, True)
    assert llmctl(capsys, "fit", "--from-log", log, "--recipe", "tiny-llama-cpu")[0] == 2


def test_what_is_not_live_is_refused(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    write_file(make_plan(samples.recipe(), samples.fit(), None, {}), plan)
    assert llmctl(capsys, "tune", plan, "--live", "http://127.0.0.1:9")[0] == 2
    assert llmctl(capsys, "tune", plan, "--live", "here", "--trials", "9")[0] == 2
