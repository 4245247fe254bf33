"""The registry of policies, and which engine can run which. To add a policy, write its file and add
its class to the list below.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from toolkit.engine_traits import ENGINES, traits_of
from toolkit.errors import InputError
from toolkit.sched.policies.base import Policy as Policy
from toolkit.sched.policies.baton import BatonPolicy
from toolkit.sched.policies.continuous import AggressivePolicy, ConservativePolicy, FcfsPolicy
from toolkit.sched.policies.mlfq import MlfqPolicy
from toolkit.sched.policies.parameters import Value, make_one
from toolkit.sched.policies.past_future import PastFutureOracle, PastFuturePolicy
from toolkit.sched.policies.past_future_sla import PastFutureSlaPolicy
from toolkit.sched.policies.slice import SequencePolicy, SlicePolicy
from toolkit.sched.policies.slice_continuous import SliceContinuousPolicy
from toolkit.sched.policies.srpt import SrptOracle
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import AnyPolicy, BuiltIn

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        SequencePolicy,
        SlicePolicy,
        SliceContinuousPolicy,
        ConservativePolicy,
        AggressivePolicy,
        PastFuturePolicy,
        PastFutureSlaPolicy,
        FcfsPolicy,
        PastFutureOracle,
        MlfqPolicy,
        BatonPolicy,
        SrptOracle,
    )
}
# Policies of engines, which the toolkit's scheduler cannot run.
BUILT_IN: dict[str, type[BuiltIn]] = {VllmPolicy.name: VllmPolicy}
KNOWN: dict[str, type[AnyPolicy]] = {**POLICIES, **BUILT_IN}
# Policies that know the true output lengths, so they exist in simulations only.
ORACLES = frozenset(name for name, policy in POLICIES.items() if policy.knows_lengths)


def make_policy(name: str, parameters: Mapping[str, Value]) -> Policy:
    """The policy `name` of the toolkit's scheduler, with `parameters` over its defaults.

    `InputError`: an unknown name, parameter or value, or a policy that is built into an engine.
    """
    if name in BUILT_IN:
        raise InputError(
            f"policy '{name}' is built into the engine '{BUILT_IN[name].engine}': "
            "our scheduler cannot run it",
            "choose another policy; see docs/explanation/policies.md",
        )
    return make_one("policy", POLICIES, name, parameters)


def make_any(name: str, parameters: Mapping[str, Value]) -> AnyPolicy:
    """Like `make_policy`, but also policies built into an engine, to simulate or configure."""
    return make_one("policy", KNOWN, name, parameters)


def refuse_oracle(name: str) -> None:
    """`InputError` if the policy `name` needs the true output lengths, which no server knows."""
    if name in ORACLES:
        raise InputError(
            f"policy '{name}' knows the true output lengths, so it exists in simulations only",
            "choose another policy to serve with; see docs/explanation/policies.md",
        )


def refuse_unservable(policy: AnyPolicy, engine: str) -> None:
    """`InputError` if no server can run `policy` on the recipe's `engine.name`."""
    refuse_oracle(policy.name)
    if policy.name in BUILT_IN:
        home = BUILT_IN[policy.name].engine
        if engine != home:
            raise InputError(
                f"policy '{policy.name}' is built into the engine '{home}'; "
                f"the recipe's is '{engine}'",
                f"set engine.name to {home} and profile it, or choose another policy",
            )
        return
    traits = traits_of(engine)
    if traits.hosts_policies:
        if not policy.continuous or policy.name == BatonPolicy.name:
            batches = "one padded slab" if policy.continuous else "static batches"
            own = [built_in.name for built_in in BUILT_IN.values() if built_in.engine == engine]
            raise InputError(
                f"policy '{policy.name}' lays its rows out in {batches}, and engine '{engine}' "
                "pages its memory",
                f"choose the engine's own, '{own[0]}', or a continuous one; "
                "see docs/how-to/vllm.md",
            )
    elif policy.continuous and traits.load and not traits.keeps_rows:
        able = next(other.name for other in ENGINES.values() if other.keeps_rows)
        raise InputError(
            f"policy '{policy.name}' needs an engine that re-batches; "
            f"'{engine}' runs static batches",
            f"set engine.name to {able} and profile it, or serve 'slice' or 'sequence'",
        )
    # A server that the toolkit does not run schedules by itself: the policy only describes it.


# A policy that an engine cannot run may still be simulated with that engine's laws. Its figures
# then only estimate what another engine would give. `simulate`, `tune` and the report
# all mark it with `MARK` after its name and one footnote under the table.

# Engines that a recipe can start, in the order in which they are recommended.
STARTED = tuple(
    traits.name for traits in ENGINES.values() if traits.started and not traits.for_tests
)
MARK = "*"
FUTURE = "the future, which no server knows,"


def refusal(policy: str, engine: str) -> str | None:
    """Why the engine cannot run the policy of this name; None if it can.

    Without an engine (''), in a simulation in token steps, only oracles are refused.
    """
    if not engine:
        return refusal(policy, STARTED[0]) if policy in ORACLES else None
    assert policy in KNOWN
    try:
        refuse_unservable(make_any(policy, {}), engine)
    except InputError as error:
        return error.message
    return None


def engines_for(policy: str) -> list[str]:
    """The toolkit's engines that can run the policy of this name: none for an oracle."""
    return [engine for engine in STARTED if refusal(policy, engine) is None]


def marked(policy: str, engine: str) -> str:
    """The policy's name as tables show it."""
    return policy if refusal(policy, engine) is None else f"{policy} {MARK}"


def footnote(policies: Iterable[str], engine: str) -> str:
    """Return what the mark means for the `policies` that have it; '' if none has."""
    needs: dict[str, list[str]] = {}
    shown = set(policies)
    for name in KNOWN:
        if name in shown and refusal(name, engine) is not None:
            needs.setdefault(" or ".join(engines_for(name)) or FUTURE, []).append(name)
    if not needs:
        return ""
    what = "; ".join(f"{need} for {', '.join(names)}" for need, names in needs.items())
    if not engine:
        return f"{MARK} no server can run it. It takes {what}."
    laws = "simulated by its laws all the same"
    return f"{MARK} engine '{engine}' cannot run it; {laws}. It takes {what}."
