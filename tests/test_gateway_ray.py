"""`llmctl serve --ray` of a plan of servers: they run on a Ray cluster, behind the front."""

import json
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import test_gateway_serve
import test_serve_vllm
from commands import llmctl
from said import says

from benchmarks.common import standin_vllm
from benchmarks.common.standin import MODEL, answer_of
from toolkit.cluster.servers import ServerSeat
from toolkit.errors import EngineError, ForeignError
from toolkit.files.io import file_text, read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import VllmSpec
from toolkit.gateway.on_ray import DistantOrder, start_there

BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 200, "ignore_eos": True, "stream": True}
LOOPBACK = ServerSeat("127.0.0.1", (), ())


def plan_for(folder: Path, workers: int, python: str) -> Path:
    """A plan of servers that generate as `answer_of`, with policy `vllm`."""
    path = test_gateway_serve.plan_for(folder, workers)
    plan = read_file(Plan, path)
    engine = plan.recipe.engine.model_copy(update={"vllm": VllmSpec(python=python)})
    recipe = plan.recipe.model_copy(update={"engine": engine})
    policy = plan.policy.model_copy(update={"name": "vllm", "parameters": {"max_num_seqs": 7}})
    write_file(plan.model_copy(update={"recipe": recipe, "policy": policy}), path)
    return path


def processes(part: str) -> list[psutil.Process]:
    """All processes with a word of their command that contains `part`."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(part in word for word in process.info["cmdline"] or [])
    ]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def shown(url: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = httpx.get(f"{url}/replicas").json()["replicas"]
    return found


@pytest.mark.slow
def test_an_actor_killed_in_a_stream_costs_no_token_and_comes_back(tmp_path: Path):
    python = standin_vllm.install(tmp_path / "python", token_s=0.02)
    words = ["--served-model-name", MODEL, "--ray", "local"]
    with test_serve_vllm.served(plan_for(tmp_path / "plan", 2, python), *words) as server:
        url = server.url
        before = {each["url"] for each in shown(url)}
        assert all(str(each).startswith("http://127.0.0.1:") for each in before)
        text = ""
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY, timeout=60) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["text"]
                if len(text) == 20:
                    (busy,) = [each["url"] for each in shown(url) if each["running"]]
                    kill_actor_of(str(busy))
        assert text == answer_of(BODY)
        until(lambda: len({each["url"] for each in shown(url) if each["state"] == "up"}) == 2)
        assert len(before & {each["url"] for each in shown(url)}) == 1
        assert server.end() == 0, server.said
    assert says(server.said, "2 servers of vllm")
    assert "is started again" in server.said
    assert processes(str(tmp_path)) == []


def kill_actor_of(url: str) -> None:
    (child,) = [
        one for one in processes(url.rpartition(":")[2]) if "vllm.child" in one.cmdline()[2]
    ]
    parent = child.parent()
    assert parent is not None
    assert parent.cmdline()[0].startswith("ray::ServerActor")
    parent.kill()


@pytest.mark.slow
def test_a_machine_without_the_engine_is_named(tmp_path: Path):
    with test_serve_vllm.start(plan_for(tmp_path, 1, "/no/python"), "--ray", "local") as server:
        _, said = server.communicate(timeout=60)
    assert server.returncode == 3
    line = " ".join(said.split())
    assert says(line, "1 server of vllm")
    assert "error: on " in line
    assert says(line, "/no/python", "engine.vllm.python", "LLMCTL_VLLM_PYTHON")


def order_of(path: Path, *, accepts_foreign: bool = False) -> DistantOrder:
    text = file_text(read_file(Plan, path))
    return DistantOrder(text, "m", "key", 5.0, accepts_foreign)


@pytest.mark.slow
def test_what_is_sent_to_a_machine_survives_and_starts_a_server_there(tmp_path: Path):
    python = standin_vllm.install(tmp_path / "python")
    order = order_of(plan_for(tmp_path / "plan", 3, python))
    start = pickle.loads(pickle.dumps(partial(start_there, order)))
    (tmp_path / "server").mkdir()
    server, warnings = start(LOOPBACK, tmp_path / "server")
    try:
        server.wait_until_ready()
        found = httpx.get(f"{server.url}/metrics").text
    finally:
        server.stop()
    assert (found.split(), warnings) == (["standin:max_num_seqs", "7"], [])


@pytest.mark.slow
def test_another_version_is_refused_there_and_with_force_a_warning(tmp_path: Path):
    python = standin_vllm.install(tmp_path / "python", version="0.32.9")
    path = plan_for(tmp_path / "plan", 1, python)
    (tmp_path / "server").mkdir()
    with pytest.raises(ForeignError, match=r"0\.32\.9"):
        start_there(order_of(path), LOOPBACK, tmp_path / "server")
    server, warnings = start_there(
        order_of(path, accepts_foreign=True), LOOPBACK, tmp_path / "server"
    )
    server.stop()
    assert len(warnings) == 1


@pytest.mark.slow
def test_cpus_that_a_machine_lacks_are_an_error(tmp_path: Path):
    python = standin_vllm.install(tmp_path / "python")
    path = plan_for(tmp_path / "plan", 1, python)
    plan = read_file(Plan, path)
    engine = plan.recipe.engine.model_copy(update={"threads": 1})
    recipe = plan.recipe.model_copy(update={"engine": engine})
    write_file(plan.model_copy(update={"recipe": recipe}), path)
    (tmp_path / "server").mkdir()
    with pytest.raises(EngineError, match="999999"):
        start_there(
            order_of(path), ServerSeat("127.0.0.1", [999999], [999999]), tmp_path / "server"
        )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--ray", "auto", "--replica", "http://127.0.0.1:9"], ("--ray auto", "--replica")),
        (["--ray", "nowhere"], ("'local'", "'auto'", "HOST:PORT")),
    ],
)
def test_wrong_input_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: tuple[str, ...]
):
    path = plan_for(tmp_path, 2, "python3")
    assert llmctl("serve", path, "--port", "0", *words) == 2
    assert says(capsys.readouterr().err, *named)


@pytest.mark.slow
def test_a_fleet_needs_a_cluster_with_machines_of_each_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = test_gateway_serve.fleet_for(tmp_path)
    assert llmctl("serve", path, "--port", "0", "--ray", "local") == 2
    assert says(" ".join(capsys.readouterr().err.split()), "--ray local", "2")
