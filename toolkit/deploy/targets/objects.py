"""Objects that every deployment in a cluster has, whatever runs its workers: metadata, Service, kustomizations."""

from __future__ import annotations

from toolkit.deploy.kinds.base import Metadata, PodMetadata, Selector
from toolkit.deploy.kinds.kubernetes import (
    ClaimResources,
    ClaimSpec,
    ConfigMapGenerator,
    GeneratorOptions,
    PersistentVolumeClaim,
    Service,
    ServicePort,
    ServiceSpec,
)
from toolkit.deploy.order import Order, Reckoned, Told, told
from toolkit.deploy.reckon import from_hub, models_gib
from toolkit.deploy.targets.pods import HUB_KEY, PORT, SECRET_KEY, labels
from toolkit.files.yaml_text import dump_yaml

DASHBOARD = "dashboard.json"
CLAIM_FILE = "models-claim.yaml"
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


def claim_files(order: Order, pods: Reckoned[int]) -> dict[str, str]:
    """models-claim.yaml where a claim was named and its size is known.

    It is in no kustomization, so that deleting the deployment leaves the models. `pods` may mount it at once.
    """
    size = models_gib(order.plan.kinds)
    if not order.options.model_claim or size is None:
        return {}
    claim = PersistentVolumeClaim(
        metadata=metadata(order, order.options.model_claim),
        spec=ClaimSpec(
            access_modes=["ReadWriteMany" if pods.value > 1 else "ReadWriteOnce"],
            resources=ClaimResources(requests={"storage": f"{size.value}Gi"}),
        ),
    )
    return {CLAIM_FILE: dump_yaml([claim], order.comment())}


def models_told(order: Order, pods: Reckoned[int]) -> list[Told]:
    """The lines of EXPLAIN.md about the models' volume, and about the hub's token."""
    claim, size = order.options.model_claim, models_gib(order.plan.kinds)
    if not claim:
        held = f"emptyDir, at most {size.value} GiB" if size else "emptyDir"
        why = f"{size.source}; each" if size else "each"
        lines = [Told("volume models", held, f"{why} new pod downloads the model: --model-claim NAME keeps it")]
    elif size is None:
        lines = [Told("volume models", claim, "--model-claim; no size is known (model.weight_bytes): make it yourself")]
    elif pods.value > 1:
        many = f"{pods.source}: needs a storage class that several nodes mount at once"
        lines = [Told(f"{CLAIM_FILE}: accessModes", "ReadWriteMany", many)]
    else:
        lines = [Told(f"{CLAIM_FILE}: accessModes", "ReadWriteOnce", f"{pods.source}: one node mounts it")]
    if claim and size:
        lines.append(told(f"{CLAIM_FILE}: storage", size, f"{size.value} GiB"))
    if from_hub(order.plan.recipe):
        where = f"Secret {order.name}, key {HUB_KEY}"
        lines.append(Told("HF_TOKEN", where, "optional: the hub asks for it where a model is gated; in no file here"))
    return lines


def preparation(order: Order, *keys: str) -> str:
    """The commands that make what the deployment needs and no file holds: its Secret, with random `keys`; the claim.

    For bash. No secret stands in a command: they are read from files, the hub's token from where `hf auth login` left
    it.
    """
    namespace = order.options.namespace
    random = "<(openssl rand -hex 32 | tr -d '\\n')"
    words = [f"kubectl -n {namespace} create secret generic {order.name}"]
    words += [f"--from-file={key}={random}" for key in (SECRET_KEY, *keys)]
    lines = []
    if from_hub(order.plan.recipe):
        words.append(f"--from-file={HUB_KEY}=$HOME/.cache/huggingface/token")
        lines.append(f"# {HUB_KEY} is for gated models, as meta-llama's are: accept the licence, then hf auth login.")
        lines.append("# Without it, end the command one line earlier.")
    lines.append(" \\\n  ".join(words))
    if order.options.model_claim and models_gib(order.plan.kinds):
        lines.append(f"kubectl apply -f {CLAIM_FILE}    # once, if there is no such claim; deleting the rest leaves it")
    return "\n".join(lines)


def plan_map(order: Order, *files: str) -> ConfigMapGenerator:
    """The plan, and what lies beside it in the pod; named after the content, so that another one rolls the pods."""
    return ConfigMapGenerator(name=f"{order.name}-plan", files=["plan.json", *files])


def dashboard_map(order: Order) -> ConfigMapGenerator:
    """The Grafana dashboard where Grafana's sidecar finds it."""
    options = GeneratorOptions(labels=DASHBOARD_LABEL | labels(order), disable_name_suffix_hash=True)
    return ConfigMapGenerator(name=f"{order.name}-dashboard", files=[DASHBOARD], options=options)
