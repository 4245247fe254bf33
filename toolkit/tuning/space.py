"""What there is to search: policies, and of each the parameters and ranges, as the recipe narrows or widens them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import optuna

from toolkit.errors import InputError, nearest
from toolkit.files.recipe import PolicySpec
from toolkit.sched.policies import KNOWN, ORACLES, POLICIES, make_any, refuse_oracle
from toolkit.sched.policies.parameters import Knob, Value, defaults, knobs, parameters

Distribution: TypeAlias = (
    optuna.distributions.IntDistribution
    | optuna.distributions.FloatDistribution
    | optuna.distributions.CategoricalDistribution
)
Distributions = dict[str, Distribution]
Narrowed = Mapping[str, Sequence[Value]]
ALL = "all"  # every policy that can be simulated, but the oracles
OWN = "own"  # the recipe's
ORDINARY = tuple(name for name in POLICIES if name not in ORACLES)


@dataclass(slots=True, frozen=True)
class PolicySpace:
    """A policy, the parameters to begin with, and the distributions of those that are searched."""

    policy: str
    start: Mapping[str, Value]
    distributions: Distributions

    def first(self) -> dict[str, Value]:
        """The searched parameters at the start."""
        whole = parameters(make_any(self.policy, self.start))
        return {name: self._upper_end(name) or whole[name] for name in self.distributions}

    def meant(self, name: str, drawn: Value) -> Value:
        """The value of a searched parameter that was drawn as `drawn`."""
        return 0 if drawn == self._upper_end(name) else drawn

    def _upper_end(self, name: str) -> int:
        """What stands for 0, no bound, in the logarithmic range of a parameter that starts there; 0: it does not."""
        distribution = self.distributions[name]
        if not isinstance(distribution, optuna.distributions.IntDistribution) or not distribution.log:
            return 0
        start = self.start.get(name, defaults(KNOWN[self.policy])[name])
        return 0 if start else int(distribution.high)


def make_spaces(
    own: PolicySpec, policies: Sequence[str], narrowed: Narrowed, workers: int, known: Sequence[str] = ORDINARY
) -> list[PolicySpace]:
    """The recipe's own policy first, then the others of `policies` as named.

    "all" stands for the `known` ones, "own" for the recipe's. Keys of `narrowed` are `parameter`, of the recipe's own
    policy, or `policy.parameter`; those of policies that are not searched are checked and not used. `InputError` for an
    unknown policy or parameter, an oracle, or a range that cannot be searched.
    """
    names = list(dict.fromkeys([own.name, *_named(policies, own.name, known)]))
    for name in names:
        refuse_oracle(name)
    by_policy: dict[str, dict[str, Sequence[Value]]] = {name: {} for name in KNOWN}
    for key, values in narrowed.items():
        policy, dot, parameter = key.rpartition(".")
        if dot and policy not in KNOWN:
            raise InputError(f"tune.space: {key}: there is no policy '{policy}'", nearest(policy, KNOWN))
        by_policy[policy or own.name][parameter] = values
    spaces = {name: search_space(name, {}, given, workers) for name, given in by_policy.items() if name != own.name}
    spaces[own.name] = search_space(own.name, own.parameters, by_policy[own.name], workers)
    return [PolicySpace(name, own.parameters if name == own.name else {}, spaces[name]) for name in names]


def _named(policies: Sequence[str], own: str, known: Sequence[str]) -> list[str]:
    meant = {ALL: known, OWN: [own]}
    for name in policies:
        if name not in meant and name not in KNOWN:
            raise InputError(f"tune.policies: there is no policy '{name}'", nearest(name, [*KNOWN, *meant]))
    return [name for given in policies for name in meant.get(given, [given])]


def search_space(policy: str, start: Mapping[str, Value], narrowed: Narrowed, workers: int = 2) -> Distributions:
    """The distributions of the searched parameters of `policy`: those with a search range, and those in `narrowed`.

    A number's range is [low, high], a word's or a boolean's its choices. Ranges are widened where needed so that
    `start`, the parameters that the search starts from, lies within; but the 0 of one whose range is logarithmic, which
    means no bound, is searched as the upper end. With one worker, routers are all the same and are
    not searched. `InputError` for a name that is no parameter, or a range outside the parameter's limits.
    """
    known = knobs(KNOWN[policy])
    for name in narrowed:
        if name not in known:
            raise InputError(f"tune.space: policy '{policy}' has no parameter '{name}'", nearest(name, known))
    first = defaults(KNOWN[policy]) | dict(start)
    found: Distributions = {}
    for name, knob in known.items():
        if knob.choices or isinstance(first[name], bool):
            values = narrowed.get(name, knob.choices if knob.choices and workers > 1 else ())
            distribution = _categories(name, knob, first[name], values)
        else:
            distribution = _range(name, knob, first[name], narrowed.get(name, knob.search))
        if distribution is not None:
            found[name] = distribution
    return found


def _categories(name: str, knob: Knob, first: Value, values: Sequence[Value]) -> Distribution | None:
    known: tuple[Value, ...] = knob.choices or (False, True)
    for value in values:
        if value not in known or isinstance(value, bool) != (not knob.choices):
            listed = ", ".join(map(_word, known))
            raise InputError(f"tune.space: {name}: {_word(value)} is none of its choices", f"choices: {listed}")
    choices = list(dict.fromkeys([first, *values]))
    return optuna.distributions.CategoricalDistribution(choices) if len(choices) > 1 else None


def _range(name: str, knob: Knob, first: Value, values: Sequence[Value] | None) -> Distribution | None:
    if values is None:
        return None
    numbers = [float(value) for value in values if not isinstance(value, (bool, str))]
    shown = f"[{', '.join(map(_word, values))}]"
    if len(values) != 2 or len(numbers) != 2 or not knob.low <= numbers[0] <= numbers[1] <= knob.high:
        raise InputError(f"tune.space: {name}: {shown} is not a range within [{knob.low:g}, {knob.high:g}]", knob.doc)
    start = float(first) or (numbers[1] if knob.log else 0.0)  # no logarithmic range has a 0
    low, high = min(numbers[0], start), max(numbers[1], start)
    log = knob.log and low > 0
    if isinstance(first, int):
        return optuna.distributions.IntDistribution(int(low), int(high), log=log)
    return optuna.distributions.FloatDistribution(low, high, log=log)


def _word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else value if isinstance(value, str) else f"{value:g}"


def sweep(distribution: Distribution, points: int) -> list[Value]:
    """`points` values from end to end of a range, spaced as it is searched; all choices where there is no range."""
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        return list(distribution.choices)
    space = np.geomspace if distribution.log else np.linspace
    values = space(distribution.low, distribution.high, points)
    if isinstance(distribution, optuna.distributions.IntDistribution):
        return sorted(set(np.round(values).astype(int).tolist()))
    return [float(value) for value in values]
