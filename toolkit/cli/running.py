"""`llmctl status` and `llmctl stop`: the servers that were started on this machine.

`stop` shuts a server down, waits for its requests, and prints how they ended.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import emit, note, table
from toolkit.errors import InputError, LlmctlError, nearest

if TYPE_CHECKING:
    from toolkit.deploy.running import Running

POLL_S = 0.05

KeyOption = Annotated[
    str,
    typer.Option("--api-key", envvar="LLMCTL_API_KEY", help="The API key of the servers."),
]


def status(
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url", help="Show the server at this URL, wherever it was started; repeatable."
        ),
    ] = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the servers that run on this machine: health, readiness, load, and their speed beside
    the prediction.

    Exit code 1 where no server runs, or one is not healthy.
    """
    from toolkit.endpoints.target import base_url

    if urls:
        servers = [_of(url, base_url(url), "", api_key) for url in urls]
    else:
        servers = [
            _of(one.name, one.url, one.target, api_key, one.certificate, one.breaks)
            for one in alive()
        ]

    def show() -> None:
        if not servers:
            print("no server runs on this machine")
            return
        columns = ["name", "<state", "<url", ">run", ">wait", ">KV %", ">actual/ predicted"]
        keys = ("state", "url", "running", "waiting", "kv_usage_percent", "actual_over_predicted")
        table(columns, [[one["name"], *(one[key] for key in keys)] for one in servers])

    emit(as_json, {"servers": servers}, show)
    for server in servers:
        if server["breaks"]:
            note(f"warning: the plan of {server['name']} is predicted to {server['breaks']}")
    if any(server["metrics"] is False for server in servers):
        note("'-' means that /metrics needs the key: set LLMCTL_API_KEY")
    if not servers or not all(one["state"] in ("ready", "not ready") for one in servers):
        raise typer.Exit(1)


def alive() -> list[Running]:
    """The servers that run. The records of others are removed, and crashes are noted."""
    from toolkit.deploy.running import forget, remembered

    running = []
    for server in remembered():
        if server.alive and server.ended is None:
            running.append(server)
            continue
        forget(server)
        if server.ended is None:
            gone = f"{server.name} (process {server.pid}) is gone without an orderly shutdown"
            note(f"{gone}; its record is removed")
    return running


def _of(
    name: str, url: str, target: str, api_key: str, certificate: str | None = None, breaks: str = ""
) -> dict[str, Any]:
    from toolkit.endpoints.target import KV_USAGE, RUNNING, WAITING, look

    seen = look(url, api_key, Path(certificate) if certificate else None)
    seconds = seen.total("llmctl_batch_seconds_total")
    predicted = seen.total("llmctl_predicted_batch_seconds_total")
    usage = seen.total(*KV_USAGE)
    return {
        "name": name,
        "target": target,
        "url": url,
        "state": seen.state,
        "metrics": bool(seen.metrics) if seen.answered else None,
        "running": seen.total(*RUNNING),
        "waiting": seen.total(*WAITING),
        "kv_usage_percent": None if usage is None else 100.0 * usage,
        "actual_over_predicted": seconds / predicted if seconds and predicted else None,
        "breaks": breaks,
    }


def stop(
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
    running = alive()
    names = [server.name for server in running]
    if name is not None and name not in names:
        hint = nearest(name, names) if names else "llmctl status lists the running servers"
        raise InputError(f"no server '{name}' runs on this machine", hint)
    if not running:
        raise InputError("no server runs on this machine", "llmctl serve starts one")
    if len(running) > 1 and name is None and not every:
        servers = f"{len(running)} servers run on this machine: {', '.join(names)}"
        raise InputError(servers, "name one, or give --all")
    chosen = [server for server in running if name in (None, server.name)]
    ended = [_stop(server, timeout, api_key) for server in chosen]
    emit(as_json, {"stopped": ended}, lambda: print("\n".join(str(one["said"]) for one in ended)))


def _stop(server: Running, timeout: float, api_key: str) -> dict[str, object]:
    """Shut a server down, by SIGTERM or its service manager. Returns its name, the number of its
    finished requests, of others by reason, and a sentence. `LlmctlError` if it hangs or was killed.
    """
    from toolkit.deploy.render import read_manifest
    from toolkit.deploy.running import forget, recall, stop
    from toolkit.endpoints.target import RUNNING, WAITING, look

    if server.pid is None:
        folder = Path(server.folder or "")
        manifest = read_manifest(folder)
        if manifest is None:
            hint = f"stop it with {server.target} itself"
            raise InputError(f"{folder}: the rendered files are gone", hint)
        stop(folder, manifest)
        forget(server)
        return {"name": server.name, "said": f"{server.name} has been stopped by {server.target}"}
    seen = look(server.url, api_key, Path(server.certificate) if server.certificate else None)
    inside = (seen.total(*RUNNING) or 0) + (seen.total(*WAITING) or 0)
    note(f"stopping {server.name}" + (f", requests in it: {inside:.0f}" if seen.metrics else ""))
    before = seen.ended
    until = time.monotonic() + timeout
    os.kill(server.pid, signal.SIGTERM)
    while server.alive:
        if time.monotonic() > until:
            hint = "a second llmctl stop ends it at once"
            raise LlmctlError(f"{server.name} still drains after {timeout:g} s", hint)
        time.sleep(POLL_S)
    ended = recall(server.name).ended
    if ended is None:
        raise LlmctlError(f"{server.name} is gone without an orderly shutdown", "see its log")
    forget(server)
    done = {reason: count - before.get(reason, 0) for reason, count in ended.items()}
    finished = done.pop("stop", 0) + done.pop("length", 0)
    lost = {reason: count for reason, count in done.items() if count}
    others = "".join(f", {count} {reason}" for reason, count in lost.items())
    # without the key the earlier counts are unknown
    period = "" if before else " since it started"
    said = f"{server.name} has ended; requests finished: {finished}{others}{period}"
    return {"name": server.name, "finished": finished, "others": lost, "said": said}
