"""Two windows that vLLM served on an H200, predicted from its profile: passes that overlap.

    python -m benchmarks.engines.gpu_windows [--fit FILE] [--json FILE]

Takes some seconds. Needs nothing else: the windows' requests and what clients measured are in
docs/results/data/h200-windows.json; the profile and the fit are those that ship as
llama-3.1-8b-h200-measured. Nothing is adjusted to the windows.

Rows of each window: by the fit alone, and at the speed that the warm-up before it showed. The
second window found prompts of the first one in the cache, so it is simulated after that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import markdown
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe, recipe_path, shipped_profiles
from toolkit.metrics import Served, summarize
from toolkit.sched.policies import make_any
from toolkit.sim.api import simulate
from toolkit.sim.world import slowed, world_from_fit
from toolkit.traces.types import SharedBlocks, Trace

NAME = "llama-3.1-8b-h200-measured"
WINDOWS = ROOT / "docs/results/data/h200-windows.json"
FIT = "the fit alone"
SPEED = "the warm-up's speed"
REST_S = 1000.0  # between two windows
SHOWN = ("throughput_rps", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_mean_s", "e2e_mean_s")


def trace_of(rows: Sequence[Sequence[float]], before: Sequence[Sequence[float]]) -> Trace:
    """The window's requests after those `before`, which have the same prompts in turn."""
    table = np.array([*before, *rows])
    arrival_s = table[:, 0] / 1e3
    if len(before):
        arrival_s[len(before) :] += arrival_s[len(before) - 1] + REST_S
    prompts = table[:, 1].astype(np.int64)
    outputs = table[:, 2].astype(np.int64)
    shared = shared_prompts(prompts, len(before)) if len(before) else None
    return Trace(arrival_s, prompts, outputs, outputs.copy(), shared=shared)


def shared_prompts(prompts: np.ndarray, first: int) -> SharedBlocks:
    """The blocks of prompts: request k of each window has the k-th stream of random tokens."""
    size = 16
    numbers = [*range(first), *range(len(prompts) - first)]
    blocks: list[int] = []
    offsets = [0]
    for number, tokens in zip(numbers, prompts.tolist(), strict=True):
        blocks += [1000 * number + k for k in range(-(-tokens // size))]
        offsets.append(len(blocks))
    return SharedBlocks(size, np.array(blocks, np.int64), np.array(offsets, np.int64))


def predicted(
    fit: Fit, recipe: Recipe, windows: Sequence[dict[str, Any]], place: int, slowdown: float
) -> dict[str, float]:
    """Return a window's metrics by the fit, at a speed."""
    window = windows[place]
    before = windows[window["after"]]["requests"] if window["after"] is not None else []
    trace = trace_of(window["requests"], before)
    policy = make_any(recipe.policy.name, recipe.policy.parameters)
    world = world_from_fit(fit, workers=1, max_new_tokens=recipe.serve.max_new_tokens)
    served = simulate(trace, policy, slowed(world, slowdown)).served
    return summarize(served.after(len(before)), {})


def measured(window: dict[str, Any]) -> dict[str, float]:
    """The window's figures as its clients measured them."""
    table = np.array(window["requests"])
    sent_s, ttft_s, e2e_s = table[:, [0, 3, 4]].T / 1e3
    outputs = table[:, 2].astype(np.int64)
    all_ok = np.ones(len(table), dtype=np.bool_)
    # the largest gaps were not measured
    served = Served(sent_s, sent_s + ttft_s, sent_s + e2e_s, outputs, np.zeros(len(table)), all_ok)
    return summarize(served, {})


def errors_of(fit: Fit) -> list[dict[str, Any]]:
    """Return the error of each figure in percent, of each window by the fit and at its speed."""
    windows = json.loads(WINDOWS.read_text(encoding="utf-8"))["windows"]
    recipe = load_recipe(recipe_path(NAME))
    found = []
    for place, window in enumerate(windows):
        truth = measured(window)
        for knows, slowdown in ((FIT, 1.0), (SPEED, window["warmup"]["slowdown"])):
            said = predicted(fit, recipe, windows, place, slowdown)
            error = {name: 100.0 * (said[name] / truth[name] - 1.0) for name in SHOWN}
            found.append({"rate_rps": window["rate_rps"], "knows": knows, "error": error})
    return found


def main() -> None:
    """Print two rows for each window."""
    parser = make_parser(__doc__)
    default = shipped_profiles() / NAME / "fit.json"
    parser.add_argument("--fit", type=Path, default=default, help="default: the shipped one")
    given = parser.parse_args()
    rows = [
        [
            f"{row['rate_rps']:g}",
            row["knows"],
            *(f"{row['error'][name]:+.1f} %" for name in SHOWN),
        ]
        for row in errors_of(read_file(Fit, given.fit))
    ]
    print(markdown(["requests/s", "with", *SHOWN], rows, words=2))


if __name__ == "__main__":
    main()
