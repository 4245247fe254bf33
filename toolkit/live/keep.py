"""A server that keeps itself tuned: one sure change at a time, watched, and taken back.

`Keeper` decides, without a clock and without I/O. Each time it is told of the traffic of the last
minutes, it simulates this traffic with the current settings and with others, of which one setting
differs. It changes that one only if

- the gain of the blocks of the traffic, in pairs, is sure: its 95 % interval lies above
  `sure_percent`, and the gain above `least_percent`, over all blocks or over the newest ones;
- the gain remains where passes take as much longer or shorter as the law may be off;
- the operator's bounds allow it, and nothing is being watched;
- there is no incident: passes are as long as the law says, and requests do not fail.

Then it watches. What the server serves is compared with what the settings from before would have
served of the same traffic, as simulated. If it is worse, they come back, and that change is not
tried again for a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.live.search import interval
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
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace

Floats = NDArray[np.float64]
Kind = Literal["wait", "incident", "keep", "change", "watch", "good", "back"]
FACTORS = (0.25, 0.5, 0.71, 1.41, 2.0, 4.0)  # of a number that is tried instead
THRESHOLDS = (0, 32, 64, 128, 256, 512, 1024, 2048)
WATERMARKS = (0.0, 0.02, 0.05, 0.1, 0.2)
BLOCKS_MIN = 5
NEWEST = 6  # blocks that are looked at alone, too: traffic may have changed
TIE_BREAK = 0.02  # of a block's score: what a mean E2E of 0 is worth


@dataclass(frozen=True, slots=True)
class KeepRules:
    """What an operator allows, and when a gain is sure.

    Attributes:
        bounds: of the settings that may change, by name; others stay.
        block_s: traffic is compared in blocks of so many seconds.
        least_percent, sure_percent: the least gain, and the least end of its interval.
        law_percent: how far off the law may be; a gain must remain there.
        watch_s: how long a change is watched.
        worse_percent: so much less than the settings before would have served: back to these.
        again_s: for so long a change that was taken back is not tried again.
        incident_factor: passes that take so many times as long as the law says are an incident.
        requests_min: in the traffic; with fewer nothing is decided.
    """

    bounds: Mapping[str, tuple[float, float]]
    block_s: float = 30.0
    least_percent: float = 5.0
    sure_percent: float = 1.0
    law_percent: float = 10.0
    watch_s: float = 120.0
    worse_percent: float = 5.0
    again_s: float = 3600.0
    incident_factor: float = 1.5
    requests_min: int = 40


@dataclass(frozen=True, slots=True)
class Seen:
    """What the server did lately.

    Attributes:
        traffic: the requests of the last minutes; times count from `since_s`.
        served: the same requests as they were served; not `ok`: they have not ended, or failed.
        slowdown: the time of passes over the law's, in the last block.
        failed: whether requests failed in the last block.
    """

    since_s: float
    traffic: Trace
    served: Served
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
    """A change that is watched since `since_s`: the values before it, and after."""

    since_s: float
    before: Settings
    after: Settings
    expected: float


@dataclass(frozen=True, slots=True)
class _Alternative:
    """Another value of a setting, and its gain over so many of the newest blocks."""

    name: str
    value: Value
    blocks: int
    percent: float
    low_percent: float
    high_percent: float

    @classmethod
    def of(
        cls, name: str, value: Value, blocks: int, scores: Floats, usual: Floats
    ) -> list[_Alternative]:
        """One alternative; none for too few blocks."""
        before = usual[-blocks:]
        after = scores[-blocks:]
        differences = 100.0 * (after - before) / max(float(before.mean()), 1e-9)
        found = interval(differences.tolist())
        if found is None:
            return []
        bounds = found.low_percent, found.high_percent
        return [cls(name, value, blocks, gain_percent(after, before), *bounds)]


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
        if self._watch is not None:
            return self._watched(now_s, seen, current, world, self._watch)
        if seen.slowdown > rules.incident_factor or seen.failed:
            why = "requests fail" if seen.failed else f"passes take {seen.slowdown:.2f} of the law"
            return Step("incident", f"nothing is changed in an incident: {why}")
        if len(seen.traffic) < rules.requests_min:
            return Step("wait", f"{len(seen.traffic)} requests are too few to decide")
        usual = self._blocks(seen.traffic, current, world)
        if len(usual) < BLOCKS_MIN:
            return Step("wait", f"{len(usual)} blocks of traffic are too few to decide")
        found: list[_Alternative] = []
        for name, value in self._alternatives(current, world):
            if self._not_until.get((name, value), -math.inf) > now_s:
                continue
            scores = self._blocks(seen.traffic, current | {name: value}, world)
            for blocks in (len(usual), NEWEST):
                found += _Alternative.of(name, value, blocks, scores, usual)
        if not found:
            return Step("keep", "no setting may change")
        best = max(found, key=lambda one: one.low_percent)
        name = best.name
        value = best.value
        change = f"{name} {current[name]} -> {value}"
        if best.percent < rules.least_percent or best.low_percent < rules.sure_percent:
            surely = f"and {best.low_percent:.1f} % surely"
            return Step("keep", f"{change} may add {best.percent:.1f} %, {surely}: kept")
        for factor in (1.0 - rules.law_percent / 100.0, 1.0 + rules.law_percent / 100.0):
            other = slowed(world, factor)
            before = self._blocks(seen.traffic, current, other)[-best.blocks :]
            after = self._blocks(seen.traffic, current | {name: value}, other)[-best.blocks :]
            if gain_percent(after, before) <= 0.0:
                line = f"{change} adds nothing where the law is {100 * (factor - 1):+.0f} % off"
                return Step("keep", f"{line}: kept")
        self._watch = _Watch(now_s, dict(current), current | {name: value}, best.percent)
        span = f"{best.low_percent:.1f} to {best.high_percent:.1f}, {best.blocks} blocks"
        return Step("change", f"{change}: adds {best.percent:.1f} % ({span})", {name: value})

    def forget(self) -> None:
        """What was ordered was not done: a dry run."""
        self._watch = None

    def _watched(
        self, now_s: float, seen: Seen, current: Settings, world: World, watch: _Watch
    ) -> Step:
        """Compare what was served since the change with what would have been served without it."""
        rules = self._rules
        changed = {
            name: watch.before[name] for name in current if current[name] != watch.before[name]
        }
        if not changed:
            self._watch = None
            return Step("keep", "another tuner changed the settings: nothing is watched")
        since_s = watch.since_s - seen.since_s
        recent = seen.traffic.arrival_s >= since_s
        usual = self._scores(seen.traffic, self._simulated(seen.traffic, watch.before, world))
        made = self._scores(seen.traffic, seen.served)
        over_s = now_s - watch.since_s
        judged = recent & _old_enough(seen, rules.block_s)
        percent = 0.0
        if int(judged.sum()) >= rules.requests_min // 2:
            before = float(usual[judged].mean())
            percent = 100.0 * (float(made[judged].mean()) / before - 1.0) if before else 100.0
            if percent < -rules.worse_percent:
                self._watch = None
                for name in changed:
                    self._not_until[name, current[name]] = now_s + rules.again_s
                words = ", ".join(f"{name} {current[name]} -> {changed[name]}" for name in changed)
                line = f"back: {words}: {percent:+.1f} % of what the settings before would serve"
                return Step("back", line, changed)
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

    def _simulated(self, traffic: Trace, settings: Settings, world: World) -> Served:
        return simulate(traffic, policy_of(self._planned, settings), world).served

    def _blocks(self, traffic: Trace, settings: Settings, world: World) -> Floats:
        """The score of each block of the traffic [n]."""
        scores = self._scores(traffic, self._simulated(traffic, settings, world))
        blocks = (traffic.arrival_s // self._rules.block_s).astype(int)
        sums: Floats = np.bincount(blocks, weights=scores).astype(np.float64)
        return sums[:-1] if len(sums) > 1 else sums  # the last one is not over

    def _scores(self, traffic: Trace, served: Served) -> Floats:
        """The score of each request: 1 if it meets every target, and a little less the longer it
        took.
        """
        good = meets_sla(served, self._sla)
        seconds = np.where(served.ok, served.finish_s - served.arrival_s, np.inf)
        return good * (1.0 - TIE_BREAK) + TIE_BREAK / (1.0 + seconds)


def _old_enough(seen: Seen, block_s: float) -> NDArray[np.bool_]:
    """Requests that came a block before the last one: most of these have ended."""
    last_s = float(seen.traffic.arrival_s.max(initial=0.0))
    return seen.traffic.arrival_s <= last_s - block_s


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
