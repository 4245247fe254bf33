"""The law of swapping: how long a KV cache takes from the device to host memory and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.errors import InputError
from toolkit.files.fit import SwapFit


@dataclass(frozen=True)
class LinearSwap:
    """seconds = latency_s + tokens / (tokens per second), for each cache and each way.

    FastServe's example: OPT-175B's caches over PCIe 4.0 x16, 36 ms beside a decode step of 250 ms.
    """

    latency_s: float
    out_tokens_per_s: float
    in_tokens_per_s: float
    overlaps: bool = True  # beside compute; False: whoever computes copies, and compute waits

    def __post_init__(self) -> None:
        if not 0 <= self.latency_s < math.inf:
            raise InputError(f"swap: a latency of {self.latency_s} s is not possible; it is finite and at least 0")
        if not (self.out_tokens_per_s > 0 and self.in_tokens_per_s > 0):
            rates = f"{self.out_tokens_per_s} and {self.in_tokens_per_s}"
            raise InputError(f"swap: rates of {rates} tokens/s are not possible; both are above 0")

    def out_s(self, tokens: int) -> float:
        """Seconds from the device to host memory."""
        return self.latency_s + tokens / self.out_tokens_per_s

    def in_s(self, tokens: int) -> float:
        """Seconds from host memory to the device."""
        return self.latency_s + tokens / self.in_tokens_per_s


def swap_from_fit(fit: SwapFit, kv_bytes_per_token: int) -> tuple[LinearSwap, int]:
    """The law of a measured link, and the tokens of KV cache that its host memory holds."""
    if kv_bytes_per_token < 1:
        raise InputError(f"swap: {kv_bytes_per_token} bytes of KV cache per token is not possible; it is at least 1")
    rates = fit.out_bytes_per_s / kv_bytes_per_token, fit.in_bytes_per_s / kv_bytes_per_token
    return LinearSwap(fit.latency_s, *rates, fit.overlaps), fit.host_bytes // kv_bytes_per_token
