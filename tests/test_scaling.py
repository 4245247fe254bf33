"""Scaling rules: Kubernetes' algorithm against its own cases, and what each rule asks for."""

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import InputError
from toolkit.scaling.autoscaler import Autoscaler, ScalingRule
from toolkit.scaling.behaviour import Behaviour, Limiter
from toolkit.scaling.by_law import LawRule
from toolkit.scaling.clairvoyant import ClairvoyantRule
from toolkit.scaling.hpa import HpaRule, for_pods, for_total
from toolkit.scaling.keda import KedaRule
from toolkit.scaling.planner import PlannerRule
from toolkit.scaling.rules import RULES, make_behaviour, make_rule
from toolkit.scaling.saturation import SaturationRule
from toolkit.scaling.static import StaticRule
from toolkit.scaling.tokens import TokensRule
from toolkit.scaling.types import FleetSample, FleetView, History, ReplicaLoad, arrived

CASES = json.loads((Path(__file__).parent / "data" / "hpa-cases.json").read_text())["cases"]


def cases(*names: str) -> list[Any]:
    found = [case for case in CASES if case["kind"] in names]
    assert found
    return [pytest.param(case, id=f"{case['id']}") for case in found]


@pytest.mark.parametrize("case", cases("external_average", "object_average"))
def test_a_total_is_divided_as_kubernetes_does(case: dict[str, Any]) -> None:
    found = for_total(
        case["total_milli"],
        case["target_average_milli"],
        case["status_replicas"],
        case["tolerance"]["up"],
    )
    assert found == case["expected_replicas"]


@pytest.mark.parametrize("case", cases("pods_average"))
def test_a_mean_of_pods_is_as_kubernetes_has_it(case: dict[str, Any]) -> None:
    pods = [pod for pod in case["pods"] if pod["state"] not in ("failed", "succeeded", "deleted")]
    pending = sum(pod["state"] == "pending" for pod in pods)
    values = [pod["value_milli"] for pod in pods if pod["state"] != "pending"]
    found = for_pods(
        [value for value in values if value is not None],
        case["current_replicas"],
        case["target_average_milli"],
        silent=values.count(None),
        pending=pending,
        tolerance=case["tolerance"]["up"],
    )
    assert found == case["expected_replicas"]


@pytest.mark.parametrize("case", cases("stabilization"))
def test_windows_hold_as_kubernetes_has_them(case: dict[str, Any]) -> None:
    # a window as a period of one decision: no policy limits it
    behaviour = Behaviour(
        up_window_s=float(case["scale_up_window_s"]),
        down_window_s=float(case["scale_down_window_s"]),
        up_pods=0,
        up_percent=0,
        down_percent=0,
    )
    limiter = Limiter(behaviour, 0, -1e9)
    asked = [(-float(one["age_s"]), one["value"]) for one in case["recommendations"]]
    limiter._asked = deque(sorted(asked))
    found = limiter.limited(case["current_replicas"], case["desired"], 0.0)
    assert found == case["expected_replicas"]


def limits(spec: dict[str, Any] | None, usual: tuple[int, int]) -> tuple[int, int, float]:
    """Pods, percent and the period of one direction."""
    if spec is None:
        return (*usual, 15.0)
    policies = {one["type"]: one["value"] for one in spec["policies"]}
    period_s = {float(one["period_s"]) for one in spec["policies"]} or {15.0}
    return policies.get("Pods", 0), policies.get("Percent", 0), *period_s


@pytest.mark.parametrize("case", cases("policies"))
def test_policies_limit_as_kubernetes_has_them(case: dict[str, Any]) -> None:
    up = limits(case["scale_up"], (4, 100))
    down = limits(case["scale_down"], (0, 100))
    behaviour = Behaviour(
        up_pods=up[0],
        up_percent=up[1],
        up_period_s=up[2],
        down_pods=down[0],
        down_percent=down[1],
        down_period_s=down[2],
        down_window_s=0.0,
    )
    limiter = Limiter(behaviour, 0, -1e9)
    events = [(-float(one["age_s"]), one["change"]) for one in case["scale_up_events"]]
    events += [(-float(one["age_s"]), -one["change"]) for one in case["scale_down_events"]]
    limiter._changes = deque(sorted(events))
    asked = min(max(case["desired"], case["min"]), case["max"])
    found = limiter.limited(case["current_replicas"], asked, 0.0)
    assert min(max(found, case["min"]), case["max"]) == case["expected_replicas"]


def sample(
    at_s: float,
    loads: list[tuple[int, int, float]],
    *,
    starting: int = 0,
    queued: int = 0,
    requests: float = 0.0,
) -> FleetSample:
    """A scrape; each of `loads` is waiting, running and the used share of the cache."""
    ready = tuple(ReplicaLoad(place, *load) for place, load in enumerate(loads))
    count = round(requests)
    return FleetSample(at_s, ready, starting, queued, count, 100 * count, count, 50 * count)


def view(samples: list[FleetSample], wanted: int, *, ready: int = -1, least: int = 1) -> FleetView:
    history = History(1e6)
    for one in samples:
        history.add(one)
    count = len(samples[-1].ready) if ready < 0 else ready
    return FleetView(samples[-1].at_s + 5.0, wanted, count, least, 20, history)


def rising(per_s: float, growth: float = 0.0, to_s: float = 1200.0) -> list[FleetSample]:
    """Samples each 15 s of arrivals at a rate that grows by `growth` a second."""
    times = [15.0 * k for k in range(int(to_s / 15) + 1)]
    return [
        sample(at_s, [(0, 4, 0.2)] * 2, requests=per_s * at_s + growth * at_s * at_s / 2)
        for at_s in times
    ]


def test_history_has_rates_of_now_and_of_before() -> None:
    history = History(100.0)
    for at_s in range(0, 1000, 10):
        history.add(sample(float(at_s), [], requests=at_s * 2 if at_s < 950 else 1900))
    assert history.rate(arrived, 40.0) == pytest.approx(0.0)
    assert history.rate(arrived, 40.0, 40.0) == pytest.approx(2.0)
    assert history.rate(arrived, 40.0, 5000.0) is None
    assert len(history) < 30


def test_hpa_brings_the_mean_to_its_target() -> None:
    rule = HpaRule(metric="waiting", target=5.0)
    assert rule.decide(view([sample(0, [(20, 4, 0.9), (0, 4, 0.9)])], 2)) == 4
    # a replica that loads counts as 0 upward: 20 of 3, not of 2
    assert rule.decide(view([sample(0, [(20, 4, 0.9), (0, 4, 0.9)], starting=1)], 3)) == 4
    assert rule.decide(view([sample(0, [(0, 4, 0.9)] * 3)], 3)) == 0


def test_keda_divides_the_total_and_goes_to_zero_and_back() -> None:
    rule = KedaRule(waiting=5.0, kv_usage=0.7)
    assert rule.decide(view([sample(0, [(20, 4, 0.9), (4, 4, 0.9)])], 2)) == 5
    mean = KedaRule(waiting=0.0, kv_usage=0.7, pool_mean=True)
    assert mean.decide(view([sample(0, [(20, 4, 0.98)] * 6)], 6)) == 2
    quiet = [sample(float(at), [(0, 0, 0.0)], requests=7) for at in range(0, 900, 15)]
    assert rule.decide(view(quiet, 1, least=0)) == 0
    assert rule.decide(view([*quiet, sample(900, [], queued=1, requests=8)], 0, least=0)) == 1


def test_saturation_adds_one_and_waits_for_it() -> None:
    rule = SaturationRule()
    full = [(9, 4, 0.95), (7, 4, 0.9)]
    assert rule.decide(view([sample(0, full)], 2)) == 3
    assert rule.decide(view([sample(0, full, starting=1)], 3, ready=2)) == 3
    assert rule.decide(view([sample(0, [(0, 4, 0.3)] * 3)], 3)) == 2
    # of two at 0.5, one alone would be full
    assert rule.decide(view([sample(0, [(0, 4, 0.5)] * 2)], 2)) == 2
    assert rule.decide(view([sample(0, [(0, 4, 0.75)] * 2)], 2)) == 3


def test_tokens_compares_what_is_held_with_what_can_be() -> None:
    rule = TokensRule(cache_tokens=10_000, pass_tokens=8192, rows=1000)
    busy = [
        sample(0, [(0, 50, 0.7)] * 2, requests=0),
        sample(60, [(0, 50, 0.7)] * 2, requests=60),
    ]
    # 14,000 tokens held, 8,000 for each: 14,000 / 0.85 is more than 16,000
    assert rule.decide(view(busy, 2)) == 3
    waits = [busy[0], sample(60, [(40, 50, 0.7)] * 2, requests=60)]
    # full ones hold 7,000; 80 that wait need 150 each
    assert rule.decide(view(waits, 2)) == 2 + math.ceil((26_000 / 0.85 - 14_000) / 7_000)
    idle = [sample(0, [(0, 1, 0.01)] * 4, requests=0), sample(60, [(0, 1, 0.01)] * 4, requests=60)]
    assert rule.decide(view(idle, 4)) == 1


def test_planner_decides_once_an_interval() -> None:
    rule = PlannerRule(capacity_rps=1.0, interval_s=300.0)
    samples = rising(2.0, growth=0.01)
    numbers = {rule.decide(view(samples[: k + 1], 2)) for k in range(62, 78)}
    assert len(numbers) == 1
    line = PlannerRule(capacity_rps=1.0, interval_s=300.0, predictor="line")
    assert line.decide(view(samples, 2)) > rule.decide(view(samples, 2))


def test_by_law_looks_ahead_and_has_room() -> None:
    rule = LawRule(capacity=50.0, spare=0.5, horizon_s=200.0)
    assert rule.decide(view(rising(4.0), 5)) == 5
    assert rule.decide(view(rising(4.0), 9)) == 5
    assert rule.decide(view(rising(4.0, growth=0.005), 5)) == 13  # 10 now, 11 in 200 s
    assert (
        LawRule(capacity=50.0, spare=0.5, growth=0.0).decide(view(rising(4.0, growth=0.005), 5))
        == 12
    )
    # what waits is served in 300 s besides
    late = [*rising(4.0), sample(1215.0, [(300, 4, 0.2)] * 2, requests=4.0 * 1215)]
    assert rule.decide(view(late, 5)) == math.ceil(6.0 + 0.5 * math.sqrt(6.0))


def test_by_law_knows_the_day_before() -> None:
    day = [
        sample(60.0 * k, [(0, 4, 0.2)], requests=60.0 * k + 9.0 * max(60.0 * k - 3600.0, 0.0))
        for k in range(120)
    ]
    quiet = day[-1].arrived
    day += [sample(60.0 * k, [(0, 4, 0.2)], requests=quiet + k - 120) for k in range(120, 1498)]
    rule = LawRule(capacity=50.0, spare=0.0, season=True, horizon_s=300.0)
    # 57 minutes into the second day: 5 minutes later ten times the requests came
    assert rule.decide(view(day, 1)) == 10
    assert LawRule(capacity=50.0, spare=0.0).decide(view(day, 1)) == 1


def test_clairvoyant_plans_each_interval_and_starts_ahead() -> None:
    times = [float(k) for k in range(600)] + [600.0 + k / 4 for k in range(1200)]
    rule = ClairvoyantRule(capacity=10.0, prompt_share=0.5, interval_s=300.0, horizon_s=100.0)
    planned = rule.with_requests(times, [10] * len(times), [5] * len(times))
    assert planned.needed == (1, 1, 4)
    history = view([sample(0, [])], 1)
    assert planned.decide(FleetView(100.0, 1, 1, 1, 9, history.history)) == 1
    assert planned.decide(FleetView(520.0, 1, 1, 1, 9, history.history)) == 4


@pytest.mark.parametrize("name", sorted(RULES))
def test_each_rule_has_a_behaviour_and_decides_at_the_start(name: str) -> None:
    rule = make_rule(name, {})
    make_behaviour(rule.usual_behaviour)
    decided = rule.decide(view([sample(0, [(0, 0, 0.0)])], 1))
    assert isinstance(decided, int)


def test_unknown_names_are_refused() -> None:
    for wrong in (
        lambda: make_rule("kedar", {}),
        lambda: make_rule("keda", {"wating": 5}),
        lambda: make_behaviour({"up_pod": 3}),
        lambda: make_rule("static", {"replicas": 0}),
    ):
        with pytest.raises(InputError):
            wrong()


def test_the_autoscaler_keeps_its_bounds_and_its_pace() -> None:
    class Wild(StaticRule):
        def decide(self, view: FleetView) -> int:
            return 99

    scaler = Autoscaler(ScalingRule(Wild(), Behaviour(), 1, 12), 2, 1000.0)
    wanted = []
    while scaler.next_s < 1061.0:
        now_s = scaler.next_s
        if scaler.step(now_s, scaler.wanted, lambda at_s=now_s: sample(at_s, [])):
            wanted.append((now_s - 1000.0, scaler.wanted))
    # four more or twice as many each 15 s, at most 12
    assert wanted == [(15.0, 6), (30.0, 12), (45.0, 12), (60.0, 12)]
