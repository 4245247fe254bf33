"""Which engine can run which policy, and how tables mark a policy that its engine cannot run.

A policy that an engine cannot run may still be simulated with that engine's laws. Its figures then
only estimate what another engine would give. `simulate`, `compare`, `tune` and the report all mark
it with `MARK` after its name and one footnote under the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from toolkit.engine_traits import ENGINES
from toolkit.errors import InputError
from toolkit.sched.policies import KNOWN, ORACLES, make_any, refuse_unservable

# Engines that a recipe can start, in the order in which they are recommended.
STARTED = tuple(
    traits.name for traits in ENGINES.values() if traits.started and not traits.for_tests
)
MARK = "*"
FUTURE = "the future, which no server knows,"


def refusal(policy: str, engines: Iterable[str]) -> str | None:
    """Why not all of `engines` can run the policy of this name; None if they can.

    Without engines, in a simulation in token steps, only oracles are refused.
    """
    engines = list(engines)
    if not engines:
        return _refused(policy, STARTED[0]) if policy in ORACLES else None
    return next((reason for engine in engines if (reason := _refused(policy, engine))), None)


def engines_for(policy: str) -> list[str]:
    """The toolkit's engines that can run the policy of this name: none for an oracle."""
    return [engine for engine in STARTED if _refused(policy, engine) is None]


def marked(policy: str, engines: Iterable[str]) -> str:
    """The policy's name as tables show it."""
    return policy if refusal(policy, engines) is None else f"{policy} {MARK}"


def footnote(policies: Iterable[str], engines: Sequence[str]) -> str:
    """What the mark means for those of `policies` that have it; '' if none has."""
    needs: dict[str, list[str]] = {}
    shown = set(policies)
    for name in KNOWN:
        if name in shown and refusal(name, engines) is not None:
            needs.setdefault(" or ".join(engines_for(name)) or FUTURE, []).append(name)
    if not needs:
        return ""
    same_engine = len(set(engines)) == 1
    which = (
        f"engine '{engines[0]}'"
        if same_engine
        else "not every engine here"
        if engines
        else "no server"
    )
    verb = "cannot" if same_engine else "can"
    laws = "; simulated by its laws all the same" if same_engine else ""
    what = "; ".join(f"{need} for {', '.join(names)}" for need, names in needs.items())
    return f"{MARK} {which} {verb} run it{laws}. It takes {what}."


def _refused(policy: str, engine: str) -> str | None:
    assert policy in KNOWN
    try:
        refuse_unservable(make_any(policy, {}), engine)
    except InputError as error:
        return error.message
    return None
