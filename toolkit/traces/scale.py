"""Changing a trace so that it fits: its rate to a machine, its lengths to a small model. Each change leaves a note."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.files.scaling import ScaledLengths, Scaling
from toolkit.traces.types import Trace

FITTED_PERCENTILE = 99.0  # what must fit after dividing; the rest is clipped

Tokens = NDArray[np.int64]


def mean_rate(trace: Trace) -> float:
    """Requests per second between the first arrival and the last; 0 where they all arrive at once."""
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    return (len(trace) - 1) / span_s if span_s > 0 else 0.0


def scale_rate(trace: Trace, rate_rps: float) -> Trace:
    """Stretch or compress the arrival times to a mean rate; burstiness and order stay.

    Raises InputError for a rate that is not positive, and for a trace whose requests all arrive at once.
    """
    if not 0 < rate_rps < float("inf"):
        raise InputError(f"a rate of {rate_rps:g} requests/s is not possible", "give a positive rate")
    now = mean_rate(trace)
    if now == 0 and len(trace) == 1:
        raise InputError(f"{trace.source}: it has one request, so there is no rate to scale", "leave the rate out")
    if now == 0:
        raise InputError(
            f"{trace.source}: all {len(trace)} requests arrive at once, so there is no rate to scale",
            "draw arrival times first: llmctl trace convert IN OUT --draw-rate REQUESTS_PER_S",
        )
    note = f"arrival times scaled by {now / rate_rps:.4g}: {now:.4g} -> {rate_rps:.4g} requests/s"
    return replace(trace, arrival_s=trace.arrival_s * (now / rate_rps), notes=(*trace.notes, note))


def scale_lengths(trace: Trace, max_model_len: int, max_new_tokens: int, model_context: int | None = None) -> Trace:
    """Fit lengths into a model's context and keep their shape: outputs in `max_new_tokens`, prompts in what is left.

    Prompts and outputs are divided, each by the factor that makes the 99th percentile fit (1 where it fits already),
    rounded up, and the few that are still too long are clipped. So prompt + max_new_tokens never exceeds the context.
    The result's `scaling` has what was done in numbers, its last note the same in words; `model_context`, the tokens
    that the model itself takes, is only passed on to it.
    Raises InputError where no prompt token is left beside `max_new_tokens`.
    """
    room = max_model_len - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        raise InputError(
            f"max_new_tokens {max_new_tokens} leaves {room} of {max_model_len} tokens of context for the prompt",
            "max_new_tokens must be positive and below model.max_model_len",
        )
    prompts, of_prompts = _fit(trace.prompt_tokens, room)
    outputs, of_outputs = _fit(trace.output_tokens, max_new_tokens)
    limits = np.ceil(trace.max_tokens / of_outputs.divisor).astype(np.int64)
    scaling = Scaling(
        requests=len(trace),
        max_model_len=max_model_len,
        max_new_tokens=max_new_tokens,
        model_context=model_context,
        prompts=of_prompts,
        outputs=of_outputs,
    )
    return replace(
        trace,
        prompt_tokens=prompts,
        output_tokens=outputs,
        max_tokens=np.minimum(limits, max_new_tokens),
        notes=(*trace.notes, scaling.summary()),
        scaling=scaling,
    )


def _fit(lengths: Tokens, limit: int) -> tuple[Tokens, ScaledLengths]:
    """Lengths within `limit`, and what was done to them."""
    edge = float(np.percentile(lengths, FITTED_PERCENTILE))
    divisor = max(1.0, edge / limit)
    divided = np.ceil(lengths / divisor).astype(np.int64)
    fitted = np.minimum(divided, limit)
    return fitted, ScaledLengths(
        limit_tokens=limit,
        percentile_99_tokens=edge,
        longest_tokens=int(lengths.max()),
        mean_tokens=float(lengths.mean()),
        divisor=divisor,
        clipped=int((divided > limit).sum()),
        scaled_mean_tokens=float(fitted.mean()),
    )
