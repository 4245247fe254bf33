"""A policy on a set of trace windows, in the simulator: the metrics that the search and the verdict
compare.

Every candidate meets the same windows and the same draws (common random numbers): differences are
the candidates' own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Outcome, ParameterValue
from toolkit.metrics import Served, meets_sla, sla_ratios
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy
from toolkit.sim.api import simulate
from toolkit.sim.world import World, world_of
from toolkit.traces.types import Trace
from toolkit.traces.windows import TraceWindow, Windows, fit_windows, mean_rate, prepare, scale_rate

# How sure a share of good requests is: a lower confidence bound that knows that neighbours share
# their fate.
#
# Requests that wait in one queue are late together, so n requests say less than n independent
# ones would. Each window is cut into blocks of consecutive requests (batch means, as simulation
# studies do), and the variance between the blocks over the variance that independent requests
# would show is the design effect. Wilson's interval is taken with the effective number of
# requests, n / design effect, as surveys with clusters do, and less of them for the few blocks
# that the design effect is known from (Korn and Graubard 1998; Franco et al. 2019, *Comparative
# study of confidence intervals for proportions in complex sample surveys*).
#
# Wilson rather than a bootstrap over windows: there are two windows by default, and a bootstrap
# of two, or of shares that are all 100 %, says that nothing is uncertain.

BLOCKS = (
    5  # per window: of 5, 8, 10 and 15 it covers best where requests are late in long stretches
)
Z = 1.6449  # one-sided, 95 %


def lower_bound_percent(windows: Sequence[NDArray[np.bool_]]) -> float:
    """The share of good requests that is exceeded with 95 % confidence, in percent.

    Args:
        windows: of each window, whether each request was good, in the order of arrival.
    """
    blocks = [
        block
        for window in windows
        for block in np.array_split(window, min(BLOCKS, max(len(window), 1)))
    ]
    good = np.array([block.sum() for block in blocks], dtype=np.float64)
    size = np.array([len(block) for block in blocks], dtype=np.float64)
    if not size.sum():
        return 0.0
    share = float(good.sum() / size.sum())
    return 100.0 * wilson_lower(
        share, _effective_count(good, size) if 0.0 < share < 1.0 else float(size.sum())
    )


def wilson_lower(share: float, count: float) -> float:
    """The lower end of Wilson's score interval, one-sided 95 %, of a share seen in `count`
    independent requests.
    """
    square = Z * Z / count
    spread = np.sqrt(share * (1.0 - share) / count * Z * Z + square * square / 4.0)
    return float(max((share + square / 2.0 - spread) / (1.0 + square), 0.0))


def _effective_count(good: NDArray[np.float64], size: NDArray[np.float64]) -> float:
    """As many independent requests as would show the variance that is between the blocks [n]; at
    most all there are.
    """
    total, blocks = float(size.sum()), len(size)
    share = good.sum() / total
    between = blocks / (blocks - 1) * np.square(good - share * size).sum() / total**2
    design_effect = max(between / (share * (1.0 - share) / total), 1.0)
    return float(total / design_effect * (Z / _student(blocks - 1)) ** 2)


def _student(freedom: int) -> float:
    """Student's t where the normal distribution has Z (Cornish and Fisher's expansion: within 1 %
    from 4 on).
    """
    first = (Z**3 + Z) / (4 * freedom)
    return Z + first + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * freedom**2)


# how much of the goodput the mean latency may weigh: enough to order equals, too little to trade
TIE_BREAK = 1e-3
ATTAINMENT = "sla_attainment_percent"
ATTAINMENT_LOWER = "sla_attainment_lower_percent"


@dataclass(slots=True, frozen=True)
class CandidateLimits:
    """What a candidate must keep besides the latency targets; None asks for nothing."""

    max_oom_percent: float
    max_evicted_percent: float | None = None
    min_attainment_percent: float | None = None


@dataclass(slots=True, frozen=True)
class Evaluation:
    """An outcome, and each latency target's value over its limit."""

    outcome: Outcome
    ratios: dict[str, float]

    @property
    def goodput_rps(self) -> float:
        """Requests per second that meet every latency target."""
        return self.outcome.metrics["goodput_rps"]

    @property
    def score(self) -> float:
        """Goodput; between equals, the lower mean E2E latency."""
        latency_s = self.outcome.metrics.get("e2e_mean_s", 0.0)
        return self.goodput_rps * (1.0 - TIE_BREAK * latency_s / (1.0 + latency_s))

    def usage(self, limits: CandidateLimits) -> dict[str, float]:
        """Each limit's share that is used up: above 1 it is broken.

        Of the attainment it is the share of requests that may be late, judged by its confidence
        bound.
        """
        metrics = self.outcome.metrics
        found = dict(self.ratios) | {
            "oom_percent": _share(metrics.get("oom_percent", 0.0), limits.max_oom_percent)
        }
        if limits.max_evicted_percent is not None:
            found["evicted_percent"] = _share(
                metrics.get("evicted_percent", 0.0), limits.max_evicted_percent
            )
        if limits.min_attainment_percent is not None:
            late = 100.0 - metrics.get(ATTAINMENT_LOWER, 0.0)
            found[ATTAINMENT] = _share(late, 100.0 - limits.min_attainment_percent)
        return found

    def feasible(self, limits: CandidateLimits) -> bool:
        """Whether every limit is kept."""
        return all(share <= 1.0 for share in self.usage(limits).values())


def _share(value: float, limit: float) -> float:
    return value / limit if limit else (1.0 + value if value else 0.0)


@dataclass(slots=True, frozen=True)
class EvaluationSetup:
    """Where candidates are tried: the world, the windows, the targets. `label` tells one bench from
    another.
    """

    world: World
    windows: Sequence[Trace]
    sla: Mapping[str, float]
    label: str = "search"


@dataclass(slots=True, frozen=True)
class Seen:
    """What one window showed."""

    served: Served
    metrics: dict[str, float]


@dataclass(slots=True, frozen=True)
class Task:
    """A candidate to be tried on a bench: window by window, in whatever order, and then summed up."""

    bench: EvaluationSetup
    policy: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)

    def on(self, window: int) -> Task:
        """The same candidate on one window of the bench."""
        return replace(self, bench=replace(self.bench, windows=[self.bench.windows[window]]))

    def simulate(self, window: int) -> Seen:
        """One window of the bench."""
        result = simulate(self.bench.windows[window], self._candidate(), self.bench.world)
        return Seen(result.served, result.metrics(self.bench.sla))

    def sum_up(self, seen: Sequence[Seen]) -> Evaluation:
        """The evaluation: metrics are means over windows; targets are judged on all their requests
        together.
        """
        sla, first = self.bench.sla, seen[0].metrics
        metrics = {
            key: fmean(one.metrics[key] for one in seen)
            for key in first
            if all(key in o.metrics for o in seen)
        }
        metrics[ATTAINMENT_LOWER] = lower_bound_percent(
            [meets_sla(one.served, sla) for one in seen]
        )
        whole = parameters(self._candidate())
        outcome = Outcome(policy=self.policy, parameters=whole, metrics=metrics)
        return Evaluation(outcome, sla_ratios(_joined([one.served for one in seen]), sla))

    def _candidate(self) -> AnyPolicy:
        """The policy. Parameters are drawn each by itself; where one bounds another, the nearest
        that may be.
        """
        within = VllmPolicy.within if self.policy == VllmPolicy.name else dict
        return make_any(self.policy, within(self.parameters))

    def run(self) -> Evaluation:
        """All windows, here and now."""
        return self.sum_up([self.simulate(window) for window in range(len(self.bench.windows))])


def _joined(served: Sequence[Served]) -> Served:
    columns = Served.__dataclass_fields__
    return Served(
        **{name: np.concatenate([getattr(one, name) for one in served]) for name in columns}
    )


# What candidates are tried on: the trace made ready for a recipe, its windows, and the machine as
# the fit has it.

CAPACITY_SAMPLE = 1000  # requests of the backlog from which the untuned policy's capacity is read


@dataclass(slots=True, frozen=True)
class Workload:
    """The trace, made ready, and cut into windows."""

    windows: Windows
    rate_rps: float

    @property
    def trace(self) -> Trace:
        """The whole of it."""
        return self.windows.trace

    @property
    def search(self) -> list[TraceWindow]:
        """The windows to search on."""
        return self.windows.search

    @property
    def held_out(self) -> list[TraceWindow]:
        """The windows for the verdict, which the search does not see."""
        return self.windows.held_out


def capacity_rps(recipe: Recipe, world: World, fitted: Trace) -> float:
    """What the recipe's own policy serves at most: requests per second with a backlog of the
    trace's requests.
    """
    sample = np.linspace(0, len(fitted) - 1, min(len(fitted), CAPACITY_SAMPLE)).astype(int)
    backlog = Trace(
        np.zeros(len(sample)),
        fitted.prompt_tokens[sample],
        fitted.output_tokens[sample],
        fitted.max_tokens[sample],
    )
    policy = make_any(recipe.policy.name, recipe.policy.parameters)
    return simulate(backlog, policy, world).metrics({})["throughput_rps"]


def make_workload(recipe: Recipe, fit: Fit, trace: Trace, others: Sequence[Kind] = ()) -> Workload:
    """The trace with the recipe's lengths and rate, cut into windows to search on and windows held
    out.

    `InputError` for a trace without requests, one whose requests all come at once, and windows
    without requests.
    """
    spec = recipe.tune
    if not len(trace):
        raise InputError(
            f"{trace.source}: there are no requests in it", "give another trace with --trace"
        )
    fitted = prepare(trace, recipe)
    rate_rps = spec.request_rate_rps
    if rate_rps is None and spec.load is not None:
        rate_rps = round(
            spec.load * capacity_rps(recipe, make_world(recipe, fit, others), fitted), 3
        )
        if rate_rps == 0:
            raise InputError(
                f"policy '{recipe.policy.name}' serves none of {fitted.source}'s requests, so tune.load has no rate",
                "give a rate with --rate, or change the recipe's policy",
            )
    if rate_rps is not None:
        fitted = scale_rate(fitted, rate_rps)
    windows = fit_windows(fitted, spec.window_s, spec.windows, spec.held_out_windows, spec.seed)
    return Workload(windows, rate_rps or mean_rate(fitted))


def make_world(recipe: Recipe, fit: Fit, others: Sequence[Kind] = ()) -> World:
    """The simulated machine of a recipe; of a fleet with its `others`, its further kinds of
    workers.
    """
    kinds = [Kind(recipe=recipe, fit=fit, workers=recipe.workers), *others]
    return world_of(kinds, max_new_tokens=recipe.serve.max_new_tokens, seed=recipe.tune.seed)
