"""What more windows in the search gain: predicted against held-out goodput.

    python -m benchmarks.papers.tuning_worlds TRACE [--windows 2 4 6 8] [--seeds 6] [--trials 30]

Takes minutes. Needs a trace, such as azure-2023-conv.csv of the Azure Public Dataset.

`tune`'s search runs by a shipped analytic fit (nothing was measured on a GPU) on a given number of
windows of equal length, at a mean rate. Its best settings are then simulated on other windows, the
same for every number of windows and disjoint from all that a search sees. The seed places the
windows, draws which of them a search sees (more windows include the fewer), and seeds it.
Printed for each seed:
the goodput that the search predicts, the held-out goodput, their difference (optimism), the regret
to the best of this seed's recommendations, whether the targets hold there, and the seconds of the
search on one process.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common.command import make_parser
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file
from toolkit.files.shipped import load_recipe
from toolkit.traces.read import read_trace
from toolkit.traces.windows import prepare, split_windows
from toolkit.tuning.evaluate import CandidateLimits, EvaluationSetup, Task, make_world
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.search import search
from toolkit.tuning.tune import best_trial, settings_of

HELD_OUT = 8


def main(args: Sequence[str] | None = None) -> None:
    """Tune on every number of windows with every seed, and print a line for each."""
    parser = make_parser(__doc__)
    parser.add_argument("trace")
    parser.add_argument("--recipe", default="llama-2-13b-a100-80gb")
    parser.add_argument("--rate", type=float, default=2.5, help="requests/s")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--window", type=float, default=120.0, help="seconds of each window")
    parser.add_argument("--windows", type=int, nargs="+", default=[2, 4, 6, 8])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--trials", type=int, default=30)
    given = parser.parse_args(args)
    recipe = load_recipe(given.recipe).model_copy(update={"workers": given.workers})
    fit = read_file(Fit, fit_path(given.recipe))
    fitted = prepare(read_trace(Path(given.trace))[0], recipe, given.rate)
    print("seed windows predicted held-out optimism regret keeps seconds", flush=True)
    for seed in range(given.seeds):
        changed = recipe.tune.model_copy(update={"trials": given.trials, "seed": seed})
        seeded = recipe.model_copy(update={"tune": changed})
        most = max(given.windows)
        seen, others = split_windows(fitted, given.window, most, HELD_OUT, seed)
        settings = settings_of(seeded, fit)
        windows = [window.trace for window in others]
        world = make_world(seeded, fit)
        limits = CandidateLimits.of(seeded)
        held_out = EvaluationSetup(world, windows, recipe.sla, "held out", limits)
        # drawn, since evenly spaced ones would all be earlier than their share of the trace
        drawn = np.random.default_rng(seed).permutation(most)
        lines = []
        for count in given.windows:
            chosen = [seen[k].trace for k in sorted(drawn[:count])]
            setup = replace(held_out, windows=chosen, label="search")
            start_s = time.process_time()
            found = search(setup, InProcessRunner(), settings, lambda _: None)
            took_s = time.process_time() - start_s
            best = best_trial(found, settings.served)
            judged = Task.of(held_out, best.outcome).run()
            lines.append((count, best.goodput_rps, judged, took_s))
        top = max(judged.goodput_rps for _, _, judged, _ in lines)
        for count, predicted, judged, took_s in lines:
            got = judged.goodput_rps
            keeps = "yes" if judged.feasible(limits) else "no"
            goodputs = f"{predicted:9.3f} {got:8.3f} {predicted - got:8.3f} {top - got:6.3f}"
            print(f"{seed:4d} {count:7d} {goodputs} {keeps:5s} {took_s:7.1f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
