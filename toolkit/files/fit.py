"""fit.json: the laws of time and memory, their coefficients, held-out errors and validity."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from toolkit.catalogue.resolved import Resolved
from toolkit.files.profile import MEASURED_SECTIONS, EngineFacts
from toolkit.files.recipe import Workers
from toolkit.files.strict import Envelope, Strict, optional


class Segment(Strict):
    """The coefficients of a law for batch sizes from `batch_size_min` to the next segment's.

    seconds = max(flat, nl * N * L + n * N + l * L + const + nll * N * L^2); for decode, L is the
    cached length l, and nll is 0; for prefill, flat is 0.
    """

    batch_size_min: int
    nl: float
    n: float
    l: float  # noqa: E741  (the papers' letter for a length)
    const: float
    nll: float = 0.0
    flat: float = 0.0


class HeldOutError(Strict):
    """Absolute percentage errors on points that the fit did not see."""

    median_percent: float
    p95_percent: float
    worst_percent: float
    points: int


class Candidate(Strict):
    """A form that was tried for a law, and its held-out error."""

    form: str
    error: HeldOutError


class Range(Strict):
    """Where the law was measured; use outside is extrapolation."""

    batch_size_max: int
    length_max: int


class PointError(Strict):
    """What a fit without this point predicts for it, and how far its own samples are apart."""

    batch_size: int
    length: int
    error_percent: float = Field(description="predicted against measured, with its sign")
    spread_percent: float | None = optional(
        "the samples' standard deviation over their mean; none: there is one sample"
    )


class LatencyFit(Strict):
    """A fitted law: the chosen form, fitted on all points, and how the forms compared."""

    form: str
    segments: list[Segment]
    error: HeldOutError
    candidates: list[Candidate]
    valid: Range
    worst_points: list[PointError] = Field([], description="the largest held-out errors")
    spread_percent: float | None = optional(
        "the median spread of a point's samples; none: no point has two samples"
    )


class OverheadFit(Strict):
    """The time of a slice while all workers run: seconds = batch_s + stretch * T_serve.

    T_serve is the time by the laws.
    """

    batch_s: float
    stretch: float
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
    capacity_tokens: int
    kv_bytes_per_token: int
    zeta: float
    zeta_std: float
    workspace: float = Field(
        0.0, description="memory of a prefill besides the cache: tokens of KV cache per input token"
    )
    rules: list[BatchRule] = Field([], description="by length_above, descending")


class SwapFit(Strict):
    """Swapping between device and host memory: seconds = latency_s + bytes / rate, per cache."""

    latency_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    host_bytes: int = Field(description="host memory for caches, per worker")
    overlaps: bool = Field(
        True, description="transfers run beside compute; on a CPU the thread copies"
    )
    error: HeldOutError | None = optional("none: the link was stated, not measured")


class PartFit(Strict):
    """A part of a round: seconds = flat_s + row_s * N + token_s * N * L.

    A term is 0 where the data do not show it.
    """

    flat_s: float
    row_s: float
    token_s: float
    error: HeldOutError


class RoundsFit(Strict):
    """The time of a round besides its prefills and decode steps, and the memory rounds can use.

    `join` is per group of newcomers, `leave` per row that leaves, `grow` per decode step. A round
    takes seconds = batch_s + stretch * (the sum of these parts and the laws).
    """

    join: PartFit
    leave: PartFit
    grow: PartFit
    overhead: OverheadFit
    usable_share: float = Field(
        description="of the capacity that rows x the longest may fill while newcomers are prefilled"
    )


class StepRange(Strict):
    """Where the law of passes was measured."""

    rows_max: int
    tokens_max: int = Field(description="new tokens in a pass")
    cached_max: float = Field(description="sum over all rows that decode")


class PipelineFit(Strict):
    """Passes that overlap (`estimators.pipeline.PipelineLaw`): times on the GPU, and launches."""

    graph_mode: str = Field(description="vLLM's cudagraph_mode")
    graph_sizes: list[int] = Field(description="the tokens of each CUDA graph, ascending")
    apart: bool = Field(description="passes are launched in processes of their own")
    decode_s: float
    row_s: float
    cached_s: float
    floor_s: float
    floor_token_s: float
    token_s: float
    attended_s: float
    beside_s: float
    graph_s: float
    graph_row_s: float
    piece_s: float
    piece_row_s: float
    eager_s: float
    eager_chunk_s: float
    expert_s: float = Field(0.0, description="per touched expert of a layer")
    spread: list[float] = Field(
        description="quantiles of launches that are not graphs, over their mean"
    )
    launches: Literal["measured", "inferred"] = Field(
        description="inferred: from passes that waited for the next launch"
    )


class StepsFit(Strict):
    """A paged engine's forward pass (`estimators.steps.StepLaw`), its KV cache, and its front.

    With `pipeline` passes overlap, and the law of a single pass is only what their ends show.
    """

    base_s: float
    row_s: float
    prefill_s: float
    cached_s: float
    attended_s: float
    behind_s: float = Field(0.0, description="per cached token before a chunk")
    beside_s: float | None = optional(
        "per cached token of decodes in a pass with chunks; none: as in passes of decodes alone"
    )
    expert_s: float = Field(
        0.0, description="per expert of a layer that the new tokens of a pass touch"
    )
    experts: int = Field(0, description="of a layer; 0: there are none")
    experts_per_token: int = 0
    window: int = Field(0, description="tokens of the sliding windows; 0: there are none")
    inside_s: float = Field(
        0.0, description="per cached token of a decode that is inside the windows"
    )
    attended_inside_s: float = Field(
        0.0, description="per token that a chunk's tokens attend to inside the windows"
    )
    least_s: float = Field(0.0, description="the shortest pass with chunks")
    token_s: list[float]
    knots: list[int]
    host_s: float = Field(
        description="between passes; 0 where passes overlap, which have nothing between them"
    )
    host_row_s: float
    error: HeldOutError = Field(description="of forward passes")
    candidates: list[Candidate] = Field(
        description="the forms that were tried: knots of a single pass, and overlapping passes"
    )
    valid: StepRange
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
    pipeline: PipelineFit | None = optional(
        "none: passes do not overlap, or the profile does not say how they were launched"
    )


HELD_OUT = "the law's error of 95 % of held-out batches"


class LawRange(Strict):
    """By which factors true times may differ from those of a fit's laws, and how that is known."""

    fast: float = Field(description="the least factor of every time")
    slow: float = Field(description="the greatest")
    basis: str = Field(description="which errors the factors are, in words")


class Fit(Envelope):
    """fit.json, whole."""

    remake: ClassVar[str] = "llmctl fit PROFILE"
    remeasure: ClassVar[str] = "llmctl profile RECIPE; llmctl fit PROFILE"
    recipe_sections: ClassVar[tuple[str, ...]] = MEASURED_SECTIONS

    recipe_name: str
    workers: Workers
    engine: EngineFacts
    prefill: LatencyFit
    decode: LatencyFit
    overhead: OverheadFit
    memory: MemoryFit
    rounds: RoundsFit | None = optional(
        "none: no rounds were measured; the laws of batches hold for them"
    )
    swap: SwapFit | None = optional("none: caches cannot be swapped; evicted rows are recomputed")
    steps: StepsFit | None = optional("none: the engine's passes were not measured one by one")
    drafts: list[StepsFit] = Field([], description="the same with other numbers of drafts")

    def off_percent(self, law: LatencyFit | StepsFit) -> float:
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
