"""Alert rules: those of a deployment read only its own series, and every target of a recipe has an
exact rule.
"""

import re
from pathlib import Path
from typing import Any

import orders
import pytest
import yaml
from operator_kinds import RULES, unknown_keys
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rendered import check_with_promtool, needs_promtool, objects_of
from toy_server import HandWorkers, app_of, make_driver
from vllm_names import VLLM

from toolkit.deploy import reckon
from toolkit.deploy.order import Order, Sourced
from toolkit.deploy.render import fill
from toolkit.deploy.values import Values
from toolkit.endpoints.upstream import Upstream
from toolkit.files.recipe import SLA_KEYS
from toolkit.routing.balancer import Balancer
from toolkit.routing.routers import make_router
from toolkit.routing.types import ReplicaTraits
from toolkit.server.application import Application
from toolkit.server.options import ServerOptions
from toolkit.server.pool import PoolBackend
from toolkit.server.replicas import LiveReplica, ReplicaNeeds, ReplicaPool
from toolkit.server.stats import RequestTimes, Stats

OWN = {
    "kubernetes": {"namespace": "default", "job": "default/llmctl-test"},
    "local": {"job": "llmctl-test"},
    "systemd": {"job": "llmctl-test"},
}
READ = re.compile(r"\b(llmctl_[a-z0-9_]+|up)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)="([^"]*)"')
ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
Sample = tuple[str, str | None]  # a name, and the bound of its bucket if it is one
QUEUE: Sourced[int | None] = Sourced(7, "test")


@pytest.fixture(autouse=True)
def _queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than seven that wait are too many; nothing is simulated."""
    monkeypatch.setattr(reckon, "waiting_threshold", lambda plan, trace: QUEUE)


def rules(order: Order, *, front: bool = False) -> Any:
    """The rules of a server in a cluster, or of a front with replicas."""
    values = Values(order, front=front, cluster=True)
    return yaml.safe_load(fill("kubernetes/monitoring/prometheusrule.yaml", values))["spec"]


def alert_of(key: str) -> str:
    return f"LlmctlTarget{key.title().replace('_', '')}"


def order_of(folder: Path, **changes: object) -> Order:
    return orders.order(orders.plan(folder, **changes))


def rules_in(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules of a file of Prometheus, or of the spec of a PrometheusRule."""
    assert list(unknown_keys(spec, RULES)) == []
    return [rule for group in spec["groups"] for rule in group["rules"]]


def rendered(target: str, order: Order) -> list[dict[str, Any]]:
    """As they stand in the target's file."""
    files = objects_of(order, target)
    if "monitoring/prometheusrule.yaml" in files:
        return rules_in(files["monitoring/prometheusrule.yaml"]["spec"])
    return rules_in(files["alerts.yaml"])


@pytest.mark.parametrize("target", OWN)
def test_every_rule_reads_only_the_series_of_its_own_deployment(
    target: str, tmp_path: Path
) -> None:
    """Two deployments in a namespace, one's name the beginning of the other's, would else trip each
    other's.
    """
    for rule in rendered(target, order_of(tmp_path)):
        read = READ.findall(rule["expr"])
        assert read, rule["expr"]
        for name, matchers in read:
            labels = dict(MATCHER.findall(matchers))
            assert {key: labels.get(key) for key in OWN[target]} == OWN[target], name
        assert rule["labels"]["deployment"] == "llmctl-test"


def limits() -> dict[str, float]:
    """Every target that a recipe may have, each with a limit that is the bound of no bucket by
    itself.
    """
    return {key: 1.23 + 0.01 * number for number, key in enumerate(SLA_KEYS)}


def samples_in(page: str) -> set[Sample]:
    """What a page of metrics has."""
    families = text_string_to_metric_families(page)
    return {(one.name, one.labels.get("le")) for family in families for one in family.samples}


def samples_read(expression: str) -> set[Sample]:
    """What a rule reads."""
    found = READ.findall(expression)
    return {(name, dict(MATCHER.findall(matchers)).get("le")) for name, matchers in found}


def test_every_target_has_a_rule_and_the_server_its_series(tmp_path: Path) -> None:
    sla = limits()
    driver = make_driver(HandWorkers())
    driver.stats = Stats(sla=sla)
    exposed = samples_in(generate_latest(app_of(driver)).decode())
    order = order_of(tmp_path, sla=sla)
    found = {rule["alert"]: rule for rule in rules_in(rules(order))}
    for key, limit in sla.items():
        rule = found[alert_of(key)]
        metric, statistic, _ = key.split("_")
        read = samples_read(rule["expr"])
        assert read <= exposed, rule["expr"]
        assert {name.rpartition("_")[0] for name, _ in read} == {f"llmctl_{metric}_seconds"}
        assert str(limit) in rule["expr"]
        allowed = {
            "p50": "0.5",
            "p90": "0.1",
            "p95": "0.05",
            "p99": "0.01",
            "max": "0",
            "mean": str(limit),
        }
        assert rule["expr"].endswith(f" > {allowed[statistic]}")


def test_the_share_beyond_a_limit_is_exact() -> None:
    stats = Stats(sla={"ttft_p99_s": 2.0, "mtpot_p99_s": 0.33})
    for ttft, gap in ((1.9, 0.1), (2.0, 0.33), (2.1, 0.34), (2.4, 0.2)):
        stats.latencies["ttft"].observe(ttft)
        stats.count_end("stop", RequestTimes(0.0, ttft, ttft + 1, gap), 5)
    assert dict(stats.latencies["ttft"].cumulative())["2.0"] == 2
    assert dict(stats.latencies["mtpot"].cumulative())["0.33"] == 3


def test_a_request_of_one_token_counts_in_no_histogram_of_gaps() -> None:
    stats = Stats(sla={"mtpot_p99_s": 0.33, "tpot_p99_s": 0.01})
    stats.count_end("stop", RequestTimes(0.0, 1.0, 2.0, 0.9), 1)
    counted = {name: sum(one.counts) for name, one in stats.latencies.items()}
    assert (counted["mtpot"], counted["tpot"], counted["e2e"]) == (0, 0, 1)
    assert stats.within_targets == 1


def test_a_front_exposes_every_series_that_its_rules_read(tmp_path: Path) -> None:
    sla = limits()
    pool = ReplicaPool(
        Balancer(make_router("round-robin", {}), []), ReplicaTraits(1), ReplicaNeeds(), hang_s=1.0
    )
    pool.replicas.append(LiveReplica("http://a", Upstream("http://a", 1.0), 0))
    options = ServerOptions(model="toy")
    app = Application(PoolBackend(pool, options, stats=Stats(sla=sla)), options)
    exposed = samples_in(generate_latest(app).decode())
    order = order_of(tmp_path, sla=sla)
    (group,) = rules(order, front=True)["groups"]
    assert {alert_of(key) for key in sla} <= {rule["alert"] for rule in group["rules"]}
    read = set[Sample]().union(*(samples_read(rule["expr"]) for rule in group["rules"]))
    assert read - {("up", None)} <= exposed


def one_server(job: str, **changes: str) -> dict[str, str]:
    """The series of a server that is well, but for the changes."""
    labels = f'namespace="default",job="{job}",instance="{job}",model_name="m"'
    values = {
        "up": "1x30",
        "llmctl_workers_alive": "2x30",
        "llmctl_worker_restarts_total": "0x30",
        "llmctl_requests_waiting": "0x30",
        "llmctl_refused_total": "0x30",
        "llmctl_oom_events_total": "0x30",
        'llmctl_requests_total{finish_reason="stop"}': "0+100x30",
        "llmctl_preemptions_total": "0+1x30",
        "llmctl_kv_cache_usage_ratio": "0.5x30",
        'llmctl_http_responses_total{status="500"}': "0x30",
        'llmctl_http_responses_total{status="503"}': "0+1x30",
        "llmctl_batch_seconds_total": "0+10x30",
        "llmctl_predicted_batch_seconds_total": "0+10x30",
        "llmctl_ttft_seconds_count": "0+100x30",
        'llmctl_ttft_seconds_bucket{le="2.0"}': "0+100x30",
    } | changes
    found = {}
    for name, value in values.items():
        bare, _, more = name.rstrip("}").partition("{")
        found[f"{bare}{{{labels}{',' if more else ''}{more}}}"] = value
    for worker in (0, 1):
        found[f'llmctl_worker_load_seconds{{{labels},worker="{worker}"}}'] = "0x30"
    return found


BAD = {
    "llmctl_workers_alive": "2 2 0x28",
    "llmctl_worker_restarts_total": "0+3x30",
    "llmctl_requests_waiting": "50x30",
    "llmctl_refused_total": "0+60x30",
    "llmctl_oom_events_total": "0+1x30",
    "llmctl_preemptions_total": "0+20x30",
    "llmctl_kv_cache_usage_ratio": "0.99x30",
    'llmctl_http_responses_total{status="500"}': "0+1x30",
    "llmctl_batch_seconds_total": "0+20x30",
    'llmctl_ttft_seconds_bucket{le="2.0"}': "0+90x30",
}


def firing(folder: Path, found: object, worlds: list[tuple[dict[str, str], set[str]]]) -> None:
    """Have promtool run the rules `found` for 20 minutes over each world's series: exactly the
    alerts beside them must fire.
    """
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": text} for name, text in world.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "20m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)
                    ],
                }
            ],
        }
        for world, alerts in worlds
    ]
    check_with_promtool(folder, tests, found)


@pytest.mark.slow
@needs_promtool
def test_a_failing_deployment_fires_only_its_own_alerts(tmp_path: Path) -> None:
    order = order_of(tmp_path, sla={"ttft_p99_s": 2.0})
    found = rules(order)
    ours = "default/llmctl-test"
    other = "default/llmctl-test-b"
    every = {rule["alert"] for rule in rendered("kubernetes", order)}
    worlds = [
        (one_server(ours) | one_server(other, **BAD), set[str]()),
        (one_server(ours, **BAD), every - {"LlmctlDown", "LlmctlWorkerMissing"}),
        (one_server(ours, llmctl_workers_alive="1x30"), set[str]()),  # it may load for 30 minutes
        (one_server(other), {"LlmctlDown"}),
    ]
    firing(tmp_path, found, worlds)


FRONT = 'namespace="default",job="default/llmctl-test"'
BEHIND = 'namespace="default",job="default/llmctl-test-replica"'


def measured(labels: str, broken: str = "") -> dict[str, str]:
    """The histograms of a server or a front that keeps every target of `limits`, but the broken
    one: its share beyond the limit, or its mean, is too large by a little.
    """
    values: dict[str, str] = {}
    for key, limit in limits().items():
        metric, statistic, _ = key.split("_")
        name = f"llmctl_{metric}_seconds"
        values.setdefault(f"{name}_count{{{labels}}}", "0+1000x30")
        if statistic == "mean":
            mean = limit * (1.05 if key == broken else 0.95)
            values[f"{name}_sum{{{labels}}}"] = f"0+{1000 * mean:g}x30"
            continue
        allowed = 0.0 if statistic == "max" else 1 - float(statistic[1:]) / 100
        kept = min(1000 * (1 - allowed) + (-5 if key == broken else 1), 1000)
        values[f'{name}_bucket{{{labels},le="{limit}"}}'] = f"0+{kept:g}x30"
    return values


def one_front(broken: str = "", **changes: str) -> dict[str, str]:
    """The series of a front and two replicas that are well, but for the broken target and the
    changes.
    """
    own = f'{FRONT},instance="front",model_name="m"'
    values = {
        "up": "1x30",
        "llmctl_refused_total": "0x30",
        'llmctl_replica_up,replica="0"': "1x30",
        'llmctl_replica_up,replica="1"': "1x30",
        "llmctl_replicas_up": "2x30",
        "llmctl_replica_losses_total": "0x30",
        'llmctl_http_responses_total,status="502"': "0x30",
        "vllm:num_requests_waiting": "0x30",
        "vllm:kv_cache_usage_perc": "0.99x30",  # full, but none waits
        "vllm:num_preemptions_total": "0x30",
        'vllm:request_success_total,finished_reason="stop"': "0+100x30",
    } | changes
    found = measured(own, broken)
    for name, value in values.items():
        bare, _, more = name.partition(",")
        labels = f'{BEHIND},pod="0"' if name.startswith("vllm") else own
        found[f"{bare}{{{labels}{',' if more else ''}{more}}}"] = value
    return found


@pytest.mark.slow
@needs_promtool
def test_a_broken_target_fires_its_own_alert_alone(tmp_path: Path) -> None:
    order = order_of(tmp_path, sla=limits())
    found = rules(order)
    own = f'{FRONT},instance="{OWN["kubernetes"]["job"]}",model_name="m"'
    well = {
        name: text for name, text in one_server("default/llmctl-test").items() if "ttft" not in name
    }
    worlds = [(well | measured(own), set[str]())]
    worlds += [(well | measured(own, key), {alert_of(key)}) for key in SLA_KEYS]
    firing(tmp_path, found, worlds)


@pytest.mark.slow
@needs_promtool
def test_a_target_broken_at_a_front_fires_its_alert(tmp_path: Path) -> None:
    order = order_of(tmp_path, sla=limits())
    found = rules(order, front=True)
    worlds = [(one_front(), set[str]())]
    worlds += [(one_front(key), {alert_of(key)}) for key in SLA_KEYS]
    down = {'llmctl_replica_up,replica="1"': "0x30"}
    worlds += [
        (one_front(up="0x30"), {"LlmctlDown"}),
        (one_front(llmctl_refused_total="0+60x30"), {"LlmctlRefusing"}),
        (
            one_front(**{"vllm:num_requests_waiting": "8x30"}),
            {"LlmctlReplicaQueue", "LlmctlReplicaCacheFull"},
        ),
        (one_front(**{"vllm:num_preemptions_total": "0+9x30"}), {"LlmctlReplicaPreempting"}),
        (one_front(llmctl_replica_losses_total="0 0 1 2x27"), {"LlmctlReplicasLost"}),
        (
            one_front(**{'llmctl_http_responses_total,status="502"': "0x18 1x12"}),
            {"LlmctlServerErrors"},
        ),
        (one_front(**down), set[str]()),  # it may load for 30 minutes
        (one_front(llmctl_replicas_up="2 2 0x28"), {"LlmctlNoReplica"}),
        (one_front(llmctl_replicas_up="0x30"), set[str]()),  # the first load
    ]
    firing(tmp_path, found, worlds)


@pytest.mark.slow
@needs_promtool
def test_what_does_not_load_alerts_after_the_bound_of_its_load(tmp_path: Path) -> None:
    """The recipe allows 15 minutes, so that 20 minutes are enough to see it."""
    plan = orders.changed(orders.plan(tmp_path, sla={}), recipe__serve__load_timeout_s=900.0)
    order = orders.order(plan)
    found = rules(order)
    server = one_server("default/llmctl-test", llmctl_workers_alive="1x30")
    firing(tmp_path, found, [(server, {"LlmctlWorkerMissing"})])
    found = rules(order, front=True)
    down = {'llmctl_replica_up,replica="1"': "0x30"}
    worlds = [
        (one_front(**down), {"LlmctlReplicaDown"}),
        (one_front(llmctl_replicas_up="0x30"), {"LlmctlNeverReady"}),
    ]
    firing(tmp_path, found, worlds)


def test_alerts_about_loading_wait_as_long_as_the_probes(tmp_path: Path) -> None:
    plan = orders.changed(orders.plan(tmp_path), recipe__serve__load_timeout_s=7200.0)
    order = orders.order(plan)
    (server,) = rules(order)["groups"]
    (front,) = rules(order, front=True)["groups"]
    waits = {rule["alert"]: rule["for"] for rule in [*server["rules"], *front["rules"]]}
    for name in ("LlmctlWorkerMissing", "LlmctlReplicaDown", "LlmctlNeverReady"):
        assert waits[name] == "7200s"


def every_rule(order: Order) -> list[dict[str, Any]]:
    """The rules of a server, and of a front with replicas."""
    return [*rules_in(rules(order)), *rules_in(rules(order, front=True))]


def test_every_metric_of_a_rule_exists(tmp_path: Path) -> None:
    """Rules about replicas read vLLM's metrics."""
    driver = make_driver(HandWorkers())
    driver.stats = Stats(sla=limits())
    driver.stats.ended["stop"] += 1
    exposed = {name for name, _ in samples_in(generate_latest(app_of(driver)).decode())}
    exposed |= VLLM.keys()
    fronts = {"llmctl_replica_up", "llmctl_replicas_up", "llmctl_replica_losses_total"}
    order = order_of(tmp_path, sla=limits())
    for rule in every_rule(order):
        names = re.sub(r'"[^"]*"', "", rule["expr"])
        read = set(re.findall(r"\b(?:llmctl_|vllm:)[a-z0-9_]+", names))
        assert read - exposed <= fronts, rule["alert"]


def test_every_alert_has_a_section_that_says_what_to_do(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/alerts.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    found = every_rule(order_of(tmp_path, sla=limits()))
    anchors = {name.lower() for name in sections}
    for rule in found:
        base, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert anchor in anchors, rule["alert"]
        assert base.endswith("/how-to/alerts.html")
        assert base.startswith(re.findall(r'^Documentation = "(.*)"', PROJECT, re.M)[0])
    used = {rule["annotations"]["runbook_url"].partition("#")[2] for rule in found}
    assert anchors == used, "and no other has one"
    for name, text in sections.items():
        assert all(f"**{part}:**" in text for part in ("Look at", "Do")), name


@pytest.mark.slow
@needs_promtool
def test_the_autoscaler_sees_a_queue_grow_early(tmp_path: Path) -> None:
    """A queue that grows by 2 a second has 60 after 30 s, and 290 after a load of 115 s more."""
    plan = orders.changed(orders.plan(tmp_path), fit__engine__load_s=85.0)
    (trigger,) = objects_of(orders.order(plan))["autoscaling/scaledobject.yaml"]["spec"]["triggers"]
    pods = [f'llmctl_requests_waiting{{{FRONT},pod="{pod}"}}' for pod in (0, 1)]
    shapes = {"0+15x8": 290.0, "40x8": 80.0, "90-10x8": 140.0}  # of each of two pods
    tests = [
        {
            "interval": "15s",
            "input_series": [{"series": pod, "values": values} for pod in pods],
            "promql_expr_test": [
                {
                    "expr": trigger["metadata"]["query"],
                    "eval_time": "30s",
                    "exp_samples": [{"labels": "{}", "value": wanted}],
                }
            ],
        }
        for values, wanted in shapes.items()
    ]
    check_with_promtool(tmp_path, tests)
