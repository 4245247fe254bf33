"""The keeper changes what is surely better, one setting at a time, and takes back what is not."""

from dataclasses import replace

import numpy as np
import pytest
from test_live_search import world

from toolkit.errors import InputError
from toolkit.live.ahead import Unfinished, ahead
from toolkit.live.keep import (
    Keeper,
    KeepRules,
    Seen,
    gain_of,
    gain_percent,
    scores_of,
    slowed,
    steady_since,
)
from toolkit.live.kept import bounds_of
from toolkit.live.space import policy_of
from toolkit.metrics import Served
from toolkit.sim.api import simulate
from toolkit.traces.types import Trace

SLA = {"ttft_p99_s": 0.4, "mtpot_p99_s": 0.05}
BOUNDS = {"max_num_seqs": (1, 64), "max_num_batched_tokens": (64, 4096)}
NARROW = {"max_num_seqs": 3, "max_num_batched_tokens": 2048}
WIDE = {"max_num_seqs": 64, "max_num_batched_tokens": 2048}
RULES = KeepRules(BOUNDS, block_s=2.0, watch_s=20.0, requests_min=30)


def traffic(seconds: float = 30.0, rate: float = 10.0) -> Trace:
    rng = np.random.default_rng(5)
    count = int(rate * seconds)
    arrival = np.sort(rng.uniform(0.0, seconds, count))
    outputs = rng.integers(5, 60, count)
    return Trace(arrival, rng.integers(20, 300, count), outputs, outputs)


def seen(settings, *, since_s: float = 0.0, seconds: float = 30.0, **more) -> Seen:
    """What a server that is as fast as believed has served with these settings."""
    asked = traffic(seconds)
    served = simulate(asked, policy_of({}, settings), world()).served
    return Seen(since_s, asked, replace(served, ok=served.finish_s <= seconds), **more)


@pytest.mark.slow
def test_a_sure_gain_changes_one_setting_within_the_bounds():
    keeper = Keeper(RULES, {}, SLA)
    step = keeper.step(30.0, seen(NARROW), NARROW, world())
    assert step.kind == "change"
    assert list(step.settings) == ["max_num_seqs"]
    assert 3 < step.settings["max_num_seqs"] <= 64
    bounded = replace(RULES, bounds={"max_num_seqs": (1, 5)})
    step = Keeper(bounded, {}, SLA).step(30.0, seen(NARROW), NARROW, world())
    assert step.settings.get("max_num_seqs", 4) <= 5


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_settings_that_serve_well_are_kept_whatever_the_law_says(factor):
    believed = slowed(world(), factor)
    step = Keeper(RULES, {}, SLA).step(30.0, seen(WIDE), WIDE, believed)
    assert (step.kind, step.settings) == ("keep", {})


@pytest.mark.slow
def test_where_requests_wait_it_looks_ahead_although_none_has_missed_its_targets():
    light = traffic(30.0, rate=2.0)
    served = simulate(light, policy_of({}, NARROW), world()).served
    found = Seen(0.0, light, replace(served, ok=served.finish_s <= 30.0))
    well = Keeper(RULES, {}, SLA).step(30.0, found, NARROW, world())
    waiting = replace(found, unfinished=[Unfinished(200, 0, 60)] * 60)
    ahead_of = Keeper(RULES, {}, SLA).step(30.0, waiting, NARROW, world())
    assert well.kind == "keep"
    assert ahead_of != well


@pytest.mark.parametrize("trouble", [{"slowdown": 1.6}, {"failed": True}])
def test_nothing_is_changed_in_an_incident(trouble):
    step = Keeper(RULES, {}, SLA).step(30.0, seen(NARROW, **trouble), NARROW, world())
    assert (step.kind, step.settings) == ("incident", {})


def test_few_requests_decide_nothing():
    rules = replace(RULES, requests_min=1000)
    step = Keeper(rules, {}, SLA).step(30.0, seen(NARROW), NARROW, world())
    assert (step.kind, step.settings) == ("wait", {})


def late(one: Seen) -> Seen:
    """The same traffic, and every request missed its targets."""
    served = one.served
    waited = replace(
        served, first_token_s=served.first_token_s + 60.0, finish_s=served.finish_s + 60.0
    )
    return replace(one, served=waited)


@pytest.mark.slow
def test_a_change_is_watched_and_stays_if_it_is_good():
    keeper = Keeper(RULES, {}, SLA)
    step = keeper.step(0.0, seen(NARROW, since_s=-30.0), NARROW, world())
    current = NARROW | step.settings
    kinds = [
        keeper.step(now_s, seen(current, seconds=now_s), current, world()).kind
        for now_s in (10.0, 19.0, 30.0)
    ]
    assert kinds == ["watch", "watch", "good"]


@pytest.mark.slow
def test_a_change_that_serves_worse_is_taken_back_and_not_tried_again():
    keeper = Keeper(RULES, {}, SLA)
    step = keeper.step(0.0, seen(NARROW, since_s=-30.0), NARROW, world())
    current = NARROW | step.settings
    back = keeper.step(30.0, late(seen(current)), current, world())
    assert (back.kind, back.settings) == ("back", {"max_num_seqs": 3})
    again = keeper.step(60.0, seen(NARROW, since_s=30.0), NARROW, world())
    assert again.settings != step.settings


@pytest.mark.slow
def test_a_dry_run_watches_nothing():
    keeper = Keeper(RULES, {}, SLA)
    assert keeper.step(30.0, seen(NARROW), NARROW, world()).kind == "change"
    keeper.forget()
    assert keeper.step(30.0, seen(NARROW), NARROW, world()).kind == "change"


@pytest.mark.slow
def test_settings_that_somebody_else_changed_are_not_taken_back():
    keeper = Keeper(RULES, {}, SLA)
    keeper.step(0.0, seen(NARROW, since_s=-30.0), NARROW, world())
    step = keeper.step(30.0, late(seen(NARROW)), NARROW, world())
    assert (step.kind, step.settings) == ("keep", {})


def test_a_gain_over_nothing_is_a_gain():
    assert gain_percent(np.array([1.0]), np.array([0.0])) == 100.0
    assert gain_percent(np.array([1.0, 2.0]), np.array([2.0, 2.0])) == -25.0


def test_the_operator_s_bounds_are_within_those_of_the_server():
    assert bounds_of([], BOUNDS) == BOUNDS
    assert bounds_of(["max_num_seqs=2:8"], BOUNDS) == {"max_num_seqs": (2, 8)}
    for word in (
        "max_num_seqs",
        "max_num_seqs=8",
        "max_num_seqs=8:2",
        "max_num_seqs=1:65",
        "x=1:2",
    ):
        with pytest.raises(InputError):
            bounds_of([word], BOUNDS)


@pytest.mark.slow
def test_served_requests_that_have_not_ended_count_as_missed():
    asked = traffic()
    count = len(asked)
    nothing = np.zeros(count)
    served = Served(
        asked.arrival_s, nothing, nothing, asked.output_tokens, nothing, nothing.astype(bool)
    )
    keeper = Keeper(RULES, {}, SLA)
    keeper.step(0.0, seen(NARROW, since_s=-30.0), NARROW, world())
    current = NARROW | {"max_num_seqs": 5}
    step = keeper.step(30.0, Seen(0.0, asked, served), current, world())
    assert step.kind == "back"


def stretch(begin_s: float, seconds: float, rate: float, prompt: int) -> Trace:
    rng = np.random.default_rng(int(begin_s) + 1)
    count = int(rate * seconds)
    arrival = begin_s + np.sort(rng.uniform(0.0, seconds, count))
    return Trace(arrival, rng.integers(1, 2 * prompt, count), *[rng.integers(5, 60, count)] * 2)


def together(*parts: Trace) -> Trace:
    names = ("arrival_s", "prompt_tokens", "output_tokens", "max_tokens")
    return Trace(*(np.concatenate([getattr(one, name) for one in parts]) for name in names))


def test_steady_traffic_begins_where_it_last_changed():
    steady = stretch(0.0, 300.0, 5.0, 100)
    assert steady_since(steady, 300.0, 5.0, 40) < 100.0
    longer = together(stretch(0.0, 200.0, 5.0, 100), stretch(200.0, 100.0, 5.0, 1000))
    assert 175.0 <= steady_since(longer, 300.0, 5.0, 40) <= 260.0
    more = together(stretch(0.0, 200.0, 2.0, 100), stretch(200.0, 100.0, 8.0, 100))
    assert 175.0 <= steady_since(more, 300.0, 5.0, 40) <= 260.0
    assert steady_since(steady.take(slice(0, 0)), 300.0, 5.0, 40) == 0.0


def test_steady_traffic_begins_between_long_prompts_and_bursts_of_short_ones():
    bursts = [stretch(120.0 + 20.0 * k, 7.0, 15.0, 60) for k in range(4)]
    changed = together(stretch(0.0, 120.0, 5.0, 280), *bursts)
    for now_s in (160.0, 170.0, 180.0, 200.0):
        assert 110.0 <= steady_since(changed, now_s, 4.0, 30) <= now_s - 24.0


def test_a_gain_of_every_request_is_sure_however_many_come():
    counts = np.array([40.0, 0.0, 0.0, 10.0, 0.0, 60.0])
    usual = 0.5 * counts
    gain = gain_of({}, 0.75 * counts, usual, counts)
    assert gain is not None
    assert gain.low_percent == pytest.approx(50.0)
    assert gain.percent == gain.high_percent == pytest.approx(50.0)
    by_chance = usual + np.array([40.0, 0.0, 0.0, -5.0, 0.0, -7.5])
    unlike = gain_of({}, by_chance, usual, counts)
    assert unlike is not None
    assert unlike.percent == pytest.approx(50.0)
    assert unlike.low_percent < 0.0
    assert gain_of({}, usual[:2], usual[:2], counts[:2]) is None


def test_a_backlog_is_seen_ahead_and_not_in_the_traffic_alone():
    light = traffic(30.0, rate=4.0)
    policy = policy_of({}, NARROW)
    usual = scores_of(ahead([], light, policy, world()), SLA).mean()
    waiting = [Unfinished(200, 0, 60)] * 40
    late = scores_of(ahead(waiting, light, policy, world()), SLA).mean()
    assert late < usual - 0.2
    running = [Unfinished(260, 259, 1)] * 3
    assert scores_of(ahead(running, light, policy, world()), SLA).mean() > usual - 0.1


def test_requests_that_run_need_no_prefill_again():
    one = traffic(1.0, rate=1.0)
    policy = policy_of({}, WIDE)
    waits = ahead([Unfinished(2000, 0, 1)] * 2, one, policy, world())
    runs = ahead([Unfinished(2000, 1999, 1)] * 2, one, policy, world())
    assert runs.first_token_s[0] < waits.first_token_s[0]
