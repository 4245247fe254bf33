"""The load generator: replays a trace against a server in open loop, that is, at the trace's times whatever happens.

Latencies count from the scheduled arrival, so a server that stalls cannot hide it by slowing the client down. Prompts
are random tokens, drawn from a seed, each its own: no cache of prefixes helps.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec
import numpy as np

from toolkit.bench.stream import Sample, StreamCall
from toolkit.bench.target import Lengths, Target, completion
from toolkit.traces.types import Trace

INTERRUPTED = "interrupted"
PREPARED = 2000  # requests made before the clock starts: making one costs the machine that is measured


@dataclass(slots=True, frozen=True)
class Load:
    """How a trace becomes requests.

    With `lengths` 'hidden', requests say max_tokens = their client's limit (`max_new_tokens` where the trace has none),
    and the length that the trace knows goes to the engine alone; with 'given', max_tokens is that length.
    """

    lengths: Lengths
    max_new_tokens: int
    vocab_size: int
    timeout_s: float = 600.0
    seed: int = 0


@dataclass(slots=True, frozen=True)
class Replay:
    """What became of each request, in the trace's order, and whether the replay was interrupted."""

    samples: list[Sample]
    interrupted: bool


def run(target: Target, trace: Trace, load: Load, on_done: Callable[[], None]) -> Replay:
    """Replay `trace` from start to end; `on_done` is called as each request ends.

    Ctrl-C ends it early: what was not answered by then has the failure 'interrupted' or 'not sent'.
    """
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(replay(target, trace, load, on_done))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def replay(target: Target, trace: Trace, load: Load, on_done: Callable[[], None]) -> Replay:
    """`run` on the caller's loop; cancelling the task interrupts it."""
    columns = zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    samples = [Sample(*row) for row in columns]
    sender = _Sender(target, load)
    limits = trace.max_tokens.tolist()
    prepared = deque(sender.request(k, samples[k], limits[k]) for k in range(min(len(samples), PREPARED)))
    sender.start()
    running: set[asyncio.Task[None]] = set()
    try:
        for k, sample in enumerate(samples):
            request = prepared.popleft() if prepared else sender.request(k, sample, limits[k])
            await asyncio.sleep(sample.scheduled_s - sender.clock())
            task = asyncio.create_task(sender.send(request, sample))
            running.add(task)
            task.add_done_callback(lambda _: on_done())
            task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(running)
    except asyncio.CancelledError:
        for task in running:
            task.cancel()
        await asyncio.gather(*running)
        return Replay(samples, interrupted=True)
    return Replay(samples, interrupted=False)


class _Sender:
    """Makes requests and sends them. Its clock is 0 at `start`."""

    def __init__(self, target: Target, load: Load) -> None:
        parts = urlsplit(target.url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._target = target
        self._load = load
        self._start_s = 0.0
        host = parts.netloc.rpartition("@")[2]
        lines = [f"POST {parts.path}/v1/completions HTTP/1.1", f"host: {host}", "connection: close"]
        lines += ["content-type: application/json", "accept: text/event-stream"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        self._head = "\r\n".join(lines).encode()

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def clock(self) -> float:
        return time.perf_counter() - self._start_s

    def request(self, number: int, sample: Sample, limit: int) -> bytes:
        """The bytes of one request, head and body."""
        load = self._load
        rng = np.random.default_rng([load.seed, number])
        prompt = rng.integers(0, load.vocab_size, sample.prompt_tokens).tolist()
        hidden = load.lengths == "hidden"
        max_tokens = (limit or load.max_new_tokens) if hidden else sample.wanted_tokens
        end_after = sample.wanted_tokens if hidden else None
        body = msgspec.json.encode(completion(self._target.model, prompt, max_tokens, end_after))
        return b"%s\r\ncontent-length: %d\r\n\r\n%s" % (self._head, len(body), body)

    async def send(self, request: bytes, sample: Sample) -> None:
        """Send one request and wait for its end, whatever it is; only `sample` tells."""
        call = StreamCall(request, sample, self.clock)
        try:
            async with asyncio.timeout(self._load.timeout_s):
                await asyncio.get_running_loop().create_connection(
                    lambda: call, self._host, self._port, ssl=self._tls or None
                )
                await call.closed.wait()
        except TimeoutError:
            call.end(f"no end within {self._load.timeout_s:g} s")
        except OSError as error:
            call.end(f"cannot connect: {error.strerror or error}")
        except asyncio.CancelledError:
            call.end(INTERRUPTED)
        await call.closed.wait()


def send_lag_s(samples: list[Sample]) -> float:
    """99th percentile of how late requests left the client: large where the client itself was short of CPU."""
    lags = [sample.sent_s - sample.scheduled_s for sample in samples if not math.isnan(sample.sent_s)]
    return float(np.percentile(lags, 99)) if lags else 0.0
