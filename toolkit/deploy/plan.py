"""From a recipe, a fit and perhaps a tuning to the plan that `llmctl serve` starts.

The same files give the same plan, to the byte. What a plan holds is decided here and explained in
`toolkit.deploy.plan`; nothing is measured or searched. The one target is this machine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from toolkit.errors import InputError
from toolkit.files.fit import Fit, HeldOutError, LatencyFit
from toolkit.files.io import head
from toolkit.files.plan import Explanation, Kind, Plan, PlannedPolicy, PlannedWorkload
from toolkit.files.recipe import ModelSpec, Recipe
from toolkit.files.tuning import (
    Limit,
    Outcome,
    ParameterValue,
    Tuning,
    breaks,
    broken,
    recipe_limits,
)
from toolkit.sched.policies import KNOWN, make_any, refuse_unservable
from toolkit.sched.policies.parameters import Value, defaults, parameters
from toolkit.sched.protocols import AnyPolicy

# Where each value of a plan comes from: which measurement, which trial, what it is predicted to
# give.

Explained = dict[str, Explanation]
LIMITS = "limits"  # the key under which a plan says whether it keeps them
PREDICTED = "predicted "  # how the keys of predicted metrics begin


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy that was chosen, where it and its parameters come from, and what it is predicted to
    give.

    `sources` has the parameters that were set, by a recipe, a tuning or a person, and says by
    which; the others have the policy's defaults. `limits_source` says what the limits' predictions
    rest on, or why there are none.
    """

    policy: str
    parameters: Mapping[str, ParameterValue]
    source: str
    sources: Mapping[str, str]
    limits: Sequence[Limit]
    limits_source: str
    predicted: Mapping[str, float] = field(default_factory=dict)
    predicted_on: str = ""


def explain(kinds: Sequence[Kind], policy: PlannedPolicy, choice: Choice) -> Explained:
    """An explanation of each value that the plan decides: the policy and its parameters, the laws,
    the predictions.

    The laws of a fleet's further kinds of workers stand under the names of their recipes.
    """
    recipe, fit = kinds[0].recipe, kinds[0].fit
    explained = explain_policy(policy, choice.source, choice.sources)
    explained[LIMITS] = explain_limits(choice.limits, choice.limits_source)
    explained |= _explain_fit(recipe.workers, fit) | _explain_revision(recipe.model)
    for kind in kinds[1:]:
        laws = _explain_fit(kind.recipe.workers, kind.fit)
        laws |= _explain_revision(kind.recipe.model)
        explained |= {
            f"{kind.recipe.name}: {name}": laws[name] for name in laws if name != "workers"
        }
    if len(kinds) > 1 or kinds[0].workers != recipe.workers:
        explained["workers"] = _explain_fleet(kinds)
    for name, metric in choice.predicted.items():
        explained[PREDICTED + name] = Explanation(value=_text(metric), source=choice.predicted_on)
    return explained


def explain_policy(policy: PlannedPolicy, source: str, sources: Mapping[str, str]) -> Explained:
    """A policy and its parameters, which are the policy's defaults but for those in `sources`."""
    default = f"default of policy '{policy.name}'"
    explained = {"policy": Explanation(value=policy.name, source=source)}
    for name, value in policy.parameters.items():
        explained[name] = Explanation(value=_text(value), source=sources.get(name, default))
    return explained


def explain_limits(limits: Sequence[Limit], source: str) -> Explanation:
    """Whether the limits are predicted to be kept; `source` says why that is known, or why it is
    not.
    """
    if any(one.kept is None for one in limits):
        return Explanation(value="not predicted", source=source)
    if not broken(limits):
        return Explanation(value=f"{len(limits)} of {len(limits)} kept", source=source)
    kept = len(limits) - len(broken(limits))
    return Explanation(
        value=f"{kept} of {len(limits)} kept", source=f"predicted to {breaks(limits)}; {source}"
    )


def _explain_fit(workers: int, fit: Fit) -> Explained:
    budget, per_token = fit.engine.kv_budget_bytes, fit.engine.kv_bytes_per_token
    capacity = f"the engine's own count, {budget} bytes of {per_token} per token"
    return {
        "workers": Explanation(
            value=str(workers), source="recipe; the fit was measured with as many"
        ),
        "prefill law": _explain_law(fit.prefill),
        "decode law": _explain_law(fit.decode),
        "overhead": Explanation(
            value=f"{fit.overhead.batch_s:.3g} s a batch, its time x {fit.overhead.stretch:.4g}",
            source=f"whole slices on all workers; {_error(fit.overhead.error)}",
        ),
        "memory law": _explain_memory(fit),
        "capacity_tokens": Explanation(value=str(fit.memory.capacity_tokens), source=capacity),
    }


def _explain_revision(model: ModelSpec) -> Explained:
    """Which of the hub's revisions is loaded; nothing where the model is not from the hub."""
    if not model.from_hub:
        return {}
    source = "recipe: model.revision"
    if not model.pinned:
        asked = f"{source} is no commit: it" if model.revision else "the recipe names none: that"
        source = f"NOT PINNED: {asked} may be another one at each load; name the commit's 40 digits as model.revision"
    return {
        "model revision": Explanation(value=model.revision or "the hub's newest", source=source)
    }


def _explain_fleet(kinds: Sequence[Kind]) -> Explanation:
    counts = ", ".join(f"{kind.workers} of {kind.recipe.name}" for kind in kinds)
    source = f"fleet: {counts}"
    measured = [
        f"{k.recipe.name} with {k.fit.workers}" for k in kinds if k.fit.workers != k.workers
    ]
    if measured:
        source += f"; measured at once: {', '.join(measured)}"
    return Explanation(value=str(sum(kind.workers for kind in kinds)), source=source)


def _explain_law(law: LatencyFit) -> Explanation:
    valid = f"valid to batch {law.valid.batch_size_max}, length {law.valid.length_max}"
    return Explanation(
        value=law.form, source=f"best of {len(law.candidates)} forms; {_error(law.error)}; {valid}"
    )


def _explain_memory(fit: Fit) -> Explanation:
    if fit.memory.form == "rules":
        return Explanation(
            value=f"{len(fit.memory.rules)} rules",
            source="probed largest batches (SCLS Algorithm 2)",
        )
    zeta = f"zeta {fit.memory.zeta:.4g} +- {fit.memory.zeta_std:.2g}"
    return Explanation(value=zeta, source="probed largest batches (SCLS Eq. 9)")


def _error(error: HeldOutError) -> str:
    return f"median error {error.median_percent:.1f} % on {error.points} held-out points"


def _text(value: ParameterValue) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


NO_POLICY = "default of recipes that name no policy"
RECIPE, BY_POLICY, BY_SET = "recipe", "set by --policy", "set by --set"
UNTUNED = "the plan was made without a tuning"
OVERRIDDEN = "the settings are not those of the tuning, so its predictions do not hold"


def make_plan(
    recipe: Recipe,
    fit: Fit,
    tuning: Tuning | None,
    inputs: Mapping[str, Path],
    given: PlannedPolicy | None = None,
    others: Sequence[Kind] = (),
    workers: int | None = None,
) -> Plan:
    """The plan for serving `recipe`. `inputs` maps roles to the files that the arguments were read
    from.

    The `given` policy; else the tuner's best settings, or the recipe's where it says to keep them;
    without a tuning, the recipe's own. Predictions are the tuning's, and hold for the settings that
    it recommends alone. Of a fleet there are `others`, kinds of workers besides the recipe's, and
    so many `workers` of that. Raises `InputError` where the files do not belong together, a policy
    or parameter is unknown, or an engine cannot run the policy. A plan that is predicted to break
    limits is made as well: `refuse_broken` is for the caller to call.
    """
    _check_same(recipe, fit)
    for kind in others:
        _check_same(kind.recipe, kind.fit)
    kinds = [
        Kind(recipe=recipe, fit=fit, workers=recipe.workers if workers is None else workers),
        *others,
    ]
    total = sum(kind.workers for kind in kinds)
    if tuning is not None:
        _check_tuning(tuning, recipe, total)
    if given is not None:
        choice = _given(given, recipe, tuning)
    else:
        origin = f"recipe '{recipe.name}'" if others else RECIPE
        choice = (
            _from_recipe(recipe, origin) if tuning is None else _from_tuning(tuning, recipe, origin)
        )
    chosen = make_any(choice.policy, choice.parameters)
    for kind in kinds:
        _check_servable(chosen, kind.recipe, tuning if given is None else None)
    policy = PlannedPolicy(name=choice.policy, parameters=parameters(chosen))
    return Plan(
        **head(inputs, fit.engine.device, fit.environment.device_memory_bytes),
        recipe=recipe,
        fit=fit,
        workers=total,
        policy=policy,
        predicted=dict(choice.predicted),
        limits=list(choice.limits),
        explained=(_explain_requests(tuning) if choice.predicted else {})
        | explain(kinds, policy, choice),
        workload=_workload(tuning) if choice.predicted else None,
        others=list(others),
    )


def _workload(tuning: Tuning | None) -> PlannedWorkload | None:
    """What the tuning's predictions are about; None where it does not say."""
    trace = tuning.inputs.get("trace") if tuning else None
    if tuning is None or trace is None:
        return None
    needed = tuning.sizing.workers if tuning.sizing else None
    return PlannedWorkload(
        trace=trace.name, request_rate_rps=tuning.request_rate_rps, workers_needed=needed
    )


def _explain_requests(tuning: Tuning | None) -> dict[str, Explanation]:
    """What the predictions' requests are, where they are far from the trace's own."""
    scaling = tuning.scaling if tuning else None
    if scaling is None or not scaling.notable:
        return {}
    return {"requests": Explanation(value=scaling.divided(), source="; ".join(scaling.warnings()))}


def _check_servable(policy: AnyPolicy, recipe: Recipe, tuning: Tuning | None) -> None:
    """`InputError` where the engine cannot run `policy`; its hint is the best of the tuning's
    policies that it can.
    """
    try:
        refuse_unservable(policy, recipe.engine.name)
    except InputError as error:
        served = [one for one in tuning.policies if one.refusal is None] if tuning else []
        if not served:
            raise
        best = max(
            served, key=lambda one: (one.feasible, one.held_out.metrics["goodput_rps"])
        ).held_out
        known = defaults(KNOWN[best.policy])
        changed = [
            f"--set {name}={_setting(value)}"
            for name, value in best.parameters.items()
            if value != known[name]
        ]
        remedy = " ".join([f"--policy {best.policy}", *changed])
        raise InputError(error.message, f"the best of the tuning that it runs: {remedy}") from None


def _setting(value: Value) -> str:
    """A parameter's value as `--set` reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_same(recipe: Recipe, fit: Fit) -> None:
    pairs: list[tuple[str, str, object, object]] = [
        ("fit", "recipe_name", fit.recipe_name, recipe.name),
        ("fit", "workers", fit.workers, recipe.workers),
        ("fit", "engine.max_model_len", fit.engine.max_model_len, recipe.model.max_model_len),
    ]
    pairs += [
        ("fit", "engine.engine", fit.engine.engine, recipe.engine.name),
        ("fit", "engine.dtype", fit.engine.dtype, recipe.model.dtype),
        (
            "fit",
            "tensor_parallel_size",
            fit.engine.tensor_parallel_size,
            recipe.engine.tensor_parallel_size,
        ),
    ]
    if recipe.model.kv_bytes_per_token is not None:
        kv_bytes = fit.engine.kv_bytes_per_token * fit.engine.tensor_parallel_size
        pairs.append(
            ("fit", "engine.kv_bytes_per_token", kv_bytes, recipe.model.kv_bytes_per_token)
        )
    _refuse_others(pairs)


def _check_tuning(tuning: Tuning, recipe: Recipe, workers: int) -> None:
    pairs: list[tuple[str, str, object, object]] = [
        ("tuning", "recipe_name", tuning.recipe_name, recipe.name)
    ]
    if tuning.sizing is None:  # else its workers are those of all servers together
        pairs.append(("tuning", "workers", tuning.workers, workers))
    _refuse_others(pairs)


def _refuse_others(pairs: Sequence[tuple[str, str, object, object]]) -> None:
    """`InputError` where a file has something else than the recipe: file, key, what it has, what
    the recipe has.
    """
    for file, key, found, wanted in pairs:
        if found != wanted:
            remedy = "profile and fit it again" if file == "fit" else "tune it again"
            raise InputError(
                f"the {file} is not of this recipe: {key} is {found}, the recipe has {wanted}",
                remedy,
            )


def refuse_broken(plan: Plan, which: str) -> None:
    """`InputError` where `plan` is predicted to break limits; `which` says what recommended its
    settings.
    """
    if broken(plan.limits):
        raise InputError(
            f"{which}: its settings are predicted to {breaks(plan.limits)}",
            "tune again: other policies, a recipe of another engine, a lower --rate, more workers; "
            "or go on all the same: --allow-broken-limits",
        )


def replaced(
    plan: Plan, policy: PlannedPolicy, named: bool, changes: Collection[str], workers: int
) -> Plan:
    """The plan with another policy, which --policy `named` or not, with `changes` by --set, and so
    many `workers`.

    What was predicted holds for the planned settings alone, so others have no prediction.
    """
    sized = plan.workload.workers_needed if plan.workload else None
    same = policy == plan.policy and workers in (plan.workers, sized)
    before = plan.explained if policy.name == plan.policy.name else {}
    sources = {name: before[name].source for name in policy.parameters if name in before}
    sources |= dict.fromkeys(changes, BY_SET)
    source = before["policy"].source if "policy" in before and not named else BY_POLICY
    explained = plan.explained | explain_policy(policy, source, sources)
    if workers != plan.workers:
        explained["workers"] = Explanation(value=str(workers), source="set by --workers")
    update: dict[str, object] = {"policy": policy, "workers": workers}
    if not same:
        limits = [one.unpredicted() for one in plan.limits]
        why = OVERRIDDEN if plan.predicted else UNTUNED
        explained = {key: one for key, one in explained.items() if not key.startswith(PREDICTED)}
        explained[LIMITS] = explain_limits(limits, why)
        update |= {"limits": limits, "predicted": {}, "workload": None}
    return plan.model_copy(update=update | {"explained": explained})


def _given(given: PlannedPolicy, recipe: Recipe, tuning: Tuning | None) -> Choice:
    """A policy that a person named. The tuning's predictions hold where these are the very
    settings.
    """
    sources = dict.fromkeys(given.parameters, BY_SET)
    if tuning is not None:
        tuned = _from_tuning(tuning, recipe, RECIPE)
        if _whole(given.name, given.parameters) == _whole(tuned.policy, tuned.parameters):
            return replace(tuned, parameters=given.parameters, source=BY_POLICY, sources=sources)
    why = UNTUNED if tuning is None else OVERRIDDEN
    return Choice(given.name, given.parameters, BY_POLICY, sources, recipe_limits(recipe), why)


def _whole(policy: str, given: Mapping[str, Value]) -> PlannedPolicy:
    """The policy with all its parameters."""
    return PlannedPolicy(name=policy, parameters=parameters(make_any(policy, given)))


def _from_recipe(recipe: Recipe, origin: str) -> Choice:
    written = "policy" in recipe.model_fields_set and "name" in recipe.policy.model_fields_set
    source = f"{origin if written else NO_POLICY}, not tuned"
    sources = dict.fromkeys(recipe.policy.parameters, origin)
    return Choice(
        recipe.policy.name,
        recipe.policy.parameters,
        source,
        sources,
        recipe_limits(recipe),
        UNTUNED,
    )


def _from_tuning(tuning: Tuning, recipe: Recipe, origin: str) -> Choice:
    outcome, trials = tuning.recommended, len(tuning.trials)
    if tuning.keep_defaults:
        source = f"kept: no trial of {trials} did better than the recipe's settings, held out"
    elif not tuning.keeps_limits:
        source = f"{_trial(tuning, outcome)} of {trials}; it breaks limits, held out"
    else:
        gain = (
            "goodput from none"
            if tuning.gain_percent is None
            else f"{tuning.gain_percent:+.1f} % goodput"
        )
        if gain in ("+0.0 % goodput", "-0.0 % goodput"):
            gain = "the same goodput, other latencies"
        source = f"{_trial(tuning, outcome)} of {trials}: {gain}, held out"
    scaled = "scaled " if tuning.scaling and tuning.scaling.notable else ""
    windows = f"simulated with the fit on {len(tuning.held_out_windows)} held-out windows of the {scaled}trace"
    if tuning.sizing:
        windows += f", with {tuning.workers} workers in all"
    sources = _sources_of(tuning, recipe, origin, source)
    return Choice(
        outcome.policy,
        outcome.parameters,
        source,
        sources,
        tuning.limits,
        windows,
        outcome.metrics,
        windows,
    )


def _sources_of(tuning: Tuning, recipe: Recipe, origin: str, source: str) -> dict[str, str]:
    """Where the recommended parameters come from, but for those that are the policy's defaults.

    The search set what it moved, also where it came back to the value that it started from; and
    what is not what the recipe or the policy says. Where it keeps the recipe's settings, it set
    nothing.
    """
    outcome, known = tuning.recommended, defaults(KNOWN[tuning.recommended.policy])
    own = recipe.policy.parameters if recipe.policy.name == outcome.policy else {}
    moved, start = _moved(tuning, outcome.policy), known | own
    sources = {}
    for name, value in outcome.parameters.items():
        if value != start.get(name) or (name in moved and not tuning.keep_defaults):
            sources[name] = source
        elif name in own:
            sources[name] = origin
    return sources


def _trial(tuning: Tuning, outcome: Outcome) -> str:
    """The first trial that tried the policy and parameters of `outcome`."""
    wanted = (outcome.policy, outcome.parameters)
    numbers = (
        t.number for t in tuning.trials if (t.outcome.policy, t.outcome.parameters) == wanted
    )
    number = next(numbers, None)
    return "the best" if number is None else f"trial {number}"


def _moved(tuning: Tuning, policy: str) -> frozenset[str]:
    """The parameters of `policy` that differ between its trials: those that the search moved."""
    seen: dict[str, set[object]] = {}
    for trial in tuning.trials:
        if trial.outcome.policy == policy:
            for name, value in trial.outcome.parameters.items():
                seen.setdefault(name, set()).add(value)
    return frozenset(name for name, values in seen.items() if len(values) > 1)


# How two plans differ, key by key. Who wrote them, and how they explain themselves, does not
# count.

NOT_COMPARED = {"environment", "tool_version", "explained"}


@dataclass(frozen=True, slots=True)
class Difference:
    """A key and its two values as text; '' where one side lacks it."""

    key: str
    old: str
    new: str


def differences(old: Plan, new: Plan) -> list[Difference]:
    """The keys at which two plans differ, in the file's order."""
    before, after = dict(_flat("", _content(old))), dict(_flat("", _content(new)))
    keys = dict.fromkeys([*before, *after])
    return [
        Difference(key, before.get(key, ""), after.get(key, ""))
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _content(plan: Plan) -> dict[str, object]:
    return plan.model_dump(mode="json", exclude=NOT_COMPARED)


def _flat(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}".lstrip("."), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{prefix}[{index}]", inner)
    else:
        yield prefix, "null" if value is None else str(value)
