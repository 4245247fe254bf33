"""What a rendered pod needs from the cluster: GPU labels of nodes, the hub's token, the volume of
models.
"""

import re
import subprocess
from typing import Any

import orders
import pytest
import yaml
from orders import changed

from toolkit.deploy.render import render_target
from toolkit.files.plan import Plan


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return orders.plan(tmp_path_factory.mktemp("gpu"), fit=orders.on("NVIDIA H200"), **orders.GPU)


def analytic(plan: Plan, name: str) -> Plan:
    """The same with nothing measured, on a GPU that the recipe calls so."""
    return changed(
        plan,
        fit__engine__analytic="data sheet",
        fit__engine__device=name,
        recipe__hardware__name=name,
    )


def rendered(plan: Plan, **options: object) -> tuple[dict[str, str], dict[str, Any]]:
    """All files, and the spec of the pod that has the GPU."""
    files = render_target("kubernetes", orders.order(plan, **options))
    return files, yaml.safe_load(files["base/deployment.yaml"])["spec"]["template"]["spec"]


def preferred(pod: dict[str, Any]) -> list[str]:
    (term,) = pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (wanted,) = term["preference"]["matchExpressions"]
    assert (wanted["key"], wanted["operator"]) == ("nvidia.com/gpu.product", "In")
    return wanted["values"]


@pytest.mark.slow
def test_nodes_are_selected_by_the_product_names_of_their_gpus(measured: Plan) -> None:
    assert preferred(rendered(measured)[1]) == ["NVIDIA-H200"]
    for name, values in (
        ("H200", ["NVIDIA-H200", "NVIDIA-H200-NVL"]),
        ("A100-80GB", ["NVIDIA-A100-80GB-PCIe", "NVIDIA-A100-SXM4-80GB"]),
        ("L4", ["NVIDIA-L4"]),
        ("RTX 6000", ["NVIDIA-RTX-6000"]),  # of no table: guessed, and said to be
    ):
        files, pod = rendered(analytic(measured, name))
        assert preferred(pod) == values
        assert ("guessed" in files["base/deployment.yaml"]) == (name == "RTX 6000")


@pytest.mark.slow
def test_the_hub_s_token_is_in_the_command_of_the_secret_and_in_no_file(measured: Plan) -> None:
    files, pod = rendered(measured)
    (container,) = pod["containers"]
    token = next(one for one in container["env"] if one["name"] == "HF_TOKEN")
    wanted = {"name": "llmctl-test", "key": "hf-token", "optional": True}
    assert token == {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": wanted}}
    head = re.findall(r"^#   (.*)$", files["base/kustomization.yaml"], re.MULTILINE)
    create = "\n".join(head[:3])
    subprocess.run(["bash", "-n"], input=create, text=True, check=True)
    assert "--from-file=api-key=<(" in create
    assert create.endswith("--from-file=hf-token=$HOME/.cache/huggingface/token")


def test_a_claim_holds_the_model_for_all_pods_that_mount_it(measured: Plan) -> None:
    """The autoscaler, or a rollout, may start a second pod, on another node."""
    files, pod = rendered(measured, model_claim="models")
    (volume,) = [one for one in pod["volumes"] if one["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    claim = yaml.safe_load(files["base/models-claim.yaml"])
    assert claim["metadata"]["name"] == "models"
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["spec"]["resources"] == {"requests": {"storage": "34Gi"}}
    kustomizations = [text for name, text in files.items() if name.endswith("kustomization.yaml")]
    assert not any("- models-claim" in text for text in kustomizations), (
        "deleting the deployment leaves the models"
    )
    assert "kubectl apply -f models-claim.yaml" in files["base/kustomization.yaml"]


def test_a_large_model_may_take_longer_to_load(measured: Plan) -> None:
    def bound_s(gib: int) -> int:
        plan = changed(measured, recipe__model__weight_bytes=gib << 30)
        probe = rendered(plan)[1]["containers"][0]["startupProbe"]
        return probe["periodSeconds"] * probe["failureThreshold"]

    assert bound_s(16) == 1800
    assert bound_s(140) == 3660, "140 GiB at 50 MB/s, and 10 minutes"
