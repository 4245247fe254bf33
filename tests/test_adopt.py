"""Recipes of servers that exist: from a command, values of charts, compose files, manifests."""

import json
from pathlib import Path

import pytest
from commands import llmctl
from said import says

from toolkit.adopt.command import read_command
from toolkit.adopt.documents import servers_in
from toolkit.adopt.recipe import ReadServer, read_server
from toolkit.backends.vllm.command import VllmCommand
from toolkit.backends.vllm.conformance.results import shipped_results
from toolkit.catalogue.classes import CLASSES
from toolkit.catalogue.flags import known_flags, read_flags, short_names
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.known import known_model
from toolkit.cli.arguments import ScenarioOptions
from toolkit.cli.scenario import Scenario
from toolkit.deploy.order import Options, Order
from toolkit.deploy.render import render_target
from toolkit.errors import InputError
from toolkit.files.io import file_text
from toolkit.files.recipe import VllmSpec
from toolkit.files.shipped import load_recipe, recipe_path

QWEN = "Qwen/Qwen3-32B"


def read(command: str) -> ReadServer:
    return read_server(read_command(command))


def what_of(command: str) -> dict[str, str]:
    """What becomes of each flag and variable, by the flag's words."""
    return {one.subject: one.what for one in read(command).verdicts}


def test_every_flag_of_every_compared_release_has_a_row() -> None:
    for result in shipped_results():
        unknown = set(result.flags) - set(known_flags()) - set(short_names())
        assert unknown == set(), result.vllm


def test_classes_of_flags_are_classes() -> None:
    assert {one.cls for one in known_flags().values()} <= {"", *CLASSES}
    assert all(
        one.what != "refused" or one.cls for n, one in known_flags().items() if "kv-t" not in n
    )


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-tp", "2"], "--tensor-parallel-size", "2"),
        (["--max_num_seqs=5"], "--max-num-seqs", "5"),
        (["--max-num-seq", "5"], "--max-num-seqs", "5"),
        (["-O3"], "--optimization-level", "3"),
        (["--compilation-config.mode", "3"], "--compilation-config", "3"),
        (["--served-model-name", "a", "b"], "--served-model-name", "a"),
        (["--device-memory-utilization", "0.9"], "--gpu-memory-utilization", "0.9"),
    ],
)
def test_flags_are_read_as_vllm_reads_them(words, name, value) -> None:
    (flag,), free = read_flags(words, strict=True)
    assert (flag.name, flag.value, free) == (name, value, [])


def test_a_switch_takes_no_word_and_may_be_negated() -> None:
    (first, second), free = read_flags(["--enforce-eager", "m", "--no-enable-prefix-caching"])
    assert (first.value, second.negated, free) == ("", True, ["m"])


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve {QWEN} --max-num-seqs 7",
        f"python3 -m vllm.entrypoints.openai.api_server --model {QWEN} --max-num-seqs 7",
        f"docker run --gpus all -e A=1 -v x:/y vllm/vllm-openai:v0.32.0 {QWEN} --max-num-seqs 7",
        f"docker run --rm vllm/vllm-openai --model {QWEN} --max-num-seqs=7",
        f"# a comment\nexport M={QWEN} N=7\nvllm serve $M \\\n  --max-num-seqs ${{N}}  # rows\n",
        f"N=7 vllm serve {QWEN} --max-num-seqs ${{N:-3}} && echo done",
        f"docker run img/vllm:1 sh -c 'vllm serve {QWEN} --max-num-seqs 7'",
    ],
)
def test_commands_of_every_form_are_read(text: str) -> None:
    server = read_command(text)
    assert server.model == QWEN
    assert [(one.name, one.value) for one in server.flags] == [("--max-num-seqs", "7")]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("ls", "no vLLM server"),
        ("vllm serve a; vllm serve b", "2"),
        ("vllm serve $MODEL", "MODEL"),
        ("vllm serve a 'b", "quotation"),
        ("vllm serve a b", "2"),
        ("vllm serve a --max-num-seqz 3", "--max-num-seqz"),
    ],
)
def test_a_command_that_cannot_be_read_says_why(text: str, named: str) -> None:
    with pytest.raises(InputError) as caught:
        read_command(text)
    assert says(caught.value.whole, named)


def test_an_unknown_flag_has_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        read_command("vllm serve a --max-num-seqz 3")
    assert "--max-num-seqs" in caught.value.hint


def test_nothing_is_dropped_unsaid() -> None:
    command = (
        "HF_TOKEN=secret VLLM_USE_V1=0 VLLM_USE_DEEP_GEMM=1 HF_HOME=/x "
        f"vllm serve {QWEN} --max-num-seqs 7 "
        "--attention-backend FLASH_ATTN --reasoning-parser qwen3 --api-key k --lora-modules a=b "
        """--kv-transfer-config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}' """
        "--data-parallel-size 1"
    )
    assert what_of(command) == {
        "--max-num-seqs 7": "modelled",
        "--attention-backend FLASH_ATTN": "measured",
        "--reasoning-parser qwen3": "ignored",
        "--api-key": "left out",
        "--lora-modules a=b": "refused",
        '--kv-transfer-config {"kv_connector":"NixlConnector","kv_role":"kv_both"}': "ignored",
        "--data-parallel-size 1": "ignored",
        "VLLM_USE_V1=0": "left out",
        "VLLM_USE_DEEP_GEMM=1": "measured",
        "HF_HOME=/x": "ignored",
        "HF_TOKEN": "left out",
    }


def test_of_a_flag_that_is_given_twice_the_last_counts() -> None:
    found = read("vllm serve a --max-num-seqs 7 --max-num-seqs 9")
    assert found.sections["policy"]["max_num_seqs"][0] == 9
    assert [one.what for one in found.verdicts] == ["ignored", "modelled"]


@pytest.mark.parametrize(
    ("value", "tokens"), [("4096", 4096), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500)]
)
def test_numbers_are_as_people_write_them(value: str, tokens: int) -> None:
    assert read(f"vllm serve a --max-model-len {value}").max_model_len == tokens


def test_names_that_look_like_numbers_stay_texts() -> None:
    found = read("vllm serve a --host 0.0.0.0 --revision 12345678 --served-model-name 7")
    assert found.sections["serve"]["host"][0] == "0.0.0.0"
    assert found.revision == "12345678"
    assert found.sections["serve"]["served_model_name"][0] == "7"


def test_drafts_become_a_key_of_the_recipe() -> None:
    found = read("""vllm serve a -sc '{"method":"qwen3_next_mtp","num_speculative_tokens":2}' """)
    assert found.sections["vllm"]["drafts"][0] == {"method": "mtp"}
    assert found.sections["policy"]["num_speculative_tokens"][0] == 2
    others = read("vllm serve a --spec-method suffix --spec-tokens 2")
    assert says(others.refusal, "suffix")


def test_a_config_file_is_opened_and_the_command_wins(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(f"model: {QWEN}\nmax-num-seqs: 5\nenable_prefix_caching: false\nport: 81\n")
    found = read(f"vllm serve --config {file} --max-num-seqs 7")
    assert found.server.model == QWEN
    assert found.sections["policy"]["max_num_seqs"][0] == 7
    assert found.sections["policy"]["prefix_caching"][0] is False
    assert found.sections["serve"]["port"][0] == 81


def test_a_recipe_repeats_the_command(capsys, tmp_path: Path) -> None:
    command = (
        f"VLLM_USE_DEEP_GEMM=1 vllm serve {QWEN} -tp 2 --max-model-len 16k --enforce-eager "
        "--gpu-memory-utilization 0.85 --no-enable-prefix-caching --max-num-seqs 64 --seed 3"
    )
    assert llmctl("recipe from-command", command, "--gpu", "h100-sxm") == 0
    file = tmp_path / "recipe.yaml"
    file.write_text(capsys.readouterr().out)
    recipe = load_recipe(file)
    vllm = recipe.engine.vllm
    assert vllm is not None
    assert recipe.model.max_model_len == 16_000
    assert recipe.engine.tensor_parallel_size == 2
    assert recipe.engine.gpu_memory_utilization == 0.85
    assert vllm.enforce_eager
    assert vllm.args == ["--seed", "3"]
    assert vllm.env == {"VLLM_USE_DEEP_GEMM": "1"}
    assert recipe.policy.parameters == {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "prefix_caching": False,
    }
    environment = VllmCommand(recipe, QWEN, "x").environment(tmp_path)
    assert environment["VLLM_USE_DEEP_GEMM"] == "1"


def test_a_revision_of_the_command_takes_the_place_of_the_known_one(capsys) -> None:
    line = f"vllm serve {QWEN} -tp 2 --revision main --served-model-name 'a\nb'"
    assert llmctl("recipe from-command", line, "--gpu", "h100-sxm", "--json") == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["model"]["revision"] == "main"
    assert recipe["serve"]["served_model_name"] == "a\nb"


def test_a_cache_that_the_checkpoint_asks_for_is_in_the_recipe(capsys, tmp_path: Path) -> None:
    known = known_model("qwen3-8b")
    assert known is not None
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**known.config, "quantization_config": quantization}))
    line = ("vllm serve a/b", "--gpu", "h100-sxm", "--model", file, "--json")
    assert llmctl("recipe from-command", *line) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["engine"]["vllm"]["kv_cache_dtype"] == "fp8"
    assert recipe["model"]["source"] == "a/b"


def test_a_server_s_own_devices_and_files_are_left_out() -> None:
    found = read(
        "docker run --network vllm-net --env-file x -e CUDA_VISIBLE_DEVICES=3 vllm/vllm-openai a"
    )
    assert found.server.model == "a"
    assert found.variables == {}
    assert {one.subject: one.what for one in found.verdicts} == {
        "CUDA_VISIBLE_DEVICES=3": "left out",
        "--env-file": "left out",
    }


def test_what_no_flag_sets_is_vllm_s_own_default(capsys) -> None:
    assert (
        llmctl("recipe from-command", "vllm serve openai/gpt-oss-20b", "--gpu", "b200", "--json")
        == 0
    )
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["model"]["max_model_len"] == 131_072  # the model's own limit
    assert recipe["engine"]["gpu_memory_utilization"] == 0.92
    assert recipe["serve"]["max_new_tokens"] == 131_071
    assert recipe["policy"]["parameters"]["max_num_batched_tokens"] == 16_384
    assert gpu_of("h200").usual_limits == (1024, 8192)
    assert gpu_of("a100-80gb").usual_limits == (256, 2048)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (f"vllm serve {QWEN} --enable-lora", "LoRA"),
        (f"vllm serve {QWEN} -tp 2 --max-num-seqs 0", "max_num_seqs"),
        (f"vllm serve {QWEN} --gpu-memory-utilization 95", "--gpu-memory-utilization 95"),
        (f"vllm serve {QWEN} --scheduler-cls a.B", "--scheduler-cls"),
        (f"vllm serve {QWEN} -tp 1 --max-model-len 40960 --quantization awq", "awq"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(capsys, line: str, named: str) -> None:
    assert llmctl("recipe from-command", line, "--gpu", "h100-sxm") == 2
    assert says(capsys.readouterr().err, named)


def test_a_model_that_also_sees_needs_the_flag_of_its_text_part(capsys, tmp_path: Path) -> None:
    text = known_model("qwen3-8b")
    assert text is not None
    config = {"model_type": "qwen3_vl", "text_config": dict(text.config), "vision_config": {"a": 1}}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    line = ("--gpu", "h100-sxm", "--model", file)
    assert llmctl("recipe from-command", "vllm serve a/b", *line) == 2
    assert says(capsys.readouterr().err, "--language-model-only")
    assert llmctl("recipe from-command", "vllm serve a/b --language-model-only", *line) == 0
    assert "source: a/b" in capsys.readouterr().out


def test_a_gpu_is_needed(capsys) -> None:
    assert llmctl("recipe from-command", f"vllm serve {QWEN}") == 2
    assert says(capsys.readouterr().err, "--gpu")


COMPOSE = f"""
services:
  web: {{image: nginx}}
  chat:
    image: vllm/vllm-openai:v0.32.0
    command: --model {QWEN} --max-num-seqs 7
    environment: [VLLM_USE_DEEP_GEMM=1, HF_TOKEN]
    deploy:
      replicas: 2
      resources: {{reservations: {{devices: [{{count: 2, capabilities: [gpu]}}]}}}}
"""
MANIFEST = f"""
apiVersion: apps/v1
kind: Deployment
metadata: {{name: chat}}
spec:
  replicas: 3
  template:
    spec:
      nodeSelector: {{nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.32.0
        command: ["/bin/sh", "-c"]
        args: ["vllm serve {QWEN} --max-num-seqs $(ROWS) -tp 2"]
        env:
        - {{name: ROWS, value: "7"}}
        - {{name: HF_TOKEN, valueFrom: {{secretKeyRef: {{name: a, key: b}}}}}}
        resources: {{limits: {{nvidia.com/gpu: "2"}}}}
"""
STACK = f"""
servingEngineSpec:
  modelSpec:
  - name: chat
    modelURL: {QWEN}
    replicaCount: 2
    requestGPU: 2
    vllmConfig: {{maxNumSeqs: 7, tensorParallelSize: 2, extraArgs: ["--seed", "1"]}}
  - name: spare
    enabled: false
    modelURL: x
"""
LLM_D = f"""
modelArtifacts: {{uri: "hf://{QWEN}", name: {QWEN}}}
decode:
  replicas: 2
  parallelism: {{tensor: 2, data: 1}}
  acceleratorTypes: {{labelKey: nvidia.com/gpu.product, labelValues: [NVIDIA-H200]}}
  containers:
  - name: vllm
    image: ghcr.io/llm-d/llm-d-cuda:v0.5
    modelCommand: vllmServe
    args: ["--max-num-seqs", "7"]
prefill: {{create: false}}
"""


@pytest.mark.parametrize(
    ("text", "name", "replicas", "gpus", "gpu"),
    [
        (COMPOSE, "chat", 2, 2, ""),
        (MANIFEST, "chat", 3, 2, "NVIDIA-H100-80GB-HBM3"),
        (STACK, "chat", 2, 2, ""),
        (LLM_D, "decode", 2, 2, "NVIDIA-H200"),
    ],
)
def test_files_of_every_form_are_read(tmp_path, text, name, replicas, gpus, gpu) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    (server,) = servers_in(file)
    assert (server.name, server.model) == (name, QWEN)
    assert (server.replicas, server.gpus, server.gpu) == (replicas, gpus, gpu)
    assert ("--max-num-seqs", "7") in [(one.name, one.value) for one in server.flags]


def test_the_production_stack_turns_prefix_caching_off_unless_it_is_asked_for(tmp_path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(STACK)
    (server,) = servers_in(file)
    assert read_server(server).sections["policy"]["prefix_caching"][0] is False


def test_a_file_s_gpu_and_replicas_are_taken(capsys, tmp_path: Path) -> None:
    file = tmp_path / "deployment.yaml"
    file.write_text(MANIFEST)
    assert llmctl("recipe from-manifest", file, "--json") == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert (recipe["hardware"]["gpu"], recipe["workers"]) == ("h100-sxm", 3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (STACK.replace("enabled: false\n", "enabled: true\n"), ("chat", "spare", "--name")),
        ("a: 1", ("servingEngineSpec",)),
        ("a: [", ("YAML",)),
        ("a: {{ .Values.x }}", ("helm template",)),
    ],
)
def test_a_file_without_one_server_says_which_there_are(capsys, tmp_path, text, named) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(text)
    assert llmctl("recipe from-values", file, "--gpu", "h200") == 2
    assert says(capsys.readouterr().err, *named)


def test_pools_that_prefill_apart_are_refused(capsys, tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    text = LLM_D.replace("prefill: {create: false}", "prefill:" + LLM_D.partition("decode:")[2])
    file.write_text(text.replace("prefill: {create: false}", "").rstrip().removesuffix("prefill:"))
    assert llmctl("recipe from-values", file, "--name", "prefill") == 2
    assert says(capsys.readouterr().err, "connector")


@pytest.mark.parametrize("name", ["HF_TOKEN", "a b"])
def test_a_recipe_holds_no_secret_and_no_odd_name(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        VllmSpec(env={name: "x"})


@pytest.mark.parametrize("target", ["compose", "kubernetes", "vllm"])
def test_every_rendered_server_of_vllm_has_the_environment(target: str) -> None:
    """Other targets run `llmctl serve`, which takes it from the plan."""
    name = "llama-3.1-8b-h200"
    plan = Scenario.open(ScenarioOptions(recipe=recipe_path(name), fit=name)).make_plan()
    assert plan.recipe.engine.vllm is None or not plan.recipe.engine.vllm.env
    vllm = (plan.recipe.engine.vllm or VllmSpec()).model_copy(
        update={"env": {"VLLM_USE_DEEP_GEMM": "0 1"}}
    )
    engine = plan.recipe.engine.model_copy(update={"vllm": vllm})
    recipe = plan.recipe.model_copy(update={"engine": engine})
    plan = plan.model_copy(update={"recipe": recipe})
    options = Options(folder="/srv/llmctl", replicas=2)
    files = render_target(target, Order(plan, file_text(plan), options))
    lines = [
        line for one, text in files.items() if one != "plan.json" for line in text.splitlines()
    ]
    assert any("VLLM_USE_DEEP_GEMM" in line and "0 1" in line for line in lines)
