"""Numbers of one server, each with its source: drain, load, memory, and how many may wait.

The order's plan describes the server: with all its workers, or one of the replicas of an engine
that is a server of its own (`Values.server`). A number that rests on no measurement says so.

How many requests may wait before first tokens come too late: a backlog of n requests arrives at an
idle server, and the simulator, with the plan's policy and the fit's laws, says when each gets its
first token. The threshold is the largest n that keeps the recipe's TTFT targets, minus the requests
that start at once: /metrics counts the others as waiting. It does not include the time that a new
replica takes to load.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from toolkit.deploy.order import Order, Sourced
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.bench import HELD_TO
from toolkit.files.io import digest
from toolkit.files.plan import Plan
from toolkit.files.recipe import DTYPE_BYTES, Recipe, ServeSpec, TuneSpec
from toolkit.metrics import sla_ratios
from toolkit.sched.policies.vllm import ROWS, VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.sim.world import World
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import prepare
from toolkit.units import GIB

T = TypeVar("T")
MIN_DRAIN_S = 30
MIN_STARTUP_S = 1800  # of the first load
LOAD_S = 600
SLOW_BYTES_PER_S = 50_000_000  # loading without the download, and a slow link
# Of a measured time of loading: a disk's cache was warm, or other pods load from the same disk.
LOAD_FACTOR = 3
MIN_MEASURED_STARTUP_S = 300
SPARE_GIB = 2  # of the models' cache: tokenizer, config, locks, partial downloads
MAX_BACKLOG = 4096  # requests: no server needs a longer queue
# Percent by which a prediction may be off: without a bench, and the least.
USUAL_ERROR = 25
MIN_ERROR = 10


def drain_s(order: Order) -> Sourced[int]:
    """Seconds that running requests get to end: the longest that a request is expected to take.

    That is the largest of each target for E2E, the p99 of E2E that the tuning predicts, and the
    time of `serve.max_new_tokens` tokens in a full batch: while a server drains, nothing joins its
    batch. What is predicted has a margin (`margin_percent`).
    """
    margin = margin_percent(order)
    predicted = [_longest_request_s(order)]
    p99_s = order.plan.outcome.metrics.get("e2e_p99_s")
    if p99_s is not None:
        predicted.append((p99_s, f"the tuning predicts an e2e_p99 of {p99_s:.3g} s"))
    times = [
        (seconds * (1 + margin.value / 100), f"{source}; {margin.value} % more: {margin.source}")
        for seconds, source in predicted
    ]
    times += [
        (limit, f"the target {key} is {limit:.3g} s")
        for key, limit in order.plan.recipe.sla.items()
        if key.startswith("e2e_")
    ]
    longest, source = max(times, key=lambda time: time[0])
    if longest <= MIN_DRAIN_S:
        return Sourced(MIN_DRAIN_S, f"the least that llmctl gives; {source}")
    return Sourced(math.ceil(longest), f"{source}; rounded up: running requests can end")


def margin_percent(order: Order) -> Sourced[int]:
    """Percent by which predictions of this fit may be off: at most as measured, if it was."""
    if order.bench is None:
        return Sourced(USUAL_ERROR, "no bench has measured the fit's predictions")
    errors = {row.metric: abs(row.error_percent or 0.0) for row in order.bench.compared}
    worst = max((errors.get(metric, 0.0) for metric in HELD_TO), default=0.0)
    why = f"the worst error in the fit's bench, at least {MIN_ERROR} %"
    return Sourced(max(math.ceil(worst), MIN_ERROR), why)


def _longest_request_s(order: Order) -> tuple[float, str]:
    """Seconds of the longest request that the recipe allows, in a full batch, and their source."""
    plan = order.plan
    laws = laws_from_fit(plan.fit).rounds
    valid = plan.fit.decode.valid
    running = _rows(plan)
    tokens = plan.recipe.serve.max_new_tokens
    prefill_s = laws.prefill_s(1, valid.length_max)
    seconds = prefill_s + laws.decode_s(running, valid.length_max // 2, tokens)
    among = f"{tokens:,} tokens (serve.max_new_tokens) among {running} requests"
    return seconds, f"fit: {among} take {seconds:.3g} s"


def _rows(plan: Plan) -> int:
    """Return the greatest number of requests that run at once, within the measured ones."""
    measured = plan.fit.decode.valid.rows_max
    for name in ("max_batch_size", ROWS):
        named = plan.settings.parameters.get(name)
        if isinstance(named, int) and named > 0:
            return min(named, measured)
    return min(plan.fit.engine.max_rows or measured, measured)


def startup_s(order: Order) -> Sourced[int]:
    """Return the seconds that the first load may take, with its download.

    It is the recipe's `serve.load_timeout_s` where that is not the default. Else it rests on the
    time that the profile measured, else on a bound, which is larger for models above 56 GiB.
    """
    given_s = order.plan.recipe.serve.load_timeout_s
    if given_s != ServeSpec.model_fields["load_timeout_s"].default:
        return Sourced(math.ceil(given_s), "recipe: serve.load_timeout_s")
    from_hub = order.plan.recipe.model.from_hub
    speed = f"{SLOW_BYTES_PER_S / 1e6:.0f} MB/s"
    weights = weight_bytes(order.plan) or 0
    download_s = math.ceil(weights / SLOW_BYTES_PER_S)
    measured = order.plan.fit.engine.load_s
    if measured is not None:
        seconds = LOAD_FACTOR * measured
        source = f"fit: loading took {measured:g} s; {LOAD_FACTOR} times that"
        if seconds < MIN_MEASURED_STARTUP_S:
            seconds = MIN_MEASURED_STARTUP_S
            source += f", but at least {MIN_MEASURED_STARTUP_S} s"
        if from_hub and download_s:
            seconds += download_s
            source += f", and the download of {weights / GIB:.3g} GiB of weights at {speed}"
        return Sourced(60 * math.ceil(seconds / 60), source)
    bound = LOAD_S + download_s
    if bound <= MIN_STARTUP_S:
        parts = "download, disk, weights" if from_hub else "disk, weights"
        source = f"a bound: the time of loading was not measured ({parts})"
        return Sourced(MIN_STARTUP_S, source)
    sizes = f"{weights / GIB:.0f} GiB of weights at {speed}, and {LOAD_S} s"
    source = f"a bound: {sizes}; the time of loading was not measured"
    return Sourced(60 * math.ceil(bound / 60), source)


def weight_bytes(plan: Plan) -> int | None:
    """Return the bytes of the weights on all GPUs of a worker; None where not known."""
    model = plan.recipe.model
    return model.weight_bytes or plan.fit.engine.parameters * DTYPE_BYTES[model.dtype] or None


def models_gib(plan: Plan) -> Sourced[int] | None:
    """Return the GiB for the files of the model; None where its size is not known.

    A model of random weights has no files.
    """
    if plan.recipe.model.source == "random":
        return Sourced(SPARE_GIB, "the model's weights are random: it has no files")
    size = weight_bytes(plan)
    if size is None:
        return None
    gib = size / GIB
    source = f"twice {gib:.3g} GiB of weights, for another revision or dtype, and {SPARE_GIB} GiB"
    return Sourced(math.ceil(2 * gib) + SPARE_GIB, source)


def default_trace(recipe: Recipe) -> str:
    """The trace where none is given: the recipe's if it exists here, else a shipped one."""
    try:
        trace_path(recipe.tune.trace)
    except InputError:
        return str(TuneSpec.model_fields["trace"].default)
    return recipe.tune.trace


def tuned_trace(plan: Plan, folders: Sequence[Path]) -> Path | None:
    """The file of the trace that the plan was tuned on, by its digest: where the recipe names it,
    in one of these folders, or shipped. None where it is not found, or nothing was tuned.
    """
    recorded = plan.inputs.get("trace")
    if recorded is None:
        return None
    named = [plan.recipe.tune.trace, Path(recorded.name).stem]
    named += [str(folder / recorded.name) for folder in folders]
    for name in named:
        try:
            path = trace_path(name)
        except InputError:
            continue
        if digest(path).sha256 == recorded.sha256:
            return path
    return None


def ttft_targets(recipe: Recipe) -> dict[str, float]:
    """The recipe's targets for first tokens, in seconds."""
    return {key: limit for key, limit in recipe.sla.items() if key.startswith("ttft_")}


def waiting_threshold(plan: Plan, trace: Trace | None) -> Sourced[int | None]:
    """Requests that may wait for one replica, at least 1; or None with the reason.

    None means that no number of waiting requests tells whether the target is kept. Lengths are
    taken from the trace, scaled for the recipe, in its order and repeated; without a trace, from
    `default_trace`, unless the plan was tuned on a trace. The longest lengths that the recipe
    allows would not help: one batch of them takes the whole target, so no request could wait.
    """
    targets = ttft_targets(plan.recipe)
    if not targets:
        return Sourced(None, "the recipe has no TTFT target, which decides how many may wait")
    tuned = plan.inputs.get("trace")
    if trace is None and tuned is not None:
        return Sourced(None, f"the tuning's trace {tuned.name} is not here: name it with --trace")
    if trace is None:
        default = default_trace(plan.recipe)
        lengths = f"no trace was given, so with the lengths of {Path(default).name}"
        trace = read_trace(trace_path(default))[0]
    else:
        lengths = f"the lengths of {trace.source}"
    served, at_once = _simulated(plan, prepare(trace, plan.recipe), targets)
    kept = ", ".join(f"{key} {value:g}" for key, value in targets.items())
    simulated = f"simulated with the fit, {lengths}"
    result = f"{served} at once keep {kept}"
    if not served:
        return Sourced(None, f"{simulated}: not even one request alone keeps {kept}")
    if served <= at_once:
        return Sourced(None, f"{simulated}: {result}, and all start at once: none can wait")
    if served >= MAX_BACKLOG:
        result = f"even {MAX_BACKLOG} at once keep {kept}, and more were not tried"
    source = f"{simulated}: {result}; {at_once} of them start at once and do not wait"
    return Sourced(served - at_once, source)


def _simulated(plan: Plan, lengths: Trace, targets: Mapping[str, float]) -> tuple[int, int]:
    """Return how many requests at once keep the targets, and how many of those start at once."""
    deployment = Deployment.of_plan(plan)
    policy = deployment.policy()
    world = deployment.world(Workload(lengths))

    def keeps(count: int) -> bool:
        result = simulate(backlog(lengths, count), policy, world)
        return (
            bool(result.served.ok.all()) and max(sla_ratios(result.served, targets).values()) <= 1.0
        )

    served = largest(keeps)
    at_once = _start_at_once(backlog(lengths, served), policy, world) if served else 0
    return served, at_once


def largest(keeps: Callable[[int], bool]) -> int:
    """The largest count up to `MAX_BACKLOG` that `keeps`, as all smaller ones do; 0 for none.

    Counts double up to the first that does not keep: a large count takes long to simulate.
    """
    above = 1
    while above <= MAX_BACKLOG and keeps(above):
        above *= 2
    kept = above // 2
    between = range(kept + 1, min(above, MAX_BACKLOG + 1))
    return kept + bisect_left(between, True, key=lambda count: not keeps(count))


def backlog(lengths: Trace, count: int) -> Trace:
    """`count` requests that arrive at once, with these lengths, repeated where there are fewer."""
    chosen = np.arange(count) % len(lengths)
    return Trace(
        np.zeros(count),
        lengths.prompt_tokens[chosen],
        lengths.output_tokens[chosen],
        lengths.max_tokens[chosen],
    )


def _start_at_once(trace: Trace, policy: AnyPolicy, world: World) -> int:
    """How many of these requests run after the first tick.

    With chunks, vLLM admits the last request of its first pass perhaps in part.
    """
    if isinstance(policy, VllmPolicy):
        started = 0
        budget = policy.max_num_batched_tokens
        for worker in range(world.workers):
            prompts = trace.prompt_tokens[worker :: world.workers]
            ends = np.cumsum(prompts)
            admitted = ends - prompts < budget if policy.chunked_prefill else ends <= budget
            started += min(int(admitted.sum()), policy.max_num_seqs)
        return started
    assert not isinstance(policy, BuiltIn)
    world = world.under(policy)
    scheduler = Scheduler(policy, world.scheduled(), seed=world.seed)
    for request in requests_of(trace, world.max_new_tokens)[0]:
        scheduler.submit(request, 0.0)
    return sum(len(batch.jobs) for batch in scheduler.tick(0.0))
