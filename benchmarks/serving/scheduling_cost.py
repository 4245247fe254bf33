"""Microseconds that a batch costs besides the engine: deciding, frames, and the step's report.

    python -m benchmarks.serving.scheduling_cost [--rows 32] [--repeats 300]

Takes about half a minute. Needs nothing but the package.

Each piece runs alone in this process; the figure is the fastest of many runs, so that a busy
machine does not show. Deciding is the median of 1,500 batches of a scheduler that always has
requests waiting, `tick` and `complete` together. Not included: system calls that wake the other
process, the event loop, and text. A live server reports its whole cost in /metrics
(docs/how-to/serve.md), and `llmctl bench` prints it.
"""

from __future__ import annotations

import random
import socket
import statistics
import time
from collections.abc import Callable

from benchmarks.common.command import make_parser
from toolkit.engines.protocol import Round, RoundOutput, Row, SamplingParams, StepOutput
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Request, RoundResult, Worker
from toolkit.serve.live import merge
from toolkit.workers.child import BatchInProgress, Outbox
from toolkit.workers.lifeline import FrontSocket
from toolkit.workers.protocol import (
    Done,
    RunRound,
    SocketChannel,
    Times,
    front_side,
    pack,
    worker_side,
)

LAW = bilinear_law(p=(1e-4, 1e-3, 0.0, 0.01), d=(1e-6, 1e-4, 0.0, 0.01))
CAPACITY = 16_384  # tokens
WAITING = 60
BATCHES = 1_500
POLICIES = ("past-future", "aggressive", "conservative", "mlfq", "slice")
NEVER_S = 1e9


def fastest_us(work: Callable[[], object], repeats: int) -> float:
    best_s = NEVER_S
    for _ in range(repeats):
        start_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start_s)
    return 1e6 * best_s


def frames_us(rows: int, repeats: int) -> dict[str, float]:
    """Send a round with four new rows of 250 tokens, and receive its end with six steps of `rows`
    rows.
    """
    new = tuple(
        Row(f"cmpl-{k:032d}-0", tuple(range(250)), 0, 256, SamplingParams()) for k in range(4)
    )
    run = RunRound(5, Round(256, new, (1, 2, 3, 4)))
    steps = tuple(StepOutput(tuple(range(rows)), tuple(range(100, 100 + rows))) for _ in range(6))
    done = Done(5, steps, Times(), output=RoundOutput(6, ((1, 0),), (), 8000, 9000))
    to_worker = worker_side()
    to_front = front_side()
    out = pack(run)
    back = pack(done)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = SocketChannel(FrontSocket(theirs))
        outbox = Outbox(channel, NEVER_S, time.perf_counter)
        outbox.begin(run)
        outbox.put(steps[0])  # has first tokens, so it goes out; those that follow wait
        running = BatchInProgress(run, channel, outbox)
        return {
            "a round to the worker: pack": fastest_us(lambda: pack(run), repeats),
            "unpack": fastest_us(lambda: list(to_worker.feed(out)), repeats),
            f"its end, 6 steps of {rows} rows: pack": fastest_us(lambda: pack(done), repeats),
            "unpack ": fastest_us(lambda: list(to_front.feed(back)), repeats),
            "tokens by row": fastest_us(lambda: merge(steps), repeats),
            "a step's report that sends nothing": fastest_us(
                lambda: running.on_step(steps[0]), repeats
            ),
        }


class Server:
    """A scheduler under a backlog, with the replies of its one worker."""

    def __init__(self, policy: str) -> None:
        self._scheduler = Scheduler(make_policy(policy, {}), [Worker(0, LAW, ZetaMemory(CAPACITY))])
        self._rng = random.Random(0)
        self._left: dict[str, int] = {}
        self._count = 0
        self._now_s = 0.0
        self.deciding_us: list[float] = []
        self.submit(WAITING)

    def submit(self, count: int) -> None:
        for _ in range(count):
            name = str(self._count)
            self._count += 1
            self._left[name] = self._rng.randint(5, 200)
            request = Request(name, self._now_s, self._rng.randint(20, 300), 256)
            self._scheduler.submit(request, self._now_s)

    def turn(self) -> None:
        """One batch, from the tick to its end; each request that ends is replaced by a new one."""
        self._now_s += 1.0
        start_s = time.perf_counter()
        batches = self._scheduler.tick(self._now_s)
        self._scheduler.take_interrupts()
        ticked_s = time.perf_counter() - start_s
        for batch in batches:
            result = self._round(batch) if batch.keep_cache else self._slice(batch)
            start_s = time.perf_counter()
            self._scheduler.complete(result, self._now_s)
            self.deciding_us.append(1e6 * (ticked_s + time.perf_counter() - start_s))
        self.submit(WAITING - self._scheduler.jobs)

    def _round(self, batch: Batch) -> RoundResult:
        names = [job.request_id for job in self._scheduler.workers[0].running.jobs]
        steps = min([batch.steps, *(self._left[name] for name in names)])
        for name in names:
            self._left[name] -= steps
        ended = tuple(name for name in names if not self._left[name])
        return RoundResult(batch.batch_id, 0, steps, ended)

    def _slice(self, batch: Batch) -> BatchResult:
        names = [job.request_id for job in batch.jobs]
        tokens = [min(batch.steps, self._left[name]) for name in names]
        for name, count in zip(names, tokens, strict=True):
            self._left[name] -= count
        return BatchResult(batch.batch_id, 0, tokens, [not self._left[name] for name in names])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    print("| piece | us |\n|---|---:|")
    for name, found_us in frames_us(options.rows, options.repeats).items():
        print(f"| {name.strip()} | {found_us:.0f} |")
    for policy in POLICIES:
        server = Server(policy)
        while len(server.deciding_us) < BATCHES:
            server.turn()
        us = statistics.median(server.deciding_us)
        print(f"| deciding, {policy}, {WAITING} requests here | {us:.0f} |")


if __name__ == "__main__":
    main()
