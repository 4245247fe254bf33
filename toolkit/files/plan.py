"""plan.json: exactly what `llmctl serve` starts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe, Workers
from toolkit.files.strict import Envelope, Strict, optional
from toolkit.files.tuning import Limit, Outcome, Settings, judged_limits

PREDICTED = "predicted "  # how the keys of predicted metrics begin in a plan's explanation


class Explanation(Strict):
    """Where a planned value comes from."""

    value: str
    source: str


class PlannedWorkload(Strict):
    """The traffic that the plan was tuned for. Its predictions hold for this traffic."""

    trace: str = Field(description="file name of the trace; `inputs` has its sha256")
    request_rate_rps: float


class Plan(Envelope):
    """plan.json: self-contained, so that a server needs only this file."""

    schema_version: Literal[4] = 4  # type: ignore[assignment]
    remake: ClassVar[str] = "llmctl render RECIPE --fit FIT --tuning TUNING"

    recipe: Recipe
    fit: Fit
    workers: Workers
    settings: Settings = Field(description="policy and router have all their parameters")
    outcome: Outcome = Field(description="as the tuner predicts it on the trace; empty if untuned")
    explained: dict[str, Explanation]
    workload: PlannedWorkload | None = optional("none: it was not tuned")

    @property
    def limits(self) -> list[Limit]:
        """Every limit of the recipe, each with the tuner's prediction, if there is one."""
        return judged_limits(self.recipe, self.outcome)
