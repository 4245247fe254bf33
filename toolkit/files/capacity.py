"""What `llmctl capacity --json` prints, version 1, and its page shows.

Keys may be added within a version; removing or renaming a key, or changing its meaning, makes the
next version.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from toolkit.files.fit import LawRange
from toolkit.files.recipe import RouterSpec
from toolkit.files.strict import Strict
from toolkit.files.tuning import ParameterValue, Scaling
from toolkit.units import bracketed, number


class Requests(Strict):
    """The requests that the figures are about."""

    source: str = Field(description="the trace's file")
    requests: int = Field(description="how many")
    notes: list[str] = Field(description="what was done to them since they were read")
    scaling: Scaling | None = Field(
        description="how they were fitted to the model's context; null: they are the trace's own"
    )
    changes: str = Field(
        "", description="what makes them other ones than the trace's, in words; empty: nothing"
    )


class CapacityPoint(Strict):
    """One load that was simulated."""

    load: float = Field(description="requests per second, or requests at once")
    kept: bool = Field(description="whether every limit is kept")
    attainment_percent: float = Field(description="requests within all targets")
    goodput_rps: float = Field(description="requests per second within all targets")
    usage: dict[str, float] = Field(description="used share of each limit; above 1 it is broken")


class Needed(Strict):
    """The fewest workers that keep all limits at the wanted rate."""

    workers: int = Field(description="one less breaks a limit")
    gpus: int = Field(description="of all workers")
    usd_per_hour: float | None = Field(description="of all workers; null without a price")


class Cost(Strict):
    """What requests and tokens cost at the capacity, in US dollars.

    The price of an hour is divided by the requests that are served in it. The price of a request is
    divided among its tokens by the time that the fitted law of a pass gives them: computed prompt
    tokens, prompt tokens found in the cache, and output tokens.
    """

    usd_per_hour: float = Field(description="of all workers")
    usd_per_million_requests: float = Field(
        description="usd_per_hour over the requests that are served in an hour"
    )
    usd_per_million_in: float | None = Field(
        description="prompt tokens that are computed; null: no law of passes"
    )
    usd_per_million_cached: float | None = Field(
        description="prompt tokens found in the cache; null: none are, or no law of passes"
    )
    usd_per_million_out: float | None = Field(description="output tokens; null: no law of passes")


class LawInterval(Strict):
    """The capacity if true times are at the ends of the range that the law's error leaves. Both
    are interpolated between simulated rates.
    """

    low_rps: float | None = Field(
        description="with every time law.slow times as long; null: no rate that was tried is kept"
    )
    high_rps: float | None = Field(description="with every time law.fast times as long")
    law: LawRange

    @property
    def text(self) -> str:
        """Both ends in words: '13.1 to 15.2'."""
        ends = (self.low_rps, self.high_rps)
        return " to ".join("none" if end is None else number(end) for end in ends)


class CapacityOf(Strict):
    """The capacity of a recipe's settings."""

    recipe: str = Field(description="its name")
    settings: str = Field(
        description="'defaults', 'tuned', 'policy NAME', 'router NAME' or the words of --also"
    )
    changed: dict[str, JsonValue] = Field(
        default_factory=dict, description="keys of the recipe that --also changed, by their paths"
    )
    engine: str = Field(description="its name")
    policy: str = Field(description="its name")
    parameters: dict[str, ParameterValue] = Field(description="where they are not the defaults")
    router: RouterSpec | None = Field(description="before several replicas; null elsewhere")
    workers: int = Field(description="their number")
    gpus: int = Field(description="of all workers")
    judged_requests: int = Field(description="of the trace, which the figures are about")
    of_requests: int = Field(description="of the trace; if more, its busiest part was judged")
    repeats: int = Field(description="how often they are repeated at the capacity, to last enough")
    scaling: Scaling | None = Field(
        description="how the requests were fitted to the model's context; null: as they are"
    )
    changes: str = Field(
        description="what makes the requests other ones than the trace's, in words; empty: nothing"
    )
    capacity_rps: float | None = Field(
        description="highest rate at which every limit is kept, the trace's mean, of sessions as "
        "it was served; null: none that was tried"
    )
    at_least: bool = Field(description="the trace cannot be repeated enough for a higher rate")
    error_percent: float = Field(description="the lowest broken rate is this much higher")
    interval: LawInterval | None = Field(
        description="of capacity_rps, by the law's error; null: none that was tried"
    )
    binding: str | None = Field(description="the limit that breaks above it")
    concurrency: int | None = Field(
        description="most requests at once that keep every limit; null: none, or not searched"
    )
    concurrency_binding: str | None = Field(description="the limit that breaks above that")
    metrics: dict[str, float] = Field(description="at the capacity, with their units")
    cost: Cost | None = Field(description="at the capacity; null without a price")
    needed: Needed | None = Field(description="for the wanted rate; null: none keeps, or no rate")
    analytic: str | None = Field(description="what an analytic fit assumes; null: measured")
    curve: list[CapacityPoint] = Field(description="every rate that was simulated, rising")
    concurrency_curve: list[CapacityPoint] = Field(description="likewise, requests at once")

    @property
    def name(self) -> str:
        """The recipe and its settings."""
        return f"{self.recipe}{' with ' if self.changed else ', '}{self.settings}"

    @property
    def traffic(self) -> str:
        """What the figures are about: the whole trace, or which part, and what was changed."""
        part = "the whole trace"
        if self.judged_requests < self.of_requests:
            part = f"the busiest {self.judged_requests:,} of its {self.of_requests:,} requests"
            part += ", at the rate of the whole trace"
        return f"{part}{bracketed(self.changes)}"


class Capacities(Strict):
    """`capacity --json`."""

    schema_version: Literal[1] = 1
    trace: Requests = Field(description="which requests were simulated, for the first recipe")
    sla: dict[str, float] = Field(description="targets in seconds, of --sla or the first recipe")
    wanted_rps: float | None = Field(description="--rate")
    capacities: list[CapacityOf] = Field(description="of every recipe and setting")
