"""profile.json: every sample that was measured, and what the engine said of itself."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from toolkit.files.envelope import Envelope, Strict

MEASURED_SECTIONS = ("model", "hardware", "engine", "workers", "profile")  # of the recipe: what measurements depend on


class PrefillPoint(Strict):
    """T_prefill(N, L), every repeat."""

    batch_size: int
    input_length: int
    seconds: list[float]


class DecodePoint(Strict):
    """One decode iteration at cached length l: tau(l, N), every repeat."""

    batch_size: int
    cached_length: int
    seconds: list[float]


class SlicePoint(Strict):
    """A whole slice through a worker process, all workers busy, from dispatch to result. Always wall time."""

    batch_size: int
    input_length: int
    steps: int
    seconds: float


class MemoryPoint(Strict):
    """The edge at one length: the largest batch that ran and the smallest that ran out of memory."""

    input_length: int
    steps: int
    largest_ok: int
    smallest_oom: int | None = Field(description="None where the probe stopped before the edge")


class PartPoint(Strict):
    """A part of a round (`toolkit.engines.protocol.RoundEngine.time_part`), every repeat."""

    part: Literal["join", "leave", "grow", "swap_out", "swap_in"]
    rows: int
    length: int = Field(description="tokens of the longest row")
    others: int = Field(description="rows that run beside them")
    seconds: list[float]


class RoundPoint(Strict):
    """A round through a worker process, all workers busy, from dispatch to result. Always wall time."""

    groups: list[tuple[int, int]] = Field(description="rows and longest input of each prefill")
    rows: int = Field(description="that decode")
    cached_length: int = Field(description="of the longest, before the first step")
    steps: int
    left: int = Field(description="rows that were dropped before or ended")
    seconds: float


class RoundSequence(Strict):
    """Rounds that follow one another on a worker, from an empty batch on."""

    rounds: list[RoundPoint]


class RoundsProfile(Strict):
    """What was measured of rounds, besides prefills and decode steps, which are rounds' own on such an engine."""

    parts: list[PartPoint]
    sequences: list[RoundSequence]
    memory: list[MemoryPoint] = Field(description="rows that were admitted one by one at a length; `steps` is 1")
    host_bytes: int = Field(description="host memory for caches, per worker; 0: caches are not swapped")


class FailedPoint(Strict):
    """A point that could not be measured, and why."""

    kind: Literal["prefill", "decode", "slice", "memory", "rounds", "join", "leave", "grow", "swap_out", "swap_in"]
    batch_size: int
    length: int
    reason: str


class EngineFacts(Strict):
    """What the engine resolved when it loaded: the numbers that a simulation must be fed."""

    engine: str
    engine_version: str
    model_type: str
    parameters: int
    dtype: str
    device: str
    threads: int | None
    kv_bytes_per_token: int
    kv_budget_bytes: int
    capacity_tokens: int
    max_model_len: int
    vocab_size: int
    prefill_emits_token: bool = Field(description="True: a slice of S tokens is a prefill and S - 1 decode iterations")
    max_rows: int | None = Field(default=None, description="requests that run at once; None: memory alone limits")
    analytic: str = Field(default="", description="nothing was measured: what was assumed instead")
    lacks: list[str] = Field(default=[], description="of a server: what it does not do as OpenAI's API has it")
    deepspeed: str = Field(
        default="", description="what init_inference made of the model: 'kernel injection' or 'pass-through', and why"
    )
    joining: Literal["embed", "shape"] | None = Field(
        default_factory=lambda facts: "embed" if facts["engine"] == "rebatch" else None,
        description="how rows join the running batch where that is one padded slab of rows x the longest; "
        "none: what rows hold adds up, as in a paged cache",
    )


class Profile(Envelope):
    """profile.json, whole."""

    remake: ClassVar[str] = "llmctl profile RECIPE"
    recipe_sections: ClassVar[tuple[str, ...]] = MEASURED_SECTIONS

    recipe_name: str
    workers: int
    clock: Literal["cpu", "wall"]
    engine: EngineFacts
    prefill: list[PrefillPoint]
    decode: list[DecodePoint]
    slices: list[SlicePoint]
    memory: list[MemoryPoint]
    failed: list[FailedPoint] = Field(default_factory=list)
    rounds: RoundsProfile | None = Field(default=None, description="none: the engine does not keep its rows")
