"""fit.json: the laws of time and memory, their coefficients, held-out errors and validity."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from toolkit.catalogue.resolved import Resolved
from toolkit.files.profile import MEASURED_SECTIONS, EngineFacts
from toolkit.files.recipe import Workers
from toolkit.files.strict import Envelope, Strict, optional
from toolkit.laws.passes import HeldOutError, PassLaw, PassRange

LAWS_FORMAT: Literal[4] = 4  # of files that hold laws


class LawFit(Strict):
    """A fitted law: it has its held-out error, and where it was measured.

    Of prefills (SCLS paper, Eq. 3) it has terms pass, row, length, token and attended; of decode
    steps (Eq. 4) pass, row, length and cached.
    """

    law: PassLaw

    @property
    def error(self) -> HeldOutError:
        """The law's error on held-out points."""
        assert self.law.error is not None
        return self.law.error

    @property
    def valid(self) -> PassRange:
        """Where the law was measured."""
        return self.law.valid or PassRange()


class OverheadFit(Strict):
    """The time of a slice while all workers run: seconds = batch_s + stretch * T_serve.

    T_serve is the time by the laws.
    """

    batch_s: float = Field(ge=0)
    stretch: float = Field(gt=0)
    error: HeldOutError


class BatchRule(Strict):
    """Algorithm 2: with L + S above `length_above`, at most `max_batch_size` rows."""

    length_above: int
    max_batch_size: int


class MemoryFit(Strict):
    """The SCLS paper's law of memory (Eq. 5-9), or its rules (Algorithm 2).

    `zeta` is fitted from probes; `zeta_std` is the uncertainty of the edge.
    """

    form: Literal["zeta", "rules"]
    capacity_tokens: int = Field(ge=1)
    kv_bytes_per_token: int = Field(ge=1)
    zeta: float = Field(gt=0)
    zeta_std: float = Field(ge=0)
    workspace: float = Field(
        0.0,
        ge=0,
        description="memory of a prefill besides the cache: tokens of KV cache per input token",
    )
    rules: list[BatchRule] = Field([], description="by length_above, descending")

    @model_validator(mode="after")
    def _rules_in_order(self) -> MemoryFit:
        bounds = [rule.length_above for rule in self.rules]
        if bounds != sorted(set(bounds), reverse=True) or (self.form == "rules" and not bounds):
            raise ValueError(f"memory.rules: length_above {bounds} must descend, and not be empty")
        return self


class SwapFit(Strict):
    """Swapping between device and host memory: seconds = latency_s + bytes / rate, per cache."""

    latency_s: float = Field(ge=0)
    out_bytes_per_s: float = Field(gt=0)
    in_bytes_per_s: float = Field(gt=0)
    host_bytes: int = Field(description="host memory for caches, per worker")
    overlaps: bool = Field(
        True, description="transfers run beside compute; on a CPU the thread copies"
    )
    error: HeldOutError | None = optional("none: the link was stated, not measured")


class RoundsFit(Strict):
    """The time of a round besides its prefills and decode steps, and the memory rounds can use.

    `join` is per group of newcomers, in terms pass, row and token; `leave` per row that leaves, in
    terms row and cached; `grow` per decode step, in terms pass, row and cached. A round takes
    seconds = batch_s + stretch * (the sum of these parts and the laws).
    """

    join: PassLaw
    leave: PassLaw
    grow: PassLaw
    overhead: OverheadFit
    usable_share: float = Field(
        description="of the capacity that rows x the longest may fill while newcomers are prefilled"
    )


class StepsFit(LawFit):
    """A paged engine's forward pass, its KV cache, and its front.

    Where passes overlap, `law.graphs` says how they are launched.
    """

    launches: Literal["measured", "inferred", ""] = Field(
        "",
        description="of overlapping passes; inferred: from passes that waited for the next launch",
    )
    front_s: float = Field(
        description="a client's wait for a first token besides passes: HTTP and text, both ways"
    )
    front_row_s: float = Field(description="what each running row adds to that")
    block_tokens: int
    blocks: int = Field(description="of KV cache, usable by requests")
    async_scheduling: bool
    draft_method: str = Field("", description="of speculative decoding; empty: there was none")
    draft_tokens: int = Field(0, description="drafts of a row in a pass")
    resolved: Resolved | None = optional("what vLLM resolved when it was measured; none: not known")

    @model_validator(mode="after")
    def _graphs_in_order(self) -> StepsFit:
        sizes = list(self.law.graphs.sizes) if self.law.graphs else []
        if sizes != sorted(set(sizes)):
            raise ValueError(f"law.graphs.sizes {sizes} must ascend")
        return self


HELD_OUT = "the law's error of 95 % of held-out batches"


class LawRange(Strict):
    """By which factors true times may differ from a fit's laws, and how that is known."""

    fast: float = Field(description="the least factor of every time")
    slow: float = Field(description="the greatest")
    basis: str = Field(description="which errors the factors are, in words")


class Fit(Envelope):
    """fit.json, whole."""

    remake: ClassVar[str] = "llmctl fit PROFILE"
    remeasure: ClassVar[str] = "llmctl profile RECIPE; llmctl fit PROFILE"
    recipe_sections: ClassVar[tuple[str, ...]] = MEASURED_SECTIONS

    schema_version: Literal[4] = LAWS_FORMAT  # type: ignore[assignment]
    recipe_name: str
    workers: Workers
    engine: EngineFacts
    prefill: LawFit
    decode: LawFit
    overhead: OverheadFit
    memory: MemoryFit
    rounds: RoundsFit | None = optional(
        "none: no rounds were measured; the laws of batches hold for them"
    )
    swap: SwapFit | None = optional("none: caches cannot be swapped; evicted rows are recomputed")
    steps: StepsFit | None = optional("none: the engine's passes were not measured one by one")
    drafts: list[StepsFit] = Field([], description="the same with other numbers of drafts")

    def off_percent(self, law: LawFit) -> float:
        """How far times by one of these laws are off, in the median: what its form loses on
        held-out points, or, where nothing was measured, how far predictions were off beside
        measured servers, if that is more. Prefills are as far off as TTFT, decodes as TPOT, and
        passes as the larger of both.
        """
        held_out = law.error.median_percent
        known = self.engine.analytic_error
        if known is None:
            return held_out
        own = known.own
        if law is self.prefill:
            return max(held_out, own.ttft_percent)
        if law is self.decode:
            return max(held_out, own.tpot_percent)
        return max(held_out, own.tpot_percent, own.ttft_percent)

    def law_range(self) -> LawRange:
        """Return by which factors true times may differ from times by these laws.

        The range of an analytic fit holds 80 % of the servers that such predictions were compared
        to, by their TPOT (`AnalyticError.own`). The range of a measured fit holds 95 % of the
        batches that were held out. Their errors have no sign, so it is as wide in both directions.
        """
        known = self.engine.analytic_error
        if known is None:
            law = self.rounds.overhead if self.rounds else self.overhead
            off = law.error.p95_percent / 100.0
            return LawRange(fast=1.0 / (1.0 + off), slow=1.0 + off, basis=HELD_OUT)
        own = known.own
        which = f"of {known.gpu}" if own is known.here else "with models that set no constant"
        return LawRange(
            fast=1.0 / (1.0 + own.tpot_high_percent / 100.0),
            slow=1.0 / (1.0 + own.tpot_low_percent / 100.0),
            basis=f"the law's error of 80 % of {own.servers} servers {which}",
        )
