"""A Kubernetes cluster with KubeRay: one front, a Deployment that joins a RayCluster, whose pods run the workers.

Why the front is not a container of the head's pod, and no RayJob or RayService: docs/decisions.md.
"""

from __future__ import annotations

from pydantic import BaseModel

from toolkit.deploy.alerts import drift_percent, rules, series
from toolkit.deploy.images import llmctl_image
from toolkit.deploy.kinds.base import Selector
from toolkit.deploy.kinds.kubernetes import DisruptionSpec, Kustomization, PodDisruptionBudget
from toolkit.deploy.kinds.operators import PrometheusRule
from toolkit.deploy.order import Order, Reckoned, Rendered, Told, told
from toolkit.deploy.reckon import PROPAGATION_S, check_podable, drain_s, grace_s, startup_s
from toolkit.deploy.targets.network import cluster_policy, front_policy
from toolkit.deploy.targets.objects import (
    claim_files,
    dashboard_map,
    metadata,
    models_told,
    plan_map,
    preparation,
    service,
)
from toolkit.deploy.targets.pods import FORWARDED, probes_told
from toolkit.deploy.targets.ray_front import SCRIPT, front, front_memory, front_script
from toolkit.deploy.targets.raycluster import (
    HEAD_MIB,
    RAY,
    TOKEN_KEY,
    head_grace_s,
    member,
    ray_cluster,
    ray_member,
    worker_grace_s,
)
from toolkit.deploy.targets.raygroups import EXTRA, groups, told_of, worker_count
from toolkit.deploy.targets.scaling import pod_monitor
from toolkit.deploy.threshold import waiting_threshold
from toolkit.errors import InputError
from toolkit.files.yaml_text import dump_yaml


def render(order: Order) -> Rendered:
    """core/ and, beside it, what needs Prometheus' operator. `InputError` for engines that Ray cannot run here."""
    _check(order)
    threshold = waiting_threshold(order.plan, order.trace)
    core: dict[str, BaseModel] = {
        "raycluster.yaml": ray_cluster(order),
        "deployment.yaml": front(order),
        "service.yaml": service(order),
        "networkpolicy.yaml": front_policy(order, member(order)),
        "networkpolicy-ray.yaml": cluster_policy(order, ray_member(order), member(order)),
    }
    if worker_count(order).value > 1:
        core["poddisruptionbudget.yaml"] = _budget(order)
    watched: dict[str, BaseModel] = {
        "podmonitor.yaml": pod_monitor(order),
        "prometheusrule.yaml": PrometheusRule(
            metadata=metadata(order), spec=rules(order, series(order, monitored=True), threshold)
        ),
    }
    objects = {f"core/{name}": one for name, one in core.items()} | watched
    namespace = order.options.namespace
    objects["core/kustomization.yaml"] = Kustomization(
        namespace=namespace, resources=sorted(core), config_map_generator=[plan_map(order, SCRIPT)]
    )
    objects["kustomization.yaml"] = Kustomization(
        namespace=namespace, resources=["core", *sorted(watched)], config_map_generator=[dashboard_map(order)]
    )
    files = {name: dump_yaml([one], order.comment()) for name, one in objects.items()}
    files |= claim_files(order, _mounting(order))
    files |= {"core/plan.json": order.text, f"core/{SCRIPT}": front_script(order)}
    return Rendered(files, _told(order), _start(order), FORWARDED)


def _check(order: Order) -> None:
    check_podable(order)
    if order.options.gpu_products and order.plan.others:
        raise InputError(
            "--gpu-product names the GPU of one kind of workers; the fleet has several",
            "say in the fleet which nodes each kind is on: nodes",
        )
    if order.options.replicas > 1:
        raise InputError(
            f"--replicas {order.options.replicas}: under KubeRay one front has all workers",
            "tune with --workers auto for more workers, or render the target 'kubernetes'",
        )


def _mounting(order: Order) -> Reckoned[int]:
    """Pods that have the models' volume: the workers', and the front's for the tokenizer."""
    workers = sum(group.count.value for group in groups(order))
    return Reckoned(workers + 1, f"{workers + 1} pods: the workers' and the front's")


def _budget(order: Order) -> PodDisruptionBudget:
    """One worker at a time. As a number of pods that stay: a RayCluster has no scale that a share could be of."""
    workers = {**ray_member(order), "ray.io/node-type": "worker"}
    return PodDisruptionBudget(
        metadata=metadata(order),
        spec=DisruptionSpec(min_available=worker_count(order).value - 1, selector=Selector(match_labels=workers)),
    )


def _told(order: Order) -> list[Told]:
    drain, startup, drift = drain_s(order), startup_s(order), drift_percent(order)
    grace, asked = grace_s(drain, PROPAGATION_S), front_memory()
    return [
        told("image", llmctl_image(order, EXTRA)),
        Told("rayVersion", RAY, "what the image has installed; KubeRay chooses its probes by it"),
        Told("authOptions", "token", f"Secret {order.name}, key {TOKEN_KEY}: whoever reaches Ray's ports needs it"),
        Told("upgradeStrategy", "Recreate", "one image for all: another one replaces all of Ray's pods, and the front"),
        *[line for group in groups(order) for line in told_of(order, group)],
        told("workers: terminationGracePeriodSeconds", worker_grace_s(order), f"{worker_grace_s(order).value} s"),
        Told("workers: preStop", "linger worker", "its raylet stays until no actor runs on it: for the front's drain"),
        Told("head: num-cpus", "0", "nothing runs on it; losing it is losing the cluster"),
        Told("head: dashboard-host", "127.0.0.1", "for kubectl port-forward; nobody else reaches it"),
        Told("head: memory", f"{HEAD_MIB:,} MiB", "Ray 2.60's head: 610 MiB when idle, and room for its records"),
        told("head: terminationGracePeriodSeconds", head_grace_s(order), f"{head_grace_s(order).value} s"),
        Told("head: preStop", "linger head", "the head stays until all who were connected have left"),
        told("front: memory", asked, f"{asked.value:,} MiB"),
        Told("front: strategy", "Recreate", "the next front finds room when the workers of this one are gone"),
        Told("front: --room-timeout", f"{startup.value} s", "until KubeRay's pods run; then loading begins"),
        Told(
            "front: --shutdown-notice", f"{PROPAGATION_S} s", "until the cluster's proxies know that the pod is leaving"
        ),
        told("front: --shutdown-timeout", drain, f"{drain.value} s"),
        told("front: terminationGracePeriodSeconds", grace, f"{grace.value} s"),
        *probes_told(order, "front: "),
        *models_told(order, _mounting(order)),
        Told("probes of Ray's pods", "KubeRay's", "it adds its own: the raylet's health, and on the head GCS's"),
        Told("PodDisruptionBudget", "minAvailable", "one worker at a time; its requests go on at the others"),
        Told("ScaledObject", "none", "the placement group has a fixed number of workers; render again for another"),
        told("drift alert", drift, f"{drift.value:g} %"),
    ]


def _start(order: Order) -> str:
    name, namespace = order.name, order.options.namespace
    return f"""\
Needs KubeRay 1.6 or newer. One Secret has the callers' key and the token of Ray's own connections:

```bash
{preparation(order, TOKEN_KEY)}
kubectl apply -k .          # needs the CRDs of KubeRay and of Prometheus' operator; without the latter: -k core
kubectl -n {namespace} rollout status deployment/{name}
kubectl -n {namespace} port-forward service/{name} 8000
kubectl delete -k .         # the front drains, then the workers end, then the head
```

A new plan replaces the front alone, which drains first; its workers start anew on the pods that are there. Another
image or size replaces all of it, in the order of `kubectl delete`. A lost worker's requests go on at the others; losing
the head, or the front, loses what runs, and both are started again.

Pods of other namespaces may call it where their namespace is labelled `llmctl.io/client: "true"`."""
