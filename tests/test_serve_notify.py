"""Reports to systemd: ready once, then healthy as long as the event loop runs."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.serving import Server, fake_plan
from toolkit.server.process import Manager


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[socket.socket]:
    """The manager's end of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        yield manager


def test_a_report_of_health_reaches_the_manager(heard: socket.socket, tmp_path: Path) -> None:
    manager = Manager(str(tmp_path / "notify"), 1.0)
    manager.beat()
    manager.tell("that is all")
    assert [heard.recv(64) for _ in range(2)] == [b"WATCHDOG=1", b"that is all"]


def test_an_absent_manager_does_not_end_the_server(tmp_path: Path) -> None:
    Manager(str(tmp_path / "absent"), 1.0).beat()
    Manager().beat()


@pytest.mark.parametrize(
    ("process", "limit", "watchdog_s"),
    [
        ("", "3000000", 3.0),
        (str(os.getpid()), "500000", 0.5),
        ("1", "3000000", None),
        ("", "", None),
        ("", "soon", None),
    ],
    ids=["of any process", "of this process", "of another process", "no limit", "no number"],
)
def test_the_manager_is_read_and_removed_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, process: str, limit: str, watchdog_s: float | None
) -> None:
    names = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": limit, "WATCHDOG_PID": process}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    manager = Manager.take()
    assert (manager.address, manager.watchdog_s) == ("@x", pytest.approx(watchdog_s))
    assert not names.keys() & os.environ.keys()


@pytest.mark.slow
def test_a_server_reports_until_it_ends(heard: socket.socket, tmp_path: Path) -> None:
    fake_plan(tmp_path)
    environment = {
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "2000000",
    }  # few enough for the socket before it is read
    with Server(tmp_path / "plan.json", **environment) as server:
        said = {heard.recv(64)}
        while len(said) < 2:  # how often it is well before it is ready, is the machine's business
            said.add(heard.recv(64))
        server.end()
    assert said == {b"READY=1", b"WATCHDOG=1"}
