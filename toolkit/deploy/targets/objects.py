"""Objects that every deployment in a cluster has, whatever runs its workers: metadata, Service, kustomizations."""

from __future__ import annotations

from toolkit.deploy.kinds.base import Metadata, PodMetadata, Selector
from toolkit.deploy.kinds.kubernetes import ConfigMapGenerator, GeneratorOptions, Service, ServicePort, ServiceSpec
from toolkit.deploy.order import Order
from toolkit.deploy.targets.pods import PORT, labels

DASHBOARD = "dashboard.json"
DASHBOARD_LABEL = {"grafana_dashboard": "1"}  # what the sidecar of Grafana's Helm chart looks for by default


def metadata(order: Order, name: str = "") -> Metadata:
    """Of an object; called as the deployment is, unless it has another `name`."""
    return Metadata(name=name or order.name, namespace=order.options.namespace, labels=labels(order))


def digests(order: Order) -> dict[str, str]:
    """Annotations that say what an object was made from."""
    found = {f"llmctl.io/{role}-sha256": digest for role, digest in order.stamp().items()}
    return found | {"llmctl.io/model": order.plan.recipe.model.source}


def selector(order: Order) -> Selector:
    """The pods that callers talk to."""
    return Selector(match_labels={"app.kubernetes.io/name": order.name})


def pod_metadata(order: Order, **more: str) -> PodMetadata:
    """Of those pods, with `more` annotations."""
    return PodMetadata(labels=labels(order), annotations=digests(order) | more)


def service(order: Order) -> Service:
    """One address for those pods."""
    return Service(
        metadata=metadata(order),
        spec=ServiceSpec(
            selector={"app.kubernetes.io/name": order.name},
            ports=[ServicePort(name="http", port=PORT, target_port="http")],
        ),
    )


def plan_map(order: Order, *files: str) -> ConfigMapGenerator:
    """The plan, and what lies beside it in the pod; named after the content, so that another one rolls the pods."""
    return ConfigMapGenerator(name=f"{order.name}-plan", files=["plan.json", *files])


def dashboard_map(order: Order) -> ConfigMapGenerator:
    """The Grafana dashboard where Grafana's sidecar finds it."""
    options = GeneratorOptions(labels=DASHBOARD_LABEL | labels(order), disable_name_suffix_hash=True)
    return ConfigMapGenerator(name=f"{order.name}-dashboard", files=[DASHBOARD], options=options)
