"""From a recipe, a fit and a trace to tuning.json: windows, search, verdict, sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.files.fit import Fit
from toolkit.files.io import Head
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Tuning
from toolkit.files.tuning import Window as WindowSpec
from toolkit.sched.policies import make_policy
from toolkit.sim.api import World, simulate, world_from_fit
from toolkit.traces.prepare import prepare
from toolkit.traces.scale import mean_rate, scale_rate
from toolkit.traces.types import Trace
from toolkit.traces.windows import Window, split_windows
from toolkit.tuning.evaluate import Bench, Evaluation
from toolkit.tuning.search import Evaluator, Found, Progress, Settings, search, sensitivity

COVERED = 0.8  # share of the trace in windows, where the recipe leaves their length open
CAPACITY_SAMPLE = 1000  # requests of the backlog from which the untuned policy's capacity is read


@dataclass(slots=True, frozen=True)
class Workload:
    """The trace, made ready, and its windows."""

    trace: Trace
    rate_rps: float
    search: list[Window]
    held_out: list[Window]


def capacity_rps(recipe: Recipe, world: World, fitted: Trace) -> float:
    """What the recipe's own policy serves at most: requests per second with a backlog of the trace's requests."""
    sample = np.linspace(0, len(fitted) - 1, min(len(fitted), CAPACITY_SAMPLE)).astype(int)
    backlog = Trace(
        np.zeros(len(sample)), fitted.prompt_tokens[sample], fitted.output_tokens[sample], fitted.max_tokens[sample]
    )
    policy = make_policy(recipe.policy.name, recipe.policy.parameters)
    return simulate(backlog, policy, world).metrics({})["throughput_rps"]


def make_workload(recipe: Recipe, fit: Fit, trace: Trace) -> Workload:
    """The trace with the recipe's lengths and rate, cut into windows to search on and windows held out."""
    spec = recipe.tune
    fitted = prepare(trace, recipe)
    rate_rps = spec.request_rate_rps
    if rate_rps is None and spec.load is not None:
        rate_rps = round(spec.load * capacity_rps(recipe, make_world(recipe, fit), fitted), 3)
    if rate_rps is not None:
        fitted = scale_rate(fitted, rate_rps)
    count = spec.windows + spec.held_out_windows
    window_s = spec.window_s or COVERED * float(fitted.arrival_s[-1]) / count
    search_windows, held_out = split_windows(fitted, window_s, spec.windows, spec.held_out_windows, spec.seed)
    return Workload(fitted, rate_rps or mean_rate(fitted), search_windows, held_out)


def make_world(recipe: Recipe, fit: Fit) -> World:
    """The simulated machine of a recipe."""
    return world_from_fit(
        fit,
        workers=recipe.workers,
        max_new_tokens=recipe.serve.max_new_tokens,
        seed=recipe.tune.seed,
        flush_s=recipe.engine.flush_s,
    )


def settings_of(recipe: Recipe) -> Settings:
    """How the recipe wants the search done."""
    spec = recipe.tune
    return Settings(recipe.policy, spec.space, spec.trials, spec.seed, spec.max_oom_percent)


def tune(
    recipe: Recipe,
    workload: Workload,
    world: World,
    head: Head,
    progress: Progress,
    remember: Callable[[Evaluator], Evaluator] = lambda bench: bench,
) -> Tuning:
    """Search on one set of windows, judge on the other.

    Args:
        head: the envelope's fields of the result.
        progress: called after each trial.
        remember: may wrap the search's evaluator, so that an interrupted search goes on.
    """
    settings = settings_of(recipe)
    bench = remember(_bench(workload.search, world, recipe))
    found = search(bench, settings, progress)
    verdict = _bench(workload.held_out, world, recipe)
    default = verdict.evaluate(recipe.policy.name, recipe.policy.parameters)
    best = verdict.evaluate(found.best.outcome.policy, found.best.outcome.parameters)
    return Tuning.model_validate(
        {
            **head,
            "recipe_name": recipe.name,
            "seed": settings.seed,
            "sla": recipe.sla,
            "workers": world.workers,
            "request_rate_rps": workload.rate_rps,
            "trace_notes": list(workload.trace.notes),
            "search_windows": [_spec(window) for window in workload.search],
            "held_out_windows": [_spec(window) for window in workload.held_out],
            **_judge(found, default, best, settings.max_oom_percent),
            "sensitivity": sensitivity(bench, settings, found.best),
        }
    )


def _judge(found: Found, default: Evaluation, best: Evaluation, max_oom_percent: float) -> dict[str, object]:
    before, after = (one.outcome.metrics["goodput_rps"] for one in (default, best))
    better = (best.feasible(max_oom_percent), best.score) > (default.feasible(max_oom_percent), default.score)
    return {
        "trials": found.trials,
        "defaults_held_out": default.outcome,
        "best_held_out": best.outcome,
        "gain_percent": 100.0 * (after / before - 1.0) if before > 0 else None,
        "binding_sla": max(best.ratios, key=lambda key: best.ratios[key]) if best.ratios else None,
        "binding_ratio": max(best.ratios.values(), default=None),
        "keep_defaults": not better,
    }


def _bench(windows: Sequence[Window], world: World, recipe: Recipe) -> Bench:
    return Bench(world, [window.trace for window in windows], recipe.sla)


def _spec(window: Window) -> WindowSpec:
    return WindowSpec(start_s=window.start_s, end_s=window.end_s, requests=len(window.trace))
