"""What candidates are tried on: the trace made ready for a recipe, its windows, and the machine as the fit has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.plan import Kind
from toolkit.files.recipe import Recipe
from toolkit.sched.policies import make_any
from toolkit.sim.api import simulate
from toolkit.sim.world import World, world_of
from toolkit.traces.prepare import prepare
from toolkit.traces.scale import mean_rate, scale_rate
from toolkit.traces.types import Trace
from toolkit.traces.windows import Window, Windows, fit_windows

CAPACITY_SAMPLE = 1000  # requests of the backlog from which the untuned policy's capacity is read


@dataclass(slots=True, frozen=True)
class Workload:
    """The trace, made ready, and cut into windows."""

    windows: Windows
    rate_rps: float

    @property
    def trace(self) -> Trace:
        """The whole of it."""
        return self.windows.trace

    @property
    def search(self) -> list[Window]:
        """The windows to search on."""
        return self.windows.search

    @property
    def held_out(self) -> list[Window]:
        """The windows for the verdict, which the search does not see."""
        return self.windows.held_out


def capacity_rps(recipe: Recipe, world: World, fitted: Trace) -> float:
    """What the recipe's own policy serves at most: requests per second with a backlog of the trace's requests."""
    sample = np.linspace(0, len(fitted) - 1, min(len(fitted), CAPACITY_SAMPLE)).astype(int)
    backlog = Trace(
        np.zeros(len(sample)), fitted.prompt_tokens[sample], fitted.output_tokens[sample], fitted.max_tokens[sample]
    )
    policy = make_any(recipe.policy.name, recipe.policy.parameters)
    return simulate(backlog, policy, world).metrics({})["throughput_rps"]


def make_workload(recipe: Recipe, fit: Fit, trace: Trace, others: Sequence[Kind] = ()) -> Workload:
    """The trace with the recipe's lengths and rate, cut into windows to search on and windows held out.

    `InputError` for a trace without requests, one whose requests all come at once, and windows without requests.
    """
    spec = recipe.tune
    if not len(trace):
        raise InputError(f"{trace.source}: there are no requests in it", "give another trace with --trace")
    fitted = prepare(trace, recipe)
    rate_rps = spec.request_rate_rps
    if rate_rps is None and spec.load is not None:
        rate_rps = round(spec.load * capacity_rps(recipe, make_world(recipe, fit, others), fitted), 3)
        if rate_rps == 0:
            raise InputError(
                f"policy '{recipe.policy.name}' serves none of {fitted.source}'s requests, so tune.load has no rate",
                "give a rate with --rate, or change the recipe's policy",
            )
    if rate_rps is not None:
        fitted = scale_rate(fitted, rate_rps)
    windows = fit_windows(fitted, spec.window_s, spec.windows, spec.held_out_windows, spec.seed)
    return Workload(windows, rate_rps or mean_rate(fitted))


def make_world(recipe: Recipe, fit: Fit, others: Sequence[Kind] = ()) -> World:
    """The simulated machine of a recipe; of a fleet with its `others`, its further kinds of workers."""
    kinds = [Kind(recipe=recipe, fit=fit, workers=recipe.workers), *others]
    return world_of(kinds, max_new_tokens=recipe.serve.max_new_tokens, seed=recipe.tune.seed)
