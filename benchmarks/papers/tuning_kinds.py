"""What searching each kind's flags gains in a fleet of servers, for the same number of trials.

    python -m benchmarks.papers.tuning_kinds TRACE RECIPE:COUNT RECIPE:COUNT ... [--seeds 3 4 5]

Takes a minute or so for each seed. Needs a trace, such as azure-2023-conv.csv of the Azure Public
Dataset or Mooncake's conversation trace.

`tune`'s search runs by shipped analytic fits (nothing was measured on a GPU) on a fleet of servers
behind the router `by-law`, three times: with the flags of the first kind alone, with those of all
kinds from the first trial on, and with the same flags for all kinds in TPE's random start, as
`tune` does. The best settings of each are simulated on windows that no search saw.
Printed for each seed: the requests per second that arrive, the held-out goodput of the recipes'
flags, and for each search its goodput there and on its own windows, and whether the limits are
kept held out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.command import make_parser
from toolkit.cli.arguments import parse_sla
from toolkit.files.fit import Fit
from toolkit.files.io import fit_path, read_file
from toolkit.files.plan import Kind
from toolkit.files.recipe import RouterSpec
from toolkit.files.shipped import load_recipe
from toolkit.traces.read import read_trace
from toolkit.traces.types import trace_path
from toolkit.tuning.evaluate import Task
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.search import ALIKE, SearchSettings, search
from toolkit.tuning.tune import Inputs, best_trial
from toolkit.tuning.workload import make_workload

SLA = ["ttft_p99_s=2", "mtpot_p99_s=0.1"]
WINDOWS = {"windows": 4, "held_out_windows": 4}


def main(args: Sequence[str] | None = None) -> None:
    """Search in three ways with every seed, and print a line for each."""
    parser = make_parser(__doc__)
    parser.add_argument("trace")
    parser.add_argument("kinds", nargs="+", metavar="RECIPE:COUNT")
    parser.add_argument("--sla", nargs="+", default=SLA)
    parser.add_argument("--load", type=float, default=0.85, help="of what the recipes' flags serve")
    parser.add_argument("--window", type=float, default=25.0, help="seconds of each window")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--trials", type=int, default=50)
    given = parser.parse_args(args)
    trace = read_trace(trace_path(Path(given.trace)))[0]
    kinds = [_kind(named) for named in given.kinds]
    print("seed rate_rps recipes first all alike_first  (held out/search, * keeps)", flush=True)
    for seed in given.seeds:
        spec = WINDOWS | {"trials": given.trials, "seed": seed}
        spec |= {"window_s": given.window, "load": given.load, "routers": ["own"]}
        own = kinds[0].recipe
        changed = {
            "sla": parse_sla(given.sla),
            "tune": own.tune.model_copy(update=spec),
            "replica_router": RouterSpec(name="by-law"),
        }
        recipe = own.model_copy(update=changed)
        others = tuple(kinds[1:])
        workload = make_workload(recipe, kinds[0].fit, trace, others)
        print(_compared(Inputs(recipe, kinds[0].fit, workload, None, others)), flush=True)


def _kind(named: str) -> Kind:
    name, _, count = named.partition(":")
    workers = int(count or 1)
    recipe = load_recipe(name).model_copy(update={"workers": workers})
    return Kind(recipe=recipe, fit=read_file(Fit, fit_path(name)), workers=workers)


def _compared(inputs: Inputs) -> str:
    """The line of one seed."""
    settings = inputs.settings
    setup = inputs.setup("search", inputs.workload.windows.search)
    judge = inputs.setup("held out", inputs.workload.windows.held_out)
    recipes = settings.spaces[0].task(judge, {}).run()
    cells = [f"{recipes.goodput_rps:.2f}"]
    for alike, ways in ((0, _first_alone(settings)), (0, settings), (ALIKE, settings)):
        found = search(setup, InProcessRunner(), replace(ways, alike=alike), lambda _: None)
        best = best_trial(found, settings.served)
        judged = Task.of(judge, best.outcome).run()
        keeps = "*" * judged.feasible(judge.limits)
        cells.append(f"{judged.goodput_rps:.2f}/{best.goodput_rps:.2f}{keeps}")
    return f"{settings.seed} {inputs.workload.rate_rps:.2f} {' '.join(cells)}"


def _first_alone(settings: SearchSettings) -> SearchSettings:
    """The search of the first kind's flags and the router; other kinds have their recipes'."""
    spaces = []
    for space in settings.spaces:
        searched = {
            name: among
            for name, among in space.distributions.items()
            if name.rpartition(".")[0] not in space.kinds
        }
        spaces.append(replace(space, distributions=searched))
    return replace(settings, spaces=spaces)


if __name__ == "__main__":
    main(sys.argv[1:])
