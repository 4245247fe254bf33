"""What answers the requests of an application: our own driver, or a pool of replicas.

`Application` has what all servers share on HTTP: keys, hosts, pages. `ServerBackend` has what all
share in the way of a request for tokens: it is read, admitted and answered, and a drain waits for
it.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from prometheus_client.core import Metric
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from toolkit.openai.errors import RETRY_AFTER_S, ApiError, overloaded
from toolkit.openai.requests import CHAT, COMPLETIONS
from toolkit.routing.admission import PredictedLatency
from toolkit.server.background import Background, Work, while_connected
from toolkit.server.options import ServerOptions
from toolkit.server.stats import QUEUE_FULL, Stats
from toolkit.server.status import Facts
from toolkit.traces.write import TraceLog

if TYPE_CHECKING:
    from toolkit.server.application import Application

SMALL_BYTES = 1 << 16  # a body up to this size is taken however much is held
POLL_S = 0.01  # while a drain waits
BODY_S = 60.0  # for a body
MAX_HELD_BYTES = 256 << 20  # of bodies, of all requests
Answer = Callable[[Send], Coroutine[Any, Any, None]]  # sends the answer of one request


class ServerBackend(ABC):
    """Attributes:
    stats: its counters.
    background: starts its tasks.
    tasks: what runs beside the requests, by name.
    descriptors_each: file descriptors of a connection: 2 with one to an upstream server.
    facts: what the status page shows; None: there is no page.
    labels: of its metrics.
    log: of its requests; None: there is none.
    left: requests that have not ended.
    held_bytes: of their bodies.
    draining: new requests are refused.
    """

    descriptors_each: ClassVar[int] = 1

    def __init__(self, options: ServerOptions, stats: Stats) -> None:
        self.options = options
        self.stats = stats
        self.background = Background()
        self.tasks: dict[str, Work] = {}
        self.facts: Facts | None = None
        self.log: TraceLog | None = None
        self.left = self.held_bytes = 0
        self.draining = False

    # What it is

    @property
    @abstractmethod
    def state(self) -> str:
        """What it does: "ready" if it can serve requests, or else why it cannot."""

    @property
    def failure(self) -> str:
        """Why it cannot go on, and must be started again, or ''."""
        return ""

    @property
    def model(self) -> str:
        """The name by which clients call the model; '': any."""
        return self.options.model

    @property
    def labels(self) -> dict[str, str]:
        return {"model_name": self.model}

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Requests that nothing works on yet."""

    @abstractmethod
    def about_model(self) -> dict[str, object]:
        """Return what the model's page has besides OpenAI's fields."""

    @abstractmethod
    def families(self) -> Iterable[Metric]:
        """Return its metrics at the moment of a scrape, besides its requests' metrics."""

    @abstractmethod
    def shown(self) -> dict[str, Any]:
        """Return what the status page shows of it."""

    def add_routes(self, application: Application) -> None:
        """Add the routes of requests for tokens, and of its own pages."""
        for path in (COMPLETIONS, CHAT):
            application.generates(path)

    # Its life

    @abstractmethod
    async def start(self) -> None:
        """Return when it can serve. The server listens before, and answers that it cannot yet."""

    async def broken(self) -> None:
        """Raise when it cannot go on."""
        await asyncio.Event().wait()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait at most `timeout_s` seconds for the running ones."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.left:
                    await asyncio.sleep(POLL_S)

    @abstractmethod
    async def stop(self) -> None:
        """End what it has started."""

    # Its requests

    async def generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for tokens. Raises `ApiError` where nothing of an answer was sent."""
        self.check_open()
        arrival_s = time.monotonic()
        request = Request(scope, receive)
        with self.running_request() as hold:
            check_json(request.headers)
            body = await read_body(request, self.options.max_body_bytes, hold)
            answer = await self.take(request, body, arrival_s)
            await while_connected(receive, answer(send))

    @contextmanager
    def running_request(self) -> Iterator[Callable[[int], None]]:
        """Run a request, for which a drain waits. Yield what counts bytes of its body, and raises
        `ApiError` if a large body finds no room.
        """
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self.held_bytes += size
            if held > SMALL_BYTES and self.held_bytes > MAX_HELD_BYTES:
                mib = self.held_bytes >> 20
                raise overloaded(f"the server holds {mib} MiB of requests; try again later")

        self.left += 1
        try:
            yield hold
        finally:
            self.held_bytes -= held
            self.left -= 1

    @abstractmethod
    async def take(self, request: Request, body: bytes, arrival_s: float) -> Answer:
        """Read and admit a request that came at `arrival_s` of `time.monotonic`. Returns what sends
        its answer; it is cancelled when the client leaves, and raises `ApiError` where nothing was
        sent. Raises `ApiError` for a request that is not to be served.
        """

    def admit(self, model: str | None, choices: int = 1) -> None:
        """Raise `ApiError` for a request for another model, or beyond the queue."""
        if model is not None and self.model and model != self.model:
            text = f"there is no model {model[:80]!r} here; GET /v1/models lists the models"
            raise ApiError(text, status=404, param="model", code="model_not_found")
        self.check_room(choices)

    def check_open(self) -> None:
        """Raise `ApiError` while it takes no requests."""
        if self.draining:
            raise unavailable("draining", {"Connection": "close"})

    def check_room(self, choices: int = 1) -> None:
        """Raise `ApiError` if it does not accept `choices` more requests now."""
        waiting = self.waiting
        limit = self.options.max_waiting
        if waiting + choices > limit:
            self.stats.refusals[QUEUE_FULL] += 1
            text = f"{waiting} requests wait; with {choices} more it would exceed {limit}"
            raise overloaded(text)


def check_json(headers: Headers) -> None:
    """Raise `ApiError` where the content-type is not JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(f"content-type is '{kind[:80]}', and must be application/json", status=415)


async def read_body(request: Request, max_bytes: int, hold: Callable[[int], None]) -> bytes:
    """Return the body; `hold` gets the size of each piece. Raises `ApiError` as soon as it exceeds
    `max_bytes`, whatever length it states, and for one that takes too long.
    """
    too_large = ApiError(f"the body is larger than {max_bytes} bytes", status=413)
    stated = request.headers.get("content-length", "")
    if stated.isdecimal() and int(stated[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                hold(len(piece))
                body += piece
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        text = f"the body did not come within {BODY_S:g} s"
        raise ApiError(text, status=408, headers={"Connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError("the body ended early") from None
    return bytes(body)


def late(predicted: PredictedLatency, wait_s: float) -> ApiError:
    """Return the error for a request that would miss a target: its forecast, and for how many
    seconds.
    """
    text = (
        "too many requests wait: the first token would come in "
        f"{predicted.ttft_s:.1f} s, the last in {predicted.e2e_s:.1f} s"
    )
    return overloaded(text, wait_s)


def unavailable(state: str, headers: Mapping[str, str]) -> ApiError:
    """Return the error of a server in this state."""
    retry = {"Retry-After": str(RETRY_AFTER_S)}
    return ApiError(
        f"the server is {state}", status=503, code="unavailable", headers={**retry, **headers}
    )
