"""Sizes of every family against vLLM's own classes, and the general rule."""

import json
from pathlib import Path
from typing import Any

import pytest
from samples import HEAD

from toolkit.catalogue.caches import groups_of_config, is_plain
from toolkit.catalogue.families import FAMILIES
from toolkit.catalogue.general import INDEX
from toolkit.catalogue.gpus import GPUS
from toolkit.catalogue.layers import text_config
from toolkit.catalogue.models import (
    facts_of,
    kv_bytes_per_token,
    not_computed,
    weight_bytes_on,
)
from toolkit.deploy.doctor import check_kv_bytes
from toolkit.errors import InputError
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.model_shapes import AttentionShapes, DeltaShapes, LatentShapes
from toolkit.files.find_model import find_model
from toolkit.files.modelled import refuse_recipe
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.profiling.analytic import RESERVED, analytic_profile, pass_shape, pass_times
from toolkit.profiling.shapes import shapes_of
from toolkit.sim.paged_engine import PagedEngine
from toolkit.units import GIB

ROWS = json.loads(Path(__file__, "../data/families.json").resolve().read_text("utf-8"))["models"]
MODELS: dict[str, dict[str, Any]] = {row["name"]: row for row in ROWS}
PLAIN: dict[str, Any] = {
    "model_type": "a_new_one",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
PLAIN_BYTES = 2 * (2 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 512) + 1024 * 256 + 5 * 256)


def test_every_type_in_the_table_has_a_config_here() -> None:
    kinds = {
        text_config(row["config"]).get("model_type") or row["config"]["model_type"] for row in ROWS
    }
    assert kinds == FAMILIES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_text_part_has_the_parameters_of_vllms_own_classes(name: str) -> None:
    row = MODELS[name]
    facts = facts_of(row["config"])
    assert facts.parameters == pytest.approx(row["parameters"], rel=1e-5)
    on_two = sum(one.parameters / min(2, one.most_gpus or 2) for one in facts.modules)
    assert on_two == pytest.approx(row["on_two"], rel=5e-4)


@pytest.mark.parametrize(
    ("name", "bytes_per_token", "formula"),
    [
        ("Qwen/Qwen3.5-27B", 65_536, "16 layers * 4 KV heads"),  # of 64 layers
        ("XiaomiMiMo/MiMo-V2-Flash", 2 * (9 * 4 + 39 * 8) * 320, "192 + 128"),
        ("google/gemma-4-26B-A4B", 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512), "5 layers * 2 KV"),
        ("deepseek-ai/DeepSeek-V3.2", 61 * (2 * 576 + 132), "index"),
        ("zai-org/GLM-5.2", 78 * 2 * 576 + 21 * 132, "21 layers of an index"),
        ("nvidia/MiniMax-M3-NVFP4", 2 * (60 * 2 * 4 * 128 + 57 * 128), "57 layers of an index"),
        ("deepseek-ai/DeepSeek-V4-Flash", 3915, "compressed"),
        ("nvidia/Llama-3_3-Nemotron-Super-49B-v1", 2 * 49 * 8 * 128 * 2, "49 layers"),
    ],
)
def test_the_bytes_of_a_token_are_those_of_vllms_specs(
    name: str, bytes_per_token: int, formula: str
) -> None:
    found = kv_bytes_per_token(MODELS[name]["config"], "bfloat16")
    assert found is not None
    assert found[0] == bytes_per_token
    assert formula in found[1]


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("deepseek-ai/DeepSeek-V4-Flash", "compressed"),
        ("nvidia/Nemotron-H-56B-Base-8K", "Mamba"),
        ("cohere2", "side by side"),
        ("lfm2", "convolutions"),
        ("zai-org/GLM-5.2", "an index that layers share"),
        ("nvidia/MiniMax-M3-NVFP4", "sparse"),
    ],
)
def test_laws_are_refused_by_name_where_operators_are_missing(name: str, what: str) -> None:
    assert what in ", ".join(not_computed(MODELS[name]["config"], 8192, None))


@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5"]
)
def test_laws_of_latent_attention_are_computed(name: str) -> None:
    config = MODELS[name]["config"]
    assert not_computed(config, 8192, facts_of(config).scheme) == []


@pytest.mark.parametrize(
    ("name", "counts", "mixer"),
    [
        ("Qwen/Qwen3.5-27B", [48, 16], DeltaShapes),
        ("Qwen/Qwen3.5-35B-A3B", [30, 10], DeltaShapes),
        ("qwen3_next", [3, 1], DeltaShapes),
        ("google/gemma-4-26B-A4B", [25, 5], AttentionShapes),
        ("gemma2", [2, 2], AttentionShapes),
        ("glm4", [4], AttentionShapes),
        ("deepseek-ai/DeepSeek-V3", [3, 58], LatentShapes),
        ("zai-org/GLM-5", [3, 75], LatentShapes),
        ("XiaomiMiMo/MiMo-V2-Flash", [1, 39, 8], AttentionShapes),
        ("step3p5", [1, 2, 1], AttentionShapes),
    ],
)
def test_the_sorts_of_layers_of_a_family(
    tmp_path: Path, name: str, counts: list[int], mixer: type
) -> None:
    config = MODELS[name]["config"]
    assert not_computed(config, 8192, facts_of(config).scheme) == []
    shapes = shapes_of(recipe_of(tmp_path, config, "b300"))
    assert [one.count for one in shapes.sorts] == counts
    assert isinstance(shapes.sorts[0].mixer, mixer)
    assert isinstance(
        shapes.sorts[-1].mixer, LatentShapes if mixer is LatentShapes else AttentionShapes
    )


def test_a_layer_has_the_sizes_of_its_config(tmp_path: Path) -> None:
    gemma = shapes_of(recipe_of(tmp_path, MODELS["google/gemma-4-26B-A4B"]["config"], "b300"))
    inside, full = (one.mixer for one in gemma.sorts)
    assert isinstance(inside, AttentionShapes)
    assert isinstance(full, AttentionShapes)
    assert (inside.head_dim, inside.kv_heads, inside.window) == (256, 8, 1024)
    assert (full.head_dim, full.kv_heads, full.window) == (512, 2, 0)
    assert gemma.window == 1024
    # a dense MLP and experts side by side, each with norms of its own
    assert all(
        (one.inner, one.experts, one.norms, one.reduces) == (2112, True, 7, 3)
        for one in gemma.sorts
    )
    qwen = shapes_of(recipe_of(tmp_path, MODELS["Qwen/Qwen3.5-27B"]["config"]))
    delta, attention = (one.mixer for one in qwen.sorts)
    assert delta == DeltaShapes(48, 16, 128, 128, 4, state_bytes=4)
    assert attention == AttentionShapes(24, 4, 256, 256, gate=1, qk_norm=True)
    assert shapes_of(recipe_of(tmp_path, MODELS["gemma2"]["config"])).sorts[0].norms == 4
    step = shapes_of(recipe_of(tmp_path, MODELS["step3p5"]["config"])).sorts[0].mixer
    assert isinstance(step, AttentionShapes)
    assert step.gate == step.value  # one number per head
    nas = MODELS["nvidia/Llama-3_3-Nemotron-Super-49B-v1"]["config"]
    sorts = shapes_of(recipe_of(tmp_path, nas)).sorts
    assert sum(one.count for one in sorts if one.mixer) == 49
    assert {one.reduces for one in sorts} == {1, 2}


def sparse_recipe(tmp_path: Path, gpu: str, dtype: str) -> Recipe:
    """A recipe of DeepSeek V3.2 in fp8 with a cache in a dtype."""
    cache = {"num_bits": 8, "type": "float"} if dtype == "fp8" else None
    given = {"quant_method": "fp8", "weight_block_size": [128, 128], "kv_cache_scheme": cache}
    config = MODELS["deepseek-ai/DeepSeek-V3.2"]["config"] | {"quantization_config": given}
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return new_recipe(find_model(str(folder)), Wish(GPUS[gpu], gpus=16)).recipe()


@pytest.mark.parametrize(
    ("gpu", "dtype", "each"),
    [
        ("h200", "bfloat16", 2 * 576 + 132),
        ("h100-sxm", "fp8", 656 + 132),  # with scales, and keys with a position in 16 bits
        ("b200", "fp8", 576 + 132),
    ],
)
def test_a_token_of_sparse_attention_has_the_bytes_of_the_gpus_kernels(
    tmp_path: Path, gpu: str, dtype: str, each: int
) -> None:
    recipe = sparse_recipe(tmp_path, gpu, dtype)
    assert recipe.engine.vllm is not None
    assert recipe.engine.vllm.kv_cache_dtype == dtype
    assert recipe.model.kv_bytes_per_token == 61 * each
    check_kv_bytes(recipe)


@pytest.mark.parametrize(("gpu", "dtype"), [("h200", "bfloat16"), ("b200", "fp8")])
def test_sparse_attention_has_one_cache_and_reads_the_best_of_it(
    tmp_path: Path, gpu: str, dtype: str
) -> None:
    recipe = sparse_recipe(tmp_path, gpu, dtype)
    profile = analytic_profile(recipe, HEAD)
    assert profile.engine.kv_bytes_per_token == recipe.model.kv_bytes_per_token  # whole on each GPU
    assert profile.steps is not None
    assert profile.steps.resolved is not None
    (group,) = profile.steps.resolved.groups
    assert group.kind == "mla"
    assert group.page_bytes == group.block * profile.engine.kv_bytes_per_token
    fit = fit_profile(profile, HEAD)
    assert fit.steps is not None
    assert fit.steps.law.window == 2049
    engine = PagedEngine.of(fit)
    assert engine is not None
    assert engine.caches is not None
    assert engine.caches.window == 2049
    # Beyond the best 2,048, a step pays for the index alone.
    times = [
        fit.steps.law.forward_s(pass_shape(64, tokens, window=2049)) for tokens in (512, 2048, 3584)
    ]
    assert times[1] - times[0] > 2 * (times[2] - times[1]) > 0


def test_a_cache_that_vllm_chooses_by_the_gpu_is_asked_for(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, MODELS["zai-org/GLM-5"]["config"], "b300")
    vllm = recipe.engine.vllm
    assert vllm is not None
    assert vllm.kv_cache_dtype == "bfloat16"
    engine = recipe.engine.model_copy(
        update={"vllm": vllm.model_copy(update={"kv_cache_dtype": None})}
    )
    with pytest.raises(InputError, match="chooses the dtype"):
        pass_times(recipe.model_copy(update={"engine": engine}))


@pytest.mark.parametrize(("name", "state_bytes"), [("qwen3_next", 2), ("Qwen/Qwen3.5-27B", 4)])
def test_states_have_the_dtype_that_vllm_takes(tmp_path: Path, name: str, state_bytes: int) -> None:
    """Of the model, where the config names none."""
    config = MODELS[name]["config"]
    mixer = shapes_of(recipe_of(tmp_path, config)).sorts[0].mixer
    assert isinstance(mixer, DeltaShapes)
    assert mixer.state_bytes == state_bytes
    groups = groups_of_config(config, "bfloat16")
    assert groups is not None
    kept = mixer.heads * mixer.key_dim * mixer.value_dim * state_bytes
    inputs = mixer.mixed * (mixer.kernel - 1) * 2
    (page,) = {one.page_bytes for one in groups}
    assert kept + inputs <= page < 1.2 * (kept + inputs)  # of whole blocks of attention


def test_each_layer_has_its_own_precision(tmp_path: Path) -> None:
    """Layer 0 of Kimi K2 has no experts, so names that keep 16 bits there say nothing of them."""
    ignored = ["*self_attn*", "lm_head", "model.layers.0.*"]
    given = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignored}
    config = MODELS["moonshotai/Kimi-K2-Instruct"]["config"]
    shapes = shapes_of(recipe_of(tmp_path, config | {"quantization_config": given}, "b200"))
    dense, sparse = shapes.sorts
    assert (dense.count, dense.experts, dense.inner_weights) == (1, False, "bfloat16")
    assert (sparse.expert_weights, sparse.inner_weights) == ("nvfp4", "nvfp4")
    assert isinstance(sparse.mixer, LatentShapes)
    assert (sparse.mixer.weights, sparse.mixer.out) == ("bfloat16", "bfloat16")


def test_chunks_that_no_request_outgrows_are_full_attention(tmp_path: Path) -> None:
    """Llama 4's have 8,192 tokens. Dense layers and ones with experts take turns."""
    config = MODELS["meta-llama/Llama-4-Maverick-17B-128E-Instruct"]["config"]
    recipe = recipe_of(tmp_path, config, "b300")
    assert recipe.model.max_model_len == 8192
    shapes = shapes_of(recipe)
    assert [(one.count, one.experts) for one in shapes.sorts] == [(24, False), (24, True)]
    groups = groups_of_config(config, "bfloat16", longest=8192)
    assert groups is not None
    assert is_plain(groups)
    longer = recipe.model.model_copy(update={"max_model_len": 8193})
    with pytest.raises(InputError, match="chunks of 8,192 tokens"):
        refuse_recipe(recipe.model_copy(update={"model": longer}))


def test_each_gpu_holds_what_is_not_divided(tmp_path: Path) -> None:
    """Of DeepSeek V3 on 8 GPUs: the projections to latent vectors, routers and norms."""
    config = MODELS["deepseek-ai/DeepSeek-V3"]["config"]
    recipe = recipe_of(tmp_path, config, "b300")
    assert recipe.engine.tensor_parallel_size == 8
    facts = facts_of(config)
    latent = 61 * 7168 * (1536 + 512 + 64)
    each = facts.weight_bytes_on(8)
    assert each - facts.weight_bytes / 8 > latent * 7 / 8
    made = analytic_profile(recipe, HEAD)
    memory = recipe.hardware.memory_gib
    assert memory is not None
    share = recipe.engine.gpu_memory_utilization - RESERVED
    assert made.engine.kv_budget_bytes == pytest.approx(memory * GIB * share - each, abs=2)
    told = {"model_type": "deepseek_v3"}
    assert weight_bytes_on(told, "", 800, 8) == 100.0  # a config that does not tell


def test_a_key_that_decides_a_size_is_asked_for() -> None:
    config = dict(MODELS["nvidia/Nemotron-H-56B-Base-8K"]["config"])
    del config["ssm_state_size"]
    with pytest.raises(InputError, match="ssm_state_size"):
        facts_of(config)


def test_an_unknown_type_with_known_keys_is_counted_by_the_general_rule() -> None:
    facts = facts_of(PLAIN)
    assert facts.family == "general rule"
    assert facts.weight_bytes == PLAIN_BYTES


@pytest.mark.parametrize("change", [{"router_gates": 4}, {"hidden_act": "relu2"}])
def test_a_key_that_the_general_rule_does_not_know_is_named(change: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refusal:
        facts_of(PLAIN | change)
    assert next(iter(change)) in refusal.value.message
    assert INDEX in refusal.value.hint
    assert facts_of(PLAIN | change, stored_bytes=PLAIN_BYTES).weight_bytes == PLAIN_BYTES


def test_an_index_that_disagrees_refuses_the_general_rule() -> None:
    assert facts_of(PLAIN, stored_bytes=round(PLAIN_BYTES * 1.004)).parameters
    with pytest.raises(InputError, match=f"{PLAIN_BYTES:,}"):
        facts_of(PLAIN, stored_bytes=round(PLAIN_BYTES * 1.006))


def test_the_index_beside_a_config_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN | {"router_gates": 4}))
    assert find_model(str(tmp_path)).stored_bytes == 0
    index = {"metadata": {"total_size": PLAIN_BYTES}, "weight_map": {}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    found = find_model(str(tmp_path))
    assert found.stored_bytes == PLAIN_BYTES
    assert new_recipe(found, Wish(GPUS["h200"])).facts.weight_bytes == PLAIN_BYTES


def recipe_of(tmp_path: Path, config: dict[str, Any], gpu: str = "h200") -> Recipe:
    """The recipe that `recipe new` makes of a config, as a command reads it."""
    folder = tmp_path / "a-model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    made = new_recipe(find_model(str(folder)), Wish(GPUS[gpu]))
    file = tmp_path / "recipe.yaml"
    file.write_text(made.text)
    return load_recipe(file)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-VL-2B-Instruct", "google/gemma-4-26B-A4B"])
def test_a_model_that_sees_is_served_as_text(tmp_path: Path, name: str) -> None:
    recipe = recipe_of(tmp_path, MODELS[name]["config"])
    text = (tmp_path / "recipe.yaml").read_text()
    assert recipe.engine.vllm is not None
    assert recipe.engine.vllm.args == ["--language-model-only"]
    assert "# text alone: inputs of vision" in text
    facts = facts_of(MODELS[name]["config"])
    assert recipe.model.weight_bytes == facts.weight_bytes  # vLLM leaves the tower out
    assert facts_of(recipe.model.config).weight_bytes == facts.weight_bytes
    refuse_recipe(recipe)
    (tmp_path / "recipe.yaml").write_text(text.replace("[--language-model-only]", "[]"))
    with pytest.raises(InputError, match="--language-model-only"):
        refuse_recipe(load_recipe(tmp_path / "recipe.yaml"))


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3.5-35B-A3B", "nvidia/Nemotron-H-56B-Base-8K", "XiaomiMiMo/MiMo-V2-Flash"]
)
def test_the_keys_in_a_recipe_have_the_same_sizes(tmp_path: Path, name: str) -> None:
    config = MODELS[name]["config"]
    recipe = recipe_of(tmp_path, config, "b200")
    kept = facts_of(recipe.model.config)
    facts = facts_of(config)
    assert (kept.modules, kept.kv_bytes_per_token) == (facts.modules, facts.kv_bytes_per_token)
    for gpus in (1, 2):
        ours = groups_of_config(recipe.model.config, "bfloat16", gpus=gpus)
        assert ours == groups_of_config(config, "bfloat16", gpus=gpus)


def quantized(ignored: list[str], name: str = "Qwen/Qwen3-0.6B") -> dict[str, Any]:
    given = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ignored}
    return MODELS[name]["config"] | {
        "quantization_config": given | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    }


def test_a_recipe_names_the_cache_and_what_keeps_16_bits(tmp_path: Path) -> None:
    ignored = ["lm_head", *(f"model.layers.{k}.self_attn*" for k in range(62))]
    recipe = recipe_of(tmp_path, quantized(ignored, "MiniMaxAI/MiniMax-M2.5"))
    assert recipe.engine.vllm is not None
    assert recipe.engine.vllm.kv_cache_dtype == "fp8"
    given = recipe.model.config["quantization_config"]
    assert isinstance(given, dict)
    assert given["ignore"] == ["lm_head", "model.layers.*.self_attn*"]
    shapes = shapes_of(recipe)
    assert shapes.cache_bytes == 1
    (sort,) = shapes.sorts
    assert isinstance(sort.mixer, AttentionShapes)
    assert (sort.mixer.qk_norm, sort.mixer.norm_reduces) == (True, 2)
    assert (sort.mixer.weights, sort.expert_weights) == ("bfloat16", "fp8")
    vllm = recipe.engine.vllm.model_copy(update={"kv_cache_dtype": None})
    engine = recipe.engine.model_copy(update={"vllm": vllm})
    with pytest.raises(InputError, match="names none"):
        shapes_of(recipe.model_copy(update={"engine": engine}))


def test_a_list_that_no_pattern_tells_stays(tmp_path: Path) -> None:
    ignored = ["lm_head", *(f"model.layers.{k}.self_attn*" for k in range(27))]  # but for the last
    given = recipe_of(tmp_path, quantized(ignored)).model.config["quantization_config"]
    assert isinstance(given, dict)
    assert given["ignore"] == ignored


def test_a_quantization_without_its_exceptions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Qwen/Qwen3-0.6B"]["config"]))
    given = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(given))
    with pytest.raises(InputError, match="exclude_modules"):
        find_model(str(tmp_path))
