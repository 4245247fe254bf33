"""What a search may try: each policy with the ranges of its parameters (`PolicySpace`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TypeAlias, TypeVar

import numpy as np
import optuna

from toolkit.errors import InputError, nearest
from toolkit.files.recipe import PolicySpec, Recipe, RouterSpec
from toolkit.files.tuning import ParameterValue, Settings
from toolkit.routing.routers import ROUTERS, refuse_unknown_router, router_of
from toolkit.sched.policies import KNOWN, ORACLES, POLICIES, make_any, refuse_oracle
from toolkit.sched.policies.parameters import Parameter, Value, declared, defaults, parameters
from toolkit.sched.policies.vllm import VllmPolicy

T = TypeVar("T")

SWEEP_POINTS = 7
DRAFTS = "num_speculative_tokens"
ALL = "all"  # every policy that can be simulated, except the oracles
OWN = "own"  # the recipe's policy
ORDINARY = tuple(name for name in POLICIES if name not in ORACLES)

Distribution: TypeAlias = (
    optuna.distributions.IntDistribution
    | optuna.distributions.FloatDistribution
    | optuna.distributions.CategoricalDistribution
)
Distributions = dict[str, Distribution]
Narrowed = Mapping[str, Sequence[Value]]  # `tune.space` of a recipe
NOTHING_NARROWED: Narrowed = MappingProxyType({})


@dataclass(slots=True, frozen=True)
class PolicySpace:
    """The settings at the start of a search, and the distributions of the searched parameters.

    A logarithmic range cannot hold 0, which means no bound. Where a parameter starts at 0, the
    upper end of its range stands for 0. Parameters of the router have names like
    `router.parameter`.
    """

    start: Settings
    distributions: Distributions

    @property
    def key(self) -> str:
        """See `Settings.key`."""
        return self.start.key

    def first(self) -> dict[str, Value]:
        """The searched parameters at the start, as they would be drawn."""
        whole = values_of(self.start) | parameters(
            make_any(self.start.policy, self.start.parameters)
        )
        return {name: self._unbounded(name) or whole[name] for name in self.distributions}

    def settings(self, values: Mapping[str, ParameterValue]) -> Settings:
        """The settings with these values of searched parameters, the others as at the start."""
        by_owner: defaultdict[str, dict[str, ParameterValue]] = defaultdict(dict)
        for key, value in values.items():
            owner, _, name = key.rpartition(".")
            by_owner[owner][name] = value
        router = self.start.replica_router
        if router is not None:
            changed = {"parameters": router.parameters | by_owner[router.name]}
            router = router.model_copy(update=changed)
        own = self.start.parameters | by_owner[""]
        return Settings(policy=self.start.policy, parameters=own, replica_router=router)

    def in_turn(self) -> PolicySpace:
        """The space of the same policy on the same replicas, behind the round-robin router."""
        start = self.start.model_copy(update={"replica_router": RouterSpec()})
        own = {key: among for key, among in self.distributions.items() if "." not in key}
        return PolicySpace(start, own)

    def value_of(self, name: str, drawn: Value) -> Value:
        """The value of a searched parameter that was drawn as `drawn`."""
        return 0 if drawn == self._unbounded(name) else drawn

    def _unbounded(self, name: str) -> int:
        """The drawn value that stands for 0 (no bound); 0 where no value does."""
        among = self.distributions[name]
        if not isinstance(among, optuna.distributions.IntDistribution) or not among.log:
            return 0
        known = defaults(KNOWN[self.start.policy]) | values_of(self.start)
        return 0 if known[name] else int(among.high)


def values_of(settings: Settings) -> dict[str, ParameterValue]:
    """All parameters of settings, by the names that `PolicySpace.settings` takes."""
    router = settings.replica_router
    return settings.parameters | (_named(router.name, router.parameters) if router else {})


def _named(owner: str, given: Mapping[str, T]) -> dict[str, T]:
    """The parameters of a router by their names in a search."""
    return {f"{owner}.{name}": value for name, value in given.items()}


def over_drafts(space: PolicySpace, numbers: Sequence[int]) -> PolicySpace:
    """The space with the number of drafts of vLLM among `numbers`, those with known laws, and
    within the recipe's range, if it has one; as it is without a choice.
    """
    if space.start.policy != VllmPolicy.name or len(numbers) < 2:
        return space
    among = space.distributions.get(DRAFTS)
    first = int(space.start.parameters.get(DRAFTS, 0))
    known = sorted(numbers)
    if isinstance(among, optuna.distributions.IntDistribution):
        known = [number for number in known if among.low <= number <= among.high]
    choices = list(dict.fromkeys([first, *known]))
    chosen = optuna.distributions.CategoricalDistribution(choices)
    return replace(space, distributions={**space.distributions, DRAFTS: chosen})


def router_spaces(space: PolicySpace, recipe: Recipe) -> list[PolicySpace]:
    """The space behind the recipe's own router, then behind each other one of `tune.routers`.

    There, "all" stands for all, "own" for the recipe's. The parameters of the recipe's router start
    at its values, the parameters of others at their defaults. Raises `InputError` for an unknown
    router or parameter, and a range that cannot be searched.
    """
    own = recipe.replica_router.name
    routers = recipe.tune.routers
    groups = {ALL: list(ROUTERS), OWN: [own]}
    for name in routers:
        if name not in groups:
            refuse_unknown_router(name, "tune.routers: ")
    spaces = []
    for name in _names(own, routers, groups):
        router = router_of(recipe, name)
        assert router is not None, "routers are searched only for replicas"
        narrowed = {
            key.removeprefix(f"{name}."): values
            for key, values in recipe.tune.space.items()
            if key.startswith(f"{name}.")
        }
        searched = distributions_of(
            f"router '{name}'", declared(ROUTERS[name]), router.parameters, narrowed
        )
        start = space.start.model_copy(update={"replica_router": router})
        spaces.append(PolicySpace(start, space.distributions | _named(name, searched)))
    return spaces


def _names(own: str, listed: Sequence[str], groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The recipe's own policy or router, then the listed others, with the members of groups."""
    return list(dict.fromkeys([own, *(n for name in listed for n in groups.get(name, [name]))]))


def make_spaces(
    own: PolicySpec,
    policies: Sequence[str],
    narrowed: Narrowed,
    workers: int,
    known: Sequence[str] = ORDINARY,
) -> list[PolicySpace]:
    """The spaces of the recipe's own policy, then of the other `policies` in their order.

    In `policies`, "all" stands for the `known` ones, "own" for the recipe's. Keys of `narrowed` are
    `parameter` (of the recipe's own policy), `policy.parameter`, or `router.parameter`
    (`router_spaces`); keys of policies and routers that are not searched are only checked. Raises
    `InputError` for an unknown policy or parameter, an oracle, or a range that cannot be searched.
    """
    groups = {ALL: known, OWN: [own.name]}
    for name in policies:
        if name not in groups and name not in KNOWN:
            raise InputError(
                f"tune.policies: there is no policy '{name}'", nearest(name, [*KNOWN, *groups])
            )
    names = _names(own.name, policies, groups)
    for name in names:
        refuse_oracle(name)
    by_policy: dict[str, dict[str, Sequence[Value]]] = {name: {} for name in KNOWN}
    for key, values in narrowed.items():
        policy, dot, parameter = key.rpartition(".")
        if policy in ROUTERS:
            known_ones = declared(ROUTERS[policy])
            first = defaults(ROUTERS[policy])
            distributions_of(f"router '{policy}'", known_ones, first, {parameter: values})
            continue
        if dot and policy not in KNOWN:
            raise InputError(
                f"tune.space: {key}: there is no policy or router '{policy}'",
                nearest(policy, [*KNOWN, *ROUTERS]),
            )
        by_policy[policy or own.name][parameter] = values
    spaces = {}  # of all policies, since all keys of `narrowed` are checked
    for name, ranges in by_policy.items():
        start = Settings(policy=name, parameters=own.parameters if name == own.name else {})
        searched = search_space(name, start.parameters, ranges, workers)
        spaces[name] = PolicySpace(start, searched)
    return [spaces[name] for name in names]


def search_space(
    policy: str, start: Mapping[str, Value], narrowed: Narrowed, workers: int = 2
) -> Distributions:
    """The distributions of the searched parameters of `policy`.

    Searched are parameters with a search range and those in `narrowed`. The range of a number is
    [low, high]; a word or a boolean has choices. Ranges are widened to hold `start`, the values
    that the search starts from, except for a 0 in a logarithmic range (see `PolicySpace`). With one
    worker, all routers are the same, so a word is searched only if `narrowed` names it. Raises
    `InputError` for an unknown parameter, and for a range outside the parameter's limits.
    """
    known = declared(KNOWN[policy])
    first = defaults(KNOWN[policy]) | dict(start)
    return distributions_of(f"policy '{policy}'", known, first, narrowed, workers)


def distributions_of(
    owner: str,
    known: Mapping[str, Parameter],
    first: Mapping[str, Value],
    narrowed: Narrowed = NOTHING_NARROWED,
    workers: int = 2,
) -> Distributions:
    """The distributions of the searched ones of `known` parameters, which start at `first`."""
    for name in narrowed:
        if name not in known:
            hint = nearest(name, known) if known else "it has no parameters"
            raise InputError(f"tune.space: {owner} has no parameter '{name}'", hint)
    found: Distributions = {}
    for name, limits in known.items():
        if limits.choices or isinstance(first[name], bool):
            values = narrowed.get(name, limits.choices if limits.choices and workers > 1 else ())
            distribution = _categories(name, limits, first[name], values)
        else:
            distribution = _range(name, limits, first[name], narrowed.get(name, limits.search))
        if distribution is not None:
            found[name] = distribution
    return found


def drawn(trial: optuna.Trial, name: str, among: Distribution) -> ParameterValue:
    """Return the value that a trial draws from a distribution."""
    value: ParameterValue
    if isinstance(among, optuna.distributions.CategoricalDistribution):
        value = trial.suggest_categorical(name, among.choices)
    elif isinstance(among, optuna.distributions.IntDistribution):
        value = trial.suggest_int(name, among.low, among.high, log=among.log)
    else:
        value = trial.suggest_float(name, among.low, among.high, log=among.log)
    return value


def _categories(
    name: str, limits: Parameter, first: Value, values: Sequence[Value]
) -> Distribution | None:
    known: tuple[Value, ...] = limits.choices or (False, True)
    for value in values:
        if value not in known or isinstance(value, bool) != (not limits.choices):
            listed = ", ".join(map(_word, known))
            raise InputError(
                f"tune.space: {name}: {_word(value)} is not one of its choices",
                f"choices: {listed}",
            )
    choices = list(dict.fromkeys([first, *values]))
    return optuna.distributions.CategoricalDistribution(choices) if len(choices) > 1 else None


def _range(
    name: str, limits: Parameter, first: Value, values: Sequence[Value] | None
) -> Distribution | None:
    if values is None:
        return None
    numbers = [float(value) for value in values if not isinstance(value, (bool, str))]
    shown = f"[{', '.join(map(_word, values))}]"
    if (
        len(values) != 2
        or len(numbers) != 2
        or not limits.low <= numbers[0] <= numbers[1] <= limits.high
    ):
        raise InputError(
            f"tune.space: {name}: {shown} is not a range within [{limits.low:g}, {limits.high:g}]",
            limits.doc,
        )
    start = float(first) or (numbers[1] if limits.log else 0.0)  # no logarithmic range has a 0
    low = min(numbers[0], start)
    high = max(numbers[1], start)
    log = limits.log and low > 0
    if isinstance(first, int):
        return optuna.distributions.IntDistribution(int(low), int(high), log=log)
    return optuna.distributions.FloatDistribution(low, high, log=log)


def _word(value: Value) -> str:
    """A value as YAML spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


def sweep(distribution: Distribution) -> list[Value]:
    """`SWEEP_POINTS` values from end to end of a range, spaced as in the search; or all choices."""
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        return list(distribution.choices)
    space = np.geomspace if distribution.log else np.linspace
    values = space(distribution.low, distribution.high, SWEEP_POINTS)
    if isinstance(distribution, optuna.distributions.IntDistribution):
        return sorted(set(np.round(values).astype(int).tolist()))
    return [float(value) for value in values]
