"""vLLM servers in YAML: Kubernetes manifests, compose files, and the values of two Helm charts.

The charts are vLLM's production-stack (`servingEngineSpec.modelSpec`) and llm-d's modelservice
(`modelArtifacts` and `decode`). A server is read as the chart's template would start it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.adopt.command import (
    IMAGE,
    FoundServer,
    commands_of,
    in_image,
    read_command,
    server_of,
)
from toolkit.catalogue.flags import read_flags
from toolkit.errors import InputError, nearest
from toolkit.files.strict import load_documents

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915")
# Labels of nodes with the name of their GPUs, of NVIDIA's feature discovery and of clouds.
GPU_LABELS = (
    *("nvidia.com/gpu.product", "gpu.nvidia.com/model", "cloud.google.com/gke-accelerator"),
    *("k8s.amazonaws.com/accelerator", "gpu.nvidia.com/class"),
)
POD_TEMPLATES = {  # where a kind of object has its pods, and how many
    "Pod": ("spec",),
    "Job": ("spec", "template", "spec"),
    **dict.fromkeys(
        ("Deployment", "StatefulSet", "ReplicaSet", "DaemonSet", "ReplicationController"),
        ("spec", "template", "spec"),
    ),
    "LeaderWorkerSet": ("spec", "leaderWorkerTemplate", "workerTemplate", "spec"),
    "InferenceService": ("spec", "predictor"),
}
LEADER = ("spec", "leaderWorkerTemplate", "leaderTemplate", "spec")
FORMS = ("values", "compose", "manifest")  # of files
NOT_GIVEN = "$(NOT_GIVEN)"  # stands for a value that the cluster sets


def read_documents(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a YAML file. Raises `InputError` where it is not YAML."""
    found = [one for one in load_documents(path) if isinstance(one, dict)]
    return [item for one in found for item in _items(one)]


def _items(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of a `List`, else the document."""
    if document.get("kind") == "List" and isinstance(document.get("items"), list):
        return [one for one in document["items"] if isinstance(one, dict)]
    return [document]


def servers_in(path: Path, forms: Iterable[str] = FORMS) -> list[FoundServer]:
    """Return the vLLM servers of a file, which is read in each of these forms.

    Raises `InputError` where there is none; `server_of` says what else is refused.
    """
    readers = {"values": _of_values, "compose": _of_compose, "manifest": _of_object}
    servers = [
        server
        for document in read_documents(path)
        for form in forms
        for server in readers[form](document)
    ]
    if not servers:
        raise InputError(
            f"{path}: no vLLM server in it",
            "a container or a service has an image with vllm in its name, or runs vllm serve; "
            "values have servingEngineSpec.modelSpec (production-stack) or decode (llm-d)",
        )
    return servers


def chosen(servers: list[FoundServer], name: str | None, where: Path) -> FoundServer:
    """Return the server with a name. Raises `InputError` where it is not there, or where there are
    several and none was named.
    """
    names = [server.name for server in servers]
    if name is not None:
        if name not in names:
            raise InputError(f"{where}: no server '{name}'", nearest(name, names))
        return servers[names.index(name)]
    if len(servers) > 1:
        listed = ", ".join(names)
        raise InputError(f"{where}: {len(servers)} servers: {listed}", f"--name {names[0]}")
    return servers[0]


def _of_compose(document: dict[str, Any]) -> Iterator[FoundServer]:
    services = document.get("services")
    for name, service in services.items() if isinstance(services, dict) else ():
        if not isinstance(service, dict):
            continue
        words = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
        variables = _compose_variables(service.get("environment"))
        server = _started(str(service.get("image", "")), words, variables)
        if server is None:
            continue
        deploy = service.get("deploy")
        deploy = deploy if isinstance(deploy, dict) else {}
        devices = _at(deploy, "resources", "reservations", "devices")
        counts = [_count(one) for one in devices] if isinstance(devices, list) else []
        beside = [("env_file", "is not read")] if service.get("env_file") else []
        yield replace(
            server,
            name=str(name),
            replicas=_whole(deploy.get("replicas"), 1),
            gpus=sum(counts),
            beside=beside,
        )


def _count(device: object) -> int:
    """Return the GPUs that a device of compose reserves; 0: all of them."""
    if not isinstance(device, dict):
        return 0
    ids = device.get("device_ids")
    return len(ids) if isinstance(ids, list) else _whole(device.get("count"), 0)


def _compose_variables(given: object) -> dict[str, str]:
    if isinstance(given, dict):
        return {str(key): "" if value is None else str(value) for key, value in given.items()}
    lines = given if isinstance(given, list) else []
    pairs = (str(line).partition("=") for line in lines)
    return {name: value if mark else NOT_GIVEN for name, mark, value in pairs}


def _words(given: object) -> list[str]:
    """Return a command that is a list or one line of a shell."""
    if isinstance(given, list):
        return [str(one) for one in given]
    if not isinstance(given, str):
        return []
    escaped = given.replace("$$", "$")
    return [word for command in commands_of(escaped) for word in command]


def _started(image: str, words: list[str], variables: dict[str, str]) -> FoundServer | None:
    """Return the server that a container starts; None: it is another program."""
    script = next((word for word in words if "\n" in word or "vllm serve" in word), "")
    if script:  # sh -c 'export ...; vllm serve ...'
        assignments = "".join(f"export {k}={_quoted(v)}\n" for k, v in variables.items())
        inner = read_command(assignments + script)
        return replace(inner, variables={**variables, **inner.variables})
    server = server_of(words, variables)
    is_vllm = IMAGE.fullmatch(image) and not re.search(r"router|sim|operator|exporter", image)
    if server is None and is_vllm and (not words or words[0].startswith("-") or "/" in words[0]):
        return server_of(in_image(words), variables)
    return server


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\"'\"'") + "'"


def _of_object(document: dict[str, Any]) -> Iterator[FoundServer]:
    """Yield the servers of a Kubernetes object."""
    keys = POD_TEMPLATES.get(str(document.get("kind")))
    if keys is None:
        if document.get("kind") == "VLLMRuntime":
            yield from _of_runtime(document)
        return
    name = str(_at(document, "metadata", "name") or "")
    replicas = _whole(_at(document, "spec", "replicas"), 1)
    pods = [pod for where in (LEADER, keys) if isinstance(pod := _at(document, *where), dict)]
    size = _whole(_at(document, "spec", "leaderWorkerTemplate", "size"), 1)
    for pod in pods[:1]:
        for server in _of_pod(pod):
            flags = server.flags
            if size > 1:  # its pods share one model
                flags = [*flags, *read_flags(["--nnodes", str(size)])[0]]
            yield replace(server, name=name, replicas=replicas, flags=flags)


def _of_pod(pod: dict[str, Any]) -> Iterator[FoundServer]:
    containers = pod.get("containers")
    for container in containers if isinstance(containers, list) else ():
        if not isinstance(container, dict):
            continue
        words = [*_listed(container.get("command")), *_listed(container.get("args"))]
        server = _started(str(container.get("image", "")), words, _variables(container.get("env")))
        if server is None:
            continue
        beside = [("envFrom", "is not read")] if container.get("envFrom") else []
        yield replace(
            server, gpus=_gpus(container.get("resources")), gpu=_label(pod), beside=beside
        )


def _listed(given: object) -> list[str]:
    return [str(one) for one in given] if isinstance(given, list) else []


def _variables(given: object) -> dict[str, str]:
    """Return a container's variables, with `NOT_GIVEN` for a value from elsewhere."""
    pairs = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    return {
        str(one.get("name")): NOT_GIVEN if "valueFrom" in one else str(one.get("value", ""))
        for one in pairs
    }


def _gpus(resources: object) -> int:
    for part in ("limits", "requests"):
        given = _at(resources, part)
        for name in GPU_RESOURCES:
            if isinstance(given, dict) and name in given:
                return _whole(given[name], 0)
    return 0


def _label(pod: object) -> str:
    """Return what the labels of a pod's nodes say of their GPUs; '': nothing."""
    selector = _at(pod, "nodeSelector")
    for name in GPU_LABELS:
        if isinstance(selector, dict) and name in selector:
            return str(selector[name])
    terms = _at(
        pod,
        *("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
        "nodeSelectorTerms",
    )
    for term in terms if isinstance(terms, list) else ():
        for one in _at(term, "matchExpressions") or ():
            values = _at(one, "values")
            if _at(one, "key") in GPU_LABELS and isinstance(values, list) and values:
                return str(values[0])
    return ""


def _of_runtime(document: dict[str, Any]) -> Iterator[FoundServer]:
    """Yield the server of a VLLMRuntime, the object of production-stack's operator."""
    spec = document.get("spec")
    spec = spec if isinstance(spec, dict) else {}
    model = _at(spec, "model") or {}
    config = _at(spec, "vllmConfig") or {}
    deployment = _at(spec, "deploymentConfig") or {}
    words = _chart_flags(config, enables_caching=False)
    for key, flag in (("maxModelLen", "--max-model-len"), ("dtype", "--dtype"),
                      ("maxNumSeqs", "--max-num-seqs")):  # fmt: skip
        if model.get(key):
            words += [flag, str(model[key])]
    if config.get("enableLora") or model.get("enableLoRA"):
        words.append("--enable-lora")
    lmcache = _at(spec, "lmCacheConfig") or {}
    words += _transfer(lmcache)
    url = str(model.get("modelURL", ""))
    server = server_of(["vllm", "serve", url, *words], _variables(config.get("env")))
    assert server is not None
    gpus = _whole(_at(deployment, "resources", "gpu"), 0)
    name = str(_at(document, "metadata", "name") or "")
    yield replace(server, name=name, replicas=_whole(deployment.get("replicas"), 1), gpus=gpus)


def _of_values(document: dict[str, Any]) -> Iterator[FoundServer]:
    models = _at(document, "servingEngineSpec", "modelSpec")
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and model.get("enabled") is not False:
            yield _of_model_spec(model, document)
    if "decode" in document or "prefill" in document:
        yield from _of_modelservice(document)


def _of_model_spec(model: dict[str, Any], document: dict[str, Any]) -> FoundServer:
    """Return the server of one entry of production-stack's modelSpec."""
    config = _at(model, "vllmConfig") or {}
    words = ["--enable-lora"] if model.get("enableLoRA") else []
    words += ["--enable-auto-tool-choice"] if model.get("enableTool") else []
    if model.get("toolCallParser"):
        words += ["--tool-call-parser", str(model["toolCallParser"])]
    words += _chart_flags(config, enables_caching=bool(config))
    if model.get("modelRevision"):
        words += ["--revision", str(model["modelRevision"])]
    words += _transfer(_at(model, "lmcacheConfig") or {})
    if model.get("chatTemplate"):
        words += ["--chat-template", "chat-template.jinja"]
    ray = _at(model, "raySpec")
    if isinstance(ray, dict) and ray.get("enabled", True):
        words += ["--distributed-executor-backend", "ray"]
    variables = {
        **_variables(_at(document, "servingEngineSpec", "env")),
        **_variables(model.get("env")),
    }
    if str(config.get("v0", "")) == "1":
        variables["VLLM_USE_V1"] = "0"
    server = server_of(["vllm", "serve", str(model.get("modelURL", "")), *words], variables)
    assert server is not None
    beside = [("keda", "is not read")] if _at(model, "keda", "enabled") else []
    return replace(
        server,
        name=str(model.get("name", "")),
        replicas=_whole(model.get("replicaCount"), 1),
        gpus=_whole(model.get("requestGPU"), 0) or _gpus(model.get("resources")),
        gpu=_label(model) or _label(_at(document, "servingEngineSpec")),
        beside=beside,
    )


def _chart_flags(config: Mapping[str, Any], *, enables_caching: bool) -> list[str]:
    """Return vLLM's flags of production-stack's vllmConfig.

    Args:
        enables_caching: the chart writes the flag of prefix caching also where the key is absent.
    """
    words: list[str] = []
    for key, flag in (
        ("enableChunkedPrefill", "enable-chunked-prefill"),
        ("enablePrefixCaching", "enable-prefix-caching"),
    ):
        if key in config or (enables_caching and key == "enablePrefixCaching"):
            words.append(f"--{'' if config.get(key) else 'no-'}{flag}")
    for key, flag in (
        ("maxModelLen", "--max-model-len"),
        ("dtype", "--dtype"),
        ("tensorParallelSize", "--tensor-parallel-size"),
        ("maxNumSeqs", "--max-num-seqs"),
        ("gpuMemoryUtilization", "--gpu-memory-utilization"),
        ("maxLoras", "--max-loras"),
        ("runner", "--runner"),
        ("convert", "--convert"),
        ("pipelineParallelSize", "--pipeline-parallel-size"),
    ):
        if config.get(key) is not None:
            words += [flag, str(config[key])]
    return words + _listed(config.get("extraArgs"))


def _transfer(lmcache: Mapping[str, Any]) -> list[str]:
    """Return the connector that the chart adds for LMCache."""
    if not lmcache.get("enabled"):
        return []
    role = str(lmcache.get("kvRole", "kv_both"))
    return [
        "--kv-transfer-config",
        f'{{"kv_connector":"LMCacheConnectorV1","kv_role":"{role}"}}',
    ]


def _of_modelservice(document: dict[str, Any]) -> Iterator[FoundServer]:
    """Yield the servers of llm-d's modelservice: its pool for decodes, which is the only one where
    prefills are not apart.
    """
    for pool in ("decode", "prefill"):
        part = document.get(pool)
        part = part if isinstance(part, dict) else {}
        replicas = _whole(part.get("replicas"), 1)
        if not part or part.get("create") is False or not replicas:
            continue
        uri = str(_at(document, "modelArtifacts", "uri") or "")
        name = str(_at(document, "modelArtifacts", "name") or "")
        model = uri.removeprefix("hf://") if uri.startswith("hf://") else name
        parallel = _at(part, "parallelism") or {}
        for container in part.get("containers") or ():
            server = _of_modelservice_container(container, model, parallel)
            if server is None:
                continue
            if pool == "prefill":  # requests go from one pool to the other
                server = replace(
                    server, flags=[*server.flags, *read_flags(["--kv-transfer-config", "{}"])[0]]
                )
            labels = _at(part, "acceleratorTypes", "labelValues")
            gpu = str(labels[0]) if isinstance(labels, list) and labels else _label(part)
            gpus = _gpus(container.get("resources")) or _whole(_at(parallel, "tensor"), 0)
            yield replace(server, name=pool, replicas=replicas, gpus=gpus, gpu=gpu)


def _of_modelservice_container(
    container: object, model: str, parallel: Mapping[str, Any]
) -> FoundServer | None:
    if not isinstance(container, dict):
        return None
    variables = {"MODEL_NAME": model} | _variables(container.get("env"))
    words = [*_listed(container.get("command")), *_listed(container.get("args"))]
    if container.get("modelCommand") == "vllmServe":
        words = ["vllm", "serve", model, *_listed(container.get("args"))]
        for key, flag in (("tensor", "--tensor-parallel-size"), ("data", "--data-parallel-size")):
            if _whole(parallel.get(key), 1) > 1:
                words += [flag, str(parallel[key])]
    server = _started(str(container.get("image", "")), words, variables)
    if server is None:
        return None
    if "/model-cache" in server.model or server.model.startswith("/"):
        return replace(server, model=model)  # the chart mounts it there
    return server


def _at(value: object, *keys: str) -> Any:
    """Return what is below keys; None: nothing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _whole(value: object, default: int) -> int:
    """Return a number of replicas or GPUs, also of a text such as '1'; else the default."""
    try:
        return int(str(value))
    except ValueError:
        return default
