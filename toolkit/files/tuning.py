"""tuning.json: the search, its result, and how that does on the whole trace.

In this order: settings, their outcome, and both together; the limits of a recipe (kept, broken or
not predicted); how the lengths of a trace were scaled to fit a model (in numbers and in words); the
result of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from toolkit.files.fit import LawRange
from toolkit.files.profile import MEASURED_SECTIONS, AnalyticError
from toolkit.files.recipe import Recipe, RouterSpec, ScalingSpec
from toolkit.files.strict import Envelope, Strict, optional
from toolkit.units import number

OOM = "oom_percent"
EVICTED = "evicted_percent"
REFUSED = "refused_percent"
BEHIND = "behind_percent"  # how far behind arrivals a server is at the end of the trace
ATTAINMENT = "sla_attainment_lower_percent"
# The lower confidence bound is what the limit is about. The used share has the attainment's name.
SHARE_NAMES = {ATTAINMENT: "sla_attainment_percent"}
MOST_BEHIND_PERCENT = 5.0  # a server that is further behind does not keep up
# The used share of a latency target where no request is served; files cannot hold infinity.
UNSERVED = 1e9
UNITS = {"s": "s", "percent": "%"}  # by the end of a limit's name
# Beyond this divisor, scaled requests differ so much that every result has to say so.
NOTABLE_DIVISOR = 2.0

ParameterValue = bool | int | float | str


class Settings(Strict):
    """What is chosen for a deployment: a policy with its parameters, a router, a scaling rule."""

    policy: str
    parameters: dict[str, ParameterValue]
    replica_router: RouterSpec | None = optional(
        "before several replicas of a server, with all its parameters; none elsewhere"
    )
    scaling: ScalingSpec | None = optional(
        "where replicas come and go, with all its parameters; none: their number is fixed"
    )

    @property
    def key(self) -> str:
        """What is searched apart from others: the policy, or the policy behind a router."""
        router = self.replica_router
        return f"{self.policy} behind {router.name}" if router else self.policy


class Outcome(Strict):
    """What comes out where requests are served on a deployment."""

    metrics: dict[str, float] = Field(description="value by name, which ends with the unit")
    used: dict[str, float] = Field(description="used share of each limit; above 1 it is broken")

    @property
    def kept(self) -> bool:
        """Whether every limit is kept."""
        return all(share <= 1.0 for share in self.used.values())

    @property
    def binding(self) -> str | None:
        """The limit that binds; None without limits."""
        return max(self.used, key=lambda name: self.used[name], default=None)


NO_OUTCOME = Outcome(metrics={}, used={})  # nothing was simulated or measured


class Evaluation(Strict):
    """Settings, and their outcome on windows of a trace or on the whole of it."""

    settings: Settings
    outcome: Outcome
    screened_out: bool = Field(
        False,
        description="the first part of each window broke a limit, so that the rest was not "
        "simulated: the outcome is of that part",
    )

    @property
    def metrics(self) -> dict[str, float]:
        """See `Outcome.metrics`."""
        return self.outcome.metrics

    @property
    def goodput_rps(self) -> float:
        """Requests per second that meet every latency target (`toolkit.metrics`); without targets
        the throughput.
        """
        return self.metrics["goodput_rps"]


class Limit(Strict):
    """A limit of a recipe (a latency target or a share in percent) and a tuning's prediction."""

    name: str = Field(description="the metric; the end of its name is the unit")
    bound: Literal["at most", "at least"]
    limit: float
    predicted: float | None = optional("None: not predicted, or no request is served")
    kept: bool | None = optional("None: not predicted")

    @model_validator(mode="after")
    def _both_or_neither(self) -> Limit:
        if (self.predicted is None) != (self.kept is None) and self.kept is not False:
            raise ValueError(f"{self.name}: 'predicted' and 'kept' belong together")
        return self

    def of(self, outcome: Outcome) -> Limit:
        """Return the limit with its value in an outcome; without one where it is not judged."""
        share = outcome.used.get(SHARE_NAMES.get(self.name, self.name))
        if share is None:
            return self
        value: float | None = outcome.metrics.get(self.name, 0.0)
        if self.name.endswith("_s"):  # the metric is of windows, the share of all their requests
            value = None if share >= UNSERVED else share * self.limit
        return self.model_copy(update={"predicted": value, "kept": share <= 1.0})

    def allowed(self) -> str:
        """The limit in words: 'at most 1.5 s'."""
        return f"{self.bound} {self._shown(self.limit)}"

    def prediction(self) -> str:
        """The predicted value with its unit, or why there is none."""
        if self.predicted is None:
            return "not predicted" if self.kept is None else "unknown: no request is served"
        return self._shown(self.predicted)

    def _shown(self, value: float) -> str:
        near = self.predicted is not None and number(self.predicted) == number(self.limit)
        text = f"{value:.6g}" if near else number(value)
        return f"{text} {UNITS.get(self.name.rpartition('_')[2], '')}".rstrip()


KEEPS_UP = Limit(name=BEHIND, bound="at most", limit=MOST_BEHIND_PERCENT)


def recipe_limits(recipe: Recipe) -> list[Limit]:
    """Every limit of `recipe`, its latency targets first, without predictions."""
    spec = recipe.tune
    most: dict[str, float | None] = {
        **recipe.sla,
        OOM: spec.max_oom_percent,
        EVICTED: spec.max_evicted_percent,
        REFUSED: spec.max_refused_percent,
    }
    limits = [
        Limit(name=key, bound="at most", limit=limit)
        for key, limit in most.items()
        if limit is not None
    ]
    if spec.min_attainment_percent is not None:
        limits.append(Limit(name=ATTAINMENT, bound="at least", limit=spec.min_attainment_percent))
    return limits


def judged_limits(recipe: Recipe, outcome: Outcome) -> list[Limit]:
    """Return every limit of `recipe` with its value in an outcome, and how far the server is behind
    at the end, where that is judged.
    """
    limits = [*recipe_limits(recipe), *[KEEPS_UP] * (BEHIND in outcome.used)]
    return [limit.of(outcome) for limit in limits]


def broken(limits: Sequence[Limit]) -> list[Limit]:
    """The limits that are predicted to be broken."""
    return [limit for limit in limits if limit.kept is False]


def breaks(limits: Sequence[Limit]) -> str:
    """The broken limits as the end of a sentence: 'break 1 of 3 limits: ...'; '' for none."""
    values = [f"{one.name} is {one.prediction()} ({one.allowed()})" for one in broken(limits)]
    count = f"{len(values)} of {len(limits)} limit{'s' * (len(limits) > 1)}"
    return f"break {count}: {', '.join(values)}" if values else ""


class ScaledLengths(Strict):
    """How the prompts, or the outputs, were scaled. Lengths are in tokens."""

    limit_tokens: int = Field(description="the longest that fits")
    mean_tokens: float = Field(description="in the trace")
    divisor: float = Field(description="every length was divided by it; 1: nothing was divided")
    clipped: int = Field(description="requests that were cut to the limit after the division")
    scaled_mean_tokens: float = Field(description="after division and clipping")


class Scaling(Strict):
    """What was done to the requests of a trace so that prompt + output fit a context: for a server
    such as vLLM, longer ones are left out; for our own engines, lengths are divided and cut.

    Commands write these numbers into their files and their `--json`. They print the words of
    `changes` and `warnings` with every result that rests on such requests.
    """

    requests: int = Field(description="in the trace")
    max_model_len: int
    max_new_tokens: int
    model_context: int | None = optional("the model's max_position_embeddings; none: not known")
    prompts: ScaledLengths
    outputs: ScaledLengths
    left_out: int = Field(0, description="requests longer than `max_model_len`: not simulated")

    def summary(self) -> str:
        """Return all changes in words, or that there are none."""
        return self.changes() or "lengths unchanged"

    def changes(self) -> str:
        """Return all changes in words, for the sentence of a result: 'prompts divided by 3, 12
        outputs cut to 384 tokens', or '12 of 6,000 requests left out, longer than 8,192 tokens'; ''
        for none.
        """
        both = self._both()
        parts = [
            f"{name} divided by {lengths.divisor:.4g}"
            for name, lengths in both
            if lengths.divisor > 1.0
        ]
        parts += [
            f"{lengths.clipped:,} {name} cut to {lengths.limit_tokens:,} tokens"
            for name, lengths in both
            if lengths.clipped
        ]
        if self.left_out:
            which = f"{self.left_out:,} of {self.requests:,} requests left out"
            parts.append(f"{which}, longer than {self.max_model_len:,} tokens")
        return ", ".join(parts)

    def warnings(self) -> list[str]:
        """Return what a reader of a result must know, a sentence each: of lengths that are divided
        by more than `NOTABLE_DIVISOR`, and of requests that are left out.
        """
        lines = []
        if self.left_out:
            lines.append(f"{self.changes()}: {self._remedy()}")
        divided = ", ".join(
            f"{name} are divided by {lengths.divisor:.4g}"
            f" (mean {lengths.mean_tokens:,.0f} -> {lengths.scaled_mean_tokens:,.0f} tokens)"
            for name, lengths in self._both()
            if lengths.divisor > NOTABLE_DIVISOR
        )
        if divided:
            lines.append(f"not the trace's own requests: {divided}")
        if self.prompts.divisor > NOTABLE_DIVISOR:
            limit = f"max_model_len: {self.max_model_len} limits the prompts"
            lines.append(f"{limit}: {self._remedy()}")
        if self.outputs.divisor > NOTABLE_DIVISOR:
            lines.append(f"max_new_tokens: {self.max_new_tokens} limits the outputs")
        return lines

    def _remedy(self) -> str:
        """Return whether a longer context would help."""
        context = self.model_context
        if context is None:
            return "raise model.max_model_len where the model takes more"
        if context > self.max_model_len:
            return f"raise model.max_model_len, up to {context:,}"
        return "the model takes no more"

    def _both(self) -> tuple[tuple[str, ScaledLengths], ...]:
        return ("prompts", self.prompts), ("outputs", self.outputs)


def changes_in_words(scaling: Scaling | None, repeats: int = 1) -> str:
    """What makes requests other ones than the trace's, for the sentence of a result; '' for none.
    Every command's words come from here.
    """
    again = f"repeated {repeats} times" if repeats > 1 else ""
    return "; ".join(filter(None, [again, scaling.changes() if scaling else ""]))


class Sensitivity(Strict):
    """How far the objective moves when one parameter of the best is swept over its range."""

    parameter: str
    values: list[ParameterValue]
    goodput_rps: list[float]
    swing_percent: float = Field(description="(best - worst) / best over the sweep, in percent")


class PolicyResult(Strict):
    """The best settings of one policy (behind one router), on the whole trace."""

    best: Evaluation
    trials: int
    judged_requests: int = Field(description="fewer than the trace has: its busiest part")
    refusal: str | None = Field(
        description="why the engine cannot serve it, so its figures are a guess; None: it can"
    )
    engines: list[str] = Field([], description="the engines that can serve it")


class Interval(Strict):
    """The least, the median and the greatest over windows."""

    low: float
    median: float
    high: float


class HeldOutGain(Strict):
    """How the gain varies over the windows that the search did not see."""

    windows: int
    defaults_goodput_rps: Interval
    best_goodput_rps: Interval
    gain_percent: Interval | None = Field(
        description="None where the defaults have no goodput in a window"
    )
    better: int = Field(description="windows in which the best wins")


class Alternatives(Strict):
    """What else would serve this traffic, besides the recommended settings; all simulated."""

    best_of_all: str | None = Field(
        description="the best searched policy, if the engine cannot run it; None: nothing is better"
    )
    workers: int | None = Field(
        description="where limits are broken: how many workers keep them with these settings"
    )
    declined: Evaluation | None = optional(
        "settings that keep every limit with a notably lower mean E2E than the recommended ones, "
        "but nearer to a limit, beyond 0.8 of it, or with up to 1 % less goodput; None: there are "
        "none"
    )


class TuningWindow(Strict):
    """A stretch of the trace."""

    start_s: float
    end_s: float
    requests: int


class WindowLength(Strict):
    """The length of the windows, in seconds of the scaled trace, and what they leave out."""

    wished_s: float | None = Field(description="by the recipe; none: as long as fits")
    seconds: float
    longest_s: float = Field(description="the greatest that leaves gaps between windows")
    covered_percent: float = Field(description="of the trace's requests that are in a window")


class JudgedPart(TuningWindow):
    """What the verdict on the recommended settings is about, in seconds of the scaled trace."""

    of_requests: int = Field(description="of the trace; more than `requests`: its busiest part")

    @property
    def whole(self) -> bool:
        """Whether it is the whole trace."""
        return self.requests == self.of_requests


class TunedCapacity(Strict):
    """The highest rates at which settings keep all limits on the whole trace; None: there is none.

    `error_percent`: the lowest rate tried that breaks a limit is at most this much higher.
    """

    defaults_rps: float | None
    recommended_rps: float | None
    binding: str | None = Field(description="the limit that breaks above the recommended rate")
    error_percent: float
    repeats: int = Field(
        1, description="how often the trace is repeated there, to last long enough"
    )


class SlowEnd(Strict):
    """The recommended settings on the whole trace with times at the slow end of the law's range."""

    law: LawRange
    limits: list[Limit] = Field(description="every limit, with the prediction there")


class Tuning(Envelope):
    """tuning.json, whole."""

    schema_version: Literal[3] = 3  # type: ignore[assignment]
    remake: ClassVar[str] = "llmctl tune RECIPE --fit FIT --trace TRACE"
    recipe_sections: ClassVar[tuple[str, ...]] = (
        *MEASURED_SECTIONS,
        "sla",
        "policy",
        "tune",
        "serve",
    )

    recipe_name: str
    analytic: str | None = optional("what computed laws assume; None: they were measured")
    analytic_error: AnalyticError | None = optional("of computed laws; None: they were measured")
    seed: int
    sla: dict[str, float]
    workers: int
    request_rate_rps: float = Field(
        description="mean rate that the trace was scaled to, or its own"
    )
    concurrency: int | None = optional(
        "requests at once, whatever the trace's times; None: at the rate"
    )
    trace_notes: list[str] = Field(description="changes to the trace")
    scaling: Scaling | None = optional("how its requests were fitted to the model's context")
    changes: str = Field(
        "", description="what makes the requests other ones than the trace's; empty: nothing"
    )
    window_length: WindowLength | None = None
    search_windows: list[TuningWindow]
    held_out_windows: list[TuningWindow]
    trials: list[Evaluation] = Field(description="on the search windows, by their numbers from 0")
    judged: JudgedPart
    defaults: Evaluation = Field(description="the recipe's settings on the whole trace")
    best: Evaluation = Field(description="the best settings on the whole trace")
    further: list[Evaluation] = Field(
        [], description="candidates tried on the whole trace, since the first broke a limit there"
    )
    gain_percent: float | None = Field(
        description="goodput (without targets throughput) of the best over the defaults'; None "
        "from zero"
    )
    keep_defaults: bool = Field(description="True where the search found nothing better")
    capacity: TunedCapacity | None = optional("None: where it was not searched")
    limits: list[Limit] = Field(
        description="every limit, with the prediction for the recommended settings"
    )
    slow_end: SlowEnd | None = optional(
        "the recommended settings if the law's error makes everything slower; None: not simulated"
    )
    sensitivity: list[Sensitivity]
    policies: list[PolicyResult] = Field(
        [], description="the recipe's own first; of replicas, one for each router"
    )
    in_turn: Evaluation | None = optional(
        "of replicas: the best settings with requests to each replica in turn; the best ones are "
        "these where a router gains nothing"
    )
    latency_metric: str = Field("e2e_p95_s", description="the second axis of `front`")
    front: list[int] = Field(
        [], description="trials that no other beats in both goodput and latency, by rising latency"
    )
    held_out_gain: HeldOutGain | None = optional(
        "None: the best has the defaults' settings, or no window is held out"
    )
    engine: str = Field(description="the recommendation is the best policy that it runs")
    alternatives: Alternatives = Field(description="what else would serve this traffic")

    @property
    def load(self) -> str:
        """The load that it is about, in words."""
        if self.concurrency is not None:
            return f"{self.concurrency} requests at once"
        return f"{number(self.request_rate_rps)} requests/s"

    @property
    def recommended(self) -> Evaluation:
        """The recommended settings: the best, or the defaults where nothing is better."""
        return self.defaults if self.keep_defaults else self.best

    @property
    def keeps_limits(self) -> bool:
        """Whether the recommended settings keep every limit."""
        return self.recommended.outcome.kept

    @model_validator(mode="after")
    def _agrees_with_its_limits(self) -> Tuning:
        if self.keeps_limits == bool(broken(self.limits)):
            raise ValueError("limits: they contradict the used shares of the recommended settings")
        return self
