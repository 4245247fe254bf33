"""`llmctl trace record`: a reverse proxy that notes lengths and times, in front of any OpenAI-compatible server."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.arguments import JsonOption
from toolkit.cli.output import emit, note


def record(
    upstream: Annotated[str, typer.Option(metavar="URL", help="The server to stand in front of.")],
    out: Annotated[Path, typer.Option(help="The trace to write, canonical JSONL; it goes on in a file that is there.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients connect.")] = "127.0.0.1:8100",
    max_mib: Annotated[
        int, typer.Option("--max-mib", min=1, help="At this size OUT becomes OUT.1, in place of an older one.")
    ] = 256,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds that the server may be silent in a request.")
    ] = 600.0,
    shutdown_timeout: Annotated[
        float, typer.Option("--shutdown-timeout", min=0.0, help="Seconds that running requests get after a signal.")
    ] = 30.0,
    upstream_ca: Annotated[
        Path | None,
        typer.Option("--upstream-ca", help="For https: trust these authorities (PEM) instead of the system's."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen for other machines.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Record a trace in front of a running server: lengths and times, never text or keys.

    Clients talk to --listen as they would to the server. Streams pass through as they come; tokens are counted by the
    server's own usage, which is asked for where a client did not and is then left out of its answer. SIGTERM or Ctrl-C
    ends it in order.
    """
    from toolkit.serve.recorder.run import Recording, record

    host, port = _address(listen)
    order = Recording(upstream, host, port, out, max_mib << 20, timeout, shutdown_timeout, insecure, upstream_ca)
    ended = record(order, lambda url: _announce(as_json, url, upstream, out))
    note(_summary(ended, out))


def _address(text: str) -> tuple[str, int]:
    """`InputError` for what is no HOST:PORT."""
    from toolkit.errors import InputError

    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise InputError(f"--listen '{text}' is no address", "for example 127.0.0.1:8100, or [::1]:8100")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _announce(as_json: bool, url: str, upstream: str, out: Path) -> None:
    emit(as_json, {"url": url, "upstream": upstream, "out": str(out)}, lambda: print(f"recording: {url} to {out}"))
    sys.stdout.flush()


def _summary(ended: Counter[str], out: Path) -> str:
    if not ended:
        return "no request asked for tokens; nothing was recorded"
    counts = ", ".join(f"{count:,} {status}" for status, count in sorted(ended.items()))
    return f"requests: {counts}; see them with: llmctl trace inspect {out}"
