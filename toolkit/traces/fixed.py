"""Requests by numbers alone: so many, with these lengths, as in `vllm bench serve`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.traces.formats import MAX_LENGTH
from toolkit.traces.types import Trace


def fixed_lengths(
    prompt: int, output: int, requests: int, *, spread: float = 0.0, seed: int = 0
) -> Trace:
    """Requests that arrive in a Poisson process of one per second, for `scale_rate`. The limit of
    each is its output, so that a scheduler knows it.

    Args:
        prompt: tokens of every prompt.
        output: tokens of every output.
        requests: how many.
        spread: lengths are drawn evenly from (1 - spread) to (1 + spread) times these, as by
            `--random-range-ratio`; 0 to below 1.
        seed: of the draws.

    Raises `InputError` for numbers that cannot be.
    """
    for name, value in {"prompt": prompt, "output": output, "requests": requests}.items():
        if not 1 <= value <= MAX_LENGTH:
            raise InputError(f"{name} {value}: it is from 1 to {MAX_LENGTH:,}")
    if not 0.0 <= spread < 1.0:
        raise InputError(f"a spread of {spread:g} is not possible", "give 0 to below 1")
    rng = np.random.default_rng(seed)
    gaps_s = rng.exponential(1.0, requests)
    gaps_s[0] = 0.0
    prompts = _lengths(rng, prompt, requests, spread)
    outputs = _lengths(rng, output, requests, spread)
    varied = f", drawn within {100.0 * spread:g} %" if spread else ""
    source = f"{requests:,} requests of {prompt:,} + {output:,} tokens{varied}"
    return Trace(np.cumsum(gaps_s), prompts, outputs, outputs, source)


def _lengths(rng: np.random.Generator, mean: int, count: int, spread: float) -> NDArray[np.int64]:
    low = max(int(np.floor(mean * (1.0 - spread))), 1)
    high = int(np.ceil(mean * (1.0 + spread)))
    return rng.integers(low, high + 1, count)
