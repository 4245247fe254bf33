"""`llmctl stop`: shut a server down, wait for its requests, and print how they ended."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import emit, note
from toolkit.cli.status import KeyOption, alive

if TYPE_CHECKING:
    from toolkit.deploy.running import Running

POLL_S = 0.05


def command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="The server's name in `llmctl status`; may be left out where one runs.",
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Stop all servers that run on this machine.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.0, help="Wait this many seconds for the requests; nothing is killed."),
    ] = 600.0,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Shut down servers that were started on this machine: SIGTERM, then wait for their running
    requests.

    A server of a service manager is stopped by that manager. Exit code 1 where a server still
    drains after --timeout.
    """
    ended = [_stop(server, timeout, api_key) for server in _chosen(name, every)]
    emit(as_json, {"stopped": ended}, lambda: print("\n".join(str(one["said"]) for one in ended)))


def _chosen(name: str | None, every: bool) -> list[Running]:
    from toolkit.errors import InputError, nearest

    running = alive()
    names = [server.name for server in running]
    if name is not None:
        if name not in names:
            hint = nearest(name, names) if names else "llmctl status lists the running servers"
            raise InputError(f"no server '{name}' runs on this machine", hint)
        return [server for server in running if server.name == name]
    if not running:
        raise InputError("no server runs on this machine", "llmctl serve starts one")
    if len(running) > 1 and not every:
        raise InputError(
            f"{len(running)} servers run on this machine: {', '.join(names)}",
            "name one, or give --all",
        )
    return running


def _stop(server: Running, timeout: float, api_key: str) -> dict[str, object]:
    from toolkit.deploy.running import forget

    if server.pid is None:
        return _stop_managed(server)
    before = _requests(server, api_key)
    ended = _end(server, server.pid, timeout)
    forget(server)
    done = {reason: count - before.get(reason, 0) for reason, count in ended.items()}
    finished = done.get("stop", 0) + done.get("length", 0)
    lost = {
        reason: count
        for reason, count in done.items()
        if count and reason not in ("stop", "length")
    }
    others = "".join(f", {count} {reason}" for reason, count in lost.items())
    # without the key the earlier counts are unknown
    period = "" if before else " since it started"
    said = f"{server.name} has ended; requests finished: {finished}{others}{period}"
    return {"name": server.name, "finished": finished, "others": lost, "said": said}


def _requests(server: Running, api_key: str) -> dict[str, int]:
    """How requests have ended up to now, by reason; {} where /metrics is not readable."""
    from toolkit.endpoints.target import RUNNING, WAITING, look

    seen = look(server.url, api_key, Path(server.certificate) if server.certificate else None)
    inside = (seen.total(*RUNNING) or 0) + (seen.total(*WAITING) or 0)
    note(f"stopping {server.name}" + (f", requests in it: {inside:.0f}" if seen.metrics else ""))
    return seen.ended


def _end(server: Running, pid: int, timeout: float) -> dict[str, int]:
    """Send SIGTERM; how all requests of the server ended. `LlmctlError` where it takes too long, or
    was killed otherwise.
    """
    import os
    import signal
    import time

    from toolkit.deploy.running import recall
    from toolkit.errors import LlmctlError

    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + timeout
    while server.alive:
        if time.monotonic() > until:
            raise LlmctlError(
                f"{server.name} still drains after {timeout:g} s",
                "a second llmctl stop ends it at once",
            )
        time.sleep(POLL_S)
    ended = recall(server.name).ended
    if ended is None:
        raise LlmctlError(f"{server.name} is gone without an orderly shutdown", "see its log")
    return ended


def _stop_managed(server: Running) -> dict[str, object]:
    from toolkit.deploy.render import read_manifest
    from toolkit.deploy.running import forget, stop
    from toolkit.errors import InputError

    folder = Path(server.folder or "")
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(
            f"{folder}: the rendered files are gone", f"stop it with {server.target} itself"
        )
    stop(folder, manifest)
    forget(server)
    return {"name": server.name, "said": f"{server.name} has been stopped by {server.target}"}
