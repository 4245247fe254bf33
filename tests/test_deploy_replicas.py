"""Replicas of an engine's own servers behind a front: the files of systemd, Compose and Kubernetes,
checked with the validators of their readers, and with the command line of `llmctl serve`.
"""

import shlex
from pathlib import Path
from typing import Any

import orders
import pytest
import typer
from operator_kinds import check_object
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

from toolkit.backends.vllm.backend import VllmBackend, command_of
from toolkit.cli import serve
from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.deploy.order import Order
from toolkit.deploy.reckon import drain_s, startup_s, waiting_threshold
from toolkit.deploy.render import render_target
from toolkit.deploy.values import Values
from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Settings
from toolkit.server.options import ServerOptions

NAME = "llmctl-llama-3-1-8b-h200-1d7ac0"


@pytest.fixture(scope="module")
def shipped() -> Plan:
    """A shipped recipe of engine vllm, with its shipped fit."""
    name = "llama-3.1-8b-h200"
    return Scenario.open(ScenarioOptions(recipe=recipe_path(name), fit=name)).make_plan()


@pytest.fixture
def order(shipped: Plan) -> Order:
    return orders.order(shipped, replicas=3, folder="/srv/llmctl")


def built(plan: Plan) -> Plan:
    """The same for two replicas on CPUs, with a model that llmctl builds."""
    return changed(plan, recipe__model__source="random", recipe__hardware__device="cpu", workers=2)


def command_in(unit: str) -> list[str]:
    (line,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    return shlex.split(line.removeprefix("ExecStart="))


def fronts(order: Order) -> dict[str, list[str]]:
    """The words after `llmctl` of the front, by target."""
    container = objects_of(order)["base/deployment.yaml"]["spec"]["template"]["spec"]["containers"][
        0
    ]
    return {
        "systemd": command_in(render_target("systemd", order)[f"{order.name}.service"])[1:],
        "compose": services(order)["llmctl"]["command"][1:],
        "kubernetes": container["args"],
    }


@pytest.mark.slow
def test_the_front_knows_all_replicas_and_drains_as_long_as_they(order: Order) -> None:
    found = fronts(order)
    ports = [f"http://127.0.0.1:{port}" for port in (8001, 8002, 8003)]
    assert [word for word in found["systemd"] if word.startswith("http")] == ports
    names = [f"http://replica-{number}:8000" for number in range(3)]
    assert [word for word in found["compose"] if word.startswith("http")] == names
    where = found["kubernetes"][found["kubernetes"].index("--replica") + 1]
    assert where == f"dns://{NAME}-replicas.default.svc:8000"
    for words in found.values():
        assert words[0] == "serve"
        given = parsed(words)
        assert given["replica"]
        assert given["shutdown_timeout"] == drain_s(order).value > 30


def parsed(words: list[str]) -> dict[str, Any]:
    """What the real command line makes of the words after `llmctl serve`."""
    single = typer.Typer(add_completion=False)
    single.command()(serve.command)
    return typer.main.get_command(single).make_context("serve", words[1:]).params


def test_serve_takes_the_words_of_a_replica(order: Order) -> None:
    unit = render_target("systemd", order)[f"{NAME}-replica@.service"]
    words = [word.replace("${PORT}", "8001") for word in command_in(unit)[1:]]
    found = parsed(words)
    assert (found["workers"], found["port"], found["host"]) == (1, 8001, "127.0.0.1")


@pytest.mark.slow
@needs_systemd
def test_systemd_finds_nothing_in_the_units(order: Order, tmp_path: Path) -> None:
    assert complaints(order, tmp_path) == []
    assert len(list(tmp_path.glob("*@0.service"))) == 1


def test_cpus_are_divided_where_the_recipe_sets_threads(shipped: Plan) -> None:
    plan = changed(built(shipped), recipe__engine__threads=2)
    files = render_target("systemd", orders.order(plan, folder="/srv/llmctl"))
    name = orders.order(plan).name
    assert "CPUS=2,3\n" in files["replica-1.env"]
    assert "CUDA" not in files["replica-1.env"]
    words = command_in(files[f"{name}-replica@.service"])
    assert words[:3] == ["/usr/bin/taskset", "--cpu-list", "${CPUS}"]


def test_a_user_s_name_is_short_and_of_its_deployment(shipped: Plan) -> None:
    def user(recipe: str) -> str:
        order = orders.order(changed(shipped, recipe__name=recipe))
        return Values(order, front=True, cluster=False).user

    assert user("a") == "llmctl-a"
    long = [user(f"{'x' * 30}{end}") for end in "ab"]
    assert max(map(len, long)) <= 31
    assert long[0] != long[1]


@pytest.mark.slow
def test_compose_is_as_its_specification_says(order: Order, tmp_path: Path) -> None:
    check_compose(order, tmp_path)


@pytest.mark.slow
def test_kubernetes_takes_every_object(order: Order) -> None:
    kinds = []
    for data in objects_of(order).values():
        kinds.append(data["kind"])
        check_object(data)
    assert sorted(kinds) == sorted([
        *("Deployment", "Service", "Service", "StatefulSet", "PodDisruptionBudget"),
        *("NetworkPolicy", "NetworkPolicy"),
        *("PodMonitor", "PodMonitor", "PrometheusRule", "ScaledObject"),
        *("Kustomization", "Kustomization", "Kustomization"),
    ])  # fmt: skip


@pytest.mark.slow
@needs_kubectl
def test_kustomize_builds_the_whole_folder(order: Order, tmp_path: Path) -> None:
    for built, replicas in zip(kustomized(order, tmp_path), (3, 3, None), strict=True):
        found = {one["kind"]: one for one in built}
        assert found["StatefulSet"]["spec"].get("replicas") == replicas
        assert found["Deployment"]["spec"]["replicas"] == 1


@pytest.mark.slow
def test_each_replica_keeps_its_model_unless_a_claim_is_named(order: Order, shipped: Plan) -> None:
    spec = objects_of(order)["base/statefulset.yaml"]["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "32Gi"
    assert spec["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }
    found = objects_of(orders.order(shipped, replicas=3, model_claim="weights"))
    spec = found["base/statefulset.yaml"]["spec"]
    assert "volumeClaimTemplates" not in spec
    claims = [one.get("persistentVolumeClaim") for one in spec["template"]["spec"]["volumes"]]
    assert {"claimName": "weights"} in claims
    assert found["base/models-claim.yaml"]["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.slow
def test_a_new_router_or_prediction_starts_no_replica_again(shipped: Plan) -> None:
    other = changed(shipped, outcome__metrics={"goodput_rps": 1.0})
    sets = [objects_of(orders.order(plan))["base/statefulset.yaml"] for plan in (shipped, other)]
    assert sets[0] == sets[1]


def test_the_threshold_is_of_one_replica(shipped: Plan) -> None:
    four = changed(shipped, workers=4, recipe__workers=4)
    found = Values(orders.order(four), front=True, cluster=True)
    assert found.count.value == 4
    assert found.threshold.value == waiting_threshold(shipped, None).value
    assert found.gpus.value == 1


def test_a_container_gets_the_flags_that_llmctl_serve_gives(
    shipped: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The predictions hold for these flags alone."""
    plan = changed(
        shipped, recipe__engine__kv_cache_memory_mib=64, recipe__engine__tensor_parallel_size=2
    )
    monkeypatch.setattr("toolkit.backends.vllm.backend.saved_model", lambda model, _: model.source)
    words = command_of(plan, ServerOptions(model="m"), tmp_path).words("127.0.0.1", 8000)
    found = [word for flag, _ in VllmBackend().described(plan, "m").flags for word in flag]
    counted = ["--scheduler-cls", "toolkit.backends.vllm.iterations.counted_scheduler"]
    rest = [word for word in words[words.index("--served-model-name") :] if word not in counted]
    assert found == rest[: rest.index("--shutdown-timeout")]


def test_our_policies_need_an_image_with_llmctl(shipped: Plan) -> None:
    policy = Settings(policy="past-future", parameters={})
    plan = changed(shipped, settings=policy, recipe__sla={})
    files = render_target("kubernetes", orders.order(plan))
    pod = objects_of(orders.order(plan))["base/statefulset.yaml"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "llmctl-vllm:0.1.0"
    assert {"name": "LLMCTL_VLLM_PLAN", "value": "/etc/llmctl/plan.json"} in container["env"]
    assert "plan" in {mount["name"] for mount in container["volumeMounts"]}
    assert "docker build -t llmctl-vllm:0.1.0" in files["base/statefulset.yaml"]
    files = render_target("kubernetes", orders.order(plan, replica_image="x/vllm:1"))
    assert '"x/vllm:1"' in files["base/statefulset.yaml"]
    with pytest.raises(InputError, match="x/vllm"):
        render_target("kubernetes", orders.order(plan, replica_image="x/vllm"))


@pytest.mark.parametrize("target", ["compose", "kubernetes"])
def test_a_model_that_llmctl_builds_is_refused_for_containers(shipped: Plan, target: str) -> None:
    plan = built(shipped)
    with pytest.raises(InputError, match=f"'{plan.recipe.name}'"):
        render_target(target, orders.order(plan))
    assert render_target("systemd", orders.order(plan))


def test_probes_rest_on_the_measured_time_of_loading(shipped: Plan) -> None:
    plan = changed(shipped, fit__engine__load_s=150.0)
    found = startup_s(orders.order(plan))
    assert found.value == 780, "three times 150 s, and 15 GiB at 50 MB/s, in whole minutes"
    assert "loading took 150 s" in found.source
    spec = objects_of(orders.order(plan))["base/statefulset.yaml"]["spec"]["template"]["spec"]
    probe = spec["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 780
