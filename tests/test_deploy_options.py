"""What a cluster may ask of the pods: nodes, classes, a registry, several fronts, a way in from
outside. Each option is in the objects, and EXPLAIN.md names it.
"""

from pathlib import Path
from typing import Any

import orders
import pytest
import yaml
from commands import llmctl
from operator_kinds import check_object
from rendered import objects_of
from test_deploy_replicas import parsed, shipped  # noqa: F401 (a fixture)

from toolkit.deploy.order import Options, Order
from toolkit.deploy.render import render_target
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.files.plan import Plan

Objects = dict[str, dict[str, Any]]
WORLDS = ("kubernetes", "replicas")
CLASSES: dict[str, Any] = {
    "image_pull_secrets": ("registry", "second.registry"),
    "priority_class": "serving",
    "runtime_class": "nvidia",
    "storage_class": "fast-ssd",
}


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


def has_gpus(template: dict[str, Any]) -> bool:
    (container,) = template["spec"]["containers"]
    return "nvidia.com/gpu" in container["resources"]["limits"]


@pytest.mark.parametrize("world", WORLDS)
def test_every_pod_has_the_classes_and_the_secrets(plans: dict[str, Plan], world: str) -> None:
    objects = objects_of(order_of(plans, world, **CLASSES))
    for one in objects.values():
        check_object(one)
    found = templates(objects)
    assert any(map(has_gpus, found))
    for template in found:
        pod = template["spec"]
        assert pod["imagePullSecrets"] == [{"name": "registry"}, {"name": "second.registry"}]
        assert pod["priorityClassName"] == "serving"
        # A node without GPUs may not have the handler of this class.
        assert pod.get("runtimeClassName") == ("nvidia" if has_gpus(template) else None)


@pytest.mark.parametrize("world", WORLDS)
def test_no_class_is_named_unless_it_was_asked_for(plans: dict[str, Plan], world: str) -> None:
    for template in templates(objects_of(order_of(plans, world))):
        keys = {"imagePullSecrets", "priorityClassName", "runtimeClassName"}
        assert not keys & template["spec"].keys()


@pytest.mark.parametrize("world", WORLDS)
def test_explain_md_names_each_option(plans: dict[str, Plan], world: str) -> None:
    explained = render_target("kubernetes", order_of(plans, world, **CLASSES))["EXPLAIN.md"]
    for key, value in (
        ("imagePullSecrets", "registry, second.registry"),
        ("priorityClassName", "serving"),
        ("runtimeClassName", "nvidia"),
        ("topologySpreadConstraints", "kubernetes.io/hostname"),
        ("HTTPRoute", "none"),
    ):
        assert f"| {key} | {value} |" in explained


def test_claims_are_of_the_named_class(plans: dict[str, Plan]) -> None:
    own = objects_of(order_of(plans, "replicas", **CLASSES))
    (claim,) = own["core/statefulset.yaml"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast-ssd"
    named = objects_of(order_of(plans, "kubernetes", model_claim="models", **CLASSES))
    assert named["models-claim.yaml"]["spec"]["storageClassName"] == "fast-ssd"
    default = objects_of(order_of(plans, "kubernetes", model_claim="models"))
    assert "storageClassName" not in default["models-claim.yaml"]["spec"]


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
    front = objects["core/deployment.yaml"]
    assert front["spec"]["replicas"] == 3
    budget = objects["core/front-poddisruptionbudget.yaml"]
    check_object(budget)
    assert budget["spec"]["maxUnavailable"] == 1
    chosen = budget["spec"]["selector"]["matchLabels"].items()
    assert chosen <= front["spec"]["template"]["metadata"]["labels"].items()
    names = [one["metadata"]["name"] for one in objects.values() if one["kind"] == budget["kind"]]
    assert len(set(names)) == len(names) == 2
    (line,) = [
        line
        for line in render_target("kubernetes", order)["EXPLAIN.md"].splitlines()
        if line.startswith("| front: replicas | 3 |")
    ]
    for said in ("shared:", "each front's own:", "limits of keys"):
        assert said in line
    assert "core/front-poddisruptionbudget.yaml" not in objects_of(order_of(plans, "replicas")), (
        "of one front no other is left"
    )


def test_several_fronts_are_refused_where_there_is_none(plans: dict[str, Plan]) -> None:
    with pytest.raises(InputError, match="--fronts 2"):
        render_target("kubernetes", order_of(plans, "kubernetes", fronts=2))


GATEWAY = {"gateway": "edge/public", "hostname": "llm.example.com"}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_a_gateway_reaches_openai_s_routes_alone(plans: dict[str, Plan], world: str) -> None:
    order = order_of(plans, world, **GATEWAY)
    objects = objects_of(order)
    route = objects["httproute.yaml"]
    check_object(route)
    assert route["spec"]["parentRefs"] == [{"namespace": "edge", "name": "public"}]
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "0s"}, "a proxy's default would cut streams"
    (backend,) = rule["backendRefs"]
    service = objects["core/service.yaml"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"] in [port["port"] for port in service["spec"]["ports"]]
    # Not every cluster has the CRDs: core/ needs none.
    assert "httproute.yaml" in objects["kustomization.yaml"]["resources"]
    callers = objects["core/networkpolicy.yaml"]["spec"]["ingress"][0]["from"]
    edge = {"matchLabels": {"kubernetes.io/metadata.name": "edge"}}
    assert {"namespaceSelector": edge} in callers
    explained = render_target("kubernetes", order)["EXPLAIN.md"]
    for key in ("| HTTPRoute | edge/public |", "| HTTPRoute: timeouts | 0s |",
                "| limits of the proxy | yours |"):  # fmt: skip
        assert key in explained


@pytest.mark.parametrize("world", WORLDS)
def test_behind_a_gateway_the_proxy_is_one_client(plans: dict[str, Plan], world: str) -> None:
    args = []
    for options in (GATEWAY, {}):
        front = objects_of(order_of(plans, world, **options))["core/deployment.yaml"]
        args.append(front["spec"]["template"]["spec"]["containers"][0]["args"])
    assert parsed(args[0])["client_share"] == 1.0
    assert "--client-share" not in args[1]


def test_an_image_without_a_registry_has_a_line_that_pushes_it(plans: dict[str, Plan]) -> None:
    explained = render_target("kubernetes", order_of(plans, "kubernetes"))["EXPLAIN.md"]
    (line,) = [line for line in explained.splitlines() if line.startswith("| registry of llmctl:")]
    assert "docker push REGISTRY/llmctl:" in line
    assert "--image REGISTRY/llmctl:" in line
    named = order_of(plans, "kubernetes", image="registry.example.com/llmctl:1.0")
    assert "| registry of " not in render_target("kubernetes", named)["EXPLAIN.md"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"storage_class": "Fast"}, "--storage-class"),
        ({"priority_class": "a b"}, "--priority-class"),
        ({"runtime_class": 'x"\n'}, "--runtime-class"),
        ({"image_pull_secrets": ("ok", "")}, "--image-pull-secret"),
        ({"gateway": "public"}, "--gateway"),
        ({"gateway": "edge/public", "hostname": "*.x"}, "--hostname"),
        ({"hostname": "llm.example.com"}, "--hostname"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        Options(**options)


def test_the_command_line_takes_all_of_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shipped: Plan,  # noqa: F811
) -> None:
    monkeypatch.chdir(tmp_path)
    write_file(shipped, "plan.json")
    words = (
        "--fronts 2 --storage-class fast-ssd --image-pull-secret a --image-pull-secret b "
        "--priority-class serving --runtime-class nvidia "
        "--gateway edge/public --hostname llm.example.com"
    )
    assert llmctl("render", "plan.json", "--target", "kubernetes", *words.split()) == 0
    found = yaml.safe_load(Path("kubernetes/core/statefulset.yaml").read_text())["spec"]
    pod = found["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert (pod["priorityClassName"], pod["runtimeClassName"]) == ("serving", "nvidia")
    assert found["volumeClaimTemplates"][0]["spec"]["storageClassName"] == "fast-ssd"
    route = yaml.safe_load(Path("kubernetes/httproute.yaml").read_text())
    assert route["spec"]["hostnames"] == ["llm.example.com"]
    front = yaml.safe_load(Path("kubernetes/core/deployment.yaml").read_text())
    assert front["spec"]["replicas"] == 2
