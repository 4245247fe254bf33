"""Rendered files, checked with the validators of their readers, and with names that try to
break out.
"""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import orders
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from operator_kinds import OWN_KINDS, check_object
from orders import changed
from rendered import (
    check_compose,
    complaints,
    kustomized,
    needs_kubectl,
    needs_systemd,
    objects_of,
    services,
)
from said import says

from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.deploy import reckon
from toolkit.deploy.order import Order
from toolkit.deploy.reckon import MAX_BACKLOG, largest, waiting_threshold
from toolkit.deploy.render import TARGETS, render_target
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Settings
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return orders.plan(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return orders.plan(tmp_path_factory.mktemp("gpu"), fit=orders.on("NVIDIA H200"), **orders.GPU)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return orders.of_target("vllm", tmp_path_factory.mktemp("vllm"))


@pytest.fixture(params=["cpu", "gpu"])
def order(request: pytest.FixtureRequest) -> Order:
    return orders.order(request.getfixturevalue(request.param), folder="/srv/llmctl")


def yaml_files(files: dict[str, str]) -> dict[str, Any]:
    return {name: yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")}


def test_kubernetes_takes_every_object(order: Order) -> None:
    options = replace(order.options, gateway="edge/public")
    objects = objects_of(replace(order, options=options))
    for data in objects.values():
        check_object(data)
    kinds = {data["kind"] for data in objects.values()}
    assert kinds >= {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", *OWN_KINDS}


@pytest.mark.slow
@needs_kubectl
def test_kustomize_builds_both_and_hashes_the_plan(order: Order, tmp_path: Path) -> None:
    for built, replicas in zip(kustomized(order, tmp_path), (1, 1, None), strict=True):
        objects = {one["kind"]: one for one in built if "dashboard.json" not in one.get("data", {})}
        plan = objects["ConfigMap"]["metadata"]["name"]
        assert objects["ConfigMap"]["data"]["plan.json"] == order.text
        volumes = objects["Deployment"]["spec"]["template"]["spec"]["volumes"]
        assert volumes[0]["configMap"]["name"] == plan != f"{order.name}-plan"
        assert objects["Deployment"]["spec"].get("replicas") == replicas, (
            "under an autoscaler it says no number"
        )


@pytest.mark.slow
def test_compose_is_as_its_specification_says(order: Order, tmp_path: Path) -> None:
    check_compose(order, tmp_path)


@pytest.mark.slow
@needs_systemd
def test_systemd_finds_nothing_in_the_unit(order: Order, tmp_path: Path) -> None:
    assert complaints(order, tmp_path) == []


def targets_of(order: Order) -> list[str]:
    return [name for name in TARGETS if name != "vllm"]


@pytest.mark.slow
def test_bash_reads_every_script(order: Order) -> None:
    for target in targets_of(order):
        scripts = {
            name: text
            for name, text in render_target(target, order).items()
            if name.endswith(".sh")
        }
        assert "bench.sh" in scripts
        for text in scripts.values():
            subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.slow
def test_every_file_carries_the_digests_and_no_tag_moves(order: Order) -> None:
    for target in targets_of(order):
        for name, text in render_target(target, order).items():
            if not name.endswith(".json"):
                assert order.stamp()["plan"] in text, name
                assert order.plan.inputs["fit"].sha256 in text, name
            assert ":latest" not in text


def test_models_that_llmctl_builds_are_refused_for_other_engines(cpu: Plan) -> None:
    with pytest.raises(InputError, match="'test'"):
        render_target("vllm", orders.order(cpu))


def test_bench_sh_uses_the_address_of_the_server(tmp_path: Path) -> None:
    order = orders.order(orders.plan(tmp_path, serve={"port": 9000, "max_new_tokens": 128}))
    scripts = {target: render_target(target, order)["bench.sh"] for target in targets_of(order)}
    forwarded = {
        target for target, text in scripts.items() if "default_url=http://127.0.0.1:8000" in text
    }
    assert forwarded == {"kubernetes"}
    assert all(
        "default_url=http://127.0.0.1:9000" in scripts[target]
        for target in scripts.keys() - forwarded
    )


def test_without_a_ttft_target_nothing_scales(tmp_path: Path) -> None:
    files = render_target("kubernetes", orders.order(orders.plan(tmp_path, sla={"e2e_p95_s": 8.0})))
    assert "autoscaling/scaledobject.yaml" not in files
    assert "no TTFT target" in files["monitoring/prometheusrule.yaml"]


def with_model(plan: Plan, source: str) -> Order:
    """The plan with another model, and no targets: there is nothing to simulate."""
    return orders.order(changed(plan, recipe__model__source=source, recipe__sla={}))


NASTY = [
    'x"\n privileged: true #',
    "x\n---\nkind: Secret",
    "$(LLMCTL_API_KEY)",
    "${PATH}`id`$(id)",
    "a'b\"c\\d",
    "%i%d$$HOME",
    "1e3",
    "no",
    "\u2028line\x85separators",
]
names = st.one_of(
    st.sampled_from(NASTY),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
)
many = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slow
@many
@given(source=names.filter(lambda name: not name.startswith(("/", ".", "~"))))  # of a folder
@example("random")
def test_a_model_s_name_is_quoted_as_data(gpu: Plan, source: str) -> None:
    """In YAML it is exactly the string, wherever it stands; nothing else in the file changes with
    it.
    """
    texts = [render_target("kubernetes", with_model(gpu, one)) for one in ("a/b", source)]
    # of equal files nothing needs to be read, and PyYAML is slow
    calm, wild = (
        yaml_files(dict(one.items() - other.items())) for one, other in (texts, texts[::-1])
    )
    found = wild["base/deployment.yaml"]["spec"]["template"]["metadata"]["annotations"]
    assert found["llmctl.io/model"] == source
    assert without(wild, {"annotations"}) == without(calm, {"annotations"}) or source == "random"


@many
@given(source=names.map(lambda name: f"/srv/{name}"))
@example("/")
@example("~/x")
@example("../x")
def test_a_folder_of_this_machine_is_refused_as_a_pod_s_model(gpu: Plan, source: str) -> None:
    with pytest.raises(InputError) as caught:
        render_target("kubernetes", with_model(gpu, source))
    assert f"model.source {source} " in caught.value.message


def without(data: Any, keys: set[str]) -> Any:
    if isinstance(data, dict):
        return {key: without(value, keys) for key, value in data.items() if key not in keys}
    return [without(value, keys) for value in data] if isinstance(data, list) else data


@pytest.mark.slow
@many
@given(source=names)
def test_a_model_s_name_is_one_word_of_a_command(vllm: Plan, source: str) -> None:
    """bash itself says what it would run."""
    source = source.replace("\x00", "")  # no command has one
    if source in ("", "random") or source.startswith("-"):  # the latter is refused
        return
    script = render_target("vllm", with_model(vllm, source))["serve.sh"].replace(
        "exec vllm", 'printf "%s\\0"'
    )
    done = subprocess.run(["bash", "-s"], input=script.encode(), capture_output=True, check=True)
    assert done.stdout.split(b"\0")[1].decode() == source


def test_compose_interpolates_nothing(gpu: Plan) -> None:
    service = services(with_model(gpu, "/models/${PATH}"))["llmctl"]
    assert service["labels"]["llmctl.model"] == "/models/$${PATH}"
    assert service["volumes"][-1]["source"] == "/models/$${PATH}"


def test_a_unit_s_value_cannot_add_a_line(gpu: Plan) -> None:
    with pytest.raises(InputError, match="ExecStartPre"):
        render_target("systemd", with_model(gpu, "/models\nExecStartPre=/bin/sh"))


def test_a_model_s_name_cannot_become_an_option(vllm: Plan) -> None:
    with pytest.raises(InputError, match="'--help'"):
        render_target("vllm", with_model(vllm, "--help"))


@pytest.mark.parametrize(
    "image", ["llmctl", "llmctl:latest", "x y:1", "x:1\n privileged: true", "../x:1"]
)
def test_images_are_pinned(cpu: Plan, image: str) -> None:
    with pytest.raises(InputError) as caught:
        render_target("kubernetes", orders.order(cpu, image=image))
    assert repr(image).strip("'") in caught.value.message


@pytest.mark.parametrize(
    "option", [{"namespace": 'x"\n'}, {"prometheus": 'http://x"\n'}, {"model_claim": "A b"}]
)
def test_options_that_are_not_valid_names_are_refused(option: dict[str, str]) -> None:
    (name,) = option
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
        orders.Options(**option)  # type: ignore[arg-type]


def test_an_unknown_target_is_named_with_the_nearest(cpu: Plan) -> None:
    with pytest.raises(InputError) as caught:
        render_target("kubernets", orders.order(cpu))
    assert says(caught.value.hint, "'kubernetes'")


def test_vllm_gets_the_flags_of_the_plan(vllm: Plan) -> None:
    policy = Settings(policy="past-future", parameters={})
    script = render_target("vllm", orders.order(changed(vllm, settings=policy)))["serve.sh"]
    for line in (
        "--max-model-len 512",
        "--gpu-memory-utilization 0.85",
        "--revision abc123",
        "--scheduler-cls toolkit.backends.vllm.scheduler.LlmctlScheduler",
    ):
        assert f"  {line}\n" in script
    assert "LLMCTL_VLLM_PLAN" in script
    (waiting,) = re.findall(r"  --max-num-queued-tokens (\d+)\n", script)
    twice = changed(vllm, settings=policy, recipe__sla={"ttft_p99_s": 4.0})
    script = render_target("vllm", orders.order(twice))["serve.sh"]
    (more,) = re.findall(r"  --max-num-queued-tokens (\d+)\n", script)
    assert int(more) == pytest.approx(2 * int(waiting), abs=1), "by a TTFT target of 4 s, not 2"
    script = render_target("vllm", orders.order(changed(vllm, settings=policy)))["serve.sh"]
    assert "start one for each, and before them llmctl serve plan.json --replica" in script


def test_vllm_is_not_started_by_the_laws_of_another_engine(gpu: Plan) -> None:
    with pytest.raises(InputError, match="'transformers'"):
        render_target("vllm", orders.order(gpu))


def test_a_policy_that_cannot_run_inside_vllm_is_refused(vllm: Plan) -> None:
    policy = Settings(policy="sequence", parameters={})
    with pytest.raises(InputError, match="'sequence'"):
        render_target("vllm", orders.order(changed(vllm, settings=policy)))


def test_the_threshold_is_the_largest_backlog_within_ttft() -> None:
    for most in (0, 1, 2, 3, 7, 8, 100, MAX_BACKLOG - 1, MAX_BACKLOG):
        assert largest(range(most + 1).__contains__) == most
    assert largest(range(2 * MAX_BACKLOG).__contains__) == MAX_BACKLOG


@pytest.mark.parametrize("recipe", ["llama-3.1-8b-h200", "tiny-llama-cpu"])
def test_without_a_trace_the_threshold_is_that_of_the_recipe_s(recipe: str) -> None:
    """One that is 1 would have an alert fire for ever."""
    plan = Scenario.open(ScenarioOptions(recipe=recipe_path(recipe), fit=recipe)).make_plan()
    shipped = read_trace(trace_path(plan.recipe.tune.trace))[0]
    found = waiting_threshold(plan, None)
    assert found.value == waiting_threshold(plan, shipped).value
    assert found.value is not None
    assert found.value > 10
    assert plan.recipe.tune.trace in found.source


def test_the_threshold_is_simulated_once(gpu: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(reckon, "largest", lambda keeps: asked.append(keeps) or 96)
    other = changed(gpu, recipe__sla={"ttft_p99_s": 4.321})  # no other test has simulated it
    files = render_target("kubernetes", orders.order(other))
    assert "96 at once keep" in files["monitoring/prometheusrule.yaml"]
    assert len(asked) == 1


def test_an_impossible_target_has_no_threshold_but_a_reason(gpu: Plan) -> None:
    hopeless = changed(gpu, recipe__sla={"ttft_p99_s": 1e-6})
    files = render_target("kubernetes", orders.order(hopeless))
    assert "autoscaling/scaledobject.yaml" not in files
    rules = files["monitoring/prometheusrule.yaml"]
    assert "LlmctlQueue" not in rules
    assert says(rules, "ttft_p99_s", "1e-06")


def test_there_is_no_threshold_where_nothing_waits(gpu: Plan) -> None:
    """The second batch of sequences waits for the whole first one."""
    policy = Settings(policy="sequence", parameters={"batch_size": 4})
    short = changed(gpu, recipe__sla={"ttft_p99_s": 0.3}, settings=policy)
    found = waiting_threshold(short, None)
    assert found.value is None
    assert "at once" in found.source


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"vllm"}))
def test_a_running_server_is_refused_for_targets_that_start_one(cpu: Plan, target: str) -> None:
    plan = changed(cpu, recipe__engine__name="openai", recipe__engine__url="http://127.0.0.1:9")
    with pytest.raises(InputError, match=f"http://127.0.0.1:9.*'{target}'"):
        render_target(target, orders.order(plan))
