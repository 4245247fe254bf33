"""What requests must keep to, and a trace that does."""

from __future__ import annotations

from typing import NamedTuple

from toolkit.endpoints.target import Target
from toolkit.files.plan import Plan
from toolkit.traces.scale import scale_lengths, scale_rate
from toolkit.traces.types import Trace

DEFAULT_LIMIT = 256  # tokens, as in recipes
SAFE_VOCABULARY = 256  # tokens that every tokenizer has


class Limits(NamedTuple):
    """In tokens."""

    context: int | None  # prompt + output; None: the server does not say
    output: int
    vocabulary: int


def limits_of(plan: Plan | None, target: Target, output: int | None = None, vocabulary: int | None = None) -> Limits:
    """What was asked for, else the plan's, else what the server says, else what any server can do."""
    if plan is not None:
        recipe = plan.recipe
        given = recipe.model.max_model_len, recipe.serve.max_new_tokens, plan.fit.engine.vocab_size
        return Limits(given[0], output or given[1], vocabulary or given[2])
    context = target.max_model_len
    usual = DEFAULT_LIMIT if context is None else min(DEFAULT_LIMIT, context // 2)
    return Limits(context, output or usual, vocabulary or SAFE_VOCABULARY)


def fitted(trace: Trace, limits: Limits, rate: float | None) -> Trace:
    """The trace with lengths that the server takes and the wanted rate, in requests per second."""
    if limits.context is not None:
        trace = scale_lengths(trace, limits.context, limits.output)
    return trace if rate is None else scale_rate(trace, rate)
