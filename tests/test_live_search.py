"""The search on a running server: here a simulated one with another law than the believed."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from toolkit.endpoints.settings import LiveSetting, LiveState
from toolkit.errors import InputError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.live import BurstFigures
from toolkit.interrupts import InterruptedReplayError
from toolkit.laws.passes import PassLaw
from toolkit.live.search import (
    Bursts,
    Dimension,
    LiveSearch,
    dimensions,
    drawn,
    gains,
    interval,
    policy_of,
    prediction_error,
    spearman,
)
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import Trace
from toolkit.traces.windows import TraceWindow

LAW = PassLaw(
    {"pass": 4e-3, "row": 3e-4, "chunk": 5e-4, "cached": 1e-6, "attended": 1e-7},
    (1e-4,),
    (0,),
)
SLA = {"ttft_p99_s": 0.4, "mtpot_p99_s": 0.05}
START = {"max_num_seqs": 4, "max_num_batched_tokens": 2048}
PLANNED = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}


def world(factor: float = 1.0) -> World:
    engine = PagedEngine(LAW, 400, 16)
    made = World(unit_step(), ZetaMemory(6400), 1, 200, paged=engine)
    return replace(made, paged=engine.slowed(factor))


def windows(count: int = 4) -> list[TraceWindow]:
    rng = np.random.default_rng(1)
    made = []
    for k in range(count):
        arrival = np.sort(rng.uniform(0.0, 2.0, 40))
        arrival -= arrival[0]
        prompts = rng.integers(20, 400, 40)
        outputs = rng.integers(5, 60, 40)
        made.append(TraceWindow(3.0 * k, 3.0 * k + 2.0, Trace(arrival, prompts, outputs, outputs)))
    return made


@dataclass
class Control:
    """A server's settings, without a server."""

    values: dict = field(default_factory=lambda: dict(START))
    leases: int = 0
    held: bool = False
    url: str = "http://here"

    def get(self) -> LiveState:
        bounds = {"max_num_seqs": (1, 64), "max_num_batched_tokens": (64, 4096)}
        found = [
            LiveSetting(name, self.values[name], START[name], *bounds[name]) for name in bounds
        ]
        return LiveState([*found, LiveSetting("policy", "fcfs", "fcfs", choices=["fcfs"])])

    def set(self, settings, why=""):
        self.values |= settings
        return self.get()

    def hold(self, lease_s, settings=None):
        assert lease_s > 0
        self.held = True
        self.leases += 1
        return self.set(settings or {})

    def release(self, settings, why=""):
        self.held = False
        return self.set(settings)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Simulated(Bursts):
    """Bursts that the simulator serves, as fast as a drifting machine."""

    def __init__(self, control: Control, clock: Clock, noise: float = 0.0, dies_at: int = 0):
        super().__init__(None, None, windows(), SLA, 2.0)  # type: ignore[arg-type]
        object.__setattr__(self, "state", [control, clock, noise, dies_at, 0])

    def measure(self, window: int, on_done=lambda: None) -> BurstFigures:
        control, clock, noise, dies_at, count = self.state
        assert control.held
        self.state[4] += 1
        if dies_at and self.state[4] > dies_at:
            raise InterruptedReplayError
        drift = 1.1 + 0.1 * clock.now_s / 600.0
        factor = drift * (1.0 + noise * np.random.default_rng(count).standard_normal())
        clock.now_s += 2.5
        return self.predict(window, policy_of(PLANNED, control.values), world(factor))


def search_on(*, noise=0.0, budget_s=300.0, dies_at=0, control=None):
    control = control or Control()
    clock = Clock()
    bursts = Simulated(control, clock, noise, dies_at)
    search = LiveSearch(
        control=control,
        bursts=bursts,
        planned=PLANNED,
        world=world(),
        budget_s=budget_s,
        seed=3,
        note=lambda text: None,
        advanced=lambda text: None,
        clock=clock,
    )
    return search, control, clock


@pytest.mark.slow
def test_it_finds_settings_that_are_surely_better_within_its_time():
    search, control, clock = search_on(noise=0.01)
    search.run()
    assert clock.now_s <= 300.0
    assert len(search.trials) >= 40
    assert search.gain is not None
    assert search.gain.low_percent > 0.0
    assert control.values == START  # until `finish`
    assert not control.held
    best = search.best.settings
    scores = [
        search.bursts.predict(0, policy_of(PLANNED, trial.settings), world(1.15)).score
        for trial in search.trials
    ]
    found = search.bursts.predict(0, policy_of(PLANNED, best), world(1.15)).score
    assert found >= 0.97 * max(scores)
    search.finish(best)
    assert control.values == {**START, **best}


@pytest.mark.slow
def test_an_interrupted_search_gives_the_settings_back():
    search, control, _ = search_on(dies_at=30)
    with pytest.raises(InterruptedReplayError):
        search.run()
    assert control.values == START


def test_a_time_that_is_too_short_is_refused_with_what_it_needs():
    search, control, _ = search_on(budget_s=20.0)
    with pytest.raises(InputError) as raised:
        search.run()
    assert "--minutes" in raised.value.hint
    assert control.values == START


FIGURES = BurstFigures(
    score=1, goodput_rps=1, attained_percent=100, ttft_mean_s=0.1, e2e_mean_s=1.1
)


def test_settings_are_drawn_evenly_within_the_bounds():
    space = [
        Dimension("max_num_seqs", 1, 64, log=True, whole=True),
        Dimension("watermark", 0.0, 0.3, log=False, whole=False, off=0.5),
    ]
    found = drawn(space, 40, 0)
    rows = sorted(one["max_num_seqs"] for one in found)
    assert rows[0] >= 1
    assert rows[-1] <= 64
    assert 5 <= rows[20] <= 12
    assert sum(one["watermark"] == 0.0 for one in found) in (20, 21)


def test_a_server_with_a_policy_of_llmctl_is_refused():
    with pytest.raises(InputError):
        dimensions(LiveState([LiveSetting("policy.reserve", 0.1, 0.1, 0.0, 0.9)]))


def test_the_interval_of_equal_blocks_is_their_value():
    assert interval([2.0, 2.0]) is None
    found = interval([3.0, 3.0, 3.0])
    assert (found.percent, found.low_percent, found.high_percent) == (3.0, 3.0, 3.0)
    wide = interval([-1.0, 0.0, 4.0])
    assert wide.low_percent < 0.0 < wide.high_percent


def test_gains_are_over_the_mean_of_the_start():
    assert gains([1.0, 3.0], [2.0, 3.0]) == [50.0, 0.0]  # and not +100 % where the start failed
    assert gains([0.0], [1.0]) == [100.0]


def test_ranks_and_errors_of_predictions():
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0
    two = FIGURES.model_copy(update={"ttft_mean_s": 0.2, "e2e_mean_s": 1.0, "score": 2})
    error = prediction_error([(FIGURES, two), (two, two)])
    assert error.ttft_percent == pytest.approx(25.0)
    assert error.e2e_percent == pytest.approx(5.0)
