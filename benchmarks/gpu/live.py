"""Requests at an overload against live workers, through the server's driver, without HTTP."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import Field

from toolkit.deploy.plan import make_plan
from toolkit.engines.protocol import Round, SamplingParams
from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.io import head, read_file, write_file
from toolkit.files.plan import Plan, PlannedPolicy
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.files.strict import Envelope, Strict
from toolkit.metrics import Served, summarize
from toolkit.sched.policies import make_policy
from toolkit.serve.assemble import make_scheduler, make_stats
from toolkit.serve.driver import Driver
from toolkit.serve.live import ActiveRequest, GenerationRequest, Reply, TextOutput
from toolkit.serve.stats import Stats
from toolkit.sim.api import simulate
from toolkit.sim.world import world_from_fit
from toolkit.traces.generate import Arrivals, Lengths, backlog, generate
from toolkit.traces.types import Trace
from toolkit.workers.pool import ProcessWorkers
from toolkit.workers.protocol import (
    OnEvent,
    RoundDone,
    RunBatch,
    RunRound,
    WorkerEvent,
    WorkerReady,
    Workers,
)

OVERLOAD = 1.5  # arrivals, as a multiple of the best contender's predicted throughput
SETTLE_S = 60.0  # for cancelled rows to leave their workers
LAST_BATCH = 1 << 40  # a number that no scheduler uses
SAMPLE = 300  # requests of the backlog that measures the capacity


@dataclass(slots=True, frozen=True)
class Pace:
    """Seconds of arrivals, and of one contender. A request that has not ended by then is cancelled,
    and is not served.
    """

    window_s: float
    limit_s: float


@dataclass(slots=True, frozen=True)
class Contender:
    """A policy and its name in tables. `settings` are its parameters, by SLS's safe batch size."""

    title: str
    policy: str
    settings: Callable[[int], Mapping[str, bool | int | float | str]] = lambda _: {}


class Outcome(Strict):
    """One policy on one trace. Evictions are rows that were evicted, paused or swapped out."""

    title: str
    policy: PlannedPolicy
    requests: int
    served: int = Field(description="within the limit")
    measured: dict[str, float]
    predicted: dict[str, float] = Field(
        description="simulated with the fit, and cut off at the same time"
    )
    evictions: int
    oom_events: int
    worker_restarts: int
    slowdown: float | None = Field(description="of batches, over the laws' times")
    deciding_percent: float = Field(description="of engine time")
    hop_percent: float = Field(description="of engine time")
    hop_mean_s: float
    step_mean_s: float


class LiveFile(Envelope):
    """The file slices.json or rounds.json."""

    trace: list[str]
    limit_s: float
    capacity_tokens: int
    outcomes: list[Outcome]


def replay_all(
    folder: Path, engine: str, contenders: Sequence[Contender], pace: Pace, name: str
) -> None:
    """Serve one trace under every contender, on the same workers, and write LiveFile `name`."""
    source = folder / f"recipe-{engine}.json"
    fitted = folder / f"fit-{engine}.json"
    recipe = load_recipe(source)
    fit = read_file(Fit, fitted)
    plans = [_plan(recipe, fit, one, {"recipe": source, "fit": fitted}) for one in contenders]
    trace = overload(plans, pace.window_s)
    print(f"{trace.notes[0]}: {len(trace)} requests", flush=True)
    outcomes = asyncio.run(
        _replay_each(plans, [one.title for one in contenders], trace, pace.limit_s)
    )
    made_from = head(inputs={"recipe": source, "fit": fitted}, device=fit.engine.device)
    result = LiveFile(
        **made_from,
        trace=list(trace.notes),
        limit_s=pace.limit_s,
        capacity_tokens=fit.engine.capacity_tokens,
        outcomes=outcomes,
    )
    write_file(result, folder / name)


def _plan(recipe: Recipe, fit: Fit, contender: Contender, inputs: Mapping[str, Path]) -> Plan:
    longest = np.array([recipe.model.max_model_len])
    safe_rows = max(1, int(laws_from_fit(fit).memory.max_batch(longest, 0, 0.0)[0]))
    given = PlannedPolicy(name=contender.policy, parameters=dict(contender.settings(safe_rows)))
    return make_plan(recipe, fit, None, inputs, given)


def overload(plans: Sequence[Plan], window_s: float) -> Trace:
    """Poisson arrivals for `window_s`, at `OVERLOAD` times the rate that the best of the plans is
    predicted to serve.

    Prompts and outputs are lognormal with a median of 1/16 of the longest request; prompts are up
    to a quarter of it, and outputs up to the recipe's limit.
    """
    recipe = plans[0].recipe
    longest = recipe.model.max_model_len
    prompts = Lengths("lognormal", max(longest // 16, 1), 0.8, max(longest // 4, 1))
    outputs = Lengths("lognormal", max(longest // 16, 1), 0.8, recipe.serve.max_new_tokens)
    waiting = backlog(SAMPLE, prompts, outputs, seed=1)
    capacity_rps = max(predicted(plan, waiting, math.inf)["throughput_rps"] for plan in plans)
    return generate(Arrivals(OVERLOAD * capacity_rps), window_s, prompts, outputs, seed=0)


def predicted(plan: Plan, trace: Trace, limit_s: float) -> dict[str, float]:
    """Metrics of a simulation with the plan's fit. Requests that have not ended after `limit_s` are
    not served, as in a measurement.
    """
    recipe = plan.recipe
    limit = recipe.serve.max_new_tokens
    flush_s = recipe.engine.flush_s
    world = world_from_fit(plan.fit, workers=plan.workers, max_new_tokens=limit, flush_s=flush_s)
    policy = make_policy(plan.policy.name, plan.policy.parameters)
    result = simulate(trace, policy, world)
    served = result.served
    in_time = replace(served, ok=served.ok & (served.finish_s <= limit_s))
    return summarize(in_time, recipe.sla) | result.counters


async def _replay_each(
    plans: Sequence[Plan], titles: Sequence[str], trace: Trace, limit_s: float
) -> list[Outcome]:
    pool = ProcessWorkers(plans[0].recipe, plans[0].workers)
    workers = KeptWorkers(pool)
    outcomes = []
    try:
        for plan, title in zip(plans, titles, strict=True):
            outcome = await _replay(plan, title, trace, workers, limit_s)
            measured = outcome.measured["throughput_rps"]
            print(
                f"{title}: {outcome.served} of {outcome.requests} served, {measured:.2f}/s",
                flush=True,
            )
            outcomes.append(outcome)
    finally:
        await pool.stop()
    return outcomes


async def _replay(
    plan: Plan, title: str, trace: Trace, workers: KeptWorkers, limit_s: float
) -> Outcome:
    done: list[ActiveRequest] = []
    stats = make_stats(plan)
    driver = Driver(make_scheduler(plan), workers, stats, on_end=lambda live, _: done.append(live))
    await driver.start()
    start_s = driver.now_s
    limit_at_s = time.monotonic() + limit_s
    requests = await _send(driver, plan, trace)
    while len(done) < len(requests) and time.monotonic() < limit_at_s and not driver.bug:
        await asyncio.sleep(0.05)
    for live in requests:
        driver.cancel(live)
    await _until_idle(driver)
    if driver.bug:
        raise driver.bug
    await driver.stop()
    await workers.forget()
    return _outcome(plan, title, trace, requests, start_s, stats, limit_s)


async def _send(driver: Driver, plan: Plan, trace: Trace) -> list[ActiveRequest]:
    """Submit every request when it arrives. The scheduler does not know the output lengths."""
    rng = np.random.default_rng(0)
    limit = plan.recipe.serve.max_new_tokens
    vocab = plan.fit.engine.vocab_size
    drawn = [tuple(rng.integers(vocab, size=count).tolist()) for count in trace.prompt_tokens]
    sampling = SamplingParams(ignore_eos=True)
    start_s = time.monotonic()
    requests = []
    for number, (at_s, prompt, output) in enumerate(
        zip(trace.arrival_s, drawn, trace.output_tokens, strict=True)
    ):
        await asyncio.sleep(max(start_s + at_s - time.monotonic(), 0.0))
        request = GenerationRequest(
            str(number), prompt, limit, sampling, end_after=int(min(output, limit))
        )
        requests.append(driver.submit(request, TextOutput(NoText()), Reply(1, patient=True)))
    return requests


async def _until_idle(driver: Driver) -> None:
    """Cancelled rows leave with their batch; a worker that continues is a bug, hence the error."""
    async with asyncio.timeout(SETTLE_S):
        while driver.flights:
            await asyncio.sleep(0.05)


def _outcome(
    plan: Plan,
    title: str,
    trace: Trace,
    requests: Sequence[ActiveRequest],
    start_s: float,
    stats: Stats,
    limit_s: float,
) -> Outcome:
    ok = np.array([live.status in ("stop", "length") for live in requests])
    served = Served(
        arrival_s=trace.arrival_s + start_s,
        first_token_s=np.array([live.first_token_s for live in requests]),
        finish_s=np.array([live.last_token_s for live in requests]),
        output_tokens=np.array([len(live.tokens) for live in requests], dtype=np.int64),
        max_gap_s=np.zeros(len(requests)),  # not measured here
        ok=ok,
    )
    engine_s = max(stats.engine_s, 1e-9)
    hops = max(sum(stats.hop.counts), 1)
    return Outcome(
        title=title,
        policy=plan.policy,
        requests=len(requests),
        served=int(ok.sum()),
        measured={
            key: value for key, value in summarize(served, {}).items() if math.isfinite(value)
        },
        predicted=predicted(plan, trace, limit_s),
        evictions=stats.preemptions,
        oom_events=stats.oom_events,
        worker_restarts=stats.worker_restarts,
        slowdown=stats.batch_s / stats.predicted_batch_s if stats.predicted_batch_s else None,
        deciding_percent=100.0 * stats.deciding.total / engine_s,
        hop_percent=100.0 * stats.hop.total / engine_s,
        hop_mean_s=stats.hop.total / hops,
        step_mean_s=engine_s / max(stats.engine_steps, 1),
    )


class NoText:
    """A detokenizer for requests that need no text."""

    def feed(self, tokens: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class KeptWorkers:
    """Workers that outlive a driver: loaded once, and announced to the current driver."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.size = workers.size
        self.tell = workers.tell
        self.kill = workers.kill
        self.silent = workers.silent
        self._on_event: OnEvent | None = None
        self._ready: dict[int, WorkerReady] = {}
        self._rows: dict[int, int] = {}  # by worker: how many row numbers its rounds have used

    async def start(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        if not self._ready:
            await self.workers.start(self._hear)
        else:
            for event in self._ready.values():
                on_event(event)

    def _hear(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerReady):
            self._ready[event.worker] = event
        if self._on_event is not None:
            self._on_event(event)

    def run(self, worker: int, batch: RunBatch, estimated_s: float = math.inf) -> None:
        numbers = batch.plan.numbers if isinstance(batch, RunRound) else ()
        self._rows[worker] = max(self._rows.get(worker, 0), *(number + 1 for number in numbers), 0)
        self.workers.run(worker, batch, estimated_s)

    async def forget(self) -> None:
        """Make idle engines drop the cancelled rows: the next driver uses the same numbers."""
        for worker, count in self._rows.items():
            done = asyncio.Event()
            self._on_event = lambda event, done=done: (
                done.set() if isinstance(event, RoundDone) else None
            )
            eviction = Round(steps=0, evict=tuple(range(count)))
            self.workers.run(worker, RunRound(LAST_BATCH, eviction))
            await done.wait()
        self._rows.clear()

    async def stop(self) -> None:
        self._on_event = None
