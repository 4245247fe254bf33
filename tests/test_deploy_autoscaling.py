"""The autoscaler: it reckons with the tuning's own trace, and adds a replica before the queue at
which first tokens come too late.
"""

import hashlib
from pathlib import Path
from typing import Any

import orders
import pytest
import yaml
from commands import llmctl
from operator_kinds import check_object
from orders import changed
from rendered import objects_of

from toolkit.deploy.autoscaling import of_queue
from toolkit.deploy.order import Order, Sourced
from toolkit.deploy.reckon import tuned_trace, waiting_threshold
from toolkit.files.io import write_file
from toolkit.files.plan import Plan
from toolkit.files.strict import Input
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path

BREAKING: Sourced[int | None] = Sourced(313, "test")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return orders.plan(tmp_path)


def loading(plan: Plan, load_s: float | None) -> Plan:
    """The same with a measured time of loading."""
    return changed(plan, fit__engine__load_s=load_s)


def tuned_on(plan: Plan, trace: Path) -> Plan:
    """The same, tuned on this trace."""
    recorded = Input(name=trace.name, sha256=hashlib.sha256(trace.read_bytes()).hexdigest())
    return changed(plan, inputs=plan.inputs | {"trace": recorded})


def long_trace(folder: Path) -> Path:
    """Few may wait for its prompts: they are longer than those of any shipped trace."""
    row = '{"arrival_s": %d, "prompt_tokens": 100, "output_tokens": 100}\n'
    file = folder / "long.jsonl"
    file.write_text("".join(row % second for second in range(50)))
    return file


def scaled(order: Order) -> dict[str, Any]:
    found = objects_of(order)["autoscaling/scaledobject.yaml"]
    check_object(found)
    spec: dict[str, Any] = found["spec"]
    return spec


def test_the_threshold_is_that_of_the_tuning_s_trace(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = long_trace(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_file(tuned_on(plan, own), "plan.json")
    assert llmctl("render", "plan.json", "--target", "kubernetes") == 0
    found = yaml.safe_load(Path("kubernetes/autoscaling/scaledobject.yaml").read_text())["spec"][
        "triggers"
    ][0]
    of_own = waiting_threshold(plan, read_trace(own)[0]).value
    of_shipped = waiting_threshold(plan, None).value
    assert of_own is not None
    assert of_own != of_shipped
    assert found["metadata"]["threshold"] == str(of_own // 2)
    # Where the trace is gone, or another has its name, nothing is reckoned from a shipped one.
    own.write_text(own.read_text().replace("100", "1"))
    capsys.readouterr()
    assert llmctl("render", "plan.json", "--target", "kubernetes") == 0
    assert "long.jsonl" in capsys.readouterr().err
    assert not Path("kubernetes/autoscaling/scaledobject.yaml").exists()
    told = Path("kubernetes/monitoring/prometheusrule.yaml").read_text()
    assert "name it with --trace" in told


def test_a_shipped_trace_is_found_by_its_digest(plan: Plan, tmp_path: Path) -> None:
    shipped = trace_path("bursty-small")
    assert tuned_trace(tuned_on(plan, shipped), []) == shipped
    assert tuned_trace(plan, [tmp_path]) is None
    other = tmp_path / "bursty-small.jsonl"
    other.write_text("{}\n")
    assert tuned_trace(tuned_on(plan, other), []) is None


def test_a_replica_is_added_before_admission_refuses(plan: Plan) -> None:
    order = orders.order(plan)
    breaking = waiting_threshold(plan, None).value
    assert breaking is not None
    spec = scaled(order)
    threshold = int(spec["triggers"][0]["metadata"]["threshold"])
    # Kubernetes acts 10 % above the threshold.
    assert 1 <= 1.1 * threshold < breaking


def test_replicas_at_most_double_and_go_one_by_one(plan: Plan) -> None:
    spec = scaled(orders.order(loading(plan, 84.4), replicas=2))
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (up,) = behavior["scaleUp"]["policies"]
    assert (up["type"], up["value"], up["periodSeconds"]) == ("Percent", 100, 85)
    (down,) = behavior["scaleDown"]["policies"]
    assert (down["type"], down["value"]) == ("Pods", 1)
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 2 * 85
    # Prometheus' end takes no replica away.
    assert spec["fallback"]["replicas"] == spec["minReplicaCount"] == 2
    assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"


@pytest.mark.parametrize("load_s", [None, 1.0, 9000.0])
def test_every_period_is_one_that_kubernetes_takes(plan: Plan, load_s: float | None) -> None:
    spec = scaled(orders.order(loading(plan, load_s)))
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    for way in behavior.values():
        assert 0 <= way["stabilizationWindowSeconds"] <= 3600
        assert all(0 < one["periodSeconds"] <= 1800 for one in way["policies"])
    long = of_queue(Sourced(1, "test"), None, BREAKING, 20_000)
    assert long.behaviour["down_period_s"].value == 1800
