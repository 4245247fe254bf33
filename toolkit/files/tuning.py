"""tuning.json: what was searched, what was found, and how it does on windows that the search did not see."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from toolkit.files.envelope import Envelope, Strict
from toolkit.files.limits import Limit, broken
from toolkit.files.profile import MEASURED_SECTIONS
from toolkit.files.scaling import Scaling

Value = bool | int | float | str


class Outcome(Strict):
    """A policy with parameters on a set of windows: metric name (with its unit) to value."""

    policy: str
    parameters: dict[str, Value]
    metrics: dict[str, float]


class Trial(Strict):
    """One trial of the search, on the search windows."""

    number: int
    outcome: Outcome
    feasible: bool


class Sensitivity(Strict):
    """How far the objective moves when one parameter of the best is swept over its range, the others kept."""

    parameter: str
    values: list[Value]
    goodput_rps: list[float]
    swing_percent: float = Field(description="(best - worst) / best over the sweep, in percent")


class PolicyResult(Strict):
    """How one of the searched policies did: its best trial, again on the held-out windows."""

    policy: str
    trials: int
    best_trial: int
    held_out: Outcome
    feasible: bool = Field(description="whether it keeps every limit, held out")
    importance: dict[str, float] = Field(
        description="parameter to its share of what tells the best trials from the others (PED-ANOVA); may be empty"
    )
    refusal: str | None = Field(
        description="why the recipe's engine cannot serve it, which makes its figures a guess by that engine's laws; "
        "None where it can"
    )
    engines: list[str] = Field(default=[], description="the engines that can serve it")


class Interval(Strict):
    """The 5th, 50th and 95th percentile over the draws."""

    low: float
    median: float
    high: float


class Uncertainty(Strict):
    """How the fit's error moves the verdict: the held-out windows again, under laws drawn around the fitted ones."""

    method: Literal["profile", "held-out errors"] = Field(
        description="laws refitted to resampled measurements, or scaled by their stated held-out errors"
    )
    draws: int
    defaults_goodput_rps: Interval
    best_goodput_rps: Interval
    gain_percent: Interval | None = Field(description="None where the defaults have no goodput in a draw")
    better_percent: float = Field(description="share of the draws in which the best beats the defaults")


class SizingRow(Strict):
    """Settings with so many workers on all windows, and the limit that they come nearest to, or break most."""

    settings: str = Field(description="'recipe', or 'tuned for N' by a search with N workers")
    workers: int
    feasible: bool
    goodput_rps: float
    attainment_percent: float
    binding: str
    binding_ratio: float


class Sizing(Strict):
    """How many workers this trace needs: the answer keeps all limits, and one worker less does not."""

    workers: int
    settings: str
    one_more_keeps: bool | None = Field(
        description="False: one worker more breaks a limit again, so the answer stands on a peak; "
        "None: not tried, since a server is one worker"
    )
    rows: list[SizingRow]


class Sibling(Strict):
    """A recipe that ships for the same model and GPU with another engine, simulated with its shipped fit.

    On the held-out windows, at the same rate, with its own policy and parameters.
    """

    recipe: str
    engine: str
    analytic: bool = Field(description="whether its fit was reckoned from data sheets, not measured")
    workers: int = Field(description="as many as the tuned recipe has; of a server 1")
    held_out: Outcome
    usage: dict[str, float] = Field(description="each limit's share that is used up; above 1 it is broken")
    feasible: bool
    up_to_rps: float | None = Field(description="highest rate found at which it keeps all limits; None: none was found")


class Alternatives(Strict):
    """What else would serve this traffic, beside what is recommended. All of it was simulated."""

    feasible: bool = Field(description="whether the recommended settings keep all limits, held out")
    up_to_rps: float | None = Field(
        description="highest rate found at which they keep all limits, up to what they serve of a backlog; "
        "None: none was found"
    )
    best_of_all: str | None = Field(
        description="the searched policy that is best, where the recipe's engine cannot run it; None: nothing is better"
    )
    policies: list[Outcome] = Field(
        description="where limits are broken: policies of this engine that were not searched, and keep them"
    )
    siblings: list[Sibling]
    workers: int | None = Field(
        description="where limits are broken, and no sibling keeps them: so many workers do, with the best settings"
    )


class Window(Strict):
    """A stretch of the trace."""

    start_s: float
    end_s: float
    requests: int


class WindowLength(Strict):
    """How long the windows are, in seconds of the scaled trace."""

    wished_s: float | None = Field(description="by the recipe or --window; none: as long as fits")
    seconds: float
    longest_s: float = Field(description="as long as the trace allows, with gaps between windows")


class Tuning(Envelope):
    """tuning.json, whole."""

    remake: ClassVar[str] = "llmctl tune RECIPE --fit FIT --trace TRACE"
    recipe_sections: ClassVar[tuple[str, ...]] = (*MEASURED_SECTIONS, "sla", "policy", "tune", "serve")

    recipe_name: str
    seed: int
    sla: dict[str, float]
    workers: int
    request_rate_rps: float = Field(description="mean rate that the trace was scaled to, or its own")
    trace_notes: list[str] = Field(description="what was done to the trace")
    scaling: Scaling | None = Field(default=None, description="what was done to the trace's lengths")
    window_length: WindowLength | None = None
    search_windows: list[Window]
    held_out_windows: list[Window]
    trials: list[Trial]
    defaults_held_out: Outcome
    best_held_out: Outcome
    gain_percent: float | None = Field(description="goodput of the best over the defaults', held out; None from zero")
    binding_sla: str | None = Field(
        description="of what is recommended: the target that is nearest to its limit, or beyond it"
    )
    binding_ratio: float | None = Field(description="that target's value over its limit")
    keep_defaults: bool = Field(description="True where the search found nothing better held out")
    limits: list[Limit] = Field(description="every limit, and what the recommended settings give beside it, held out")
    keeps_limits: bool = Field(description="whether the recommended settings keep all of them")
    sensitivity: list[Sensitivity]
    usage: dict[str, float] = Field(
        default={},
        description="what is recommended, held out: each limit's share that is used up; above 1 it is broken",
    )
    policies: list[PolicyResult] = Field(default=[], description="the recipe's own first")
    latency_metric: str = Field(default="e2e_p95_s", description="what `front` weighs goodput against")
    front: list[int] = Field(
        default=[], description="trials that none beats in both goodput and latency, by rising latency"
    )
    uncertainty: Uncertainty | None = None
    sizing: Sizing | None = Field(default=None, description="where the number of workers was asked for")

    engines: list[str] = Field(
        default=[],
        description="the recipe's, and of a fleet the others'; what is recommended is the best that they run",
    )
    alternatives: Alternatives | None = Field(default=None, description="none for a fleet")

    @property
    def recommended(self) -> Outcome:
        """The settings that the tuning advises, held out: the best, or the defaults where they are kept."""
        return self.defaults_held_out if self.keep_defaults else self.best_held_out

    @model_validator(mode="after")
    def _says_what_its_limits_say(self) -> Tuning:
        if self.keeps_limits == bool(broken(self.limits)):
            raise ValueError(f"keeps_limits: {self.keeps_limits}: `limits` say otherwise")
        return self
