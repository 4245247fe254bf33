"""A cluster of kube-prometheus-stack with its default values reads all that is rendered for it."""

from typing import Any

import orders
import pytest
from operator_kinds import check_object
from rendered import objects_of
from test_deploy_replicas import shipped  # noqa: F401 (a fixture)

from toolkit.deploy.order import Options
from toolkit.errors import InputError
from toolkit.files.plan import Plan

RELEASE = "kps"
# The selectors of the chart's version 88.5.3 (values.yaml, templates/prometheus/prometheus.yaml)
# where a release has the default values (...SelectorNilUsesHelmValues: true). Namespaces are not
# restricted. Grafana's sidecar searches ConfigMaps of all namespaces.
SELECTORS = {
    "PodMonitor": {"release": RELEASE},  # prometheusSpec.podMonitorSelector
    "PrometheusRule": {"release": RELEASE},  # prometheusSpec.ruleSelector
}
SIDECAR = {"grafana_dashboard": "1"}  # grafana.sidecar.dashboards: label and labelValue


@pytest.fixture(params=["kubernetes", "replicas"])
def objects(
    request: pytest.FixtureRequest,
    tmp_path: Any,
    shipped: Plan,  # noqa: F811
) -> list[dict[str, Any]]:
    plan = shipped if request.param == "replicas" else orders.plan(tmp_path)
    return [*objects_of(orders.order(plan, prometheus_release=RELEASE)).values()]


def test_monitors_and_rules_have_the_selectors_labels(
    objects: list[dict[str, Any]],
) -> None:
    kinds = set()
    for one in objects:
        if one["kind"] in SELECTORS:
            kinds.add(one["kind"])
            check_object(one)
            assert SELECTORS[one["kind"]].items() <= one["metadata"]["labels"].items()
    assert kinds == SELECTORS.keys()


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


def test_without_a_release_nothing_has_the_label(tmp_path: Any) -> None:
    for one in objects_of(orders.order(orders.plan(tmp_path))).values():
        assert "release" not in one.get("metadata", {}).get("labels", {})


def test_a_release_s_name_is_checked() -> None:
    with pytest.raises(InputError, match="--prometheus-release"):
        Options(prometheus_release='x"\n')
