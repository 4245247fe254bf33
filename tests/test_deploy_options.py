"""What a cluster may ask of the pods: nodes, several fronts, a way in from outside."""

from pathlib import Path
from typing import Any

import orders
import pytest
import yaml
from commands import llmctl
from operator_kinds import check_object
from rendered import objects_of
from said import says
from test_deploy_replicas import shipped  # noqa: F401 (a fixture)

from toolkit.deploy.order import Options, Order
from toolkit.deploy.render import render_target
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.files.plan import Plan

Objects = dict[str, dict[str, Any]]
WORLDS = ("kubernetes", "replicas")


@pytest.fixture
def plans(tmp_path: Path, shipped: Plan) -> dict[str, Plan]:  # noqa: F811
    gpu = orders.plan(tmp_path, **orders.GPU)
    return {"kubernetes": gpu, "replicas": shipped}


def order_of(plans: dict[str, Plan], world: str, **options: Any) -> Order:
    return orders.order(plans[world], **options)


def templates(objects: Objects) -> list[dict[str, Any]]:
    """Every pod's template."""
    specs = [one.get("spec", {}) for one in objects.values()]
    return [spec["template"] for spec in specs if "template" in spec]


@pytest.mark.parametrize("world", WORLDS)
def test_pods_of_one_kind_go_to_different_nodes(plans: dict[str, Plan], world: str) -> None:
    spread = [
        (template, template["spec"]["topologySpreadConstraints"])
        for template in templates(objects_of(order_of(plans, world)))
        if "topologySpreadConstraints" in template["spec"]
    ]
    assert len(spread) == {"kubernetes": 1, "replicas": 2}[world]
    for template, (one,) in spread:
        assert (one["topologyKey"], one["maxSkew"]) == ("kubernetes.io/hostname", 1)
        assert one["whenUnsatisfiable"] == "ScheduleAnyway", "one node still takes all"
        wanted = one["labelSelector"]["matchLabels"]
        assert wanted.items() <= template["metadata"]["labels"].items()


@pytest.mark.slow
def test_several_fronts_have_a_budget(plans: dict[str, Plan]) -> None:
    order = order_of(plans, "replicas", fronts=3)
    objects = objects_of(order)
    front = objects["base/deployment.yaml"]
    assert front["spec"]["replicas"] == 3
    budget = objects["base/front-poddisruptionbudget.yaml"]
    check_object(budget)
    assert budget["spec"]["maxUnavailable"] == 1
    chosen = budget["spec"]["selector"]["matchLabels"].items()
    assert chosen <= front["spec"]["template"]["metadata"]["labels"].items()
    names = [one["metadata"]["name"] for one in objects.values() if one["kind"] == budget["kind"]]
    assert len(set(names)) == len(names) == 2
    told = render_target("kubernetes", order)["base/deployment.yaml"]
    assert says(told, "They share", "Each front's own")
    assert "base/front-poddisruptionbudget.yaml" not in objects_of(order_of(plans, "replicas")), (
        "of one front no other is left"
    )


def test_several_fronts_are_refused_where_there_is_none(plans: dict[str, Plan]) -> None:
    with pytest.raises(InputError, match="--fronts 2"):
        render_target("kubernetes", order_of(plans, "kubernetes", fronts=2))


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_gateway_reaches_openai_s_routes_alone(plans: dict[str, Plan], world: str) -> None:
    objects = objects_of(order_of(plans, world, gateway="edge/public"))
    route = objects["gateway/httproute.yaml"]
    policy = objects["gateway/networkpolicy.yaml"]
    for one in (route, policy, objects["gateway/kustomization.yaml"]):
        check_object(one)
    assert route["spec"]["parentRefs"] == [{"namespace": "edge", "name": "public"}]
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "0s"}, "a proxy's default would cut streams"
    (backend,) = rule["backendRefs"]
    service = objects["base/service.yaml"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    assert (
        policy["spec"]["podSelector"] == objects["base/networkpolicy.yaml"]["spec"]["podSelector"]
    )
    (callers,) = policy["spec"]["ingress"]
    edge = {"matchLabels": {"kubernetes.io/metadata.name": "edge"}}
    assert callers["from"] == [{"namespaceSelector": edge}]
    assert not any(name.startswith("gateway/") for name in objects_of(order_of(plans, world)))


@pytest.mark.parametrize("gateway", ["public", "edge/public/more", "Edge/public", 'edge/x"'])
def test_a_gateway_is_a_namespace_and_a_name(gateway: str) -> None:
    with pytest.raises(InputError, match="--gateway"):
        Options(gateway=gateway)


def test_the_command_line_takes_several_fronts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shipped: Plan,  # noqa: F811
) -> None:
    monkeypatch.chdir(tmp_path)
    write_file(shipped, "plan.json")
    assert (
        llmctl(
            "render",
            "plan.json",
            "--target",
            "kubernetes",
            "--fronts",
            2,
            "--gateway",
            "edge/public",
        )
        == 0
    )
    front = yaml.safe_load(Path("kubernetes/base/deployment.yaml").read_text())
    assert front["spec"]["replicas"] == 2
    route = yaml.safe_load(Path("kubernetes/gateway/httproute.yaml").read_text())
    assert route["spec"]["parentRefs"] == [{"namespace": "edge", "name": "public"}]
