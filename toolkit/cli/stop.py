"""`llmctl stop`: end a server in order, wait until it has drained, and say what became of its
requests.
"""

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
        typer.Argument(metavar="[NAME]", help="As `llmctl status` shows it; default: the one."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All servers that run here.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for the drain; nothing is killed.")
    ] = 600.0,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """End servers that were started here: SIGTERM, then wait while running requests finish.

    What a service manager runs is stopped by it. Exit code 1 where a server has not ended within
    --timeout.
    """
    ended = [_stop(server, timeout, api_key) for server in _chosen(name, every)]
    emit(as_json, {"stopped": ended}, lambda: print("\n".join(str(one["said"]) for one in ended)))


def _chosen(name: str | None, every: bool) -> list[Running]:
    from toolkit.errors import InputError, nearest

    running = alive()
    names = [server.name for server in running]
    if name is not None:
        if name not in names:
            hint = nearest(name, names) if names else "llmctl status lists those that run"
            raise InputError(f"no server '{name}' runs here", hint)
        return [server for server in running if server.name == name]
    if not running:
        raise InputError("no server runs here", "llmctl serve starts one")
    if len(running) > 1 and not every:
        raise InputError(
            f"{len(running)} servers run here: {', '.join(names)}", "name one, or give --all"
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
    told = "".join(f", {count} {reason}" for reason, count in lost.items())
    known = "" if before else " since it started"  # without the key, what ended before is not known
    said = f"{server.name} has ended; requests finished: {finished}{told}{known}"
    return {"name": server.name, "finished": finished, "others": lost, "said": said}


def _requests(server: Running, api_key: str) -> dict[str, int]:
    """How requests have ended up to now, by reason; {} where /metrics does not say."""
    from toolkit.endpoints.target import RUNNING, WAITING, look

    seen = look(server.url, api_key, Path(server.certificate) if server.certificate else None)
    inside = (seen.total(*RUNNING) or 0) + (seen.total(*WAITING) or 0)
    note(f"stopping {server.name}" + (f", requests in it: {inside:.0f}" if seen.metrics else ""))
    return seen.ended


def _end(server: Running, pid: int, timeout: float) -> dict[str, int]:
    """SIGTERM, and how all its requests ended. `LlmctlError` where it takes too long, or was killed
    by another.
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
        raise LlmctlError(f"{server.name} is gone and did not end in order", "its log says why")
    return ended


def _stop_managed(server: Running) -> dict[str, object]:
    from toolkit.deploy.folder import read_manifest
    from toolkit.deploy.running import forget, stop
    from toolkit.errors import InputError

    folder = Path(server.folder or "")
    manifest = read_manifest(folder)
    if manifest is None:
        raise InputError(
            f"{folder}: what was rendered is gone", f"stop it with {server.target} itself"
        )
    stop(folder, manifest)
    forget(server)
    return {"name": server.name, "said": f"{server.name} has been stopped by {server.target}"}
