"""Small, fixed inputs that several tests share; all numbers are made up. The recipe and the fit are
those of the benchmarks that serve the fake engine.
"""

from pathlib import Path
from typing import Any

from benchmarks.common.samples import ENVIRONMENT, ERROR, fit, latency, paged_fit, recipe
from toolkit.files.io import head, write_file
from toolkit.files.profile import Profile

__all__ = [
    "ENVIRONMENT",
    "ERROR",
    "HEAD",
    "computes_nothing",
    "fit",
    "latency",
    "paged_fit",
    "recipe",
    "write_fit",
]

# The common fields of a workflow file.
HEAD: Any = {"tool_version": "0", "environment": ENVIRONMENT, "inputs": {}}


def write_fit(recipe: Path) -> None:
    """profile.json without points and, made from it, fit.json, beside the recipe."""
    profile = recipe.with_name("profile.json")
    fitted = fit(engine="transformers")
    about: dict[str, Any] = {
        "recipe_name": "test",
        "workers": 2,
        "clock": "wall",
        "engine": fitted.engine,
    }
    empty: dict[str, Any] = {"prefill": [], "decode": [], "slices": [], "memory": []}
    write_file(Profile(**head({"recipe": recipe}), **about, **empty), profile)
    write_file(
        fitted.model_copy(update=dict(head({"profile": profile}))), recipe.with_name("fit.json")
    )


def computes_nothing(name: str, *, config: str = "", tune: str, port: int = 8000) -> str:
    """A recipe of a model that computes nothing, on two workers, with more keys of its fake engine
    (`config`) and of its `tune`.
    """
    return f"""
name: {name}
model:
  source: random
  config: {{model_type: fake, {config}}}
  dtype: float32
  tokenizer: bytes
  max_model_len: 512
hardware: {{device: cpu, name: none}}
engine: {{name: fake, kv_cache_memory_mib: 8}}
workers: 2
profile:
  batch_sizes: [1, 2, 4, 8]
  input_lengths: [16, 64, 128]
  cached_lengths: [16, 64, 128]
  memory_lengths: [64, 128]
  slice_tokens: [16]
  repeats: 2
  slices: 8
sla: {{ttft_p99_s: 5.0, e2e_p95_s: 10.0}}
tune: {{trials: 8, request_rate_rps: 20, {tune}}}
serve: {{max_new_tokens: 64, port: {port}}}
"""
