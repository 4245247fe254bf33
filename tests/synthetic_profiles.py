"""Profiles made from known laws, for the tests of fitting and of what reads a fit."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import samples

from benchmarks.common.samples import bilinear_law
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.laws import LinearLaw
from toolkit.files.fit import Fit
from toolkit.files.io import head
from toolkit.files.profile import (
    DecodePoint,
    MemoryPoint,
    PartPoint,
    PrefillPoint,
    Profile,
    RoundPoint,
    RoundSequence,
    RoundsProfile,
    SlicePoint,
    StepPoint,
    StepsProfile,
)

SIZES = (1, 2, 4, 8, 16, 32)
LENGTHS = (16, 32, 64, 128, 256)
FACTS = samples.fit().engine.model_copy(update={"model_type": "llama", "device": "cpu"})
LAW = bilinear_law(p=(1e-4, 2e-4, 5e-5, 3e-3), d=(2e-6, 1e-4, 1e-6, 3e-3), prefill_emits_token=True)

Latency = Callable[[int, int], float]  # of N and L


def samples_of(
    seconds: float, count: int = 5, *, rng: np.random.Generator, noise: float
) -> list[float]:
    """Repeats of a point that takes so long, with lognormal noise."""
    return [float(seconds * factor) for factor in rng.lognormal(0.0, noise, count)]


def make_profile(
    prefill: Latency = LAW.prefill_s,
    decode: Latency = lambda size, length: LAW.decode_s(size, length - 1, 1),
    sizes: Sequence[int] = SIZES,
    lengths: Sequence[int] = LENGTHS,
    noise: float = 0.0,
    law: LinearLaw = LAW,
    batch_s: float = 2e-3,
    stretch: float = 1.2,
    slices: int = 24,
    memory: Sequence[MemoryPoint] | None = None,
    seed: int = 0,
) -> Profile:
    """A profile of five repeats per point with lognormal `noise`, and slices that take batch_s +
    stretch * `law`.
    """
    rng = np.random.default_rng(seed)
    grid = [(size, length) for size in sizes for length in lengths]
    drawn = partial(samples_of, rng=rng, noise=noise)
    served = [
        (int(rng.choice(sizes)), int(rng.integers(16, 256)), int(rng.choice([16, 32])))
        for _ in range(slices)
    ]
    return Profile(
        tool_version="0",
        environment=samples.ENVIRONMENT,
        inputs={},
        recipe_name="synthetic",
        workers=2,
        clock="wall",
        engine=FACTS,
        prefill=[
            PrefillPoint(batch_size=n, input_length=at, seconds=drawn(prefill(n, at)))
            for n, at in grid
        ],
        decode=[
            DecodePoint(batch_size=n, cached_length=at, seconds=drawn(decode(n, at)))
            for n, at in grid
        ],
        slices=[
            SlicePoint(
                batch_size=n,
                input_length=length,
                steps=steps,
                seconds=drawn(batch_s + stretch * law.serve_s(n, length, steps), 1)[0],
            )
            for n, length, steps in served
        ],
        memory=probe_all(1.0) if memory is None else list(memory),
    )


def fit_of(profile: Profile) -> Fit:
    """The laws of a profile, as its fit file has them."""
    return fit_profile(profile, head({}))


def steps_profile(points: Sequence[StepPoint], **more: Any) -> StepsProfile:
    """Passes that do not overlap, of an engine with blocks enough for them."""
    limits = {"block_tokens": 16, "blocks": 50_000, "max_num_batched_tokens": 8192}
    others = {"async_scheduling": False, "front": [], "points": list(points)}
    return StepsProfile(**(limits | others | more))


def probe_all(
    zeta: float, lengths: Sequence[int] = (16, 64, 128, 256), steps: int = 16
) -> list[MemoryPoint]:
    """What exact probes find of an engine that holds zeta * capacity tokens."""
    fits = [int(zeta * FACTS.capacity_tokens / (length + steps)) for length in lengths]
    return [
        MemoryPoint(input_length=length, steps=steps, largest_ok=rows, smallest_oom=rows + 1)
        for length, rows in zip(lengths, fits, strict=True)
    ]


def make_rounds(
    law: LinearLaw,
    join: Latency = lambda rows, length: 2e-4 * rows + 1e-6 * rows * length,
    leave_s: Callable[[int], float] = lambda length: 3e-4,
    grow: Latency = lambda rows, length: 2e-8 * rows * length,
    batch_s: float = 1.5e-3,
    stretch: float = 1.3,
    latency_s: float = 1e-4,
    rates: tuple[float, float] = (2e9, 4e9),
    noise: float = 0.0,
    seed: int = 0,
) -> RoundsProfile:
    """Rounds with parts that take the given times. A whole round takes batch_s + stretch * (the
    times of its parts, and of its prefills and decode steps by `law`).
    """
    rng = np.random.default_rng(seed)
    drawn = partial(samples_of, rng=rng, noise=noise)

    def part(name: str, rows: int, length: int, others: int, seconds: float) -> PartPoint:
        return PartPoint(part=name, rows=rows, length=length, others=others, seconds=drawn(seconds))

    def swap_s(length: int, rate: float) -> float:
        return latency_s + length * FACTS.kv_bytes_per_token / rate

    parts: list[PartPoint] = []
    for length in LENGTHS:
        for others in (3, 15):
            parts += [part("join", rows, length, others, join(rows, length)) for rows in (1, 4, 16)]
            parts.append(part("leave", 1, length, others, leave_s(length)))
            parts.append(part("grow", 1, length, others, grow(1 + others, length)))
            parts.append(part("swap_out", 1, length, others, swap_s(length, rates[0])))
            parts.append(part("swap_in", 1, length, others, swap_s(length, rates[1])))

    def one_round() -> RoundPoint:
        groups = [
            (int(rng.integers(1, 5)), int(rng.integers(16, 256)))
            for _ in range(int(rng.integers(0, 3)))
        ]
        rows = sum(count for count, _ in groups) + int(rng.integers(1, 17))
        cached = int(rng.integers(64, 256))
        steps = int(rng.integers(1, 33))
        left = int(rng.integers(0, 3))
        seconds = sum(law.prefill_s(*group) + join(*group) for group in groups)
        seconds += law.decode_s(rows, cached, steps)
        seconds += sum(grow(rows, cached + step) for step in range(1, steps + 1))
        seconds += left * leave_s(cached + steps)
        return RoundPoint(
            groups=groups,
            rows=rows,
            cached_length=cached,
            steps=steps,
            left=left,
            seconds=drawn(batch_s + stretch * seconds, 1)[0],
        )

    return RoundsProfile(
        parts=parts,
        sequences=[RoundSequence(rounds=[one_round() for _ in range(12)]) for _ in range(8)],
        memory=[
            MemoryPoint(input_length=length, steps=1, largest_ok=rows, smallest_oom=rows + 1)
            for length, rows in ((64, 110), (256, 28))
        ],
        host_bytes=1 << 30,
    )
