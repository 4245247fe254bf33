"""Whether what `tune` recommends is as quick as the best of a grid that keeps all targets.

    python -m benchmarks.papers.tune_grid --traces FILE FILE FILE [--recipe llama-3.1-8b-h200]
        [--tokens 512 1024 2048 4096 8192 16384] [--trials 40] [--seed 0] [--jobs 2] [--json FILE]

Takes some minutes. Needs traces, such as those of Azure's and Mooncake's releases.

Each trace is tuned for at three shares of the capacity of the recipe's settings, vLLM's policy
alone, as `llmctl tune --policies own --load SHARE` does. Beside it stands the quickest of a grid of
5 x 6 settings, `max_num_seqs` by `max_num_batched_tokens`, that keeps all targets on the whole
trace, by mean E2E. "Over the grid": the mean E2E of the recommendation, of 1 % within targets
alike; where the verdict names quicker settings that it declined, these are for the wish "latency".
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.command import make_parser
from toolkit.cli.arguments import open_recipe
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, head, read_file
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import recipe_path
from toolkit.files.tuning import Evaluation
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace
from toolkit.tuning.executor import ProcessPool, Runner, collect
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace

SHARES = (0.7, 0.9, 1.0)  # of the capacity of the recipe's settings
ROWS = (64, 128, 256, 512, 1024)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
WITHIN = 1.05  # of the grid's best mean E2E: as quick
COLUMNS = (
    "trace",
    "load",
    "requests/s",
    "defaults, s",
    "grid's best, s",
    "its rows x tokens",
    "recommended, s",
    "rows x tokens",
    "over the grid's",
    "for latency, s",
    "this over the grid's",
)
E2E = "e2e_mean_s"


def main() -> None:
    """Print a row for each trace and load, then how many are as quick as the grid."""
    parser = make_parser(__doc__)
    parser.add_argument("--traces", nargs="+", required=True, type=Path)
    parser.add_argument("--recipe", default="llama-3.1-8b-h200")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    recipe = open_recipe(recipe_path(given.recipe))
    fit = read_file(Fit, fit_path(given.recipe))
    search = {"policies": ["own"], "trials": given.trials, "seed": given.seed}
    print(_line(COLUMNS))
    print(_line(["---"] * len(COLUMNS)), flush=True)
    quick = quick_for_latency = 0
    with ProcessPool(given.jobs) as pool:
        for file in given.traces:
            trace, _ = read_trace(file)
            for share in SHARES:
                changed = recipe.tune.model_copy(update=search | {"load": share})
                tuned = recipe.model_copy(update={"tune": changed})
                cells, over, over_for_latency = cell(tuned, fit, trace, pool, given.tokens)
                print(_line([file.stem, share, *cells]), flush=True)
                quick += over <= WITHIN
                quick_for_latency += over_for_latency <= WITHIN
    count = len(given.traces) * len(SHARES)
    print(f"\n{quick} of {count} recommendations are within 5 % of the grid's best")
    print(f"{quick_for_latency} of {count}, where latency is the wish")


def cell(
    recipe: Recipe, fit: Fit, trace: Trace, runner: Runner, budgets: Sequence[int]
) -> tuple[list[str], float, float]:
    """The cells of a row, and the mean E2E over the grid's best: of the recommended settings, and
    of the ones for latency.
    """
    inputs = TuneInputs(recipe, fit, cut_trace(recipe, fit, trace))
    found = tune(inputs, runner, head({}), lambda _: None)
    own = inputs.deployment.settings
    parameters = [
        {"max_num_seqs": rows, "max_num_batched_tokens": tokens}
        for rows in ROWS
        for tokens in budgets
    ]
    settings = [own.model_copy(update={"parameters": one}) for one in parameters]
    tasks = [inputs.whole(one) for one in settings]
    grid = [one for one in collect(runner, tasks) if one.outcome.kept]
    declined = found.alternatives.declined
    best = min(grid, key=_mean_s, default=found.defaults)
    latency = declined or found.recommended
    over, over_for_latency = (_mean_s(one) / _mean_s(best) for one in (found.recommended, latency))
    cells = [
        f"{found.request_rate_rps:.4g}",
        f"{_mean_s(found.defaults):.3f}",
        f"{_mean_s(best):.3f}" if grid else "none keeps all targets",
        _settings(best),
        f"{_mean_s(found.recommended):.3f}",
        _settings(found.recommended),
        f"{100 * over - 100:+.1f} %",
        f"{_mean_s(latency):.3f}" if declined else "",
        f"{100 * over_for_latency - 100:+.1f} %" if declined else "",
    ]
    return cells, over, over_for_latency


def _mean_s(found: Evaluation) -> float:
    return found.metrics[E2E]


def _settings(found: Evaluation) -> str:
    names = ("max_num_seqs", "max_num_batched_tokens")
    return " x ".join(str(found.settings.parameters[name]) for name in names)


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
