"""The search on a running server: simulation proposes settings, short bursts decide.

1. Some hundred settings within the server's bounds are simulated on one window of the trace; the
   best of them, and some of all kinds, are tried.
2. First round: a burst of that window with each. Bursts with the settings of the start stand among
   them, so that the drift of the machine is known and taken off.
3. Further rounds: the better quarter again on other windows, forwards and backwards, so that a
   steady drift cancels.
4. Last: the best (B) against the start (A) in blocks A B B A. Their differences over the start's
   mean score are the gain, with its 95 % interval. (Over each block's own score, a block in which
   the start fails would count many times as much as others.)

A lease guards the server: if the search dies, the settings from before it come back by themselves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.client import LoadSpec, run_whole, served
from toolkit.bench.session import unused_seed
from toolkit.endpoints.settings import LiveState, SettingsClient
from toolkit.endpoints.target import Target
from toolkit.errors import InputError
from toolkit.files.io import EnvelopeFields
from toolkit.files.live import (
    BurstFigures,
    LiveInterval,
    LiveTrial,
    LiveTuning,
    PredictionError,
)
from toolkit.interrupts import check, held
from toolkit.metrics import Served, latencies, meets_sla
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import FLAGS, VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.world import World
from toolkit.traces.types import Trace
from toolkit.traces.windows import TraceWindow, mean_rate

POOL = 240  # settings that are simulated
PROPOSED = 0.75  # of the tried ones are the best of them; the rest are of all kinds
FIRST_SHARE = 0.42  # of the bursts are those of the first round
FIRST_UNTIL = 0.6  # of the time, at the latest
TRIED_MIN = 8
TRIED_MAX = 120
REFERENCE_EVERY = 8  # bursts of the first round
KEPT = 4  # one of so many goes on to the next round
SECOND_MIN = 4
THIRD_MIN = 2
SECOND_SHARE = 0.5  # of the time that is left then, at most; so that the last round has its blocks
THIRD_SHARE = 0.3
BLOCKS_MIN = 3
BLOCKS_ENOUGH = 8
LEFT_OVER_S = 2.0  # of the time, for what follows the last burst
LEASE_S = 60.0  # beyond the longest burst
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)

TIE_BREAK = 0.01  # of the score: what the lowest mean E2E is worth, also where no target is kept
LONGEST = 4.0  # windows that a request may take; a longer one missed every target
LEAST_TIMEOUT_S = 10.0

Note = Callable[[str], None]
Floats = NDArray[np.float64]
Settings = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Dimension:
    """A setting's range. `off`: the share of draws that switch it off (0)."""

    name: str
    low: float
    high: float
    log: bool
    whole: bool
    off: float = 0.0

    def at(self, place: float) -> Value:
        """The value at a place from 0 to 1."""
        if place < self.off:
            return 0 if self.whole else 0.0
        place = (place - self.off) / (1.0 - self.off)
        if self.log:
            value = self.low * math.exp(math.log(self.high / self.low) * place)
        else:
            value = self.low + (self.high - self.low) * place
        return round(value) if self.whole else round(value, 3)


def dimensions(state: LiveState) -> list[Dimension]:
    """The settings that are searched. `InputError` where the server has none of them: its policy is
    llmctl's own.
    """
    settings = state.by_name
    if "policy" not in settings:
        raise InputError(
            "this server runs a policy of llmctl's, and a live search tunes vLLM's own",
            "change its parameters with: llmctl set",
        )
    found = []
    for name, flag in FLAGS.items():
        known = settings.get(name)
        live = flag.live
        if live is None or known is None or known.low is None or known.high is None:
            continue
        low = max(known.low, live.least)
        high = known.high if live.most is None else min(known.high, live.most)
        if low < high:
            whole = isinstance(known.value, int)
            found.append(Dimension(name, low, high, live.log, whole, live.off))
    return found


def drawn(space: Sequence[Dimension], count: int, seed: int) -> list[Settings]:
    """Return `count` settings, spread evenly over each dimension (a Latin hypercube)."""
    rng = np.random.default_rng(seed)
    places = {one.name: (rng.permutation(count) + rng.random(count)) / count for one in space}
    return [{one.name: one.at(float(places[one.name][k])) for one in space} for k in range(count)]


def policy_of(planned: Mapping[str, Value], settings: Mapping[str, Value]) -> VllmPolicy:
    """vLLM's scheduler with the plan's flags and these live settings."""
    known = {name: settings[name] for name in settings if name in VllmPolicy.__dataclass_fields__}
    return VllmPolicy(**VllmPolicy.within({**planned, **known}))  # type: ignore[arg-type]


def figures(result: Served, sla: Mapping[str, float], window_s: float) -> BurstFigures:
    """What a burst that arrived within `window_s` was served like. Without targets, requests that
    were served within twice that time count.
    """
    good = meets_sla(result, sla)
    if not sla:
        good = result.ok & (result.finish_s - result.arrival_s.min() <= 2.0 * window_s)
    seconds = latencies(result)
    e2e_s = float(seconds["e2e"].mean()) if len(seconds["e2e"]) else LONGEST * window_s
    ttft_s = float(seconds["ttft"].mean()) if len(seconds["ttft"]) else LONGEST * window_s
    goodput_rps = float(good.sum()) / window_s
    rate_rps = len(result) / window_s
    return BurstFigures(
        score=(1.0 - TIE_BREAK) * goodput_rps + TIE_BREAK * rate_rps / (1.0 + e2e_s),
        goodput_rps=goodput_rps,
        attained_percent=100.0 * float(good.mean()),
        ttft_mean_s=ttft_s,
        e2e_mean_s=e2e_s,
    )


def mean_of(several: Sequence[BurstFigures]) -> BurstFigures:
    """The means of several bursts' figures."""
    names = BurstFigures.model_fields
    return BurstFigures(
        **{name: float(np.mean([getattr(one, name) for one in several])) for name in names}
    )


@dataclass(frozen=True, slots=True)
class Bursts:
    """The windows that bursts are taken from, and the server that gets them.

    Every burst has other prompts, so that no prefix cache holds a prompt of the burst before.
    """

    target: Target
    load: LoadSpec
    windows: Sequence[TraceWindow]
    sla: Mapping[str, float]
    window_s: float

    def measure(self, window: int, on_done: Callable[[], None] = lambda: None) -> BurstFigures:
        """Send a window's requests at their times, and wait until all have ended. Raises
        `InterruptedReplayError`.
        """
        limit_s = max(LONGEST * self.window_s, LEAST_TIMEOUT_S)
        load = replace(self.load, seed=unused_seed(), timeout_s=limit_s)
        trace = self.windows[window].trace
        whole = run_whole(self.target, trace, load, on_done)
        return figures(served(whole.samples), self.sla, self.window_s)

    def predict(self, window: int, policy: VllmPolicy, world: World) -> BurstFigures:
        """The same burst in a simulation."""
        trace: Trace = self.windows[window].trace
        return figures(simulate(trace, policy, world).served, self.sla, self.window_s)


@dataclass(eq=False)
class TriedSettings:
    """Settings that are tried: what was predicted, and the scores relative to the start's."""

    settings: Settings
    predicted: BurstFigures
    first: BurstFigures | None = None
    measured: list[BurstFigures] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)
    rounds: int = 0

    @property
    def gain(self) -> float:
        """Return the mean of its scores relative to the scores of the start."""
        return float(np.mean(self.gains)) if self.gains else -math.inf

    def described(self) -> LiveTrial:
        """For the file."""
        assert self.first is not None
        return LiveTrial(
            settings=self.settings,
            bursts=len(self.measured),
            rounds=self.rounds,
            first=self.first,
            predicted=self.predicted,
        )


@dataclass
class LiveSearch:
    """One search. `run` leaves the server with the settings of the start, `finish` with others.

    Args:
        planned: the flags that the server was started with.
        budget_s: seconds of all bursts.
    """

    control: SettingsClient
    bursts: Bursts
    planned: Mapping[str, Value]
    world: World
    budget_s: float
    seed: int
    note: Note
    advanced: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    trials: list[TriedSettings] = field(default_factory=list)
    start: Settings = field(default_factory=dict)
    spent_s: float = 0.0
    count: int = 0
    best: TriedSettings | None = None
    gain: LiveInterval | None = None

    def result(self, made_from: EnvelopeFields, recipe: str, minutes: float) -> LiveTuning:
        """Return what was found, and give the server the best settings if their gain is sure.

        Args:
            recipe: the name of the plan's recipe.
            minutes: the time that was asked for.
        """
        chosen = self.start
        sure = False
        if self.best is not None and self.gain is not None and self.gain.percent > 0.0:
            chosen = self.best.settings
            sure = self.gain.low_percent > 0.0
        if sure:
            self.finish(chosen)
        trials = [trial for trial in self.trials if trial.first is not None]
        return LiveTuning(
            **made_from,
            recipe_name=recipe,
            url=self.control.url,
            minutes=minutes,
            spent_s=self.spent_s,
            window_s=self.bursts.window_s,
            rate_rps=mean_rate(self.bursts.windows[0].trace),
            sla=dict(self.bursts.sla),
            bursts=self.count,
            start=self.start,
            best=chosen,
            gain=self.gain,
            sure=sure,
            applied=sure,
            trials=[trial.described() for trial in trials],
            prediction=prediction_error([(t.predicted, t.first) for t in trials if t.first]),
        )

    def run(self) -> None:
        """Search until the time is over. Raises `InputError` where the server refuses, and
        `InterruptedReplayError` or `KeyboardInterrupt` after Ctrl-C: the settings of the start are
        back in any case.
        """
        state = self.control.hold(self._lease_s)
        space = dimensions(state)
        self.start = {one.name: state.by_name[one.name].value for one in space}
        try:
            self._search(space)
        finally:
            with held():
                try:
                    self.control.release(self.start, "the search is over")
                except InputError as error:  # its lease ends by itself
                    self.note(f"the settings of the start are not back yet: {error.message}")

    def finish(self, settings: Settings) -> None:
        """Give the server its settings for good."""
        self.control.set(settings, "the best of llmctl tune --live")

    def _search(self, space: Sequence[Dimension]) -> None:
        self._burst(self.start, 0)  # the server settles
        begun_s = self.spent_s
        reference = self._burst(self.start, 0)
        burst_s = max(self.spent_s - begun_s, 0.01)
        tried = int(FIRST_SHARE * (self.budget_s - self.spent_s) / burst_s)
        if tried < TRIED_MIN:
            needed = TRIED_MIN / FIRST_SHARE * burst_s + self.spent_s
            raise InputError(
                f"a burst takes {burst_s:.1f} s, and {self.budget_s:.0f} s are too few for "
                f"{TRIED_MIN} settings",
                f"give --minutes {math.ceil(needed / 60.0 * 10) / 10:g}, or shorten tune.window_s",
            )
        self.trials = self._proposed(space, min(tried, TRIED_MAX))
        self.note(f"{len(self.trials)} settings, a burst takes about {burst_s:.1f} s")
        self._first_round(reference)
        known = [trial for trial in self.trials if trial.first is not None]
        second = _better(known, SECOND_MIN)[: self._time_for(SECOND_SHARE)]
        self._there_and_back(second, 1)
        third = _better(second, THIRD_MIN)[: self._time_for(THIRD_SHARE)]
        self._there_and_back(third, 2)
        measured = [trial for trial in third if trial.gains]
        if measured:
            self._confirm(max(measured, key=lambda trial: trial.gain))

    def _proposed(self, space: Sequence[Dimension], count: int) -> list[TriedSettings]:
        pool: list[TriedSettings] = []
        for settings in drawn(space, POOL, self.seed):
            check()
            if settings not in [trial.settings for trial in pool] and settings != self.start:
                pool.append(TriedSettings(settings, self._predicted(settings)))
        ranked = sorted(pool, key=lambda trial: -trial.predicted.score)
        chosen = ranked[: round(PROPOSED * count)]
        others = [trial for trial in pool if trial not in chosen]
        chosen += others[: count - len(chosen)]
        order = np.random.default_rng(self.seed).permutation(len(chosen))
        return [chosen[place] for place in order]

    def _predicted(self, settings: Settings) -> BurstFigures:
        return self.bursts.predict(0, policy_of(self.planned, settings), self.world)

    def _first_round(self, reference: BurstFigures) -> None:
        """A burst with each, and one with the start after every few; a line through these is what
        the start would have had at each place.
        """
        places = [0]
        scores = [reference.score]
        until_s = FIRST_UNTIL * self.budget_s
        last = 0
        for number, trial in enumerate(self.trials, start=1):
            if self.spent_s > until_s:
                self.note(f"time for {last} of {len(self.trials)} settings in the first round")
                break
            trial.first = self._burst(trial.settings, 0)
            last = number
            if number % REFERENCE_EVERY == 0:
                places.append(number)
                scores.append(self._burst(self.start, 0).score)
        if places[-1] != last:
            places.append(last)
            scores.append(self._burst(self.start, 0).score)
        self.trials = self.trials[:last]
        for number, trial in enumerate(self.trials, start=1):
            assert trial.first is not None
            usual = float(np.interp(number, places, scores))
            trial.measured.append(trial.first)
            trial.gains.append(_relative(trial.first.score, usual))
            trial.rounds = 1

    def _there_and_back(self, trials: Sequence[TriedSettings], window: int) -> None:
        """Each twice and the start, too, in an order and then in its reverse."""
        window %= len(self.bursts.windows)
        names: list[TriedSettings | None] = [None, *trials]
        found: dict[int, list[BurstFigures]] = {}
        for place in [*range(len(names)), *reversed(range(len(names)))]:
            trial = names[place]
            settings = self.start if trial is None else trial.settings
            one = self._burst_if_time(settings, window)
            if one is None:
                break
            found.setdefault(place, []).append(one)
        usual = found.get(0, [])
        if len(usual) < 2:
            return
        for place, trial in enumerate(names):
            if trial is not None and len(found.get(place, ())) == 2:
                score = mean_of(found[place]).score
                trial.measured += found[place]
                trial.gains.append(_relative(score, mean_of(usual).score))
                trial.rounds += 1

    def _confirm(self, best: TriedSettings) -> None:
        """The best against the start, in blocks A B B A on the windows in turn."""
        usual: list[float] = []
        better: list[float] = []
        while len(usual) < BLOCKS_ENOUGH:
            window = len(usual) % len(self.bursts.windows)
            block = []
            for settings in (self.start, best.settings, best.settings, self.start):
                one = self._burst_if_time(settings, window)
                if one is not None:
                    block.append(one)
            if len(block) < 4:
                break
            usual.append(mean_of([block[0], block[3]]).score)
            better.append(mean_of(block[1:3]).score)
            best.measured += block[1:3]
        self.best = best
        self.gain = interval(gains(usual, better))

    def _time_for(self, share: float) -> int:
        """How many settings `_there_and_back` measures in a share of the time that is left."""
        left_s = self.budget_s - LEFT_OVER_S - self.spent_s
        bursts = int(share * left_s / self._usual_s)
        return max(bursts // 2 - 1, 1)  # without those of the start

    @property
    def _usual_s(self) -> float:
        return self.spent_s / max(self.count, 1)

    def _burst_if_time(self, settings: Settings, window: int) -> BurstFigures | None:
        if self.spent_s + self._usual_s > self.budget_s - LEFT_OVER_S:
            return None
        return self._burst(settings, window)

    def _burst(self, settings: Settings, window: int) -> BurstFigures:
        self.count += 1
        begun_s = self.clock()
        self.control.hold(self._lease_s, settings)
        found = self.bursts.measure(window)
        self.spent_s += self.clock() - begun_s
        left_s = max(self.budget_s - self.spent_s, 0.0)
        self.advanced(f"burst {self.count}, {left_s:.0f} s left")
        return found

    @property
    def _lease_s(self) -> float:
        return min(LEASE_S + 6.0 * self.bursts.window_s, 600.0)


def _better(trials: Sequence[TriedSettings], least: int) -> list[TriedSettings]:
    """The better part of the trials."""
    count = max(len(trials) // KEPT, least)
    return sorted(trials, key=lambda trial: -trial.gain)[:count]


def _relative(score: float, usual: float) -> float:
    return score / usual - 1.0 if usual > 0.0 else float(score > 0.0)


def gains(usual: Sequence[float], better: Sequence[float]) -> list[float]:
    """The differences of the blocks' scores, in percent of the mean of the usual ones."""
    mean = float(np.mean(usual)) if len(usual) else 0.0
    return [
        100.0 * ((two - one) / mean if mean > 0.0 else float(two > 0.0))
        for one, two in zip(usual, better, strict=True)
    ]


def interval(percents: Sequence[float]) -> LiveInterval | None:
    """The mean of blocks with its 95 % interval (Student's t); None for too few blocks."""
    count = len(percents)
    if count < BLOCKS_MIN:
        return None
    mean = float(np.mean(percents))
    spread = float(np.std(percents, ddof=1)) / math.sqrt(count)
    half = T95[min(count - 2, len(T95) - 1)] * spread
    return LiveInterval(
        percent=mean, low_percent=mean - half, high_percent=mean + half, blocks=count
    )


def prediction_error(pairs: Sequence[tuple[BurstFigures, BurstFigures]]) -> PredictionError:
    """How far the first of each pair is from the second, which was measured."""

    def median(name: str) -> float:
        off = [abs(getattr(one, name) / max(getattr(two, name), 1e-9) - 1.0) for one, two in pairs]
        return 100.0 * float(np.median(off))

    return PredictionError(
        ttft_percent=median("ttft_mean_s"),
        e2e_percent=median("e2e_mean_s"),
        rank_correlation=spearman([one.score for one, _ in pairs], [two.score for _, two in pairs]),
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank; 0 where one of them is constant."""
    ranks = [_ranks(np.array(values)) for values in (one, other)]
    if min(float(np.std(rank)) for rank in ranks) == 0.0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Floats) -> Floats:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: Floats = ends - (counts - 1) / 2.0
    return mean[inverse]
