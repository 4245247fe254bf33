"""What there is to search: a policy's own parameters and ranges, narrowed by the recipe."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import optuna

from toolkit.errors import InputError, nearest
from toolkit.sched.policies import POLICIES
from toolkit.sched.policies.parameters import Value, defaults, knobs

Space = dict[str, optuna.distributions.BaseDistribution]


def search_space(policy: str, start: Mapping[str, Value], narrowed: Mapping[str, tuple[float, float]]) -> Space:
    """The distributions of the searchable parameters of `policy`; `narrowed` replaces ranges by name.

    Ranges are widened where needed so that `start`, the parameters that the search starts from, lies within.
    `InputError` for a name that is no searchable parameter, or a range outside the parameter's limits.
    """
    searchable = {name: knob for name, knob in knobs(POLICIES[policy]).items() if knob.search}
    for name in narrowed:
        if name not in searchable:
            raise InputError(
                f"tune.space: policy '{policy}' has no searchable parameter '{name}'", nearest(name, searchable)
            )
    space: Space = {}
    for name, knob in searchable.items():
        low, high = narrowed.get(name, knob.search or (knob.low, knob.high))
        if not knob.low <= low <= high <= knob.high:
            raise InputError(
                f"tune.space: {name}: [{low:g}, {high:g}] is not a range within [{knob.low:g}, {knob.high:g}]", knob.doc
            )
        first = float(start.get(name, defaults(POLICIES[policy])[name]))
        low, high = min(low, first), max(high, first)
        if isinstance(defaults(POLICIES[policy])[name], int):
            space[name] = optuna.distributions.IntDistribution(int(low), int(high), log=knob.log)
        else:
            space[name] = optuna.distributions.FloatDistribution(low, high, log=knob.log)
    return space


def sweep(distribution: optuna.distributions.BaseDistribution, points: int) -> list[float]:
    """`points` values from end to end of a range, spaced as it is searched."""
    assert isinstance(distribution, (optuna.distributions.IntDistribution, optuna.distributions.FloatDistribution))
    space = np.geomspace if distribution.log else np.linspace
    values = space(distribution.low, distribution.high, points)
    if isinstance(distribution, optuna.distributions.IntDistribution):
        return [float(value) for value in sorted(set(np.round(values).astype(int).tolist()))]
    return [float(value) for value in values]


def as_value(distribution: optuna.distributions.BaseDistribution, value: float) -> Value:
    """A swept value in the type of its parameter."""
    return int(value) if isinstance(distribution, optuna.distributions.IntDistribution) else value
