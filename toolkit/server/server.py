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
from typing import Any, Self

import uvicorn
import uvloop
from starlette.types import ASGIApp

from toolkit.errors import InputError
from toolkit.server.application import Application
from toolkit.server.backend import ServerBackend
from toolkit.server.background import first_of
from toolkit.server.http import BoundedConnection, possible_connections
from toolkit.server.log import logging_to_stderr
from toolkit.server.options import ServerOptions
from toolkit.server.process import BACKLOG, Signals, check_exposure, listen, url
from toolkit.traces.write import TraceLog
from toolkit.units import counted

PEM_HINT = (
    "--ssl-certfile and --ssl-keyfile are PEM files; "
    "the certificate comes before those of its authorities"
)
IDLE_S = 60  # until a head is there; longer than in clients' connection pools: they close first
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
            ssl_certfile=application.options.certificate,
            ssl_keyfile=application.options.certificate_key,
        )
        signals = Signals()
        for name, work in application.tasks.items():
            backend.background.start(name, work)
        working = asyncio.create_task(backend.start())
        try:
            await http.start(self.listener)
            await first_of(working, signals.first.wait())
            if not signals.first.is_set():
                working.result()
                on_ready(self.url)
                working = asyncio.create_task(backend.broken())
                await first_of(working, signals.first.wait())
                if working.done():
                    working.result()
                await self._leave(http, signals)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await backend.stop()
            await backend.background.stop()
            await http.stop()
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
            options.say(
                f"ending: {counted(left, 'request')} may take {options.timeout_s:g} s more; "
                "a second signal or Ctrl-C ends it now"
            )
        with suppress(TimeoutError):
            await asyncio.wait_for(signals.second.wait(), options.notice_s)
        await asyncio.sleep(ACCEPT_LAST_S)
        http.close_listener()
        await first_of(application.backend.drain(options.timeout_s), signals.second.wait())


class HttpServer(uvicorn.Server):
    """An ASGI application on a listening socket. It gets only scopes of type `http`.

    Args:
        descriptors_each: file descriptors of a connection (`possible_connections`).
        settings: further ones of uvicorn.

    Raises `InputError` for a certificate or a key that cannot be used.
    """

    def __init__(self, app: ASGIApp, *, descriptors_each: int = 1, **settings: Any) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            limit_concurrency=possible_connections(descriptors_each) + 1,  # the asking one counts
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=LAST_BYTES_S,
            **settings,
        )
        try:
            config.load()
        except OSError as error:  # OpenSSL's, which names no file, is one as well
            files = " and ".join(
                str(file) for file in (config.ssl_certfile, config.ssl_keyfile) if file
            )
            raise InputError(f"{files}: {error.strerror or error}", PEM_HINT) from None
        super().__init__(config)
        self.servers = []
        self.lifespan = config.lifespan_class(config)

    async def start(self, listener: socket.socket) -> None:
        """Accept connections from a bound `listener`."""
        await self.startup(sockets=[listener])
        self._ticking = asyncio.create_task(self.main_loop())

    def close_listener(self) -> None:
        """Accept no more connections. Existing ones continue."""
        for listening in self.servers:
            listening.close()

    async def stop(self) -> None:
        """Close idle connections, wait for running responses at most `LAST_BYTES_S` seconds, and
        abort the rest.
        """
        self.should_exit = True
        await self.shutdown()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
