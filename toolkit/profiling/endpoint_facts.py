"""What a server says of itself: its version, its limits, and how much KV cache it has, where /metrics tells.

What it does not say, the recipe must: a simulation cannot go without.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.endpoints.dialect import Dialect
from toolkit.endpoints.scrape import Metric, scrape
from toolkit.endpoints.target import Target, version
from toolkit.errors import InputError
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import Recipe

MIB = 1 << 20
SAFE_VOCABULARY = 256  # token ids that every model has


def facts_of(recipe: Recipe, target: Target, dialect: Dialect, max_rows: int | None) -> EngineFacts:
    """The facts of a served model. `InputError` where nobody says how many tokens its KV cache holds."""
    model = recipe.model
    capacity = kv_tokens(scrape(target)) or _kv_tokens_of(recipe, target)
    config_vocabulary = model.config.get("vocab_size")
    return EngineFacts(
        engine="openai",
        engine_version=version(target),
        model_type=target.model,
        parameters=0,
        dtype=model.dtype,
        device=recipe.hardware.name,
        threads=recipe.engine.threads,
        kv_bytes_per_token=model.kv_bytes_per_token or 1,
        kv_budget_bytes=capacity * (model.kv_bytes_per_token or 1),
        capacity_tokens=capacity,
        max_model_len=min(model.max_model_len, target.max_model_len or model.max_model_len),
        vocab_size=config_vocabulary if isinstance(config_vocabulary, int) else SAFE_VOCABULARY,
        prefill_emits_token=True,
        max_rows=max_rows,
        lacks=dialect.lacks,
    )


def kv_tokens(metrics: Sequence[Metric]) -> int | None:
    """Tokens of KV cache by the names of vLLM, SGLang and llmctl; None where none of them is there."""
    for name, labels, value in metrics:
        if name == "vllm:cache_config_info" and labels.get("num_gpu_blocks", "").isdigit():
            return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        if name in ("sglang:max_total_num_tokens", "llmctl_kv_cache_tokens") and value > 0:
            return int(value)
    return None


def _kv_tokens_of(recipe: Recipe, target: Target) -> int:
    budget, per_token = recipe.engine.kv_cache_memory_mib, recipe.model.kv_bytes_per_token
    if budget is None or per_token is None:
        raise InputError(
            f"{target.url}/metrics does not say how many tokens the KV cache holds, and the recipe does not either",
            "give engine.kv_cache_memory_mib and model.kv_bytes_per_token",
        )
    return int(budget * MIB) // per_token
