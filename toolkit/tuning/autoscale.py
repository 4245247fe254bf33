"""Which rule keeps the targets on a trace with the fewest GPU-hours.

Every rule serves the whole trace, at the times of its requests: a rule is about how traffic changes
over a day, so no part of the day stands for it. Beside the rules stand the fewest replicas that
keep the targets without a rule, and a clairvoyant schedule, which knows what will come.

1. `replica_rate`: what a replica serves within the targets, on requests of this trace that come
   evenly (Poisson) at a rate.
2. `fewest_static`: the static fleet. Among its replicas, which share what waits, each serves more
   than one alone: that rate is what `by-law`, `planner` and the clairvoyant schedule plan by.
3. `clairvoyant`: demand in each interval over that rate; how many are spare is searched.
4. `search_rule`: a rule's parameters and behaviour, by Optuna's TPE. The least GPU-hours that keep
   every limit win.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import optuna

from toolkit.files.recipe import RouterSpec, ScaleSpec, ScalingSpec
from toolkit.files.scaling import FleetCurve, FleetResult
from toolkit.files.tuning import Evaluation
from toolkit.laws.features import StepShape
from toolkit.metrics import Floats, Served, meets_sla
from toolkit.routing.routers import router_of
from toolkit.scaling.behaviour import Behaviour
from toolkit.scaling.rules import RULES, SETTLED, make_rule
from toolkit.sched.policies.parameters import Value, declared, defaults, parameters
from toolkit.sched.policies.vllm import ROWS, TOKENS, VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.sim.paged_engine import PagedEngine
from toolkit.traces.types import Trace
from toolkit.tuning.capacity import rate_capacity
from toolkit.tuning.evaluate import Task
from toolkit.tuning.executor import Evaluate
from toolkit.tuning.spaces import Distribution, distributions_of, drawn
from toolkit.tuning.workload import whole_task

STEADY_REQUESTS = 4000  # of the trace, by which a replica's rate is found
BEGIN_S = 600.0  # seconds of the trace: their demand says how many replicas run at first
BEGIN_SHARE = 0.7  # of a replica's rate that these are given
INTERVAL_S = 600.0  # of the clairvoyant schedule, at least
PEAK_S = 300.0  # the busiest seconds, from which the search for a static fleet starts
SPARES = (-0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.5)  # replicas besides, of the schedule
BATCH = 4  # trials that are suggested at once
SEASON_S = 2 * 86400.0  # a trace of more days has a day before, for rules that look at it
FAILED_SHARE_MAX = 0.001  # of the requests that may be lost, or never be served


@dataclass(slots=True, frozen=True)
class ScaledFleet:
    """A deployment on a trace; its number of replicas changes.

    Attributes:
        deployment: one replica of it, with its router and `recipe.scale`.
        trace: the requests.
        rate_rps: what a replica serves within the targets.
    """

    deployment: Deployment
    trace: Trace
    rate_rps: float

    @property
    def spec(self) -> ScaleSpec:
        """The bounds and times of the fleet."""
        scale = self.deployment.recipe.scale
        assert scale is not None
        return scale

    @property
    def prompt_share(self) -> float:
        """See the function."""
        return prompt_share(self.deployment, self.trace)

    @property
    def tokens_per_s(self) -> float:
        """What a replica serves, as `by-law` counts tokens."""
        trace = self.trace
        prompt, output = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
        return self.rate_rps * (output + self.prompt_share * prompt)

    @property
    def ahead_s(self) -> float:
        """Seconds from a change of the traffic until a replica that it calls for is ready."""
        spec = self.spec
        return float(np.mean(spec.start_s)) + spec.poll_s + spec.scrape_s

    @property
    def begin(self) -> int:
        """Replicas at the beginning: for the demand of the first minutes."""
        arrival_s = self.trace.arrival_s
        first = np.searchsorted(arrival_s, arrival_s[0] + BEGIN_S)
        span_s = min(BEGIN_S, float(arrival_s[-1] - arrival_s[0])) or BEGIN_S
        needed = math.ceil(float(first) / span_s / (BEGIN_SHARE * self.rate_rps))
        return min(max(needed, self.spec.min, 1), self.spec.max)

    def under(self, scaling: ScalingSpec, begin: int | None = None) -> Task:
        """Return the task of serving the trace under a rule; `begin` replicas run at first."""
        deployment = self.deployment
        settings = deployment.settings.model_copy(update={"scaling": scaling})
        workers = self.begin if begin is None else begin
        recipe = deployment.recipe.model_copy(update={"workers": workers})
        label = f"{scaling.rule}, {workers} at first"
        own = replace(deployment, recipe=recipe, settings=settings)
        return Task(own, [Workload(self.trace)], label, whole=True)


def fleet_deployment(deployment: Deployment) -> Deployment:
    """Return the deployment with the router of its replicas, also where its recipe has one."""
    several = deployment.recipe.model_copy(update={"workers": 2})
    router = deployment.settings.replica_router or router_of(several) or RouterSpec()
    settings = deployment.settings.model_copy(update={"replica_router": router})
    return replace(deployment, settings=settings)


def steady(trace: Trace, seed: int) -> Trace:
    """Return requests drawn from all the trace that come as a Poisson process of one a second."""
    rng = np.random.default_rng(seed)
    count = min(len(trace), STEADY_REQUESTS)
    rows = rng.permutation(len(trace))[:count]
    return replace(trace.take(rows), arrival_s=np.cumsum(rng.exponential(1.0, count)))


def prompt_share(deployment: Deployment, trace: Trace) -> float:
    """Return how many tokens of output take as long as one of a prompt, by the law of a pass with
    as many rows as half of the cache holds.
    """
    steps = deployment.fit.steps
    engine = PagedEngine.of(deployment.fit)
    assert steps is not None
    assert engine is not None
    prompt = float(trace.prompt_tokens.mean())
    context = prompt + float(trace.output_tokens.mean()) / 2.0
    rows = max(round(0.5 * engine.capacity_tokens / context), 1)
    out_s = steps.law.step_s(StepShape(rows, round(rows * context))) / rows
    return steps.law.prompt_token_s(prompt / 2.0) / out_s


def replica_rate(
    deployment: Deployment, trace: Trace, evaluate: Evaluate, among: int = 1
) -> float | None:
    """Return the highest rate of each of `among` replicas, in requests/s, at which they keep all
    limits; None: there is none.
    """
    fleet = deployment.with_workers(among)
    found = rate_capacity(whole_task(fleet, steady(trace, fleet.recipe.tune.seed)), evaluate)
    return found.load / among if found else None


def kept(evaluation: Evaluation) -> bool:
    """Whether every limit is kept, and nearly all requests are served."""
    metrics = evaluation.metrics
    failed = metrics.get("failed", 0.0)
    return evaluation.outcome.kept and failed <= FAILED_SHARE_MAX * metrics["requests"]


def hours(evaluation: Evaluation) -> float:
    """The hours that replicas are paid for."""
    return evaluation.metrics["replica_hours"]


def fewest_static(fleet: ScaledFleet, evaluate: Evaluate) -> tuple[int | None, list[Evaluation]]:
    """Return the fewest replicas that keep all limits all the time, and what was tried, from the
    most replicas to the fewest; None: not even `max` do.
    """
    tried: dict[int, Evaluation] = {}

    def keeps(counts: Sequence[int]) -> None:
        new = [count for count in counts if count not in tried]
        tasks = [fleet.under(static(count), begin=count) for count in new]
        tried.update(zip(new, evaluate(tasks), strict=True))

    most = fleet.spec.max
    guess = min(max(math.ceil(peak_rps(fleet.trace) / fleet.rate_rps), 1), most)
    low, high = 0, most + 1  # too few, and enough
    count = guess
    while high - low > 1:
        pair = [one for one in (count, count - 1) if low < one < high]
        keeps(pair)
        for one in pair:
            if kept(tried[one]):
                high = min(high, one)
            else:
                low = max(low, one)
        count = high - 1 if high <= most else min(low + 2, most)
    found = high if high <= most else None
    return found, [tried[one] for one in sorted(tried, reverse=True)]


def static(replicas: int) -> ScalingSpec:
    """Return the rule of a fixed number."""
    return ScalingSpec(rule="static", parameters={"replicas": replicas}, behaviour={})


def peak_rps(trace: Trace) -> float:
    """Return the rate of the busiest `PEAK_S` seconds."""
    arrival_s = trace.arrival_s
    ends = np.searchsorted(arrival_s, arrival_s + PEAK_S)
    return float((ends - np.arange(len(arrival_s))).max()) / PEAK_S


def clairvoyant(fleet: ScaledFleet, evaluate: Evaluate) -> FoundRule | None:
    """Return the schedule with the fewest hours that keeps the limits, among `SPARES`: the demand
    of each interval, which it knows, over a replica's rate, and spare ones. None: none keeps them.

    It is a bound by a greedy plan, not the least possible.
    """
    tasks = [fleet.under(known_ahead(fleet, spare)) for spare in SPARES]
    found = []
    for first in range(0, len(tasks), 2):
        found = [one for one in evaluate(tasks[first : first + 2]) if kept(one)]
        if found:
            return FoundRule(min(found, key=hours), first + 2)
    return None


def known_ahead(fleet: ScaledFleet, spare: float) -> ScalingSpec:
    """Return the clairvoyant rule with so many spare replicas, times the root of those needed."""
    of_rule: dict[str, Value] = {
        "capacity": fleet.tokens_per_s,
        "prompt_share": fleet.prompt_share,
        "spare": spare,
        "horizon_s": fleet.ahead_s,
        "interval_s": max(2.0 * float(np.mean(fleet.spec.start_s)), INTERVAL_S),
    }
    return ScalingSpec(rule="clairvoyant", parameters=of_rule, behaviour=dict(SETTLED))


def search_rule(
    fleet: ScaledFleet,
    name: str,
    trials: int,
    evaluate: Evaluate,
    tick: Callable[[], None] = lambda: None,
) -> list[Evaluation]:
    """Return the trials of a rule: first its defaults, then what TPE suggests.

    Args:
        trials: how many are tried; 1: the defaults alone.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    first = facts(fleet, name)
    of_rule = distributions_of(f"rule '{name}'", declared(RULES[name]), first)
    chosen = fleet.spec.scaling
    usual = RULES[name].usual_behaviour
    own = {**usual, **(chosen.behaviour if chosen.rule == name else {})}
    standard = defaults(Behaviour) | own
    of_behaviour = distributions_of("behaviour", declared(Behaviour), standard)
    seed = fleet.deployment.recipe.tune.seed
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=6)
    study = optuna.create_study(direction="minimize", sampler=sampler)
    starts = {key: _start(first[key], among) for key, among in of_rule.items()}
    study.enqueue_trial(starts | {f"behaviour.{key}": standard[key] for key in of_behaviour})
    done: list[Evaluation] = []
    while len(done) < trials:
        batch = [study.ask() for _ in range(min(BATCH if done else 1, trials - len(done)))]
        tasks = []
        for trial in batch:
            values = first | {
                key: _value(first[key], drawn(trial, key, among), among)
                for key, among in of_rule.items()
            }
            how = own | {
                key: drawn(trial, f"behaviour.{key}", among) for key, among in of_behaviour.items()
            }
            whole = parameters(make_rule(name, values))
            tasks.append(fleet.under(ScalingSpec(rule=name, parameters=whole, behaviour=how)))
        for trial, one in zip(batch, evaluate(tasks), strict=True):
            for key, share in one.outcome.used.items():
                trial.set_constraint(key, share - 1.0)
            failed = one.metrics.get("failed", 0.0) / one.metrics["requests"]
            trial.set_constraint("failed", failed - FAILED_SHARE_MAX)
            study.tell(trial, hours(one))
            done.append(one)
            tick()
    return done


def _start(first: Value, among: Distribution) -> Value:
    """Return how the first value is drawn: the upper end of a range stands for 0, which leaves a
    threshold out and is not in it.
    """
    if isinstance(among, optuna.distributions.FloatDistribution) and not first:
        return among.high if among.low > 0.0 else 0.0
    return first


def _value(first: Value, value: Value, among: Distribution) -> Value:
    """Return the value that was drawn as `value`."""
    stands = isinstance(among, optuna.distributions.FloatDistribution) and among.low > 0.0
    return 0.0 if stands and not first and value == among.high else value


def facts(fleet: ScaledFleet, name: str) -> dict[str, Value]:
    """Return a rule's parameters at the start of its search: the recipe's, or its defaults, with
    what the fit says of a replica.
    """
    chosen = fleet.spec.scaling
    deployment = fleet.deployment
    engine = PagedEngine.of(deployment.fit)
    flags = deployment.policy()
    assert engine is not None
    assert isinstance(flags, VllmPolicy)
    known: dict[str, Value] = {
        "capacity_rps": fleet.rate_rps,
        "capacity": fleet.tokens_per_s,
        "prompt_share": fleet.prompt_share,
        "output_tokens": float(fleet.trace.output_tokens.mean()),
        "horizon_s": fleet.ahead_s,
        "cache_tokens": engine.capacity_tokens,
        "pass_tokens": parameters(flags)[TOKENS],
        "rows": parameters(flags)[ROWS],
        "season": float(fleet.trace.arrival_s[-1] - fleet.trace.arrival_s[0]) > SEASON_S,
    }
    start = defaults(RULES[name])
    start |= {key: value for key, value in known.items() if key in start}
    return start | (chosen.parameters if chosen.rule == name else {})


def best_of(trials: Sequence[Evaluation]) -> Evaluation:
    """Return the trial with the fewest hours of those that keep every limit; where none does, the
    one that is nearest to keeping them.
    """
    keeping = [one for one in trials if kept(one)]
    if keeping:
        return min(keeping, key=hours)
    return min(trials, key=lambda one: max(one.outcome.used.values(), default=math.inf))


@dataclass(slots=True, frozen=True)
class FoundRule:
    """The best settings of a rule, and how many were tried."""

    best: Evaluation
    trials: int


@dataclass(slots=True, frozen=True)
class FoundFleets:
    """What keeps the targets: without a rule, with foresight, and by each rule.

    Attributes:
        static: None: not even `max` replicas do.
        clairvoyant: None: no schedule that was tried does.
        rules: in the order in which they were given.
    """

    fleet: ScaledFleet
    static: FoundRule | None
    clairvoyant: FoundRule | None
    rules: list[FoundRule]


def find_fleets(
    fleet: ScaledFleet,
    rules: Sequence[str],
    trials: int,
    evaluate: Evaluate,
    tick: Callable[[], None] = lambda: None,
) -> FoundFleets:
    """Return the static fleet, the clairvoyant schedule, and the best settings of each rule."""
    fewest, tried = fewest_static(fleet, evaluate)
    alone = None
    if fewest is not None:
        [own] = [one for one in tried if one.settings.scaling == static(fewest)]
        alone = FoundRule(own, len(tried))
        rate_rps = replica_rate(fleet.deployment, fleet.trace, evaluate, fewest)
        fleet = replace(fleet, rate_rps=rate_rps or fleet.rate_rps)
    ahead = clairvoyant(fleet, evaluate)
    found = []
    for name in rules:
        done = search_rule(fleet, name, trials, evaluate, tick)
        found.append(FoundRule(best_of(done), len(done)))
    return FoundFleets(fleet, alone, ahead, found)


def fleet_result(fleet: ScaledFleet, found: FoundRule, points: int) -> FleetResult:
    """Simulate the best settings once more, and return their figures with a curve of `points`."""
    best = found.best
    scaling = best.settings.scaling
    assert scaling is not None
    begin = int(scaling.parameters["replicas"]) if scaling.rule == "static" else None
    task = fleet.under(scaling, begin)
    [workload] = task.windows
    result = simulate(workload.trace, task.deployment.policy(), task.deployment.world(workload))
    log = result.fleet
    assert log is not None
    edges_s = _edges_s(fleet.trace, points)
    metrics = best.metrics
    per_day = 24.0 * metrics["replica_hours"] / metrics["run_hours"]
    recipe = fleet.deployment.recipe
    price = recipe.hardware.usd_per_hour
    return FleetResult(
        rule=scaling.rule,
        scaling=scaling,
        begin=task.deployment.workers,
        outcome=best.outcome,
        kept=kept(best),
        failed=round(metrics.get("failed", 0.0)),
        gpu_hours_per_day=per_day * recipe.engine.tensor_parallel_size,
        usd_per_day=None if price is None else per_day * price,
        replicas_mean=metrics["replicas_mean"],
        replicas_max=round(metrics["replicas_max"]),
        starts=round(metrics["replica_starts"]),
        period_s=log.period_s(),
        trials=found.trials,
        curve=FleetCurve(
            ready=_means_between(log.steps(("ready",)), edges_s),
            attainment_percent=_attainment(result.served, recipe.sla, edges_s),
        ),
    )


def demand_rps(trace: Trace, points: int) -> list[float]:
    """Return the rate of arrivals in each of `points` equal parts of the trace."""
    edges_s = _edges_s(trace, points)
    found: list[float] = (np.histogram(trace.arrival_s, edges_s)[0] / np.diff(edges_s)).tolist()
    return found


def _edges_s(trace: Trace, points: int) -> Floats:
    """Return the ends of the parts."""
    begin_s, end_s = float(trace.arrival_s[0]), float(trace.arrival_s[-1])
    return np.linspace(begin_s, np.nextafter(end_s, np.inf), points + 1)


def _means_between(steps: Sequence[tuple[float, int]], edges_s: Floats) -> list[float]:
    """Return the mean of a number in each part, from (since when, number)."""
    times_s = np.array([at_s for at_s, _ in steps] + [np.inf])
    numbers = np.array([number for _, number in steps], dtype=float)
    begins_s = np.maximum(times_s[:-1], edges_s[0])
    ends_s = np.minimum(times_s[1:], edges_s[-1])
    summed = np.concatenate([[0.0], np.cumsum(numbers * np.maximum(ends_s - begins_s, 0.0))])
    at_s = np.concatenate([begins_s, [edges_s[-1]]])
    means: list[float] = (np.diff(np.interp(edges_s, at_s, summed)) / np.diff(edges_s)).tolist()
    return means


def _attainment(served: Served, sla: Mapping[str, float], edges_s: Floats) -> list[float | None]:
    """Return the percentage of the requests that keep every target, by when they arrive."""
    good = meets_sla(served, sla)
    all_counts = np.histogram(served.arrival_s, edges_s)[0]
    good_counts = np.histogram(served.arrival_s[good], edges_s)[0]
    return [
        100.0 * float(kept_ones) / float(count) if count else None
        for kept_ones, count in zip(good_counts, all_counts, strict=True)
    ]
