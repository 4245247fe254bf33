"""live-tuning.json: what a search on a running server measured, and what was predicted of it."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from toolkit.files.strict import Envelope, Strict, optional
from toolkit.files.tuning import ParameterValue


class BurstFigures(Strict):
    """What a short burst of a trace was served like, measured or simulated: means of bursts."""

    score: float = Field(description="goodput in requests/s; between equals, the lower mean E2E")
    goodput_rps: float
    attained_percent: float = Field(description="of the requests, within every target")
    ttft_mean_s: float
    e2e_mean_s: float


class LiveTrial(Strict):
    """Settings that the server was given, and its bursts with them."""

    settings: dict[str, ParameterValue]
    bursts: int
    rounds: int = Field(description="how many rounds of the halving it took part in")
    first: BurstFigures = Field(description="of its burst in the first round")
    predicted: BurstFigures = Field(description="of the same burst, before any measurement")


class PredictionError(Strict):
    """How far predictions of the first round's bursts were from the measured ones."""

    ttft_percent: float = Field(description="median of the absolute errors of mean TTFT")
    e2e_percent: float
    rank_correlation: float = Field(description="of the scores, Spearman's; 1: the same order")


class LiveInterval(Strict):
    """A gain over the settings of the start, in percent of their score, with its 95 % interval."""

    percent: float
    low_percent: float
    high_percent: float
    blocks: int = Field(description="A B B A blocks that it was measured in")


class LiveTuning(Envelope):
    """live-tuning.json, whole."""

    remake: ClassVar[str] = "llmctl tune PLAN --live URL"

    recipe_name: str
    url: str
    minutes: float
    spent_s: float
    window_s: float
    rate_rps: float
    sla: dict[str, float]
    bursts: int
    start: dict[str, ParameterValue] = Field(description="the settings before")
    best: dict[str, ParameterValue] = Field(
        description="those of the highest measured gain, sure or not; the start's: none had any"
    )
    gain: LiveInterval | None = optional("of the best; none: too few blocks were measured")
    sure: bool = Field(description="whether the interval of the gain is above 0")
    applied: bool = Field(description="whether the server has the best settings now")
    trials: list[LiveTrial]
    prediction: PredictionError
