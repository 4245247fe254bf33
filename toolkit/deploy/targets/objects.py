"""Objects that targets for Kubernetes share: the pod that serves a plan, and what belongs to it.

First the pod: container, probes, volumes, environment, resources, nodes. Then metadata, Service,
the claim for models, kustomizations, and the commands that create Secret and claim.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from toolkit.deploy import manifests as k8s
from toolkit.deploy import reckon
from toolkit.deploy.order import (
    LABEL,
    ExplainedValue,
    Order,
    Sourced,
    explain_value,
    llmctl_image,
    products,
)
from toolkit.files.plan import Kind
from toolkit.files.recipe import Recipe
from toolkit.files.strict import dump_yaml

PORT = 8000
FORWARDED = f"http://127.0.0.1:{PORT}"  # the address under kubectl port-forward
PROBE_S = 10
GPU = "nvidia.com/gpu"
SECRET_KEY = "api-key"
HUB_KEY = "hf-token"
PLAN_FOLDER = "/etc/llmctl"
# For compiled kernels: numba's take 20 MB, DeepSpeed's some hundreds.
TMP = k8s.Volume(name="tmp", empty_dir=k8s.EmptyDir(size_limit="4Gi"))
SHARED = k8s.Volume(
    name="shm", empty_dir=k8s.EmptyDir(medium="Memory", size_limit=f"{reckon.SHARED_GIB}Gi")
)
SHARED_MOUNT = k8s.VolumeMount(name="shm", mount_path="/dev/shm")
HTTP = k8s.ContainerPort(name="http", container_port=PORT)
FOLDERS = {"HOME": "/tmp", "HF_HOME": "/models", "NUMBA_CACHE_DIR": "/tmp/numba"}
PLAN_MOUNT = k8s.VolumeMount(name="plan", mount_path=PLAN_FOLDER, read_only=True)
MODELS_MOUNT = k8s.VolumeMount(name="models", mount_path=FOLDERS["HF_HOME"])
TMP_MOUNT = k8s.VolumeMount(name="tmp", mount_path=FOLDERS["HOME"])
DASHBOARD = "dashboard.json"
CLAIM_FILE = "models-claim.yaml"
DASHBOARD_LABEL = {"grafana_dashboard": "1"}  # the default of the sidecar in Grafana's Helm chart


def probe(path: str, period_s: int, failures: int) -> k8s.Probe:
    """A probe that asks `path` each `period_s` seconds."""
    get = k8s.HttpGet(path=path, port="http")
    return k8s.Probe(
        http_get=get, period_seconds=period_s, timeout_seconds=3, failure_threshold=failures
    )


def alive(path: str) -> k8s.Probe:
    """A liveness probe. A server that does not answer does not handle SIGTERM either: waiting for
    its drain is useless.
    """
    grace = {"termination_grace_period_seconds": PROBE_S}
    return probe(path, PROBE_S, 3).model_copy(update=grace)


READY, ALIVE = probe("/ready", 5, 3), alive("/health")


def started(order: Order) -> k8s.Probe:
    """The startup probe: others begin after the first /ready, and an endless load is ended."""
    return probe("/ready", 5, reckon.startup_s(order).value // 5)


def explain_probes(order: Order, prefix: str = "") -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about the probes; each key begins with `prefix`."""
    startup = reckon.startup_s(order)
    ready = (
        "503 while no worker is loaded and alive, and after the end was announced, so that new "
        "requests go elsewhere"
    )
    alive = (
        "the front answers seconds after its start, so 30 s without an answer are a hang; it does "
        "not check workers: the server restarts lost ones, keeps their requests, and ends by "
        "itself where it cannot"
    )
    return [
        explain_value(f"{prefix}startupProbe on /ready", startup, f"{startup.value} s"),
        ExplainedValue(f"{prefix}readinessProbe on /ready", "3 x 5 s", ready),
        ExplainedValue(f"{prefix}livenessProbe on /health", f"3 x {PROBE_S} s", alive),
        ExplainedValue(
            f"{prefix}livenessProbe grace",
            f"{PROBE_S} s",
            "a front that does not answer does not drain either",
        ),
    ]


def labels(order: Order, name: str = "") -> dict[str, str]:
    """The labels of all objects of a deployment; `name` is that of pods which are not the order's
    own.
    """
    return {"app.kubernetes.io/name": name or order.name, "app.kubernetes.io/managed-by": "llmctl"}


def pod(order: Order, notice_s: int) -> k8s.PodSpec:
    """The pod. It accepts requests for `notice_s` seconds after SIGTERM."""
    args = ["serve", f"{PLAN_FOLDER}/plan.json", "--host", "0.0.0.0", "--port", str(PORT)]
    args += [
        "--shutdown-notice",
        str(notice_s),
        "--shutdown-timeout",
        str(reckon.drain_s(order).value),
    ]
    args += order.allowances
    # Processes of one worker exchange tensors: NCCL needs more than the 64 MB of /dev/shm.
    shared = order.plan.recipe.engine.tensor_parallel_size > 1
    container = k8s.Container(
        name="llmctl",
        image=llmctl_image(order).value,
        command=["llmctl"],
        args=args,
        ports=[HTTP],
        env=environment(order),
        resources=resources(order),
        startup_probe=started(order),
        readiness_probe=READY,
        liveness_probe=ALIVE,
        volume_mounts=[*mounts(), *([SHARED_MOUNT] if shared else [])],
    )
    return k8s.PodSpec(
        termination_grace_period_seconds=reckon.grace_s(reckon.drain_s(order), notice_s).value,
        affinity=on_products(order, order.plan.kinds[0])
        if reckon.gpus(order.plan.recipe).value
        else None,
        tolerations=tolerations(order.plan.recipe),
        containers=[container],
        volumes=[*volumes(order), *([SHARED] if shared else [])],
    )


def environment(order: Order) -> list[k8s.EnvVar]:
    """The API key by reference, and the variables that loading a model needs."""
    return [by_reference(order, "LLMCTL_API_KEY", SECRET_KEY), *loading_environment(order)]


def loading_environment(order: Order) -> list[k8s.EnvVar]:
    """Writable folders and, where the Secret has one, the token for the hub."""
    folders = [k8s.EnvVar(name=name, value=value) for name, value in FOLDERS.items()]
    if not reckon.from_hub(order.plan.recipe):
        return folders
    return [by_reference(order, "HF_TOKEN", HUB_KEY, optional=True), *folders]


def by_reference(
    order: Order, variable: str, key: str, *, optional: bool | None = None
) -> k8s.EnvVar:
    """A variable with its value in the deployment's Secret."""
    wanted = k8s.SecretKey(name=order.name, key=key, optional=optional)
    return k8s.EnvVar(name=variable, value_from=k8s.ValueFrom(secret_key_ref=wanted))


def resources(order: Order) -> k8s.Resources:
    """CPU, memory and GPUs of a server with all its workers."""
    recipe = order.plan.recipe
    limit = reckon.memory_limit_mib(order).value
    return asked(
        reckon.cpus(recipe).value, reckon.memory_mib(order).value, limit, reckon.gpus(recipe).value
    )


def asked(cores: int, memory: int, limit: int, devices: int = 0) -> k8s.Resources:
    """Cores, memory and its limit in MiB, and GPUs.

    CPU has no limit, since a throttled worker would take longer.
    """
    gpu = {GPU: str(devices)} if devices else {}
    wanted = {"cpu": str(cores), "memory": f"{memory}Mi"}
    return k8s.Resources(requests=wanted | gpu, limits={"memory": f"{limit}Mi"} | gpu)


def mounts() -> list[k8s.VolumeMount]:
    """The mounts. All written files are in volumes, since the root is read-only."""
    return [PLAN_MOUNT, MODELS_MOUNT, TMP_MOUNT]


def volumes(order: Order) -> list[k8s.Volume]:
    """The volumes of the plan, of models and of temporary files."""
    return [plan_volume(order), models_volume(order, order.plan.kinds[0]), TMP]


def plan_volume(order: Order) -> k8s.Volume:
    """The ConfigMap of the plan; kustomize replaces its name by the one with a hash."""
    return k8s.Volume(name="plan", config_map=k8s.ConfigMapVolume(name=f"{order.name}-plan"))


def models_volume(order: Order, kind: Kind) -> k8s.Volume:
    """The volume of models: the named claim, else empty in each new pod, with room for `kind`."""
    claim = order.options.model_claim
    if claim:
        return k8s.Volume(name="models", persistent_volume_claim=k8s.Claim(claim_name=claim))
    size = reckon.models_gib([kind])
    limit = f"{size.value if size else reckon.UNKNOWN_MODELS_GIB}Gi"
    return k8s.Volume(name="models", empty_dir=k8s.EmptyDir(size_limit=limit))


def tolerations(recipe: Recipe) -> list[k8s.Toleration] | None:
    """Tolerate the taint that GPU nodes often have to keep other pods away."""
    return [k8s.Toleration(key=GPU)] if reckon.gpus(recipe).value else None


def on_products(order: Order, kind: Kind, *, required: bool = False) -> k8s.Affinity:
    """Prefer nodes with a GPU of the kind's products, or require them.

    They are required where `required`, or where the command line names the products.
    """
    requirement = k8s.NodeRequirement(key=LABEL, values=products(order, kind).value)
    if required or order.options.gpu_products:
        return k8s.Affinity(
            node_affinity=k8s.NodeAffinity(required=k8s.NodeSelector.of(requirement))
        )
    preference = k8s.NodeTerm(match_expressions=[requirement])
    return k8s.Affinity(
        node_affinity=k8s.NodeAffinity(
            preferred=[k8s.PreferredNode(weight=100, preference=preference)]
        )
    )


def metadata(order: Order, name: str = "", pods: str = "") -> k8s.Metadata:
    """The metadata of an object; by default it has the deployment's name. `pods` is as for
    `labels`.
    """
    return k8s.Metadata(
        name=name or order.name, namespace=order.options.namespace, labels=labels(order, pods)
    )


def digests(order: Order) -> dict[str, str]:
    """Annotations with the digests of the files that an object was made from."""
    found = {f"llmctl.io/{role}-sha256": digest for role, digest in order.stamp().items()}
    return found | {"llmctl.io/model": order.plan.recipe.model.source}


def selector(order: Order, name: str = "") -> k8s.Selector:
    """Selects the pods that serve clients, or those of `name`."""
    return k8s.Selector(match_labels={"app.kubernetes.io/name": name or order.name})


def pod_metadata(order: Order, **more: str) -> k8s.PodMetadata:
    """The metadata of pods that serve clients, with `more` annotations."""
    return k8s.PodMetadata(labels=labels(order), annotations=digests(order) | more)


def service(order: Order) -> k8s.Service:
    """The Service: one address for the pods that serve clients."""
    return k8s.Service(
        metadata=metadata(order),
        spec=k8s.ServiceSpec(
            selector={"app.kubernetes.io/name": order.name},
            ports=[k8s.ServicePort(name="http", port=PORT, target_port="http")],
        ),
    )


def claim_files(order: Order, pods: Sourced[int]) -> dict[str, str]:
    """models-claim.yaml, where a claim was named and its size is known.

    It is in no kustomization, so that deleting the deployment keeps the models. `pods` is the
    number of pods that may mount it at once.
    """
    size = reckon.models_gib(order.plan.kinds)
    if not order.options.model_claim or size is None:
        return {}
    claim = k8s.PersistentVolumeClaim(
        metadata=metadata(order, order.options.model_claim),
        spec=k8s.ClaimSpec(
            access_modes=["ReadWriteMany" if pods.value > 1 else "ReadWriteOnce"],
            resources=k8s.ClaimResources(requests={"storage": f"{size.value}Gi"}),
        ),
    )
    return {CLAIM_FILE: dump_yaml([claim], order.comment())}


def explain_models(order: Order, pods: Sourced[int]) -> list[ExplainedValue]:
    """The lines of EXPLAIN.md about the volume of models and the token for the hub."""
    claim, size = order.options.model_claim, reckon.models_gib(order.plan.kinds)
    key = f"{CLAIM_FILE}: accessModes"
    if not claim:
        bound = size.value if size else reckon.UNKNOWN_MODELS_GIB
        key, shown = "volume models", f"emptyDir, at most {bound} GiB"
        why = size.source if size else "a bound: no size is known (model.weight_bytes)"
        if any(kind.recipe.model.from_hub for kind in order.plan.kinds):
            why += "; each new pod downloads the model: --model-claim NAME keeps it"
        else:
            why += "; nothing is downloaded"
    elif size is None:
        key, shown = "volume models", claim
        why = "--model-claim; no size is known (model.weight_bytes): create it yourself"
    elif pods.value > 1:
        shown = "ReadWriteMany"
        why = f"{pods.source}: needs a storage class that several nodes can mount at once"
    else:
        shown, why = "ReadWriteOnce", f"{pods.source}: one node mounts it"
    lines = [ExplainedValue(key, shown, why)]
    if claim and size:
        lines.append(explain_value(f"{CLAIM_FILE}: storage", size, f"{size.value} GiB"))
    if reckon.from_hub(order.plan.recipe):
        where = f"Secret {order.name}, key {HUB_KEY}"
        why = "optional: gated models of the hub need it; it is in no file here"
        lines.append(ExplainedValue("HF_TOKEN", where, why))
    return lines


def preparation(order: Order, *keys: str) -> str:
    """Bash commands that create what no file may hold: the Secret with random `keys`; the claim.

    No command contains a secret: they are read from files, and the token for the hub from the file
    that `hf auth login` wrote.
    """
    namespace = order.options.namespace
    random = "<(openssl rand -hex 32 | tr -d '\\n')"
    words = [f"kubectl -n {namespace} create secret generic {order.name}"]
    words += [f"--from-file={key}={random}" for key in (SECRET_KEY, *keys)]
    lines = []
    if reckon.from_hub(order.plan.recipe):
        words.append(f"--from-file={HUB_KEY}=$HOME/.cache/huggingface/token")
        lines.append(
            f"# {HUB_KEY} is for gated models such as meta-llama's: accept the licence, then run "
            "hf auth login."
        )
        lines.append("# Without a gated model, leave the last line of the command out.")
    lines.append(" \\\n  ".join(words))
    if order.options.model_claim and reckon.models_gib(order.plan.kinds):
        lines.append(
            f"kubectl apply -f {CLAIM_FILE}    # once, if there is no such claim; deleting the "
            "rest keeps it"
        )
    return "\n".join(lines)


def deployment(
    order: Order, template: k8s.PodTemplate, strategy: k8s.Strategy, startup_s: int, pods: int = 1
) -> k8s.Deployment:
    """The deployment's own Deployment of `pods` pods, which may load for `startup_s` seconds."""
    return k8s.Deployment(
        metadata=metadata(order),
        spec=k8s.DeploymentSpec(
            replicas=pods,
            progress_deadline_seconds=startup_s + 60,
            strategy=strategy,
            selector=selector(order),
            template=template,
        ),
    )


def kustomized(
    order: Order,
    core: Mapping[str, BaseModel],
    operated: Mapping[str, BaseModel],
    maps: Sequence[k8s.ConfigMapGenerator],
    scaled: Sequence[tuple[str, str]] = (),
) -> dict[str, str]:
    """The files of core/ and of the objects that need operators, each with a kustomization.yaml.

    The outer kustomization removes the number of replicas of what the autoscaler scales (`scaled`,
    kinds and names), so that applying it again does not undo the autoscaler's.
    """
    remove = json.dumps([{"op": "remove", "path": "/spec/replicas"}])
    targets = [k8s.PatchTarget(kind=kind, name=name) for kind, name in scaled]
    objects: dict[str, BaseModel] = {f"core/{name}": content for name, content in core.items()}
    objects |= operated
    objects["core/kustomization.yaml"] = k8s.Kustomization(
        namespace=order.options.namespace,
        resources=sorted(core),
        config_map_generator=list(maps),
    )
    objects["kustomization.yaml"] = k8s.Kustomization(
        namespace=order.options.namespace,
        resources=["core", *sorted(operated)],
        config_map_generator=[dashboard_map(order)],
        patches=[k8s.Patch(target=target, patch=remove) for target in targets] or None,
    )
    return {name: dump_yaml([content], order.comment()) for name, content in objects.items()}


def plan_map(order: Order, *files: str) -> k8s.ConfigMapGenerator:
    """The ConfigMap of the plan and further files; a hash in its name rolls pods for a new plan."""
    return k8s.ConfigMapGenerator(name=f"{order.name}-plan", files=["plan.json", *files])


def dashboard_map(order: Order) -> k8s.ConfigMapGenerator:
    """The ConfigMap of the dashboard, with the label that Grafana's sidecar looks for."""
    options = k8s.GeneratorOptions(
        labels=DASHBOARD_LABEL | labels(order), disable_name_suffix_hash=True
    )
    return k8s.ConfigMapGenerator(
        name=f"{order.name}-dashboard", files=[DASHBOARD], options=options
    )
