"""Where memory ends: the largest batch that runs at each length, and the smallest that does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from toolkit.files.profile import EngineFacts, MemoryPoint
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.bench import Bench, RoundBench
from toolkit.profiling.grid import Shape

ROWS_MAX = 4096
BEYOND = 2.0  # probes end at this many times the capacity: an engine that holds more has no edge to find
PRECISION = 0.005  # of the batch size: an edge known to half a percent is known well enough
TIME_LIMIT_S = 300.0  # for all lengths
SAFE_SHARE = 0.9


def find_edge(
    fits: Callable[[int], bool], guess: int, limit: int, enough: Callable[[], bool] = lambda: False
) -> tuple[int, int | None]:
    """(largest that fits, smallest that does not), by galloping away from `guess` and bisecting.

    They are neighbours, or `PRECISION` apart, or what is known when `enough` says so. The second is None where no probe
    up to `limit` failed.
    """
    fitted, failed = 0, limit + 1
    size, step = min(max(guess, 1), limit), 1
    while True:
        if fits(size):
            fitted = size
        else:
            failed = size
        if failed - fitted <= max(1, int(PRECISION * fitted)) or enough():
            return fitted, failed if failed <= limit else None
        if fitted and failed <= limit:
            size = (fitted + failed) // 2
        else:
            size = min(fitted + step, limit) if fitted else max(failed - step, 1)
            step *= 2


def probe_shapes(spec: ProfileSpec, facts: EngineFacts) -> list[tuple[int, int]]:
    """(L, S) of every probe: at each memory length the recipe's longest slice, and all that the model can generate.

    The two ends tell what a row's prompt takes from what its output takes. A server is not probed: it queues.
    """
    if facts.is_server:
        return []
    lengths = [length for length in sorted(set(spec.memory_lengths)) if length < facts.max_model_len]
    return [
        (length, steps)
        for length in lengths
        for steps in sorted({min(max(spec.slice_tokens), facts.max_model_len - length), facts.max_model_len - length})
    ]


def admission_lengths(spec: ProfileSpec, facts: EngineFacts) -> list[int]:
    """The lengths at which rows are admitted one by one; each may still get a token, and another."""
    return [length for length in sorted(set(spec.memory_lengths)) if length + 2 <= facts.max_model_len]


def probe_admission(bench: RoundBench, length: int) -> MemoryPoint:
    """The edge of rounds at one input length: rows enter until the next one has no room, or nobody else would."""
    limit = min(ROWS_MAX, max(1, int(BEYOND * bench.facts.capacity_tokens / (length + 1))))
    rows, ran_out = bench.admit(length, limit)
    return MemoryPoint(input_length=length, steps=1, largest_ok=rows, smallest_oom=rows + 1 if ran_out else None)


def safe_tokens(probes: Iterable[MemoryPoint], facts: EngineFacts) -> float:
    """N * (L + S) that runs at any length, a little below the edge; without probes, a little below the capacity."""
    known = [probe.largest_ok * (probe.input_length + probe.steps) for probe in probes if probe.largest_ok]
    return SAFE_SHARE * min([*known, facts.capacity_tokens])


def probe_memory(bench: Bench, length: int, steps: int, deadline_s: float) -> MemoryPoint:
    """The edge at one input length. `deadline_s`, on the monotonic clock, ends the search where it is then."""
    total = length + steps
    capacity = bench.facts.capacity_tokens
    largest_ok, smallest_oom = find_edge(
        lambda size: bench.fits(Shape(size, length, steps)),
        guess=capacity // total,
        limit=min(ROWS_MAX, max(1, int(BEYOND * capacity / total))),
        enough=lambda: time.monotonic() > deadline_s,
    )
    return MemoryPoint(input_length=length, steps=steps, largest_ok=largest_ok, smallest_oom=smallest_oom)
