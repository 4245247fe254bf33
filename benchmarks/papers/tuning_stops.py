"""What trials that end early save in a search, and whether its result stays the same.

    python -m benchmarks.papers.tuning_stops TRACE RECIPE[:WORKERS] ... [--seeds 2] [--windows 4 8]

Takes a minute or so for each recipe and seed. Needs a trace, such as azure-2023-conv.csv of the
Azure Public Dataset or Mooncake's conversation trace.

`tune` runs twice by a shipped analytic fit (nothing was measured on a GPU), with and without trials
that end early. The verdict's draws are left out, since nothing in them ends early. Printed for each
pair of runs: the windows that the search simulates, how many of these early ends save, the trials
that end early, the share of the simulations' processor time that is saved (of the search, and of
the alternatives), and what differs in the result besides the trials that ended early.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.command import make_parser
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, head, read_file, shipped_siblings
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.files.tuning import Tuning
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import Evaluation, SimulatedWindow, Task
from toolkit.tuning.executor import Remembering
from toolkit.tuning.tune import Inputs, tune
from toolkit.tuning.workload import make_workload

SEARCH = "search"
REST = "alternatives"


class Counted:
    """Simulates in this process, counts windows and adds up their processor seconds.

    Tasks that may end early do so only if `early`.
    """

    def __init__(self, *, early: bool) -> None:
        self._early = early
        self.windows: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        """See `toolkit.tuning.executor.Runner.run`."""
        for index, task in enumerate(tasks):
            part = SEARCH if task.setup.label.startswith(SEARCH) else REST
            results: list[SimulatedWindow] = []
            for window in range(len(task.setup.windows)):
                start_s = time.process_time()
                results.append(task.simulate(window))
                self.seconds[part] += time.process_time() - start_s
                self.windows[part] += 1
                if self._early and task.hopeless(results):
                    break
            yield index, task.sum_up(results)


def tuned_recipe(named: str, **tune: Any) -> Recipe:
    """The recipe of RECIPE[:WORKERS], with other settings of its search."""
    name, _, workers = named.partition(":")
    recipe = load_recipe(name)
    changes = {"tune": recipe.tune.model_copy(update=tune)}
    return recipe.model_copy(update=changes | {"workers": int(workers or recipe.workers)})


class Unkept:
    """An `EvaluationStore` that keeps nothing."""

    def __init__(self) -> None:
        self.known: dict[str, Evaluation] = {}

    def keep(self, key: str, task: Task, evaluation: Evaluation) -> None:
        """See `EvaluationStore.keep`."""

    def forget(self) -> None:
        """See `EvaluationStore.forget`."""


def main(args: Sequence[str] | None = None) -> None:
    """Tune every recipe with every seed, with and without early ends, and print a line for each."""
    parser = make_parser(__doc__)
    parser.add_argument("trace")
    parser.add_argument("recipes", nargs="+", metavar="RECIPE[:WORKERS]")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--windows", type=int, nargs="+", default=[4], help="of the search")
    given = parser.parse_args(args)
    traffic = Path(given.trace)
    trace = read_trace(traffic)[0]
    columns = "recipe workers windows seed simulated saved ended search_s_% others_s_% differs"
    print(columns, flush=True)
    for named, windows, seed in product(given.recipes, given.windows, range(given.seeds)):
        spec = {"trials": given.trials, "seed": seed, "windows": windows, "draws": 0}
        print(_compared(tuned_recipe(named, **spec), traffic, trace), flush=True)


def _compared(recipe: Recipe, traffic: Path, trace: Trace) -> str:
    """The line of one recipe."""
    fit = read_file(Fit, fit_path(recipe.name))
    siblings = shipped_siblings(recipe)
    workload = make_workload(recipe, fit, trace)
    inputs = Inputs(recipe, fit, workload, siblings=tuple(siblings))
    runners = {early: Counted(early=early) for early in (False, True)}
    results = {
        early: tune(inputs, Remembering(runner, Unkept()), head({"trace": traffic}), lambda _: None)
        for early, runner in runners.items()
    }
    before = runners[False]
    after = runners[True]
    simulated = before.windows[SEARCH]
    ended = [t for t in results[True].trials if not t.whole]
    stopped = [trial for trial in ended if trial.stopped_after is not None]
    saved = [
        100.0 * (1.0 - after.seconds[part] / max(before.seconds[part], 1e-9))
        for part in (SEARCH, REST)
    ]
    run = f"{recipe.name} {recipe.workers} {recipe.tune.windows} {recipe.tune.seed} {simulated}"
    gain = f"{simulated - after.windows[SEARCH]} {len(stopped)} {saved[0]:.0f} {saved[1]:.0f}"
    return f"{run} {gain} {_differing(results[False], results[True])}"


def _differing(whole: Tuning, early: Tuning) -> str:
    """The fields that differ, besides what is of trials that ended early; '-' for none."""
    ended = {trial.number for trial in early.trials if trial.stopped_after is not None}
    found = []
    for field in Tuning.model_fields:
        one = getattr(whole, field)
        other = getattr(early, field)
        if field == "trials":
            one, other = (
                [
                    (t.outcome.policy, t.outcome.parameters, t.feasible) if t.number in ended else t
                    for t in trials
                ]
                for trials in (one, other)
            )
        if one != other and field != "environment":
            found.append(field)
    return ",".join(found) or "-"


if __name__ == "__main__":
    main(sys.argv[1:])
