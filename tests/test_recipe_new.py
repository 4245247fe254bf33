"""`llmctl recipe new`: the recipe that it writes, what it refuses, and a GPU's name as hardware."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import samples
from commands import llmctl, printed, refused

from toolkit.catalogue.gpus import GPUS, gpu_of
from toolkit.catalogue.known import KNOWN
from toolkit.catalogue.models import facts_of
from toolkit.catalogue.quantization import KeptModules
from toolkit.cli.arguments import open_recipe
from toolkit.deploy.doctor import check_kv_bytes, check_sizes
from toolkit.errors import InputError
from toolkit.files import find_model
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.new_recipe import TraceLengths, Wish, new_recipe
from toolkit.files.recipe import Recipe


def made(tmp_path: Path, model: str, gpu: str, **wish: Any) -> Recipe:
    """The recipe for a model on a GPU, as a command reads it."""
    file = tmp_path / "recipe.yaml"
    file.write_text(new_recipe(find_model.find_model(model), Wish(GPUS[gpu], **wish)).text)
    return open_recipe(file)


@pytest.mark.parametrize("model", [name for name in KNOWN if not name.startswith("gpt-oss")])
def test_a_recipe_agrees_with_the_sizes_and_the_doctor(tmp_path: Path, model: str) -> None:
    recipe = made(tmp_path, model, "h200")
    facts = facts_of(KNOWN[model].config)
    assert recipe.model.weight_bytes == facts.weight_bytes
    assert recipe.model.kv_bytes_per_token == facts.kv_bytes_per_token
    assert recipe.model.pinned
    check_kv_bytes(recipe)
    assert [check.status for check in check_sizes(recipe)] == ["ok"]


@pytest.mark.parametrize(
    ("model", "gpu", "wish", "parallel", "workers"),
    [
        ("llama-3.1-8b", "h100-sxm", {}, 1, 1),
        ("llama-3.1-8b", "h100-sxm", {"gpus": 4}, 1, 4),
        ("llama-3.3-70b", "h100-sxm", {"gpus": 4}, 4, 1),
        ("llama-3.3-70b", "h100-sxm", {"gpus": 4, "quantization": "fp8"}, 2, 2),
        ("qwen3-32b", "l40s", {"gpus": 2, "quantization": "fp8"}, 2, 1),
        ("llama-3.1-8b", "l4", {"gpus": 1}, 1, 1),  # two rows: few, but they fit
        ("llama-3.1-8b", "h100-sxm", {"tensor_parallel": 2}, 2, 1),
        ("deepseek-v3", "h200", {}, 8, 1),
    ],
)
def test_the_smallest_group_that_holds_the_model(
    tmp_path: Path, model: str, gpu: str, wish: dict[str, Any], parallel: int, workers: int
) -> None:
    recipe = made(tmp_path, model, gpu, **wish)
    assert recipe.engine.tensor_parallel_size == parallel
    assert recipe.workers == workers
    assert recipe.model.quantization == wish.get("quantization")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["llama-3.3-70b", "--gpu", "h100-sxm", "--gpus", "1"], "--gpus 2"),
        (["qwen3-32b", "--gpu", "l40s", "--gpus", "1"], "--quantization fp8"),
        (["llama-3.1-8b", "--gpu", "l4", "--gpus", "1", "--max-model-len", "65536"], "--max-model"),
        (["llama-3.1-8b", "--gpu", "h101-sxm"], "'h100-sxm'"),
        (["llama-3.1-8b"], "--gpu"),
        (["lama-3.1-8b", "--gpu", "h100-sxm"], "'llama-3.1-8b'"),
        (["./nowhere/config.json", "--gpu", "h100-sxm"], "no such file"),
        (["llama-3.1-8b", "--gpu", "h100-sxm", "--quantization", "fp9"], "'fp8'"),
        (["llama-3.1-8b", "--gpu", "h100-sxm", "--tensor-parallel-size", "3"], "1, 2, 4, 8"),
        (
            ["llama-3.1-8b", "--gpu", "h200", "--gpus", "1", "--tensor-parallel-size", "2"],
            "--gpus 1",
        ),
        (["llama-3.1-8b", "--gpu", "h100-sxm", "--max-model-len", "200000"], "131,072"),
        (["llama-3.1-8b", "--gpu", "h100-sxm", "--sla", "ttft_p99=2"], "ttft_p99_s"),
    ],
)
def test_refused_in_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert llmctl("recipe", "new", *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err
    lines = captured.err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"]


def test_a_config_alone_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps({**KNOWN["qwen3-8b"].config, "architectures": ["Any"]}))
    for given in (config, folder):
        words = [given, "--gpu", "l40s", "--sla", "ttft_p99_s=2"]
        assert llmctl("recipe", "new", *words) == 0
        captured = capsys.readouterr()
        file = tmp_path / "recipe.yaml"
        file.write_text(captured.out)
        recipe = open_recipe(file)
        assert recipe.name == "my-model-l40s"
        assert recipe.model.source == str(folder)
        assert recipe.model.load_format == "dummy"  # no weights beside it
        assert recipe.sla == {"ttft_p99_s": 2.0}
        assert max(map(len, captured.out.splitlines())) <= 140
        assert "KV cache" in captured.err


def test_every_byte_count_has_its_reason(tmp_path: Path) -> None:
    text = new_recipe(find_model.find_model("deepseek-v3"), Wish(GPUS["h200"])).text
    lines = text.splitlines()
    keys = ("weight_bytes", "kv_bytes_per_token", "memory_gib", "peak_tflops", "bandwidth_gb_s")
    for key in keys:
        (place,) = [number for number, line in enumerate(lines) if line.startswith(f"  {key}:")]
        assert "#" in lines[place] or lines[place - 1].startswith("  #"), key


@pytest.mark.parametrize("content", ["{}", "[1]", "no json", '{"model": {}, "hardware": {}}'])
def test_a_file_that_is_no_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError):
        find_model.find_model(str(tmp_path))


def test_a_hub_id_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    file = tmp_path / commit / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(dict(KNOWN["qwen3-8b"].config)))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(file))
    found = find_model.find_model("some-org/Some-8B")
    assert (found.source, found.revision) == ("some-org/Some-8B", commit)


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr(find_model, "_hub_answers", lambda: False)
    with pytest.raises(InputError) as caught:
        find_model.find_model("some-org/Some-8B")
    assert "some-org/Some-8B" in caught.value.message
    assert "config.json" in caught.value.hint


@pytest.mark.parametrize("command", ["doctor", "profile"])
def test_a_config_given_as_a_recipe_points_to_recipe_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(KNOWN["qwen3-8b"].config)))
    for given in (tmp_path / "config.json", tmp_path):
        assert llmctl(command, given) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert "recipe new" in lines[1]


@pytest.mark.parametrize("words", [["gpus"], ["models"]])
def test_what_is_known_is_listed(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    known = {"gpus": GPUS, "models": KNOWN}[words[0]]
    assert llmctl("recipe", *words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in known)
    assert llmctl("recipe", *words, "--json") == 0
    found = json.loads(capsys.readouterr().out)[words[0]]
    assert [one["name"] for one in found] == list(known)
    assert all(one["source"] for one in found)


def recipe_with(hardware: object, **sections: Any) -> Recipe:
    """A sample recipe with other hardware."""
    data = samples.recipe(**sections).model_dump(mode="json")
    return Recipe.model_validate_json(json.dumps({**data, "hardware": hardware}))


def test_the_name_of_a_gpu_is_hardware() -> None:
    gpu = GPUS["h100-sxm"]
    for given in ("h100-sxm", {"gpu": "h100-sxm"}):
        hardware = recipe_with(given).hardware
        assert hardware.device == "cuda"
        assert hardware.memory_gib == gpu.memory_gib
        assert hardware.peak_tflops == gpu.tflops["bf16"]
        assert hardware.bandwidth_gb_s == gpu.bandwidth_gb_s
        assert hardware.usd_per_hour is None  # an example of a price is not the user's
    assert recipe_with({"gpu": "h100-sxm", "memory_gib": 70.5}).hardware.memory_gib == 70.5
    again = Recipe.model_validate_json(recipe_with("h100-sxm").model_dump_json())
    assert again.hardware == hardware


def test_only_vllm_quantizes_weights(tmp_path: Path) -> None:
    data = made(tmp_path, "qwen3-8b", "h200", quantization="fp8").model_dump(mode="json")
    data["engine"] = {"name": "rebatch"}
    data["policy"] = {"name": "past-future"}
    with pytest.raises(ValueError, match="quantization"):
        Recipe.model_validate_json(json.dumps(data))


SMI_NAMES = {
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "AMD Instinct MI300X": "mi300x",
}


@pytest.mark.parametrize(("name", "gpu"), SMI_NAMES.items())
def test_the_driver_s_name_of_a_gpu_is_understood(tmp_path: Path, name: str, gpu: str) -> None:
    recipe = samples.recipe(hardware={"gpu": name})
    assert recipe.hardware.gpu == gpu
    assert gpu_of(name.lower()) is GPUS[gpu]


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA H200 NVL"),
        *("NVIDIA L40", "NVIDIA H20-3e", "NVIDIA A100-PCIE-40GB", "NVIDIA GH200 144G HBM3e"),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 3090", "NVIDIA", ""),
    ],
)
def test_another_card_is_not_taken_for_one_that_is_known(name: str) -> None:
    with pytest.raises(InputError) as caught:
        gpu_of(name)
    assert caught.value.hint


def test_an_unknown_type_says_what_to_do_and_not_to_rename_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**KNOWN["qwen3-8b"].config, "model_type": "qwen4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert llmctl("recipe", "new", tmp_path, "--gpu", "h200") == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "qwen4" in error
    assert "did you mean" not in hint
    assert all(key in hint for key in ("kv_bytes_per_token", "weight_bytes", "llmctl profile"))


LLAMA = KNOWN["llama-3.1-8b"].config


def kept_by(*listed: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [*listed]}}


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {  # what it has, and the word that the error names
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    "negative": ({"num_hidden_layers": -1}, "num_hidden_layers"),
    "huge": ({"hidden_size": 10**18}, "hidden_size"),
    "more than 64 bits": ({"hidden_size": 10**40}, "config.json"),
    "kinds of layers": ({"layer_types": ["full_attention"] * 100_000}, "layer_types"),
    "dense layers": ({"mlp_only_layers": [0] * 100_000, "num_experts": 8}, "mlp_only_layers"),
    "long value": ({"qk_nope_head_dim": [None] * 100_000}, "qk_nope_head_dim"),
    "names": (kept_by(*(f"a{k}" for k in range(100_000))), "names"),
    "wildcards": (kept_by(*(f"*{k}*" for k in range(2_000))), "wildcards"),
    "long name": (kept_by("*a" * 100_000), "200,000"),
    "lookaround": (kept_by(r"re:(?!x).*"), "re:(?!x).*"),
    "counts": (kept_by(r"re:\w{1000}"), "re:\\w{1000}"),
    "large expression": (kept_by(r"re:((\w{9}){9}){9}"), "re:((\\w{9}){9}){9}"),
    "no expression": (kept_by("re:("), "re:("),
    "not a number": ({"num_experts_per_tok": float("nan")}, "num_experts_per_tok"),
    "infinite": ({"attention_bias": float("-inf")}, "attention_bias"),
    "lists in a list": ({"compress_ratios": [[], {}]}, "compressed"),
}


@pytest.mark.parametrize(("odd", "named"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_config_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], odd: dict[str, Any], named: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **odd}))
    error, *_ = refused(capsys, "recipe new", file, "--gpu", "h200")
    assert named in error
    assert len(error) < 400


def test_a_config_that_is_nested_deep_or_long_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    for inner in (
        "[" * 500 + "]" * 500,
        "[" * 100_000 + "]" * 100_000,
        '"' + "x" * 9_000_000 + '"',
    ):
        file.write_text(f'{{"model_type": "llama", "a": {inner}}}')
        refused(capsys, "recipe new", file, "--gpu", "h200")
    file.write_text(json.dumps(LLAMA))
    (tmp_path / "hf_quant_config.json").write_text("[1]")
    assert llmctl("recipe new", file, "--gpu", "h200") == 0
    (tmp_path / "hf_quant_config.json").write_text("{")
    assert "hf_quant_config.json" in refused(capsys, "recipe new", file, "--gpu", "h200")[0]


@pytest.mark.parametrize("expression", ["re:(a+)+$", "re:(.*)*x", r"re:(\w+\.?)+$!", "re:(.|.)*!"])
def test_an_expression_that_would_backtrack_without_end_has_one(
    tmp_path: Path, expression: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, **kept_by(expression)}))
    new_recipe(find_model.find_model(str(file)), Wish(GPUS["h200"]))


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        ("lm_head", {"lm_head"}),
        ("model.layers.0", {"model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj"}),
        ("gate", {"model.layers.0.mlp.gate"}),
        ("model.*.q_proj", {"model.layers.0.self_attn.q_proj"}),
        ("model.layers.[1-9]", set()),
        (r"re:.*mlp\.gate$", {"model.layers.0.mlp.gate"}),
        (r"re:mlp\.gate$", set()),
        (r"re:.*self_attn\.(q|k)_proj", {"model.layers.0.self_attn.q_proj"}),
    ],
)
def test_which_modules_keep_their_precision(listed: str, kept: set[str]) -> None:
    names = ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj")
    assert {name for name in names if name in KeptModules([listed])} == kept
    assert {name for name in names if name in KeptModules(["nothing", listed, "re:x"])} == kept


LONG = TraceLengths("folder/long.jsonl", [500, 9_000, 20_000], 9_500)


@pytest.mark.parametrize(
    ("wish", "longest", "output"),
    [
        ({}, 20_480, 9_500),  # in steps of 1,024
        ({"max_model_len": 4096}, 4096, 4095),
    ],
)
def test_the_limits_follow_from_a_trace(
    tmp_path: Path, wish: dict[str, Any], longest: int, output: int
) -> None:
    recipe = made(tmp_path, "llama-3.1-8b", "h200", traffic=LONG, **wish)
    assert recipe.model.max_model_len == longest
    assert recipe.serve.max_new_tokens == output
    assert recipe.tune.trace == LONG.name


@pytest.mark.slow
@pytest.mark.parametrize("longest", [16, 64, 200, 256])
def test_a_recipe_of_short_requests_can_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], longest: int
) -> None:
    words = ["llama-3.1-8b", "--gpu", "h100-sxm", "--max-model-len", longest, "--json"]
    text = printed(capsys, "recipe new", *words)["text"]
    recipe, profile, fit = (tmp_path / name for name in ("recipe.yaml", "profile.json", "fit.json"))
    recipe.write_text(text)
    assert llmctl("profile", recipe, "--analytic", "--out", profile) == 0
    assert llmctl("fit", profile, "--out", fit) == 0
    assert read_file(Fit, fit, {"recipe": recipe}).engine.max_model_len == longest


def test_the_command_reads_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe", "new", "llama-3.1-8b", "--gpu", "h200", "--trace", "chat-small", "--json"]
    assert llmctl(*words) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["tune"]["trace"] == "chat-small"
    assert recipe["model"]["max_model_len"] == 8192
