"""From a recipe, a fit and a trace to tuning.json.

`tune` searches on windows of the trace and judges the result on the whole of it. `tune_to_size`
also looks for the fewest workers. The parts, in order: settings, the two entry points, the report
with its verdict, and how much the fit's error moves the gain, on windows that were held out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.fitting import resampled_fits, scaled_fits
from toolkit.estimators.load import law_of_steps, laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.io import EnvelopeFields
from toolkit.files.plan import Kind
from toolkit.files.profile import Profile
from toolkit.files.recipe import Recipe, RouterSpec
from toolkit.files.tuning import (
    BEHIND,
    OOM,
    UNSERVED,
    Cost,
    DraftGain,
    Interval,
    JudgedPart,
    Limit,
    Outcome,
    PolicyResult,
    Sibling,
    TunedCapacity,
    Tuning,
    TuningWindow,
    Uncertainty,
    WindowLength,
    broken,
    recipe_limits,
)
from toolkit.metrics import MOST_BEHIND_PERCENT
from toolkit.routing.routers import router_of
from toolkit.sched.policies import BUILT_IN, engines_for, refusal
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import LATER, VllmPolicy
from toolkit.sim.api import usual_policies
from toolkit.sim.world import World, fleet
from toolkit.traces.windows import TraceWindow, mean_rate
from toolkit.tuning.alternatives import (
    RATES,
    RECIPE,
    AlternativeRuns,
    WorkerCounts,
    alternatives,
    answer,
    fewest,
    nothing_suffices,
    try_siblings,
)
from toolkit.tuning.costs import cost_of, served_rps
from toolkit.tuning.drafts import draft_gain
from toolkit.tuning.evaluate import (
    ATTAINMENT,
    ATTAINMENT_LOWER,
    CandidateLimits,
    Evaluation,
    EvaluationSetup,
    Task,
    all_kinds,
    make_world,
)
from toolkit.tuning.executor import Runner, collect
from toolkit.tuning.judge import NOTABLE_GAIN, JudgedCandidates, is_better, judge_candidates
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
from toolkit.tuning.spaces import (
    PolicySpace,
    make_spaces,
    over_drafts,
    router_spaces,
    sweeps,
    with_kinds,
)
from toolkit.tuning.workload import Workload, whole_setup

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

    @property
    def world(self) -> World:
        """The recipe's machine."""
        return make_world(self.recipe, self.fit, self.others)

    def setup(self, label: str, windows: Sequence[TraceWindow]) -> EvaluationSetup:
        """The recipe's machine, targets and limits on `windows`."""
        traces = [window.trace for window in windows]
        limits = CandidateLimits.of(self.recipe)
        return EvaluationSetup(self.world, traces, self.recipe.sla, self._label(label), limits)

    def whole(self, policy: str) -> EvaluationSetup:
        """The recipe's machine, targets and limits where a policy is judged: on the whole trace."""
        label = self._label("whole trace")
        return whole_setup(self.world, self.workload.trace, self.recipe, policy, label)

    def judge(self, task: Task) -> Task:
        """The same candidate where it is judged."""
        return replace(task, setup=self.whole(task.policy))

    def _label(self, label: str) -> str:
        label += f", {self.world.size} workers"
        if self.others:
            label += "".join(f", {kind.workers} of {kind.recipe.name}" for kind in self.kinds)
        return label


def ranges_of_release(fit: Fit) -> dict[str, list[Value]]:
    """The ranges of flags that not every release of vLLM has, if the measured one has them."""
    return {
        f"{VllmPolicy.name}.{name}": list(flag.search)
        for name, flag in LATER.items()
        if fit.engine.engine == VllmPolicy.engine and flag.is_in(fit.engine.engine_version)
    }


def settings_of(recipe: Recipe, fit: Fit, others: Sequence[Kind] = ()) -> SearchSettings:
    """The recipe's settings of the search; `others` are a fleet's further kinds of workers.

    "All" policies are those that the laws of `fit` can simulate. Raises `InputError` for wrong
    settings.
    """
    spec = recipe.tune
    workers = recipe.workers + sum(kind.workers for kind in others)
    ranges = {**ranges_of_release(fit), **spec.space}
    spaces = make_spaces(recipe.policy, spec.policies, ranges, workers, usual_policies(fit))
    if fit.steps is not None and not others:
        numbers = [steps.draft_tokens for steps in (fit.steps, *fit.drafts)]
        spaces = [over_drafts(space, numbers) for space in spaces]
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
    capacities = (2 + len(siblings)) * RATES
    return settings.trials + verdict + sweep + len(siblings) + capacities


def tune(inputs: Inputs, runner: Runner, head: EnvelopeFields, progress: Progress) -> Tuning:
    """Search on windows, judge on the whole trace.

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
    sizes = WorkerCounts(inputs.whole, partial(collect, runner, tick=partial(progress, 0.0)))
    own = inputs.settings.spaces[0]
    chosen = Outcome(policy=own.policy, parameters=dict(own.start), metrics={})
    name = RECIPE
    if traits_of(inputs.recipe.engine.name).server and own.policy not in BUILT_IN:
        found = search_of(inputs, runner, progress)
        result = reported(inputs, found, runner, head, progress)
        name = "tuned for 1"
        if not sizes.keeps(name, result.best, 1):
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
        chosen = tuned
        name = tuned_name
        fewer = fewest(partial(sizes.keeps, name, chosen), known=workers) or workers
        for space in inputs.settings.spaces:
            best = found.best([space.key])
            if space.router is None or best is None:
                continue
            other = best.outcome
            other_name = settings_name(best.outcome, workers)
            while fewer > 1 and sizes.keeps(other_name, other, fewer - 1):
                chosen = other
                name = other_name
                fewer = fewer - 1
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
    evaluate = partial(collect, runner, tick=partial(progress, 0.0))
    return AlternativeRuns(inputs.recipe, inputs.world, inputs.workload, evaluate)


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
    recipe = inputs.recipe
    settings = inputs.settings
    engines = [kind.recipe.engine.name for kind in inputs.kinds]
    runs = _alternative_runs(inputs, runner, progress)
    judged = judge_candidates(found, settings, inputs.judge, runner, progress)
    best = _best_served(judged, settings)
    chosen, space, in_turn = _settle_router(inputs, runs, best, settings.spaces)
    # The front has goodput and the target nearest to its limit, where that is a metric.
    ratios = {key: r for key, r in chosen.ratios.items() if key in chosen.outcome.metrics}
    latency = max(ratios, key=lambda key: ratios[key], default=LATENCY)
    trials = found.trials()
    verdict = _verdict(inputs, judged.default, chosen)
    recommended = judged.default if verdict["keep_defaults"] else chosen
    cut = inputs.workload.windows
    others = None
    capacity = None
    if not inputs.others:
        if siblings is None:
            siblings = try_siblings(runs, inputs.siblings)
        others = alternatives(runs, inputs.fit, recommended, [*judged.of_space.values()], siblings)
        capacity = _capacity(runs, judged.default, recommended)
    return Tuning.model_validate(
        {
            **head,
            "recipe_name": recipe.name,
            "analytic": _analytic(inputs),
            "seed": settings.seed,
            "sla": recipe.sla,
            "workers": inputs.world.size,
            "tensor_parallel_size": None if inputs.others else recipe.engine.tensor_parallel_size,
            "request_rate_rps": inputs.workload.rate_rps,
            "concurrency": recipe.tune.concurrency,
            "trace_notes": list(cut.trace.notes),
            "scaling": cut.trace.scaling,
            "window_length": _window_length(inputs.workload),
            "search_windows": _window_specs(cut.search),
            "held_out_windows": _window_specs(cut.held_out),
            "trials": trials,
            **verdict,
            "judged": _judged_part(inputs.workload, recommended.outcome.policy),
            "further": [evaluation.outcome for evaluation in judged.further],
            "capacity": capacity,
            "sensitivity": sensitivity(found.setup, runner, space, chosen, progress),
            "policies": [
                _result(found, best, settings, engines, inputs) for best in judged.of_space.values()
            ],
            "in_turn": in_turn,
            "latency_metric": latency,
            "front": front(trials, latency),
            "uncertainty": _uncertainty(inputs, runs, (judged.default.outcome, chosen.outcome)),
            "engines": engines,
            "alternatives": others,
            "cost": _cost(inputs, recommended.outcome),
            "draft_gain": _draft_gain(inputs, recommended.outcome),
        }
    )


def _analytic(inputs: Inputs) -> str | None:
    """What the laws that were computed assume, each once; None where all were measured."""
    assumed = [kind.fit.engine.analytic for kind in inputs.kinds if kind.fit.engine.analytic]
    return "; ".join(dict.fromkeys(assumed)) or None


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
    runs: AlternativeRuns, default: Evaluation, recommended: Evaluation
) -> TunedCapacity | None:
    """The capacities of the recipe's settings and of the recommended ones."""
    if runs.world.concurrency or mean_rate(runs.workload.trace) == 0.0:
        return None
    own = runs.capacity(default.outcome)
    found = own
    if not recommended.outcome.same_settings(default.outcome):
        found = runs.capacity(recommended.outcome)
    return TunedCapacity(
        defaults_rps=own and own.load,
        recommended_rps=found and found.load,
        binding=found and found.binding,
        error_percent=found.error_percent if found else 0.0,
    )


def _window_specs(windows: Sequence[TraceWindow]) -> list[TuningWindow]:
    return [
        TuningWindow(start_s=window.start_s, end_s=window.end_s, requests=window.trace.counted)
        for window in windows
    ]


def _cost(inputs: Inputs, outcome: Outcome) -> Cost | None:
    """What the settings of `outcome` cost; None without a price or without served requests."""
    rate_rps = served_rps(outcome.metrics)
    usd_per_hour = 0.0
    for kind in inputs.kinds:
        price = kind.recipe.hardware.usd_per_hour
        if price is None or not rate_rps:
            return None
        usd_per_hour += price * kind.workers
    steps = None if inputs.others else inputs.fit.steps
    trace = inputs.workload.judged(outcome.policy).trace
    return cost_of(usd_per_hour, rate_rps, outcome.metrics, steps, trace)


def _draft_gain(inputs: Inputs, outcome: Outcome) -> DraftGain | None:
    """Up to how many running requests drafts pay; None where there is no choice of their number."""
    if inputs.others or not inputs.fit.drafts or outcome.policy != VllmPolicy.name:
        return None
    flags = VllmPolicy(**VllmPolicy.within(outcome.parameters))  # type: ignore[arg-type]
    return draft_gain(inputs.world, flags, inputs.workload.trace)


def _settle_router(
    inputs: Inputs, runs: AlternativeRuns, chosen: Evaluation, spaces: Sequence[PolicySpace]
) -> tuple[Evaluation, PolicySpace, Outcome | None]:
    """The chosen settings, their space, and their outcome with requests to each replica in turn
    (None without a router). Where the router gains nothing, the settings in turn are chosen.
    """
    space = next(space for space in spaces if space.key == chosen.outcome.key)
    if space.router is None:
        return chosen, space, None
    setup = inputs.whole(chosen.outcome.policy)
    task = replace(Task.of(setup, chosen.outcome), router=RouterSpec())
    [in_turn] = runs.evaluate([task])
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
    before_s, after_s = (each.outcome.metrics.get("e2e_mean_s", 0.0) for each in (in_turn, chosen))
    if chosen.goodput_rps > NOTABLE_GAIN * in_turn.goodput_rps:
        return True
    return chosen.goodput_rps >= in_turn.goodput_rps and before_s > NOTABLE_GAIN * after_s


def _best_served(judged: JudgedCandidates, settings: SearchSettings) -> Evaluation:
    """The best policy that the engine can run (any policy, where the engine can run none)."""
    spaces = judged.of_space
    served = [spaces[key] for key in spaces if key in settings.served] or list(spaces.values())
    return max(served, key=lambda best: best.rank(judged.limits))


def best_trial(found: Found, keys: Collection[str]) -> Evaluation:
    """The best trial of these spaces, or of all where they have no trial."""
    best = found.best(keys) or found.best()
    assert best is not None, "every search has trials"
    return best


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
    metrics = recommended.outcome.metrics
    behind = Limit(name=BEHIND, bound="at most", limit=MOST_BEHIND_PERCENT)
    judged = []
    for limit in [*recipe_limits(inputs.recipe), *([behind] if BEHIND in usage else [])]:
        share = usage[USAGE_KEYS.get(limit.name, limit.name)]
        ratio = recommended.ratios.get(limit.name)
        value: float | None = metrics.get(limit.name, 0.0)
        if ratio is not None:
            value = None if share >= UNSERVED else ratio * limit.limit
        judged.append(limit.judged(value, kept=share <= 1.0))
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


def _result(
    found: Found,
    best: Evaluation,
    settings: SearchSettings,
    engines: Sequence[str],
    inputs: Inputs,
) -> PolicyResult:
    policy = best.outcome.policy
    key = best.outcome.key
    return PolicyResult(
        policy=policy,
        trials=sum(trial.outcome.key == key for trial in found.evaluations),
        outcome=best.outcome,
        feasible=best.feasible(inputs.whole(policy).limits),
        judged_requests=len(inputs.workload.judged(policy).trace),
        importance=importance(found, next(space for space in settings.spaces if space.key == key)),
        refusal=refusal(policy, engines),
        engines=engines_for(policy),
    )


def _uncertainty(
    inputs: Inputs, runs: AlternativeRuns, pair: tuple[Outcome, Outcome]
) -> Uncertainty | None:
    """The gain of the best over the defaults (`pair`) under drawn laws; None without draws.

    In a draw the workers follow the drawn laws while the scheduler believes the fitted ones, as in
    a live server. The defaults and the best get the same draws. Fits are resampled from the profile
    where it is known and was measured, else scaled by their held-out errors.
    """
    draws = inputs.recipe.tune.draws
    seed = inputs.recipe.tune.seed
    setup = inputs.setup("held out", inputs.workload.windows.held_out)
    if not draws:
        return None
    measured = None if inputs.fit.engine.analytic else inputs.profile
    if measured is None:
        fits = scaled_fits(inputs.fit, draws, seed)
    else:
        fits = resampled_fits(measured, inputs.fit, draws, seed)
    others = [scaled_fits(kind.fit, draws, seed + k) for k, kind in enumerate(inputs.others, 1)]
    tasks = []
    for k, drawn in enumerate(zip(fits, *others, strict=True)):
        world = fleet(list(map(_drawn_world, setup.world.kinds, drawn)))
        drawn_setup = replace(setup, label=f"{setup.label}, draw {k}", world=world)
        tasks += [Task.of(drawn_setup, outcome) for outcome in pair]
    done = runs.evaluate(tasks)
    pairs = list(zip(done[0::2], done[1::2], strict=True))
    better = sum(is_better(best, default, setup.limits) for default, best in pairs)
    defaults, bests = ([one.goodput_rps for one in each] for each in zip(*pairs, strict=True))
    gains = [100.0 * (b / a - 1.0) for a, b in zip(defaults, bests, strict=True) if a > 0]
    return Uncertainty(
        method="held-out errors" if measured is None else "profile",
        draws=draws,
        defaults_goodput_rps=_interval(defaults),
        best_goodput_rps=_interval(bests),
        gain_percent=_interval(gains) if len(gains) == draws else None,
        better_percent=100.0 * better / draws,
    )


def _drawn_world(world: World, fit: Fit) -> World:
    laws = laws_from_fit(fit)
    rounds = world.rounds
    if rounds is not None:
        rounds = replace(rounds, latency=laws.rounds, believed=rounds.latency)
    paged = world.paged
    if paged is not None and fit.steps is not None:
        paged = paged.drawn(law_of_steps(fit.steps), list(map(law_of_steps, fit.drafts)))
    return replace(world, latency=laws.latency, believed=world.latency, rounds=rounds, paged=paged)


def _interval(values: Sequence[float]) -> Interval:
    low, median, high = np.percentile(values, PERCENTILES).tolist()
    return Interval(low=low, median=median, high=high)
