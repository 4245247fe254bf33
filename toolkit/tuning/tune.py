"""From a recipe, a fit and a trace to tuning.json.

`tune` searches on windows of the trace and judges the result on the whole of it. The parts, in
order: the search and the report, its verdict, and how much the gain varies over windows that were
held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from toolkit.files.io import EnvelopeFields
from toolkit.files.recipe import RouterSpec
from toolkit.files.tuning import (
    Alternatives,
    Evaluation,
    HeldOutGain,
    Interval,
    JudgedPart,
    PolicyResult,
    Settings,
    SlowEnd,
    TunedCapacity,
    Tuning,
    TuningWindow,
    WindowLength,
    judged_limits,
)
from toolkit.sched.policies import engines_for, refusal
from toolkit.traces.windows import TraceWindow, mean_rate
from toolkit.tuning.capacity import Capacity, rate_capacity
from toolkit.tuning.deployments import fewest
from toolkit.tuning.evaluate import rank
from toolkit.tuning.executor import Evaluate, Runner, collect
from toolkit.tuning.judge import NOTABLE_GAIN, is_better, is_quicker, judge_candidates
from toolkit.tuning.search import (
    LATENCY,
    Progress,
    front,
    search,
    search_settings,
    sensitivity,
)
from toolkit.tuning.spaces import SWEEP_POINTS, PolicySpace, sweep
from toolkit.tuning.workload import CutTrace, TuneInputs

RATES = 20  # that a capacity takes, about


def planned(inputs: TuneInputs) -> list[int]:
    """The requests of each evaluation that a tuning takes, in their order; about the most."""
    settings = search_settings(inputs.recipe, inputs.fit)
    cut = inputs.cut.windows
    searched = sum(len(window.trace) for window in cut.search)
    whole = len(inputs.cut.trace)
    swept = max(
        sum(len(sweep(among)) for among in space.distributions.values())
        for space in settings.spaces
    )
    return [
        *[searched] * settings.trials,
        *[whole] * (2 + len(settings.spaces) + 2 * SWEEP_POINTS + 2 * RATES),
        *[searched] * swept,
        *[len(window.trace) for window in cut.held_out for _ in range(2)],
    ]


def tune(inputs: TuneInputs, runner: Runner, head: EnvelopeFields, progress: Progress) -> Tuning:
    """Search on windows, and judge on the whole trace. The recommended settings are for a policy
    that the recipe's engine can run.

    Args:
        runner: runs the simulations, or returns the results that an interrupted run kept.
        head: the envelope's fields of the result.
        progress: called after each evaluation with the best goodput so far.
    """
    recipe = inputs.recipe
    settings = search_settings(inputs.recipe, inputs.fit)
    task = inputs.on_windows("search", inputs.cut.windows.search)
    trials = search(task, runner, settings, progress)
    evaluate = partial(collect, runner, tick=partial(progress, 0.0))
    judged = judge_candidates(trials, settings, inputs.whole, evaluate)
    of_spaces = judged.of_spaces(settings.spaces)
    served = [key for key in of_spaces if key in settings.served] or [*of_spaces]
    best = judged.best([of_spaces[key] for key in served])
    chosen, space, in_turn = _settle_router(inputs, evaluate, best, settings.spaces)
    own = settings.spaces[0]
    able = own.key in settings.served or chosen.settings.key not in settings.served
    default = judged.default
    if able and rank(default) > rank(chosen) and not is_better(chosen, default):
        chosen, space = default, own  # without its router the best is worse than these
    # The front has goodput and the target nearest to its limit, where that is a metric.
    used = chosen.outcome.used
    targets = [key for key in recipe.sla if key in chosen.metrics]
    latency = max(targets, key=lambda key: used[key], default=LATENCY)
    keep = not is_better(chosen, default)
    recommended = default if keep else chosen
    before = default.goodput_rps
    cut = inputs.cut.windows
    declined = judged.declined(recommended, served)
    others = _alternatives(inputs, evaluate, recommended, [*of_spaces.values()], declined)
    return Tuning.model_validate(
        {
            **head,
            "recipe_name": recipe.name,
            "analytic": inputs.fit.engine.analytic,
            "analytic_error": inputs.fit.engine.analytic_error,
            "seed": settings.seed,
            "sla": recipe.sla,
            "workers": recipe.workers,
            "request_rate_rps": inputs.cut.rate_rps,
            "concurrency": recipe.tune.concurrency,
            "trace_notes": list(cut.trace.notes),
            "scaling": cut.trace.scaling,
            "changes": cut.trace.changes,
            "window_length": _window_length(inputs.cut),
            "search_windows": _window_specs(cut.search),
            "held_out_windows": _window_specs(cut.held_out),
            "trials": trials,
            "defaults": default,
            "best": chosen,
            "gain_percent": 100.0 * (chosen.goodput_rps / before - 1.0) if before > 0 else None,
            "keep_defaults": keep,
            "limits": judged_limits(recipe, recommended.outcome),
            "slow_end": _slow_end(inputs, evaluate, recommended.settings),
            "judged": _judged_part(inputs.cut, recommended.settings.policy),
            "further": judged.further,
            "capacity": _capacity(inputs, evaluate, default.settings, recommended.settings),
            "sensitivity": sensitivity(task, runner, space, chosen, progress),
            "policies": [_result(trials, best, inputs) for best in of_spaces.values()],
            "in_turn": in_turn,
            "latency_metric": latency,
            "front": front(trials, latency),
            "held_out_gain": _held_out_gain(inputs, evaluate, default.settings, chosen.settings),
            "engine": recipe.engine.name,
            "alternatives": others,
        }
    )


def _window_length(traced: CutTrace) -> WindowLength:
    cut = traced.windows
    inside = sum(window.trace.counted for window in [*cut.search, *cut.held_out])
    return WindowLength(
        wished_s=cut.wished_s,
        seconds=cut.seconds,
        longest_s=cut.longest_s,
        covered_percent=100.0 * inside / len(traced.trace),
    )


def _judged_part(traced: CutTrace, policy: str) -> JudgedPart:
    part = traced.judged(policy)
    return JudgedPart(
        start_s=part.start_s,
        end_s=part.end_s,
        requests=len(part.trace),
        of_requests=len(traced.trace),
    )


def _capacity(
    inputs: TuneInputs, evaluate: Evaluate, default: Settings, recommended: Settings
) -> TunedCapacity | None:
    """The capacities of the recipe's settings and of the recommended ones."""
    if inputs.recipe.tune.concurrency or mean_rate(inputs.cut.trace) == 0.0:
        return None

    def capacity(settings: Settings) -> Capacity | None:
        return rate_capacity(inputs.whole(settings), evaluate)

    own = capacity(default)
    found = own if recommended == default else capacity(recommended)
    return TunedCapacity(
        defaults_rps=own and own.served_rps,
        recommended_rps=found and found.served_rps,
        binding=found and found.binding,
        error_percent=found.error_percent if found else 0.0,
        repeats=found.repeats if found else 1,
    )


def _window_specs(windows: Sequence[TraceWindow]) -> list[TuningWindow]:
    return [
        TuningWindow(start_s=window.start_s, end_s=window.end_s, requests=window.trace.counted)
        for window in windows
    ]


def _settle_router(
    inputs: TuneInputs, evaluate: Evaluate, chosen: Evaluation, spaces: Sequence[PolicySpace]
) -> tuple[Evaluation, PolicySpace, Evaluation | None]:
    """The chosen settings, their space, and their evaluation with requests to each replica in turn
    (None without a router). Where the router gains nothing, the settings in turn are chosen.
    """
    space = next(space for space in spaces if space.key == chosen.settings.key)
    if space.start.replica_router is None:
        return chosen, space, None
    settings = chosen.settings.model_copy(update={"replica_router": RouterSpec()})
    [in_turn] = evaluate([inputs.whole(settings)])
    if not _router_gains(in_turn, chosen):
        chosen = in_turn
        space = space.in_turn()
    return chosen, space, in_turn


def _router_gains(in_turn: Evaluation, chosen: Evaluation) -> bool:
    """Whether the router is worth having: it keeps limits that are broken without it, or gives
    notably more goodput or a notably lower mean E2E latency.
    """
    if chosen.outcome.kept != in_turn.outcome.kept:
        return chosen.outcome.kept
    more = chosen.goodput_rps > NOTABLE_GAIN * in_turn.goodput_rps
    return more or is_quicker(chosen, in_turn)


def _slow_end(inputs: TuneInputs, evaluate: Evaluate, recommended: Settings) -> SlowEnd:
    """Simulate the recommended settings with times at the slow end of the law's range."""
    law = inputs.fit.law_range()
    whole = inputs.whole(recommended)
    deployment = replace(whole.deployment, slowdown=law.slow)
    label = f"{whole.label}, times x {law.slow:.9g}"
    [done] = evaluate([replace(whole, deployment=deployment, label=label)])
    return SlowEnd(law=law, limits=judged_limits(inputs.recipe, done.outcome))


def _alternatives(
    inputs: TuneInputs,
    evaluate: Evaluate,
    chosen: Evaluation,
    searched: Sequence[Evaluation],
    declined: Evaluation | None,
) -> Alternatives:
    """Return what may be worth a change beside the `chosen` settings: nothing that was not searched
    but a number of workers.

    Args:
        searched: the best evaluation of each searched policy on the whole trace.
        declined: see `JudgedCandidates.declined`.
    """
    engine = inputs.recipe.engine.name
    task = inputs.whole(chosen.settings)
    kept = chosen.outcome.kept

    def keeps(workers: int) -> bool:
        recipe = inputs.recipe.model_copy(update={"workers": workers})
        deployment = replace(task.deployment, recipe=recipe)
        label = f"{task.label}, {workers} workers"
        [done] = evaluate([replace(task, deployment=deployment, label=label)])
        return done.outcome.kept

    workers = None if kept or task.deployment.one_server else fewest(keeps)
    # The best searched policy is worth naming where the engine cannot run it and it is better.
    best = max(searched, key=rank)
    better = best.goodput_rps > NOTABLE_GAIN * chosen.goodput_rps
    better = better or (best.outcome.kept and not kept)
    not_served = refusal(best.settings.policy, engine) is not None
    return Alternatives(
        best_of_all=best.settings.policy if not_served and better else None,
        workers=workers,
        declined=declined,
    )


def _result(trials: Sequence[Evaluation], best: Evaluation, inputs: TuneInputs) -> PolicyResult:
    policy = best.settings.policy
    key = best.settings.key
    return PolicyResult(
        best=best,
        trials=sum(trial.settings.key == key for trial in trials),
        judged_requests=len(inputs.cut.judged(policy).trace),
        refusal=refusal(policy, inputs.recipe.engine.name),
        engines=engines_for(policy),
    )


def _held_out_gain(
    inputs: TuneInputs, evaluate: Evaluate, default: Settings, best: Settings
) -> HeldOutGain | None:
    """Return the gain of the best over the defaults on each window that the search did not see.

    None where both have the same settings, or no window is held out.
    """
    windows = inputs.cut.windows.held_out
    if best == default or not windows:
        return None
    own = [inputs.on_windows(f"held out {k}", [window]) for k, window in enumerate(windows)]
    tasks = [task.under(settings) for task in own for settings in (default, best)]
    done = evaluate(tasks)
    pairs = list(zip(done[0::2], done[1::2], strict=True))
    better = sum(is_better(after, before) for before, after in pairs)
    defaults, bests = ([one.goodput_rps for one in each] for each in zip(*pairs, strict=True))
    gains = [100.0 * (b / a - 1.0) for a, b in zip(defaults, bests, strict=True) if a > 0]
    return HeldOutGain(
        windows=len(windows),
        defaults_goodput_rps=_interval(defaults),
        best_goodput_rps=_interval(bests),
        gain_percent=_interval(gains) if len(gains) == len(pairs) else None,
        better=better,
    )


def _interval(values: Sequence[float]) -> Interval:
    return Interval(low=min(values), median=median(values), high=max(values))
