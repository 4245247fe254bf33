"""Traces with all lengths divided by one factor."""

from dataclasses import replace

import numpy as np

from toolkit.traces.types import Trace
from toolkit.traces.windows import with_lengths


def divide_lengths(trace: Trace, divisor: float) -> Trace:
    """Return the trace with its lengths divided, rounded up."""
    prompts, outputs, limits = (
        np.ceil(lengths / divisor).astype(np.int64)
        for lengths in (trace.prompt_tokens, trace.output_tokens, trace.max_tokens)
    )
    return with_lengths(replace(trace, max_tokens=limits), prompts, outputs)
