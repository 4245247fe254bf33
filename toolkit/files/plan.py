"""plan.json: exactly what `llmctl serve` starts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from toolkit.files.envelope import Envelope, Strict
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import Value


class PlannedPolicy(Strict):
    """The policy and all its parameters."""

    name: str
    parameters: dict[str, Value]


class Explanation(Strict):
    """Where a planned value comes from."""

    value: str
    source: str


class PlannedWorkload(Strict):
    """The traffic that the plan was tuned for, and that its predictions are about."""

    trace: str = Field(description="file name of the trace; `inputs` has its sha256")
    request_rate_rps: float
    workers_needed: int | None = Field(
        default=None, description="where the tuning looked for the fewest; of all servers"
    )


class Plan(Envelope):
    """plan.json, whole: self-contained, so that a server needs this one file."""

    remake: ClassVar[str] = "llmctl render RECIPE --fit FIT --tuning TUNING"

    recipe: Recipe
    fit: Fit
    workers: int
    policy: PlannedPolicy
    predicted: dict[str, float] = Field(description="held-out metrics that the tuner predicts; empty if untuned")
    explained: dict[str, Explanation]
    workload: PlannedWorkload | None = Field(default=None, description="none: it was not tuned")
