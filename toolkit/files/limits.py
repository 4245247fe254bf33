"""The limits of a recipe, and what is predicted beside each: kept, broken, or not predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from toolkit.files.envelope import Strict
from toolkit.files.recipe import Recipe
from toolkit.units import number

OOM = "oom_percent"
EVICTED = "evicted_percent"
ATTAINMENT = "sla_attainment_lower_percent"
UNITS = {"s": "s", "percent": "%"}  # by the end of a limit's name


class Limit(Strict):
    """A limit of a recipe: a latency target, or a share in percent; and what a tuning predicts."""

    name: str = Field(description="the metric; the end of its name is the unit")
    bound: Literal["at most", "at least"]
    limit: float
    predicted: float | None = Field(default=None, description="held out; None: not predicted")
    kept: bool | None = Field(default=None, description="None: not predicted")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Limit:
        if (self.predicted is None) != (self.kept is None):
            raise ValueError(f"{self.name}: 'predicted' and 'kept' belong together")
        return self

    def judged(self, predicted: float, *, kept: bool) -> Limit:
        """The same limit with a prediction."""
        return self.model_copy(update={"predicted": predicted, "kept": kept})

    def unpredicted(self) -> Limit:
        """The same limit without a prediction."""
        return self.model_copy(update={"predicted": None, "kept": None})

    def allowed(self) -> str:
        """The limit in words: 'at most 1.5 s'."""
        return f"{self.bound} {self._shown(self.limit)}"

    def told(self) -> str:
        """The predicted value with its unit; 'not predicted' without one."""
        return "not predicted" if self.predicted is None else self._shown(self.predicted)

    def _shown(self, value: float) -> str:
        near = self.predicted is not None and number(self.predicted) == number(self.limit)
        text = f"{value:.6g}" if near else number(value)
        return f"{text} {UNITS.get(self.name.rpartition('_')[2], '')}".rstrip()


def recipe_limits(recipe: Recipe) -> list[Limit]:
    """Every limit of `recipe`, its latency targets first, without predictions."""
    spec = recipe.tune
    found = [Limit(name=key, bound="at most", limit=limit) for key, limit in recipe.sla.items()]
    found.append(Limit(name=OOM, bound="at most", limit=spec.max_oom_percent))
    if spec.max_evicted_percent is not None:
        found.append(Limit(name=EVICTED, bound="at most", limit=spec.max_evicted_percent))
    if spec.min_attainment_percent is not None:
        found.append(Limit(name=ATTAINMENT, bound="at least", limit=spec.min_attainment_percent))
    return found


def broken(limits: Sequence[Limit]) -> list[Limit]:
    """Those that are predicted to be broken."""
    return [one for one in limits if one.kept is False]


def breaks(limits: Sequence[Limit]) -> str:
    """What is broken, as the end of a sentence: 'break 1 of 3 limits: ...'; '' where nothing is."""
    found = broken(limits)
    if not found:
        return ""
    told = ", ".join(f"{one.name} is {one.told()} ({one.allowed()})" for one in found)
    return f"break {len(found)} of {len(limits)} limit{'s' * (len(limits) > 1)}: {told}"
