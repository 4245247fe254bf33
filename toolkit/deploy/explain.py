"""Where each value of a plan comes from: which measurement, which trial, what it is predicted to give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.files.fit import Fit, HeldOutError, LatencyFit
from toolkit.files.limits import Limit, breaks, broken
from toolkit.files.plan import Explanation, Kind, PlannedPolicy
from toolkit.files.tuning import Value

Explained = dict[str, Explanation]
LIMITS = "limits"  # the key under which a plan says whether it keeps them
PREDICTED = "predicted "  # how the keys of predicted metrics begin


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy that was chosen, where it and its parameters come from, and what it is predicted to give.

    `sources` has the parameters that were set, by a recipe, a tuning or a person, and says by which; the others have
    the policy's defaults. `limits_source` says what the limits' predictions rest on, or why there are none.
    """

    policy: str
    parameters: Mapping[str, Value]
    source: str
    sources: Mapping[str, str]
    limits: Sequence[Limit]
    limits_source: str
    predicted: Mapping[str, float] = field(default_factory=dict)
    predicted_on: str = ""


def explain(kinds: Sequence[Kind], policy: PlannedPolicy, choice: Choice) -> Explained:
    """An explanation of each value that the plan decides: the policy and its parameters, the laws, the predictions.

    The laws of a fleet's further kinds of workers stand under the names of their recipes.
    """
    recipe, fit = kinds[0].recipe, kinds[0].fit
    explained = explain_policy(policy, choice.source, choice.sources)
    explained[LIMITS] = explain_limits(choice.limits, choice.limits_source)
    explained |= _explain_fit(recipe.workers, fit)
    for kind in kinds[1:]:
        laws = _explain_fit(kind.recipe.workers, kind.fit)
        explained |= {f"{kind.recipe.name}: {name}": laws[name] for name in laws if name != "workers"}
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
    """Whether the limits are predicted to be kept; `source` says why that is known, or why it is not."""
    if any(one.kept is None for one in limits):
        return Explanation(value="not predicted", source=source)
    if not broken(limits):
        return Explanation(value=f"{len(limits)} of {len(limits)} kept", source=source)
    kept = len(limits) - len(broken(limits))
    return Explanation(value=f"{kept} of {len(limits)} kept", source=f"predicted to {breaks(limits)}; {source}")


def _explain_fit(workers: int, fit: Fit) -> Explained:
    capacity = (
        f"the engine's own count, {fit.engine.kv_budget_bytes} bytes of {fit.engine.kv_bytes_per_token} per token"
    )
    return {
        "workers": Explanation(value=str(workers), source="recipe; the fit was measured with as many"),
        "prefill law": _explain_law(fit.prefill),
        "decode law": _explain_law(fit.decode),
        "overhead": Explanation(
            value=f"{fit.overhead.batch_s:.3g} s a batch, its time x {fit.overhead.stretch:.4g}",
            source=f"whole slices on all workers; {_error(fit.overhead.error)}",
        ),
        "memory law": _explain_memory(fit),
        "capacity_tokens": Explanation(value=str(fit.memory.capacity_tokens), source=capacity),
    }


def _explain_fleet(kinds: Sequence[Kind]) -> Explanation:
    counts = ", ".join(f"{kind.workers} of {kind.recipe.name}" for kind in kinds)
    source = f"fleet: {counts}"
    measured = [f"{k.recipe.name} with {k.fit.workers}" for k in kinds if k.fit.workers != k.workers]
    if measured:
        source += f"; measured at once: {', '.join(measured)}"
    return Explanation(value=str(sum(kind.workers for kind in kinds)), source=source)


def _explain_law(law: LatencyFit) -> Explanation:
    valid = f"valid to batch {law.valid.batch_size_max}, length {law.valid.length_max}"
    return Explanation(value=law.form, source=f"best of {len(law.candidates)} forms; {_error(law.error)}; {valid}")


def _explain_memory(fit: Fit) -> Explanation:
    if fit.memory.form == "rules":
        return Explanation(value=f"{len(fit.memory.rules)} rules", source="probed largest batches (SCLS Algorithm 2)")
    zeta = f"zeta {fit.memory.zeta:.4g} +- {fit.memory.zeta_std:.2g}"
    return Explanation(value=zeta, source="probed largest batches (SCLS Eq. 9)")


def _error(error: HeldOutError) -> str:
    return f"median error {error.median_percent:.1f} % on {error.points} held-out points"


def _text(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
