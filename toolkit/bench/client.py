"""The load generator: replays a trace against a server in open loop, that is, at the trace's times
whatever happens.

Latencies count from the scheduled arrival, so a server that stalls cannot hide it by slowing the
client down. Prompts are random tokens, drawn from a seed, each its own: no cache of prefixes helps.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import numpy as np

from toolkit.endpoints.target import FULL, Dialect, Target, learn, post, refusal
from toolkit.endpoints.wire import ClientConnection, Sample, loop_factory
from toolkit.traces.types import Trace

END_AFTER = b"llmctl_end_after"  # stands in the refusal of a server that does not take the field
PREPARED = (
    2000  # requests made before the clock starts: making one costs the machine that is measured
)

Lengths = Literal["hidden", "given"]
Progress = Callable[
    [str, int], AbstractContextManager[Callable[..., None]]
]  # a title and a count; gives advance()


@dataclass(slots=True, frozen=True)
class LoadSpec:
    """How a trace becomes requests.

    With `lengths` 'hidden', requests say max_tokens = their client's limit (`max_new_tokens` where
    the trace has none), and the length that the trace knows goes to the engine alone; with 'given',
    max_tokens is that length, so the scheduler knows it as the request's limit.
    """

    lengths: Lengths
    max_new_tokens: int
    vocab_size: int
    timeout_s: float = 600.0
    seed: int = 0
    dialect: Dialect = FULL


@dataclass(slots=True, frozen=True)
class Replay:
    """What became of each request, in the trace's order, and whether the replay was interrupted."""

    samples: list[Sample]
    interrupted: bool


def try_out(target: Target, lengths: Lengths | None, max_tokens: int) -> tuple[Lengths, Dialect]:
    """How the server is asked for a trace's lengths, found out with a request of one token or a few
    of them.

    Where `lengths` is None, they are hidden if the server allows it: llmctl's own does with
    `--allow-end-after`. Raises `InputError` with the server's own words where it refuses.
    """
    if lengths == "given" or (lengths is None and not target.own):
        return "given", learn(target)
    fields = FULL.request(target.model, [1], max_tokens, end_after=1, stream=False)
    status, body = post(target, "/v1/completions", fields)
    if status == 200:
        return "hidden", FULL
    if END_AFTER not in body:
        raise refusal(target, "/v1/completions", status, body)
    if lengths is None:
        return "given", learn(target)
    raise refusal(
        target,
        "/v1/completions",
        status,
        body,
        "start it with: llmctl serve --allow-end-after; or leave --lengths hidden out",
    )


def run(target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]) -> Replay:
    """Replay `trace` from start to end; `on_done` is called as each request ends.

    Ctrl-C ends it early: what was not answered by then has the failure 'interrupted' or 'not sent'.
    """
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(replay(target, trace, load, on_done))


async def replay(
    target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]
) -> Replay:
    """`run` on the caller's loop; cancelling the task interrupts it."""
    samples = [
        Sample(arrival_s, prompt, output) for arrival_s, prompt, output, _, _ in trace.rows()
    ]
    sender = _Sender(target, load)
    limits, priorities = trace.max_tokens.tolist(), trace.priorities
    first = range(min(len(samples), PREPARED))
    prepared = deque(sender.request(k, samples[k], limits[k], priorities[k]) for k in first)
    sender.start()
    running: set[asyncio.Task[None]] = set()
    try:
        for k, sample in enumerate(samples):
            request = (
                prepared.popleft()
                if prepared
                else sender.request(k, sample, limits[k], priorities[k])
            )
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

    def __init__(self, target: Target, load: LoadSpec) -> None:
        self._connection = ClientConnection(target)
        self._model = target.model
        self._load = load
        self._start_s = 0.0

    def start(self) -> None:
        self._start_s = time.perf_counter()

    def clock(self) -> float:
        return time.perf_counter() - self._start_s

    def request(self, number: int, sample: Sample, limit: int, priority: int) -> bytes:
        """The bytes of one request."""
        load = self._load
        prompt = load.dialect.prompt(
            np.random.default_rng([load.seed, number]), sample.prompt_tokens, load.vocab_size
        )
        if load.lengths == "hidden":
            tokens, end_after = limit or load.max_new_tokens, sample.wanted_tokens
        else:
            tokens, end_after = sample.wanted_tokens, None
        fields = load.dialect.request(
            self._model, prompt, tokens, end_after=end_after, priority=priority
        )
        return self._connection.request(fields)

    async def send(self, request: bytes, sample: Sample) -> None:
        await self._connection.send(request, sample, self.clock, self._load.timeout_s)


def send_lag_s(samples: list[Sample]) -> float:
    """99th percentile of how late requests left the client: large where the client itself was short
    of CPU.
    """
    lags = [
        sample.sent_s - sample.scheduled_s for sample in samples if not math.isnan(sample.sent_s)
    ]
    return float(np.percentile(lags, 99)) if lags else 0.0
