"""A trace made ready for a recipe: lengths that fit the model, arrivals at the wanted rate."""

from __future__ import annotations

from toolkit.files.recipe import Recipe
from toolkit.traces.scale import scale_lengths, scale_rate
from toolkit.traces.types import Trace


def prepare(trace: Trace, recipe: Recipe, rate_rps: float | None = None) -> Trace:
    """The trace with lengths within the recipe's limits and, where given, a mean rate. Each change leaves a note."""
    model = recipe.model
    context = model.config.get("max_position_embeddings")
    known = context if isinstance(context, int) else None
    fitted = scale_lengths(trace, model.max_model_len, recipe.serve.max_new_tokens, known)
    return fitted if rate_rps is None else scale_rate(fitted, rate_rps)
