"""Simulating candidates (policies with parameters) on windows of a trace, and judging them.

The parts, in order: a machine from a recipe; a candidate's evaluation (`Task`); the screen that
drops hopeless candidates early; and the lower confidence bound of the attainment. All
candidates get the same windows and the same draws (common random numbers), so differences come from
the candidates.

The confidence bound allows for correlation: requests that wait in one queue are late together, so
n of them say less than n independent ones. Each window is cut into blocks of consecutive requests
(batch means, as in simulation studies). The design effect is the variance between the blocks over
the variance of independent requests. Wilson's interval is taken with n / design effect requests, as
in surveys with clusters, and a lower number still because few blocks estimate that effect (Korn and
Graubard 1998; Franco et al. 2019, *Comparative study of confidence intervals for proportions in
complex sample surveys*). A bootstrap over windows would not do: of a few windows, or of shares that
all are 100 %, it says that nothing is uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.files.tuning import (
    BEHIND,
    EVICTED,
    OOM,
    REFUSED,
    Outcome,
    ParameterValue,
    searched_key,
)
from toolkit.metrics import Served, meets_sla, pooled_rates, sla_ratios
from toolkit.routing.admission import UNLIMITED, LatencyLimits
from toolkit.routing.routers import make_router, router_of
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy
from toolkit.sim.api import simulate
from toolkit.sim.replicas import Routing
from toolkit.sim.world import World, world_of
from toolkit.traces.types import Trace
from toolkit.traces.windows import cut

# Blocks per window. Of 5, 8, 10 and 15, five cover best where requests are late in long stretches.
BLOCKS = 5
Z = 1.6449  # of the normal distribution: one-sided, 95 %
# Share of the goodput that the mean latency can decide: it orders equals and trades nothing.
TIE_BREAK = 1e-3
ATTAINMENT = "sla_attainment_percent"
ATTAINMENT_LOWER = "sla_attainment_lower_percent"
# Of each window, by time: what a screened candidate is simulated on first.
SCREEN_SHARE = 0.25
SCREEN_MARGIN = 2.0
SCREEN_REQUESTS = 10  # of each part, at least
TINY_S = 1e-9  # a window ends before its end


def make_world(recipe: Recipe, fit: Fit) -> World:
    """The simulated machine of a recipe."""
    world = world_of(recipe, fit, recipe.workers)
    world = replace(world, concurrency=recipe.tune.concurrency or 0)
    router = router_of(recipe)
    if router is None:
        return world
    targets = recipe.serve.admission == "targets" and recipe.tune.max_refused_percent is not None
    limits = LatencyLimits.of(recipe.sla) if targets else UNLIMITED
    chosen = make_router(router.name, router.parameters)
    return replace(world, routing=Routing.of_front(chosen, limits))


@dataclass(slots=True, frozen=True)
class CandidateLimits:
    """Limits of a candidate besides the latency targets; None: no such limit."""

    max_oom_percent: float | None = None
    max_evicted_percent: float | None = None
    min_attainment_percent: float | None = None
    max_refused_percent: float | None = None
    max_behind_percent: float | None = None  # on a whole trace; a short window may end in a burst

    @classmethod
    def of(cls, recipe: Recipe) -> CandidateLimits:
        """The recipe's limits."""
        names = [
            limit.name for limit in fields(cls) if limit.name in type(recipe.tune).model_fields
        ]
        return cls(**{name: getattr(recipe.tune, name) for name in names})


@dataclass(slots=True, frozen=True)
class Evaluation:
    """An outcome, and each latency target's value over its limit, of what was simulated.

    `screened_out`: that was only the first part of each window, which broke a limit (`Screen`).
    """

    outcome: Outcome
    ratios: dict[str, float]
    screened_out: bool = False

    @property
    def goodput_rps(self) -> float:
        """Requests per second that meet every latency target (`toolkit.metrics`); without targets
        the throughput.
        """
        return self.outcome.metrics["goodput_rps"]

    @property
    def score(self) -> float:
        """Goodput; between equals, the lower mean E2E latency."""
        latency_s = self.outcome.metrics.get("e2e_mean_s", 0.0)
        return self.goodput_rps * (1.0 - TIE_BREAK * latency_s / (1.0 + latency_s))

    def usage(self, limits: CandidateLimits) -> dict[str, float]:
        """The used share of each limit: above 1 it is broken.

        For the attainment, it is the share of late requests (100 % minus the confidence bound) over
        the allowed share.
        """

        def share(value: float, limit: float) -> float:
            if limit:
                return value / limit
            return 1.0 + value if value else 0.0

        metrics = self.outcome.metrics
        most = {
            OOM: limits.max_oom_percent,
            EVICTED: limits.max_evicted_percent,
            REFUSED: limits.max_refused_percent,
            BEHIND: limits.max_behind_percent,
        }
        used = dict(self.ratios)
        for key, limit in most.items():
            if limit is not None:
                used[key] = share(metrics.get(key, 0.0), limit)
        if limits.min_attainment_percent is not None:
            late = 100.0 - metrics.get(ATTAINMENT_LOWER, 0.0)
            used[ATTAINMENT] = share(late, 100.0 - limits.min_attainment_percent)
        return used

    def feasible(self, limits: CandidateLimits) -> bool:
        """Whether every limit is kept."""
        return all(share <= 1.0 for share in self.usage(limits).values())

    def rank(self, limits: CandidateLimits) -> tuple[bool, bool, float]:
        """A greater rank is better: limits kept, then simulated whole, then the score."""
        return self.feasible(limits), not self.screened_out, self.score


@dataclass(slots=True, frozen=True)
class EvaluationSetup:
    """Where candidates are tried: machine, windows, latency targets (`sla`) and further limits.

    `label` is unique in a tuning. `own_rps`: the mean rate of the trace of which the only window is
    the busiest part; 0: the window's own. Rates are always the trace's mean.
    """

    world: World
    windows: Sequence[Trace]
    sla: Mapping[str, float]
    label: str = "search"
    limits: CandidateLimits = CandidateLimits()
    own_rps: float = 0.0


@dataclass(slots=True, frozen=True)
class SimulatedWindow:
    """The result of one window."""

    served: Served
    metrics: dict[str, float]


@dataclass(slots=True, frozen=True)
class Task:
    """A candidate on a setup. Windows are simulated one by one, in any order, then summed up.

    `router` is before several replicas of a server; None: as the setup's world says.
    """

    setup: EvaluationSetup
    policy: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    router: RouterSpec | None = None

    @classmethod
    def of(cls, setup: EvaluationSetup, outcome: Outcome) -> Task:
        """The settings of an outcome on another setup."""
        return cls(setup, outcome.policy, outcome.parameters, outcome.replica_router)

    @property
    def key(self) -> str:
        """See `Outcome.key`."""
        return searched_key(self.policy, self.router.name if self.router else None)

    def on(self, window: int) -> Task:
        """The same candidate on one window of the setup."""
        return replace(self, setup=replace(self.setup, windows=[self.setup.windows[window]]))

    def simulate(self, window: int) -> SimulatedWindow:
        """Simulate one window of the setup."""
        world = self.setup.world
        if self.router is not None:
            router = make_router(self.router.name, self.router.parameters)
            routing = world.routing or Routing.of_front(router)
            world = replace(world, routing=replace(routing, router=router))
        result = simulate(self.setup.windows[window], self._candidate(), world)
        return SimulatedWindow(result.served, result.metrics(self.setup.sla))

    def sum_up(self, results: Sequence[SimulatedWindow]) -> Evaluation:
        """Return the evaluation, from the `results` of all windows in their order.

        Metrics are means over windows. Targets are judged on the requests of all windows together,
        and so are throughput, goodput and attainment: a mean of the windows' rates would weigh a
        window with few requests as much as one with many. Without targets the throughput is the
        goodput.
        """
        sla = self.setup.sla
        metrics = {
            key: fmean(result.metrics[key] for result in results)
            for key in results[0].metrics
            if all(key in result.metrics for result in results)
        }
        parts = [result.served for result in results]
        good = [meets_sla(part, sla) for part in parts]
        metrics[ATTAINMENT_LOWER] = lower_bound_percent(good)
        if len(parts) > 1:
            closed = self.setup.world.concurrency > 0
            metrics |= pooled_rates(parts, sla, closed=closed)
            if sla:
                metrics[ATTAINMENT] = 100.0 * float(np.concatenate(good).mean())
        if not sla:
            metrics["goodput_rps"] = metrics["throughput_rps"]
        if self.setup.world.refuses:
            metrics[REFUSED] = (
                100.0 * metrics["refused"] * len(results) / sum(map(len, self.setup.windows))
            )
        served = _joined(parts)
        outcome = Outcome(
            policy=self.policy,
            parameters=parameters(self._candidate()),
            metrics=metrics,
            replica_router=self.router,
        )
        return Evaluation(outcome, sla_ratios(served, sla))

    def run(self) -> Evaluation:
        """Simulate all windows in this process."""
        return self.sum_up([self.simulate(window) for window in range(len(self.setup.windows))])

    def _candidate(self) -> AnyPolicy:
        """The policy. Parameters are drawn independently; where one bounds another, it is moved to
        the nearest allowed value, and so are limits with which vLLM would not start.
        """
        within = VllmPolicy.within if self.policy == VllmPolicy.name else dict
        policy = make_any(self.policy, within(self.parameters))
        engine = self.setup.world.paged
        if isinstance(policy, VllmPolicy) and engine is not None:
            return engine.allowed(policy)
        return policy


def _joined(parts: Sequence[Served]) -> Served:
    columns = Served.__dataclass_fields__
    return Served(*(np.concatenate([getattr(part, key) for part in parts]) for key in columns))


@dataclass(slots=True, frozen=True)
class Screen:
    """A cheap first look at candidates, on the first part of each window after its warm-up.

    A candidate is hopeless if so many requests of that part miss a target that the percentile of
    all requests would miss it even if no other request were late, `SCREEN_MARGIN` times over. The
    margin is for schedulers that would serve a request earlier if more requests arrived later.
    """

    setup: EvaluationSetup
    targets: Mapping[str, float]

    def hopeless(self, evaluation: Evaluation) -> Evaluation | None:
        """The evaluation of a trial on the first parts alone, if it is hopeless there."""
        if all(evaluation.ratios[key] <= 1.0 for key in self.targets):
            return None
        ratios = {k: ratio for k, ratio in evaluation.ratios.items() if k not in self.targets}
        return Evaluation(evaluation.outcome, ratios, screened_out=True)


def make_screen(setup: EvaluationSetup) -> Screen | None:
    """The screen of a setup; None where no target can tell early, or a part has few requests."""
    windows = [_first_part(window) for window in setup.windows]
    if min(window.counted for window in windows) < SCREEN_REQUESTS:
        return None
    requests = sum(window.counted for window in setup.windows)
    more = SCREEN_MARGIN * requests / sum(window.counted for window in windows)
    targets = {}
    for key, limit in setup.sla.items():
        metric, stat, unit = key.split("_")
        late = more * (100.0 - float(stat[1:])) if stat[1:].isdecimal() else 100.0
        if 0.0 < late < 100.0:
            targets[f"{metric}_p{100.0 - late:.6f}_{unit}"] = limit
    if not targets:
        return None
    sla = {**setup.sla, **targets}
    label = f"{setup.label}, first part"
    return Screen(replace(setup, windows=windows, sla=sla, label=label), targets)


def _first_part(window: Trace) -> Trace:
    """The warm-up of a window, and `SCREEN_SHARE` of the time after it."""
    begin_s = float(window.arrival_s[window.warmup])
    end_s = float(window.arrival_s[-1])
    return cut(window, 0.0, begin_s + SCREEN_SHARE * (end_s - begin_s) + TINY_S)


def lower_bound_percent(windows: Sequence[NDArray[np.bool_]]) -> float:
    """The lower 95 % confidence bound of the share of good requests, in percent.

    Args:
        windows: for each window, whether each request was good, in the order of arrival.
    """
    blocks = [
        block
        for window in windows
        for block in np.array_split(window, min(BLOCKS, max(len(window), 1)))
    ]
    good = np.array([block.sum() for block in blocks], dtype=np.float64)
    size = np.array([len(block) for block in blocks], dtype=np.float64)
    count = float(size.sum())
    if not count:
        return 0.0
    share = float(good.sum() / count)
    if 0.0 < share < 1.0:
        count = _effective_count(good, size)
    return 100.0 * wilson_lower(share, count)


def wilson_lower(share: float, count: float) -> float:
    """The lower end (one-sided, 95 %) of Wilson's interval, for `count` independent requests."""
    square = Z * Z / count
    spread = np.sqrt(share * (1.0 - share) / count * Z * Z + square * square / 4.0)
    return float(max((share + square / 2.0 - spread) / (1.0 + square), 0.0))


def _effective_count(good: NDArray[np.float64], size: NDArray[np.float64]) -> float:
    """The number of independent requests with the variance that is between the blocks.

    At most the number of requests. `good` and `size` count requests in each block.
    """
    total = float(size.sum())
    blocks = len(size)
    share = good.sum() / total
    between = blocks / (blocks - 1) * np.square(good - share * size).sum() / total**2
    design_effect = max(between / (share * (1.0 - share) / total), 1.0)
    # Student's t in place of Z (Cornish and Fisher's expansion: within 1 % from 4 degrees on).
    freedom = blocks - 1
    student = Z + (Z**3 + Z) / (4 * freedom)
    student += (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)
    return float(total / design_effect * (Z / student) ** 2)
