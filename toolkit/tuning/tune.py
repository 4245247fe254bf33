"""From a recipe, a fit and a trace to tuning.json: search, verdict on held-out windows, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import Head
from toolkit.files.limits import Limit, broken, recipe_limits
from toolkit.files.plan import Kind
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Outcome, PolicyResult, Tuning, WindowLength
from toolkit.files.tuning import Window as WindowSpec
from toolkit.sched.policies import make_any, refuse_unservable
from toolkit.sim.world import World
from toolkit.traces.windows import Window, Windows
from toolkit.tuning.crew import Runner, collect
from toolkit.tuning.evaluate import ATTAINMENT, ATTAINMENT_LOWER, Bench, Evaluation, Limits, Task
from toolkit.tuning.explain import LATENCY, front, importance, sensitivity, sweeps
from toolkit.tuning.search import Found, Progress, Settings, search
from toolkit.tuning.sizing import RECIPE, Sizes, answer, fewest, nothing_suffices
from toolkit.tuning.space import make_spaces
from toolkit.tuning.uncertainty import Laws, uncertainty
from toolkit.tuning.workload import Workload, make_world

SHARES = {ATTAINMENT_LOWER: ATTAINMENT}  # limits whose share of use has another name than the metric


@dataclass(slots=True, frozen=True)
class Inputs:
    """What is tuned: read from the files, and checked."""

    recipe: Recipe
    fit: Fit
    workload: Workload
    profile: Profile | None = None  # that the fit was made from, for resampling it
    others: tuple[Kind, ...] = ()  # of a fleet: its further kinds of workers


def limits_of(recipe: Recipe) -> Limits:
    """What candidates must keep besides the latency targets."""
    spec = recipe.tune
    return Limits(spec.max_oom_percent, spec.max_evicted_percent, spec.min_attainment_percent)


def settings_of(recipe: Recipe, others: Sequence[Kind] = ()) -> Settings:
    """How the recipe wants the search done, with a fleet's `others` besides. `InputError` for what cannot be."""
    spec = recipe.tune
    workers = recipe.workers + sum(kind.workers for kind in others)
    spaces = make_spaces(recipe.policy, spec.policies, spec.space, workers)
    return Settings(spaces, spec.trials, spec.seed, limits_of(recipe))


def evaluations(settings: Settings, draws: int) -> int:
    """How many evaluations a tuning takes at most."""
    most = max(len(sweeps(space, {})) for space in settings.spaces)
    return settings.trials + 1 + len(settings.spaces) + most + 2 * draws


def tune(inputs: Inputs, runner: Runner, head: Head, progress: Progress) -> Tuning:
    """Search on one set of windows, judge on the other.

    Args:
        runner: runs the simulations: here, in other processes, or from what an interrupted run left.
        head: the envelope's fields of the result.
        progress: called after each evaluation.
    """
    return _report(inputs, _search(inputs, runner, progress), runner, head, progress)


def tune_to_size(inputs: Inputs, runner: Runner, head: Head, progress: Progress) -> Tuning:
    """As `tune`, with as few workers as keep all limits: by the recipe's settings, then by what a search finds there.

    Another search follows where fewer suffice. `InputError` where there is no latency target, `LimitsBrokenError` where
    no number suffices.
    """
    if not inputs.recipe.sla:
        raise InputError("--workers auto needs latency targets", "give some in the recipe's sla, like ttft_p99_s: 5")
    settings = settings_of(inputs.recipe, inputs.others)
    windows = [*inputs.workload.search, *inputs.workload.held_out]
    bench = Bench(
        make_world(inputs.recipe, inputs.fit, inputs.others),
        [w.trace for w in windows],
        inputs.recipe.sla,
        "all windows",
    )
    sizes = Sizes(bench, runner, settings.limits, partial(progress, 0.0), [])
    own = settings.spaces[0]
    chosen, name = Outcome(policy=own.policy, parameters=dict(own.start), metrics={}), RECIPE
    workers = fewest(partial(sizes.keeps, name, chosen))
    if workers is None:
        raise nothing_suffices(sizes)
    while True:
        inputs = replace(inputs, recipe=inputs.recipe.model_copy(update={"workers": workers}))
        found = _search(inputs, runner, progress)
        tuned, tuned_name = found.evaluations[_number(found)].outcome, f"tuned for {workers}"
        if not sizes.keeps(tuned_name, tuned, workers):
            break
        chosen, name = tuned, tuned_name
        fewer = fewest(partial(sizes.keeps, name, chosen), known=workers)
        if fewer == workers or fewer is None:
            break
        workers = fewer
    sizing = answer(sizes, name, chosen, workers)
    return _report(inputs, found, runner, head, progress).model_copy(update={"sizing": sizing})


def _search(inputs: Inputs, runner: Runner, progress: Progress) -> Found:
    world = make_world(inputs.recipe, inputs.fit, inputs.others)
    bench = _bench("search", inputs.workload.search, world, inputs.recipe)
    return search(bench, runner, settings_of(inputs.recipe, inputs.others), progress)


def _report(inputs: Inputs, found: Found, runner: Runner, head: Head, progress: Progress) -> Tuning:
    """What is written: the verdict on the best of `found`, and what else its trials show."""
    recipe, workload = inputs.recipe, inputs.workload
    settings, world = settings_of(recipe, inputs.others), make_world(recipe, inputs.fit, inputs.others)
    bench = _bench("search", workload.search, world, recipe)
    best = found.evaluations[_number(found)]
    verdict = _bench("held out", workload.held_out, world, recipe)
    default, *held_out = _judge(verdict, runner, found, settings, progress)
    chosen = next(one for one in held_out if one.outcome.policy == best.outcome.policy)
    space = next(space for space in settings.spaces if space.policy == best.outcome.policy)
    others = tuple(kind.fit for kind in inputs.others)
    laws = Laws(inputs.fit, inputs.profile, recipe.tune.draws, settings.seed, others)
    trials = found.trials()
    latency = _latency_metric(chosen)
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
            **_verdict(default, chosen, settings.limits, recipe),
            "sensitivity": sensitivity(bench, runner, space, best, progress),
            "policies": [_result(found, one, settings.limits, recipe.engine.name) for one in held_out],
            "latency_metric": latency,
            "front": front(trials, latency),
            "uncertainty": uncertainty(
                verdict, runner, laws, (default.outcome, chosen.outcome), settings.limits, progress
            ),
        }
    )


def _number(found: Found, policy: str | None = None) -> int:
    number = found.best(policy)
    assert number is not None, "every search has trials"
    return number


def _judge(bench: Bench, runner: Runner, found: Found, settings: Settings, progress: Progress) -> list[Evaluation]:
    """The recipe's settings, and each searched policy's best, on windows that the search did not see."""
    own = settings.spaces[0]
    tasks = [Task(bench, own.policy, own.start)]
    for space in settings.spaces:
        number = found.best(space.policy)
        if number is not None:
            tasks.append(Task(bench, space.policy, found.evaluations[number].outcome.parameters))
    return collect(runner, tasks, lambda: progress(0.0))


def _verdict(default: Evaluation, best: Evaluation, limits: Limits, recipe: Recipe) -> dict[str, object]:
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


def _judged(one: Evaluation, limits: Limits, recipe: Recipe) -> list[Limit]:
    """Every limit of `recipe` with what `one` showed. A target is judged on all windows' requests together."""
    usage, metrics = one.usage(limits), one.outcome.metrics
    judged = []
    for limit in recipe_limits(recipe):
        share = usage[SHARES.get(limit.name, limit.name)]
        sla = one.ratios.get(limit.name)
        value = metrics.get(limit.name, 0.0) if sla is None else sla * limit.limit
        judged.append(limit.judged(value, kept=share <= 1.0))
    return judged


def _result(found: Found, held_out: Evaluation, limits: Limits, engine: str) -> PolicyResult:
    policy = held_out.outcome.policy
    return PolicyResult(
        policy=policy,
        trials=sum(one.outcome.policy == policy for one in found.evaluations),
        best_trial=_number(found, policy),
        held_out=held_out.outcome,
        feasible=held_out.feasible(limits),
        importance=importance(found, policy),
        refusal=_refusal(policy, engine),
    )


def _refusal(policy: str, engine: str) -> str | None:
    try:
        refuse_unservable(make_any(policy, {}), engine)
    except InputError as error:
        return error.message
    return None


def _latency_metric(best: Evaluation) -> str:
    """The latency that goodput is weighed against: the target nearest to its limit, where it is among the metrics."""
    known = [key for key in best.ratios if key in best.outcome.metrics]
    return max(known, key=lambda key: best.ratios[key], default=LATENCY)


def _bench(label: str, windows: Sequence[Window], world: World, recipe: Recipe) -> Bench:
    return Bench(world, [window.trace for window in windows], recipe.sla, f"{label}, {world.size} workers")


def _spec(window: Window) -> WindowSpec:
    return WindowSpec(start_s=window.start_s, end_s=window.end_s, requests=len(window.trace))


def _window_length(windows: Windows) -> WindowLength:
    return WindowLength(wished_s=windows.wished_s, seconds=windows.seconds, longest_s=windows.longest_s)
