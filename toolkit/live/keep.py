"""A server that keeps itself tuned: sure changes alone, watched, and taken back.

`Keeper` decides, without a clock and without I/O. Each time it is told of the traffic of the last
minutes and of the requests that the server has, and requests miss their targets or wait, it looks
ahead (`toolkit.live.ahead`): it simulates that these requests and then traffic like the newest are
served, with the current settings and with others. It changes settings only if

- the gain over the blocks of the traffic, in pairs, is sure: its 95 % interval lies above
  `sure_percent`, and the gain above `least_percent`, by the law or where passes take as much longer
  as the law may be off;
- by neither of them, nor where passes are as much shorter, anything is lost;
- the operator's bounds allow it, and nothing is being watched;
- there is no incident: passes are as long as the law says, and requests do not fail.

One setting is changed, and others with it where each adds as much again. Traffic like the newest is
the longest stretch of it, back from now, that is steady (`steady_since`).

Then it watches. What the server serves is compared with what the settings from before would have
served of the same traffic, as simulated. If it is worse, they come back, and that change is not
tried again for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.live.ahead import Unfinished, ahead
from toolkit.live.search import T95
from toolkit.live.space import (
    ROWS,
    THRESHOLD,
    TOKENS,
    WATERMARK,
    Settings,
    is_modelled,
    policy_of,
)
from toolkit.metrics import Served, meets_sla
from toolkit.sched.policies.parameters import Value
from toolkit.sim.world import World
from toolkit.traces.types import Trace

Floats = NDArray[np.float64]
Kind = Literal["wait", "incident", "keep", "change", "watch", "good", "back"]
FACTORS = (0.25, 0.5, 0.71, 1.41, 2.0, 4.0)  # of a number that is tried instead
THRESHOLDS = (0, 32, 64, 128, 256, 512, 1024, 2048)
WATERMARKS = (0.0, 0.02, 0.05, 0.1, 0.2)
BLOCKS_MIN = 6  # of traffic; fewer decide nothing
BUSY_MIN = 3  # of these, with requests
TOGETHER = 3  # settings that may change at once
STEADY = 3.5  # standard errors that two stretches of steady traffic differ by at most
TIE_BREAK = 0.02  # of a block's score: what a mean E2E of 0 is worth


@dataclass(frozen=True, slots=True)
class KeepRules:
    """What an operator allows, and when a gain is sure.

    Attributes:
        bounds: of the settings that may change, by name; others stay.
        block_s: traffic is compared in blocks of so many seconds.
        ahead_s: how far it looks ahead at least; shorter traffic is repeated.
        least_percent, sure_percent: the least gain, and the least end of its interval.
        law_percent: how far off the law may be; a change must not be worse there.
        watch_s: how long a change is watched.
        worse_percent: so much less than the settings before would have served: back to these.
        again_s: for so long a change that was taken back is not tried again.
        incident_factor: passes that take so many times as long as the law says are an incident.
        requests_min: in the traffic; with fewer nothing is decided.
    """

    bounds: Mapping[str, tuple[float, float]]
    block_s: float = 5.0
    ahead_s: float = 180.0
    least_percent: float = 5.0
    sure_percent: float = 1.0
    law_percent: float = 10.0
    watch_s: float = 90.0
    worse_percent: float = 5.0
    again_s: float = 3600.0
    incident_factor: float = 1.5
    requests_min: int = 30


@dataclass(frozen=True, slots=True)
class Seen:
    """What the server did lately.

    Attributes:
        traffic: the requests of the last minutes; times count from `since_s`.
        served: the same requests as they were served; not `ok`: they have not ended, or failed.
        unfinished: those that it has, of any time: first those that run.
        slowdown: the time of passes over the law's, in the last block.
        failed: whether requests failed in the last block.
    """

    since_s: float
    traffic: Trace
    served: Served
    unfinished: Sequence[Unfinished] = ()
    slowdown: float = 1.0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What was decided, in one line, and the settings to make; {}: none."""

    kind: Kind
    line: str
    settings: Settings = field(default_factory=dict)


@dataclass(slots=True)
class _Watch:
    """A change that is watched since `since_s`: the values before it, and the requests that the
    server had then.
    """

    since_s: float
    before: Settings
    unfinished: Sequence[Unfinished]


@dataclass(frozen=True, slots=True)
class _Gain:
    """What other settings add, in percent, with its 95 % interval."""

    change: Settings
    percent: float
    low_percent: float
    high_percent: float

    def is_sure(self, rules: KeepRules) -> bool:
        return self.percent >= rules.least_percent and self.low_percent >= rules.sure_percent


class Keeper:
    """See the module. `planned` are the flags of the start, `sla` the latency targets."""

    def __init__(
        self, rules: KeepRules, planned: Mapping[str, Value], sla: Mapping[str, float]
    ) -> None:
        self._rules = rules
        self._planned = planned
        self._sla = sla
        self._watch: _Watch | None = None
        self._not_until: dict[tuple[str, Value], float] = {}

    def step(self, now_s: float, seen: Seen, current: Settings, world: World) -> Step:
        """Decide at `now_s`, with the law of `world`."""
        rules = self._rules
        begin_s = steady_since(
            seen.traffic, now_s - seen.since_s, rules.block_s, rules.requests_min
        )
        if self._watch is not None:
            changed_s = self._watch.since_s - seen.since_s
            step = self._watched(now_s, seen, current, world, self._watch)
            if step.kind != "watch" or begin_s <= changed_s + rules.block_s:
                return step
            self._watch = None  # the traffic has changed since
        if seen.slowdown > rules.incident_factor or seen.failed:
            why = "requests fail" if seen.failed else f"passes take {seen.slowdown:.2f} of the law"
            return Step("incident", f"nothing is changed in an incident: {why}")
        traffic = _from(seen.traffic, begin_s)
        if len(traffic) < rules.requests_min:
            return Step("wait", f"{len(traffic)} requests are too few to decide")
        span_s = now_s - seen.since_s - begin_s
        if span_s < BLOCKS_MIN * rules.block_s:
            return Step("wait", f"{span_s:.0f} s of traffic are too few to decide")
        if self._is_well(seen, len(traffic), world):
            return Step("keep", "requests keep their targets, and none waits: kept")
        look = _Ahead(self._planned, self._sla, seen.unfinished, traffic, span_s, rules)
        off = rules.law_percent / 100.0
        best: _Gain | None = None
        law = 1.0
        most = 0.0
        for factor in (1.0 + off, 1.0):  # as slow as the law may be, and as it is
            believed = slowed(world, factor)
            usual = look.blocks(current, believed)
            possible = gain_percent(np.array([float(len(traffic))]), usual)
            most = max(most, possible)
            if possible < rules.least_percent:
                continue
            best = self._best(now_s, look, current, usual, believed) or best
            law = factor
            if best is not None and best.is_sure(rules):
                break
        if most < rules.least_percent:
            return Step("keep", f"no settings can add more than {most:.1f} %: kept")
        if best is None:
            return Step("keep", "no setting may change")
        change = words_of(best.change, current)
        if not best.is_sure(rules):
            surely = f"and {best.low_percent:.1f} % surely"
            return Step("keep", f"{change} may add {best.percent:.1f} %, {surely}: kept")
        for factor in {1.0 + off, 1.0, 1.0 - off} - {law}:
            other = slowed(world, factor)
            before = look.blocks(current, other)
            after = look.blocks(current | best.change, other)
            if gain_percent(after, before) < -rules.sure_percent:
                line = f"{change} is worse where the law is {100 * (factor - 1):+.0f} % off"
                return Step("keep", f"{line}: kept")
        self._watch = _Watch(now_s, dict(current), seen.unfinished)
        span = f"{best.low_percent:.1f} to {best.high_percent:.1f}, traffic of {span_s:.0f} s"
        if law > 1.0:
            span += f", were passes {100 * off:.0f} % longer"
        return Step("change", f"{change}: adds {best.percent:.1f} % ({span})", best.change)

    def forget(self) -> None:
        """What was ordered was not done: a dry run."""
        self._watch = None

    def _is_well(self, seen: Seen, count: int, world: World) -> bool:
        """Whether no settings can add much to what was measured of the newest `count` requests, and
        hardly any request waits. Then nothing is simulated: a simulation takes a processor, and a
        law that is off may find a gain where there is none.
        """
        waiting = sum(one.cached == 0 for one in seen.unfinished)
        if waiting > 1 + len(seen.unfinished) // 10:
            return False
        ended = seen.served.ok[-count:]
        good = meets_sla(world.front.seen(seen.served), self._sla)[-count:]
        if ended.sum() < self._rules.requests_min:
            return False
        possible = gain_percent(ended.astype(np.float64), good.astype(np.float64))
        return possible < self._rules.least_percent

    def _best(
        self, now_s: float, look: _Ahead, current: Settings, usual: Floats, world: World
    ) -> _Gain | None:
        """The surest gain: of one setting, and of others with it while these are sure, too."""
        best: _Gain | None = None
        settings = current
        before = usual
        for _ in range(TOGETHER):
            found: list[tuple[_Gain, Floats]] = []
            for name, value in self._alternatives(settings, world):
                if best is not None and name in best.change:
                    continue
                if self._not_until.get((name, value), -math.inf) > now_s:
                    continue
                scores = look.blocks(settings | {name: value}, world)
                gain = gain_of({name: value}, scores, before, look.counts())
                if gain is not None:
                    found.append((gain, scores))
            if not found:
                break
            gain, scores = max(found, key=lambda one: one[0].low_percent)
            if best is not None and not gain.is_sure(self._rules):
                break
            change = gain.change if best is None else best.change | gain.change
            best = gain_of(change, scores, usual, look.counts())
            if best is None or not best.is_sure(self._rules):
                break
            settings = current | change
            before = scores
        return best

    def _watched(
        self, now_s: float, seen: Seen, current: Settings, world: World, watch: _Watch
    ) -> Step:
        """Compare what was served since the change with what would have been served without it, by
        a law that is as slow as it may be.
        """
        rules = self._rules
        changed = {
            name: watch.before[name] for name in current if current[name] != watch.before[name]
        }
        if not changed:
            self._watch = None
            return Step("keep", "another tuner changed the settings: nothing is watched")
        since_s = watch.since_s - seen.since_s
        over_s = now_s - watch.since_s
        traffic = _from(seen.traffic, since_s)
        percent = 0.0
        if len(traffic) >= rules.requests_min // 2 and over_s >= BLOCKS_MIN * rules.block_s:
            slow = slowed(world, 1.0 + rules.law_percent / 100.0)
            would = ahead(watch.unfinished, traffic, policy_of(self._planned, watch.before), slow)
            would = replace(would, ok=would.ok & (would.finish_s <= over_s))  # as far as now
            usual = _in_blocks(scores_of(would, self._sla), traffic, rules.block_s)
            made = scores_of(seen.served, self._sla)[-len(traffic) :]
            counts = _in_blocks(np.ones(len(traffic)), traffic, rules.block_s)
            gain = gain_of({}, _in_blocks(made, traffic, rules.block_s), usual, counts)
            percent = 0.0 if gain is None else gain.percent
            if gain is not None and percent < -rules.worse_percent and gain.high_percent < 0.0:
                self._watch = None
                for name in changed:
                    self._not_until[name, current[name]] = now_s + rules.again_s
                line = f"back: {words_of(changed, current)}: {percent:+.1f} % of what the settings "
                return Step("back", f"{line}before would serve", changed)
        if over_s < rules.watch_s:
            return Step("watch", f"watched for {over_s:.0f} s: {percent:+.1f} %")
        self._watch = None
        return Step("good", f"kept after {over_s:.0f} s: {percent:+.1f} % of the settings before")

    def _alternatives(self, current: Settings, world: World) -> list[tuple[str, Value]]:
        """Settings that differ in one value, within the operator's bounds."""
        found: list[tuple[str, Value]] = []
        for name, (low, high) in self._rules.bounds.items():
            if name not in current or not is_modelled(name, world):
                continue
            value = current[name]
            tried: list[float]
            if name == THRESHOLD:
                tried = [float(one) for one in THRESHOLDS]
            elif name == WATERMARK:
                tried = list(WATERMARKS)
            else:
                tried = [float(value) * factor for factor in FACTORS]
            if name in (ROWS, TOKENS, THRESHOLD):
                values: list[Value] = [round(one) for one in tried]
            else:
                values = [float(one) for one in tried]
            for one in values:
                bounded = one if name == THRESHOLD and one == 0 else _within(one, low, high)
                if bounded != value and (name, bounded) not in found:
                    found.append((name, bounded))
        return found


@dataclass(frozen=True, slots=True)
class _Ahead:
    """What comes: the requests that the server has, then this traffic of `span_s` seconds, again
    and again.
    """

    planned: Mapping[str, Value]
    sla: Mapping[str, float]
    unfinished: Sequence[Unfinished]
    traffic: Trace
    span_s: float
    rules: KeepRules

    def counts(self) -> Floats:
        """The requests of each block of the traffic [n]."""
        return _in_blocks(np.ones(len(self.traffic)), self.traffic, self.rules.block_s)

    def blocks(self, settings: Settings, world: World) -> Floats:
        """The score of each block of the traffic [n], the mean of its repetitions."""
        times = max(math.ceil(self.rules.ahead_s / self.span_s), 1)
        count = len(self.traffic)
        coming = _repeated(self.traffic, times, self.span_s)
        policy = policy_of(self.planned, settings)
        scores = scores_of(ahead(self.unfinished, coming, policy, world), self.sla)
        whole = scores.reshape(times, count).mean(axis=0)
        return _in_blocks(whole, self.traffic, self.rules.block_s)


def _in_blocks(scores: Floats, traffic: Trace, block_s: float) -> Floats:
    """The sum of the requests' scores in each block [n]."""
    blocks = (traffic.arrival_s // block_s).astype(int)
    sums: Floats = np.bincount(blocks, weights=scores).astype(np.float64)
    return sums


def scores_of(served: Served, sla: Mapping[str, float]) -> Floats:
    """The score of each request: 1 if it meets every target, and less the longer it took."""
    good = meets_sla(served, sla)
    seconds = np.where(served.ok, served.finish_s - served.arrival_s, np.inf)
    found: Floats = good * (1.0 - TIE_BREAK) + TIE_BREAK / (1.0 + seconds)
    return found


def gain_of(change: Settings, scores: Floats, usual: Floats, counts: Floats) -> _Gain | None:
    """The gain over the usual scores of blocks of so many requests; None for too few blocks.

    It is a ratio estimate: chance is how far each block's gain is from that of as many requests on
    average. A gain for each request is sure although bursts come and go, and a block without
    requests says nothing.
    """
    busy = int(np.count_nonzero(counts))
    if busy < BUSY_MIN:
        return None
    gains = scores - usual
    of_request = gains.sum() / counts.sum()
    chance = np.square(gains - of_request * counts).sum() * busy / (busy - 1)
    half = T95[min(busy - 2, len(T95) - 1)] * math.sqrt(chance)
    whole = max(float(usual.sum()), 1e-9)
    low_percent = 100.0 * (float(gains.sum()) - half) / whole
    high_percent = 100.0 * (float(gains.sum()) + half) / whole
    return _Gain(change, gain_percent(scores, usual), low_percent, high_percent)


def steady_since(traffic: Trace, now_s: float, block_s: float, least: int) -> float:
    """Since when the traffic until `now_s` is steady: no earlier stretch of it has, per block,
    another number of requests, of prompt tokens or of output tokens than what follows. The newest
    stretch has at least `least` requests in `BLOCKS_MIN` blocks or more.
    """
    whole = int(now_s // block_s)
    if not len(traffic) or whole <= BLOCKS_MIN:
        return max(now_s - whole * block_s, 0.0)
    # blocks that end now: number 0 is the newest one
    ages = ((now_s - traffic.arrival_s) // block_s).astype(int)
    known = (ages >= 0) & (ages < whole)
    columns: list[Floats] = [
        np.bincount(ages[known], weights=weights[known], minlength=whole).astype(float)
        for weights in (
            np.ones(len(traffic)),
            traffic.prompt_tokens.astype(float),
            traffic.output_tokens.astype(float),
        )
    ]
    enough = int(np.searchsorted(np.cumsum(columns[0]), least)) + 1
    newest = min(max(enough, BLOCKS_MIN), whole)
    count = newest
    while count < whole:
        older = slice(count, min(count + newest, whole))
        if whole - count > 1 and any(_differ(each[:count], each[older]) for each in columns):
            break
        count += 1
    return now_s - count * block_s


def _differ(one: Floats, other: Floats) -> bool:
    """Whether the means of two stretches differ by more than chance (Welch's t)."""
    error = math.sqrt(one.var(ddof=1) / len(one) + other.var(ddof=1) / len(other))
    return abs(float(one.mean() - other.mean())) > STEADY * max(error, 1e-9)


def _from(traffic: Trace, begin_s: float) -> Trace:
    """The requests from `begin_s` on; their times count from then."""
    first = int(np.searchsorted(traffic.arrival_s, begin_s))
    later = traffic.take(slice(first, len(traffic)))
    return replace(later, arrival_s=later.arrival_s - begin_s)


def _repeated(traffic: Trace, times: int, span_s: float) -> Trace:
    """The traffic so many times, one after the other."""
    arrival = [traffic.arrival_s + k * span_s for k in range(times)]
    return Trace(
        np.concatenate(arrival),
        np.tile(traffic.prompt_tokens, times),
        np.tile(traffic.output_tokens, times),
        np.tile(traffic.max_tokens, times),
    )


def words_of(change: Settings, current: Settings) -> str:
    """A change in words."""
    return ", ".join(f"{name} {current[name]} -> {value}" for name, value in change.items())


def _within(value: Value, low: float, high: float) -> Value:
    bounded = min(max(float(value), low), high)
    return round(bounded) if isinstance(value, int) else bounded


def gain_percent(scores: Floats, usual: Floats) -> float:
    """The gain of all blocks together."""
    before = float(usual.sum())
    return 100.0 * (float(scores.sum()) / before - 1.0) if before > 0.0 else 100.0


def slowed(world: World, factor: float) -> World:
    """The world with passes `factor` times as long."""
    return replace(world, paged=world.engine().slowed(factor))
