"""From a recipe, a fit and a trace to tuning.json: search, verdict on held-out windows, and how
sure it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.fitting import resampled_fits, scaled_fits
from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.io import EnvelopeFields
from toolkit.files.plan import Kind
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import (
    UNSERVED,
    Interval,
    Limit,
    Outcome,
    PolicyResult,
    Sibling,
    Tuning,
    Uncertainty,
    WindowLength,
    broken,
    recipe_limits,
)
from toolkit.files.tuning import TuningWindow as WindowSpec
from toolkit.sched.policies.servable import engines_for, refusal
from toolkit.sim.api import usual_policies
from toolkit.sim.world import World, fleet
from toolkit.traces.windows import TraceWindow, Windows
from toolkit.tuning.alternatives import (
    RECIPE,
    Ground,
    WorkerCounts,
    alternatives,
    answer,
    fewest,
    most_evaluations,
    nothing_suffices,
    try_siblings,
)
from toolkit.tuning.evaluate import (
    ATTAINMENT,
    ATTAINMENT_LOWER,
    CandidateLimits,
    Evaluation,
    EvaluationSetup,
    Task,
    Workload,
    make_world,
)
from toolkit.tuning.executor import Runner, collect
from toolkit.tuning.search import (
    LATENCY,
    Found,
    Progress,
    SearchSettings,
    front,
    importance,
    make_spaces,
    search,
    sensitivity,
    sweeps,
)

# How the fit's error moves the verdict: the held-out windows again, under laws drawn around the
# fitted ones.
#
# In a draw the workers are as fast as the drawn laws say, while the scheduler goes on believing
# the fitted ones: that is how it would be live. The defaults and the best meet the same draws.

PERCENTILES = (5, 50, 95)


@dataclass(slots=True, frozen=True)
class LawDraws:
    """The fit, the profile that it was made from where it is at hand, and how many draws to make.

    `others` are the fits of a fleet's further kinds of workers.
    """

    fit: Fit
    profile: Profile | None
    draws: int
    seed: int
    others: tuple[Fit, ...] = ()


def uncertainty(
    bench: EvaluationSetup,
    runner: Runner,
    laws: LawDraws,
    pair: tuple[Outcome, Outcome],
    limits: CandidateLimits,
    progress: Progress,
) -> Uncertainty | None:
    """The verdict on the defaults and the best (`pair`) under drawn laws; None without draws."""
    if not laws.draws:
        return None
    benches = [
        replace(bench, label=f"{bench.label}, draw {k}", world=world)
        for k, world in enumerate(_worlds(bench, laws))
    ]
    tasks = [Task(one, outcome.policy, outcome.parameters) for one in benches for outcome in pair]
    done = collect(runner, tasks, lambda: progress(0.0))
    before, after = done[0::2], done[1::2]
    better = [
        (b.feasible(limits), b.score) > (a.feasible(limits), a.score)
        for a, b in zip(before, after, strict=True)
    ]
    defaults, best = [one.goodput_rps for one in before], [one.goodput_rps for one in after]
    gains = [100.0 * (b / a - 1.0) for a, b in zip(defaults, best, strict=True) if a > 0]
    return Uncertainty(
        method="held-out errors" if laws.profile is None else "profile",
        draws=laws.draws,
        defaults_goodput_rps=_interval(defaults),
        best_goodput_rps=_interval(best),
        gain_percent=_interval(gains) if len(gains) == laws.draws else None,
        better_percent=100.0 * sum(better) / laws.draws,
    )


def _worlds(bench: EvaluationSetup, laws: LawDraws) -> list[World]:
    if laws.profile is None:
        fits = scaled_fits(laws.fit, laws.draws, laws.seed)
    else:
        fits = resampled_fits(laws.profile, laws.fit, laws.draws, laws.seed)
    others = [
        scaled_fits(fit, laws.draws, laws.seed + k) for k, fit in enumerate(laws.others, start=1)
    ]
    return [
        fleet(list(map(_drawn, bench.world.kinds, drawn)))
        for drawn in zip(fits, *others, strict=True)
    ]


def _drawn(world: World, fit: Fit) -> World:
    laws, rounds = laws_from_fit(fit), world.rounds
    if rounds is not None:
        rounds = replace(rounds, latency=laws.rounds, believed=rounds.latency)
    return replace(world, latency=laws.latency, believed=world.latency, rounds=rounds)


def _interval(values: Sequence[float]) -> Interval:
    low, median, high = np.percentile(values, PERCENTILES).tolist()
    return Interval(low=low, median=median, high=high)


SHARES = {
    ATTAINMENT_LOWER: ATTAINMENT
}  # limits whose share of use has another name than the metric


@dataclass(slots=True, frozen=True)
class Inputs:
    """What is tuned: read from the files, and checked."""

    recipe: Recipe
    fit: Fit
    workload: Workload
    profile: Profile | None = None  # that the fit was made from, for resampling it
    others: tuple[Kind, ...] = ()  # of a fleet: its further kinds of workers
    siblings: tuple[Kind, ...] = ()  # recipes that ship for the same model and GPU, with their fits


def limits_of(recipe: Recipe) -> CandidateLimits:
    """What candidates must keep besides the latency targets."""
    spec = recipe.tune
    return CandidateLimits(
        spec.max_oom_percent, spec.max_evicted_percent, spec.min_attainment_percent
    )


def settings_of(recipe: Recipe, fit: Fit, others: Sequence[Kind] = ()) -> SearchSettings:
    """How the recipe wants the search done, with a fleet's `others` besides. `InputError` for what
    cannot be.

    Where it wants all policies, these are those that the laws of `fit` can simulate.
    """
    spec = recipe.tune
    workers = recipe.workers + sum(kind.workers for kind in others)
    spaces = make_spaces(recipe.policy, spec.policies, spec.space, workers, usual_policies(fit))
    engines = engines_of(recipe, others)
    own, *rest = spaces
    rest.sort(
        key=lambda space: refusal(space.policy, engines) is not None
    )  # with few trials, served ones come first
    served = frozenset(space.policy for space in spaces if refusal(space.policy, engines) is None)
    return SearchSettings([own, *rest], spec.trials, spec.seed, limits_of(recipe), served)


def engines_of(recipe: Recipe, others: Sequence[Kind]) -> list[str]:
    """The engine of the recipe, and those of a fleet's `others`."""
    return [recipe.engine.name, *(kind.recipe.engine.name for kind in others)]


def evaluations(settings: SearchSettings, draws: int, siblings: Sequence[Kind] = ()) -> int:
    """How many evaluations a tuning takes at most, or nearly so."""
    most = max(len(sweeps(space, {})) for space in settings.spaces)
    return (
        settings.trials + 1 + len(settings.spaces) + most + 2 * draws + most_evaluations(siblings)
    )


def tune(inputs: Inputs, runner: Runner, head: EnvelopeFields, progress: Progress) -> Tuning:
    """Search on one set of windows, judge on the other.

    Args:
        runner: runs the simulations: here, in other processes, or from what an interrupted run left.
        head: the envelope's fields of the result.
        progress: called after each evaluation.
    """
    return _report(inputs, _search(inputs, runner, progress), runner, head, progress)


def tune_to_size(
    inputs: Inputs, runner: Runner, head: EnvelopeFields, progress: Progress
) -> Tuning:
    """As `tune`, with as few workers as keep all limits: by the recipe's settings, then by what a
    search finds there.

    Another search follows where fewer suffice. A server is one worker: of those there is one,
    whether it suffices or not. `InputError` where there is no latency target, `LimitsBrokenError`
    where no number suffices.
    """
    if not inputs.recipe.sla:
        raise InputError(
            "--workers auto needs latency targets",
            "give some in the recipe's sla, like ttft_p99_s: 5",
        )
    settings = settings_of(inputs.recipe, inputs.fit, inputs.others)
    windows = [*inputs.workload.search, *inputs.workload.held_out]
    bench = EvaluationSetup(
        make_world(inputs.recipe, inputs.fit, inputs.others),
        [w.trace for w in windows],
        inputs.recipe.sla,
        "all windows",
    )
    sizes = WorkerCounts(bench, runner, settings.limits, partial(progress, 0.0), [])
    own = settings.spaces[0]
    chosen, name = Outcome(policy=own.policy, parameters=dict(own.start), metrics={}), RECIPE
    if traits_of(inputs.recipe.engine.name).server:
        found = _search(inputs, runner, progress)
        result, name = _report(inputs, found, runner, head, progress), "tuned for 1"
        if not sizes.keeps(name, result.best_held_out, 1):
            return result
        return result.model_copy(update={"sizing": answer(sizes, name, 1, None)})
    siblings = _siblings(inputs, runner, progress)
    workers = fewest(partial(sizes.keeps, name, chosen))
    if workers is None:
        raise nothing_suffices(sizes, siblings)
    while True:
        inputs = replace(inputs, recipe=inputs.recipe.model_copy(update={"workers": workers}))
        found = _search(inputs, runner, progress)
        tuned, tuned_name = (
            found.evaluations[_number(found, settings.served)].outcome,
            f"tuned for {workers}",
        )
        if not sizes.keeps(tuned_name, tuned, workers):
            break
        chosen, name = tuned, tuned_name
        fewer = fewest(partial(sizes.keeps, name, chosen), known=workers)
        if fewer == workers or fewer is None:
            break
        workers = fewer
    sizing = answer(sizes, name, workers, partial(sizes.keeps, name, chosen, workers + 1))
    return _report(inputs, found, runner, head, progress, siblings).model_copy(
        update={"sizing": sizing}
    )


def _search(inputs: Inputs, runner: Runner, progress: Progress) -> Found:
    world = make_world(inputs.recipe, inputs.fit, inputs.others)
    bench = _bench("search", inputs.workload.search, world, inputs.recipe)
    return search(bench, runner, settings_of(inputs.recipe, inputs.fit, inputs.others), progress)


def _siblings(inputs: Inputs, runner: Runner, progress: Progress) -> list[Sibling]:
    """The siblings on the held-out windows, on as many workers as the recipe has."""
    return try_siblings(_ground(inputs, runner, progress), inputs.siblings)


def _ground(inputs: Inputs, runner: Runner, progress: Progress) -> Ground:
    recipe, workload = inputs.recipe, inputs.workload
    bench = _bench(
        "held out", workload.held_out, make_world(recipe, inputs.fit, inputs.others), recipe
    )
    return Ground(
        recipe, bench, workload.rate_rps, runner, limits_of(recipe), partial(progress, 0.0)
    )


def _report(
    inputs: Inputs,
    found: Found,
    runner: Runner,
    head: EnvelopeFields,
    progress: Progress,
    siblings: Sequence[Sibling] | None = None,
) -> Tuning:
    """What is written: the verdict on the best of `found`, and what else its trials show.

    The best is one that the recipe's engine can run. `siblings` are those tried already.
    """
    recipe, workload = inputs.recipe, inputs.workload
    settings, world = (
        settings_of(recipe, inputs.fit, inputs.others),
        make_world(recipe, inputs.fit, inputs.others),
    )
    bench = _bench("search", workload.search, world, recipe)
    ground = _ground(inputs, runner, progress)
    verdict, limits = ground.bench, settings.limits
    default, *held_out = _judge(verdict, runner, found, settings, progress)
    chosen = _chosen(held_out, found, settings)
    space = next(space for space in settings.spaces if space.policy == chosen.outcome.policy)
    laws = LawDraws(
        inputs.fit,
        inputs.profile,
        recipe.tune.draws,
        settings.seed,
        tuple(kind.fit for kind in inputs.others),
    )
    trials = found.trials()
    latency = _latency_metric(chosen)
    judged = _verdict(default, chosen, limits, recipe)
    others = None
    if not inputs.others:
        recommended = default if judged["keep_defaults"] else chosen
        others = alternatives(
            ground,
            inputs.fit,
            recommended,
            held_out,
            _siblings(inputs, runner, progress) if siblings is None else siblings,
        )
    return Tuning.model_validate(
        {
            **head,
            "recipe_name": recipe.name,
            "seed": settings.seed,
            "sla": recipe.sla,
            "workers": world.size,
            "request_rate_rps": workload.rate_rps,
            "trace_notes": list(workload.trace.notes),
            "scaling": workload.trace.scaling,
            "window_length": _window_length(workload.windows),
            "search_windows": [_spec(window) for window in workload.search],
            "held_out_windows": [_spec(window) for window in workload.held_out],
            "trials": trials,
            **judged,
            "sensitivity": sensitivity(bench, runner, space, chosen, progress),
            "policies": [
                _result(found, one, limits, engines_of(recipe, inputs.others)) for one in held_out
            ],
            "latency_metric": latency,
            "front": front(trials, latency),
            "uncertainty": uncertainty(
                verdict, runner, laws, (default.outcome, chosen.outcome), limits, progress
            ),
            "engines": engines_of(recipe, inputs.others),
            "alternatives": others,
        }
    )


def _chosen(held_out: Sequence[Evaluation], found: Found, settings: SearchSettings) -> Evaluation:
    """Of the policies that the engine can run, the best of the search that keeps all limits held
    out.

    The best of the search where none does; of all policies where the engine runs none.
    """
    served = [one for one in held_out if one.outcome.policy in settings.served] or list(held_out)

    def standing(one: Evaluation) -> tuple[bool, bool, float]:
        number = _number(found, [one.outcome.policy])
        return one.feasible(settings.limits), found.fits(number), found.evaluations[number].score

    return max(served, key=standing)


def _number(found: Found, policies: Collection[str]) -> int:
    """The number of the best trial of these policies, or of all where none is of them."""
    number = found.best(policies)
    number = found.best() if number is None else number
    assert number is not None, "every search has trials"
    return number


def _judge(
    bench: EvaluationSetup,
    runner: Runner,
    found: Found,
    settings: SearchSettings,
    progress: Progress,
) -> list[Evaluation]:
    """The recipe's settings, and each searched policy's best, on windows that the search did not
    see.
    """
    own = settings.spaces[0]
    tasks = [Task(bench, own.policy, own.start)]
    for space in settings.spaces:
        number = found.best([space.policy])
        if number is not None:
            tasks.append(Task(bench, space.policy, found.evaluations[number].outcome.parameters))
    return collect(runner, tasks, lambda: progress(0.0))


def _verdict(
    default: Evaluation, best: Evaluation, limits: CandidateLimits, recipe: Recipe
) -> dict[str, object]:
    before, after = default.goodput_rps, best.goodput_rps
    keep = (best.feasible(limits), best.score) <= (default.feasible(limits), default.score)
    recommended = default if keep else best
    usage, judged = recommended.usage(limits), _judged(recommended, limits, recipe)
    targets = {key: share for key, share in usage.items() if key != "oom_percent"}
    binding = max(targets, key=lambda key: targets[key], default=None)
    return {
        "defaults_held_out": default.outcome,
        "best_held_out": best.outcome,
        "gain_percent": 100.0 * (after / before - 1.0) if before > 0 else None,
        "binding_sla": binding,
        "binding_ratio": targets[binding] if binding else None,
        "limits": judged,
        "keeps_limits": not broken(judged),
        "usage": usage,
        "keep_defaults": keep,
    }


def _judged(one: Evaluation, limits: CandidateLimits, recipe: Recipe) -> list[Limit]:
    """Every limit of `recipe` with what `one` showed. A target is judged on all windows' requests
    together.
    """
    usage, metrics = one.usage(limits), one.outcome.metrics
    judged = []
    for limit in recipe_limits(recipe):
        share = usage[SHARES.get(limit.name, limit.name)]
        sla = one.ratios.get(limit.name)
        value: float | None = metrics.get(limit.name, 0.0) if sla is None else sla * limit.limit
        value = None if share >= UNSERVED else value
        judged.append(limit.judged(value, kept=share <= 1.0))
    return judged


def _result(
    found: Found, held_out: Evaluation, limits: CandidateLimits, engines: Sequence[str]
) -> PolicyResult:
    policy = held_out.outcome.policy
    return PolicyResult(
        policy=policy,
        trials=sum(one.outcome.policy == policy for one in found.evaluations),
        best_trial=_number(found, [policy]),
        held_out=held_out.outcome,
        feasible=held_out.feasible(limits),
        importance=importance(found, policy),
        refusal=refusal(policy, engines),
        engines=engines_for(policy),
    )


def _latency_metric(best: Evaluation) -> str:
    """The latency that goodput is weighed against: the target nearest to its limit, where it is
    among the metrics.
    """
    known = [key for key in best.ratios if key in best.outcome.metrics]
    return max(known, key=lambda key: best.ratios[key], default=LATENCY)


def _bench(
    label: str, windows: Sequence[TraceWindow], world: World, recipe: Recipe
) -> EvaluationSetup:
    return EvaluationSetup(
        world, [window.trace for window in windows], recipe.sla, f"{label}, {world.size} workers"
    )


def _spec(window: TraceWindow) -> WindowSpec:
    return WindowSpec(start_s=window.start_s, end_s=window.end_s, requests=len(window.trace))


def _window_length(windows: Windows) -> WindowLength:
    return WindowLength(
        wished_s=windows.wished_s, seconds=windows.seconds, longest_s=windows.longest_s
    )
