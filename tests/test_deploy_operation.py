"""What an operator meets at night: drains as long as requests take, rollouts that leave the
capacity there, loads that are given their time, caches that stay, and logs that stay small.
"""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import orders
import pytest
from orders import changed
from rendered import objects_of

from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.deploy.order import Order
from toolkit.deploy.reckon import drain_s, startup_s
from toolkit.deploy.render import render_target
from toolkit.files.bench import BenchReport
from toolkit.files.plan import Plan
from toolkit.files.shipped import recipe_path


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """On GPUs, without a target for E2E."""
    return orders.plan(tmp_path, **(orders.GPU | {"sla": {"ttft_p99_s": 2.0}}))


def predicting(plan: Plan, seconds: float) -> Order:
    return orders.order(changed(plan, outcome__metrics={"e2e_p99_s": seconds}))


def test_the_drain_is_the_predicted_p99_and_a_quarter_more(plan: Plan) -> None:
    found = drain_s(predicting(plan, 103.0))
    assert found.value == 129
    assert "103" in found.source
    assert "25 %" in found.source


def test_a_fit_that_was_measured_needs_less_margin_and_never_less_than_a_tenth(plan: Plan) -> None:
    order = predicting(plan, 100.0)
    for error_percent, longest_s in ((-17.2, 118), (2.0, 111)):
        row = SimpleNamespace(metric="e2e_mean_s", error_percent=error_percent)
        bench = cast(BenchReport, SimpleNamespace(compared=[row]))
        assert drain_s(replace(order, bench=bench)).value == longest_s


def test_a_longer_target_is_waited_for_too(tmp_path: Path) -> None:
    plan = orders.plan(tmp_path, **orders.GPU)
    assert drain_s(predicting(plan, 41.5)).value == 90, "e2e_p99_s of the recipe"
    assert drain_s(predicting(plan, 0.1)).value == 90
    assert drain_s(predicting(plan, 200.0)).value == 250


def test_without_a_prediction_the_longest_request_decides(plan: Plan) -> None:
    untuned = changed(plan, outcome__metrics={})
    long = changed(untuned, recipe__serve__max_new_tokens=50_000)
    assert drain_s(orders.order(long)).value > drain_s(orders.order(untuned)).value


@pytest.mark.parametrize(("pods", "surge", "away"), [(1, 1, 0), (2, 1, 0), (3, 0, 1), (8, 0, 1)])
def test_a_rollout_leaves_more_than_half_of_the_pods(
    plan: Plan, pods: int, surge: int, away: int
) -> None:
    objects = objects_of(orders.order(plan, replicas=pods))
    bounds = objects["base/deployment.yaml"]["spec"]["strategy"]["rollingUpdate"]
    assert bounds == {"maxSurge": surge, "maxUnavailable": away}
    assert 2 * bounds["maxUnavailable"] < pods
    assert objects["base/poddisruptionbudget.yaml"]["spec"]["maxUnavailable"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "needed"), [(1, 2), (2, 3), (3, None)])
def test_few_replicas_are_told_how_to_roll_out(replicas: int, needed: int | None) -> None:
    told = render_target("kubernetes", replicated(replicas=replicas))["base/statefulset.yaml"]
    assert re.findall(r"--replicas (\d)", told) == ([] if needed is None else [str(needed)])


def replicated(**options: object) -> Order:
    """A plan of vLLM's own servers."""
    name = "llama-3.1-8b-h200"
    made = Scenario.open(ScenarioOptions(recipe=recipe_path(name), fit=name)).make_plan()
    return orders.order(changed(made, outcome__metrics={"e2e_p99_s": 41.5}), **options)


def test_a_recipe_says_how_long_its_model_may_load(plan: Plan) -> None:
    slow = orders.order(changed(plan, recipe__serve__load_timeout_s=7200.0))
    assert startup_s(slow).value == 7200
    (container,) = objects_of(slow)["base/deployment.yaml"]["spec"]["template"]["spec"][
        "containers"
    ]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 7200
