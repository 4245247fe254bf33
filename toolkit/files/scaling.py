"""scaling.json: scaling rules beside each other on one trace, and the one that is best."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from toolkit.files.capacity import Requests
from toolkit.files.recipe import ScaleSpec, ScalingSpec
from toolkit.files.strict import Envelope, Strict, optional
from toolkit.files.tuning import Outcome


class FleetCurve(Strict):
    """A fleet over time: values at equal distances, from the first arrival on."""

    ready: list[float] = Field(description="mean number of replicas that take requests")
    attainment_percent: list[float | None] = Field(
        description="requests that arrive then and keep every target; null: none arrives"
    )


class FleetResult(Strict):
    """A rule with its best settings, on the whole trace."""

    rule: str
    scaling: ScalingSpec = Field(description="all parameters of the rule and its behaviour")
    begin: int = Field(description="replicas at the beginning")
    outcome: Outcome = Field(description="metrics, and the used share of each limit")
    kept: bool = Field(description="every limit is kept, and nearly every request is served")
    failed: int = Field(description="requests that were lost with a replica, or never served")
    gpu_hours_per_day: float = Field(description="from the start of each replica to its end")
    usd_per_day: float | None = Field(description="null without a price")
    replicas_mean: float = Field(description="that take requests, mean over time")
    replicas_max: int
    starts: int = Field(description="replicas that were started after the beginning")
    period_s: float | None = optional("of the swings of a rule that never settles; none: it does")
    trials: int = Field(description="settings that were tried")
    curve: FleetCurve


class ScalingResult(Envelope):
    """scaling.json."""

    remake: ClassVar[str] = "llmctl autoscale RECIPE --trace TRACE"

    recipe_name: str
    trace: Requests
    sla: dict[str, float] = Field(description="targets in seconds")
    scale: ScaleSpec = Field(description="bounds, start times and intervals that were simulated")
    gpus_per_replica: int
    replica_rps: float = Field(
        description="requests/s that a replica among others serves within the targets"
    )
    hours: float = Field(description="from the first arrival of the trace to the last completion")
    step_s: float = Field(description="between two values of the curves")
    demand_rps: list[float] = Field(description="requests that arrive, over time")
    static: FleetResult | None = Field(description="the fewest replicas; null: `max` is too few")
    clairvoyant: FleetResult | None = Field(
        description="a schedule that knows the arrivals; null: none that was tried keeps the limits"
    )
    rules: list[FleetResult] = Field(description="those that keep the limits first, the best first")
    analytic: str | None = Field(description="what an analytic fit assumes; null: measured")

    @property
    def best(self) -> FleetResult | None:
        """What keeps the limits with the fewest GPU-hours: a rule, or the static fleet; None:
        nothing does.
        """
        able = [one for one in (*self.rules, self.static) if one is not None and one.kept]
        return min(able, key=lambda one: one.gpu_hours_per_day, default=None)

    def saved_percent(self, one: FleetResult) -> float | None:
        """Return how many percent fewer GPU-hours it takes than the static fleet; None without."""
        if self.static is None:
            return None
        return 100.0 * (1.0 - one.gpu_hours_per_day / self.static.gpu_hours_per_day)
