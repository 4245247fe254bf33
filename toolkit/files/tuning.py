"""tuning.json: what was searched, what was found, and how it does on windows that the search did not see."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from toolkit.files.envelope import Envelope, Strict
from toolkit.files.profile import MEASURED_SECTIONS

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
    values: list[float]
    goodput_rps: list[float]
    swing_percent: float = Field(description="(best - worst) / best over the sweep, in percent")


class Window(Strict):
    """A stretch of the trace."""

    start_s: float
    end_s: float
    requests: int


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
    search_windows: list[Window]
    held_out_windows: list[Window]
    trials: list[Trial]
    defaults_held_out: Outcome
    best_held_out: Outcome
    gain_percent: float | None = Field(description="goodput of the best over the defaults', held out; None from zero")
    binding_sla: str | None = Field(description="the target that is nearest to its limit, or beyond it")
    binding_ratio: float | None = Field(description="that target's value over its limit")
    keep_defaults: bool = Field(description="True where the search found nothing better held out")
    sensitivity: list[Sensitivity]
