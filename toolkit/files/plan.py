"""plan.json: exactly what `llmctl serve` starts."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from toolkit.files.fit import LAWS_FORMAT, Fit
from toolkit.files.recipe import Recipe, RouterSpec, Workers
from toolkit.files.strict import Envelope, Strict, optional
from toolkit.files.tuning import Limit, ParameterValue

PREDICTED = "predicted "  # how the keys of predicted metrics begin in a plan's explanation


class PlannedPolicy(Strict):
    """The policy and all its parameters."""

    name: str
    parameters: dict[str, ParameterValue]


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

    remake: ClassVar[str] = "llmctl render RECIPE --fit FIT --tuning TUNING"

    schema_version: Literal[3] = LAWS_FORMAT  # type: ignore[assignment]
    recipe: Recipe
    fit: Fit
    workers: Workers
    policy: PlannedPolicy
    predicted: dict[str, float] = Field(
        description="held-out metrics that the tuner predicts; empty if untuned"
    )
    limits: list[Limit] = Field(
        description="every limit of the recipe, each with the tuner's prediction"
    )
    explained: dict[str, Explanation]
    workload: PlannedWorkload | None = optional("none: it was not tuned")
    replica_router: RouterSpec | None = optional(
        "before several replicas of a server, with all its parameters; else omitted"
    )

    @model_serializer(mode="wrap")
    def _omit_router(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = handler(self)
        if self.replica_router is None:
            written.pop("replica_router", None)
        return written
