"""What Prometheus' operator and KEDA are told: where the metrics are, and from how many waiting on to add a replica."""

from __future__ import annotations

from toolkit.deploy.alerts import series
from toolkit.deploy.kinds.base import SecretKey, TypedSecretKey
from toolkit.deploy.kinds.operators import (
    MetricsEndpoint,
    PodMonitor,
    PodMonitorSpec,
    PrometheusQuery,
    ScaledObject,
    ScaledObjectSpec,
    ScaleTarget,
    Trigger,
)
from toolkit.deploy.order import Order, Reckoned
from toolkit.deploy.reckon import replicas
from toolkit.deploy.targets.objects import metadata, selector
from toolkit.deploy.targets.pods import SECRET_KEY


def pod_monitor(order: Order) -> PodMonitor:
    """/metrics of every pod, with the key: it is closed like all else."""
    endpoint = MetricsEndpoint(
        port="http",
        path="/metrics",
        interval="15s",
        authorization=TypedSecretKey(credentials=SecretKey(name=order.name, key=SECRET_KEY)),
    )
    return PodMonitor(
        metadata=metadata(order),
        spec=PodMonitorSpec(selector=selector(order), pod_metrics_endpoints=[endpoint]),
    )


def scaled_object(order: Order, threshold: int) -> ScaledObject:
    """As many replicas as keep the mean of those who wait at each below `threshold`."""
    return ScaledObject(
        metadata=metadata(order),
        spec=ScaledObjectSpec(
            scale_target_ref=ScaleTarget(name=order.name),
            polling_interval=15,
            cooldown_period=300,
            min_replica_count=replicas(order).value,
            max_replica_count=max_replicas(order).value,
            triggers=[
                Trigger(
                    metadata=PrometheusQuery(
                        server_address=order.options.prometheus,
                        query=f"sum(llmctl_requests_waiting{{{series(order, monitored=True)}}})",
                        threshold=str(threshold),
                    )
                )
            ],
        ),
    )


def max_replicas(order: Order) -> Reckoned[int]:
    """The most replicas that the autoscaler may ask for."""
    if order.options.max_replicas:
        return Reckoned(max(order.options.max_replicas, replicas(order).value), "--max-replicas")
    return Reckoned(2 * replicas(order).value, "twice the replicas; say otherwise with --max-replicas")
