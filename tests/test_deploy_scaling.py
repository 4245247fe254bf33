"""A rule of scaling.json in a plan and in Kubernetes' objects: the constants are the file's, and
the query of `by-law` gives what the rule itself asks for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Printed, llmctl, ran
from operator_kinds import check_object

from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.deploy.order import Sourced
from toolkit.deploy.render import environment
from toolkit.files.capacity import Requests
from toolkit.files.io import head, read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import ScaleSpec, ScalingSpec
from toolkit.files.scaling import FleetCurve, FleetResult, ScalingResult
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Outcome
from toolkit.scaling.by_law import DAY_S, MEANS_S, LawRule
from toolkit.scaling.types import FleetSample, FleetView, History, ReplicaLoad
from toolkit.sched.policies.parameters import parameters
from toolkit.sim.deployment import Deployment

RECIPE = "llama-3.1-8b-h200"
# Series of vLLM, and the front's counter of requests.
SERIES = {"waiting": "vllm:num_requests_waiting", "running": "vllm:num_requests_running"}
ENDED = "vllm:request_success_total"
PROMPTS = "vllm:request_prompt_tokens"
OUTPUTS = "vllm:request_generation_tokens"
ARRIVED = "llmctl_requests_arrived_total"
RULES: dict[str, dict[str, Any]] = {
    "by-law": {
        "capacity": 1500.0,
        "prompt_share": 0.02,
        "output_tokens": 300.0,
        "spare": 0.75,
        "window_s": 120.0,
        "horizon_s": 130.0,
    },
    "keda": {"waiting": 3.5, "running": 40.0},
    "hpa": {"metric": "requests", "target": 24.5},
    "tokens": {},
    "saturation": {},
    "planner": {"capacity_rps": 4.0},
}
SLOW = {
    "up_window_s": 45.0,
    "up_pods": 0,
    "up_percent": 0,
    "down_window_s": 600.0,
    "down_pods": 1,
    "down_percent": 0,
    "down_period_s": 90.0,
}


def fleet(rule: str, hours: float, begin: int = 2, *, kept: bool = True) -> FleetResult:
    share = 0.8 if kept else 1.7
    behaviour: dict[str, Any] = {} if rule == "static" else SLOW
    parameters = {"replicas": begin} if rule == "static" else RULES[rule]
    return FleetResult(
        rule=rule,
        scaling=ScalingSpec(rule=rule, parameters=parameters, behaviour=behaviour),
        begin=begin,
        outcome=Outcome(
            metrics={"ttft_p99_s": 10.0 * share, "mtpot_p99_s": 0.4, "e2e_p99_s": 40.0},
            used={"ttft_p99_s": share, "mtpot_p99_s": 0.3},
        ),
        kept=kept,
        failed=0,
        gpu_hours_per_day=hours,
        usd_per_day=None,
        replicas_mean=hours / 24.0,
        replicas_max=begin,
        starts=3,
        trials=8,
        curve=FleetCurve(ready=[1.0], attainment_percent=[100.0]),
    )


def scaling(folder: Path, *fleets: FleetResult, **scale: Any) -> Path:
    """A scaling.json of the shipped recipe."""
    found = Scenario.open(ScenarioOptions(recipe=recipe_path(RECIPE)))
    trace = folder / "day.csv"
    trace.write_text("made up\n")
    rules = [one for one in fleets if one.rule != "static"]
    result = ScalingResult(
        **head(found.inputs | {"trace": trace}),
        recipe_name=RECIPE,
        trace=Requests(source="day.csv", requests=5000, notes=[], scaling=None),
        sla={"ttft_p99_s": 10.0, "mtpot_p99_s": 1.5},
        scale=ScaleSpec(**{"min": 1, "max": 12, "start_s": [90.0], "poll_s": 20.0} | scale),
        gpus_per_replica=1,
        replica_rps=4.0,
        hours=24.0,
        step_s=300.0,
        demand_rps=[1.0],
        static=next((one for one in fleets if one.rule == "static"), None),
        clairvoyant=None,
        rules=rules,
        analytic=None,
    )
    path = folder / "scaling.json"
    write_file(result, path)
    return path


Rendered = Callable[..., dict[str, Any]]


@pytest.fixture
def rendered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Rendered:
    """Renders the files of a scaling.json with these fleets; the objects of autoscaling/."""
    monkeypatch.chdir(tmp_path)

    def render(*fleets: FleetResult, words: Sequence[object] = (), **scale: Any) -> dict[str, Any]:
        scaling(tmp_path, *fleets, **scale)
        where = ["--scaling", "scaling.json", "--target", "kubernetes", "--force"]
        ran(capsys, f"render {RECIPE}", *where, *words)
        found = sorted(Path("kubernetes/autoscaling").glob("*.yaml"))
        objects = {file.name: yaml.safe_load(file.read_text()) for file in found}
        for one in objects.values():
            check_object(one)
        return objects

    return render


STATIC = fleet("static", 96.0, 4)


def test_the_plan_has_the_best_rule_and_its_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scaling(tmp_path, fleet("keda", 70.0), fleet("by-law", 48.0), STATIC)
    ran(capsys, f"render {RECIPE} --scaling scaling.json")
    plan = read_file(Plan, "plan.json")
    chosen = plan.settings.scaling
    assert chosen is not None
    assert chosen.rule == "by-law"
    assert chosen.parameters["spare"] == 0.75
    assert chosen.parameters["backlog_s"] == 300.0, "all parameters, with the defaults"
    assert chosen.behaviour["up_period_s"] == 15.0
    assert plan.recipe.scale is not None
    assert (plan.recipe.scale.max, plan.workers) == (12, 2)
    assert plan.outcome.metrics["ttft_p99_s"] == 8.0
    assert plan.settings.replica_router is not None
    told = {key: one.source for key, one in plan.explained.items()}
    assert "48 GPU-hours a day" in told["scaling rule"]
    assert "50 % fewer than 4 replicas" in told["scaling rule"]
    assert "every target is kept" in told["scaling rule"]
    assert "a replica among others serves" in told["by-law.capacity"]
    assert "8 settings" in told["by-law.spare"]
    assert told["by-law.backlog_s"] == "default of rule 'by-law'"
    assert told["behaviour.up_period_s"] == "Kubernetes' default"
    assert plan.inputs["scaling"].name == "scaling.json"
    fleet_of_plan = Deployment.of_plan(plan)
    assert fleet_of_plan.settings.scaling == chosen
    assert fleet_of_plan.settings.replica_router is not None


def test_by_law_is_one_query_with_the_capacity_as_a_constant(rendered: Rendered) -> None:
    spec = rendered(fleet("by-law", 48.0), STATIC)["scaledobject.yaml"]["spec"]
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["threshold"] == "1", "the query counts replicas"
    query = trigger["metadata"]["query"]
    assert query.count(f"{ARRIVED}{{") == 3
    assert query.startswith(f'(sqrt((sum(rate({ARRIVED}{{namespace="default",job="default/llmctl-')
    assert " + 1.58333 * (clamp_min(" in query, "(130 + 120 / 2) / 120: its growth goes on"
    assert query.endswith(" or vector(300)) / 1500) + 0.375) ^ 2 - 0.140625")
    assert (spec["minReplicaCount"], spec["maxReplicaCount"], spec["pollingInterval"]) == (
        1,
        12,
        20,
    )
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"] == {
        "stabilizationWindowSeconds": 45,
        "policies": [{"type": "Pods", "value": 12, "periodSeconds": 15}],
    }, "without a policy Kubernetes would take its defaults"
    assert behavior["scaleDown"] == {
        "stabilizationWindowSeconds": 600,
        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 90}],
    }
    text = Path("kubernetes/autoscaling/scaledobject.yaml").read_text()
    assert "capacity 1500.0: scaling.json: tokens/s that a replica among others serves" in text
    assert f"sum(delta({SERIES['running']}" in text, "the query of a cluster without the front"
    for line in text.splitlines():
        if re.search(r"(stabilization\w+|\w+ReplicaCount|pollingInterval|threshold): ", line):
            before = text[: text.index(line)].splitlines()[-1].strip()
            assert re.match(r"# \S", before), f"no reason at: {line}"


def test_keda_has_a_trigger_for_each_threshold(rendered: Rendered) -> None:
    words = ["--rule", "keda"]
    spec = rendered(fleet("keda", 90.0), fleet("by-law", 48.0), words=words)["scaledobject.yaml"]
    found = [one["metadata"] for one in spec["spec"]["triggers"]]
    assert [one["threshold"] for one in found] == ["3.5", "40"]
    assert [one["query"].partition("{")[0] for one in found] == [
        f"sum({SERIES['waiting']}",
        f"sum({SERIES['running']}",
    ]
    assert all(one["metricType"] == "AverageValue" for one in spec["spec"]["triggers"])


def test_hpa_has_a_metric_of_pods(rendered: Rendered) -> None:
    objects = rendered(fleet("hpa", 50.0))
    spec = objects["hpa.yaml"]["spec"]
    assert "hpa.yaml" in objects["kustomization.yaml"]["resources"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 12)
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"] == {"name": "vllm_num_requests"}
    assert metric["pods"]["target"] == {"type": "AverageValue", "averageValue": "24500m"}
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert "tolerance" not in spec["behavior"]["scaleUp"]
    text = Path("kubernetes/autoscaling/hpa.yaml").read_text()
    assert "prometheus-adapter" in text
    assert "name: {as: vllm_num_requests}" in text


def test_another_tolerance_is_rendered(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES["hpa"], "tolerance", 0.25)
    spec = rendered(fleet("hpa", 50.0))["hpa.yaml"]["spec"]
    assert spec["behavior"]["scaleUp"]["tolerance"] == 0.25


@pytest.mark.slow
def test_the_static_fleet_has_no_autoscaler(rendered: Rendered) -> None:
    assert rendered(fleet("by-law", 99.0), STATIC) == {}
    plan = read_file(Plan, "kubernetes/base/plan.json")
    assert plan.workers == 4
    deployed = yaml.safe_load(Path("kubernetes/base/statefulset.yaml").read_text())
    assert deployed["spec"]["replicas"] == 4
    # a fixed number runs under systemd, too; a rule does not
    assert llmctl("render", "kubernetes/base/plan.json", "--target", "systemd", "--force") == 0
    rendered(fleet("by-law", 9.0), STATIC)
    assert llmctl("render", "kubernetes/base/plan.json", "--target", "systemd", "--force") == 2


@pytest.mark.parametrize(
    ("rule", "text"),
    [("tokens", "llm-d"), ("saturation", "kv_spare 0.1"), ("planner", "interval_s 180.0")],
)
def test_rules_of_other_autoscalers_are_named_with_their_constants(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    scaling(tmp_path, fleet(rule, 50.0))
    said = ran(capsys, f"render {RECIPE} --scaling scaling.json --target kubernetes", code=2)
    assert text in said.err
    assert "--rule by-law" in said.err
    ran(capsys, f"render {RECIPE} --scaling scaling.json")


@pytest.mark.parametrize(
    ("line", "code", "text"),
    [
        (f"{RECIPE} --scaling scaling.json --rule by-lav", 2, "by-law"),
        (f"{RECIPE} --rule keda", 2, "--rule keda changes nothing"),
        (f"{RECIPE} --scaling scaling.json --policy vllm", 2, "--policy"),
        (f"{RECIPE} --scaling scaling.json --rule keda", 2, "does not keep"),
        (f"{RECIPE} --scaling scaling.json --target compose", 2, "fixed number"),
        ("qwen3-8b-h100-sxm --scaling scaling.json", 2, "stale"),
        (f"{RECIPE} --scaling none.json", 2, "none.json"),
    ],
)
def test_wrong_input(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    code: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    scaling(tmp_path, fleet("by-law", 50.0), fleet("keda", 60.0, kept=False))
    said: Printed = ran(capsys, f"render {line}", code=code)
    assert text in said.err


def test_the_last_replica_stays(rendered: Rendered, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="keeps at least one"):
        rendered(fleet("by-law", 48.0), min=0)


def test_a_bound_of_requests_for_each_replica_is_refused(
    rendered: Rendered, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="no replica has a bound"):
        rendered(fleet("by-law", 48.0), replica_requests=8)


def test_nothing_keeps_the_targets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scaling(tmp_path, fleet("by-law", 50.0, kept=False))
    said = ran(capsys, f"render {RECIPE} --scaling scaling.json", code=2)
    assert "no rule keeps the targets" in said.err
    ran(capsys, f"render {RECIPE} --scaling scaling.json --rule by-law --force")
    assert "BREAKS" in read_file(Plan, "plan.json").explained["scaling rule"].source


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_the_rule_of_a_recipe_is_rendered_if_it_names_one(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    named: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = Scenario.open(ScenarioOptions(recipe=recipe_path(RECIPE))).inputs["fit"]
    rule = "\n  scaling: {rule: keda, parameters: {waiting: 7}}" if named else ""
    scale = f"scale:\n  min: 2\n  max: 5\n  start_s: [90]{rule}\n"
    Path("own.yaml").write_text(recipe_path(RECIPE).read_text() + scale)
    ran(capsys, "render own.yaml --target kubernetes --fit", fit)
    spec = yaml.safe_load(Path("kubernetes/autoscaling/scaledobject.yaml").read_text())["spec"]
    assert spec["maxReplicaCount"] == (5 if named else 2)
    assert (spec["triggers"][0]["metadata"]["threshold"] == "7") is named


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("keda, parameters: {waiting: 0}", "no threshold"),
        ("clairvoyant, parameters: {capacity: 9}", "only a simulation"),
        ("by-law", "needs capacity"),
    ],
)
def test_a_rule_of_a_recipe_by_which_nothing_would_scale_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    fit = Scenario.open(ScenarioOptions(recipe=recipe_path(RECIPE))).inputs["fit"]
    scale = f"scale: {{start_s: [90], scaling: {{rule: {rule}}}}}\n"
    Path("own.yaml").write_text(recipe_path(RECIPE).read_text() + scale)
    said = ran(capsys, "render own.yaml --target kubernetes --fit", fit, code=2)
    assert text in said.err


# The query of by-law, evaluated as Prometheus does, over one series of each name.


class Value(dict[str, float]):
    """An instant vector."""

    def _with(self, other: Value | float, what: Callable[[float, float], float]) -> Value:
        if not isinstance(other, Value):
            return Value({key: what(one, other) for key, one in self.items()})
        return Value({key: what(one, other[key]) for key, one in self.items() if key in other})

    def __add__(self, other: Value | float) -> Value:
        return self._with(other, lambda one, two: one + two)

    def __sub__(self, other: Value | float) -> Value:
        return self._with(other, lambda one, two: one - two)

    def __truediv__(self, other: Value | float) -> Value:
        return self._with(other, lambda one, two: one / two)

    def __mul__(self, other: Value | float) -> Value:
        return self._with(other, lambda one, two: one * two)

    def __pow__(self, power: float) -> Value:
        return Value({key: one**power for key, one in self.items()})

    def __gt__(self, least: float) -> Value:  # type: ignore[override]
        return Value({key: one for key, one in self.items() if one > least})

    def __rmul__(self, other: float) -> Value:
        return self._with(other, lambda one, two: one * two)

    def __or__(self, other: Value) -> Value:  # type: ignore[override]
        return Value({**other, **self})


SELECTOR = re.compile(r"([a-z_:]+)\{[^}]*\}(?:\[(\d+)s\](?: offset (\d+)s)?)?")


def evaluated(query: str, samples: Sequence[tuple[float, dict[str, float]]]) -> float | None:
    """The value of a query at the time of the last sample; None: it has none."""
    now_s = samples[-1][0]

    def selected(found: re.Match[str]) -> str:
        name, window_s, ago_s = found.groups()
        return f"series({name!r}, {window_s or 0}, {ago_s or 0})"

    def series(name: str, window_s: float, ago_s: float) -> Any:
        end_s = now_s - ago_s
        found = [(at_s, one[name]) for at_s, one in samples if end_s - window_s <= at_s <= end_s]
        return (found, window_s) if window_s else Value({"": found[-1][1]})

    def rate(selected: tuple[list[tuple[float, float]], float]) -> Value:
        found, _ = selected
        if len(found) < 2:
            return Value()
        (begin_s, first), (end_s, last) = found[0], found[-1]
        return Value({"": (last - first) / (end_s - begin_s)})

    python = SELECTOR.sub(selected, query).replace(" or ", " | ").replace(" ^ ", " ** ")
    known: dict[str, Any] = {
        "series": series,
        "rate": rate,
        "delta": lambda selected: selected[1] * rate(selected),
        "sqrt": lambda found: found**0.5,
        "sum": lambda found: found,
        "max": lambda found: Value({"": max(found.values())}) if found else Value(),
        "vector": lambda value: Value({"": value}),
        "clamp_min": lambda found, least: Value({k: max(one, least) for k, one in found.items()}),
        "label_replace": lambda found, *_: Value({"before": found[""]} if found else {}),
        "__builtins__": {},
    }
    value: Value = eval(python, known)
    assert set(value) <= {""}
    return value.get("")


def day(came: Callable[[float], float], until_s: float, step_s: float = 15.0) -> list[FleetSample]:
    """Samples of a fleet to which so many requests have come by each time."""
    found = []
    for k in range(int(until_s / step_s) + 1):
        at_s = k * step_s
        arrived = int(came(at_s))
        waiting = min(arrived, int(at_s / 60) % 7)
        running = min(arrived - waiting, 20 + k % 3)
        ended = arrived - waiting - running
        found.append(
            FleetSample(
                at_s=at_s,
                ready=(ReplicaLoad(0, waiting, running, 0.5),),
                starting=0,
                queued=0,
                arrived=arrived,
                prompt_tokens=700 * arrived,
                ended=ended,
                output_tokens=250 * ended,
            )
        )
    return found


SHAPES: dict[str, tuple[Callable[[float], float], float, float]] = {
    "constant": (lambda at_s: 2.5 * at_s, 900.0, 15.0),
    "growing": (lambda at_s: at_s + 0.005 * at_s**2, 900.0, 15.0),
    "falling": (lambda at_s: 9.0 * at_s - 0.004 * at_s**2, 900.0, 15.0),
    "at the start": (lambda at_s: 3.0 * at_s, 90.0, 15.0),
    "day": (lambda at_s: 4 * min(at_s, 9000) + at_s / 2, DAY_S + 1800.0, 60.0),
}


OF_FRONT, OF_VLLM = 'job="y"', ""  # label matchers of a front's series; there is no front


def law_query(rule: LawRule, front: str) -> str:
    """The query of the rule for pods with a label."""
    values = {name: Sourced(value, "test") for name, value in parameters(rule).items()}
    scaling = {"parameters": values, "day_s": DAY_S, "means_s": MEANS_S}
    queries: Any = environment(None).get_template("kubernetes/autoscaling/queries.j2").module
    return str(queries.by_law(scaling, 'job="x"', front))


def seen(samples: Sequence[FleetSample]) -> list[tuple[float, dict[str, float]]]:
    """What Prometheus has scraped, by series."""
    return [
        (
            one.at_s,
            {
                ARRIVED: float(one.arrived),
                ENDED: float(one.ended),
                SERIES["running"]: float(one.ready[0].running),
                SERIES["waiting"]: float(one.ready[0].waiting),
                f"{PROMPTS}_sum": 700.0 * one.ended,
                f"{OUTPUTS}_sum": float(one.output_tokens),
                f"{OUTPUTS}_count": float(one.ended),
            },
        )
        for one in samples
    ]


def wanted(rule: LawRule, samples: Sequence[FleetSample]) -> float:
    """What the rule wants, before it is rounded."""
    history = History(rule.memory_s + 60.0)
    for one in samples:
        history.add(one)
    demand = rule.demand(FleetView(samples[-1].at_s, 1, 1, 1, 9, history))
    assert demand is not None
    needed = demand / rule.capacity
    return needed + rule.spare * math.sqrt(needed)


@pytest.mark.parametrize("changed", [{}, {"season": True}, {"spare": 0.0, "prompt_share": 0.0}])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("front", [OF_FRONT, OF_VLLM])
def test_the_query_gives_what_the_rule_asks_for(
    front: str, shape: str, changed: dict[str, Any]
) -> None:
    usual: dict[str, Any] = {"capacity": 400.0, "prompt_share": 0.05, "growth": 0.9, "spare": 0.6}
    rule = LawRule(window_s=180.0, horizon_s=120.0, backlog_s=60.0, **usual | changed)
    samples = day(*SHAPES[shape])
    own = wanted(rule, samples)
    assert own > 0.1
    found = evaluated(law_query(rule, front), seen(samples))
    assert found == pytest.approx(own, rel=1e-4)


def test_a_season_takes_the_demand_of_the_day_before() -> None:
    samples = day(*SHAPES["day"])
    rules = [LawRule(window_s=180.0, spare=0.0, season=season) for season in (False, True)]
    now, with_season = [wanted(rule, samples) for rule in rules]
    assert with_season > 4.0 * now


def test_no_history_gives_no_value_and_no_ended_request_the_constant() -> None:
    rule = LawRule(window_s=180.0, spare=0.0, growth=0.0, output_tokens=80.0)
    query = law_query(rule, OF_FRONT)
    samples = seen(day(lambda at_s: at_s, 15.0))
    assert evaluated(query, samples[:1]) is None
    for _, one in samples:
        one |= {SERIES["waiting"]: 0.0, f"{OUTPUTS}_count": 0.0, f"{OUTPUTS}_sum": 0.0}
    assert evaluated(query, samples) == pytest.approx(80.0)


def test_json_names_the_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scaling(tmp_path, fleet("by-law", 48.0))
    said = ran(capsys, f"render {RECIPE} --scaling scaling.json --json")
    assert json.loads(said.out)["settings"]["scaling"]["rule"] == "by-law"
