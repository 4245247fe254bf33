"""tuning.json: what was searched, what was found, and how it does on windows that the search did
not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from toolkit.files.profile import MEASURED_SECTIONS
from toolkit.files.recipe import Recipe
from toolkit.files.strict import Envelope, Strict
from toolkit.units import number

# The limits of a recipe, and what is predicted beside each: kept, broken, or not predicted.

OOM = "oom_percent"
EVICTED = "evicted_percent"
ATTAINMENT = "sla_attainment_lower_percent"
# the share of a latency target that is used where no request is served: files hold no infinity
UNSERVED = 1e9
UNITS = {"s": "s", "percent": "%"}  # by the end of a limit's name


class Limit(Strict):
    """A limit of a recipe: a latency target, or a share in percent; and what a tuning predicts."""

    name: str = Field(description="the metric; the end of its name is the unit")
    bound: Literal["at most", "at least"]
    limit: float
    predicted: float | None = Field(
        default=None, description="held out; None: not predicted, or no request is served"
    )
    kept: bool | None = Field(default=None, description="None: not predicted")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Limit:
        if (self.predicted is None) != (self.kept is None) and self.kept is not False:
            raise ValueError(f"{self.name}: 'predicted' and 'kept' belong together")
        return self

    def judged(self, predicted: float | None, *, kept: bool) -> Limit:
        """The same limit with a prediction; None where it is broken because no request is served."""
        return self.model_copy(update={"predicted": predicted, "kept": kept})

    def unpredicted(self) -> Limit:
        """The same limit without a prediction."""
        return self.model_copy(update={"predicted": None, "kept": None})

    def allowed(self) -> str:
        """The limit in words: 'at most 1.5 s'."""
        return f"{self.bound} {self._shown(self.limit)}"

    def told(self) -> str:
        """The predicted value with its unit, or why there is none."""
        if self.predicted is None:
            return "not predicted" if self.kept is None else "unknown: no request is served"
        return self._shown(self.predicted)

    def _shown(self, value: float) -> str:
        near = self.predicted is not None and number(self.predicted) == number(self.limit)
        text = f"{value:.6g}" if near else number(value)
        return f"{text} {UNITS.get(self.name.rpartition('_')[2], '')}".rstrip()


def share_used(share: float) -> str:
    """A share of a limit that is used up, in words: 'at 95% of its limit'."""
    return (
        "broken, since no request is served"
        if share >= UNSERVED
        else f"at {share:.0%} of its limit"
    )


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


# How the lengths of a trace were made to fit a model: the numbers, and what they mean for a
# result.
#
# Commands write these numbers into their files and their `--json`, and say the words wherever a
# result rests on such requests.

NOTABLE_DIVISOR = 2.0  # beyond it the requests are other requests, and every result has to say so


class ScaledLengths(Strict):
    """What was done to the prompts, or to the outputs. Lengths are in tokens."""

    limit_tokens: int = Field(description="the longest that fits")
    percentile_99_tokens: float = Field(description="in the trace")
    longest_tokens: int = Field(description="in the trace")
    mean_tokens: float = Field(description="in the trace")
    divisor: float = Field(description="what every length was divided by; 1: nothing was divided")
    clipped: int = Field(description="requests that were cut to the limit after the division")
    scaled_mean_tokens: float = Field(description="after division and clipping")


class Scaling(Strict):
    """What was done to the lengths of a trace so that prompt + output fit a context."""

    requests: int
    max_model_len: int
    max_new_tokens: int
    model_context: int | None = Field(
        default=None,
        description="model.config.max_position_embeddings of the recipe; none: not said",
    )
    prompts: ScaledLengths
    outputs: ScaledLengths

    @property
    def notable(self) -> bool:
        """Whether the requests are so far from the trace's that each result has to say so."""
        return max(self.prompts.divisor, self.outputs.divisor) > NOTABLE_DIVISOR

    def summary(self) -> str:
        """All that was done, in one line."""
        both = (("prompts", self.prompts), ("outputs", self.outputs))
        return "; ".join(f"{name} {self._done(one)}" for name, one in both)

    def divided(self) -> str:
        """What was divided, and by how much: 'prompts divided by 11.91'; '' where nothing was."""
        both = (("prompts", self.prompts), ("outputs", self.outputs))
        return ", ".join(
            f"{name} divided by {one.divisor:.4g}" for name, one in both if one.divisor > 1.0
        )

    def warnings(self) -> list[str]:
        """What a reader of a result must know, a sentence each; none where nothing is `notable`."""
        if not self.notable:
            return []
        both = (("prompts", self.prompts), ("outputs", self.outputs))
        divided = ", ".join(
            f"{name} are divided by {one.divisor:.4g}"
            f" (mean {one.mean_tokens:,.0f} -> {one.scaled_mean_tokens:,.0f} tokens)"
            for name, one in both
            if one.divisor > NOTABLE_DIVISOR
        )
        lines = [f"not the trace's own requests: {divided}"]
        if self.prompts.divisor > NOTABLE_DIVISOR:
            lines.append(self._context())
        if self.outputs.divisor > NOTABLE_DIVISOR:
            lines.append(f"max_new_tokens: {self.max_new_tokens} is what cuts the outputs")
        return lines

    def _done(self, one: ScaledLengths) -> str:
        parts = []
        if one.divisor > 1.0:
            edge = f"99th percentile {one.percentile_99_tokens:.0f} -> {one.limit_tokens}"
            parts.append(f"divided by {one.divisor:.4g} ({edge})")
        if one.clipped:
            share = (
                f"{one.clipped:,} of {self.requests:,}, {100 * one.clipped / self.requests:.1f} %"
            )
            parts.append(f"clipped to {one.limit_tokens} tokens ({share})")
        return ", ".join(parts) or f"unchanged: all within {one.limit_tokens} tokens"

    def _context(self) -> str:
        """What cuts the prompts: the recipe, or the model itself."""
        now, context = f"max_model_len: {self.max_model_len}", self.model_context
        if context is None:
            return f"{now} is what cuts the prompts; raise it if the model takes more"
        if context <= self.max_model_len:
            return (
                f"the model takes no more than {context:,} tokens, which is what cuts the prompts"
            )
        longest_output = max(self.max_new_tokens, self.outputs.longest_tokens)
        if self.prompts.longest_tokens + longest_output <= context:
            return f"the model takes {context:,} tokens, so every prompt as it is; {now} in the recipe is what cuts"
        left = max(1.0, self.prompts.percentile_99_tokens / (context - self.max_new_tokens))
        return (
            f"the model takes {context:,} tokens; {now} in the recipe is what cuts:"
            f" with {context} prompts would be divided by {left:.4g}"
        )


ParameterValue = bool | int | float | str


class Outcome(Strict):
    """A policy with parameters on a set of windows: metric name (with its unit) to value."""

    policy: str
    parameters: dict[str, ParameterValue]
    metrics: dict[str, float]


class Trial(Strict):
    """One trial of the search, on the search windows."""

    number: int
    outcome: Outcome
    feasible: bool


class Sensitivity(Strict):
    """How far the objective moves when one parameter of the best is swept over its range, the
    others kept.
    """

    parameter: str
    values: list[ParameterValue]
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
    """How the fit's error moves the verdict: the held-out windows again, under laws drawn around
    the fitted ones.
    """

    method: Literal["profile", "held-out errors"] = Field(
        description="laws refitted to resampled measurements, or scaled by their stated held-out errors"
    )
    draws: int
    defaults_goodput_rps: Interval
    best_goodput_rps: Interval
    gain_percent: Interval | None = Field(
        description="None where the defaults have no goodput in a draw"
    )
    better_percent: float = Field(
        description="share of the draws in which the best beats the defaults"
    )


class SizingRow(Strict):
    """Settings with so many workers on all windows, and the limit that they come nearest to, or
    break most.
    """

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
    """A recipe that ships for the same model and GPU with another engine, simulated with its
    shipped fit.

    On the held-out windows, at the same rate, with its own policy and parameters.
    """

    recipe: str
    engine: str
    analytic: bool = Field(
        description="whether its fit was reckoned from data sheets, not measured"
    )
    workers: int = Field(description="as many as the tuned recipe has; of a server 1")
    held_out: Outcome
    usage: dict[str, float] = Field(
        description="each limit's share that is used up; above 1 it is broken"
    )
    feasible: bool
    up_to_rps: float | None = Field(
        description="highest rate found at which it keeps all limits; None: none was found"
    )


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


class TuningWindow(Strict):
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
    recipe_sections: ClassVar[tuple[str, ...]] = (
        *MEASURED_SECTIONS,
        "sla",
        "policy",
        "tune",
        "serve",
    )

    recipe_name: str
    seed: int
    sla: dict[str, float]
    workers: int
    request_rate_rps: float = Field(
        description="mean rate that the trace was scaled to, or its own"
    )
    trace_notes: list[str] = Field(description="what was done to the trace")
    scaling: Scaling | None = Field(
        default=None, description="what was done to the trace's lengths"
    )
    window_length: WindowLength | None = None
    search_windows: list[TuningWindow]
    held_out_windows: list[TuningWindow]
    trials: list[Trial]
    defaults_held_out: Outcome
    best_held_out: Outcome
    gain_percent: float | None = Field(
        description="goodput of the best over the defaults', held out; None from zero"
    )
    binding_sla: str | None = Field(
        description="of what is recommended: the target that is nearest to its limit, or beyond it"
    )
    binding_ratio: float | None = Field(description="that target's value over its limit")
    keep_defaults: bool = Field(description="True where the search found nothing better held out")
    limits: list[Limit] = Field(
        description="every limit, and what the recommended settings give beside it, held out"
    )
    keeps_limits: bool = Field(description="whether the recommended settings keep all of them")
    sensitivity: list[Sensitivity]
    usage: dict[str, float] = Field(
        default={},
        description="what is recommended, held out: each limit's share that is used up; above 1 it is broken",
    )
    policies: list[PolicyResult] = Field(default=[], description="the recipe's own first")
    latency_metric: str = Field(
        default="e2e_p95_s", description="what `front` weighs goodput against"
    )
    front: list[int] = Field(
        default=[],
        description="trials that none beats in both goodput and latency, by rising latency",
    )
    uncertainty: Uncertainty | None = None
    sizing: Sizing | None = Field(
        default=None, description="where the number of workers was asked for"
    )

    engines: list[str] = Field(
        default=[],
        description="the recipe's, and of a fleet the others'; what is recommended is the best that they run",
    )
    alternatives: Alternatives | None = Field(default=None, description="none for a fleet")

    @property
    def recommended(self) -> Outcome:
        """The settings that the tuning advises, held out: the best, or the defaults where they are
        kept.
        """
        return self.defaults_held_out if self.keep_defaults else self.best_held_out

    @model_validator(mode="after")
    def _says_what_its_limits_say(self) -> Tuning:
        if self.keeps_limits == bool(broken(self.limits)):
            raise ValueError(f"keeps_limits: {self.keeps_limits}: `limits` say otherwise")
        return self
