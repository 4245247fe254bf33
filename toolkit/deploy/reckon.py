"""The numbers that several targets carry: how long an end takes, what a pod needs, how long loading
may take.

Each comes with its source. What is reckoned from nothing measured says so.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.deploy.order import Order, Reckoned
from toolkit.errors import InputError
from toolkit.files.plan import Kind, Plan
from toolkit.files.recipe import Recipe, TuneSpec
from toolkit.sched.policies import make_any
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn
from toolkit.sched.scheduler import Scheduler
from toolkit.sim.api import requests_of, simulate
from toolkit.sim.world import World, fleet, world_from_fit
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace, trace_path
from toolkit.traces.windows import prepare

GIB, MIB = 1 << 30, 1 << 20
LEAST_DRAIN_S = 30
PROPAGATION_S = 5  # until a cluster's proxies have heard that /ready turned 503
# after the drain: last bytes (5 s), workers that end their step or are killed (10 s), and a little
# more
LAST_S = 20
STARTUP_S = 1800  # the first load, at least
LOAD_S, SLOW_BYTES_PER_S = 600, 50_000_000  # beside the download, and a slow link's
SPARE_GIB = 2  # of the models' cache: tokenizer, config, locks, a download's pieces
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# of host memory: `serve` itself, and one worker process before it loads a model; see
# docs/deploying.md
FRONT_MIB = 768
WORKER_MIB = 1024
# a pod's memory limit, of what it asks for: libraries and loading were not measured to the last
# page
LIMIT_FACTOR = 2
SHARED_GIB = 1  # of /dev/shm, for NCCL between a worker's processes
UNKNOWN_MODELS_GIB = 1024  # the models' cache, where nothing says how large they are
PLAN_LIMIT_BYTES = 900 * 1024  # a ConfigMap and systemd's credentials both hold 1 MiB at most


def drain_s(order: Order) -> Reckoned[int]:
    """Seconds that running requests get after the end was announced: as long as the longest is
    expected to take.
    """
    wanted: dict[str, float] = {
        f"the target {key}": limit
        for key, limit in order.plan.recipe.sla.items()
        if key.startswith("e2e_")
    }
    predicted = {
        key: value
        for key, value in order.plan.predicted.items()
        if key in ("e2e_p99_s", "e2e_max_s")
    }
    wanted |= {f"the predicted {key}": value for key, value in predicted.items()}
    name, longest = max(wanted.items(), key=lambda one: one[1], default=("", 0.0))
    if longest <= LEAST_DRAIN_S:
        return Reckoned(
            LEAST_DRAIN_S, "llmctl's default; no target and no prediction asks for more"
        )
    return Reckoned(math.ceil(longest), f"{name} is {longest:.3g} s, rounded up: what runs may end")


def grace_s(drain: Reckoned[int], notice_s: int = 0) -> Reckoned[int]:
    """Seconds between SIGTERM and SIGKILL: longer than notice and drain."""
    parts = f"notice {notice_s} + " if notice_s else ""
    return Reckoned(
        notice_s + drain.value + LAST_S, f"{parts}drain {drain.value} + {LAST_S} for the last bytes"
    )


def startup_s(order: Order) -> Reckoned[int]:
    """Seconds that the first load may take, the download with it: more for models of more than 56
    GiB.
    """
    weights = max((weight_bytes(kind) or 0 for kind in order.plan.kinds), default=0)
    bound = LOAD_S + math.ceil(weights / SLOW_BYTES_PER_S)
    if bound <= STARTUP_S:
        return Reckoned(
            STARTUP_S, "a bound: how long loading takes was not measured (download, disk, weights)"
        )
    sizes = (
        f"{weights / GIB:.0f} GiB of weights at {SLOW_BYTES_PER_S / 1e6:.0f} MB/s, and {LOAD_S} s"
    )
    return Reckoned(
        -(-bound // 60) * 60, f"a bound: {sizes}; how long loading takes was not measured"
    )


def weight_bytes(kind: Kind) -> int | None:
    """Bytes of a kind's weights, all of its GPUs together; None where nothing says."""
    model, facts = kind.recipe.model, kind.fit.engine
    return model.weight_bytes or facts.parameters * VALUE_BYTES[model.dtype] or None


def models_gib(kinds: Sequence[Kind]) -> Reckoned[int] | None:
    """GiB that the cache of these kinds' models may take; None where no size is known."""
    sizes = {
        (kind.recipe.model.source, kind.recipe.model.revision): weight_bytes(kind) for kind in kinds
    }
    known = [size for size in sizes.values() if size]
    if len(known) < len(sizes):
        return None
    weights = sum(known)
    source = f"twice {weights / GIB:.3g} GiB of weights, for another revision or dtype, and {SPARE_GIB} GiB"
    return Reckoned(math.ceil(2 * weights / GIB) + SPARE_GIB, source)


def gpus(recipe: Recipe) -> Reckoned[int]:
    """GPUs of one server; 0 where the recipe runs on CPUs."""
    if recipe.hardware.device == "cpu":
        return Reckoned(0, "the recipe's hardware.device is cpu")
    each = recipe.engine.tensor_parallel_size
    return Reckoned(recipe.workers * each, f"recipe: {recipe.workers} workers, {each} GPU for each")


def cpus(recipe: Recipe) -> Reckoned[int]:
    """CPU cores that a server asks for: its workers' threads, and one for the front."""
    threads = (recipe.engine.threads or 1) * recipe.engine.tensor_parallel_size
    source = f"recipe: {recipe.workers} workers x {threads} threads, and one for the front"
    return Reckoned(recipe.workers * threads + 1, source)


def memory_mib(order: Order) -> Reckoned[int]:
    """Host memory that a server with all its workers asks for."""
    each, workers = worker_memory_mib(order.plan.kinds[0]), order.plan.recipe.workers
    source = f"{FRONT_MIB} MiB for the front, and for each of {workers} workers {each.source}"
    return Reckoned(FRONT_MIB + workers * each.value, source)


def worker_memory_mib(kind: Kind) -> Reckoned[int]:
    """Host memory of one worker. On a GPU the weights pass through it once."""
    recipe, fit = kind.recipe, kind.fit
    weights = recipe.model.weight_bytes or 0
    cache = fit.engine.kv_budget_bytes if recipe.hardware.device == "cpu" else 0
    libraries = WORKER_MIB * recipe.engine.tensor_parallel_size  # a process for each share
    parts = [f"{libraries} MiB of libraries", f"{math.ceil(weights / MIB):,} MiB of weights"]
    parts += [f"{math.ceil(cache / MIB):,} MiB of KV cache"] if cache else []
    return Reckoned(libraries + math.ceil((weights + cache) / MIB), " + ".join(parts))


def memory_limit_mib(order: Order) -> Reckoned[int]:
    """Host memory at which the pod of a server is ended."""
    asked, kind = memory_mib(order), order.plan.kinds[0]
    beside = worker_memory_beside(kind)
    source = f"{LIMIT_FACTOR} times what it asks for"
    if beside.value:
        source += f", and for each of {order.plan.recipe.workers} workers {beside.source}"
    return Reckoned(LIMIT_FACTOR * asked.value + order.plan.recipe.workers * beside.value, source)


def worker_memory_beside(kind: Kind) -> Reckoned[int]:
    """MiB of host memory that one worker may take beside what it asks for: swapped caches, and a
    group's load.
    """
    group, weights = kind.recipe.engine.tensor_parallel_size, kind.recipe.model.weight_bytes or 0
    sizes = {
        "MiB of swapped caches": kind.fit.swap.host_bytes if kind.fit.swap else 0,
        f"MiB of weights in the {group - 1} other processes while they load": (group - 1) * weights,
        "MiB of /dev/shm": SHARED_GIB * GIB if group > 1 else 0,
    }
    parts = [(math.ceil(size / MIB), of) for of, size in sizes.items() if size]
    return Reckoned(
        sum(size for size, _ in parts), " + ".join(f"{size:,} {of}" for size, of in parts)
    )


def replicas(order: Order) -> Reckoned[int]:
    """Servers beside each other, each with all the plan's workers."""
    workload, each = order.plan.workload, order.plan.workers
    if order.options.replicas:
        return Reckoned(order.options.replicas, "--replicas")
    if workload is None or workload.workers_needed is None:
        return Reckoned(1, "nobody asked for more: --replicas, or tune with --workers auto")
    source = f"tuned: {workload.workers_needed} workers keep all limits, {each} in each replica"
    return Reckoned(
        math.ceil(workload.workers_needed / each),
        f"{source}; one scheduler each, where one for all was simulated",
    )


def from_hub(recipe: Recipe) -> bool:
    """Whether the model, or its tokenizer, comes from the hub."""
    return recipe.model.from_hub


def gap_target(recipe: Recipe) -> tuple[str, float] | None:
    """The tightest target on the time between tokens."""
    gaps = [
        (key, limit)
        for key, limit in recipe.sla.items()
        if key.split("_")[0] in ("tpot", "itl", "mtpot")
    ]
    return min(gaps, key=lambda one: one[1], default=None)


MODELS = "/models"  # where a pod has the volume of models


def check_podable(order: Order) -> None:
    """`InputError` where pods could not have the plan, or the model."""
    check_plan_size(order.text, "a ConfigMap holds")
    source = order.plan.recipe.model.source
    if source.startswith(("/", ".", "~")) and not source.startswith(f"{MODELS}/"):
        raise InputError(
            f"model.source {source} is a folder of this machine, which a pod does not have",
            f"put it on a volume and name that: {MODELS}/NAME, with --model-claim; or name a hub id",
        )


def check_plan_size(text: str, holder: str) -> None:
    """`InputError` where the plan is too large for what is to hold it."""
    size = len(text.encode())
    if size > PLAN_LIMIT_BYTES:
        limit = f"{holder} {PLAN_LIMIT_BYTES >> 10} KiB of it"
        raise InputError(
            f"the plan has {size >> 10} KiB; {limit}",
            "render the target 'local' and copy the folder",
        )


# How many may wait before first tokens come too late: where an autoscaler should add a replica.
#
# A backlog of n requests comes to an idle replica all at once, and the simulator says when each
# gets its first token, with the plan's policy and the fit's laws. The threshold is the largest n
# that keeps the recipe's TTFT targets, less those that start at once: what /metrics then calls
# waiting. How long a new replica takes to load is not in it. Where no number of waiting requests
# tells whether the target holds, there is no threshold, and the reason is said instead.

MOST = 4096  # nobody needs to wait in a longer queue than that


def default_trace(recipe: Recipe) -> str:
    """The trace that stands for the traffic where none is given: the recipe's, where it is here, or
    one that ships.
    """
    try:
        trace_path(recipe.tune.trace)
    except InputError:
        return str(TuneSpec.model_fields["trace"].default)
    return recipe.tune.trace


def ttft_targets(recipe: Recipe) -> dict[str, float]:
    """The recipe's targets for first tokens, in seconds."""
    return {key: limit for key, limit in recipe.sla.items() if key.startswith("ttft_")}


def waiting_threshold(plan: Plan, trace: Trace | None) -> Reckoned[int | None]:
    """Requests that may wait for one replica, 1 at least; None, and why, where no such number tells
    of the target.

    Lengths are the trace's, made ready for the recipe, in its order and from its start again when
    it is over; without a trace, those of `default_trace`. The longest that the recipe allows say
    nothing: a batch of them alone takes the whole target, so that none could wait.
    """
    targets = ttft_targets(plan.recipe)
    if not targets:
        return Reckoned(None, "the recipe has no TTFT target that would say how many may wait")
    whose = f"the lengths of {trace.source}" if trace else ""
    if trace is None:
        default = default_trace(plan.recipe)
        whose = f"no trace was given, so with the lengths of {Path(default).name}"
        trace = read_trace(trace_path(default))[0]
    policy = make_any(plan.policy.name, plan.policy.parameters)
    limit, seed = plan.recipe.serve.max_new_tokens, plan.recipe.tune.seed
    kinds = plan.kinds
    world = fleet(
        [
            world_from_fit(one.fit, workers=one.workers, max_new_tokens=limit, seed=seed)
            for one in kinds
        ]
    )
    lengths = prepare(trace, plan.recipe)
    served = most(lambda count: _keeps(backlog(lengths, count), policy, world, targets))
    kept = ", ".join(f"{key} {value:g}" for key, value in targets.items())
    simulated = f"simulated with the fit, {whose}"
    if not served:
        return Reckoned(None, f"{simulated}: not even one request alone keeps {kept}")
    waiting = served - _start_at_once(backlog(lengths, served), policy, world)
    if waiting < 1:
        return Reckoned(
            None,
            f"{simulated}: {served} at once keep {kept}, and all of them start at once: none can wait",
        )
    beyond = f"even {MOST} at once keep {kept}, and more were not tried"
    beyond = beyond if served >= MOST else f"{served} at once keep {kept}"
    return Reckoned(
        waiting, f"{simulated}: {beyond}; {served - waiting} of them start at once and do not wait"
    )


def most(keeps: Callable[[int], bool]) -> int:
    """The largest count up to `MOST` that `keeps`, as all smaller ones do; 0 where 1 does not."""
    return bisect_left(range(1, MOST + 1), True, key=lambda count: not keeps(count))


def backlog(lengths: Trace, count: int) -> Trace:
    """So many requests at once, with these lengths, repeated where there are fewer."""
    chosen = np.arange(count) % len(lengths)
    return Trace(
        np.zeros(count),
        lengths.prompt_tokens[chosen],
        lengths.output_tokens[chosen],
        lengths.max_tokens[chosen],
    )


def _keeps(trace: Trace, policy: AnyPolicy, world: World, targets: Mapping[str, float]) -> bool:
    result = simulate(trace, policy, world)
    return bool(result.served.ok.all()) and max(result.sla_ratios(targets).values()) <= 1.0


def _start_at_once(trace: Trace, policy: AnyPolicy, world: World) -> int:
    if isinstance(policy, VllmPolicy):
        return sum(
            _first_pass(trace.prompt_tokens[k :: world.workers], policy)
            for k in range(world.workers)
        )
    assert not isinstance(policy, BuiltIn)
    world = world.under(policy)
    scheduler = Scheduler(policy, world.scheduled(), seed=world.seed)
    for request in requests_of(trace, world.max_new_tokens)[0]:
        scheduler.submit(request, 0.0)
    return sum(batch.size for batch in scheduler.tick(0.0))


def _first_pass(prompts: NDArray[np.int64], policy: VllmPolicy) -> int:
    """How many vLLM admits in its first pass: as many as have tokens of it, the last perhaps a part
    of its prompt.
    """
    ends = np.cumsum(prompts)
    begun = (
        ends - prompts < policy.max_num_batched_tokens
        if policy.chunked_prefill
        else (ends <= policy.max_num_batched_tokens)
    )
    return min(int(begun.sum()), policy.max_num_seqs)
