"""Objects that targets for Kubernetes share: the pod that serves a plan, and what belongs to it.

Objects are plain data with Kubernetes' own keys; tests hold all that is rendered against the
schemas of Kubernetes 1.37 and of the operators. First the pod: container, probes, volumes,
environment, resources, nodes. Then metadata, Service, the claim for models, kustomizations, and the
commands that create Secret and claim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.deploy import reckon
from toolkit.deploy.order import (
    LABEL,
    READING,
    SECONDS,
    USER_ID,
    ExplainedValue,
    Order,
    Sourced,
    explain_value,
    products,
)
from toolkit.files.plan import Kind
from toolkit.files.recipe import Recipe
from toolkit.files.strict import dump_yaml

Object = dict[str, Any]  # an object of Kubernetes, or a part of one

PORT = 8000
FORWARDED = f"http://127.0.0.1:{PORT}"  # the address under kubectl port-forward
PROBE_S = 10
REVISIONS = 5  # that a Deployment or a StatefulSet keeps
AWAY = 1  # pods of one kind that may be away at once: in a rollout, and by evictions
GPU = "nvidia.com/gpu"
NAME = "app.kubernetes.io/name"  # the label by which pods are selected
SECRET_KEY = "api-key"
HUB_KEY = "hf-token"
PLAN_FOLDER = "/etc/llmctl"
PLAN_FILE = f"{PLAN_FOLDER}/plan.json"
# For compiled kernels: numba's take 20 MB, DeepSpeed's some hundreds.
TMP: Object = {"name": "tmp", "emptyDir": {"sizeLimit": "4Gi"}}
SHARED: Object = {
    "name": "shm",
    "emptyDir": {"medium": "Memory", "sizeLimit": f"{reckon.SHARED_GIB}Gi"},
}
SHARED_MOUNT: Object = {"name": "shm", "mountPath": "/dev/shm"}
HTTP: Object = {"name": "http", "containerPort": PORT, "protocol": "TCP"}
FOLDERS = {
    "HOME": "/tmp",
    "HF_HOME": reckon.MODELS,
    "NUMBA_CACHE_DIR": "/tmp/numba",
    **reckon.compile_caches(reckon.MODELS),
}
PLAN_MOUNT: Object = {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True}
MODELS_MOUNT: Object = {"name": "models", "mountPath": FOLDERS["HF_HOME"]}
TMP_MOUNT: Object = {"name": "tmp", "mountPath": FOLDERS["HOME"]}
# All written files are in volumes, since the root is read-only.
MOUNTS = [PLAN_MOUNT, MODELS_MOUNT, TMP_MOUNT]
CONTAINER_SECURITY: Object = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY: Object = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,  # lets the pod's user write to volumes
    "seccompProfile": {"type": "RuntimeDefault"},
}
DASHBOARD = "dashboard.json"
CLAIM_FILE = "models-claim.yaml"
DASHBOARD_LABEL = {"grafana_dashboard": "1"}  # the default of the sidecar in Grafana's Helm chart
NOTICE = (  # the value of --shutdown-notice, and why
    f"{reckon.PROPAGATION_S} s",
    "until the cluster's proxies know that the pod is leaving",
)
CALLERS = (
    "Pods of other namespaces may call it if their namespace has the label "
    '`llmctl.io/client: "true"`.'
)


def api_object(api: str, kind: str, about: Object, spec: Object) -> Object:
    """An object of the API's version `api`, with the metadata `about`."""
    return {"apiVersion": api, "kind": kind, "metadata": about, "spec": spec}


def probe(path: str, period_s: int, failures: int) -> Object:
    """A probe that asks `path` each `period_s` seconds."""
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 3,
        "failureThreshold": failures,
    }


def probes(order: Order) -> dict[str, Object]:
    """The probes of a server or a front, as keys of its container.

    Others begin after the first /ready, and an endless load is ended. A server that does not answer
    /health does not handle SIGTERM either: waiting for its drain is useless.
    """
    return {
        "startupProbe": probe("/ready", 5, reckon.startup_s(order).value // 5),
        "readinessProbe": probe("/ready", 5, 3),
        "livenessProbe": probe("/health", PROBE_S, 3) | {"terminationGracePeriodSeconds": PROBE_S},
    }


def explain_probes(order: Order) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about the probes."""
    ready = (
        "503 while no worker is loaded and alive, and after the end was announced, so that new "
        "requests go elsewhere"
    )
    alive = (
        "the front answers seconds after its start, so 30 s without an answer are a hang; it does "
        "not check workers: the server restarts lost ones, keeps their requests, and ends by "
        "itself where it cannot"
    )
    hung = "a front that does not answer does not drain either"
    return [
        explain_value("startupProbe on /ready", reckon.startup_s(order), SECONDS),
        ExplainedValue("readinessProbe on /ready", "3 x 5 s", ready),
        ExplainedValue("livenessProbe on /health", f"3 x {PROBE_S} s", alive),
        ExplainedValue("livenessProbe grace", f"{PROBE_S} s", hung),
    ]


def labels(order: Order, name: str = "") -> dict[str, str]:
    """The labels of an object about the pods named `name`, by default the order's own."""
    return {NAME: name or order.name, "app.kubernetes.io/managed-by": "llmctl"}


def container(name: str, image: str, mounts: Sequence[Object], **fields: object) -> Object:
    """A container without privileges. `fields` are its other keys."""
    head = {"name": name, "image": image, "imagePullPolicy": "IfNotPresent"}
    tail = {"securityContext": CONTAINER_SECURITY, "volumeMounts": list(mounts)}
    return {**head, **fields, **tail}


def pod_spec(
    order: Order,
    grace_s: int,
    container: Object,
    volumes: Sequence[Object],
    *,
    name: str = "",
    account: str | None = None,
    affinity: Object | None = None,
    nodes: Mapping[str, str] | None = None,
    tolerations: Sequence[Object] | None = None,
) -> Object:
    """An unprivileged pod of one container. Only with an `account` does it get a token.

    Pods of that `name` go to different nodes, as far as there are; one node still takes them all.
    """
    options = order.options
    apart = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": selector(order, name),
    }
    devices = GPU in container["resources"]["limits"]
    fields = {
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets] or None,
        "priorityClassName": options.priority_class or None,
        "runtimeClassName": (devices and options.runtime_class) or None,
        "topologySpreadConstraints": [apart],
        "serviceAccountName": account,
        "automountServiceAccountToken": account is not None,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": POD_SECURITY,
        "affinity": affinity,
        "nodeSelector": nodes or None,
        "tolerations": tolerations,
        "containers": [container],
        "volumes": list(volumes),
    }
    return {key: value for key, value in fields.items() if value is not None}


def variables(values: Mapping[str, str]) -> list[Object]:
    """Variables of a container's environment."""
    return [{"name": name, "value": value} for name, value in values.items()]


def environment(order: Order) -> list[Object]:
    """The API key by reference, and the variables that loading a model needs."""
    return [by_reference(order, "LLMCTL_API_KEY", SECRET_KEY), *loading_environment(order)]


def loading_environment(order: Order) -> list[Object]:
    """Writable folders and, where the Secret has one, the token for the hub."""
    if not order.plan.recipe.model.from_hub:
        return variables(FOLDERS)
    return [by_reference(order, "HF_TOKEN", HUB_KEY, optional=True), *variables(FOLDERS)]


def by_reference(order: Order, variable: str, key: str, **fields: bool) -> Object:
    """A variable with its value in the deployment's Secret."""
    wanted = {"name": order.name, "key": key, **fields}
    return {"name": variable, "valueFrom": {"secretKeyRef": wanted}}


def asked(cores: int | str, memory: int, limit: int, devices: int = 0) -> Object:
    """The resources of a container: cores, memory and its limit in MiB, and GPUs.

    CPU has no limit, since a throttled worker would take longer.
    """
    gpu = {GPU: str(devices)} if devices else {}
    wanted = {"cpu": str(cores), "memory": f"{memory}Mi"}
    return {"requests": wanted | gpu, "limits": {"memory": f"{limit}Mi"} | gpu}


def volumes(order: Order) -> list[Object]:
    """The volumes of the plan, of models and of temporary files."""
    return [plan_volume(order), models_volume(order, order.plan.kinds[0]), TMP]


def plan_volume(order: Order) -> Object:
    """The ConfigMap of the plan; kustomize replaces its name by the one with a hash."""
    return {"name": "plan", "configMap": {"name": f"{order.name}-plan"}}


def models_volume(order: Order, kind: Kind) -> Object:
    """The volume of models: the named claim, else empty in each new pod, with room for `kind`."""
    if claim := order.options.model_claim:
        return {"name": "models", "persistentVolumeClaim": {"claimName": claim}}
    size = reckon.models_gib([kind])
    limit = f"{size.value if size else reckon.UNKNOWN_MODELS_GIB}Gi"
    return {"name": "models", "emptyDir": {"sizeLimit": limit}}


def tolerations(recipe: Recipe) -> list[Object] | None:
    """Tolerate the taint that GPU nodes often have to keep other pods away."""
    taint = {"key": GPU, "operator": "Exists", "effect": "NoSchedule"}
    return [taint] if reckon.gpus(recipe).value else None


def on_products(order: Order, kind: Kind, *, required: bool = False) -> Object:
    """Prefer nodes with a GPU of the kind's products, or require them.

    They are required where `required`, or where the command line names the products.
    """
    wanted = {"key": LABEL, "operator": "In", "values": products(order, kind).value}
    term = {"matchExpressions": [wanted]}
    found: Object = {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": term}]
    }
    if required or order.options.gpu_products:
        found = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"nodeAffinity": found}


def metadata(order: Order, name: str = "", pods: str = "") -> Object:
    """The metadata of an object about the pods named `pods`; see `labels`."""
    name = name or order.name
    namespace = order.options.namespace
    return {"name": name, "namespace": namespace, "labels": labels(order, pods)}


def digests(order: Order) -> dict[str, str]:
    """Annotations with the digests of the files that an object was made from."""
    found = {f"llmctl.io/{role}-sha256": digest for role, digest in order.stamp().items()}
    return found | {"llmctl.io/model": order.plan.recipe.model.source}


def selector(order: Order, name: str = "") -> Object:
    """Selects the pods that serve clients, or those of `name`."""
    return {"matchLabels": {NAME: name or order.name}}


def service(order: Order, name: str = "", pods: str = "", **fields: str) -> Object:
    """A Service for the pods named `pods`; `fields` are further keys of its spec."""
    port = {"name": "http", "port": PORT, "targetPort": "http", "protocol": "TCP"}
    selected = {NAME: pods or order.name}
    spec = {"type": "ClusterIP", **fields, "selector": selected, "ports": [port]}
    return api_object("v1", "Service", metadata(order, name, pods), spec)


def disruption_budget(order: Order, name: str = "") -> Object:
    """A PodDisruptionBudget for the pods named `name`. Broken pods are evicted anyway."""
    pods = selector(order, name)
    spec = {
        "maxUnavailable": AWAY,
        "selector": pods,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return api_object("policy/v1", "PodDisruptionBudget", metadata(order, name, name), spec)


def claim(order: Order, about: Object, mode: str, size: Sourced[int]) -> Object:
    """A claim for a volume with room for `size` GiB."""
    spec: Object = {
        "accessModes": [mode],
        "resources": {"requests": {"storage": f"{size.value}Gi"}},
    }
    if order.options.storage_class:
        spec["storageClassName"] = order.options.storage_class
    return api_object("v1", "PersistentVolumeClaim", about, spec)


def explain_push(image: Sourced[str], option: str) -> list[ExplainedValue]:
    """How nodes can pull an image that was built here: its name has no registry."""
    if "/" in image.value:
        return []
    name = f"REGISTRY/{image.value}"
    push = f"docker tag {image.value} {name} && docker push {name}"
    why = f"nodes pull it from a registry: {push}, then render with {option} {name}"
    return [ExplainedValue(f"registry of {image.value}", "none yet", why)]


def explain_pods(order: Order) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about options that all pods share."""
    options = order.options
    secrets = ", ".join(options.image_pull_secrets) or "none"
    over = "soft: pods of one kind go to different nodes, as far as there are"
    own = "the cluster's default"
    return [
        ExplainedValue("imagePullSecrets", secrets, "--image-pull-secret: for a private registry"),
        ExplainedValue("topologySpreadConstraints", "kubernetes.io/hostname", over),
        ExplainedValue("priorityClassName", options.priority_class or own, "--priority-class"),
        ExplainedValue(
            "runtimeClassName",
            options.runtime_class or own,
            "--runtime-class: of pods with GPUs; nvidia, where it is not the nodes' default",
        ),
    ]


def explain_models(order: Order, pods: Sourced[int]) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about the volume of models and the token for the hub."""
    claim = order.options.model_claim
    size = reckon.models_gib(order.plan.kinds)
    key = f"{CLAIM_FILE}: accessModes"
    if not claim:
        bound = size.value if size else reckon.UNKNOWN_MODELS_GIB
        key = "volume models"
        shown = f"emptyDir, at most {bound} GiB"
        why = size.source if size else "a bound: no size is known (model.weight_bytes)"
        if any(kind.recipe.model.from_hub for kind in order.plan.kinds):
            why += "; each new pod downloads the model: --model-claim NAME keeps it"
        else:
            why += "; nothing is downloaded"
    elif size is None:
        key = "volume models"
        shown = claim
        why = "--model-claim; no size is known (model.weight_bytes): create it yourself"
    elif pods.value > 1:
        shown = "ReadWriteMany"
        why = f"{pods.source}: needs a storage class that several nodes can mount at once"
    else:
        shown = "ReadWriteOnce"
        why = f"{pods.source}: one node mounts it"
    lines = [ExplainedValue(key, shown, why)]
    if claim and size:
        lines.append(explain_value(f"{CLAIM_FILE}: storage", size, "{} GiB"))
        lines.append(explain_storage_class(order))
    if order.plan.recipe.model.from_hub:
        lines.append(explain_token(order))
    return lines


def explain_token(order: Order) -> ExplainedValue:
    """The line of EXPLAIN.md about the token for the hub."""
    where = f"Secret {order.name}, key {HUB_KEY}"
    why = "optional: gated models of the hub need it; it is in no file here"
    return ExplainedValue("HF_TOKEN", where, why)


def explain_storage_class(order: Order) -> ExplainedValue:
    """The line of EXPLAIN.md about the class of claims."""
    own = order.options.storage_class or "the cluster's default"
    return ExplainedValue("storageClassName", own, "--storage-class")


def start_commands(order: Order, text: str, **fields: str) -> str:
    """How to start the deployment: `text` with its name, its namespace, further `fields`, and the
    bash commands that create what no file may hold: the Secret with a random key, and the claim.

    No command contains a secret: they are read from files, and the token for the hub from the file
    that `hf auth login` wrote.
    """
    namespace = order.options.namespace
    random = "<(openssl rand -hex 32 | tr -d '\\n')"
    words = [f"kubectl -n {namespace} create secret generic {order.name}"]
    words.append(f"--from-file={SECRET_KEY}={random}")
    lines = []
    if order.plan.recipe.model.from_hub:
        words.append(f"--from-file={HUB_KEY}=$HOME/.cache/huggingface/token")
        lines += [
            f"# {HUB_KEY} is for gated models such as meta-llama's: accept the licence, then run "
            "hf auth login.",
            "# Without a gated model, leave the last line of the command out.",
        ]
    lines.append(" \\\n  ".join(words))
    if order.options.model_claim and reckon.models_gib(order.plan.kinds):
        lines.append(
            f"kubectl apply -f {CLAIM_FILE}    # once, if there is no such claim; deleting the "
            "rest keeps it"
        )
    commands = text.format(
        preparation="\n".join(lines), namespace=namespace, name=order.name, **fields
    )
    secret = f"kubectl -n {namespace} get secret {order.name}"
    command = f"{secret} -o jsonpath='{{.data.{SECRET_KEY}}}' | base64 -d"
    return f"{commands}\n\n{READING.format(command=command)}\n\n{CALLERS}"


def deployment(order: Order, pod: Object, strategy: Object, startup_s: int, pods: int) -> Object:
    """The deployment's own Deployment of `pods` pods, which may load for `startup_s` seconds."""
    about = {"labels": labels(order), "annotations": digests(order)}
    spec = {
        "replicas": pods,
        "revisionHistoryLimit": REVISIONS,
        "progressDeadlineSeconds": startup_s + 60,
        "strategy": strategy,
        "selector": selector(order),
        "template": {"metadata": about, "spec": pod},
    }
    return api_object("apps/v1", "Deployment", metadata(order), spec)


def rolling(surge: int) -> Object:
    """The strategy of a Deployment: `surge` new pods are ready before an old one goes, or with 0
    `AWAY` pods at a time are replaced.
    """
    bounds = {"maxSurge": surge, "maxUnavailable": 0 if surge else AWAY}
    return {"type": "RollingUpdate", "rollingUpdate": bounds}


def kustomized(
    order: Order,
    core: Mapping[str, Object],
    operated: Mapping[str, Object],
    maps: Sequence[Object],
    mounting: Sourced[int],
    scaled: Sequence[tuple[str, str]],
) -> dict[str, str]:
    """The files of core/ and of the objects that need operators, each with a kustomization.yaml.

    The outer kustomization removes the number of replicas of what the autoscaler scales (`scaled`,
    kinds and names), so that applying it again does not undo the autoscaler's. Its ConfigMap of the
    dashboard has the label that Grafana's sidecar looks for, and no hash in its name.

    Where a claim for models was named and its size is known, its file is in no kustomization, so
    that deleting the deployment keeps the models. `mounting` pods may mount it at once.
    """
    head = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": order.options.namespace,
    }
    options = {"labels": DASHBOARD_LABEL | labels(order), "disableNameSuffixHash": True}
    board = {"name": f"{order.name}-dashboard", "files": [DASHBOARD], "options": options}
    inner = {"resources": sorted(core), "configMapGenerator": list(maps)}
    outer = {"resources": ["core", *sorted(operated)], "configMapGenerator": [board]}
    remove = json.dumps([{"op": "remove", "path": "/spec/replicas"}])
    patches = [{"target": {"kind": kind, "name": name}, "patch": remove} for kind, name in scaled]
    objects: dict[str, Object] = {
        **{f"core/{name}": content for name, content in core.items()},
        **operated,
        "core/kustomization.yaml": head | inner,
        "kustomization.yaml": head | outer | ({"patches": patches} if patches else {}),
    }
    size = reckon.models_gib(order.plan.kinds)
    if order.options.model_claim and size:
        mode = "ReadWriteMany" if mounting.value > 1 else "ReadWriteOnce"
        about = metadata(order, order.options.model_claim)
        objects[CLAIM_FILE] = claim(order, about, mode, size)
    files = {name: dump_yaml(content, order.comment()) for name, content in objects.items()}
    return files | {"core/plan.json": order.text}


def plan_map(order: Order) -> Object:
    """The ConfigMap of the plan; a hash in its name rolls pods for a new plan."""
    return {"name": f"{order.name}-plan", "files": ["plan.json"]}
