"""Numbers that several targets share, each with its source.

First drain, loading, memory and replicas of a server. A number that rests on no measurement says
so. Then the autoscaling threshold: how many requests may wait before first tokens come too late.

For the threshold, a backlog of n requests arrives at an idle replica, and the simulator, with the
plan's policy and the fit's laws, says when each gets its first token. The threshold is the largest
n that keeps the recipe's TTFT targets, minus the requests that start at once: the others are those
that /metrics counts as waiting. It does not include the time that a new replica takes to load.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from toolkit.deploy.order import ExplainedValue, Order, Sourced
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.io import digest
from toolkit.files.plan import Kind, Plan
from toolkit.files.recipe import DTYPE_BYTES, Recipe, ServeSpec, TuneSpec
from toolkit.metrics import judge, latencies, statistic
from toolkit.sched.policies import make_any
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, simulate
from toolkit.sim.world import World, fleet, world_from_fit
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import mean_rate, prepare, scale_rate
from toolkit.units import GIB, MIB

MIN_DRAIN_S = 30
PROPAGATION_S = 5  # until a cluster's proxies know that /ready answers 503
# After the drain: last bytes (5 s), workers that end their step or are killed (10 s), and a margin.
AFTER_DRAIN_S = 20
MIN_STARTUP_S = 1800  # of the first load
LOAD_S = 600
SLOW_BYTES_PER_S = 50_000_000  # loading without the download, and a slow link
# Of a measured time of loading: a disk's cache was warm, or other pods load from the same disk.
LOAD_FACTOR = 3
MIN_MEASURED_STARTUP_S = 300
SPARE_GIB = 2  # of the models' cache: tokenizer, config, locks, partial downloads
# Host memory of `serve` itself, and of a worker process before it loads a model:
# docs/how-to/deploy.md
FRONT_MIB = 768
WORKER_MIB = 1024
# A pod's memory limit over its request: libraries and loading were not measured exactly.
LIMIT_FACTOR = 2
SHARED_GIB = 1  # of /dev/shm, for NCCL between a worker's processes
UNKNOWN_MODELS_GIB = 1024  # the models' cache, where a size is not known
MAX_PLAN_BYTES = 900 * 1024  # a ConfigMap and systemd's credentials both hold at most 1 MiB
MODELS = "/models"  # where a pod has the volume of models
MAX_BACKLOG = 4096  # requests: no server needs a longer queue
STEPS = 8  # between a rate and twice it: 9 % each
MAX_OCTAVES = 10  # a rate is tried up to 1,024 times the trace's own, and down to a 1,024th
# Percent by which a prediction may be off: without a validation, and the least.
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
    if order.validation is None:
        return Sourced(USUAL_ERROR, "the fit's predictions are not validated")
    worst = max((abs(metric.worst_percent) for metric in order.validation.metrics), default=0.0)
    why = f"the worst error of the fit's validation, at least {MIN_ERROR} %"
    return Sourced(max(math.ceil(worst), MIN_ERROR), why)


def e2e_p99_s(order: Order) -> Sourced[float]:
    """The p99 of E2E in seconds: as the tuning predicted it, else as it is simulated here.

    Without a tuning the traffic is not known. Then the trace is simulated at the greatest rate at
    which this plan keeps its targets: at a greater one admission refuses requests.
    """
    plan = order.plan
    if "e2e_p99_s" in plan.predicted:
        seconds = plan.predicted["e2e_p99_s"]
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
    running = min(rows(order).value, valid.batch_size_max)
    tokens = plan.recipe.serve.max_new_tokens
    prefill_s = laws.prefill_s(1, valid.length_max)
    seconds = prefill_s + laws.decode_s(running, valid.length_max // 2, tokens)
    among = f"{tokens:,} tokens (serve.max_new_tokens) among {running} requests"
    return seconds, f"fit: {among} take {seconds:.3g} s"


def rows(order: Order) -> Sourced[int]:
    """The greatest number of requests that run at once."""
    plan = order.plan
    for name in ("max_batch_size", "max_num_seqs"):
        named = plan.policy.parameters.get(name)
        if isinstance(named, int) and named > 0:
            return Sourced(named, f"plan: {name} of policy '{plan.policy.name}'")
    if plan.fit.engine.max_rows:
        return Sourced(plan.fit.engine.max_rows, "fit: the greatest number the engine runs")
    largest = plan.fit.decode.valid.batch_size_max
    return Sourced(largest, "fit: the largest measured batch; the laws extrapolate beyond it")


def grace_s(drain: Sourced[int], notice_s: int = 0) -> Sourced[int]:
    """Seconds between SIGTERM and SIGKILL: notice, drain, and time for the end of the process."""
    parts = f"notice {notice_s} + " if notice_s else ""
    seconds = notice_s + drain.value + AFTER_DRAIN_S
    return Sourced(seconds, f"{parts}drain {drain.value} + {AFTER_DRAIN_S} for the last bytes")


def startup_s(order: Order) -> Sourced[int]:
    """Seconds that the first load may take, with its download.

    It is the recipe's `serve.load_timeout_s` where that is not the default. Else it rests on the
    time that the profiles measured, else on a bound, which is larger for models above 56 GiB.
    """
    kinds = order.plan.kinds
    given_s = order.plan.recipe.serve.load_timeout_s
    if given_s != ServeSpec.model_fields["load_timeout_s"].default:
        return Sourced(math.ceil(given_s), "recipe: serve.load_timeout_s")
    from_hub = order.plan.recipe.model.from_hub
    speed = f"{SLOW_BYTES_PER_S / 1e6:.0f} MB/s"
    weights = max(weight_bytes(kind) or 0 for kind in kinds)
    download_s = math.ceil(weights / SLOW_BYTES_PER_S)
    measured = [seconds for kind in kinds if (seconds := kind.fit.engine.load_s) is not None]
    if len(measured) == len(kinds):
        seconds = LOAD_FACTOR * max(measured)
        source = f"fit: loading took {max(measured):g} s; {LOAD_FACTOR} times that"
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


def compile_caches(folder: str) -> dict[str, str]:
    """Where compiled kernels are kept below `folder`, which outlives the process: variables of
    vLLM, Triton and torch.compile. Else each start compiles again, for minutes.
    """
    return {
        "VLLM_CACHE_ROOT": f"{folder}/cache/vllm",
        "TRITON_CACHE_DIR": f"{folder}/cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache/inductor",
    }


def explain_caches(folder: str) -> ExplainedValue:
    """The line of EXPLAIN.md about `compile_caches`."""
    names = ", ".join(compile_caches(folder))
    why = "beside the models, and kept as long: a restart does not compile kernels again"
    return ExplainedValue(names, f"{folder}/cache", why)


def load_s(order: Order) -> Sourced[int | None]:
    """Seconds that loading took where the profile was measured; None where it was not measured."""
    measured = [kind.fit.engine.load_s for kind in order.plan.kinds]
    known = [seconds for seconds in measured if seconds is not None]
    if len(known) < len(measured):
        why = "the time of loading was not measured: `llmctl profile` and `llmctl fit` measure it"
        return Sourced(None, why)
    return Sourced(math.ceil(max(known)), f"fit: loading took {max(known):g} s")


def weight_bytes(kind: Kind) -> int | None:
    """Bytes of a kind's weights on all GPUs of a worker; None where not known."""
    model = kind.recipe.model
    facts = kind.fit.engine
    return model.weight_bytes or facts.parameters * DTYPE_BYTES[model.dtype] or None


def models_gib(kinds: Sequence[Kind]) -> Sourced[int] | None:
    """GiB for the files of these kinds' models; None where a size is not known.

    A model of random weights has no files.
    """
    sizes = {
        (kind.recipe.model.source, kind.recipe.model.revision): weight_bytes(kind)
        for kind in kinds
        if kind.recipe.model.source != "random"
    }
    if not sizes:
        return Sourced(SPARE_GIB, "the model's weights are random: it has no files")
    if None in sizes.values():
        return None
    gib = sum(size or 0 for size in sizes.values()) / GIB
    source = f"twice {gib:.3g} GiB of weights, for another revision or dtype, and {SPARE_GIB} GiB"
    return Sourced(math.ceil(2 * gib) + SPARE_GIB, source)


def gpus(recipe: Recipe) -> Sourced[int]:
    """GPUs of one server; 0 where the recipe runs on CPUs."""
    if recipe.hardware.device == "cpu":
        return Sourced(0, "the recipe's hardware.device is cpu")
    size = recipe.engine.tensor_parallel_size
    return Sourced(recipe.workers * size, f"recipe: {recipe.workers} workers, {size} GPU for each")


def cpus(recipe: Recipe) -> Sourced[int]:
    """CPU cores that a server requests: its workers' threads, and one for the front."""
    threads = (recipe.engine.threads or 1) * recipe.engine.tensor_parallel_size
    source = f"recipe: {recipe.workers} workers x {threads} threads, and one for the front"
    return Sourced(recipe.workers * threads + 1, source)


def memory_mib(order: Order) -> Sourced[int]:
    """Host memory in MiB that a server with all its workers requests."""
    worker = worker_memory_mib(order.plan.kinds[0])
    workers = order.plan.recipe.workers
    source = f"{FRONT_MIB} MiB for the front, and for each of {workers} workers {worker.source}"
    return Sourced(FRONT_MIB + workers * worker.value, source)


def worker_memory_mib(kind: Kind) -> Sourced[int]:
    """Host memory of one worker in MiB, also on a GPU, since the weights pass through it once."""
    recipe = kind.recipe
    fit = kind.fit
    weights = recipe.model.weight_bytes or 0
    cache = fit.engine.kv_budget_bytes if recipe.hardware.device == "cpu" else 0
    libraries = WORKER_MIB * recipe.engine.tensor_parallel_size  # a process for each share
    parts = [f"{libraries} MiB of libraries", f"{math.ceil(weights / MIB):,} MiB of weights"]
    parts += [f"{math.ceil(cache / MIB):,} MiB of KV cache"] if cache else []
    return Sourced(libraries + math.ceil((weights + cache) / MIB), " + ".join(parts))


def memory_limit_mib(order: Order) -> Sourced[int]:
    """Host memory in MiB at which the pod of a server is killed."""
    requested = memory_mib(order)
    workers = order.plan.recipe.workers
    extra = worker_extra_memory_mib(order.plan.kinds[0])
    source = f"{LIMIT_FACTOR} times what it requests"
    if extra.value:
        source += f", and for each of {workers} workers {extra.source}"
    return Sourced(LIMIT_FACTOR * requested.value + workers * extra.value, source)


def worker_extra_memory_mib(kind: Kind) -> Sourced[int]:
    """Host memory in MiB that a worker may use besides its request: swapped caches, shared memory,
    and the weights that all processes of a group load.
    """
    group = kind.recipe.engine.tensor_parallel_size
    weights = kind.recipe.model.weight_bytes or 0
    sizes = {
        "MiB of swapped caches": kind.fit.swap.host_bytes if kind.fit.swap else 0,
        f"MiB of weights in the {group - 1} other processes while they load": (group - 1) * weights,
        "MiB of /dev/shm": SHARED_GIB * GIB if group > 1 else 0,
    }
    parts = [(math.ceil(size / MIB), name) for name, size in sizes.items() if size]
    source = " + ".join(f"{size:,} {name}" for size, name in parts)
    return Sourced(sum(size for size, _ in parts), source)


def replicas(order: Order) -> Sourced[int]:
    """The number of replicas, each with all the plan's workers."""
    needed = order.plan.workers_needed
    workers = order.plan.workers
    if order.options.replicas:
        return Sourced(order.options.replicas, "--replicas")
    if needed is None:
        return Sourced(1, "the default; for more: --replicas, or tune with --workers auto")
    simulated = "each has its own scheduler, while one for all was simulated"
    source = f"tuned: {needed} workers keep all limits, {workers} in each replica; {simulated}"
    return Sourced(math.ceil(needed / workers), source)


def gap_target(recipe: Recipe) -> tuple[str, float] | None:
    """The tightest target on the time between tokens, if there is one."""
    names = ("tpot", "itl", "mtpot")
    gaps = [target for target in recipe.sla.items() if target[0].split("_")[0] in names]
    return min(gaps, key=lambda item: item[1], default=None)


def check_podable(order: Order) -> None:
    """Raise `InputError` where pods cannot have the plan or the model."""
    check_plan_size(order.text, "a ConfigMap holds")
    source = order.plan.recipe.model.source
    if source.startswith(("/", ".", "~")) and not source.startswith(f"{MODELS}/"):
        raise InputError(
            f"model.source {source} is a folder of this machine, which a pod does not have",
            f"put it on a volume and set {MODELS}/NAME, with --model-claim; or set a hub id",
        )


def check_plan_size(text: str, holder: str) -> None:
    """Raise `InputError` where the plan is too large; `holder` says in words what holds it."""
    size = len(text.encode())
    if size > MAX_PLAN_BYTES:
        raise InputError(
            f"the plan has {size >> 10} KiB; {holder} {MAX_PLAN_BYTES >> 10} KiB of it",
            "render the target 'local' and copy the folder",
        )


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
    those of the trace, scaled for the recipe, in its order and repeated; without a trace, those of
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


_Key = tuple[str, tuple[str, ...], bytes]
_ANSWERS: dict[_Key, tuple[int, int]] = {}
_BUSIEST: dict[_Key, tuple[float, float]] = {}


def _key(plan: Plan, trace: Trace) -> _Key:
    """All that a simulation of a plan with a trace depends on."""
    kinds = tuple(kind.model_dump_json() for kind in plan.kinds)
    columns = trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.max_tokens
    return plan.policy.model_dump_json(), kinds, b"".join(column.tobytes() for column in columns)


def _world(plan: Plan) -> World:
    """The plan's workers, in the simulator."""
    limit = plan.recipe.serve.max_new_tokens
    seed = plan.recipe.tune.seed
    return fleet(
        [
            world_from_fit(kind.fit, workers=kind.workers, max_new_tokens=limit, seed=seed)
            for kind in plan.kinds
        ]
    )


def _busiest(plan: Plan, trace: Trace) -> tuple[float, float]:
    """The p99 of E2E, in seconds, at the greatest rate at which the plan keeps its targets, and
    that rate, within 10 %. The rate is 0 for a trace that arrives all at once, as it does here.

    If no rate keeps them, it is the smallest that was tried. Answers are cached, as in
    `_simulated`.
    """
    key = _key(plan, trace)
    if key in _BUSIEST:
        return _BUSIEST[key]
    policy = make_any(plan.policy.name, plan.policy.parameters)
    world = _world(plan)
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
    _BUSIEST[key] = seconds, own_rps * 2 ** (step / STEPS)
    return _BUSIEST[key]


def _simulated(plan: Plan, lengths: Trace, targets: Mapping[str, float]) -> tuple[int, int]:
    """How many requests at once keep the targets, and how many of those start at once.

    Answers are cached by all that they depend on: each takes many simulations, and the files of one
    target need it several times.
    """
    key = _key(plan, lengths)
    if key in _ANSWERS:
        return _ANSWERS[key]
    policy = make_any(plan.policy.name, plan.policy.parameters)
    world = _world(plan)

    def keeps(count: int) -> bool:
        result = simulate(backlog(lengths, count), policy, world)
        return bool(result.served.ok.all()) and max(result.sla_ratios(targets).values()) <= 1.0

    served = largest(keeps)
    at_once = _start_at_once(backlog(lengths, served), policy, world) if served else 0
    _ANSWERS[key] = served, at_once
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
    return sum(batch.size for batch in scheduler.tick(0.0))
