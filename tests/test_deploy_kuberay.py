"""The target kuberay: its RayCluster is checked with our models and, where available, with
KubeRay's own CRD.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import orders
import pytest
import samples
import test_deploy_fleets
import yaml
from operator_kinds import RayCluster, check_pod
from said import says

import toolkit
from toolkit.cli.basis import plan_from
from toolkit.cluster.linger import actors, main, peers, wait
from toolkit.cluster.places import MachineShare, node_labels
from toolkit.deploy.render import render_target
from toolkit.deploy.targets.kuberay import RAY
from toolkit.errors import InputError
from toolkit.files.io import shipped_fit
from toolkit.files.plan import Plan, PlannedPolicy, PlannedWorkload
from toolkit.files.recipe import VllmSpec
from toolkit.files.shipped import recipe_path

CRD = os.environ.get("KUBERAY_CRD", "")
NEEDS_CRD = (
    "set KUBERAY_CRD to helm-chart/kuberay-operator/crds/ray.io_rayclusters.yaml of KubeRay 1.6 "
    "or newer"
)
Objects = dict[str, Any]
VLLM = "llama-3.1-8b-h200"
NAME = "llmctl-llama-3-1-8b-h200-1d7ac0"


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return orders.plan(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    changes = orders.GPU | {"engine": {"name": "transformers", "tensor_parallel_size": 2}}
    return orders.plan(tmp_path_factory.mktemp("gpu"), fit=samples.fit(), **changes)


@pytest.fixture(params=["cpu", "gpu"])
def plan(request: pytest.FixtureRequest) -> Plan:
    found: Plan = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return orders.fleet(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def servers() -> Plan:
    """Two servers of vLLM, with a shipped recipe and fit."""
    plan = plan_from(recipe_path(VLLM), shipped_fit(VLLM), None)[0]
    return plan.model_copy(update={"workers": 2})


@pytest.fixture(scope="module")
def servers_of_kinds(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tmp_path_factory.mktemp("servers") / "fleet.yaml"
    path.write_text(test_deploy_fleets.FLEET)
    return plan_from(path, None, None)[0]


@pytest.fixture(params=["cpu", "gpu", "fleet", "servers", "servers_of_kinds"])
def any_plan(request: pytest.FixtureRequest) -> Plan:
    found: Plan = request.getfixturevalue(request.param)
    return found


def objects(plan: Plan, **options: object) -> Objects:
    """What is rendered in YAML, by file."""
    files = render_target("kuberay", orders.order(plan, **options))
    return {name: yaml.safe_load(text) for name, text in files.items() if name.endswith(".yaml")}


def cluster(plan: Plan, **options: object) -> Objects:
    found: Objects = objects(plan, **options)["core/raycluster.yaml"]
    return found


def groups(data: Objects) -> list[Objects]:
    """The head's group and the workers', one for each kind."""
    return [data["spec"]["headGroupSpec"], *data["spec"]["workerGroupSpecs"]]


def test_our_model_refuses_unknown_keys(any_plan: Plan) -> None:
    data = cluster(any_plan)
    assert RayCluster.model_validate(data).model_dump(by_alias=True, exclude_none=True) == data
    data["spec"]["autoscalerOption"] = {}
    with pytest.raises(ValueError, match="Extra inputs"):
        RayCluster.model_validate(data)


def test_kubernetes_takes_the_pods_of_the_cluster(any_plan: Plan) -> None:
    for group in groups(cluster(any_plan)):
        check_pod(group["template"])


@pytest.mark.slow
def test_kubernetes_takes_all_objects_of_its_own_kinds(any_plan: Plan) -> None:
    checked = set()
    for data in objects(any_plan).values():
        if data["apiVersion"] in ("v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"):
            kubernetes_validate.validate(data, "1.37", strict=True)
            checked.add(data["kind"])
    assert checked == {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}


def strict(schema: Any) -> Any:
    """An OpenAPI schema as the API server reads it, but for keys that it would drop: here they are
    errors.
    """
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    open_ = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_:
        made["additionalProperties"] = False
    return made


@pytest.fixture(scope="module")
def crd() -> Any:
    """The validator of ray.io/v1 in KubeRay's CRD."""
    if not CRD:
        pytest.skip(NEEDS_CRD)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    versions = yaml.load(Path(CRD).read_text(encoding="utf-8"), loader)["spec"]["versions"]
    (schema,) = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1"]
    return jsonschema.Draft202012Validator(strict(schema))


def test_kuberay_takes_the_cluster(crd: Any, any_plan: Plan) -> None:
    assert [error.message for error in crd.iter_errors(cluster(any_plan))] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("surprise", 1),
        ("authOptions", {"mode": "none"}),
        ("authOptions", {"mode": "token", "x": 1}),
    ],
)
def test_the_check_against_the_crd_refuses_wrong_objects(
    crd: Any, cpu: Plan, key: str, value: object
) -> None:
    data = cluster(cpu)
    data["spec"][key] = value
    assert list(crd.iter_errors(data))


def test_only_a_worker_s_pod_has_room_for_its_actor(plan: Plan) -> None:
    head, workers = groups(cluster(plan))
    share = MachineShare.of(plan.recipe)
    params = workers["rayStartParams"]
    assert (int(params["num-cpus"]), int(params["num-gpus"])) == (share.cpus, share.gpus)
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (str(share.gpus) if share.gpus else None)
    assert {workers[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {plan.workers}
    assert head["rayStartParams"] == {
        "num-cpus": "0",
        "dashboard-host": "127.0.0.1",
        "object-store-memory": params["object-store-memory"],
    }


def test_a_fleet_has_a_group_for_each_kind(fleet: Plan) -> None:
    _, *found = groups(cluster(fleet))
    assert [(one["groupName"], one["replicas"]) for one in found] == [
        ("llmctl-test", 1),
        ("llmctl-small", 2),
        ("llmctl-cpus", 2),
    ]
    shares = [MachineShare.of(kind.recipe) for kind in fleet.kinds]
    params = [one["rayStartParams"] for one in found]
    assert [(int(one["num-cpus"]), int(one["num-gpus"])) for one in params] == [
        (one.cpus, one.gpus) for one in shares
    ]
    budget = objects(fleet)["core/poddisruptionbudget.yaml"]["spec"]
    assert budget["minAvailable"] == 4


def test_each_kind_is_on_machines_of_its_own(fleet: Plan) -> None:
    """And has the labels by which the front looks for it, but for those that Ray sets."""
    _, *found = groups(cluster(fleet))
    pods = [one["template"]["spec"] for one in found]
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = [one["affinity"]["nodeAffinity"][key]["nodeSelectorTerms"] for one in pods[:2]]
    assert [one[0]["matchExpressions"][0]["values"] for one in terms] == [
        ["NVIDIA-H200"],
        ["NVIDIA-A100-SXM4-80GB"],
    ]
    assert (pods[2]["nodeSelector"], "affinity" in pods[2]) == ({"pool": "cpus"}, False)
    labels = node_labels(fleet.kinds)
    assert [one["ray.io/accelerator-type"] for one in labels[:2]] == ["H200", "A100"]
    assert [one.get("labels") for one in found] == [None, None, labels[2]]


def test_an_unmeasured_fleet_says_that_machines_are_unknown(fleet: Plan) -> None:
    fit = fleet.fit.model_copy(
        update={"engine": fleet.fit.engine.model_copy(update={"analytic": "data sheet"})}
    )
    guessed = fleet.model_copy(update={"fit": fit})
    _, first, *_ = groups(cluster(guessed))
    assert (
        "preferredDuringSchedulingIgnoredDuringExecution"
        in first["template"]["spec"]["affinity"]["nodeAffinity"]
    )
    told = render_target("kuberay", orders.order(guessed))["EXPLAIN.md"]
    assert "name nodes" in told


def test_the_front_of_a_fleet_finds_its_workers_by_kind(fleet: Plan) -> None:
    assert "--workers" not in render_target("kuberay", orders.order(fleet))["core/front.sh"]
    files = render_target("ray", orders.order(fleet))
    assert (
        "| actors of small | 2, each with 1 CPU and 1 GPU | fleet; on nodes of Ray with "
        "ray.io/accelerator" in (files["EXPLAIN.md"])
    )


def test_a_pod_ends_after_the_pods_that_need_it(plan: Plan) -> None:
    found = objects(plan)
    head, workers = groups(found["core/raycluster.yaml"])
    front = found["core/deployment.yaml"]["spec"]["template"]
    graces = [
        each["spec"]["terminationGracePeriodSeconds"]
        for each in (front, workers["template"], head["template"])
    ]
    assert graces == sorted(set(graces))
    hooks = [
        each["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]
        for each in (workers, head)
    ]
    assert [" ".join(each["command"]) for each in hooks] == [
        "python -m toolkit.cluster.linger worker",
        "python -m toolkit.cluster.linger head 6379",
    ]


def test_the_token_is_the_same_for_all_and_in_no_file(plan: Plan) -> None:
    found = objects(plan)
    assert found["core/raycluster.yaml"]["spec"]["authOptions"] == {
        "mode": "token",
        "secretName": "llmctl-test",
    }
    (container,) = found["core/deployment.yaml"]["spec"]["template"]["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "llmctl-test",
        "key": "auth_token",
    }
    assert variables["RAY_AUTH_MODE"]["value"] == "token"
    for group in groups(found["core/raycluster.yaml"]):
        env = group["template"]["spec"]["containers"][0]["env"]
        assert "LLMCTL_API_KEY" not in [one["name"] for one in env], "callers' key is the front's"


def test_a_new_plan_does_not_change_the_cluster(cpu: Plan) -> None:
    """Its digests stand in the cluster's metadata; pod templates with them would have it built
    anew.
    """
    other = cpu.model_copy(
        update={"policy": cpu.policy.model_copy(update={"parameters": {"slice_tokens": 32}})}
    )
    old, new = (cluster(each) for each in (cpu, other))
    assert old["spec"] == new["spec"]
    assert old["metadata"] != new["metadata"]


def test_another_cluster_starts_another_front(cpu: Plan) -> None:
    def mark(**options: object) -> str:
        template = objects(cpu, **options)["core/deployment.yaml"]["spec"]["template"]
        found: str = template["metadata"]["annotations"]["llmctl.io/raycluster-sha256"]
        return found

    assert mark() == mark() != mark(image="llmctl:9-kuberay")


def test_only_pods_of_the_deployment_may_connect_to_ray(plan: Plan) -> None:
    found = objects(plan)
    ours = [{"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "llmctl-test"}}}]
    policy = found["core/networkpolicy-ray.yaml"]["spec"]
    assert policy["podSelector"] == {"matchLabels": {"ray.io/cluster": "llmctl-test"}}
    assert policy["ingress"] == [{"from": ours}]
    callers, ray = found["core/networkpolicy.yaml"]["spec"]["ingress"]
    assert callers["ports"] == [{"protocol": "TCP", "port": "http"}]
    assert ray == {"from": ours}
    pods = [group["template"] for group in groups(found["core/raycluster.yaml"])]
    for template in [*pods, found["core/deployment.yaml"]["spec"]["template"]]:
        assert template["metadata"]["labels"]["app.kubernetes.io/part-of"] == "llmctl-test"
    assert all("app.kubernetes.io/name" not in each["metadata"]["labels"] for each in pods), (
        "the Service's selector"
    )


def test_a_budget_is_a_number_since_a_raycluster_has_no_scale(cpu: Plan) -> None:
    budget = objects(cpu)["core/poddisruptionbudget.yaml"]["spec"]
    assert (budget["minAvailable"], "maxUnavailable" in budget) == (1, False)
    one = cpu.model_copy(update={"workers": 1})
    assert "core/poddisruptionbudget.yaml" not in objects(one), (
        "with one worker it would forbid every eviction"
    )


@pytest.mark.slow
def test_a_tuning_for_more_workers_puts_them_under_one_scheduler(cpu: Plan) -> None:
    workload = PlannedWorkload(trace="chat-small.jsonl", request_rate_rps=3.5, workers_needed=5)
    more = cpu.model_copy(update={"workload": workload})
    assert groups(cluster(more))[1]["replicas"] == 5
    script = render_target("kuberay", orders.order(more))["core/front.sh"]
    assert "  --workers 5 \\\n" in script
    assert "  --ray auto \\\n" in script


def test_the_front_connects_to_kuberay_s_head_service(cpu: Plan) -> None:
    (container,) = objects(cpu, namespace="llm")["core/deployment.yaml"]["spec"]["template"][
        "spec"
    ]["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert variables["RAY_ADDRESS"] == "llmctl-test-head-svc.llm.svc:6379"
    assert container["command"] == ["bash", "/etc/llmctl/front.sh"]


def test_servers_have_a_pod_each_and_one_image(
    servers: Plan,
) -> None:
    found = objects(servers, replicas=3)
    head, workers = groups(found["core/raycluster.yaml"])
    front = found["core/deployment.yaml"]["spec"]["template"]
    assert workers["replicas"] == 3
    assert (workers["rayStartParams"]["num-cpus"], workers["rayStartParams"]["num-gpus"]) == (
        "1",
        "1",
    )
    containers = [
        each["spec"]["containers"][0] for each in (head["template"], workers["template"], front)
    ]
    assert {each["image"] for each in containers} == {f"llmctl:{toolkit.__version__}-kuberay-vllm"}
    assert containers[1]["resources"]["requests"]["cpu"] == "3250m", "vLLM's processes, and Ray's"
    assert {"name": "USER", "value": "llmctl"} in containers[1]["env"]
    files = render_target("kuberay", orders.order(servers, replicas=3))
    assert "  --workers 3 \\\n" in files["core/front.sh"]
    assert "  --shutdown-timeout 30 \\\n" in files["core/front.sh"]
    build = "-f Dockerfile.vllm --build-arg BASE=vllm/vllm-openai:v0.32.0 ."
    assert build in files["EXPLAIN.md"]


def test_prometheus_finds_the_servers_at_the_front(servers: Plan, servers_of_kinds: Plan) -> None:
    found = objects(servers)
    pages = found["podmonitor-replicas.yaml"]
    assert pages["metadata"]["name"] == f"{NAME}-replica"
    (endpoint,) = pages["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/replicas/metrics"
    assert endpoint["authorization"]["credentials"]["name"] == NAME
    assert pages["spec"]["selector"] == found["podmonitor.yaml"]["spec"]["selector"]
    rules = found["prometheusrule.yaml"]["spec"]["groups"][0]["rules"]
    (queue,) = [one["expr"] for one in rules if one["alert"] == "LlmctlReplicaQueue"]
    assert f'job="default/{NAME}-replica"' in queue
    assert "LlmctlReplicaDown" in {one["alert"] for one in rules}
    several = objects(servers_of_kinds)["prometheusrule.yaml"]["spec"]["groups"][0]["rules"]
    assert "LlmctlReplicaQueue" not in {one["alert"] for one in several}


def test_another_plan_of_servers_does_not_change_the_cluster(servers: Plan) -> None:
    policy = PlannedPolicy(name="vllm", parameters={"max_num_seqs": 16})
    other = servers.model_copy(update={"policy": policy})
    assert cluster(servers)["spec"] == cluster(other)["spec"]


def test_servers_that_one_image_cannot_have_are_refused(servers: Plan) -> None:
    engine = servers.recipe.engine.model_copy(update={"vllm": VllmSpec(python="/opt/python")})
    named = servers.model_copy(
        update={"recipe": servers.recipe.model_copy(update={"engine": engine})}
    )
    with pytest.raises(InputError, match="engine's Python"):
        render_target("kuberay", orders.order(named))
    with pytest.raises(InputError, match="one image"):
        render_target("kuberay", orders.order(servers, replica_image="vllm/vllm-openai:v0.32.0"))
    hardware = servers.recipe.hardware.model_copy(update={"device": "cpu"})
    slow = servers.recipe.model_copy(update={"hardware": hardware, "name": "slow"})
    both = servers.model_copy(
        update={"others": [servers.kinds[0].model_copy(update={"recipe": slow, "workers": 1})]}
    )
    with pytest.raises(InputError, match=r"one image.*several"):
        render_target("kuberay", orders.order(both))
    files = render_target("kuberay", orders.order(both, image="registry/all:1"))
    assert 'image: "registry/all:1"' in files["core/raycluster.yaml"]


def test_replicas_are_refused(cpu: Plan) -> None:
    with pytest.raises(InputError, match="--replicas 2"):
        render_target("kuberay", orders.order(cpu, replicas=2))


def test_ray_is_the_version_that_the_image_installs() -> None:
    pins = (Path(toolkit.__file__).parent.parent / "constraints.txt").read_text(encoding="utf-8")
    assert re.findall(r"^ray==(.+)$", pins, re.MULTILINE) == [RAY]


@pytest.mark.slow
def test_the_fronts_script_waits_joins_and_becomes_the_server(cpu: Plan, tmp_path: Path) -> None:
    """With stand-ins for `ray` and `llmctl`: the head answers the second time."""
    script = tmp_path / "front.sh"
    script.write_text(render_target("kuberay", orders.order(cpu))["core/front.sh"])
    stand_in(
        tmp_path / "ray",
        'if [ "$1" = health-check ] && ! [ -e asked ]; then touch asked; echo no; exit 1; fi',
    )
    stand_in(tmp_path / "llmctl", "")
    stand_in(tmp_path / "sleep", "")
    variables = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "RAY_ADDRESS": "head:6379",
        "LLMCTL_API_KEY": "callers",
    }
    done = subprocess.run(
        ["bash", script], env=variables, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    said = (tmp_path / "said").read_text().splitlines()
    assert [line.split()[:2] for line in said] == [
        ["ray", "health-check"],
        ["sleep", "5"],
        ["ray", "health-check"],
        ["ray", "start"],
        ["llmctl", "serve"],
    ]
    assert [line.rsplit(" ", 1)[1] for line in said if "start" in line or "serve" in line] == [
        "key=",
        "key=callers",
    ]
    assert says(done.stderr, "head:6379")


def stand_in(path: Path, body: str) -> None:
    """A program that writes down how it was called, and whether it was given the callers' key."""
    note = f'echo "{path.name} $* key=${{LLMCTL_API_KEY:-}}" >> "{path.parent}/said"'
    path.write_text(f"#!/bin/bash\n{note}\n{body}\n")
    path.chmod(0o755)


def test_a_worker_waits_while_an_actor_runs() -> None:
    titles = ["raylet", "ray::WorkerActor.serve", "ray::WorkerActor", "ray::IDLE", "python"]
    assert actors([*titles, "ray::ServerActor.ended"]) == 3
    left = iter([True, True, False])
    slept = []
    wait(lambda: next(left), slept.append)
    assert len(slept) == 2


def test_the_head_counts_connections_of_other_machines() -> None:
    open_ = [(6379, "::ffff:10.0.0.3"), (6379, "10.0.0.2"), (6379, "127.0.0.1"), (8265, "10.0.0.9")]
    assert peers(open_, 6379, ["10.0.0.2", "127.0.0.1"]) == {"10.0.0.3"}


@pytest.mark.parametrize("words", [[], ["front"], ["head"], ["head", "x"]])
def test_linger_refuses_unknown_arguments(words: list[str]) -> None:
    with pytest.raises(SystemExit, match=r"'worker'.*'head PORT'"):
        main(words)
