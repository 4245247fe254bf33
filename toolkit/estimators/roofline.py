"""The roofline: the time of a pass that only arithmetic or memory traffic limits.

    seconds = pass_s + max(FLOPs / (peak * compute), bytes / (bandwidth * traffic))

FLOPs and bytes follow from the model's sizes. `compute` and `traffic` are the shares of the
hardware's peaks that an engine reaches, and `pass_s` is the other cost of each pass (launches,
sampling). Without measurements these three are assumptions; `fit_efficiency` finds them from a
measured profile of the same engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from toolkit.estimators.forms import Floats
from toolkit.estimators.steps import StepShape, chunk_attended
from toolkit.files.profile import DecodePoint, PrefillPoint


@dataclass(slots=True, frozen=True)
class Peaks:
    """The device's peaks, from its data sheet."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(slots=True, frozen=True)
class ModelSizes:
    """Sizes of the model. `attention_width` is heads * head_dim."""

    weight_bytes: int
    weights: int
    layers: int
    attention_width: int
    kv_bytes_per_token: int


@dataclass(slots=True, frozen=True)
class Efficiency:
    """The shares of the peaks that are reached, in (0, 1], and the constant seconds per pass."""

    compute: float
    traffic: float
    pass_s: float


def prefill_shape(batch_size: int, input_length: int) -> StepShape:
    """A pass over [N, L] tokens."""
    n = batch_size
    return StepShape(0, 0, n, n * input_length, n * chunk_attended(0, input_length))


def decode_shape(batch_size: int, cached_length: int) -> StepShape:
    """A step of N rows."""
    return StepShape(batch_size, batch_size * cached_length)


@dataclass(slots=True, frozen=True)
class Roofline:
    """Times of the passes of a dense model on one device."""

    peaks: Peaks
    sizes: ModelSizes
    efficiency: Efficiency

    def pass_seconds(self, shapes: Sequence[StepShape]) -> Floats:
        """Seconds [n] of each pass [n]."""
        return np.array([self._pass_s(shape) for shape in shapes])

    def _pass_s(self, shape: StepShape) -> float:
        """2 FLOPs per weight and new token, and 4 per attended token, layer and unit of attention
        width. A pass reads every weight and what is cached of its rows once, and caches its new
        tokens of prompts.
        """
        sizes = self.sizes
        reached = self.efficiency
        attended = shape.decode_cached + shape.prefill_attended
        moved = shape.decode_cached + shape.prefill_tokens + shape.prefill_cached
        flops = 2.0 * sizes.weights * shape.tokens
        flops += 4.0 * sizes.layers * sizes.attention_width * attended
        traffic_bytes = sizes.weight_bytes + moved * sizes.kv_bytes_per_token
        computing_s = flops / (self.peaks.flops_per_s * reached.compute)
        moving_s = traffic_bytes / (self.peaks.bytes_per_s * reached.traffic)
        return reached.pass_s + max(computing_s, moving_s)


def fit_efficiency(
    peaks: Peaks, sizes: ModelSizes, prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint]
) -> tuple[Efficiency, float]:
    """The efficiency for which the roofline is nearest to the measured times, and its median error
    in percent.

    It minimises squared logarithms of the ratios, so that short and long passes weigh the same.
    """
    samples = [point.seconds for point in prefill] + [point.seconds for point in decode]
    measured = np.array([np.median(seconds) for seconds in samples])
    shapes = [prefill_shape(point.batch_size, point.input_length) for point in prefill]
    shapes += [decode_shape(point.batch_size, point.cached_length) for point in decode]

    def efficiency(logarithms: Floats) -> Efficiency:
        compute, traffic, pass_s = np.exp(logarithms).tolist()
        return Efficiency(compute, traffic, pass_s)

    def predicted(logarithms: Floats) -> Floats:
        return Roofline(peaks, sizes, efficiency(logarithms)).pass_seconds(shapes)

    solution = least_squares(
        lambda logarithms: np.log(predicted(logarithms) / measured),
        np.array([np.log(0.5), np.log(0.5), np.log(0.5 * measured.min())]),
        bounds=([np.log(1e-6), np.log(1e-6), np.log(1e-9)], [0.0, 0.0, np.log(measured.min())]),
        loss="soft_l1",
    )
    error = float(100.0 * np.median(np.abs(predicted(solution.x) / measured - 1.0)))
    return efficiency(solution.x), error
