"""Our server on granian instead of uvicorn, for `front_stream --granian`: not a way to serve.

    PYTHON-WITH-GRANIAN -m benchmarks.serving.front_granian PLAN.json

Runs until it gets a signal. The application, the scheduler and the workers are ours, on the same
event loop; granian's Rust runtime accepts, parses and writes. The guarantees of
`toolkit/serve/http.py` and `server.py` are missing: bounded heads, errors in the API's form, the
order of shutdown.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path

from starlette.types import ASGIApp

from benchmarks.common.command import read_words
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.serve import launch
from toolkit.serve.assemble import make_settings
from toolkit.serve.driver import Driver
from toolkit.serve.http import BACKLOG


async def serve(driver: Driver, app: ASGIApp, listener: socket.socket, *_: object) -> None:
    """Replaces `toolkit.serve.server.serve`; ends at once on SIGTERM."""
    from granian.constants import Interfaces
    from granian.server.embed import Server

    host, port = listener.getsockname()[:2]
    listener.close()  # granian opens its own
    server = Server(
        app,
        host,
        port,
        interface=Interfaces.ASGINL,
        websockets=False,
        backlog=BACKLOG,
        log_enabled=False,
    )
    await driver.start()
    serving = asyncio.create_task(server.serve())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
    print(json.dumps({"url": f"http://{host}:{port}"}), flush=True)
    try:
        await serving
    finally:
        await driver.stop()


def main() -> None:
    (path,) = read_words(__doc__, "PLAN.json")
    plan = read_file(Plan, Path(path))
    launch.serve = serve  # type: ignore[attr-defined]
    launch.launch(launch.Launch(plan, make_settings(plan), "127.0.0.1", 0), lambda _: None)


if __name__ == "__main__":
    main()
