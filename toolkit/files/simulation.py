"""What `simulate --json` prints of one run and of several, version 1.

Keys may be added within a version; removing or renaming a key, or changing its meaning, makes the
next version. docs/reference/simulation.md lists the keys, and a test compares that page with
these models.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from toolkit.files.capacity import Requests
from toolkit.files.strict import Strict
from toolkit.files.tuning import ParameterValue

Verdict = Literal["kept", "broken", "overloaded"] | None


class Simulation(BaseModel):
    """One run: these keys, and every metric as a number with its unit in its name."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, float] = Field(init=False)

    schema_version: Literal[1] = 1
    policy: str = Field(description="its name")
    router: str | None = Field(description="before replicas; null: none")
    parameters: dict[str, ParameterValue] = Field(
        description="all parameters of the policy, defaults included"
    )
    workers: int
    seed: int = Field(description="of the draws")
    sla: dict[str, float] = Field(
        description="targets in seconds, of --sla, or of the tuning or the recipe"
    )
    verdict: Verdict = Field(
        default=None,
        description="all targets are kept; one is not; or the queue grows with the trace; null "
        "without targets",
    )
    trace: Requests = Field(description="which requests were simulated")
    concurrency: int = Field(description="requests at once, --concurrency; 0: they came by time")


class ComparedRun(Strict):
    """One policy before one router at one rate."""

    policy: str = Field(description="its name")
    router: str | None = Field(description="before replicas; null: none")
    parameters: dict[str, ParameterValue] = Field(
        description="all parameters of the policy, defaults included"
    )
    rate_rps: float = Field(
        description="mean rate of arrivals, requests per second; 0: all come at once"
    )
    servable: bool = Field(description="false: the fit's engine cannot run the policy")
    refusal: str | None = Field(description="why the engine cannot run it; null where it can")
    problem: str = Field(description="why there are no metrics; empty where there are")
    verdict: Verdict = Field(description="as of one run; null without targets or metrics")
    metrics: dict[str, float] = Field(description="every metric, with its unit in its name")


class Comparison(Strict):
    """Several runs."""

    schema_version: Literal[1] = 1
    sla: dict[str, float] = Field(
        description="targets in seconds, of --sla, or of the tuning or the recipe"
    )
    trace: Requests = Field(description="which requests were simulated")
    concurrency: int = Field(description="requests at once, --concurrency; 0: they came by time")
    workers: int
    seed: int = Field(description="of the draws")
    interrupted: bool = Field(description="true: Ctrl-C ended it, and runs are missing")
    runs: list[ComparedRun] = Field(
        description="by rate, then by goodput (throughput without targets), then by mean E2E, "
        "the best first"
    )
