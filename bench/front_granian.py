"""Our server with granian in uvicorn's place, for `front_stream.py --granian`: a measurement, not a
way to serve.

    GRANIANS_PYTHON bench/front_granian.py PLAN.json

The application, the scheduler and the workers are ours, on the same event loop; granian's Rust
runtime accepts, parses and writes. What `toolkit/serve/http.py` and `server.py` promise is missing:
bounded heads, errors in the API's words, the order of the end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path

from granian.constants import Interfaces
from granian.server.embed import Server
from starlette.types import ASGIApp

from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.serve import launch
from toolkit.serve.assemble import make_settings
from toolkit.serve.driver import Driver
from toolkit.serve.http import BACKLOG


async def serve(driver: Driver, app: ASGIApp, listener: socket.socket, *_: object) -> None:
    """In place of `toolkit.serve.server.serve`; ends at once with SIGTERM."""
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
    plan = read_file(Plan, Path(sys.argv[1]))
    launch.serve = serve  # type: ignore[assignment,attr-defined]
    launch.launch(launch.Launch(plan, make_settings(plan), "127.0.0.1", 0), lambda _: None)


if __name__ == "__main__":
    main()
