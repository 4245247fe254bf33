"""Which models are accepted, which are refused, and the line that says why."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from said import says
from slices import run_slice

from toolkit.engines.loading import load_config, load_model
from toolkit.engines.protocol import Row
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.errors import EngineError, InputError, LlmctlError
from toolkit.files.recipe import EngineSpec

pytestmark = pytest.mark.slow


def config(kind: str = "llama", **changes: object) -> dict[str, object]:
    return {key: value for key, value in (tiny.CONFIGS[kind] | changes).items() if value is not ...}


def refusal(error: type[LlmctlError] = EngineError, **changes: object) -> LlmctlError:
    """The engine's error for a tiny Llama with these fields changed."""
    with pytest.raises(error) as raised:
        TransformersEngine(tiny.model_spec(**changes), tiny.engine_spec(), tiny.CPU)
    return raised.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama as transformers saves it."""
    load_model(tiny.model_spec(), tiny.CPU).save_pretrained(tmp_path)
    return tmp_path


def test_the_seed_decides_the_weights() -> None:
    first, same, other = (
        load_model(tiny.model_spec(seed=seed), tiny.CPU).state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_building_a_model_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    load_model(tiny.model_spec(), tiny.CPU)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_byte_tokenizer_names_missing_special_tokens() -> None:
    built = load_config(tiny.model_spec(config=config(eos_token_id=...)))
    assert (built.bos_token_id, built.eos_token_id, built.pad_token_id) == (256, 257, 258)
    assert load_config(tiny.model_spec()).eos_token_id == tiny.EOS_IDS


def test_a_saved_model_serves_the_same_tokens(folder: Path) -> None:
    rows = [Row("a", (1, 2, 3), 0, 20), Row("b", tuple(range(40)), 0, 20)]
    stored = tiny.model_spec(source=str(folder), config={})
    outputs = [
        run_slice(
            TransformersEngine(spec, tiny.engine_spec(), tiny.CPU), rows, 20, lambda step: True
        )
        for spec in (tiny.model_spec(), stored)
    ]
    assert outputs[0] == outputs[1]


def test_a_dummy_load_keeps_the_shape_and_not_the_weights(folder: Path) -> None:
    spec = tiny.model_spec(source=str(folder), config={}, load_format="dummy", seed=5)
    dummy = load_model(spec, tiny.CPU).state_dict()
    stored = load_model(tiny.model_spec(source=str(folder), config={}), tiny.CPU).state_dict()
    assert {key: value.shape for key, value in dummy.items()} == {
        key: value.shape for key, value in stored.items()
    }
    assert not torch.equal(dummy["lm_head.weight"], stored["lm_head.weight"])


def test_a_dummy_load_with_a_config_needs_no_files() -> None:
    spec = tiny.model_spec(source="example/a-model", load_format="dummy")
    assert load_model(spec, tiny.CPU).config.hidden_size == 32


def test_a_stated_config_must_agree_with_the_stored_one(folder: Path) -> None:
    error = refusal(source=str(folder), config={"num_hidden_layers": 3})
    assert says(error.message, "model.config.num_hidden_layers", "3", str(folder), "2")


@pytest.mark.parametrize(
    ("changes", "named", "remedy"),
    [
        ({"model_type": "lama"}, ("model.config.model_type", "'lama'"), "'llama'"),
        ({"model_type": "vit"}, ("model.config.model_type", "'vit'"), ""),
        ({"hidden_sise": 8}, ("model.config.hidden_sise", "llama"), "'hidden_size'"),
        ({"hidden_size": "x"}, ("'hidden_size'", "int"), "config"),
        ({"hidden_size": 33}, ("33", "4"), "config"),
        ({"vocab_size": 200}, ("model.config.vocab_size", "200", "259"), "259"),
        ({"max_position_embeddings": 50}, ("model.max_model_len", "96", "50"), "50"),
    ],
)
def test_a_wrong_config_is_refused(
    changes: dict[str, object], named: tuple[str, ...], remedy: str
) -> None:
    error = refusal(config=config(**changes))
    assert says(error.message, *named)
    assert remedy in error.hint
    assert "\n" not in error.message


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, ("LinearAttentionLayer",)),
        ({"model_type": "bloom", "n_head": 4}, ("position_ids",)),
        ({"model_type": "falcon", "alibi": True}, ("ALiBi",)),
        (
            {"model_type": "mistral", "sliding_window": 50, "head_dim": 8},
            ("50", "model.max_model_len", "96"),
        ),
        ({"model_type": "jamba"}, ()),
        ({"model_type": "qwen3_next", "num_key_value_heads": 2}, ()),
    ],
)
def test_models_with_unsupported_caches_are_refused_by_name(
    changes: dict[str, object], named: tuple[str, ...]
) -> None:
    heads = {} if changes["model_type"] in ("mamba", "bloom") else {"num_attention_heads": 4}
    error = refusal(config=SMALL | heads | changes)
    assert says(error.message, f"'{changes['model_type']}'", *named)


def test_quantized_caches_are_refused_by_name(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"cache_implementation": "quantized"}')
    error = refusal(source=str(folder), config={})
    assert says(error.message, "model_type", "'llama'", "cache_implementation", "'quantized'")


def test_a_window_that_never_slides_is_served() -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    spec = tiny.model_spec(config={"model_type": "mistral", "sliding_window": 96, **heads, **SMALL})
    facts = TransformersEngine(spec, tiny.engine_spec(), tiny.CPU).facts
    assert facts.kv_bytes_per_token == 2 * 2 * 4 * 8 * 4


def test_stated_kv_bytes_must_be_the_measured_ones() -> None:
    error = refusal(InputError, kv_bytes_per_token=1000)
    assert says(error.message, "model.kv_bytes_per_token", "1000", "256")


def test_a_cpu_needs_a_budget() -> None:
    with pytest.raises(InputError, match="kv_cache_memory_mib"):
        TransformersEngine(tiny.model_spec(), EngineSpec(threads=1), tiny.CPU)


def test_a_model_that_cannot_be_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    error = refusal(source="example/missing", config={}, revision="v2")
    assert says(error.message, "example/missing", "v2")


@pytest.mark.parametrize(("source", "named"), [("nothing", "nothing"), ("", "config.json")])
def test_a_folder_that_is_missing_or_empty_is_refused(
    tmp_path: Path, source: str, named: str
) -> None:
    error = refusal(source=str(tmp_path / source), config={})
    assert named in error.message


def test_weights_in_another_format_are_not_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refusal(source=str(folder), config={})
    assert says(error.message, str(folder), "safetensors")


def test_missing_weights_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert says(refusal(source=str(folder), config={}).message, "1", "model.norm.weight")


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"intermediate_size": 48}))
    assert says(
        refusal(source=str(folder), config={}).message, "model.layers.0.mlp.down_proj.weight"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(EngineError, match="CUDA"):
        load_model(tiny.model_spec(), tiny.CPU.model_copy(update={"device": "cuda"}))
