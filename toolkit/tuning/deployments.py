"""Deployments that are compared by their capacity, on one trace.

`variants_of` lists the settings of a recipe: its own, a tuning's recommendation, other policies,
other routers. `capacity_of` finds for each the highest rate and the highest concurrency that keep
all limits, and how many workers a given rate takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

from toolkit.errors import InputError
from toolkit.files.capacity import Cost, LawInterval
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Settings, Tuning
from toolkit.laws.features import StepShape
from toolkit.routing.routers import ROUTERS, router_of
from toolkit.sched.policies import make_any, refusal, refuse_unservable
from toolkit.sim.api import usual_policies
from toolkit.sim.deployment import Deployment
from toolkit.traces.sharing import reusable_tokens
from toolkit.traces.types import Trace
from toolkit.traces.windows import check_rate
from toolkit.tuning.capacity import (
    MOST_REPEATED,
    ROUNDS_AT_ONCE,
    Capacity,
    LoadPoint,
    LoadSearch,
    at_concurrency,
    at_rate,
    busiest_part,
    rate_capacity,
    rates_near,
)
from toolkit.tuning.changes import (
    PREFIX_CACHING,
    RecipeChange,
    changed_recipe,
    check_drafts,
    check_laws,
    measured_laws,
    refuse_drafts,
)
from toolkit.tuning.evaluate import Task
from toolkit.tuning.executor import Evaluate
from toolkit.tuning.workload import whole_task

ALL = "all"
WORKERS_MAX = 256  # the greatest number of workers that is tried
FIRST_CONCURRENCY = 64.0  # that is tried, of each worker


@dataclass(slots=True, frozen=True)
class Variant:
    """A deployment beside others.

    Attributes:
        label: what its settings are: "defaults", "tuned", "policy NAME", "router NAME", or the
            changed keys.
        changed: keys of the recipe, by their paths, that differ from the recipe's file.
    """

    deployment: Deployment
    label: str
    changed: Mapping[str, JsonValue] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class FoundCapacity:
    """The capacity of a deployment.

    Attributes:
        rate: None where no rate keeps the limits.
        concurrency: of a fixed number of requests at once; None where none keeps the limits, or
            none was searched.
        needed: the deployment with the fewest workers that keep the limits at the wanted rate; None
            where no number does, or no rate was wanted.
        lowest: the lowest rate that was tried where none is kept.
        interval: the rates that keep the limits at both ends of the law's range; None as `rate`.
    """

    variant: Variant
    rate: Capacity | None
    concurrency: Capacity | None
    needed: Deployment | None
    lowest: LoadPoint | None = None
    interval: LawInterval | None = None


def variants_of(
    recipe: Recipe,
    fit: Fit,
    *,
    tuning: Tuning | None = None,
    policies: Sequence[str] = (),
    routers: Sequence[str] = (),
    slowdown: float = 1.0,
) -> list[Variant]:
    """The recipe's own settings, then the tuned ones, then policies and routers by name.

    "all" stands for all that the engine can run, and for all routers. All are on one machine,
    slower than fitted by the factor `slowdown`. Raises `InputError` for a policy or router that
    does not exist, a policy that the engine cannot run, and routers where there is one worker.
    """
    own = replace(Deployment.of(recipe, fit), slowdown=slowdown)
    found = [Variant(own, "defaults")]
    if tuning is not None:
        settings = tuning.recommended.settings
        found.append(Variant(replace(own.with_workers(tuning.workers), settings=settings), "tuned"))
    for name in _policies(recipe, fit, policies):
        if name != own.settings.policy:
            named = replace(own, settings=Settings(policy=name, parameters={}))
            # a policy of ours inside a server has no router before it
            workers = 1 if named.one_server else named.workers
            found.append(Variant(named.with_workers(workers), f"policy {name}"))
    for name in _routers(recipe, routers):
        update = {"replica_router": router_of(recipe, name)}
        routed = replace(own, settings=own.settings.model_copy(update=update))
        found.append(Variant(routed, f"router {name}"))
    return found


def changed_variant(
    recipe: Recipe,
    fit: Fit,
    change: RecipeChange,
    compute: Callable[[Recipe], Fit] | None,
    slowdown: float = 1.0,
) -> Variant:
    """Return the recipe's own settings, with some of its keys changed.

    Args:
        compute: gives the analytic fit of a recipe; None: other laws than the fit's are not known.

    Raises `InputError` for a change that cannot be, for one that measured laws do not tell, and for
    one that changes nothing.
    """
    changed = changed_recipe(recipe, change)
    if change.of_laws:
        if compute is None:
            raise measured_laws(change, recipe)
        refuse_drafts(change)
        before = compute(recipe)
        if before.engine != fit.engine:
            raise InputError(
                f"the fit of '{recipe.name}' is not the one that is computed now",
                "leave --fit out, so that the laws before and after a change are computed alike",
            )
        try:
            fit = compute(changed)
        except InputError as error:
            raise change.error(error.message, error.hint) from None
        check_laws(change, before, fit)
    check_drafts(change, changed, fit)
    own = replace(Deployment.of(changed, fit), slowdown=slowdown)
    return Variant(own, change.text.replace(",", ", "), changed=change.values)


def check_sharing(variant: Variant, trace: Trace) -> None:
    """Raise `InputError` for a change of the prefix cache where the trace's prompts share nothing,
    or it does not say what they share: two equal capacities would look like an answer.
    """
    if PREFIX_CACHING not in variant.changed or reusable_tokens(trace).any():
        return
    problem = f"no prompt of {trace.source} begins like an earlier one"
    if trace.shared is None:
        problem = f"{trace.source} has no hash_ids, so it does not say what its prompts share"
    raise InputError(
        f"--also prefix_caching: {problem}; a prefix cache would find nothing",
        "record your traffic with llmctl trace record, or make prompts that share: "
        "llmctl trace generate --system-tokens 800",
    )


def _policies(recipe: Recipe, fit: Fit, named: Sequence[str]) -> list[str]:
    engine = recipe.engine.name
    if ALL in named:
        return [name for name in usual_policies(fit) if refusal(name, engine) is None]
    for name in named:
        refuse_unservable(make_any(name, {}), engine)
    return list(named)


def _routers(recipe: Recipe, named: Sequence[str]) -> list[str]:
    if not named:
        return []
    if router_of(recipe) is None:
        raise InputError(
            f"--routers: recipe '{recipe.name}' has {recipe.workers} worker"
            f"{'s' * (recipe.workers > 1)} of engine '{recipe.engine.name}', so no router",
            "give several replicas of a server: --workers 4",
        )
    own = recipe.replica_router.name
    return [name for name in (ROUTERS if ALL in named else named) if name != own]


def capacity_of(
    variant: Variant,
    trace: Trace,
    evaluate: Evaluate,
    *,
    rate_rps: float | None = None,
    concurrency: bool = True,
) -> FoundCapacity:
    """The capacity of a deployment, and how many workers `rate_rps` takes.

    Raises `InputError` where the trace has no rate, or is too short for `rate_rps`, however often
    it is repeated.
    """
    deployment = variant.deployment
    task = whole_task(deployment, trace)
    tried: list[LoadPoint] = []
    rate = rate_capacity(task, evaluate, tried)
    at_once = concurrency_capacity(task, evaluate, rate) if concurrency else None
    needed = None
    if rate_rps is not None:
        guess = rate_rps / rate.load * deployment.workers if rate else 1.0
        # more load is worse
        breaks = any(point.load <= rate_rps and not point.kept for point in tried)
        broken = [deployment.workers] if breaks else []
        needed = fewest_workers(deployment, trace, rate_rps, guess, evaluate, broken)
    lowest = None if rate else min(tried, key=lambda point: point.load, default=None)
    interval = _interval(deployment, trace, evaluate, rate) if rate else None
    return FoundCapacity(variant, rate, at_once, needed, lowest, interval)


def _interval(
    deployment: Deployment, trace: Trace, evaluate: Evaluate, rate: Capacity
) -> LawInterval:
    """Find the capacity with times at both ends of the law's range: between the tried rates, if
    both ends are there; else by a search from what these say of it. Of a very long trace the
    busiest part says by how much the rate differs.
    """
    law = deployment.fit.law_range()
    factors = [law.slow, law.fast]
    between = [rate.served_if(factor) for factor in factors]
    if None not in between:
        return LawInterval(low_rps=between[0], high_rps=between[1], law=law)
    is_long = busiest_part(whole_task(deployment, trace)) is not None
    if is_long:
        factors.append(1.0)
    slowed = [replace(deployment, slowdown=factor * deployment.slowdown) for factor in factors]
    tasks = [whole_task(one, trace) for one in slowed]
    judged = [busiest_part(task) or task for task in tasks]
    guesses = [rate.load_if(factor) for factor in factors]
    low_rps, high_rps, *own_rps = rates_near(judged, evaluate, guesses, rate.steepness)
    if is_long:
        share = rate.served_rps / own_rps[0] if own_rps[0] else 1.0
        low_rps, high_rps = (end and share * end for end in (low_rps, high_rps))
    return LawInterval(low_rps=low_rps, high_rps=high_rps, law=law)


def cost_of(deployment: Deployment, rate: Capacity, trace: Trace) -> Cost | None:
    """Return what requests with the lengths of `trace` cost at a capacity; None without a price.

    The price of a request is divided among its tokens by the time that the law of a pass gives
    them. Without that law tokens have no price of their own.
    """
    usd_per_hour = deployment.usd_per_hour
    if usd_per_hour is None:
        return None
    usd = usd_per_hour / 3600.0 / rate.served_rps  # of a request
    cost = Cost(
        usd_per_hour=usd_per_hour,
        usd_per_million_requests=1e6 * usd,
        usd_per_million_in=None,
        usd_per_million_cached=None,
        usd_per_million_out=None,
    )
    if deployment.fit.steps is None:
        return cost
    metrics = rate.at_capacity.evaluation.metrics
    prompt = float(trace.prompt_tokens.mean())
    output = float(trace.output_tokens.mean())
    cached = prompt * metrics.get("hit_percent", 0.0) / 100.0
    new = prompt - cached
    rows = max(metrics.get("batch_size_mean", 1.0), 1.0)
    law = deployment.fit.steps.law
    in_s = law.prompt_token_s(new / 2)
    cached_s = law.prompt_token_s(new) - law.prompt_token_s(0.0)
    decodes = max(round(rows), 1)
    out_s = law.step_s(StepShape(decodes, round(decodes * (prompt + output / 2)))) / decodes
    usd_per_s = usd / (new * in_s + cached * cached_s + output * out_s)
    return cost.model_copy(
        update={
            "usd_per_million_in": 1e6 * usd_per_s * in_s,
            "usd_per_million_cached": 1e6 * usd_per_s * cached_s if cached else None,
            "usd_per_million_out": 1e6 * usd_per_s * out_s,
        }
    )


def concurrency_capacity(task: Task, evaluate: Evaluate, rate: Capacity | None) -> Capacity | None:
    """The most requests at once that keep every limit; None where not even one does.

    `rate`: the capacity in requests/s. The trace is repeated by it, and the search begins with as
    many requests as are in progress at it: those that come while one is served.
    """
    [workload] = task.windows
    served_rps = 0.0
    guess = FIRST_CONCURRENCY * task.deployment.workers
    if rate is not None:
        served_rps = rate.load
        guess = served_rps * rate.at_capacity.evaluation.metrics["e2e_mean_s"]
    search = LoadSearch(
        lambda count: at_concurrency(task, int(count), served_rps),
        evaluate,
        most=float(max(len(workload.trace), MOST_REPEATED) // ROUNDS_AT_ONCE),
        whole=True,
    )
    return search.found(guess)


def fewest_workers(
    deployment: Deployment,
    trace: Trace,
    rate_rps: float,
    guess: float,
    evaluate: Evaluate,
    broken: Sequence[int] = (),
) -> Deployment | None:
    """The deployment with the fewest workers that keep every limit at this rate: one less does not.
    None where no number up to `WORKERS_MAX` does, or where it cannot have more workers.

    `broken`: numbers of workers of which it is known that they do not.
    """
    check_rate(rate_rps)
    found = dict.fromkeys(broken, False)

    def judge(counts: Sequence[int]) -> None:
        new = [count for count in counts if count not in found]
        sized = [deployment.with_workers(count) for count in new]
        done = evaluate([at_rate(whole_task(one, trace), rate_rps) for one in sized])
        found.update(zip(new, (one.outcome.kept for one in done), strict=True))

    def keeps(count: int) -> bool:
        judge([count])
        return found[count]

    if deployment.one_server:
        return deployment.with_workers(1) if keeps(1) else None
    first = max(math.ceil(guess), 1)
    judge([count for count in (first - 1, first) if 1 <= count <= WORKERS_MAX])  # two at a time
    count = fewest(keeps, first)
    return None if count is None else deployment.with_workers(count)


def fewest(keeps: Callable[[int], bool], guess: int = 1) -> int | None:
    """Return a number that `keeps` while the number below it does not, or 1; None where none does
    up to `WORKERS_MAX`.

    It goes up or down from the guess in steps that double, and then bisects. Where more workers are
    not always better (a router may distribute badly), a smaller number may exist.
    """
    low = 0
    high = min(max(guess, 1), WORKERS_MAX)
    step = 1
    while not keeps(high):
        if high == WORKERS_MAX:
            return None
        low = high
        high = min(high + step, WORKERS_MAX)
        step *= 2
    while high - low > 1:
        middle = max((low + high) // 2, high - step)
        step *= 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high
