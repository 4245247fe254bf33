"""`llmctl serve` with engine vllm: vLLM's own server with the plan's flags, until its end."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm_server
import httpx
import psutil
import pytest
import samples
from commands import llmctl
from orders import changed
from said import says

from benchmarks.common.serving import Server
from toolkit.backends.vllm import backend
from toolkit.errors import EngineError, InputError
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.sched.policies import make_any, refuse_unservable
from toolkit.server.options import ServerOptions

pytestmark = pytest.mark.slow


def plan_for(
    folder: Path,
    policy: str = "past-future",
    source: str = "toy",
    version: str = "0.32.0+cpu",
    hang_s: float = 30.0,
    distribution: str = "vllm",
) -> Path:
    python = fake_vllm_server.install(folder, version, distribution)
    recipe = samples.recipe(
        engine={"name": "vllm", "vllm": {"python": python}},
        model={"source": source, "config": {}, "max_model_len": 512},
        workers=1,
        policy={"name": policy},
        serve={"hang_s": hang_s},
    )
    path = folder / "plan.json"
    write_file(samples.plan(recipe, samples.vllm_fit(), policy), path)
    return path


def start(plan: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "toolkit", "serve", str(plan), "--port", "0", "--json", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def served(plan: Path, *words: str) -> Server:
    return Server(plan, "--port", "0", *words)


def test_a_policy_of_ours_runs_inside_from_the_same_plan_until_a_signal(tmp_path: Path):
    asked = {"prompt": [1], "max_tokens": 3, "stream": False}
    with served(plan_for(tmp_path), "--shutdown-timeout", "7") as server:
        words = httpx.get(f"{server.url}/flags").json()
        answer = httpx.post(f"{server.url}/v1/completions", json=asked)
        assert (server.end(), server.ready["policy"]) == (0, "past-future")
    assert answer.json()["usage"]["completion_tokens"] == 3
    scheduler = "--scheduler-cls toolkit.backends.vllm.scheduler.LlmctlScheduler"
    assert f"{scheduler} --shutdown-timeout 7" in " ".join(words)
    assert "INFO: ready" in server.said
    assert server.said.splitlines()[-1].startswith("ended; requests finished: ")


def refused(capfd: pytest.CaptureFixture[str], plan: Path, *words: str, code: int = 2) -> str:
    """Why `serve` ends, in this process."""
    capfd.readouterr()
    assert llmctl("serve", plan, "--port", "0", "--json", *words) == code
    return capfd.readouterr().err


def test_a_log_of_passes_needs_their_law(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    err = refused(capfd, plan_for(tmp_path, "vllm"), "--pass-log", str(tmp_path / "log"))
    assert says(err, "--pass-log")


def left_of(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that do not end; they are killed."""
    assert len(processes) == 3  # with the watcher
    left = psutil.wait_procs(processes, timeout=60)[1]
    for process in left:
        process.kill()
    return left


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("engine", signal.SIGKILL),
        ("engine-loads", signal.SIGKILL),
        ("engine-loads", signal.SIGTERM),
    ],
)
def test_nothing_of_vllm_is_left_when_llmctl_ends_killed_or_not(
    tmp_path: Path, source: str, number: signal.Signals
):
    with start(plan_for(tmp_path, source=source), "--shutdown-timeout", "1") as server:
        assert server.stdout is not None
        assert server.stderr is not None
        if source == "engine":
            assert server.stdout.readline()
        assert next(line for line in server.stderr if "INFO: engine" in line)
        processes = psutil.Process(server.pid).children(recursive=True)
        server.send_signal(number)
        assert left_of(processes) == []
        _, said = server.communicate(timeout=60)
    assert server.returncode == (0 if number is signal.SIGTERM else -number)
    early = source == "engine-loads" and number is signal.SIGTERM
    assert ("stopped by a signal" in said) is early


def test_a_signal_before_vllm_starts_ends_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object) -> None:
        try:  # as libraries do around their imports
            signal.raise_signal(signal.SIGTERM)
        except Exception as error:
            raise RuntimeError("cannot be imported") from error

    monkeypatch.setattr(backend, "command_of", interrupted)
    plan = read_file(Plan, plan_for(tmp_path))
    options = ServerOptions(model="toy")
    before = signal.getsignal(signal.SIGTERM)
    assert backend.VllmBackend().launch(plan, options, lambda url: pytest.fail(url)) == {}
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_nothing_of_vllm_is_left_when_llmctl_is_killed_and_its_server_cannot_end_itself(
    tmp_path: Path, number: signal.Signals
):
    with start(plan_for(tmp_path, source="engine"), "--shutdown-timeout", "0") as server:
        assert server.stdout is not None
        assert server.stdout.readline()
        processes = psutil.Process(server.pid).children(recursive=True)
        server.kill()
        processes[0].send_signal(number)
        assert left_of(processes) == []
        server.communicate(timeout=60)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--request-log", "x"], ("vllm", "--request-log")),
        (["--host", "0.0.0.0"], ("0.0.0.0", "API key")),
    ],
)
def test_options_that_vllm_lacks_are_refused(
    tmp_path: Path, words: list[str], named: tuple[str, ...], capfd: pytest.CaptureFixture[str]
):
    assert says(refused(capfd, plan_for(tmp_path), *words), *named)


def test_a_plan_fitted_elsewhere_is_refused_unless_forced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    path = plan_for(tmp_path, source="dies")
    plan = read_file(Plan, path)
    write_file(changed(plan, fit__engine__engine_version="0.31.9"), path)
    assert says(refused(capfd, path), "0.31.9", "0.32.0")
    assert "the fake dies" in refused(capfd, path, "--force", code=EngineError.exit_code)


@pytest.mark.parametrize("policy", ["slice", "sequence", "baton", "srpt-oracle"])
def test_policies_that_vllm_cannot_host_are_refused(policy: str):
    with pytest.raises(InputError, match=policy):
        refuse_unservable(make_any(policy, {}), "vllm")


class Child:
    """Stands for vLLM's process, which does not end by itself. It is healthy `healthy` times."""

    def __init__(self, healthy: float) -> None:
        self.asked = 0
        self.killed = False
        self._healthy = healthy

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.001)

    def healthy(self) -> bool:
        self.asked += 1
        return self.asked <= self._healthy

    def kill(self) -> None:
        self.killed = True


def plan_that_hangs(hang_s: float) -> Any:
    return SimpleNamespace(recipe=SimpleNamespace(serve=SimpleNamespace(hang_s=hang_s)))


def test_a_server_that_answers_no_health_check_ends_llmctl_with_an_error(monkeypatch):
    monkeypatch.setattr(backend, "ASK_EVERY_S", 0.0)
    server = Child(healthy=2)
    plan = plan_that_hangs(0.01)
    options = ServerOptions(model="toy", timeout_s=0.0, say=print)
    watch = backend.EngineWatch(plan, options, "http://h")  # not started
    with pytest.raises(EngineError, match=r"/health.*0\.01"):
        backend._serve(server, plan, options, backend._Signals(), watch)  # type: ignore[arg-type]
    assert server.killed
    assert server.asked > 3


@pytest.mark.parametrize(
    ("pages", "tokens", "asked", "hangs"),
    [
        ("aaa a", [False], 0, "vLLM generated no token for 1.5 s when asked"),
        ("aaa b", [False], 0, ""),  # only slow: the token waits behind many requests
        ("aaa b", [True], 1, ""),
        ("abcdef", [], 0, ""),
        ("aaa ", [False], 0, "vLLM generated no token for 1.5 s when asked"),  # no page at all
    ],
)
def test_an_engine_hangs_if_its_figures_stand_still_and_no_token_comes(
    monkeypatch: pytest.MonkeyPatch, pages: str, tokens: list[bool], asked: int, hangs: str
) -> None:
    watch = backend.EngineWatch(
        plan_that_hangs(1.5), ServerOptions(model="toy"), "http://h"
    )  # not started
    found = iter(pages.replace(" ", ""))
    given = iter(tokens)

    def figures(url: str) -> str:
        page = next(found, "")
        if not page:
            watch._ended.set()
        return page

    def generates(*order: object) -> bool:
        assert order == ("http://h", "toy", 1.5, "")
        return next(given)

    monkeypatch.setattr(backend, "ASK_EVERY_S", 0.0)
    monkeypatch.setattr(backend.alive, "figures", figures)
    monkeypatch.setattr(backend.alive, "generates", generates)
    clock = count().__next__  # a second between two looks
    monkeypatch.setattr(backend, "time", SimpleNamespace(monotonic=clock))
    watch._watch()
    assert (watch.asked, watch.hangs) == (asked, hangs)
    assert list(given) == []


def test_a_server_with_an_engine_that_hangs_is_ended_though_it_answers_health(tmp_path: Path):
    plan = plan_for(tmp_path, source="engine", hang_s=0.5)
    with start(plan) as server:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["url"].startswith("http")
        processes = psutil.Process(server.pid).children(recursive=True)
        processes[0].send_signal(signal.SIGUSR1)
        _, said = server.communicate(timeout=60)
        assert left_of(processes) == []
    assert server.returncode == 3
    assert says(said, "0.5", "serve.hang_s")
