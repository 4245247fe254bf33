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
from toolkit.deploy.products import products
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
from toolkit.deploy.targets.objects import (
    claim_files,
    dashboard_map,
    metadata,
    models_told,
    plan_map,
    pod_metadata,
    preparation,
    selector,
    service,
)
from toolkit.deploy.targets.pods import FORWARDED, pod, probes_told
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
    files |= claim_files(order, _mounting(order, threshold)) | {"core/plan.json": order.text}
    return Rendered(files, _told(order, threshold), _start(order), FORWARDED)


def _deployment(order: Order) -> Deployment:
    return Deployment(
        metadata=metadata(order),
        spec=DeploymentSpec(
            replicas=replicas(order).value,
            progress_deadline_seconds=startup_s(order).value + 60,
            strategy=Strategy(rolling_update=_rolling(order)),
            selector=selector(order),
            template=PodTemplate(metadata=pod_metadata(order), spec=pod(order, PROPAGATION_S)),
        ),
    )


def _rolling(order: Order) -> RollingUpdate:
    """A spare GPU for a second pod is rare; a spare CPU is not."""
    on_gpus = gpus(order.plan.recipe).value > 0
    return RollingUpdate(max_surge=0, max_unavailable=1) if on_gpus else RollingUpdate(max_surge=1, max_unavailable=0)


def _mounting(order: Order, threshold: Reckoned[int | None]) -> Reckoned[int]:
    """Pods that may have the models' volume at once."""
    most = replicas(order) if threshold.value is None else max_replicas(order)
    count = most.value + _rolling(order).max_surge
    return Reckoned(
        count, f"up to {count} pods at once, replicas and a rollout's" if count > 1 else "one pod at a time"
    )


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
    drain, recipe = drain_s(order), order.plan.recipe
    where = products(order, order.plan.kinds[0])
    grace = grace_s(drain, PROPAGATION_S)
    memory = memory_mib(order)
    lines = [
        told("image", llmctl_image(order)),
        told("replicas", replicas(order)),
        Told(
            "args --shutdown-notice", f"{PROPAGATION_S} s", "until the cluster's proxies know that the pod is leaving"
        ),
        told("args --shutdown-timeout", drain, f"{drain.value} s"),
        told("terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *probes_told(order),
        told("nvidia.com/gpu", gpus(recipe)),
        *([told("node affinity", where, ", ".join(where.value))] if gpus(recipe).value else []),
        *models_told(order, _mounting(order, threshold)),
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
```bash
{preparation(order)}
kubectl apply -k .          # needs the CRDs of Prometheus' operator and KEDA; without them: kubectl apply -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # drains
```

Pods of other namespaces may call it where their namespace is labelled `llmctl.io/client: "true"`."""
