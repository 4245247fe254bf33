"""Prometheus' operator and Grafana's sidecar find what is rendered for them."""

from typing import Any

import orders
import pytest
from rendered import objects_of
from test_deploy_replicas import shipped  # noqa: F401 (a fixture)

from toolkit.files.plan import Plan

# grafana.sidecar.dashboards of kube-prometheus-stack 88.5.3: label and labelValue. It searches
# ConfigMaps of all namespaces.
SIDECAR = {"grafana_dashboard": "1"}


@pytest.fixture(params=["kubernetes", "replicas"])
def objects(
    request: pytest.FixtureRequest,
    tmp_path: Any,
    shipped: Plan,  # noqa: F811
) -> list[dict[str, Any]]:
    plan = shipped if request.param == "replicas" else orders.plan(tmp_path)
    return [*objects_of(orders.order(plan)).values()]


def test_the_dashboard_has_the_label_of_the_sidecar(objects: list[dict[str, Any]]) -> None:
    generators = [each for one in objects for each in one.get("configMapGenerator", ())]
    (board,) = [each for each in generators if each["files"] == ["dashboard.json"]]
    assert SIDECAR.items() <= board["options"]["labels"].items()


def test_every_monitor_selects_pods_with_its_port(objects: list[dict[str, Any]]) -> None:
    pods = [one["spec"]["template"] for one in objects if "template" in one.get("spec", {})]
    for monitor in (one for one in objects if one["kind"] == "PodMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        assert chosen
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        for pod in chosen:
            (container,) = pod["spec"]["containers"]
            assert endpoint["port"] in [port["name"] for port in container["ports"]]
