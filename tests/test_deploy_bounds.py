"""What a rendered pod may take: memory, room on disk, and the way to the cluster's names."""

from collections.abc import Iterator
from typing import Any

import orders
import pytest
from orders import changed
from rendered import objects_of
from said import says

from toolkit.deploy.reckon import (
    memory_limit_mib,
    memory_mib,
    worker_extra_memory_mib,
    worker_memory_mib,
)
from toolkit.deploy.render import render_target
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


def test_the_memory_limit_has_room_for_swapped_caches(gpu: Plan) -> None:
    plain = orders.order(gpu)
    order = orders.order(changed(gpu, fit__swap=SWAP))
    assert memory_limit_mib(plain).value == 2 * memory_mib(plain).value
    limit = memory_limit_mib(order)
    assert limit.value == 2 * memory_mib(order).value + gpu.workers * 300
    told = render_target("kubernetes", order)["EXPLAIN.md"]
    (line,) = (line for line in told.splitlines() if line.startswith("| memory limit |"))
    assert f"{limit.value:,} MiB" in line
    assert says(line, "2", "300")


def test_each_process_of_a_group_has_room_for_the_weights(gpu: Plan) -> None:
    (kind,) = gpu.kinds
    group = changed(
        kind, recipe__model__weight_bytes=500 * MIB, recipe__engine__tensor_parallel_size=4
    )
    assert worker_extra_memory_mib(group).value == 3 * 500 + 1024
    assert worker_memory_mib(group).value == 4 * 1024 + 500
