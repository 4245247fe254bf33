"""A server, from its listener to its end.

At a signal /ready turns 503 first, while requests are still accepted (`ServerOptions.notice_s`).
Then the listener closes and running requests may finish (`timeout_s`). Requests that are still left
get a final error.

Neither the log of events nor the log of requests holds text, prompt tokens or names of clients.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Self

import uvloop

from toolkit.server.application import Application
from toolkit.server.backend import ServerBackend
from toolkit.server.background import first_of
from toolkit.server.http import HttpServer
from toolkit.server.log import logging_to_stderr
from toolkit.server.options import ServerOptions
from toolkit.server.process import Signals, check_exposure, listen, url
from toolkit.traces.write import TraceLog

ACCEPT_LAST_S = 0.02  # to accept pending connections before the listener closes
LAST_BYTES_S = 5  # for final chunks to be sent


class Server:
    """An application on a bound address:

    with Server.open(options, engine_backend(plan, options)) as server:
        ended = server.run(on_ready)
    """

    def __init__(self, application: Application, listener: socket.socket) -> None:
        self.application = application
        self.listener = listener

    @classmethod
    @contextmanager
    def open(
        cls, options: ServerOptions, backend: AbstractContextManager[ServerBackend]
    ) -> Iterator[Self]:
        """Bind the address, open the logs, and then the backend, which may be slow. Nothing is
        started.

        Raises `InputError` for an address or a log that cannot be used, and what `backend` raises.
        """
        check_exposure(options.host, asks_key=options.asks_key, insecure=options.insecure)
        with ExitStack() as stack:
            listener = stack.enter_context(listen(options.host, options.port))
            stack.enter_context(logging_to_stderr())
            log = TraceLog(options.request_log) if options.request_log else None
            if log is not None:
                stack.enter_context(log)
            opened = stack.enter_context(backend)
            opened.log = log
            yield cls(Application(opened, options), listener)

    @property
    def url(self) -> str:
        return url(self.listener, tls=self.application.options.certificate is not None)

    def run(self, on_ready: Callable[[str], None]) -> dict[str, int]:
        """Serve until a signal ends it. Returns the number of ended requests by finish reason.

        `on_ready` gets the URL once it can serve. Raises what the backend raises.
        """
        gc.collect()
        # Imported objects stay: no later collection should pause all streams to walk over them.
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve(on_ready))
        return dict(self.application.stats.ended)

    async def serve(self, on_ready: Callable[[str], None]) -> None:
        """Do what `run` does, in the loop that runs."""
        application = self.application
        backend = application.backend
        http = HttpServer(
            application,
            descriptors_each=backend.descriptors_each,
            certificate=application.options.certificate,
            key=application.options.certificate_key,
        )
        signals = Signals()
        for name, work in application.tasks.items():
            backend.background.start(name, work)
        starting: asyncio.Task[None] | None = None
        breaking: asyncio.Task[None] | None = None
        try:
            await http.start(self.listener)
            starting = asyncio.create_task(backend.start())
            await first_of(starting, signals.first.wait())
            if not signals.first.is_set():
                starting.result()
                on_ready(self.url)
                breaking = asyncio.create_task(backend.broken())
                await first_of(signals.first.wait(), breaking)
                if breaking.done():
                    breaking.result()
                await self._leave(http, signals)
        finally:
            tasks = [task for task in (starting, breaking) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await backend.stop()
            await backend.background.stop()
            await http.stop(LAST_BYTES_S)
            signals.close()

    async def _leave(self, http: HttpServer, signals: Signals) -> None:
        """Announce the end, keep serving for the notice, then refuse new requests and wait for
        those that run.

        A second signal ends both at once. Clients that have connected by the end of the notice get
        an answer; later ones cannot connect, and may try another server.
        """
        application = self.application
        options = application.options
        application.leaving = True
        if left := application.backend.left:
            requests = "1 request has" if left == 1 else f"{left} requests have"
            options.say(
                f"ending: {requests} {options.timeout_s:g} s to finish; "
                "a second signal or Ctrl-C ends it now"
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(signals.second.wait(), options.notice_s)
        await asyncio.sleep(ACCEPT_LAST_S)
        http.close_listener()
        await first_of(application.backend.drain(options.timeout_s), signals.second.wait())
