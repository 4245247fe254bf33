"""What a rendered pod may take: memory, room on disk, and the way to the cluster's names."""

from collections.abc import Iterator
from typing import Any

import orders
import pytest
import samples
import yaml
from said import says

from toolkit.deploy.order import Order
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
    fit = samples.fit()
    fit = fit.model_copy(update={"engine": fit.engine.model_copy(update={"device": "NVIDIA H200"})})
    return orders.plan(tmp_path, fit=fit, **orders.GPU)


@pytest.fixture
def objects(gpu: Plan) -> list[dict[str, Any]]:
    files = render_target("kubernetes", orders.order(gpu))
    return [yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")]


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


def swapping(made: Plan) -> Order:
    fit = made.fit.model_copy(update={"swap": SWAP})
    return orders.order(made.model_copy(update={"fit": fit}))


def test_the_memory_limit_has_room_for_swapped_caches(gpu: Plan) -> None:
    plain = orders.order(gpu)
    order = swapping(gpu)
    assert memory_limit_mib(plain).value == 2 * memory_mib(plain).value
    limit = memory_limit_mib(order)
    assert limit.value == 2 * memory_mib(order).value + gpu.workers * 300
    told = render_target("kubernetes", order)["EXPLAIN.md"]
    (line,) = (line for line in told.splitlines() if line.startswith("| memory limit |"))
    assert f"{limit.value:,} MiB" in line
    assert says(line, "2", "300")


def test_each_process_of_a_group_has_room_for_the_weights(gpu: Plan) -> None:
    (kind,) = gpu.kinds
    recipe = kind.recipe.model_copy(
        update={
            "model": kind.recipe.model.model_copy(update={"weight_bytes": 500 * MIB}),
            "engine": kind.recipe.engine.model_copy(update={"tensor_parallel_size": 4}),
        }
    )
    group = kind.model_copy(update={"recipe": recipe})
    assert worker_extra_memory_mib(group).value == 3 * 500 + 1024
    assert worker_memory_mib(group).value == 4 * 1024 + 500
