"""A server tells systemd once that it is ready."""

import socket
from pathlib import Path

import pytest

from benchmarks.common.serving import Server, fake_plan
from toolkit.server.process import tell_ready


def test_without_a_manager_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    tell_ready()


@pytest.mark.slow
def test_a_server_tells_its_manager_that_it_is_ready(tmp_path: Path) -> None:
    fake_plan(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        with Server(tmp_path / "plan.json", **environment) as server:
            assert manager.recv(64) == b"READY=1"
            server.end()
