"""Who may call a deployment, and whom it may call: deny by default, a few named ways in and out."""

from __future__ import annotations

import re

from toolkit.deploy.kinds.base import Metadata, Selector
from toolkit.deploy.kinds.kubernetes import AnyPods, Egress, Ingress, NetworkPolicy, NetworkPolicySpec, Peer, PolicyPort
from toolkit.deploy.order import Order
from toolkit.deploy.reckon import from_hub
from toolkit.deploy.targets.pods import labels

CLIENT = {"llmctl.io/client": "true"}


def network_policy(order: Order) -> NetworkPolicy:
    """In: pods of its namespace, namespaces labelled as clients, and Prometheus'. Out: names, and the hub if needed."""
    from_here = Peer(pod_selector=AnyPods())
    clients = Peer(namespace_selector=AnyPods(match_labels=CLIENT))
    callers = [from_here, clients, *_prometheus(order)]
    return NetworkPolicy(
        metadata=Metadata(name=order.name, namespace=order.options.namespace, labels=labels(order)),
        spec=NetworkPolicySpec(
            pod_selector=Selector(match_labels={"app.kubernetes.io/name": order.name}),
            ingress=[Ingress(sender=callers, ports=[PolicyPort(port="http")])],
            egress=_egress(order),
        ),
    )


def _prometheus(order: Order) -> list[Peer]:
    """Prometheus' namespace, read off its address as the cluster's DNS has it; none for other addresses."""
    found = re.match(r"https?://[a-z0-9-]+\.([a-z0-9-]+)\.svc", order.options.prometheus)
    name = {"kubernetes.io/metadata.name": found[1]} if found else None
    return [Peer(namespace_selector=AnyPods(match_labels=name))] if name else []


def _egress(order: Order) -> list[Egress]:
    cluster_dns = Egress(
        to=[Peer(namespace_selector=AnyPods())],
        ports=[PolicyPort(protocol="UDP", port=53), PolicyPort(protocol="TCP", port=53)],
    )
    hub = [Egress(ports=[PolicyPort(port=443)])] if from_hub(order.plan.recipe) else []
    return [cluster_dns, *hub]
