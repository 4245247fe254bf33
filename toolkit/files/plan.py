"""plan.json: exactly what `llmctl serve` starts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from toolkit.files.fit import Fit
from toolkit.files.recipe import Labels, Recipe, Workers
from toolkit.files.strict import Envelope, Strict
from toolkit.files.tuning import Limit, ParameterValue


class PlannedPolicy(Strict):
    """The policy and all its parameters."""

    name: str
    parameters: dict[str, ParameterValue]


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


class Kind(Strict):
    """Workers of one kind: what each loads and on what, the laws that hold for it, how many there
    are, and where.
    """

    recipe: Recipe
    fit: Fit
    workers: Workers
    nodes: Labels = Field(
        default={}, description="labels of a cluster's machines that it runs on; none: Ray's own"
    )


class Plan(Envelope):
    """plan.json, whole: self-contained, so that a server needs this one file.

    Of a fleet, `recipe` and `fit` are those of the first kind of workers, whose recipe also says
    what is served and how; `others` has the further kinds, and is not written where there are none.
    Workers are numbered kind by kind.
    """

    remake: ClassVar[str] = "llmctl render RECIPE --fit FIT --tuning TUNING"

    recipe: Recipe
    fit: Fit
    workers: Workers = Field(description="of all kinds")
    policy: PlannedPolicy
    predicted: dict[str, float] = Field(
        description="held-out metrics that the tuner predicts; empty if untuned"
    )
    limits: list[Limit] = Field(
        description="every limit of the recipe, and what the tuner predicts beside it"
    )
    explained: dict[str, Explanation]
    workload: PlannedWorkload | None = Field(default=None, description="none: it was not tuned")
    others: list[Kind] = Field(
        default=[], description="of a fleet: the kinds of workers besides the first"
    )
    nodes: Labels = Field(
        default={},
        description="of a fleet: those of the first kind; not written where none are said",
    )

    @property
    def kinds(self) -> list[Kind]:
        """All kinds of workers, in the order of their numbers."""
        first = self.workers - sum(kind.workers for kind in self.others)
        return [
            Kind(recipe=self.recipe, fit=self.fit, workers=first, nodes=self.nodes),
            *self.others,
        ]

    @model_validator(mode="after")
    def _the_first_kind_has_workers(self) -> Plan:
        others = sum(kind.workers for kind in self.others)
        if self.others and self.workers <= others:
            raise ValueError(
                f"workers: {self.workers}: the kinds besides the first have {others} already"
            )
        return self

    @model_serializer(mode="wrap")
    def _plain_where_it_is(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = handler(self)
        for name in ("others", "nodes"):
            if not getattr(self, name):
                written.pop(name, None)
        return written
