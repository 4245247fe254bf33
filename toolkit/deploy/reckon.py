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
from toolkit.metrics import judge, latencies, statistic
from toolkit.sched.policies.vllm import ROWS, VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.sim.world import World
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import mean_rate, prepare, scale_rate
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
STEPS = 8  # between a rate and twice it: 9 % each
MAX_OCTAVES = 10  # a rate is tried up to 1,024 times the trace's own, and down to a 1,024th
# Percent by which a prediction may be off: without a bench, and the least.
USUAL_ERROR = 25
MIN_ERROR = 10


def drain_s(order: Order) -> Sourced[int]:
    """Seconds that running requests get to end: the longest that a request is expected to take.

    That is the largest of each target for E2E, the p99 of E2E with a margin (`margin_percent`),
    and the time of `serve.max_new_tokens` tokens in a full batch.
    """
    targets = order.plan.recipe.sla
    times = [
        (limit, f"the target {key} is {limit:.3g} s")
        for key, limit in targets.items()
        if key.startswith("e2e_")
    ]
    p99, margin = e2e_p99_s(order), margin_percent(order)
    longer = p99.value * (1 + margin.value / 100)
    times.append((longer, f"{p99.source}; {margin.value} % more: {margin.source}"))
    times.append(_longest_request_s(order))
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


def e2e_p99_s(order: Order) -> Sourced[float]:
    """The p99 of E2E in seconds: as the tuning predicted it, else as it is simulated here.

    Without a tuning the traffic is not known. Then the trace is simulated at the greatest rate at
    which this plan keeps its targets: at a greater one admission refuses requests.
    """
    plan = order.plan
    if "e2e_p99_s" in plan.outcome.metrics:
        seconds = plan.outcome.metrics["e2e_p99_s"]
        return Sourced(seconds, f"the tuning predicts an e2e_p99 of {seconds:.3g} s")
    trace = order.trace or read_trace(trace_path(default_trace(plan.recipe)))[0]
    seconds, rate_rps = _busiest(plan, prepare(trace, plan.recipe))
    at = f"at {rate_rps:.3g} requests/s, the most that keep the targets" if rate_rps else "at once"
    name = Path(trace.source).name
    source = f"not tuned, so simulated with {name} {at}: an e2e_p99 of {seconds:.3g} s"
    return Sourced(seconds, source)


def _longest_request_s(order: Order) -> tuple[float, str]:
    """Seconds of the longest request that the recipe allows, in a full batch, and their source."""
    plan = order.plan
    laws = laws_from_fit(plan.fit).rounds
    valid = plan.fit.decode.valid
    running = min(rows(order).value, valid.rows_max)
    tokens = plan.recipe.serve.max_new_tokens
    prefill_s = laws.prefill_s(1, valid.length_max)
    seconds = prefill_s + laws.decode_s(running, valid.length_max // 2, tokens)
    among = f"{tokens:,} tokens (serve.max_new_tokens) among {running} requests"
    return seconds, f"fit: {among} take {seconds:.3g} s"


def rows(order: Order) -> Sourced[int]:
    """The greatest number of requests that run at once."""
    plan = order.plan
    for name in ("max_batch_size", ROWS):
        named = plan.settings.parameters.get(name)
        if isinstance(named, int) and named > 0:
            return Sourced(named, f"plan: {name} of policy '{plan.settings.policy}'")
    if plan.fit.engine.max_rows:
        return Sourced(plan.fit.engine.max_rows, "fit: the greatest number the engine runs")
    largest = plan.fit.decode.valid.rows_max
    return Sourced(largest, "fit: the largest measured batch; the laws extrapolate beyond it")


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


def load_s(order: Order) -> Sourced[int | None]:
    """Return the seconds that loading took where the profile was measured, else None."""
    measured = order.plan.fit.engine.load_s
    if measured is None:
        why = "the time of loading was not measured: `llmctl profile` and `llmctl fit` measure it"
        return Sourced(None, why)
    return Sourced(math.ceil(measured), f"fit: loading took {measured:g} s")


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


def gap_target(recipe: Recipe) -> tuple[str, float] | None:
    """The tightest target on the time between tokens, if there is one."""
    names = ("tpot", "itl", "mtpot")
    gaps = [target for target in recipe.sla.items() if target[0].split("_")[0] in names]
    return min(gaps, key=lambda item: item[1], default=None)


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


def remembered(function: Callable[..., T]) -> Callable[..., T]:
    """Keep what a function of a plan, a trace and more found: it takes many simulations."""
    kept: dict[tuple[object, ...], T] = {}

    def found(plan: Plan, trace: Trace, *more: object) -> T:
        columns = trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.max_tokens
        key = (plan.model_dump_json(), *(column.tobytes() for column in columns))
        if key not in kept:
            kept[key] = function(plan, trace, *more)
        return kept[key]

    return found


@remembered
def _busiest(plan: Plan, trace: Trace) -> tuple[float, float]:
    """The p99 of E2E, in seconds, at the greatest rate at which the plan keeps its targets, and
    that rate, within 10 %. The rate is 0 for a trace that arrives all at once, as it does here.

    If no rate keeps them, it is the smallest that was tried.
    """
    deployment = Deployment.of_plan(plan)
    policy = deployment.policy()
    world = deployment.world(Workload(trace))
    own_rps = mean_rate(trace)

    def at(step: int) -> tuple[bool, float]:
        """Whether targets are kept at 2 ** (step / STEPS) times the own rate, and the p99."""
        scaled = scale_rate(trace, own_rps * 2 ** (step / STEPS)) if own_rps else trace
        served = simulate(scaled, policy, world).served
        kept = judge(served, plan.recipe.sla) == "kept"
        return kept, statistic(latencies(served)["e2e"], "p99")

    kept, seconds = at(0)
    step = 0
    if own_rps:
        stride = STEPS if kept else -STEPS
        tried = {0: (kept, seconds)}
        while tried[step][0] == kept and abs(step) < MAX_OCTAVES * STEPS:
            step += stride
            tried[step] = at(step)
        low, high = sorted((step, step - stride))
        while high - low > 1 and tried[low][0]:
            middle = (low + high) // 2
            tried[middle] = at(middle)
            low, high = (middle, high) if tried[middle][0] else (low, middle)
        step = low
        seconds = tried[step][1]
    return seconds, own_rps * 2 ** (step / STEPS)


@remembered
def _simulated(plan: Plan, lengths: Trace, targets: Mapping[str, float]) -> tuple[int, int]:
    """Return how many requests at once keep the targets, and how many of those start at once."""
    deployment = Deployment.of_plan(plan)
    policy = deployment.policy()
    world = deployment.world(Workload(lengths))

    def keeps(count: int) -> bool:
        result = simulate(backlog(lengths, count), policy, world)
        return bool(result.served.ok.all()) and max(result.sla_ratios(targets).values()) <= 1.0

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
