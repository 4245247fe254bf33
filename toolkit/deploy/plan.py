"""From a recipe, a fit and perhaps a tuning to the plan that `llmctl serve` starts.

The same files give the same plan, to the byte. What a plan holds is decided here and explained in
`toolkit.deploy.explain`; nothing is measured or searched. The one target is this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from toolkit.deploy.explain import Choice, explain
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import head
from toolkit.files.plan import Explanation, Kind, Plan, PlannedPolicy, PlannedWorkload
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Outcome, Tuning
from toolkit.sched.policies import KNOWN, make_any, refuse_unservable
from toolkit.sched.policies.parameters import Value, defaults, parameters
from toolkit.sched.protocols import AnyPolicy


def make_plan(
    recipe: Recipe,
    fit: Fit,
    tuning: Tuning | None,
    inputs: Mapping[str, Path],
    given: PlannedPolicy | None = None,
    others: Sequence[Kind] = (),
    workers: int | None = None,
) -> Plan:
    """The plan for serving `recipe`. `inputs` maps roles to the files that the arguments were read from.

    The `given` policy; else the tuner's best settings, or the recipe's where it says to keep them; without a tuning,
    the recipe's own. Of a fleet there are `others`, kinds of workers besides the recipe's, and so many `workers` of
    that. Raises `InputError` where the files do not belong together, a policy or parameter is unknown, or an engine
    cannot run the policy.
    """
    _check_same(recipe, fit)
    for kind in others:
        _check_same(kind.recipe, kind.fit)
    kinds = [Kind(recipe=recipe, fit=fit, workers=recipe.workers if workers is None else workers), *others]
    total = sum(kind.workers for kind in kinds)
    if tuning is not None:
        _check_tuning(tuning, recipe, total)
    if given is not None:
        choice = Choice(given.name, given.parameters, "asked for by name", frozenset(), {}, "")
    else:
        choice = _from_recipe(recipe) if tuning is None else _from_tuning(tuning)
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
        predicted=choice.predicted,
        explained=(_explain_requests(tuning) if choice.predicted else {}) | explain(kinds, policy, choice),
        workload=_workload(tuning) if choice.predicted else None,
        others=list(others),
    )


def _workload(tuning: Tuning | None) -> PlannedWorkload | None:
    """What the tuning's predictions are about; None where it does not say."""
    trace = tuning.inputs.get("trace") if tuning else None
    if tuning is None or trace is None:
        return None
    needed = tuning.sizing.workers if tuning.sizing else None
    return PlannedWorkload(trace=trace.name, request_rate_rps=tuning.request_rate_rps, workers_needed=needed)


def _explain_requests(tuning: Tuning | None) -> dict[str, Explanation]:
    """What the predictions' requests are, where they are far from the trace's own."""
    scaling = tuning.scaling if tuning else None
    if scaling is None or not scaling.notable:
        return {}
    return {"requests": Explanation(value=scaling.divided(), source="; ".join(scaling.warnings()))}


def _check_servable(policy: AnyPolicy, recipe: Recipe, tuning: Tuning | None) -> None:
    """`InputError` where the engine cannot run `policy`; its hint is the best of the tuning's policies that it can."""
    try:
        refuse_unservable(policy, recipe.engine.name)
    except InputError as error:
        served = [one for one in tuning.policies if one.refusal is None] if tuning else []
        if not served:
            raise
        best = max(served, key=lambda one: (one.feasible, one.held_out.metrics["goodput_rps"])).held_out
        known = defaults(KNOWN[best.policy])
        changed = [f"--set {name}={_setting(value)}" for name, value in best.parameters.items() if value != known[name]]
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
        ("fit", "tensor_parallel_size", fit.engine.tensor_parallel_size, recipe.engine.tensor_parallel_size),
    ]
    if recipe.model.kv_bytes_per_token is not None:
        kv_bytes = fit.engine.kv_bytes_per_token * fit.engine.tensor_parallel_size
        pairs.append(("fit", "engine.kv_bytes_per_token", kv_bytes, recipe.model.kv_bytes_per_token))
    _refuse_others(pairs)


def _check_tuning(tuning: Tuning, recipe: Recipe, workers: int) -> None:
    pairs: list[tuple[str, str, object, object]] = [("tuning", "recipe_name", tuning.recipe_name, recipe.name)]
    if tuning.sizing is None:  # else its workers are those of all servers together
        pairs.append(("tuning", "workers", tuning.workers, workers))
    _refuse_others(pairs)


def _refuse_others(pairs: Sequence[tuple[str, str, object, object]]) -> None:
    """`InputError` where a file has something else than the recipe: file, key, what it has, what the recipe has."""
    for file, key, found, wanted in pairs:
        if found != wanted:
            remedy = "profile and fit it again" if file == "fit" else "tune it again"
            raise InputError(f"the {file} is not of this recipe: {key} is {found}, the recipe has {wanted}", remedy)


def _from_recipe(recipe: Recipe) -> Choice:
    return Choice(recipe.policy.name, recipe.policy.parameters, "recipe, not tuned", frozenset(), {}, "")


def _from_tuning(tuning: Tuning) -> Choice:
    trials = len(tuning.trials)
    if tuning.keep_defaults:
        outcome = tuning.defaults_held_out
        source = f"kept: no trial of {trials} did better than the recipe's settings, held out"
    else:
        outcome = tuning.best_held_out
        gain = "goodput from none" if tuning.gain_percent is None else f"{tuning.gain_percent:+.1f} % goodput"
        if gain in ("+0.0 % goodput", "-0.0 % goodput"):
            gain = "the same goodput, other latencies"
        source = f"{_trial(tuning, outcome)} of {trials}: {gain}, held out"
    scaled = "scaled " if tuning.scaling and tuning.scaling.notable else ""
    windows = f"simulated with the fit on {len(tuning.held_out_windows)} held-out windows of the {scaled}trace"
    if tuning.sizing:
        windows += f", with {tuning.workers} workers in all"
    return Choice(outcome.policy, outcome.parameters, source, _searched(tuning), dict(outcome.metrics), windows)


def _trial(tuning: Tuning, outcome: Outcome) -> str:
    """The first trial that tried the policy and parameters of `outcome`."""
    wanted = (outcome.policy, outcome.parameters)
    numbers = (t.number for t in tuning.trials if (t.outcome.policy, t.outcome.parameters) == wanted)
    number = next(numbers, None)
    return "the best" if number is None else f"trial {number}"


def _searched(tuning: Tuning) -> frozenset[str]:
    """The parameters that differ between trials: those the search moved."""
    seen: dict[str, set[object]] = {}
    for trial in tuning.trials:
        for name, value in trial.outcome.parameters.items():
            seen.setdefault(name, set()).add(value)
    return frozenset(name for name, values in seen.items() if len(values) > 1)
