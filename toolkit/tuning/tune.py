"""From a recipe, a fit and a trace to tuning.json.

`tune` searches on windows of the trace and judges the result on the whole of it. The parts, in
order: the search and the report, its verdict, and how much the gain varies over windows that were
held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from toolkit.files.io import EnvelopeFields
from toolkit.files.recipe import RouterSpec
from toolkit.files.tuning import (
    BEHIND,
    OOM,
    UNSERVED,
    HeldOutGain,
    Interval,
    JudgedPart,
    Limit,
    Outcome,
    PolicyResult,
    SlowEnd,
    TunedCapacity,
    Tuning,
    TuningWindow,
    WindowLength,
    broken,
    recipe_limits,
)
from toolkit.metrics import MOST_BEHIND_PERCENT
from toolkit.sched.policies import engines_for, refusal
from toolkit.sim.world import slowed
from toolkit.traces.windows import TraceWindow, mean_rate
from toolkit.tuning.alternatives import alternatives
from toolkit.tuning.capacity import Capacity, rate_capacity
from toolkit.tuning.evaluate import (
    ATTAINMENT,
    ATTAINMENT_LOWER,
    CandidateLimits,
    Evaluation,
    Task,
)
from toolkit.tuning.executor import Evaluate, Runner, collect
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.judge import NOTABLE_GAIN, is_better, is_quicker, judge_candidates
from toolkit.tuning.search import (
    LATENCY,
    Found,
    Progress,
    front,
    search,
    sensitivity,
)
from toolkit.tuning.spaces import SWEEP_POINTS, PolicySpace, sweeps
from toolkit.tuning.workload import Workload

# limits with a key in `Evaluation.usage` that differs from their metric
USAGE_KEYS = {ATTAINMENT_LOWER: ATTAINMENT}
RATES = 20  # that a capacity takes, about


def planned(inputs: Inputs) -> list[int]:
    """The requests of each evaluation that a tuning takes, in their order; about the most."""
    settings = inputs.settings
    cut = inputs.workload.windows
    searched = sum(len(window.trace) for window in cut.search)
    whole = len(inputs.workload.trace)
    sweep = max(len(sweeps(space, {})) for space in settings.spaces)
    return [
        *[searched] * settings.trials,
        *[whole] * (2 + len(settings.spaces) + 2 * SWEEP_POINTS + 2 * RATES),
        *[searched] * sweep,
        *[len(window.trace) for window in cut.held_out for _ in range(2)],
    ]


def tune(inputs: Inputs, runner: Runner, head: EnvelopeFields, progress: Progress) -> Tuning:
    """Search on windows, and judge on the whole trace. The recommended settings are those of a
    policy that the recipe's engine can run.

    Args:
        runner: runs the simulations, or returns the results that an interrupted run kept.
        head: the envelope's fields of the result.
        progress: called after each evaluation with the best goodput so far.
    """
    recipe = inputs.recipe
    settings = inputs.settings
    setup = inputs.setup("search", inputs.workload.windows.search)
    found = search(setup, runner, settings, progress)
    evaluate = partial(collect, runner, tick=partial(progress, 0.0))
    judged = judge_candidates(found, settings, inputs.judge, evaluate)
    of_spaces = judged.of_spaces(settings.spaces)
    served = [key for key in of_spaces if key in settings.served] or [*of_spaces]
    best = judged.best([of_spaces[key] for key in served])
    chosen, space, in_turn = _settle_router(inputs, evaluate, best, settings.spaces)
    own = settings.spaces[0]
    able = own.key in settings.served or chosen.outcome.key not in settings.served
    worse = judged.default.rank(judged.limits) > chosen.rank(judged.limits)
    if able and worse and not is_better(chosen, judged.default, judged.limits):
        chosen, space = judged.default, own  # without its router the best is worse than these
    # The front has goodput and the target nearest to its limit, where that is a metric.
    ratios = {key: r for key, r in chosen.ratios.items() if key in chosen.outcome.metrics}
    latency = max(ratios, key=lambda key: ratios[key], default=LATENCY)
    trials = found.trials()
    verdict = _verdict(inputs, judged.default, chosen)
    recommended = judged.default if verdict["keep_defaults"] else chosen
    cut = inputs.workload.windows
    declined = judged.declined(recommended, served)
    others = alternatives(inputs, evaluate, recommended, [*of_spaces.values()], declined)
    return Tuning.model_validate(
        {
            **head,
            "recipe_name": recipe.name,
            "analytic": inputs.fit.engine.analytic,
            "analytic_error": inputs.fit.engine.analytic_error,
            "seed": settings.seed,
            "sla": recipe.sla,
            "workers": recipe.workers,
            "request_rate_rps": inputs.workload.rate_rps,
            "concurrency": recipe.tune.concurrency,
            "trace_notes": list(cut.trace.notes),
            "scaling": cut.trace.scaling,
            "changes": cut.trace.changes,
            "window_length": _window_length(inputs.workload),
            "search_windows": _window_specs(cut.search),
            "held_out_windows": _window_specs(cut.held_out),
            "trials": trials,
            **verdict,
            "slow_end": _slow_end(inputs, evaluate, recommended.outcome),
            "judged": _judged_part(inputs.workload, recommended.outcome.policy),
            "further": [evaluation.outcome for evaluation in judged.further],
            "capacity": _capacity(inputs, evaluate, judged.default, recommended),
            "sensitivity": sensitivity(found.setup, runner, space, chosen, progress),
            "policies": [_result(found, best, inputs) for best in of_spaces.values()],
            "in_turn": in_turn,
            "latency_metric": latency,
            "front": front(trials, latency),
            "held_out_gain": _held_out_gain(
                inputs, evaluate, judged.default.outcome, chosen.outcome
            ),
            "engine": recipe.engine.name,
            "alternatives": others,
        }
    )


def _window_length(workload: Workload) -> WindowLength:
    cut = workload.windows
    inside = sum(window.trace.counted for window in [*cut.search, *cut.held_out])
    return WindowLength(
        wished_s=cut.wished_s,
        seconds=cut.seconds,
        longest_s=cut.longest_s,
        covered_percent=100.0 * inside / len(workload.trace),
    )


def _judged_part(workload: Workload, policy: str) -> JudgedPart:
    part = workload.judged(policy)
    return JudgedPart(
        start_s=part.start_s,
        end_s=part.end_s,
        requests=len(part.trace),
        of_requests=len(workload.trace),
    )


def _capacity(
    inputs: Inputs, evaluate: Evaluate, default: Evaluation, recommended: Evaluation
) -> TunedCapacity | None:
    """The capacities of the recipe's settings and of the recommended ones."""
    if inputs.world.concurrency or mean_rate(inputs.workload.trace) == 0.0:
        return None

    def capacity(outcome: Outcome) -> Capacity | None:
        return rate_capacity(inputs.whole(outcome.policy), outcome, evaluate)

    own = capacity(default.outcome)
    found = own
    if not recommended.outcome.same_settings(default.outcome):
        found = capacity(recommended.outcome)
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
    inputs: Inputs, evaluate: Evaluate, chosen: Evaluation, spaces: Sequence[PolicySpace]
) -> tuple[Evaluation, PolicySpace, Outcome | None]:
    """The chosen settings, their space, and their outcome with requests to each replica in turn
    (None without a router). Where the router gains nothing, the settings in turn are chosen.
    """
    space = next(space for space in spaces if space.key == chosen.outcome.key)
    if space.router is None:
        return chosen, space, None
    setup = inputs.whole(chosen.outcome.policy)
    task = replace(Task.of(setup, chosen.outcome), router=RouterSpec())
    [in_turn] = evaluate([task])
    if not _router_gains(in_turn, chosen, setup.limits):
        chosen = in_turn
        space = space.in_turn()
    return chosen, space, in_turn.outcome


def _router_gains(in_turn: Evaluation, chosen: Evaluation, limits: CandidateLimits) -> bool:
    """Whether the router is worth having: it keeps limits that are broken without it, or gives
    notably more goodput or a notably lower mean E2E latency.
    """
    if chosen.feasible(limits) != in_turn.feasible(limits):
        return chosen.feasible(limits)
    more = chosen.goodput_rps > NOTABLE_GAIN * in_turn.goodput_rps
    return more or is_quicker(chosen, in_turn)


def _verdict(inputs: Inputs, default: Evaluation, best: Evaluation) -> dict[str, object]:
    """The fields of a tuning that compare the best with the recipe's settings on the whole trace,
    and judge the recommended one of the two by each limit.
    """
    before = default.goodput_rps
    after = best.goodput_rps
    limits = inputs.whole(best.outcome.policy).limits
    keep = not is_better(best, default, limits)
    recommended = default if keep else best
    usage = recommended.usage(limits)
    judged = _judged_limits(inputs, recommended, usage)
    targets = {key: share for key, share in usage.items() if key not in (OOM, BEHIND)}
    binding = max(targets, key=lambda key: targets[key], default=None)
    return {
        "defaults": default.outcome,
        "best": best.outcome,
        "gain_percent": 100.0 * (after / before - 1.0) if before > 0 else None,
        "binding_sla": binding,
        "binding_ratio": targets[binding] if binding else None,
        "limits": judged,
        "keeps_limits": not broken(judged),
        "keeps_up": usage.get(BEHIND, 0.0) <= 1.0,
        "usage": usage,
        "keep_defaults": keep,
    }


def _judged_limits(
    inputs: Inputs, evaluation: Evaluation, usage: Mapping[str, float]
) -> list[Limit]:
    """Return every limit with its prediction. `usage`: the used share of each."""
    behind = Limit(name=BEHIND, bound="at most", limit=MOST_BEHIND_PERCENT)
    judged = []
    for limit in [*recipe_limits(inputs.recipe), *([behind] if BEHIND in usage else [])]:
        share = usage[USAGE_KEYS.get(limit.name, limit.name)]
        ratio = evaluation.ratios.get(limit.name)
        value: float | None = evaluation.outcome.metrics.get(limit.name, 0.0)
        if ratio is not None:
            value = None if share >= UNSERVED else ratio * limit.limit
        judged.append(limit.judged(value, kept=share <= 1.0))
    return judged


def _slow_end(inputs: Inputs, evaluate: Evaluate, recommended: Outcome) -> SlowEnd:
    """Simulate the recommended settings with times at the slow end of the law's range."""
    law = inputs.fit.law_range()
    whole = inputs.whole(recommended.policy)
    world = slowed(whole.world, law.slow)
    setup = replace(whole, world=world, label=f"{whole.label}, times x {law.slow:.9g}")
    [done] = evaluate([Task.of(setup, recommended)])
    return SlowEnd(law=law, limits=_judged_limits(inputs, done, done.usage(setup.limits)))


def _result(found: Found, best: Evaluation, inputs: Inputs) -> PolicyResult:
    policy = best.outcome.policy
    key = best.outcome.key
    return PolicyResult(
        policy=policy,
        trials=sum(trial.outcome.key == key for trial in found.evaluations),
        outcome=best.outcome,
        feasible=best.feasible(inputs.whole(policy).limits),
        judged_requests=len(inputs.workload.judged(policy).trace),
        refusal=refusal(policy, inputs.recipe.engine.name),
        engines=engines_for(policy),
    )


def _held_out_gain(
    inputs: Inputs, evaluate: Evaluate, default: Outcome, best: Outcome
) -> HeldOutGain | None:
    """Return the gain of the best over the defaults on each window that the search did not see.

    None where both have the same settings, or no window is held out.
    """
    windows = inputs.workload.windows.held_out
    if best.same_settings(default) or not windows:
        return None
    setups = [inputs.setup(f"held out {k}", [window]) for k, window in enumerate(windows)]
    tasks = [Task.of(setup, outcome) for setup in setups for outcome in (default, best)]
    done = evaluate(tasks)
    pairs = list(zip(done[0::2], done[1::2], strict=True))
    better = sum(is_better(after, before, setups[0].limits) for before, after in pairs)
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
