"""plan.json: exactly what `llmctl serve` starts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from toolkit.engine_traits import traits_of
from toolkit.files.fit import Fit
from toolkit.files.recipe import Labels, Recipe, RouterSpec, Workers
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
    workers_needed: int | None = optional(
        "the fewest, where the tuning searched for them; of all servers"
    )


class Kind(Strict):
    """Workers of one kind: their recipe, the fit that holds for them, their number and machines."""

    recipe: Recipe
    fit: Fit
    workers: Workers
    nodes: Labels = Field(
        {}, description="labels of the cluster machines it runs on; none: Ray's own"
    )


class Plan(Envelope):
    """plan.json: self-contained, so that a server needs only this file.

    In a fleet, `recipe` and `fit` belong to the first kind of workers; its recipe also says what
    is served and how. `others` has the further kinds and is omitted where it is empty. Workers are
    numbered kind by kind.
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
        description="every limit of the recipe, each with the tuner's prediction"
    )
    explained: dict[str, Explanation]
    workload: PlannedWorkload | None = optional("none: it was not tuned")
    others: list[Kind] = Field([], description="of a fleet: the kinds of workers besides the first")
    nodes: Labels = Field(
        {}, description="of a fleet: labels of the first kind's machines; omitted where empty"
    )
    replica_router: RouterSpec | None = optional(
        "before several replicas of a server, with all its parameters; else omitted"
    )

    @property
    def kinds(self) -> list[Kind]:
        """All kinds of workers, in the order of their numbers."""
        first = self.workers - sum(kind.workers for kind in self.others)
        return [
            Kind(recipe=self.recipe, fit=self.fit, workers=first, nodes=self.nodes),
            *self.others,
        ]

    @property
    def workers_needed(self) -> int | None:
        """The fewest workers that keep all limits, where the tuning searched for them."""
        return self.workload.workers_needed if self.workload else None

    @property
    def kind_numbers(self) -> list[int]:
        """The number of the kind of each worker."""
        return [number for number, kind in enumerate(self.kinds) for _ in range(kind.workers)]

    def policy_of(self, number: int) -> dict[str, ParameterValue]:
        """The parameters of the policy on a kind of workers: of a further kind of servers, those of
        its recipe, for each runs a scheduler of its own.
        """
        kind = self.kinds[number]
        if number and traits_of(kind.recipe.engine.name).server:
            return kind.recipe.policy.parameters
        return self.policy.parameters

    @property
    def kind_parameters(self) -> dict[str, dict[str, ParameterValue]]:
        """The parameters of each further kind of servers, by its name; see `Outcome`."""
        return {
            kind.recipe.name: kind.recipe.policy.parameters
            for kind in self.others
            if traits_of(kind.recipe.engine.name).server
        }

    def alone(self, number: int) -> Plan:
        """The plan of one kind of a fleet of servers, without the front and without predictions."""
        kind = self.kinds[number]
        recipe = kind.recipe.model_copy(
            update={"workers": kind.workers, "serve": self.recipe.serve}
        )
        policy = PlannedPolicy(name=self.policy.name, parameters=self.policy_of(number))
        changes: dict[str, object] = {"recipe": recipe, "fit": kind.fit, "workers": kind.workers}
        changes |= {"policy": policy, "others": [], "nodes": kind.nodes, "replica_router": None}
        return self.model_copy(
            update=changes | {"predicted": {}, "workload": None, "explained": {}, "limits": []}
        )

    @model_validator(mode="after")
    def _the_first_kind_has_workers(self) -> Plan:
        others = sum(kind.workers for kind in self.others)
        if self.others and self.workers <= others:
            raise ValueError(
                f"workers: {self.workers}: the kinds after the first have {others} of them"
            )
        return self

    @model_serializer(mode="wrap")
    def _omit_fleet_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        written: dict[str, object] = handler(self)
        for name in ("others", "nodes", "replica_router"):
            if not getattr(self, name):
                written.pop(name, None)
        return written
