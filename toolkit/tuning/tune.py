"""From a recipe, a fit and a trace to tuning.json.

`tune` searches on one set of windows and judges the result on others (held out). `tune_to_size`
also looks for the fewest workers. The parts, in order: settings, the two entry points, the report
with its verdict, and how much the fit's error moves that verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.fitting import resampled_fits, scaled_fits
from toolkit.estimators.load import laws_from_fit
from toolkit.estimators.steps import law_of_steps
from toolkit.files.fit import Fit
from toolkit.files.io import EnvelopeFields
from toolkit.files.plan import Kind
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.files.tuning import (
    UNSERVED,
    Cost,
    Interval,
    Outcome,
    PolicyResult,
    Sibling,
    Tuning,
    TuningWindow,
    Uncertainty,
    WindowLength,
    broken,
    recipe_limits,
)
from toolkit.routing.routers import router_of
from toolkit.sched.policies import BUILT_IN, engines_for, refusal
from toolkit.sim.api import usual_policies
from toolkit.sim.world import World, fleet
from toolkit.traces.windows import TraceWindow
from toolkit.tuning.alternatives import (
    BISECTIONS,
    HALVINGS,
    NOTABLE_GAIN,
    RECIPE,
    AlternativeRuns,
    WorkerCounts,
    alternatives,
    answer,
    fewest,
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
    all_kinds,
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
    search,
    sensitivity,
)
from toolkit.tuning.spaces import PolicySpace, make_spaces, router_spaces, sweeps, with_kinds

# limits with a key in `Evaluation.usage` that differs from their metric
USAGE_KEYS = {ATTAINMENT_LOWER: ATTAINMENT}
PERCENTILES = (5, 50, 95)  # of the draws


@dataclass(slots=True, frozen=True)
class Inputs:
    """What a tuning starts from, read and checked."""

    recipe: Recipe
    fit: Fit
    workload: Workload
    profile: Profile | None = None  # that the fit was made from, for resampling it
    others: tuple[Kind, ...] = ()  # of a fleet: its further kinds of workers
    siblings: tuple[Kind, ...] = ()  # shipped recipes for the same model and GPU, with fits

    @property
    def kinds(self) -> list[Kind]:
        """The workers of the recipe, and a fleet's further kinds."""
        return all_kinds(self.recipe, self.fit, self.others)

    @property
    def settings(self) -> SearchSettings:
        """See `settings_of`."""
        return settings_of(self.recipe, self.fit, self.others)

    def setup(self, label: str, windows: Sequence[TraceWindow]) -> EvaluationSetup:
        """The recipe's machine, targets and limits on `windows`."""
        world, traces = make_world(self.recipe, self.fit, self.others), [w.trace for w in windows]
        label += f", {world.size} workers"
        if self.others:
            label += "".join(f", {kind.workers} of {kind.recipe.name}" for kind in self.kinds)
        limits = CandidateLimits.of(self.recipe)
        return EvaluationSetup(world, traces, self.recipe.sla, label, limits)


def settings_of(recipe: Recipe, fit: Fit, others: Sequence[Kind] = ()) -> SearchSettings:
    """The recipe's settings of the search; `others` are a fleet's further kinds of workers.

    "All" policies are those that the laws of `fit` can simulate. Raises `InputError` for wrong
    settings.
    """
    spec = recipe.tune
    workers = recipe.workers + sum(kind.workers for kind in others)
    spaces = make_spaces(recipe.policy, spec.policies, spec.space, workers, usual_policies(fit))
    if router_of(recipe, workers=workers) is not None:
        if spaces[0].policy not in BUILT_IN:  # each replica has a scheduler of its own
            raise InputError(
                f"policy '{spaces[0].policy}' on {workers} replicas: only the policies of a "
                f"server's own scheduler ({', '.join(BUILT_IN)}) are simulated behind a router",
                "set policy.name to one of them, or workers to 1",
            )
        spaces = router_spaces(with_kinds(spaces[0], others, workers), recipe, workers)
    engines = [recipe.engine.name, *(kind.recipe.engine.name for kind in others)]
    served = frozenset(space.key for space in spaces if refusal(space.policy, engines) is None)
    # Policies that the engines can serve come first, in case there are few trials.
    own, *rest = spaces
    rest.sort(key=lambda space: space.key not in served)
    return SearchSettings([own, *rest], spec.trials, spec.seed, served)


def evaluations(settings: SearchSettings, draws: int, siblings: Sequence[Kind] = ()) -> int:
    """About the greatest number of evaluations that a tuning takes."""
    sweep = max(len(sweeps(space, {})) for space in settings.spaces)
    verdict = 1 + len(settings.spaces) + 2 * draws
    others = (1 + len(siblings)) * (1 + HALVINGS + BISECTIONS)  # `alternatives`
    return settings.trials + verdict + sweep + others


def tune(inputs: Inputs, runner: Runner, head: EnvelopeFields, progress: Progress) -> Tuning:
    """Search on one set of windows, judge on the other.

    Args:
        runner: runs the simulations, or returns the results that an interrupted run kept.
        head: the envelope's fields of the result.
        progress: called after each evaluation with the best goodput so far.
    """
    return reported(inputs, search_of(inputs, runner, progress), runner, head, progress)


def tune_to_size(
    inputs: Inputs, runner: Runner, head: EnvelopeFields, progress: Progress
) -> Tuning:
    """As `tune`, with the fewest workers that keep all limits.

    The recipe's settings give a first number of workers. A search with that many may find settings
    for which fewer suffice; then another search follows. A server with one of our policies inside
    it is one worker, even where that breaks limits. For replicas of a server, the best settings
    behind each router are tried with fewer.

    Raises `InputError` where the recipe has no latency target, `LimitsBrokenError` where no number
    suffices.
    """
    if not inputs.recipe.sla:
        raise InputError(
            "--workers auto needs latency targets",
            "give some in the recipe's sla, like ttft_p99_s: 5",
        )
    cut = inputs.workload.windows
    setup = replace(inputs.setup("", [*cut.search, *cut.held_out]), label="all windows")
    sizes = WorkerCounts(setup, partial(collect, runner, tick=partial(progress, 0.0)))
    own = inputs.settings.spaces[0]
    chosen, name = Outcome(policy=own.policy, parameters=dict(own.start), metrics={}), RECIPE
    if traits_of(inputs.recipe.engine.name).server and own.policy not in BUILT_IN:
        found = search_of(inputs, runner, progress)
        result, name = reported(inputs, found, runner, head, progress), "tuned for 1"
        if not sizes.keeps(name, result.best_held_out, 1):
            return result
        return result.model_copy(update={"sizing": answer(sizes, name, 1, None)})
    siblings = try_siblings(
        _alternative_runs(inputs, runner, progress), inputs.siblings, sized=True
    )
    workers = fewest(partial(sizes.keeps, name, chosen))
    if workers is None:
        raise nothing_suffices(sizes, siblings)
    while True:
        inputs = replace(inputs, recipe=inputs.recipe.model_copy(update={"workers": workers}))
        found = search_of(inputs, runner, progress)
        tuned = best_trial(found, inputs.settings.served).outcome
        tuned_name = settings_name(tuned, workers)
        if not sizes.keeps(tuned_name, tuned, workers):
            break
        chosen, name = tuned, tuned_name
        fewer = fewest(partial(sizes.keeps, name, chosen), known=workers) or workers
        for space in inputs.settings.spaces:
            best = found.best([space.key])
            if space.router is None or best is None:
                continue
            other, other_name = best.outcome, settings_name(best.outcome, workers)
            while fewer > 1 and sizes.keeps(other_name, other, fewer - 1):
                chosen, name, fewer = other, other_name, fewer - 1
        if fewer == workers:
            break
        workers = fewer
    sizing = answer(sizes, name, workers, sizes.keeps(name, chosen, workers + 1))
    result = reported(inputs, found, runner, head, progress, siblings)
    return result.model_copy(update={"sizing": sizing})


def settings_name(outcome: Outcome, workers: int | str) -> str:
    """The name in a table of sizes of settings that a search with so many workers found."""
    behind = f", {outcome.replica_router.name}" if outcome.replica_router else ""
    return f"tuned for {workers}{behind}"


def search_of(inputs: Inputs, runner: Runner, progress: Progress) -> Found:
    """The search on the search windows."""
    setup = inputs.setup("search", inputs.workload.windows.search)
    return search(setup, runner, inputs.settings, progress)


def _alternative_runs(inputs: Inputs, runner: Runner, progress: Progress) -> AlternativeRuns:
    workload, evaluate = inputs.workload, partial(collect, runner, tick=partial(progress, 0.0))
    setup = inputs.setup("held out", workload.windows.held_out)
    return AlternativeRuns(inputs.recipe, setup, workload.rate_rps, evaluate)


def reported(
    inputs: Inputs,
    found: Found,
    runner: Runner,
    head: EnvelopeFields,
    progress: Progress,
    siblings: Sequence[Sibling] | None = None,
) -> Tuning:
    """The verdict on the best of `found`, and everything else that tuning.json holds.

    The best is one that the recipe's engine can run. `siblings`: their results, if tried already.
    """
    recipe, settings = inputs.recipe, inputs.settings
    engines = [kind.recipe.engine.name for kind in inputs.kinds]
    runs = _alternative_runs(inputs, runner, progress)
    default, *held_out = _judge(runs, found, settings.spaces)
    best = _best_held_out(held_out, found, settings)
    chosen, space, in_turn = _settle_router(runs, best, settings.spaces)
    # The front has goodput and the target nearest to its limit, where that is a metric.
    ratios = {key: r for key, r in chosen.ratios.items() if key in chosen.outcome.metrics}
    trials, latency = found.trials(), max(ratios, key=lambda key: ratios[key], default=LATENCY)
    verdict = _verdict(default, chosen, runs)
    recommended = default if verdict["keep_defaults"] else chosen
    cut = inputs.workload.windows
    swept = inputs.setup("search", cut.search)
    others = None
    if not inputs.others:
        if siblings is None:
            siblings = try_siblings(runs, inputs.siblings)
        others = alternatives(runs, inputs.fit, recommended, held_out, siblings)
    return Tuning.model_validate(
        {
            **head,
            "recipe_name": recipe.name,
            "seed": settings.seed,
            "sla": recipe.sla,
            "workers": runs.setup.world.size,
            "request_rate_rps": inputs.workload.rate_rps,
            "trace_notes": list(cut.trace.notes),
            "scaling": cut.trace.scaling,
            "window_length": WindowLength(
                wished_s=cut.wished_s, seconds=cut.seconds, longest_s=cut.longest_s
            ),
            "search_windows": _window_specs(cut.search),
            "held_out_windows": _window_specs(cut.held_out),
            "trials": trials,
            **verdict,
            "sensitivity": sensitivity(swept, runner, space, chosen, progress),
            "policies": [_result(found, best, settings, engines) for best in held_out],
            "in_turn": in_turn,
            "latency_metric": latency,
            "front": front(trials, latency),
            "uncertainty": _uncertainty(inputs, runs, (default.outcome, chosen.outcome)),
            "engines": engines,
            "alternatives": others,
            "cost": _cost(
                inputs,
                recommended.outcome,
                runs.setup,
                keeps_limits=recommended.feasible(runs.setup.limits),
            ),
        }
    )


def _window_specs(windows: Sequence[TraceWindow]) -> list[TuningWindow]:
    return [
        TuningWindow(start_s=window.start_s, end_s=window.end_s, requests=len(window.trace))
        for window in windows
    ]


def served_rps(metrics: Mapping[str, float], *, keeps_limits: bool) -> float:
    """The rate of requests that are served, by the pooled metrics of an evaluation.

    Where all limits are kept, the system keeps up: then it is the successful requests over the
    length of their windows. Else, and without targets, a queue may grow: it is the throughput.
    """
    attained = metrics.get(ATTAINMENT, 0.0) / 100.0
    if not keeps_limits or not attained:
        return metrics.get("throughput_rps", 0.0)
    successful = 1.0 - metrics["failed"] / metrics["requests"]
    return metrics["goodput_rps"] / attained * successful


def _cost(
    inputs: Inputs, outcome: Outcome, setup: EvaluationSetup, *, keeps_limits: bool
) -> Cost | None:
    """What the settings of `outcome` cost; None without a price or without served requests."""
    metrics, steps = outcome.metrics, inputs.fit.steps
    rate_rps = served_rps(metrics, keeps_limits=keeps_limits)
    usd_per_hour = 0.0
    for kind in inputs.kinds:
        price = kind.recipe.hardware.usd_per_hour
        if price is None or not rate_rps:
            return None
        usd_per_hour += price * kind.workers
    usd = usd_per_hour / 3600.0 / rate_rps  # of a request
    cost = Cost(
        usd_per_hour=usd_per_hour,
        usd_per_million_requests=1e6 * usd,
        usd_per_million_in=None,
        usd_per_million_cached=None,
        usd_per_million_out=None,
    )
    if steps is None or inputs.others:
        return cost
    prompt, output = (
        float(np.concatenate([getattr(window, column) for window in setup.windows]).mean())
        for column in ("prompt_tokens", "output_tokens")
    )
    cached = prompt * metrics.get("hit_percent", 0.0) / 100.0
    new, rows = prompt - cached, max(metrics.get("batch_size_mean", 1.0), 1.0)
    in_s = steps.token_s[-1] + steps.attended_s * new / 2
    cached_s = steps.attended_s * new
    out_s = (steps.base_s + steps.host_s) / rows + steps.row_s + steps.host_row_s
    out_s += steps.token_s[0] + steps.cached_s * (prompt + output / 2)
    usd_per_s = usd / (new * in_s + cached * cached_s + output * out_s)
    return cost.model_copy(
        update={
            "usd_per_million_in": 1e6 * usd_per_s * in_s,
            "usd_per_million_cached": 1e6 * usd_per_s * cached_s if cached else None,
            "usd_per_million_out": 1e6 * usd_per_s * out_s,
        }
    )


def _judge(runs: AlternativeRuns, found: Found, spaces: Sequence[PolicySpace]) -> list[Evaluation]:
    """The recipe's settings and the best trial of each searched policy, held out."""
    best = [found.best([space.key]) for space in spaces]
    tasks = [Task.of(runs.setup, trial.outcome) for trial in best if trial]
    return runs.evaluate([spaces[0].task(runs.setup, {}), *tasks])


def _settle_router(
    runs: AlternativeRuns, chosen: Evaluation, spaces: Sequence[PolicySpace]
) -> tuple[Evaluation, PolicySpace, Outcome | None]:
    """The chosen settings, their space, and their outcome with requests to each replica in turn
    (None without a router). Where the router gains nothing, the settings in turn are chosen.
    """
    space = next(space for space in spaces if space.key == chosen.outcome.key)
    if space.router is None:
        return chosen, space, None
    task = replace(Task.of(runs.setup, chosen.outcome), router=RouterSpec())
    [in_turn] = runs.evaluate([task])
    if not _router_gains(in_turn, chosen, runs.setup.limits):
        chosen, space = in_turn, space.in_turn()
    return chosen, space, in_turn.outcome


def _router_gains(in_turn: Evaluation, chosen: Evaluation, limits: CandidateLimits) -> bool:
    """Whether the router is worth having: it keeps limits that are broken without it, or gives
    notably more goodput or a notably lower mean E2E latency.
    """
    if chosen.feasible(limits) != in_turn.feasible(limits):
        return chosen.feasible(limits)
    before_s, after_s = (each.outcome.metrics.get("e2e_mean_s", 0.0) for each in (in_turn, chosen))
    if chosen.goodput_rps > NOTABLE_GAIN * in_turn.goodput_rps:
        return True
    return chosen.goodput_rps >= in_turn.goodput_rps and before_s > NOTABLE_GAIN * after_s


def _best_held_out(
    held_out: Sequence[Evaluation], found: Found, settings: SearchSettings
) -> Evaluation:
    """The best policy that the engine can run (any policy, where the engine can run none).

    A policy that keeps all limits held out comes first, then one that kept them in the search,
    then the score of the search.
    """
    served = [best for best in held_out if best.outcome.key in settings.served] or held_out

    def rank(best: Evaluation) -> tuple[bool, bool, float]:
        trial = best_trial(found, [best.outcome.key])
        return best.feasible(found.limits), trial.feasible(found.limits), trial.score

    return max(served, key=rank)


def best_trial(found: Found, keys: Collection[str]) -> Evaluation:
    """The best trial of these spaces, or of all where they have no trial."""
    best = found.best(keys) or found.best()
    assert best is not None, "every search has trials"
    return best


def _verdict(default: Evaluation, best: Evaluation, runs: AlternativeRuns) -> dict[str, object]:
    """The fields of a tuning that compare the best with the recipe's settings, on held-out windows,
    and judge the recommended one of the two by each limit.
    """
    before, after, limits = default.goodput_rps, best.goodput_rps, runs.setup.limits
    keep = best.rank(limits) <= default.rank(limits)
    recommended = default if keep else best
    usage, metrics = recommended.usage(limits), recommended.outcome.metrics
    judged = []
    for limit in recipe_limits(runs.recipe):
        share = usage[USAGE_KEYS.get(limit.name, limit.name)]
        # A target is judged on the requests of all windows together.
        ratio = recommended.ratios.get(limit.name)
        value: float | None = metrics.get(limit.name, 0.0)
        if ratio is not None:
            value = None if share >= UNSERVED else ratio * limit.limit
        judged.append(limit.judged(value, kept=share <= 1.0))
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


def _result(
    found: Found, held_out: Evaluation, settings: SearchSettings, engines: Sequence[str]
) -> PolicyResult:
    policy, key = held_out.outcome.policy, held_out.outcome.key
    return PolicyResult(
        policy=policy,
        trials=sum(trial.outcome.key == key for trial in found.evaluations),
        best_trial=found.evaluations.index(best_trial(found, [key])),
        held_out=held_out.outcome,
        feasible=held_out.feasible(found.limits),
        importance=importance(found, next(space for space in settings.spaces if space.key == key)),
        refusal=refusal(policy, engines),
        engines=engines_for(policy),
    )


def _uncertainty(
    inputs: Inputs, runs: AlternativeRuns, pair: tuple[Outcome, Outcome]
) -> Uncertainty | None:
    """The verdict on the defaults and the best (`pair`) under drawn laws; None without draws.

    In a draw the workers follow the drawn laws while the scheduler believes the fitted ones, as in
    a live server. The defaults and the best get the same draws. Fits are resampled from the profile
    where it is known, else scaled by their held-out errors.
    """
    draws, seed, setup = inputs.recipe.tune.draws, inputs.recipe.tune.seed, runs.setup
    if not draws:
        return None
    if inputs.profile is None:
        fits = scaled_fits(inputs.fit, draws, seed)
    else:
        fits = resampled_fits(inputs.profile, inputs.fit, draws, seed)
    others = [scaled_fits(kind.fit, draws, seed + k) for k, kind in enumerate(inputs.others, 1)]
    tasks = []
    for k, drawn in enumerate(zip(fits, *others, strict=True)):
        world = fleet(list(map(_drawn_world, setup.world.kinds, drawn)))
        drawn_setup = replace(setup, label=f"{setup.label}, draw {k}", world=world)
        tasks += [Task.of(drawn_setup, outcome) for outcome in pair]
    done = runs.evaluate(tasks)
    pairs = list(zip(done[0::2], done[1::2], strict=True))
    better = sum(best.rank(setup.limits) > default.rank(setup.limits) for default, best in pairs)
    defaults, bests = ([one.goodput_rps for one in each] for each in zip(*pairs, strict=True))
    gains = [100.0 * (b / a - 1.0) for a, b in zip(defaults, bests, strict=True) if a > 0]
    return Uncertainty(
        method="held-out errors" if inputs.profile is None else "profile",
        draws=draws,
        defaults_goodput_rps=_interval(defaults),
        best_goodput_rps=_interval(bests),
        gain_percent=_interval(gains) if len(gains) == draws else None,
        better_percent=100.0 * better / draws,
    )


def _drawn_world(world: World, fit: Fit) -> World:
    laws, rounds = laws_from_fit(fit), world.rounds
    if rounds is not None:
        rounds = replace(rounds, latency=laws.rounds, believed=rounds.latency)
    paged = world.paged
    if paged is not None and fit.steps is not None:
        paged = paged.drawn(law_of_steps(fit.steps))
    return replace(world, latency=laws.latency, believed=world.latency, rounds=rounds, paged=paged)


def _interval(values: Sequence[float]) -> Interval:
    low, median, high = np.percentile(values, PERCENTILES).tolist()
    return Interval(low=low, median=median, high=high)
