"""The Grafana dashboard: every query names a metric that a live registry exposes, under llmctl's
names and under vLLM's.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orders
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from toy_server import HandWorkers, make_driver
from vllm_names import VLLM

import toolkit
from toolkit.deploy.dashboard import dashboard
from toolkit.deploy.render import TARGETS, render_target
from toolkit.server.metrics import engine_families, families_of_requests

SLA = {"ttft_p99_s": 2.0, "tpot_mean_s": 0.1}
NAMES = ("llmctl", "vllm")
NOT_SHOWN = {
    "llmctl_engine_info": "what runs, in labels: no number",
    "llmctl_batch_time_ratio": (
        "a histogram of what the panels of actual over predicted time show as two sums"
    ),
    "llmctl_kv_cache_tokens": (
        "the share of the cache is shown; its limit is the same on every machine"
    ),
}
METRIC = re.compile(r"\b(?:llmctl_|vllm:)[a-z0-9_]+")
LABELS = re.compile(r"by \((\w+)\)|\{(\w+)=|, (\w+)\)$")


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """Each sample's name on /metrics, ours and vLLM's, and its labels. A failed request too, for
    the ends to have a label.
    """
    driver = make_driver(HandWorkers())
    driver.stats.ended["failed"] += 1
    made = (
        *engine_families(driver, {"model_name": "toy"}),
        *families_of_requests(driver.stats, {"model_name": "toy"}),
    )
    families = text_string_to_metric_families(
        generate_latest(SimpleNamespace(collect=lambda: made)).decode()
    )
    ours = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    return ours | VLLM


def expressions(board: dict[str, Any]) -> list[str]:
    """All PromQL expressions of a dashboard, also those of its variables."""
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = board["templating"]["list"]
    return queries + [each["definition"] for each in variables if each["type"] == "query"]


@pytest.mark.parametrize("names", NAMES)
def test_every_query_reads_an_existing_metric(names, exposed):
    found = {name for expr in expressions(dashboard(SLA, names)) for name in METRIC.findall(expr)}
    assert len(found) > 10
    assert found <= exposed.keys()
    assert {name.startswith("vllm:") for name in found} == {names == "vllm"}


def test_every_metric_is_on_the_dashboard_or_excused(exposed):
    on_board = {name for expr in expressions(dashboard()) for name in METRIC.findall(expr)}
    families = {
        re.sub(r"_(bucket|sum|count|created)$", "", name)
        for name in exposed
        if name.startswith("llmctl_")
    }
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in on_board}
    assert families - shown == NOT_SHOWN.keys()


@pytest.mark.parametrize("names", NAMES)
def test_every_panel_shows_only_the_chosen_deployment(names):
    board = dashboard(SLA, names)
    for expr in [
        target["expr"] for panel in board["panels"] for target in panel.get("targets", ())
    ]:
        assert expr.count("{") == expr.count('job=~"$job"') >= 1, expr


@pytest.mark.slow
def test_every_target_has_a_dashboard_and_alerts_of_known_series(tmp_path):
    for target in TARGETS:
        order = orders.order(orders.of_target(target, tmp_path))
        files = {Path(name).name: text for name, text in render_target(target, order).items()}
        assert ("vllm:" in files["dashboard.json"]) == (target == "vllm")
        alerts = {"alerts.yaml", "prometheusrule.yaml"} & files.keys()
        assert len(alerts) == (target != "vllm")


@pytest.mark.parametrize("names", NAMES)
def test_every_label_in_a_query_is_one_of_the_metrics(names, exposed):
    for expr in expressions(dashboard(SLA, names)):
        labels = {label for found in LABELS.findall(expr) for label in found if label}
        for name in METRIC.findall(expr):
            assert labels <= exposed[name] | {"job"}, expr  # which Prometheus puts on every series


def test_targets_of_the_recipe_are_drawn_as_lines():
    def limits(board):
        return {
            panel["title"]: [
                step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
            ][1:]
            for panel in board["panels"]
            if panel["type"] == "timeseries"
        }

    with_targets = limits(dashboard(SLA))
    assert with_targets["Time to first token"] == [2.0]
    assert with_targets["Time per output token"] == [0.1]
    assert limits(dashboard())["Time to first token"] == []


@pytest.mark.parametrize("names", NAMES)
def test_the_shipped_file_is_the_dashboard(names):
    shipped = Path(toolkit.__file__).parent.parent / "templates" / "grafana" / f"{names}.json"
    assert (
        shipped.read_text(encoding="utf-8") == json.dumps(dashboard(names=names), indent=1) + "\n"
    )


def test_the_dashboard_shows_the_front_s_longest_gaps():
    """Servers of vLLM have no metric of them."""
    sla = {"mtpot_p99_s": 0.5}
    board = dashboard(sla, "vllm", job="replicas", front="default/front")
    (panel,) = [one for one in board["panels"] if one["title"] == "Longest gap in a request"]
    read = [target["expr"] for target in panel["targets"]]
    assert len(read) == 3
    for expr in read:
        assert 'llmctl_mtpot_seconds_bucket{job="default/front"}' in expr
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert [step["value"] for step in steps][1:] == [0.5]
    places = [(one["gridPos"]["x"], one["gridPos"]["y"]) for one in board["panels"]]
    assert len(set(places)) == len(places)
    assert len({one["id"] for one in board["panels"]}) == len(places)
    assert "Longest gap" not in json.dumps(dashboard(sla, "vllm"))
