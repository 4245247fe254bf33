"""Running servers: their records, `status`, `stop`, and missing service managers."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import orders
import psutil
import pytest
from commands import llmctl, printed, ran, refused
from said import says

from benchmarks.common.serving import Server, fake_plan
from toolkit.deploy import running as managers
from toolkit.deploy.running import (
    Running,
    folder_of_states,
    name_of,
    recall,
    remember,
    this_process,
)
from toolkit.endpoints.target import RUNNING, WAITING, Look, Metric
from toolkit.errors import InputError
from toolkit.files.io import write_file

CANARY = "sk-canary-5d1e88"


@pytest.fixture
def states(tmp_path, monkeypatch) -> Path:
    """An empty folder of states."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return folder_of_states()


@dataclass(frozen=True)
class Keyed:
    """A server with a key in a file, started as a service manager starts it."""

    server: Server
    told: bytes  # the manager
    state: str  # the folder of states' parent


@pytest.fixture(scope="module")
def keyed(tmp_path_factory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    fake_plan(folder)
    (folder / "key").write_text(f"{CANARY}\n")
    around = {"XDG_STATE_HOME": str(folder / "state"), "NOTIFY_SOCKET": str(folder / "notify")}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(around["NOTIFY_SOCKET"])
        manager.settimeout(60)
        with Server(
            folder / "plan.json", "--api-key-file", str(folder / "key"), **around
        ) as running:
            yield Keyed(running, manager.recv(64), around["XDG_STATE_HOME"])


def gone(pid: int = 1) -> Running:
    """A server with a process number that another process has now."""
    return Running(
        name="old-8000", target="local", url="http://127.0.0.1:9", model="m", workers=1,
        policy="slice", pid=pid,
        started_s=1.0,
    )  # fmt: skip


@pytest.mark.slow
def test_status_shows_running_servers(keyed, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", keyed.state)
    (one,) = printed(capsys, "status --api-key", CANARY)["servers"]
    assert (one["name"], one["state"]) == (name_of("test", keyed.server.url), "ready")
    assert (one["running"], one["waiting"], one["kv_usage_percent"]) == (0, 0, 0)
    out, err = ran(capsys, "status")
    assert keyed.server.url[-5:] in out
    assert max(map(len, out.splitlines())) <= 80
    assert "/metrics needs the key" in err


@pytest.mark.slow
def test_the_key_is_required_and_stored_nowhere(keyed):
    url = f"{keyed.server.url}/v1/models"
    assert httpx.get(url).status_code == 401
    assert httpx.get(url, headers={"authorization": f"Bearer {CANARY}"}).status_code == 200
    written = [path.read_text() for path in Path(keyed.state).rglob("*.json")]
    assert len(written) == 1
    assert CANARY not in written[0] + json.dumps(keyed.server.ready)


@pytest.mark.slow
def test_a_service_manager_is_told_when_it_is_ready(keyed):
    assert keyed.told == b"READY=1"
    assert all("NOTIFY_SOCKET" not in worker.environ() for worker in keyed.server.workers())


@pytest.mark.slow
def test_stop_waits_for_the_drain_and_counts_it(states, tmp_path, capsys):
    def ask() -> None:
        body = {"model": "toy", "prompt": "a", "max_tokens": 100}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

    fake_plan(tmp_path, eos_one_in=0, decode_s=0.004)
    with Server(tmp_path / "plan.json", "--served-model-name", "toy") as server:
        ask()
        asking = threading.Thread(target=ask)
        asking.start()
        runs = 'llmctl_requests_running{model_name="toy"} 1.0'
        while runs not in httpx.get(f"{server.url}/metrics").text:
            pass
        out, err = ran(capsys, "stop")
        asking.join()
    name = name_of("test", server.url)
    assert err == f"stopping {name}, requests in it: 1\n"
    assert says(out, name, "1")
    assert llmctl("status") == 1


@pytest.mark.slow
def test_a_killed_server_is_noticed(states, capsys):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started_s = psutil.Process(process.pid).create_time()
        server = gone(process.pid).model_copy(update={"started_s": started_s})
        remember(server)
        assert server.alive
        process.kill()
    out, err = ran(capsys, "status", code=1)
    assert "no server runs" in out
    assert "record is removed" in err
    assert not list(states.glob("*.json"))


def test_a_step_of_the_clock_does_not_hide_a_live_server(monkeypatch):
    server = this_process("mine-8000", "local", "http://127.0.0.1:9", "m", 1, "slice")
    create_time = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + 3600.0)
    assert server.alive
    assert not server.model_copy(update={"started": "another boot 17"}).alive


@pytest.mark.usefixtures("states")
def test_a_reused_process_number_is_not_stopped(capsys):
    remember(gone(os.getpid()))
    err = ran(capsys, "stop", code=2).err
    assert "old-8000" in err
    assert says(err, "llmctl serve")


@pytest.mark.usefixtures("states")
def test_several_servers_are_stopped_only_with_all(capsys):
    for name in ("a-1", "b-2"):
        managed = {"name": name, "pid": None, "target": "systemd", "folder": "/nowhere"}
        remember(gone().model_copy(update=managed))
    assert says(refused(capsys, "stop")[0], "2", "a-1", "b-2")
    assert says(refused(capsys, "stop c-3")[0], "'c-3'")


@pytest.mark.usefixtures("states")
def test_status_of_a_url_without_a_server(capsys):
    ended = ran(capsys, "status --url http://127.0.0.1:9 --json", code=1)
    assert json.loads(ended.out)["servers"][0]["state"] == "no answer"


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("name", ["../x", "", "a/b", "x\n"])
def test_names_of_servers_stay_in_their_folder(name):
    with pytest.raises(InputError, match=f"'{name}'"):
        recall(name)


@pytest.mark.parametrize("content", ["", "two words\n", "a\nb\n", "\x00\xff"])
def test_a_file_without_one_key_is_refused(content, tmp_path, capsys):
    write_file(orders.plan(tmp_path), tmp_path / "plan.json")
    (tmp_path / "key").write_text(content, encoding="latin-1")
    said = refused(capsys, "serve", tmp_path / "plan.json", "--api-key-file", tmp_path / "key")
    assert "key" in said[0]


@pytest.fixture
def rendered(tmp_path, monkeypatch) -> Path:
    """plan.json, rendered to folders that are named like their targets."""
    monkeypatch.chdir(tmp_path)
    write_file(orders.plan(tmp_path), "plan.json")
    for target in ("systemd", "compose", "kubernetes"):
        assert llmctl("render plan.json --target", target) == 0
    return tmp_path


@pytest.mark.usefixtures("rendered", "states")
def test_a_missing_service_manager_is_one_line_and_a_command(monkeypatch, capsys):
    monkeypatch.setattr(managers.shutil, "which", lambda _: None)
    for target, program in (("systemd", "systemd"), ("compose", "docker")):
        error, hint = ran(capsys, "serve", target, code=3).said
        assert says(error, program)
        assert says(hint, f"apt-get install {program}")


@pytest.mark.usefixtures("rendered", "states")
def test_a_target_that_serve_cannot_start_names_the_command_that_can(capsys):
    for words, said in (
        ("kubernetes", "kubectl apply -k kubernetes"),
        ("plan.json --target compose", "llmctl render PLAN.json --target compose"),
        ("plan.json --target locla", "'local'"),
        (".", "llmctl render PLAN.json --target TARGET"),
    ):
        assert said in refused(capsys, f"serve {words}")[1]


@pytest.mark.slow
def test_managers_are_asked_in_this_order(rendered, states, monkeypatch):
    """A fake docker writes down what it is asked."""
    fake = rendered / "bin" / "docker"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >> {rendered}/asked\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    assert llmctl("serve compose") == 0
    assert [recall(path.stem).name for path in states.glob("*.json")] == ["test-8000"]
    assert llmctl("stop") == 0
    asked = (rendered / "asked").read_text().splitlines()
    assert asked[-4:] == [
        "compose --project-directory compose up --detach --wait",
        "compose version",
        "info",
        f"compose --project-directory {rendered}/compose stop",
    ]
    assert not list(states.glob("*.json"))


@pytest.mark.parametrize("url", ["x", "", "ftp://x", "http://"])
def test_status_wants_the_url_of_a_server(url, capsys):
    assert says(refused(capsys, "status --url", url)[0], f"'{url}'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "loading\\nerror: plan.json: no\\nhint: a\\nerror: later",
            ("{unit}", "plan.json: no"),
        ),
        (
            "{unit}: Failed to set up credentials: No such file",
            ("{unit}", "Failed to set up credentials: No such"),
        ),
        ("", ("{unit}", "Job failed")),
    ],
)
def test_a_unit_that_does_not_start_is_an_error_with_its_own_message(
    rendered, monkeypatch, capsys, log, said
):
    """A fake systemctl that cannot start, and a fake journalctl."""
    unit = "llmctl-test.service"
    programs = rendered / "bin"
    programs.mkdir()
    for name, script in (
        (
            "systemctl",
            f'echo "$@" >> {rendered}/asked\n[ $1 != start ] || {{ echo Job failed. >&2; exit 1; '
            f"}}",
        ),
        ("journalctl", f"printf '{log.format(unit=unit)}\\n'"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(managers, "BOOTED", rendered)
    ended = ran(capsys, "serve systemd", code=3)
    assert says(ended.err, *(word.format(unit=unit) for word in said))
    link = f"link {rendered}/systemd/{unit}"
    assert (rendered / "asked").read_text().splitlines() == [link, f"start {unit}", f"stop {unit}"]


@pytest.mark.slow
def test_a_rendered_script_starts_a_server(states, tmp_path):
    """serve.sh, with a `llmctl` on the path that is this one; then bench.sh against it."""
    fake_plan(tmp_path)
    out = tmp_path / "out"
    assert llmctl("render --target local --out", out, tmp_path / "plan.json") == 0
    program = tmp_path / "bin" / "llmctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m toolkit "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    serve = [out / "serve.sh", "--port", "0", "--json", "--allow-end-after"]
    short = {"DURATION": "1", "RATE": "8", "MAX_ERROR": "1e9", "WARMUP": "0"}
    with subprocess.Popen(
        serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        url = json.loads(process.stdout.readline())["url"]
        checked = subprocess.run(
            [out / "bench.sh", "chat-small"],
            env=environment | short | {"LLMCTL_URL": url},
            capture_output=True,
            text=True,
        )
        process.terminate()
    assert checked.returncode == 0, checked.stderr
    assert json.loads((out / "bench.json").read_text())["predicted"]
    assert process.returncode == 0


def test_metrics_of_vllm_are_found_under_its_names():
    metrics = [
        Metric("vllm:num_requests_running", {"engine": "0"}, 3.0),
        Metric("vllm:request_success_total", {"finished_reason": "length"}, 7.0),
    ]
    seen = Look("ready", metrics)
    assert (seen.total(*RUNNING), seen.total(*WAITING), seen.ended) == (3.0, None, {"length": 7})
