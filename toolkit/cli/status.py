"""`llmctl status`: the servers that were started here, and what they say of themselves now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import emit, note, table

if TYPE_CHECKING:
    from toolkit.deploy.running import Running

KeyOption = Annotated[
    str,
    typer.Option(
        "--api-key", envvar="LLMCTL_API_KEY", show_default=False, help="The servers' key."
    ),
]


def command(
    urls: Annotated[
        list[str] | None,
        typer.Option(
            "--url", help="Look at this server instead, wherever it was started; repeatable."
        ),
    ] = None,
    api_key: KeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Show the servers that run here: health, readiness, load, and whether they are as fast as
    predicted.

    Exit code 1 where none runs, or one is not healthy.
    """
    from toolkit.endpoints.target import base_url

    found = [_of(url, base_url(url), "", api_key) for url in urls] if urls else _all(api_key)
    emit(as_json, {"servers": found}, lambda: _show(found))
    for one in found:
        if one["breaks"]:
            note(f"warning: the plan of {one['name']} is predicted to {one['breaks']}")
    if any(one["metrics"] is False for one in found):
        note("where '-' stands, /metrics asks for the key: LLMCTL_API_KEY")
    if not found or not all(one["state"] in ("ready", "not ready") for one in found):
        raise typer.Exit(1)


def alive() -> list[Running]:
    """The servers that run. The others are forgotten, which is said of those that did not end in
    order.
    """
    from toolkit.deploy.running import forget, remembered

    running = []
    for server in remembered():
        if server.alive and server.ended is None:
            running.append(server)
            continue
        forget(server)
        if server.ended is None:
            note(
                f"{server.name} (process {server.pid}) is gone and did not end in order; forgotten"
            )
    return running


def _all(api_key: str) -> list[dict[str, Any]]:
    return [
        _of(one.name, one.url, one.target, api_key, one.certificate, one.breaks) for one in alive()
    ]


def _of(
    name: str, url: str, target: str, api_key: str, certificate: str | None = None, breaks: str = ""
) -> dict[str, Any]:
    from toolkit.endpoints.target import KV_USAGE, RUNNING, WAITING, look

    seen = look(url, api_key, Path(certificate) if certificate else None)
    seconds, predicted = (
        seen.total("llmctl_batch_seconds_total"),
        seen.total("llmctl_predicted_batch_seconds_total"),
    )
    return {
        "name": name,
        "target": target,
        "url": url,
        "state": seen.state,
        "metrics": bool(seen.metrics) if seen.healthy is not None else None,
        "running": seen.total(*RUNNING),
        "waiting": seen.total(*WAITING),
        "kv_usage_percent": _percent(seen.total(*KV_USAGE)),
        "actual_over_predicted": seconds / predicted if seconds and predicted else None,
        "breaks": breaks,
    }


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share


def _show(found: list[dict[str, Any]]) -> None:
    if not found:
        print("no server runs here")
        return
    columns = ["name", "<state", "<url", ">run", ">wait", ">KV %", ">actual/ predicted"]
    keys = ("state", "url", "running", "waiting", "kv_usage_percent", "actual_over_predicted")
    table(columns, [[one["name"], *(one[key] for key in keys)] for one in found])
