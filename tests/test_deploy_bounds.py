"""What a rendered pod may take: memory, room on disk, and the way to the cluster's names."""

from collections.abc import Iterator
from typing import Any

import orders
import pytest
from orders import changed
from rendered import objects_of
from said import says

from toolkit.deploy.order import Order
from toolkit.deploy.render import render_target
from toolkit.deploy.values import Values
from toolkit.files.fit import SwapFit
from toolkit.files.plan import Plan

MIB = 1 << 20
SWAP = SwapFit(latency_s=1e-3, out_bytes_per_s=1e9, in_bytes_per_s=1e9, host_bytes=300 * MIB)


@pytest.fixture
def gpu(tmp_path: Any) -> Plan:
    return orders.plan(tmp_path, fit=orders.on("NVIDIA H200"), **orders.GPU)


@pytest.fixture
def objects(gpu: Plan) -> list[dict[str, Any]]:
    return [*objects_of(orders.order(gpu)).values()]


def pods(data: Any) -> Iterator[dict[str, Any]]:
    """Every pod's spec, wherever it stands in an object."""
    if isinstance(data, dict):
        if "containers" in data and "volumes" in data:
            yield data
        data = list(data.values())
    if isinstance(data, list):
        for each in data:
            yield from pods(each)


def test_every_pod_has_a_memory_limit_above_what_it_asks_for(objects: list[dict[str, Any]]) -> None:
    found = [container["resources"] for pod in pods(objects) for container in pod["containers"]]
    assert found
    for resources in found:
        asked, most = (
            int(resources[key]["memory"].removesuffix("Mi")) for key in ("requests", "limits")
        )
        assert most >= asked
        assert "cpu" not in resources["limits"]


def test_every_empty_folder_has_a_size(objects: list[dict[str, Any]]) -> None:
    found = [
        volume["emptyDir"]
        for pod in pods(objects)
        for volume in pod["volumes"]
        if "emptyDir" in volume
    ]
    assert found
    assert all(folder.get("sizeLimit", "").endswith("i") for folder in found)


def test_names_are_asked_of_the_clusters_dns_alone(objects: list[dict[str, Any]]) -> None:
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    ways = [
        way
        for one in policies
        for way in one["spec"]["egress"]
        if any(port["port"] == 53 for port in way.get("ports", ()))
    ]
    assert len(ways) == len(policies) > 0
    for way in ways:
        pods, node_local = way["to"]
        assert pods["namespaceSelector"]["matchLabels"] == {
            "kubernetes.io/metadata.name": "kube-system"
        }
        assert pods["podSelector"]["matchLabels"] == {"k8s-app": "kube-dns"}
        assert node_local == {"ipBlock": {"cidr": "169.254.20.10/32"}}, "of NodeLocal DNSCache"


def test_names_are_asked_of_openshift_s_dns_too(objects: list[dict[str, Any]]) -> None:
    """Its pods listen on 5353; policies see the port behind the Service."""
    for one in (one for one in objects if one["kind"] == "NetworkPolicy"):
        (way,) = [
            way
            for way in one["spec"]["egress"]
            if {port["port"] for port in way.get("ports", ())} == {5353}
        ]
        assert {port["protocol"] for port in way["ports"]} == {"UDP", "TCP"}
        (to,) = way["to"]
        assert to["namespaceSelector"]["matchLabels"] == {
            "kubernetes.io/metadata.name": "openshift-dns"
        }
        assert to["podSelector"]["matchLabels"] == {
            "dns.operator.openshift.io/daemonset-dns": "default"
        }


def values(order: Order) -> Values:
    return Values(order, front=False, cluster=True)


def test_the_memory_limit_has_room_for_swapped_caches(gpu: Plan) -> None:
    plain = values(orders.order(gpu))
    assert plain.memory_limit_mib.value == 2 * plain.memory_mib.value
    order = orders.order(changed(gpu, fit__swap=SWAP))
    limit = values(order).memory_limit_mib
    assert limit.value == 2 * values(order).memory_mib.value + gpu.workers * 300
    assert says(limit.source, "2", "300")
    assert f"# {limit.source}" in render_target("kubernetes", order)["base/deployment.yaml"]


def test_each_process_of_a_group_has_room_for_the_weights(gpu: Plan) -> None:
    model = {"recipe__model__weight_bytes": 500 * MIB, "recipe__workers": 1}
    group = changed(gpu, recipe__engine__tensor_parallel_size=4, **model)
    found = values(orders.order(group))
    assert found.memory_mib.value == 768 + 4 * 1024 + 500
    assert found.memory_limit_mib.value == 2 * found.memory_mib.value + 3 * 500 + 1024
