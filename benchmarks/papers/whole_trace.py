"""Whether what `tune` says holds on the whole trace, by `simulate`; and how stable capacity is.

    python -m benchmarks.papers.whole_trace --traces FILE FILE FILE --recipes RECIPE[=FIT] ...
        [--trials 16] [--seeds 2] [--json FILE]

Takes an hour with three traces and three recipes. Needs traces, such as those of Azure's and
Mooncake's releases, and for recipes without a shipped fit one of this machine.

For each trace and recipe the capacity is found with five seeds. Then `llmctl tune` runs at four
shares of it with each seed, and `llmctl simulate` replays the whole trace with what it recommends,
at the same rate. Printed for each cell: what `tune` said (kept, broken or overloaded), what
`simulate` found, and whether they agree; for each capacity its spread over seeds, the seconds it
took, and whether the whole trace keeps all targets at 0.98 of it and not at 1.05.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.command import llmctl, make_parser
from toolkit.files.io import read_file
from toolkit.files.tuning import BEHIND, Tuning

SHARES = (0.5, 0.9, 1.1, 1.6)  # of the capacity: rates that are tuned for
CAPACITY_SEEDS = 5


def main() -> None:
    """Print a row for each trace and recipe, then a row for each cell."""
    parser = make_parser(__doc__)
    parser.add_argument("--traces", nargs="+", required=True)
    parser.add_argument("--recipes", nargs="+", required=True, metavar="RECIPE[=FIT]")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    capacities: dict[tuple[str, str], float] = {}
    columns = ["trace", "recipe", "requests/s", "spread, %", "seconds", "at 0.98", "at 1.05"]
    print(_line(columns))
    print(_line(["---"] * len(columns)), flush=True)
    for trace in given.traces:
        for recipe in given.recipes:
            found = capacity(recipe, trace)
            capacities[trace, recipe] = found["capacity_rps"]
            print(_line([_name(trace), _name(recipe), *found["cells"]]), flush=True)
    print()
    columns = ["trace", "recipe", "rate", "seed", "tune", "whole trace", "agree"]
    print(_line(columns))
    print(_line(["---"] * len(columns)), flush=True)
    cells = [
        (trace, recipe, share, seed)
        for trace, recipe in capacities
        for share in SHARES
        for seed in range(given.seeds)
    ]
    agreed = 0
    for trace, recipe, share, seed in cells:
        rate = round(share * capacities[trace, recipe], 4)
        said, simulated = tuned(recipe, trace, rate, seed, given.trials)
        agreed += said == simulated
        row = [_name(trace), _name(recipe), f"{rate:g}", seed, said, simulated]
        print(_line([*row, "yes" if said == simulated else "NO"]), flush=True)
    print(f"\n{agreed} of {len(cells)} cells agree")


def capacity(recipe: str, trace: str) -> dict[str, Any]:
    """The capacity with the recipe's seed, and the cells of its row."""
    rates = []
    began_s = time.monotonic()
    for seed in range(CAPACITY_SEEDS):
        words = ["capacity", *_recipe(recipe), "--trace", trace, "--seed", str(seed)]
        told = json.loads(llmctl(*words, "--json").stdout)
        rates.append(told["capacities"][0]["capacity_rps"])
    took_s = (time.monotonic() - began_s) / CAPACITY_SEEDS
    middle = sorted(rates)[len(rates) // 2]
    spread = 100.0 * (max(rates) / min(rates) - 1.0)
    below = simulated(recipe, trace, 0.98 * rates[0])
    above = simulated(recipe, trace, 1.05 * rates[0])
    cells = [f"{middle:.4g}", f"{spread:.2f}", f"{took_s:.1f}", below, above]
    return {"capacity_rps": rates[0], "cells": cells}


def tuned(recipe: str, trace: str, rate: float, seed: int, trials: int) -> tuple[str, str]:
    """What `tune` said of its recommendation, and what `simulate` finds on the whole trace."""
    with tempfile.TemporaryDirectory() as folder:
        tuning = Path(folder) / "tuning.json"
        words = ["tune", *_recipe(recipe), "--trace", trace, "--rate", f"{rate:g}"]
        words += ["--seed", str(seed), "--trials", str(trials), "--policies", "own"]
        done = llmctl(*words, "--out", str(tuning), codes=(0, 5))
        said = "broken" if done.returncode else "kept"
        if read_file(Tuning, tuning).recommended.outcome.used[BEHIND] > 1.0:
            said = "overloaded"
        return said, simulated(recipe, trace, rate, "--tuning", str(tuning))


def simulated(recipe: str, trace: str, rate: float, *words: str) -> str:
    """What `simulate` finds at this rate: kept, broken or overloaded."""
    given = [*_recipe(recipe), "--trace", trace, "--rate", f"{rate:.9g}"]
    return str(json.loads(llmctl("simulate", *given, *words, "--json").stdout)["verdict"])


def _recipe(recipe: str) -> list[str]:
    name, _, fit = recipe.partition("=")
    return [name, "--fit", fit or name]


def _name(path: str) -> str:
    name = Path(path.partition("=")[0]).name
    return name.removesuffix(".csv").removesuffix(".jsonl")


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
