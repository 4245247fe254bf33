"""Tiny models for tests, built offline in milliseconds: one of every architecture on which the
engines' contract tests run.
"""

from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec, ProfileSpec, Recipe

CPU = HardwareSpec(device="cpu", name="any CPU")
MAX_MODEL_LEN = 96
EOS_IDS = list(range(257, 271))  # many, so that some of a handful of rows end early

# With initializer_range 0.02 a random model repeats one token, and equal output would prove little.
_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.12,
    "eos_token_id": EOS_IDS,
}
CONFIGS: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "intermediate_size": 64, "num_key_value_heads": 2, **_SIZES},
    "qwen3": {
        "model_type": "qwen3",
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 16,
        **_SIZES,
    },
    "gpt2": {"model_type": "gpt2", "tie_word_embeddings": False, **_SIZES},
    "qwen2": {"model_type": "qwen2", "intermediate_size": 64, "num_key_value_heads": 2, **_SIZES},
    "mistral": {
        "model_type": "mistral",
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "sliding_window": None,
        **_SIZES,
    },
    "gpt_neox": {"model_type": "gpt_neox", "intermediate_size": 64, **_SIZES},
    "opt": {
        "model_type": "opt",
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
        "init_std": 0.12,
        **_SIZES,
    },
    "fake": {"model_type": "fake", "eos_one_in": 12},
}
CONFIGS["rebatch"] = CONFIGS["deepspeed"] = CONFIGS["llama"]  # served by the engines of these names
CONFIGS["fixed"] = CONFIGS["llama"]  # served in static batches with steps of fixed shapes
del CONFIGS["opt"]["initializer_range"]  # OPT calls it init_std


def model_spec(kind: str = "llama", **changes: object) -> ModelSpec:
    """A tiny model of `kind` in float32; `changes` are fields of `ModelSpec`."""
    fields = {
        "source": "random",
        "config": CONFIGS[kind],
        "dtype": "float32",
        "tokenizer": "bytes",
        "max_model_len": MAX_MODEL_LEN,
        "seed": 1,
    }
    return ModelSpec.model_validate(fields | changes)


def engine_spec(kind: str = "llama", *, budget_mib: float = 16.0, **changes: object) -> EngineSpec:
    """The engine that serves `kind`; `changes` are fields of `EngineSpec`."""
    name = kind if kind in ("fake", "rebatch", "deepspeed") else "transformers"
    fields = {"name": name, "threads": 1, "kv_cache_memory_mib": budget_mib}
    if kind == "fixed":
        fields["cuda_graphs"] = True
    return EngineSpec.model_validate(fields | changes)


def recipe(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec = CPU) -> Recipe:
    """A recipe of these sections."""
    lengths = {key: [8] for key in ("input_lengths", "cached_lengths", "memory_lengths")}
    profile = ProfileSpec(batch_sizes=[1], **lengths)
    return Recipe(name="tiny", model=model, engine=engine, hardware=hardware, profile=profile)
