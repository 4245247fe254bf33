"""The keys of operators' kinds and of kustomize, of which Kubernetes ships no schema, and the check
of a rendered object.

They follow the operators' own documentation: prometheus-operator's API reference,
monitoring.coreos.com/v1; KEDA 2.x, `ScaledObject` and the prometheus scaler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate

CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
ANY = None  # whatever is in a value
METADATA = {"name": ANY, "namespace": ANY, "labels": ANY, "annotations": ANY}
OBJECT = {"apiVersion": ANY, "kind": ANY, "metadata": METADATA}
RULES = {
    "groups": {
        "name": ANY,
        "rules": {"alert": ANY, "expr": ANY, "for": ANY, "labels": ANY, "annotations": ANY},
    }
}
ENDPOINT = {
    "port": ANY,
    "path": ANY,
    "interval": ANY,
    "authorization": {"type": ANY, "credentials": {"name": ANY, "key": ANY}},
}
SCALING = {
    "stabilizationWindowSeconds": ANY,
    "policies": {"type": ANY, "value": ANY, "periodSeconds": ANY},
}
SCALED = {
    "scaleTargetRef": {"kind": ANY, "name": ANY},
    "pollingInterval": ANY,
    "fallback": {"failureThreshold": ANY, "replicas": ANY, "behavior": ANY},
    "advanced": {
        "horizontalPodAutoscalerConfig": {"behavior": {"scaleUp": SCALING, "scaleDown": SCALING}}
    },
    "minReplicaCount": ANY,
    "maxReplicaCount": ANY,
    "triggers": {
        "type": ANY,
        "metricType": ANY,
        "metadata": {
            "serverAddress": ANY,
            "query": ANY,
            "ignoreNullValues": ANY,
            "threshold": ANY,
        },
    },
}
KUSTOMIZATION = {
    "apiVersion": ANY,
    "kind": ANY,
    "namespace": ANY,
    "resources": ANY,
    "configMapGenerator": {
        "name": ANY,
        "files": ANY,
        "options": {"labels": ANY, "disableNameSuffixHash": ANY},
    },
    "patches": {"target": {"kind": ANY, "name": ANY}, "patch": ANY},
}
ROUTE = {
    "parentRefs": {"namespace": ANY, "name": ANY},
    "rules": {
        "matches": {"path": {"type": ANY, "value": ANY}},
        "timeouts": {"request": ANY},
        "backendRefs": {"name": ANY, "port": ANY},
    },
}
KEYS: dict[tuple[str, str], dict[str, Any]] = {  # by version and kind
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): {**OBJECT, "spec": ROUTE},
    ("keda.sh/v1alpha1", "ScaledObject"): {**OBJECT, "spec": SCALED},
    ("kustomize.config.k8s.io/v1beta1", "Kustomization"): KUSTOMIZATION,
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        **OBJECT,
        "spec": {"selector": {"matchLabels": ANY}, "podMetricsEndpoints": ENDPOINT},
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {**OBJECT, "spec": RULES},
}
OWN_KINDS = {kind for _, kind in KEYS}


def unknown_keys(data: Any, known: dict[str, Any] | None, path: str = "") -> Iterator[str]:
    """The paths of all keys in `data` that are not among the known ones."""
    if isinstance(data, list):
        for one in data:
            yield from unknown_keys(one, known, path)
    elif known is not ANY:
        for key, value in data.items():
            if key in known:
                yield from unknown_keys(value, known[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"


def check_object(data: dict[str, Any]) -> None:
    """What `kubernetes-validate --strict` checks; a kind that it does not know has known keys. Pods
    have no privileges.
    """
    try:
        kubernetes_validate.validate(data, "1.37", strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        assert list(unknown_keys(data, KEYS[data["apiVersion"], data["kind"]])) == []
    if "template" in data.get("spec", {}):
        check_pod(data["spec"]["template"])


def check_pod(template: dict[str, Any]) -> None:
    """The template of a pod: as Kubernetes knows it, and without privileges."""
    whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
    kubernetes_validate.validate(whole | {"template": template}, "1.37", strict=True)
    pod = template["spec"]
    assert pod["securityContext"] == POD_SECURITY
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"] == CONTAINER_SECURITY
        assert container["imagePullPolicy"] == "IfNotPresent"
