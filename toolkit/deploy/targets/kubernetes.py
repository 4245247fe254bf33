"""A Kubernetes cluster: a Deployment and what belongs to it (core/), and what needs operators (beside it).

`kubectl apply -k DIR` takes all of it; `kubectl apply -k DIR/core` does without Prometheus' operator and KEDA.
"""

from __future__ import annotations

import json

from pydantic import BaseModel

from toolkit.deploy.alerts import drift_percent, rules, series
from toolkit.deploy.images import llmctl_image
from toolkit.deploy.kinds.kubernetes import (
    Deployment,
    DeploymentSpec,
    DisruptionSpec,
    Kustomization,
    Patch,
    PatchTarget,
    PodDisruptionBudget,
    PodTemplate,
    RollingUpdate,
    Strategy,
)
from toolkit.deploy.kinds.operators import PrometheusRule
from toolkit.deploy.order import Order, Reckoned, Rendered, Told, told
from toolkit.deploy.reckon import (
    PROPAGATION_S,
    check_podable,
    cpus,
    drain_s,
    gpus,
    grace_s,
    memory_mib,
    replicas,
    startup_s,
)
from toolkit.deploy.targets.network import network_policy
from toolkit.deploy.targets.objects import dashboard_map, metadata, plan_map, pod_metadata, selector, service
from toolkit.deploy.targets.pods import FORWARDED, pod
from toolkit.deploy.targets.scaling import max_replicas, pod_monitor, scaled_object
from toolkit.deploy.threshold import waiting_threshold
from toolkit.files.yaml_text import dump_yaml


def render(order: Order) -> Rendered:
    """core/ and, beside it, what needs operators; a kustomization.yaml for each."""
    check_podable(order)
    threshold = waiting_threshold(order.plan, order.trace)
    core: dict[str, BaseModel] = {
        "deployment.yaml": _deployment(order),
        "service.yaml": service(order),
        "poddisruptionbudget.yaml": _budget(order),
        "networkpolicy.yaml": network_policy(order),
    }
    watched: dict[str, BaseModel] = {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": PrometheusRule(
            metadata=metadata(order), spec=rules(order, series(order, monitored=True), threshold)
        ),
    }
    if threshold.value is not None:
        watched["scaledobject.yaml"] = scaled_object(order, threshold.value)
    objects = {f"core/{name}": one for name, one in core.items()} | watched
    objects["core/kustomization.yaml"] = _core(order, sorted(core))
    objects["kustomization.yaml"] = _all(order, sorted(watched), scaled=threshold.value is not None)
    files = {name: dump_yaml([one], order.comment()) for name, one in objects.items()}
    return Rendered(files | {"core/plan.json": order.text}, _told(order, threshold), _start(order), FORWARDED)


def _deployment(order: Order) -> Deployment:
    return Deployment(
        metadata=metadata(order),
        spec=DeploymentSpec(
            replicas=replicas(order).value,
            progress_deadline_seconds=startup_s().value + 60,
            strategy=Strategy(rolling_update=_rolling(order)),
            selector=selector(order),
            template=PodTemplate(metadata=pod_metadata(order), spec=pod(order, PROPAGATION_S)),
        ),
    )


def _rolling(order: Order) -> RollingUpdate:
    """A spare GPU for a second pod is rare; a spare CPU is not."""
    on_gpus = gpus(order.plan.recipe).value > 0
    return RollingUpdate(max_surge=0, max_unavailable=1) if on_gpus else RollingUpdate(max_surge=1, max_unavailable=0)


def _budget(order: Order) -> PodDisruptionBudget:
    return PodDisruptionBudget(
        metadata=metadata(order), spec=DisruptionSpec(max_unavailable=1, selector=selector(order))
    )


def _core(order: Order, names: list[str]) -> Kustomization:
    return Kustomization(namespace=order.options.namespace, resources=names, config_map_generator=[plan_map(order)])


def _all(order: Order, names: list[str], *, scaled: bool) -> Kustomization:
    """Under an autoscaler the Deployment says no number: applying it again must not undo the autoscaler's."""
    removal = Patch(
        target=PatchTarget(kind="Deployment", name=order.name),
        patch=json.dumps([{"op": "remove", "path": "/spec/replicas"}]),
    )
    return Kustomization(
        namespace=order.options.namespace,
        resources=["core", *names],
        config_map_generator=[dashboard_map(order)],
        patches=[removal] if scaled else None,
    )


def _told(order: Order, threshold: Reckoned[int | None]) -> list[Told]:
    drain, startup, recipe = drain_s(order), startup_s(), order.plan.recipe
    grace = grace_s(drain, PROPAGATION_S)
    memory = memory_mib(order)
    lines = [
        told("image", llmctl_image(order)),
        told("replicas", replicas(order)),
        Told("args --shutdown-notice", f"{PROPAGATION_S} s", "until the cluster's proxies know that /ready is 503"),
        told("args --shutdown-timeout", drain, f"{drain.value} s"),
        told("terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        told("startupProbe on /ready", startup, f"{startup.value} s"),
        Told("readinessProbe on /ready", "3 x 5 s", "503 while loading and as soon as the end is announced"),
        Told("livenessProbe on /health", "3 x 10 s", "503 where no worker is alive, or one hangs; never for load"),
        told("nvidia.com/gpu", gpus(recipe)),
        told("cpu", cpus(recipe)),
        told("memory", memory, f"{memory.value:,} MiB"),
        told("drift alert", drift_percent(order), f"{drift_percent(order).value:g} %"),
    ]
    if threshold.value is None:
        return [*lines, told("ScaledObject", threshold, "none")]
    most = max_replicas(order)
    return [*lines, told("ScaledObject threshold", threshold), told("ScaledObject maxReplicaCount", most)]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
```sh
openssl rand -hex 32 | tr -d '\\n' | kubectl -n {namespace} create secret generic {name} --from-file=api-key=/dev/stdin
kubectl apply -k .          # needs the CRDs of Prometheus' operator and KEDA; without them: kubectl apply -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # drains
```

Pods of other namespaces may call it where their namespace is labelled `llmctl.io/client: "true"`."""
