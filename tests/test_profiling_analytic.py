"""Profiles of absent hardware: what they hold, their errors, and what they refuse."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import samples
from commands import llmctl
from orders import changed
from samples import HEAD

from toolkit.errors import InputError
from toolkit.estimators.elsewhere import measured_elsewhere
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.gpu_operators import measured_operators
from toolkit.files.io import read_file, write_file
from toolkit.files.new_recipe import EXPERT_PARALLEL
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe, recipe_path
from toolkit.profiling.analytic import ONE_BY_ONE, analytic_profile, pass_shape, pass_times

LLAMA_7B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


def recipe(ranks: int = 1, vllm: object = None, **config: object) -> Recipe:
    """A model on an A100 by vLLM."""
    return samples.recipe(
        model={
            "source": "random",
            "config": LLAMA_7B | config,
            "max_model_len": 4096,
            "dtype": "bfloat16",
            "kv_bytes_per_token": 524288,
            "weight_bytes": 13476831232,
        },
        hardware={
            "device": "cuda",
            "name": "A100",
            "memory_gib": 79.1,
            "peak_tflops": 312,
            "bandwidth_gb_s": 2039,
        },
        engine={"name": "vllm", "tensor_parallel_size": ranks, "vllm": vllm},
        policy={"name": "vllm", "parameters": {}},
        workers=1,
        profile={
            "batch_sizes": [1, 2, 4, 8, 16, 32],
            "input_lengths": [32, 128, 512, 2048],
            "cached_lengths": [32, 128, 512, 2048],
            "memory_lengths": [256, 1024],
        },
    )


@pytest.mark.slow
def test_an_analytic_profile_can_be_fitted_and_stays_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source = tmp_path / "recipe.json"
    profile = tmp_path / "profile.json"
    fit = tmp_path / "fit.json"
    write_file(recipe(), source)
    traffic = ["--policies", "slice", "--trace", "chat-small"]
    for words in (
        ["profile", source, "--analytic", "--out", profile],
        ["fit", profile, "--out", fit],
        ["simulate", source, "--fit", fit, *traffic],
    ):
        assert llmctl(*words) == 0
        assert "analytic, nothing" in capsys.readouterr().err, words[0]
    made = read_file(Profile, profile)
    assert "a100_sxm" in made.engine.analytic
    assert made.engine.capacity_tokens == int(79.1 * (1 << 30) * 0.87 - 13476831232) // 524288
    fitted = fit_profile(made, HEAD)
    assert fitted.decode.error.median_percent < 5.0
    assert fitted.memory.capacity_tokens == made.engine.capacity_tokens


@pytest.mark.parametrize("number", ["peak_tflops", "bandwidth_gb_s", "memory_gib"])
def test_a_number_that_the_recipe_lacks_is_named(number: str):
    with pytest.raises(InputError, match=f"hardware.{number}"):
        analytic_profile(changed(recipe(), **{f"hardware__{number}": None}), HEAD)


def test_weights_that_leave_no_cache_are_refused():
    with pytest.raises(InputError, match=r"12\.6 GiB.*KV"):
        analytic_profile(changed(recipe(), hardware__memory_gib=12.0), HEAD)


def test_a_fit_is_as_far_off_as_predictions_beside_measured_servers():
    made = analytic_profile(recipe(), HEAD)
    known = made.engine.analytic_error
    assert known
    assert known.here is None  # no server on an A100 was compared
    assert known.own == known.left_out
    fit = fit_profile(made, HEAD)
    assert fit.engine.analytic_error == known
    assert fit.steps
    assert fit.steps.error.median_percent < 2.0  # of its form, on held-out points
    own = known.own
    assert fit.off_percent(fit.decode) == max(own.tpot_percent, fit.decode.error.median_percent)
    assert fit.off_percent(fit.prefill) >= own.ttft_percent
    assert fit.off_percent(fit.steps) >= max(own.tpot_percent, own.ttft_percent)
    facts = made.engine.model_copy(update={"analytic_error": None})
    measured = fit.model_copy(update={"engine": facts})
    assert measured.off_percent(measured.steps) == fit.steps.error.median_percent


@pytest.mark.parametrize(
    ("name", "gpu", "compared"),
    [
        ("llama-3.1-8b-h100-sxm", "h100_sxm", True),
        ("llama-3.1-8b-h200", "h200_sxm", True),
        ("qwen3-30b-a3b-h200", "h200_sxm", True),
        ("qwen3-30b-a3b-h100-sxm", "h100_sxm", True),
        ("llama-3.1-8b-a100-80gb", "a100_sxm", False),
        ("llama-3.1-8b-l40s", "l40s", False),
    ],
)
def test_an_error_is_of_the_recipes_gpu_and_class(name: str, gpu: str, compared: bool):
    recipe = load_recipe(recipe_path(name))
    error = pass_times(recipe).error
    assert error
    assert (error.here is not None) == compared
    assert error == measured_elsewhere(gpu, recipe, experts="a3b" in name)


LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "MLA.*v_head_dim 0"),
        ({**LATENT, "index_topk": 2048}, "sparse attention"),
        (LATENT, r"MLA.*a100"),
        ({"sliding_window": 1024, "layer_types": ["sliding_attention", "other"] * 16}, "other"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "int4"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"GEMMs in fp8.*a100"),
        ({"intermediate_size": None, "vocab_size": None}, "vocab_size, .*intermediate_size"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(config: dict[str, object], what: str):
    with pytest.raises(InputError, match=what):
        analytic_profile(recipe(**config), HEAD)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("--enable-lora", "LoRA"),
        ("--kv-cache-dtype=fp8", "KV cache"),
        ("--disable-sliding-window", "caches"),
    ],
)
def test_flags_that_change_the_laws_are_refused(flag: str, named: str):
    with pytest.raises(InputError, match=named):
        analytic_profile(recipe(vllm={"args": [flag]}), HEAD)


def cached_in(dtype: str, gpu: str, bytes_per_token: int = 65536) -> Recipe:
    own = load_recipe(recipe_path(f"llama-3.1-8b-{gpu}"))
    data = own.model_dump(mode="json", exclude_unset=True)
    data["engine"]["vllm"] = {"kv_cache_dtype": dtype}
    data["model"]["kv_bytes_per_token"] = bytes_per_token
    return Recipe.model_validate(data)


def test_a_kv_cache_of_8_bits_holds_twice_as_much_and_is_read_sooner():
    own = analytic_profile(load_recipe(recipe_path("llama-3.1-8b-h200")), HEAD)
    narrow = analytic_profile(cached_in("fp8", "h200"), HEAD)
    assert narrow.engine.capacity_tokens == pytest.approx(2 * own.engine.capacity_tokens, abs=1)
    assert own.steps is not None
    assert narrow.steps is not None
    before = fit_profile(own, HEAD).steps.law
    after = fit_profile(narrow, HEAD).steps.law
    shapes = [pass_shape(64, 4096), pass_shape(16, 2048, 1, 512)]
    assert all(after.forward_s(shape) < before.forward_s(shape) for shape in shapes)


def test_windows_save_time_and_memory_and_are_groups_of_caches():
    full = {"layer_types": ["full_attention"] * 32}
    windows = {"layer_types": ["sliding_attention", "full_attention"] * 16, "sliding_window": 128}
    own = fit_profile(analytic_profile(recipe(**full), HEAD), HEAD)
    narrow = fit_profile(analytic_profile(recipe(**windows), HEAD), HEAD)
    assert own.steps
    assert narrow.steps
    assert narrow.steps.resolved
    assert [group.kind for group in narrow.steps.resolved.groups] == ["window", "full"]
    assert narrow.steps.law.window == 128
    assert narrow.steps.blocks == pytest.approx(2 * own.steps.blocks, abs=2)  # of half the layers
    shapes = [pass_shape(rows, 4096, window=128) for rows in (1, 8)]
    laws = own.steps.law, narrow.steps.law
    assert all(laws[1].forward_s(shape) < laws[0].forward_s(shape) for shape in shapes)


def test_without_planning_ahead_the_host_works_between_two_passes():
    own = fit_profile(analytic_profile(recipe(), HEAD), HEAD).steps
    slow = fit_profile(analytic_profile(recipe(vllm={"args": [ONE_BY_ONE]}), HEAD), HEAD).steps
    assert own
    assert slow
    assert own.async_scheduling
    assert own.law.after_s(64) == 0.0
    constants = measured_operators()["a100_sxm"].engine
    assert not slow.async_scheduling
    assert slow.law.terms["host"] == pytest.approx(constants.host_s)
    assert slow.law.terms["host_row"] == pytest.approx(constants.host_row_s)


def test_whole_experts_are_a_law_of_their_own():
    own = load_recipe(recipe_path("qwen3-30b-a3b-h200"))
    data = own.model_dump(mode="json", exclude_unset=True)
    data["engine"]["tensor_parallel_size"] = 4
    cut = Recipe.model_validate(data)
    data["engine"]["vllm"] = {"args": [EXPERT_PARALLEL]}
    whole = Recipe.model_validate(data)
    shapes = [pass_shape(rows, 1024) for rows in (1, 64)]
    times = [pass_times(one).seconds(shapes).tolist() for one in (cut, whole)]
    assert times[0] != times[1]


def test_a_computed_law_is_near_its_passes_also_where_tiles_end():
    made = analytic_profile(cached_in("fp8", "h200"), HEAD)
    fit = fit_profile(made, HEAD).steps
    assert fit
    assert fit.error.median_percent < 0.5
    assert fit.error.worst_percent < 10.0
    law = fit.law
    assert law.least_s > 0.0
    least = replace(law, least_s=1.0)
    assert least.forward_s(pass_shape(4, 512, 1, 16)) == 1.0
    assert least.forward_s(pass_shape(4, 512)) == law.forward_s(pass_shape(4, 512))
    assert min(law.token_s) < 0.0  # where a tile fills up


@pytest.mark.parametrize(
    ("dtype", "gpu", "size"),
    [
        ("fp8", "a100-80gb", 65536),  # not measured there
        ("fp8_e5m2", "h200", 65536),  # another format
        ("int8_per_token_head", "h200", 65536),
        ("fp8", "h200", 131072),  # bytes of 16 bits
    ],
)
def test_other_caches_are_refused_by_name(dtype: str, gpu: str, size: int):
    with pytest.raises(InputError) as error:
        analytic_profile(cached_in(dtype, gpu, size), HEAD)
    assert dtype in error.value.message


@pytest.mark.parametrize(
    ("hardware", "named"),
    [
        *(({"gpu": gpu}, gpu) for gpu in ("rtx-4090", "h100-pcie", "mi300x")),
        ({}, "transformers"),
    ],
)
def test_another_gpu_or_engine_is_refused_by_name(hardware: dict[str, str], named: str):
    data = recipe().model_dump(mode="json", exclude_unset=True)
    if hardware:
        data["hardware"] = hardware
    else:
        data |= {"engine": {"name": "transformers"}, "policy": {"name": "slice"}}
    with pytest.raises(InputError) as error:
        analytic_profile(Recipe.model_validate_json(json.dumps(data)), HEAD)
    assert named in error.value.message
    assert "llmctl profile" in error.value.hint
