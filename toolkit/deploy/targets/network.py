"""Who may call a deployment, and whom it may call: deny by default, a few named ways in and out."""

from __future__ import annotations

import re

from toolkit.deploy.kinds.base import Selector
from toolkit.deploy.kinds.kubernetes import AnyPods, Egress, Ingress, NetworkPolicy, NetworkPolicySpec, Peer, PolicyPort
from toolkit.deploy.order import Order
from toolkit.deploy.reckon import from_hub
from toolkit.deploy.targets.objects import metadata

CLIENT = {"llmctl.io/client": "true"}


def network_policy(order: Order) -> NetworkPolicy:
    """In: pods of its namespace, namespaces labelled as clients, and Prometheus'. Out: names, and the hub if needed."""
    callers = Ingress(sender=_callers(order), ports=[PolicyPort(port="http")])
    return _policy(order, order.name, {"app.kubernetes.io/name": order.name}, [callers], _egress(order))


def front_policy(order: Order, members: dict[str, str]) -> NetworkPolicy:
    """As `network_policy`, and Ray's ports, which are any, for the `members` of the deployment."""
    ours = [Peer(pod_selector=AnyPods(match_labels=members))]
    callers = Ingress(sender=_callers(order), ports=[PolicyPort(port="http")])
    ways_out = [*_egress(order), Egress(to=ours)]
    return _policy(order, order.name, {"app.kubernetes.io/name": order.name}, [callers, Ingress(sender=ours)], ways_out)


def cluster_policy(order: Order, cluster: dict[str, str], members: dict[str, str]) -> NetworkPolicy:
    """For the pods of a Ray cluster: nobody but the `members` of the deployment comes in. Who does runs code there."""
    ours = [Peer(pod_selector=AnyPods(match_labels=members))]
    return _policy(order, f"{order.name}-ray", cluster, [Ingress(sender=ours)], [*_egress(order), Egress(to=ours)])


def _policy(
    order: Order, name: str, pods: dict[str, str], ways_in: list[Ingress], ways_out: list[Egress]
) -> NetworkPolicy:
    return NetworkPolicy(
        metadata=metadata(order, name),
        spec=NetworkPolicySpec(pod_selector=Selector(match_labels=pods), ingress=ways_in, egress=ways_out),
    )


def _callers(order: Order) -> list[Peer]:
    from_here = Peer(pod_selector=AnyPods())
    clients = Peer(namespace_selector=AnyPods(match_labels=CLIENT))
    return [from_here, clients, *_prometheus(order)]


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
