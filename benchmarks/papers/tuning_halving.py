"""What successive halving over a search's windows saves and loses against all windows.

    python -m benchmarks.papers.tuning_halving TRACE RECIPE[:WORKERS] ... [--seeds 2]

Takes a minute or so for each recipe and seed. Needs a trace, such as azure-2023-conv.csv of the
Azure Public Dataset or Mooncake's conversation trace.

`tune`'s search runs by a shipped analytic fit (nothing was measured on a GPU), first on all
windows, then so: of each batch of trials the first window is simulated, and the other windows only
of the better half (within the limits, then by score). The sampler is told the score of the first
window for the others, times the ratio of all windows to the first one in trial 0. The best settings
of both searches are simulated on eight held-out windows.
Printed for each pair: the simulated windows of the search, the share that halving saves, whether it
finds the same settings, both held-out goodputs, and whether each keeps the limits there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.command import make_parser
from benchmarks.papers.tuning_stops import tuned_recipe
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file
from toolkit.files.recipe import Recipe
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import Evaluation, Task
from toolkit.tuning.search import search
from toolkit.tuning.tune import Inputs, best_trial, settings_of
from toolkit.tuning.workload import make_workload

LABEL = "search"
HELD_OUT = 8
WINDOW_S = 60.0


class Windows:
    """Simulates every window, and counts those of the search."""

    def __init__(self) -> None:
        self.count = 0

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """See `toolkit.tuning.executor.Runner.run`."""
        for index, task in enumerate(tasks):
            yield index, self.whole(task)

    def whole(self, task: Task) -> Evaluation:
        """The evaluation on all windows."""
        self.count += len(task.setup.windows)
        return replace(task, stops_above=None).run()


class Halving(Windows):
    """Simulates the first window of a batch's trials, and the others of the better half only."""

    def __init__(self) -> None:
        super().__init__()
        self._ratio = 0.0  # of the goodput on all windows to that on the first, of trial 0

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """See `toolkit.tuning.executor.Runner.run`."""
        if any("first part" in task.setup.label for task in tasks):
            yield from super().run(tasks)
            return
        first = [task.sum_up([task.simulate(0)]) for task in tasks]
        self.count += len(tasks)
        order = sorted(
            range(len(tasks)),
            key=lambda k: (not first[k].feasible(tasks[k].setup.limits), -first[k].score, k),
        )
        better = set(order[: (len(tasks) + 1) // 2])
        for index, task in enumerate(tasks):
            if index in better:
                self.count -= 1  # the first window, again
                found = self.whole(task)
                self._ratio = self._ratio or found.goodput_rps / max(first[index].goodput_rps, 1e-9)
                yield index, found
            else:
                first[index].outcome.metrics["goodput_rps"] *= self._ratio
                yield index, first[index]


def main(args: Sequence[str] | None = None) -> None:
    """Search for every recipe with every seed, on all windows and by halving."""
    parser = make_parser(__doc__)
    parser.add_argument("trace")
    parser.add_argument("recipes", nargs="+", metavar="RECIPE[:WORKERS]")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--trials", type=int, default=100)
    given = parser.parse_args(args)
    trace = read_trace(Path(given.trace))[0]
    print("recipe workers seed windows saved_% same all_rps halving_rps keeps", flush=True)
    for named in given.recipes:
        window_s = min(tuned_recipe(named).tune.window_s or WINDOW_S, 2 * WINDOW_S)
        for seed in range(given.seeds):
            spec = {"trials": given.trials, "seed": seed, "window_s": window_s}
            recipe = tuned_recipe(named, held_out_windows=HELD_OUT, **spec)
            print(_compared(recipe, trace), flush=True)


def _compared(recipe: Recipe, trace: Trace) -> str:
    """The line of one recipe."""
    fit = read_file(Fit, fit_path(recipe.name))
    inputs = Inputs(recipe, fit, make_workload(recipe, fit, trace))
    settings = settings_of(recipe, fit)
    setup = inputs.setup(LABEL, inputs.workload.windows.search)
    judge = inputs.setup("held out", inputs.workload.windows.held_out)
    counts = []
    chosen = []
    judged = []
    for runner in (Windows(), Halving()):
        found = search(setup, runner, settings, lambda _: None)
        counts.append(runner.count)
        chosen.append(best_trial(found, settings.served).outcome)
        judged.append(Task.of(judge, chosen[-1]).run())
    same = "yes" if chosen[0].same_settings(chosen[1]) else "no"
    keeps = ",".join("yes" if one.feasible(judge.limits) else "no" for one in judged)
    run = f"{recipe.name} {recipe.workers} {recipe.tune.seed} {counts[0]}"
    goodputs = f"{judged[0].goodput_rps:.3f} {judged[1].goodput_rps:.3f}"
    return f"{run} {100 * (1 - counts[1] / counts[0]):.0f} {same} {goodputs} {keeps}"


if __name__ == "__main__":
    main(sys.argv[1:])
