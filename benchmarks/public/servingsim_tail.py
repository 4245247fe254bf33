"""What passes of decodes alone took in LLMServingSim's runs, beside the sums of their operators.

    python -m benchmarks.public.servingsim_tail --data DIR

Takes some seconds. DIR as of `benchmarks.public.llmservingsim`.

After the last prompt of a run all passes only decode, and the run says when each request ended.
Between two ends the rows and what they have cached are known, so the sum of their operators is
looked up: attention at equal lengths, linear between two measured numbers of rows and of cached
tokens. How many passes there were is not said. It is the sum that comes nearest, if every pass
takes the same number of times as long as its operators; that number is the one at which the counts
fit best. No law of passes and no simulator is in it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.public.llmservingsim import (
    Case,
    all_reduce,
    asked,
    read_attention,
    read_case,
    read_operators,
)
from toolkit.errors import InputError
from toolkit.estimators.operators import Attention, Operator
from toolkit.estimators.steps import StepShape

FACTORS = np.arange(0.9, 1.15, 0.005)
GROUPS = (1, 8, 16, 32, 48, 64, 96, 128, 256)  # the most rows of each
HEAD = (
    "| run | rows | passes | measured, ms | operators, ms | measured / operators |\n"
    "|---|---:|---:|---:|---:|---:|"
)


@dataclass(frozen=True)
class Stretch:
    """Passes of the same rows: how many, how long, the sum of their operators, and how far the
    count is off, in passes.
    """

    rows: int
    passes: int
    measured_s: float
    operators_s: float
    off: float


class Sums:
    """Sums of operators of passes of decodes."""

    def __init__(self, operators: list[Operator], attention: Attention) -> None:
        self._operators = operators
        self._layers = attention.layers
        times: dict[int, dict[float, float]] = defaultdict(dict)
        for shape, seconds in zip(attention.shapes, attention.seconds, strict=True):
            if not shape.prefills:
                times[shape.decodes][shape.decode_cached / shape.decodes] = seconds
        self._rows = sorted(times)
        self._tables = [tuple(zip(*sorted(times[n].items()), strict=True)) for n in self._rows]

    def seconds(self, rows: int, cached: int) -> float:
        """Seconds of a pass of so many rows with `cached` tokens together."""
        shape = StepShape(rows, cached)
        rest = sum(float(one.pass_seconds([shape])[0]) for one in self._operators)
        by_rows = [np.interp(cached / rows, lengths, times) for lengths, times in self._tables]
        return rest + self._layers * float(np.interp(rows, self._rows, by_rows))


def stretches(case: Case, sums: Sums, factor: float) -> list[Stretch]:
    """From the last end back to the last first token, with passes `factor` times their sums."""
    served = case.measured
    lengths = case.trace.prompt_tokens + case.trace.output_tokens
    after = np.flatnonzero(served.finish_s > served.first_token_s.max())
    order = after[np.argsort(-served.finish_s[after])]
    found = []
    cached = 0  # of all rows, before the pass
    for rows, (later, earlier) in enumerate(pairwise(order), 1):
        cached += int(lengths[later]) - 1
        left_s = float(served.finish_s[later] - served.finish_s[earlier])
        measured_s = left_s
        operators_s = 0.0
        passes = 0
        pass_s = sums.seconds(rows, cached)
        while left_s > 0.5 * factor * pass_s:
            left_s -= factor * pass_s
            operators_s += pass_s
            passes += 1
            cached -= rows
            pass_s = sums.seconds(rows, cached)
        found.append(Stretch(rows, passes, measured_s, operators_s, left_s / (factor * pass_s)))
    return found


def best(case: Case, sums: Sums) -> list[Stretch]:
    """The stretches by the factor at which the counts fit best."""
    tried = [stretches(case, sums, float(factor)) for factor in FACTORS]
    return min(tried, key=lambda one: sum(stretch.off**2 for stretch in one))


def line(name: str, rows: str, part: list[Stretch]) -> str:
    """A line of the table."""
    passes = sum(one.passes for one in part)
    measured_s = sum(one.measured_s for one in part)
    operators_s = sum(one.operators_s for one in part)
    cells = [name, rows, str(passes)]
    cells += [f"{1e3 * seconds / passes:.2f}" for seconds in (measured_s, operators_s)]
    cells.append(f"{measured_s / operators_s:.3f}")
    return f"| {' | '.join(cells)} |"


def lines_of(data: Path, folder: Path) -> list[str]:
    """The lines of a run. `InputError` if it is not one engine."""
    case = read_case(data, folder)
    if case.engines > 1:
        raise InputError(f"{case.name}: its engines end requests of their own")
    operators = read_operators(data, case)
    if case.ranks > 1:
        operators.append(all_reduce(data, case))
    sums = Sums(operators, read_attention(data, case, unequal=False))
    found = best(case, sums)
    lines = [line(case.name, "all", found)]
    for low, high in zip((0, *GROUPS), GROUPS, strict=False):
        part = [one for one in found if low < one.rows <= high]
        if sum(one.passes for one in part):
            lines.append(line("", f"{low + 1} to {high}" if high > 1 else "1", part))
    return lines


def main() -> None:
    data, folders = asked(__doc__)
    print(HEAD)
    for folder in folders:
        try:
            print("\n".join(lines_of(data, folder)))
        except InputError as error:
            print(f"| {error.message} | | | | | |")


if __name__ == "__main__":
    main()
