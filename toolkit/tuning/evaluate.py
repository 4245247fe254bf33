"""Simulating a deployment under candidate settings on windows of a trace, and judging it.

The parts, in order: a candidate's evaluation (`Task`); the screen that drops hopeless candidates
early; and the lower confidence bound of the attainment. All candidates get the same windows and the
same draws (common random numbers), so differences come from the candidates.

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
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from toolkit.files.tuning import (
    ATTAINMENT,
    KEEPS_UP,
    REFUSED,
    SHARE_NAMES,
    Evaluation,
    Limit,
    Outcome,
    Settings,
    recipe_limits,
)
from toolkit.metrics import Served, meets_sla, pooled_rates, sla_ratios
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import parameters
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy
from toolkit.sim.api import simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.sim.paged_engine import PagedEngine
from toolkit.traces.types import Trace
from toolkit.traces.windows import cut

# Blocks per window. Of 5, 8, 10 and 15, five cover best where requests are late in long stretches.
BLOCKS = 5
# Share of the goodput that the mean latency can decide: it orders equals and trades nothing.
TIE_BREAK = 1e-3
Z = 1.6449  # of the normal distribution: one-sided, 95 %
# Of each window, by time: what a screened candidate is simulated on first.
SCREEN_SHARE = 0.25
SCREEN_MARGIN = 2.0
SCREEN_REQUESTS = 10  # of each part, at least
TINY_S = 1e-9  # a window ends before its end


@dataclass(slots=True, frozen=True)
class SimulatedWindow:
    """The result of one window."""

    served: Served
    metrics: dict[str, float]


@dataclass(slots=True, frozen=True)
class Task:
    """A deployment on windows of a trace, judged by the targets and limits of its recipe. Windows
    are simulated one by one, in any order, then summed up.

    Attributes:
        label: unique in a tuning, together with the settings.
        whole: the only window is the whole trace, or its busiest part. A server has to keep up with
            it; a short window may end in a burst.
        own_rps: mean rate of the trace of which the only window is the busiest part; 0: the
            window's own. Rates are always the trace's mean.
    """

    deployment: Deployment
    windows: Sequence[Workload]
    label: str = "search"
    whole: bool = False
    own_rps: float = 0.0

    @property
    def settings(self) -> Settings:
        """See `Deployment.settings`."""
        return self.deployment.settings

    @property
    def sla(self) -> Mapping[str, float]:
        """The latency targets."""
        return self.deployment.recipe.sla

    @property
    def limits(self) -> list[Limit]:
        """Every limit; where requests start as others end, no queue grows."""
        keeps_up = self.whole and not self.windows[0].concurrency
        return [*recipe_limits(self.deployment.recipe), *[KEEPS_UP] * keeps_up]

    def under(self, settings: Settings) -> Task:
        """Return the same deployment under other settings."""
        return replace(self, deployment=replace(self.deployment, settings=settings))

    def on(self, window: int) -> Task:
        """Return the same deployment on one of the windows."""
        return replace(self, windows=[self.windows[window]])

    def simulate(self, window: int) -> SimulatedWindow:
        """Simulate one of the windows."""
        workload = self.windows[window]
        result = simulate(workload.trace, self._policy(), self.deployment.world(workload))
        return SimulatedWindow(result.served, result.metrics(self.sla))

    def sum_up(self, results: Sequence[SimulatedWindow]) -> Evaluation:
        """Return the evaluation, from the `results` of all windows in their order.

        Metrics are means over windows. Targets are judged on the requests of all windows together,
        and so are throughput, goodput and attainment: a mean of the windows' rates would weigh a
        window with few requests as much as one with many. Without targets the throughput is the
        goodput.
        """
        sla = self.sla
        metrics = {
            key: fmean(result.metrics[key] for result in results)
            for key in results[0].metrics
            if all(key in result.metrics for result in results)
        }
        parts = [result.served for result in results]
        good = [meets_sla(part, sla) for part in parts]
        metrics[ATTAINMENT] = lower_bound_percent(good)
        if len(parts) > 1:
            metrics |= pooled_rates(parts, sla, closed=self.windows[0].concurrency > 0)
            if sla:
                metrics[SHARE_NAMES[ATTAINMENT]] = 100.0 * float(np.concatenate(good).mean())
        if not sla:
            metrics["goodput_rps"] = metrics["throughput_rps"]
        if self.deployment.refuses:
            requests = sum(len(window.trace) for window in self.windows)
            metrics[REFUSED] = 100.0 * metrics["refused"] * len(results) / requests
        ratios = sla_ratios(_joined(parts), sla)
        names = {limit.name: SHARE_NAMES.get(limit.name, limit.name) for limit in self.limits}
        used = {
            names[limit.name]: ratios.get(limit.name, share_of(limit, metrics.get(limit.name, 0.0)))
            for limit in self.limits
        }
        settings = self.settings.model_copy(update={"parameters": parameters(self._policy())})
        return Evaluation(settings=settings, outcome=Outcome(metrics=metrics, used=used))

    def run(self) -> Evaluation:
        """Simulate all windows in this process."""
        return self.sum_up([self.simulate(window) for window in range(len(self.windows))])

    def _policy(self) -> AnyPolicy:
        """The policy. Parameters are drawn independently; where one bounds another, it is moved to
        the nearest allowed value, and so are limits with which vLLM would not start.
        """
        if self.settings.policy != VllmPolicy.name:
            return self.deployment.policy()
        flags = make_any(VllmPolicy.name, VllmPolicy.within(self.settings.parameters))
        assert isinstance(flags, VllmPolicy)
        engine = PagedEngine.of(self.deployment.fit)
        return engine.allowed(flags) if engine else flags


def share_of(limit: Limit, value: float) -> float:
    """Return the share of a limit that a value uses. Of a lower limit in percent it is that of the
    rest up to 100 %.
    """
    most = limit.limit
    if limit.bound == "at least":
        value = 100.0 - value
        most = 100.0 - most
    if most:
        return value / most
    return 1.0 + value if value else 0.0


def score(found: Evaluation) -> float:
    """Goodput; between equals, the lower mean E2E latency."""
    latency_s = found.metrics.get("e2e_mean_s", 0.0)
    return found.goodput_rps * (1.0 - TIE_BREAK * latency_s / (1.0 + latency_s))


def rank(found: Evaluation) -> tuple[bool, bool, float]:
    """A greater rank is better: limits kept, then simulated whole, then the score."""
    return found.outcome.kept, not found.screened_out, score(found)


def _joined(parts: Sequence[Served]) -> Served:
    columns = Served.__dataclass_fields__
    return Served(*(np.concatenate([getattr(part, key) for part in parts]) for key in columns))


@dataclass(slots=True, frozen=True)
class Screen:
    """A cheap first look at candidates, on the first part of windows after their warm-up.

    A candidate is hopeless if so many requests of the parts miss a target that the percentile of
    all requests would miss it even if no other request were late, `SCREEN_MARGIN` times over. The
    margin is for schedulers that would serve a request earlier if more requests arrived later.
    """

    task: Task
    targets: Mapping[str, float]

    def hopeless(self, evaluation: Evaluation) -> Evaluation | None:
        """The evaluation of a trial on the first parts alone, if it is hopeless there."""
        used = evaluation.outcome.used
        if all(used[key] <= 1.0 for key in self.targets):
            return None
        rest = {key: share for key, share in used.items() if key not in self.targets}
        outcome = evaluation.outcome.model_copy(update={"used": rest})
        return evaluation.model_copy(update={"outcome": outcome, "screened_out": True})


def make_screens(task: Task) -> list[Screen]:
    """Return the screens of a task, in the order in which they are tried: the first part of the
    window that tells most, then those of all windows. One that no target can tell on is left out,
    and all are where a part has few requests.
    """
    parts = [_first_part(window.trace) for window in task.windows]
    counted = [part.counted for part in parts]
    if min(counted) < SCREEN_REQUESTS:
        return []
    most = counted.index(max(counted))
    one = _screen(task, {most: parts[most]}, f"first part of window {most}")
    every = _screen(task, dict(enumerate(parts)), "first part")
    return [screen for screen in ([one] if len(parts) > 1 else []) + [every] if screen]


def _screen(task: Task, parts: Mapping[int, Trace], label: str) -> Screen | None:
    """Return the screen on the first parts of some windows, by their numbers; None where no target
    can tell on so few of the requests.
    """
    more = SCREEN_MARGIN * sum(window.trace.counted for window in task.windows)
    more /= sum(part.counted for part in parts.values())
    targets = {}
    for key, limit in task.sla.items():
        metric, stat, unit = key.split("_")
        late = more * (100.0 - float(stat[1:])) if stat[1:].isdecimal() else 100.0
        if 0.0 < late < 100.0:
            targets[f"{metric}_p{100.0 - late:.6f}_{unit}"] = limit
    if not targets:
        return None
    recipe = task.deployment.recipe.model_copy(update={"sla": {**task.sla, **targets}})
    deployment = replace(task.deployment, recipe=recipe)
    windows = [replace(task.windows[number], trace=part) for number, part in parts.items()]
    screened = replace(task, deployment=deployment, windows=windows, label=f"{task.label}, {label}")
    return Screen(screened, targets)


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
