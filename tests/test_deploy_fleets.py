"""A fleet of an engine's own servers, rendered: each kind has its units, services or objects, with
its flags, devices and nodes, and one front knows all by kind.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import orders
import pytest
import yaml
from operator_kinds import check_object
from orders import changed
from rendered import check_compose, complaints, needs_systemd, objects_of, services
from said import says
from test_deploy_replicas import command_in, fronts, parsed

from toolkit.backends.vllm.backend import VllmBackend
from toolkit.cli.basis import plan_from
from toolkit.deploy.order import Order
from toolkit.deploy.reckon import waiting_threshold
from toolkit.deploy.render import manifest_of, render_target
from toolkit.deploy.replicas import MAX_KIND_NAME, Replication
from toolkit.deploy.running import stop
from toolkit.errors import InputError
from toolkit.files.plan import Plan, PlannedPolicy
from toolkit.serve.assemble import model_name

FLEET = """\
fleet:
  - {recipe: llama-3.1-8b-h200, fit: llama-3.1-8b-h200, workers: 1}
  - {recipe: llama-3.1-8b-a100-80gb, fit: llama-3.1-8b-a100-80gb, workers: 2}
"""
FAST = "llama-3.1-8b-h200"
SLOW = "llama-3.1-8b-a100-80gb"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two kinds of shipped recipes: one server on an H200, and two on A100s."""
    path = tmp_path_factory.mktemp("fleet") / "fleet.yaml"
    path.write_text(FLEET)
    return plan_from(path, None, None)[0]


@pytest.fixture
def order(fleet: Plan) -> Order:
    return orders.order(fleet, folder="/srv/llmctl", program=sys.executable)


def labels(order: Order) -> list[str]:
    return [kind.label for kind in Replication(order).kinds]


def wide(plan: Plan, **changes: Any) -> Plan:
    """The plan with changes in its second kind."""
    (second,) = plan.others
    return changed(plan, others=[changed(second, **changes)])


@pytest.mark.slow
def test_the_front_knows_each_replica_by_its_kind(order: Order) -> None:
    fast, slow = labels(order)
    found = fronts(order)
    assert [word for word in found["systemd"] if "http" in word] == [
        f"{FAST}=http://127.0.0.1:8001",
        f"{SLOW}=http://127.0.0.1:8002",
        f"{SLOW}=http://127.0.0.1:8003",
    ]
    assert [word for word in found["compose"] if "http" in word] == [
        f"{FAST}=http://{fast}-0:8000",
        f"{SLOW}=http://{slow}-0:8000",
        f"{SLOW}=http://{slow}-1:8000",
    ]
    assert [word for word in found["kubernetes"] if "k8s" in word] == [
        f"{kind.kind.recipe.name}=k8s://default/{kind.name}s:8000"
        for kind in Replication(order).kinds
    ]
    for target, words in found.items():
        given = parsed(words)
        assert len(given["replicas" if target == "kubernetes" else "replica"]) == (
            2 if target == "kubernetes" else 3
        )
        longest = max(kind.drain.value for kind in Replication(order).kinds)
        assert given["shutdown_timeout"] == longest


@pytest.mark.slow
def test_each_kind_has_a_unit_with_a_plan_of_its_own(order: Order, fleet: Plan) -> None:
    files = render_target("systemd", order)
    for number, kind in enumerate(Replication(order).kinds):
        unit = files[f"{kind.name}@.service"]
        assert f"LoadCredential=plan.json:/srv/llmctl/plan-{kind.label}.json" in unit
        assert f"EnvironmentFile=/srv/llmctl/{kind.label}-%i.env" in unit
        alone = Plan.model_validate(json.loads(files[f"plan-{kind.label}.json"]))
        assert (alone.recipe.name, alone.others) == (fleet.kinds[number].recipe.name, [])
        assert alone.policy.parameters == fleet.policy_of(number)
        words = [word.replace("${PORT}", "8001") for word in command_in(unit)[1:]]
        assert parsed(words)["workers"] == 1
    assert files["plan.json"] == order.text
    fast, slow = labels(order)
    devices = [
        re.findall(r"^(?:PORT|CUDA_VISIBLE_DEVICES)=(.*)$", files[f"{name}.env"], re.MULTILINE)
        for name in (f"{fast}-0", f"{slow}-0", f"{slow}-1")
    ]
    assert devices == [["8001", "0"], ["8002", "1"], ["8003", "2"]]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in files[f"{slow}-1.env"]


def test_the_front_and_the_target_hold_the_units_of_all_kinds(
    order: Order, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = render_target("systemd", order)
    fast, slow = Replication(order).kinds
    units = [f"{fast.name}@0.service", f"{slow.name}@0.service", f"{slow.name}@1.service"]
    for name, key in ((f"{order.name}.service", "After="), (f"{order.name}.target", "Wants=")):
        line = files[name].rpartition(key)[2].splitlines()[0]
        assert [unit for unit in line.split() if "@" in unit] == units
    ran: list[list[str]] = []
    monkeypatch.setattr("toolkit.deploy.running._check_systemd", lambda: None)
    monkeypatch.setattr("toolkit.deploy.running._run", ran.append)
    stop(tmp_path, manifest_of(files, "systemd", order.name, {}))
    patterns = [f"{kind.name}@*.service" for kind in (fast, slow)]
    assert ran[0][:3] == ["systemctl", "stop", f"{order.name}.target"]
    assert sorted(ran[0][4:]) == sorted(patterns)


@pytest.mark.slow
@needs_systemd
def test_systemd_finds_nothing_in_a_fleet_s_units(order: Order, tmp_path: Path) -> None:
    assert complaints(order, tmp_path) == []
    assert len(list(tmp_path.glob("*@0.service"))) == 2


def test_compose_gives_each_replica_its_kind_s_flags_and_gpu(order: Order, fleet: Plan) -> None:
    found = services(order)
    (fast, slow) = labels(order)
    names = [f"{fast}-0", f"{slow}-0", f"{slow}-1"]
    assert sorted(found) == sorted(["llmctl", "models", *names])
    for name, number, device in zip(names, (0, 1, 1), "012", strict=True):
        (reserved,) = found[name]["deploy"]["resources"]["reservations"]["devices"]
        assert reserved["device_ids"] == [device]
        own = VllmBackend().described(fleet.alone(number), model_name(fleet))
        flags = [word for words, _ in own.flags for word in words]
        command = found[name]["command"]
        assert command[: len(own.command) + len(flags)] == [*own.command, *flags]
    assert list(found["llmctl"]["depends_on"]) == names


@pytest.mark.slow
def test_a_fleet_s_compose_is_as_the_specification_says(order: Order, tmp_path: Path) -> None:
    check_compose(order, tmp_path)


@pytest.mark.slow
def test_kubernetes_takes_every_object_of_a_fleet(order: Order) -> None:
    kinds = []
    named = []
    for data in objects_of(order).values():
        kinds.append(data["kind"])
        if data["kind"] != "Kustomization":
            named.append((data["kind"], data["metadata"]["name"]))
        check_object(data)
    assert len(set(named)) == len(named), "each object has a name of its own"
    counts = {kind: kinds.count(kind) for kind in kinds}
    for kind in ("StatefulSet", "PodDisruptionBudget", "ScaledObject"):
        assert counts[kind] == 2, "one for each kind"
    for kind in ("Service", "NetworkPolicy", "PodMonitor"):
        assert counts[kind] == 3, "one for each kind, and the front's"
    assert (counts["Deployment"], counts["PrometheusRule"]) == (1, 1)


def sets(order: Order) -> list[dict[str, Any]]:
    found = objects_of(order)
    return [found[f"core/statefulset-{label}.yaml"] for label in labels(order)]


@pytest.mark.slow
def test_each_kind_s_pods_go_to_nodes_with_its_gpu(order: Order, fleet: Plan) -> None:
    for number, one in enumerate(sets(order)):
        check_object(one)
        assert one["spec"]["replicas"] == (1, 2)[number]
        pod = one["spec"]["template"]["spec"]
        affinity = pod["affinity"]["nodeAffinity"]
        (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        (expression,) = term["matchExpressions"]
        assert all(("H200", "A100")[number] in value for value in expression["values"])
        assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    labelled = wide(fleet, nodes={"pool": "old"}, recipe__engine__tensor_parallel_size=4)
    pod = sets(orders.order(labelled))[1]["spec"]["template"]["spec"]
    assert (pod["nodeSelector"], "affinity" in pod) == ({"pool": "old"}, False)
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


@pytest.mark.slow
def test_a_kind_s_probes_rest_on_its_own_time_of_loading(fleet: Plan) -> None:
    measured = wide(fleet, fit__engine__load_s=150.0)
    seconds = []
    for one in sets(orders.order(measured)):
        probe = one["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
        seconds.append(probe["periodSeconds"] * probe["failureThreshold"])
    assert seconds == [1800, 780]


def test_each_kind_is_scaled_by_its_own_queue(order: Order, fleet: Plan) -> None:
    found = objects_of(order)
    (group,) = found["prometheusrule.yaml"]["spec"]["groups"]
    alerts = [r["expr"] for r in group["rules"] if r["alert"] == "LlmctlReplicaQueue"]
    for number, kind in enumerate(Replication(order).kinds):
        scaled = found[f"scaledobject-{kind.label}.yaml"]
        assert scaled["metadata"]["name"] == kind.name
        spec = scaled["spec"]
        assert spec["scaleTargetRef"] == {"kind": "StatefulSet", "name": kind.name}
        (trigger,) = spec["triggers"]
        recipe = changed(
            fleet.kinds[number].recipe, workers=1, sla=fleet.recipe.sla, tune=fleet.recipe.tune
        )
        alone = changed(fleet.alone(number), workers=1, recipe=recipe)
        threshold = waiting_threshold(alone, None).value
        assert threshold is not None
        assert trigger["metadata"]["threshold"] == str(threshold // 2)
        series = f'vllm:num_requests_waiting{{namespace="default",job="default/{kind.name}"}}'
        assert trigger["metadata"]["query"] == f"sum({series})"
        assert alerts[number] == f"avg({series}) > {threshold}"
    patches = found["kustomization.yaml"]["patches"]
    assert [one["target"]["name"] for one in patches] == [k.name for k in Replication(order).kinds]


@pytest.mark.slow
def test_every_value_of_a_kind_is_explained_with_its_name(order: Order) -> None:
    for target in ("systemd", "compose", "kubernetes"):
        explained = render_target(target, order)["EXPLAIN.md"]
        for count, name in ((1, FAST), (2, SLOW)):
            assert f"| {name}: replicas | {count} | fleet: workers of this kind |" in explained
            assert f"| {name}: replica: drain | " in explained
            if target != "systemd":
                assert f"| {name}: replica --max-num-seqs | " in explained


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicas": 4}, "--replicas 4"),
        ({"gpu_products": ("NVIDIA-H200",)}, "--gpu-product"),
    ],
)
def test_options_about_one_kind_are_refused(
    fleet: Plan, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(InputError, match=named):
        render_target("kubernetes", orders.order(fleet, **options))


def test_one_image_is_refused_for_kinds_on_different_devices(fleet: Plan) -> None:
    """Of one device, kinds may share an image."""
    given = orders.order(fleet, replica_image="x/vllm:1")
    assert {kind.image.value for kind in Replication(given).kinds} == {"x/vllm:1"}
    mixed = wide(fleet, recipe__hardware__device="cpu")
    with pytest.raises(InputError) as caught:
        render_target("compose", orders.order(mixed, replica_image="x/vllm:1"))
    assert says(caught.value.message, "cpu", "cuda")


def test_what_a_fleet_of_servers_cannot_be_rendered_for_is_said(fleet: Plan) -> None:
    with pytest.raises(InputError) as caught:
        render_target("sglang", orders.order(fleet))
    assert says(caught.value.message, FAST, SLOW)
    assert says(caught.value.hint, "kubernetes")
    ours = changed(fleet, policy=PlannedPolicy(name="past-future", parameters={}))
    with pytest.raises(InputError, match=f"'{FAST}'.*'past-future'"):
        render_target("compose", orders.order(ours))


def test_names_of_kinds_are_short_and_keep_the_kind(fleet: Plan) -> None:
    long = [changed(fleet, recipe__name=name) for name in (f"{'x' * 50}a", f"{'x' * 50}b")]
    names = [Replication(orders.order(plan)).kinds[1].name for plan in long]
    assert max(map(len, names)) <= MAX_KIND_NAME
    assert len(set(names)) == 2
    assert all(name.endswith(Replication(orders.order(fleet)).kinds[1].label) for name in names)


def test_a_fleet_s_yaml_is_the_same_each_time(order: Order) -> None:
    assert render_target("kubernetes", order) == render_target("kubernetes", order)
    files = render_target("kubernetes", order)
    resources = yaml.safe_load(files["core/kustomization.yaml"])["resources"]
    assert {f"core/{name}" for name in resources} <= files.keys()


def test_a_fleet_on_ray_has_an_actor_for_each_server(order: Order) -> None:
    files = render_target("ray", order)
    told = files["EXPLAIN.md"]
    for name, count, gpu in ((FAST, 1, "H200"), (SLOW, 2, "A100")):
        where = f"fleet; on nodes of Ray with ray.io/accelerator-type={gpu}"
        assert f"| actors of {name} | {count}, each with 1 CPU and 1 GPU | {where} |" in told
    assert "--workers" not in files["serve.sh"]
    assert "LlmctlReplicaQueue" not in files["alerts.yaml"], "one page has the queues of all kinds"
