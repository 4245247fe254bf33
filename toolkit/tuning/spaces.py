"""What a search may try: each policy with the ranges of its parameters (`PolicySpace`).

The parts, in order: a space; the spaces behind routers, those of a fleet's kinds of servers, and
those of policies; the ranges of parameters; and sweeps over them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np
import optuna

from toolkit.errors import InputError, nearest
from toolkit.files.plan import Kind
from toolkit.files.recipe import PolicySpec, RouterSpec
from toolkit.files.tuning import Outcome, ParameterValue, searched_key
from toolkit.routing.routers import ROUTERS, refuse_unknown_router
from toolkit.sched.policies import KNOWN, ORACLES, POLICIES, make_any, refuse_oracle
from toolkit.sched.policies.parameters import Knob, Value, defaults, knobs, parameters
from toolkit.sim.world import flags_of
from toolkit.tuning.evaluate import EvaluationSetup, Task

T = TypeVar("T")

SWEEP_POINTS = 7
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


@dataclass(slots=True, frozen=True)
class PolicySpace:
    """A policy, its parameters at the start, and the distributions of the searched ones.

    A logarithmic range cannot hold 0, which means no bound. Where a parameter starts at 0, the
    upper end of its range stands for 0.

    With a `router`, the policy runs on replicas behind it. The names of the router's searched
    parameters are `router.parameter`. In a fleet of servers, `kinds` are the flags at the start of
    each kind after the first; the names of its searched ones are `kind.flag`.
    """

    policy: str
    start: Mapping[str, Value]
    distributions: Distributions
    router: RouterSpec | None = None
    kinds: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What is searched apart from other spaces; see `Outcome.key`."""
        return searched_key(self.policy, self.router.name if self.router else None)

    @property
    def twins(self) -> dict[str, str]:
        """The searched flags of further kinds, each with the first kind's of the same name."""
        named = {key: key.rpartition(".") for key in self.distributions}
        return {
            key: flag
            for key, (owner, _, flag) in named.items()
            if owner in self.kinds and flag in self.distributions
        }

    def first(self) -> dict[str, Value]:
        """The searched parameters at the start, as they would be drawn."""
        whole = parameters(make_any(self.policy, self.start)) | self._of_others()
        return {name: self._unbounded(name) or whole[name] for name in self.distributions}

    def task(self, setup: EvaluationSetup, values: Mapping[str, ParameterValue]) -> Task:
        """The candidate with these values of searched parameters, the others as at the start."""
        found: dict[str, dict[str, ParameterValue]] = {}
        for key, value in values.items():
            owner, _, name = key.rpartition(".")
            found.setdefault(owner, {})[name] = value
        router, own = self.router, found.get("", {})
        if router is not None:
            changed = {"parameters": router.parameters | found.get(router.name, {})}
            router = router.model_copy(update=changed)
        kinds = {name: {**start, **found.get(name, {})} for name, start in self.kinds.items()}
        return Task(setup, self.policy, {**self.start, **own}, router, kind_parameters=kinds)

    def values(self, outcome: Outcome) -> dict[str, ParameterValue]:
        """All parameters of an outcome of this space, by the names that `task` takes."""
        router = outcome.replica_router
        named = _named(router.name, router.parameters) if router else {}
        return {**outcome.every_parameter, **named}

    def in_turn(self) -> PolicySpace:
        """The space of the same policy on the same replicas, with requests to each in turn."""
        own = {k: among for k, among in self.distributions.items() if k not in self._of_router()}
        return replace(self, router=RouterSpec(), distributions=own)

    def _of_router(self) -> dict[str, Value]:
        return _named(self.router.name, self.router.parameters) if self.router else {}

    def _of_others(self) -> dict[str, Value]:
        """The parameters at the start of the router and the further kinds, as they are named."""
        found = self._of_router()
        for kind, flags in self.kinds.items():
            found |= _named(kind, flags)
        return found

    def value_of(self, name: str, drawn: Value) -> Value:
        """The value of a searched parameter that was drawn as `drawn`."""
        return 0 if drawn == self._unbounded(name) else drawn

    def _unbounded(self, name: str) -> int:
        """The drawn value that stands for 0 (no bound); 0 where no value does."""
        distribution = self.distributions[name]
        if (
            not isinstance(distribution, optuna.distributions.IntDistribution)
            or not distribution.log
        ):
            return 0
        known = defaults(KNOWN[self.policy]) | dict(self.start) | self._of_others()
        return 0 if known[name] else int(distribution.high)


def _named(owner: str, given: Mapping[str, T]) -> dict[str, T]:
    """The parameters of a router or a kind by the names that they have in a search."""
    return {f"{owner}.{name}": value for name, value in given.items()}


def with_kinds(own: PolicySpace, kinds: Sequence[Kind], workers: int) -> PolicySpace:
    """The space of a fleet's servers: with the flags of each kind after the first, which `kinds`
    are. A kind's flags start at its recipe's and have the ranges of its recipe's `tune.space`.

    Raises `InputError` for a kind with another policy, and for ranges as `make_spaces`.
    """
    starts, distributions = {}, dict(own.distributions)
    for kind in kinds:
        recipe = kind.recipe
        starts[recipe.name] = parameters(flags_of(kind, {}))
        [space] = make_spaces(recipe.policy, [], recipe.tune.space, workers)
        distributions |= _named(recipe.name, space.distributions)
    return replace(own, distributions=distributions, kinds=starts)


def router_spaces(
    space: PolicySpace,
    own: RouterSpec,
    routers: Sequence[str],
    narrowed: Narrowed,
    start_of: Callable[[str], RouterSpec],
) -> list[PolicySpace]:
    """The space behind the recipe's own router, then behind each of the other `routers`.

    In `routers`, "all" stands for all, "own" for the recipe's. `start_of` gives a router's
    parameters at the start. Keys of `narrowed` that are not `router.parameter` are left alone.
    Raises `InputError` for an unknown router or parameter, and a range that cannot be searched.
    """
    groups = {ALL: list(ROUTERS), OWN: [own.name]}
    for name in routers:
        if name not in groups:
            refuse_unknown_router(name, "tune.routers: ")
    wanted = [name for given in routers for name in groups.get(given, [given])]
    found = []
    for name in dict.fromkeys([own.name, *wanted]):
        router = start_of(name)
        given = {
            key.rpartition(".")[2]: values
            for key, values in narrowed.items()
            if key.rpartition(".")[0] == name
        }
        searched = _distributions(
            f"router '{name}'", knobs(ROUTERS[name]), router.parameters, given
        )
        named = {f"{name}.{parameter}": among for parameter, among in searched.items()}
        distributions = {**space.distributions, **named}
        found.append(replace(space, router=router, distributions=distributions))
    return found


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
    (`router_spaces`); keys of policies that are not searched are only checked. Raises `InputError`
    for an unknown policy or parameter, an oracle, or a range that cannot be searched.
    """
    groups = {ALL: known, OWN: [own.name]}
    for name in policies:
        if name not in groups and name not in KNOWN:
            raise InputError(
                f"tune.policies: there is no policy '{name}'", nearest(name, [*KNOWN, *groups])
            )
    wanted = [name for given in policies for name in groups.get(given, [given])]
    names = list(dict.fromkeys([own.name, *wanted]))
    for name in names:
        refuse_oracle(name)
    by_policy: dict[str, dict[str, Sequence[Value]]] = {name: {} for name in KNOWN}
    for key, values in narrowed.items():
        policy, dot, parameter = key.rpartition(".")
        if policy in ROUTERS:
            _distributions(
                f"router '{policy}'",
                knobs(ROUTERS[policy]),
                defaults(ROUTERS[policy]),
                {parameter: values},
            )
            continue
        if dot and policy not in KNOWN:
            raise InputError(
                f"tune.space: {key}: there is no policy or router '{policy}'",
                nearest(policy, [*KNOWN, *ROUTERS]),
            )
        by_policy[policy or own.name][parameter] = values
    spaces = {
        name: search_space(name, {}, given, workers)
        for name, given in by_policy.items()
        if name != own.name
    }
    spaces[own.name] = search_space(own.name, own.parameters, by_policy[own.name], workers)
    return [
        PolicySpace(name, own.parameters if name == own.name else {}, spaces[name])
        for name in names
    ]


def search_space(
    policy: str, start: Mapping[str, Value], narrowed: Narrowed, workers: int = 2
) -> Distributions:
    """The distributions of the searched parameters of `policy`.

    Searched are those with a search range and those in `narrowed`. The range of a number is
    [low, high]; a word or a boolean has choices. Ranges are widened to hold `start`, the parameters
    that the search starts from, except for a 0 in a logarithmic range (see `PolicySpace`). With one
    worker all routers are the same, so they are not searched. Raises `InputError` for an unknown
    parameter, and for a range outside the parameter's limits.
    """
    known, first = knobs(KNOWN[policy]), defaults(KNOWN[policy]) | dict(start)
    return _distributions(f"policy '{policy}'", known, first, narrowed, workers)


def _distributions(
    owner: str,
    known: Mapping[str, Knob],
    first: Mapping[str, Value],
    narrowed: Narrowed,
    workers: int = 2,
) -> Distributions:
    """The distributions of the searched ones of `known` parameters, which start at `first`."""
    for name in narrowed:
        if name not in known:
            hint = nearest(name, known) if known else "it has no parameters"
            raise InputError(f"tune.space: {owner} has no parameter '{name}'", hint)
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


def _categories(
    name: str, knob: Knob, first: Value, values: Sequence[Value]
) -> Distribution | None:
    known: tuple[Value, ...] = knob.choices or (False, True)
    for value in values:
        if value not in known or isinstance(value, bool) != (not knob.choices):
            listed = ", ".join(map(_word, known))
            raise InputError(
                f"tune.space: {name}: {_word(value)} is not one of its choices",
                f"choices: {listed}",
            )
    choices = list(dict.fromkeys([first, *values]))
    return optuna.distributions.CategoricalDistribution(choices) if len(choices) > 1 else None


def _range(
    name: str, knob: Knob, first: Value, values: Sequence[Value] | None
) -> Distribution | None:
    if values is None:
        return None
    numbers = [float(value) for value in values if not isinstance(value, (bool, str))]
    shown = f"[{', '.join(map(_word, values))}]"
    if (
        len(values) != 2
        or len(numbers) != 2
        or not knob.low <= numbers[0] <= numbers[1] <= knob.high
    ):
        raise InputError(
            f"tune.space: {name}: {shown} is not a range within [{knob.low:g}, {knob.high:g}]",
            knob.doc,
        )
    start = float(first) or (numbers[1] if knob.log else 0.0)  # no logarithmic range has a 0
    low, high = min(numbers[0], start), max(numbers[1], start)
    log = knob.log and low > 0
    if isinstance(first, int):
        return optuna.distributions.IntDistribution(int(low), int(high), log=log)
    return optuna.distributions.FloatDistribution(low, high, log=log)


def _word(value: Value) -> str:
    """A value as YAML spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


def sweep(distribution: Distribution, points: int) -> list[Value]:
    """`points` values from end to end of a range, spaced as in the search; or all choices."""
    if isinstance(distribution, optuna.distributions.CategoricalDistribution):
        return list(distribution.choices)
    space = np.geomspace if distribution.log else np.linspace
    values = space(distribution.low, distribution.high, points)
    if isinstance(distribution, optuna.distributions.IntDistribution):
        return sorted(set(np.round(values).astype(int).tolist()))
    return [float(value) for value in values]


def sweeps(
    space: PolicySpace, chosen: Mapping[str, ParameterValue]
) -> list[dict[str, ParameterValue]]:
    """The candidates of `sensitivity`: each parameter over its range, the rest `chosen`."""
    return [
        {**chosen, name: value}
        for name, distribution in space.distributions.items()
        for value in sweep(distribution, SWEEP_POINTS)
    ]
