"""Requests at an overload against live workers, through the server's own driver: all of it but HTTP
and text.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import Field

from toolkit.deploy.plan import make_plan
from toolkit.engines.protocol import Round, Row, SamplingParams
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
from toolkit.workers.protocol import OnEvent, RoundDone, WorkerEvent, WorkerReady, Workers
from toolkit.workers.supervisor import SilentWorkerError

OVERLOAD = 1.5  # arrivals, over what the best contender is predicted to serve
SETTLE_S = 60.0  # for rows that were given up to leave their workers
LAST_BATCH = 1 << 40  # a number that no scheduler gives
SAMPLE = 300  # requests of the backlog that tells the capacity


@dataclass(slots=True, frozen=True)
class Pace:
    """Seconds of arrivals, and of one contender: what has not ended by then is given up, and counts
    as not served.
    """

    window_s: float
    limit_s: float


@dataclass(slots=True, frozen=True)
class Contender:
    """A policy under the name that tables give it; `settings` of SLS's safe batch size."""

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
        description="simulated with the fit, without a limit of time"
    )
    evictions: int
    oom_events: int
    worker_restarts: int
    slowdown: float | None = Field(description="of batches, over what the laws say")
    deciding_percent: float = Field(description="of engine time")
    hop_percent: float = Field(description="of engine time")
    hop_mean_s: float
    step_mean_s: float


class LiveFile(Envelope):
    """slices.json or rounds.json, whole."""

    trace: list[str]
    limit_s: float
    capacity_tokens: int
    outcomes: list[Outcome]


def replay_all(
    folder: Path, engine: str, contenders: Sequence[Contender], pace: Pace, name: str
) -> None:
    """Serve one trace under every contender, on the same workers, and write LiveFile `name`."""
    source, fitted = folder / f"recipe-{engine}.json", folder / f"fit-{engine}.json"
    recipe, fit = load_recipe(source), read_file(Fit, fitted)
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
    """Poisson arrivals for `window_s`, `OVERLOAD` times as many as the best of the plans is
    predicted to serve.

    Prompts and outputs are lognormal with a median of 1/16 of the longest request, up to a quarter
    of it.
    """
    longest = plans[0].recipe.model.max_model_len
    lengths = Lengths("lognormal", max(longest // 16, 1), 0.8, max(longest // 4, 1))
    waiting = backlog(SAMPLE, lengths, lengths, seed=1)
    capacity_rps = max(_predicted(plan, waiting)["throughput_rps"] for plan in plans)
    return generate(Arrivals(OVERLOAD * capacity_rps), window_s, lengths, lengths, seed=0)


def _predicted(plan: Plan, trace: Trace) -> dict[str, float]:
    recipe = plan.recipe
    limit, flush_s = recipe.serve.max_new_tokens, recipe.engine.flush_s
    world = world_from_fit(plan.fit, workers=plan.workers, max_new_tokens=limit, flush_s=flush_s)
    policy = make_policy(plan.policy.name, plan.policy.parameters)
    return simulate(trace, policy, world).metrics(recipe.sla)


async def _replay_each(
    plans: Sequence[Plan], titles: Sequence[str], trace: Trace, limit_s: float
) -> list[Outcome]:
    recipe = plans[0].recipe
    flush_s = recipe.engine.flush_s
    pool = ProcessWorkers(
        recipe.model, recipe.engine, recipe.hardware, plans[0].workers, flush_s=flush_s
    )
    workers, outcomes = KeptWorkers(pool), []
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
    lives = await _send(driver, plan, trace)
    while len(done) < len(lives) and time.monotonic() < limit_at_s and not driver.bug:
        await asyncio.sleep(0.05)
    for live in lives:
        driver.cancel(live)
    await _until_idle(driver)
    if driver.bug:
        raise driver.bug
    await driver.stop()
    await workers.forget()
    return _outcome(plan, title, trace, lives, start_s, stats)


async def _send(driver: Driver, plan: Plan, trace: Trace) -> list[ActiveRequest]:
    """Submit every request when it arrives. The scheduler does not learn how long outputs will be."""
    rng = np.random.default_rng(0)
    limit, vocab = plan.recipe.serve.max_new_tokens, plan.fit.engine.vocab_size
    drawn = [tuple(rng.integers(vocab, size=count).tolist()) for count in trace.prompt_tokens]
    sampling = SamplingParams(ignore_eos=True)
    start_s, lives = time.monotonic(), []
    for number, (at_s, prompt, output) in enumerate(
        zip(trace.arrival_s, drawn, trace.output_tokens, strict=True)
    ):
        await asyncio.sleep(max(start_s + at_s - time.monotonic(), 0.0))
        ask = GenerationRequest(
            str(number), prompt, limit, sampling, end_after=int(min(output, limit))
        )
        lives.append(driver.submit(ask, TextOutput(NoText()), Reply(1, patient=True), 0))
    return lives


async def _until_idle(driver: Driver) -> None:
    """Rows that were given up leave with their batch; a worker that keeps on is a bug worth an
    error.
    """
    async with asyncio.timeout(SETTLE_S):
        while driver.flights:
            await asyncio.sleep(0.05)


def _outcome(
    plan: Plan,
    title: str,
    trace: Trace,
    lives: Sequence[ActiveRequest],
    start_s: float,
    stats: Stats,
) -> Outcome:
    ok = np.array([live.status in ("stop", "length") for live in lives])
    served = Served(
        arrival_s=trace.arrival_s + start_s,
        first_token_s=np.array([live.first_token_s for live in lives]),
        finish_s=np.array([live.last_token_s for live in lives]),
        output_tokens=np.array([len(live.tokens) for live in lives], dtype=np.int64),
        max_gap_s=np.zeros(len(lives)),  # not followed here
        ok=ok,
    )
    engine_s = max(stats.engine_s, 1e-9)
    hops = max(sum(stats.hop.counts), 1)
    return Outcome(
        title=title,
        policy=plan.policy,
        requests=len(lives),
        served=int(ok.sum()),
        measured={
            key: value for key, value in summarize(served, {}).items() if math.isfinite(value)
        },
        predicted=_predicted(plan, trace),
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
    """A detokenizer for requests that nobody reads."""

    def feed(self, tokens: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


class KeptWorkers:
    """Workers that outlive a driver: loaded once, and told to whoever drives now."""

    def __init__(self, workers: Workers) -> None:
        self.size = workers.size
        self._workers = workers
        self._on_event: OnEvent | None = None
        self._ready: dict[int, WorkerReady] = {}
        self._rows: dict[int, int] = {}  # by worker: numbers that rows of rounds have had

    async def start(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        if not self._ready:
            await self._workers.start(self._hear)
        else:
            for event in self._ready.values():
                on_event(event)

    def _hear(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerReady):
            self._ready[event.worker] = event
        if self._on_event is not None:
            self._on_event(event)

    def run(
        self,
        worker: int,
        batch_id: int,
        rows: Sequence[Row],
        steps: int,
        estimated_s: float = math.inf,
    ) -> None:
        self._workers.run(worker, batch_id, rows, steps, estimated_s)

    def run_round(
        self, worker: int, batch_id: int, plan: Round, estimated_s: float = math.inf
    ) -> None:
        self._rows[worker] = max(
            self._rows.get(worker, 0), *(number + 1 for number in plan.numbers), 0
        )
        self._workers.run_round(worker, batch_id, plan, estimated_s)

    async def forget(self) -> None:
        """Have idle engines drop the rows that were given up: the next driver's rows get the same
        numbers.
        """
        for worker, count in self._rows.items():
            done = asyncio.Event()
            self._on_event = lambda event, done=done: (
                done.set() if isinstance(event, RoundDone) else None
            )
            self._workers.run_round(worker, LAST_BATCH, Round(steps=0, evict=tuple(range(count))))
            await done.wait()
        self._rows.clear()

    def interrupt(self, worker: int, batch_id: int) -> None:
        self._workers.interrupt(worker, batch_id)

    def cancel(self, worker: int, batch_id: int, request_ids: Sequence[str]) -> None:
        self._workers.cancel(worker, batch_id, request_ids)

    def kill(self, worker: int) -> None:
        self._workers.kill(worker)

    def silent(self) -> list[SilentWorkerError]:
        return self._workers.silent()

    async def stop(self) -> None:
        self._on_event = None
