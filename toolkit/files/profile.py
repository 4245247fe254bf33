"""profile.json: every measured sample, the engine's own facts, and whether they hold elsewhere.

A measurement holds for one device, one version of one engine, and one model. Times and memory of
another GPU, engine or model look as good as the right ones, so `refuse_foreign` compares the
identities and names both sides. A value that either side does not know is not compared: a recipe's
hardware is only a claim, and a foreign server reports little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from toolkit.catalogue.resolved import Resolved
from toolkit.engine_traits import traits_of
from toolkit.errors import ForeignError
from toolkit.files.strict import Envelope, Strict, optional

# the sections of a recipe that measurements depend on
MEASURED_SECTIONS = ("model", "hardware", "engine", "workers", "profile")
REMEDY = "profile and fit it here, or go on with --force: times and memory may then be wrong"

Identity = Mapping[str, str]  # property to value; an absent property is not known
OnForeign = Callable[[str], None]


# Laws have a table of all batch sizes up to the largest.
Rows = Annotated[int, Field(ge=1, le=1 << 16)]
Length = Annotated[int, Field(ge=0, lt=1 << 31)]
Measured = Annotated[float, Field(le=1e6)]  # seconds; a fit refuses those that are not above 0


class PrefillPoint(Strict):
    """T_prefill(N, L), every repeat."""

    batch_size: Rows
    input_length: Length
    seconds: list[Measured]


class DecodePoint(Strict):
    """One decode iteration at cached length l: tau(l, N), every repeat."""

    batch_size: Rows
    cached_length: Length
    seconds: list[Measured]


class SlicePoint(Strict):
    """A whole slice through a worker process while all workers are busy.

    Wall time from dispatch to result, whatever the profile's clock is.
    """

    batch_size: Rows
    input_length: Length
    steps: Length
    seconds: Measured


class MemoryPoint(Strict):
    """The memory edge at one length: the largest batch that ran, the smallest that did not."""

    input_length: int
    steps: int
    largest_ok: int
    smallest_oom: int | None = Field(description="None where the probe stopped before the edge")


RoundPart = Literal["join", "leave", "grow", "swap_out", "swap_in"]


class PartPoint(Strict):
    """A part of a round (`toolkit.engines.protocol.RoundEngine.time_part`), every repeat."""

    part: RoundPart
    rows: int
    length: int = Field(description="tokens of the longest row")
    others: int = Field(description="other rows that run at the same time")
    seconds: list[float]


class RoundPoint(Strict):
    """A round through a worker process while all workers are busy.

    Wall time from dispatch to result, whatever the profile's clock is.
    """

    groups: list[tuple[int, int]] = Field(description="rows and longest input of each prefill")
    rows: int = Field(description="rows that decode")
    cached_length: int = Field(description="of the longest row, before the first step")
    steps: int
    left: int = Field(description="rows that were dropped before it or ended in it")
    seconds: float


class RoundSequence(Strict):
    """Consecutive rounds on a worker; the batch is empty before the first."""

    rounds: list[RoundPoint]


class RoundsProfile(Strict):
    """Measurements of rounds. Prefills and decode steps are in the profile, measured in rounds."""

    parts: list[PartPoint]
    sequences: list[RoundSequence]
    memory: list[MemoryPoint] = Field(
        description="rows admitted one by one at a length; `steps` is 1"
    )
    host_bytes: int = Field(
        description="host memory for caches, per worker; 0: caches are not swapped"
    )


class StepPoint(Strict):
    """Forward passes of one composition, with the fields of `laws.features.StepShape`.

    A point of decodes only describes consecutive passes by their mean. The points of a profile are
    in the order of their passes: where passes overlap, a pass's time depends on its neighbours.
    """

    decodes: int
    decode_cached: float
    prefills: int
    prefill_tokens: int
    prefill_attended: float
    prefill_cached: int = 0
    decode_inside: float = Field(
        0.0, description="of `decode_cached`, what is inside sliding windows; 0: there are none"
    )
    prefill_inside: float = Field(0.0, description="as `prefill_attended`, inside the windows")
    seconds: list[float] = Field(description="from scheduling a pass to its tokens")
    host_s: list[float] = Field(
        description="from the tokens to scheduling the next pass, where there was work for one; "
        "empty where the next one was under way already"
    )
    idle: bool = Field(
        False, description="no pass was under way when the first of these was scheduled"
    )
    draft_tokens: int = Field(0, description="drafts that the decodes verify, together")
    launch_s: list[float] = Field(
        [], description="from scheduling a pass to its last kernel launched; empty: not known"
    )


class FrontPoint(Strict):
    """A client's wait for its first token besides forward passes; with several rows, for its last.

    One row measures the way to the engine and back, several rows only the way back.
    """

    rows: int = Field(description="requests at once; 1: both ways, more: the way back")
    prompt_tokens: int
    seconds: float


class StepsProfile(Strict):
    """Measurements of a paged engine, pass by pass."""

    block_tokens: int
    blocks: int = Field(description="usable by requests")
    max_num_batched_tokens: int = Field(description="during the measurement")
    async_scheduling: bool
    graph_sizes: list[int] = Field(
        [], description="the tokens of each CUDA graph, ascending; empty: none, or not known"
    )
    graph_mode: str = Field("", description="vLLM's cudagraph_mode; empty: not known")
    executor: str = Field(
        "", description="uni: the scheduler's thread launches passes; empty: not known"
    )
    experts: int = Field(0, description="of a layer; 0: there are none, or they are not known")
    experts_per_token: int = 0
    draft_method: str = Field("", description="of speculative decoding; empty: there was none")
    draft_tokens: int = Field(0, description="drafts of a row in a pass")
    least_s: float = Field(
        0.0, description="of computed passes: the shortest one with chunks; 0: not known"
    )
    resolved: Resolved | None = optional(
        "what vLLM resolved: cache groups, parallelism, limits; none: not known"
    )
    points: list[StepPoint]
    front: list[FrontPoint]


# Of points that are visited: the grid, mixes, traffic, hits and parts of rounds.
PointKind = Literal[
    "prefill", "decode", "mix", "traffic", "hit", "lone", "burst", "load", RoundPart
]


class FailedPoint(Strict):
    """A point that could not be measured, and why."""

    kind: Literal[PointKind, "slice", "memory", "rounds"]
    batch_size: int
    length: int
    reason: str


class ErrorSpread(Strict):
    """How far predicted mean times were off beside measured servers, in percent."""

    servers: int = Field(description="each once")
    tpot_percent: float = Field(description="median of the sizes of the errors")
    tpot_p90_percent: float
    ttft_percent: float = Field(description="median of the sizes of the errors")
    ttft_p90_percent: float
    tpot_low_percent: float = Field(
        description="10th percentile of 100 (predicted / measured - 1), with its sign"
    )
    tpot_high_percent: float = Field(description="90th percentile, with its sign")


class AnalyticError(Strict):
    """How far `recipe new`, `profile --analytic`, `fit` and `simulate` were off beside servers that
    others measured, with models of the recipe's class: dense, or with experts.
    """

    experts: bool = Field(description="of the class")
    gpu: str = Field(description="the recipe's, as its operators are named")
    here: ErrorSpread | None = optional("of servers on this GPU; none: not one was compared")
    models: list[str] = Field(description="of these servers")
    listed: bool = Field(description="whether the recipe's model is one of these")
    left_out: ErrorSpread = Field(
        description="on all GPUs, each server predicted with constants that its model did not set"
    )
    beyond: list[str] = Field(
        [], description="what of the recipe is beyond every server that was compared"
    )

    @property
    def own(self) -> ErrorSpread:
        """The errors to expect of the recipe's model: of servers on this GPU if the model is among
        theirs, else of models that were left out.
        """
        return self.here if self.here and self.listed else self.left_out

    @property
    def guessed(self) -> bool:
        """Whether no server like the recipe's was compared."""
        return self.here is None or bool(self.beyond)


class EngineFacts(Strict):
    """What the engine resolved when it loaded: the numbers that a simulation needs."""

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
    prefill_emits_token: bool = Field(
        description="True: a slice of S tokens is a prefill and S - 1 decode iterations"
    )
    max_rows: int | None = optional("requests that run at once; None: memory alone limits")
    torch: str = Field("", description="its version, where the engine uses it here")
    processor: str = Field("", description="the CPU's name, where the engine runs on one")
    config_sha256: str = Field("", description="of the model's config, whichever version saved it")
    tensor_parallel_size: int = Field(
        1, description="processes that share a worker's model; bytes are of each"
    )
    analytic: str = Field("", description="the assumptions, where nothing was measured")
    analytic_error: AnalyticError | None = optional(
        "of such predictions, where nothing was measured; none: something was"
    )
    load_s: float | None = optional(
        "seconds until the engine was loaded; none: it was not measured"
    )
    lacks: list[str] = Field([], description="of a server: the parts of OpenAI's API that it lacks")
    deepspeed: str = Field(
        "", description="init_inference: 'kernel injection' or 'pass-through', and why"
    )
    joining: Literal["embed", "shape"] | None = Field(
        default_factory=lambda facts: "embed" if facts["engine"] == "rebatch" else None,
        description="how rows join the running batch where it is one padded slab of rows x the "
        "longest; none: the rows' caches add up, as in a paged cache",
    )

    @property
    def is_server(self) -> bool:
        """Whether the engine queues requests, batches freely, and has no memory edge."""
        return traits_of(self.engine).server


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
    rounds: RoundsProfile | None = optional("none: the engine does not keep rows between batches")
    steps: StepsProfile | None = optional("none: the engine's passes were not measured one by one")


def identity(facts: EngineFacts) -> dict[str, str]:
    """The device, engine and model of `facts`, by property.

    An analytic profile has no device and no versions, since nothing was measured.
    """
    model = facts.model_type
    if facts.parameters:
        model += f" of {facts.parameters:,} parameters"
    engine = facts.engine
    device = facts.device
    where = {
        "device": f"CPU {facts.processor}".strip() if device == "cpu" else device,
        "engine": f"{engine} {facts.engine_version}".strip(),
        "torch": ".".join(facts.torch.split(".")[:2]),
    }
    what = {
        "model": model,
        "model_config": facts.config_sha256[:12],
        "dtype": facts.dtype,
        "tensor_parallel_size": str(facts.tensor_parallel_size),
    }
    known = ({"engine": engine} if facts.analytic else where) | what
    return {name: value for name, value in known.items() if value}


def differences(made: Identity, here: Identity) -> list[str]:
    """The properties that both know and that differ: 'device NVIDIA A100 (here NVIDIA H100)'."""
    return [
        f"{name} {made[name]} (here {here[name]})"
        for name in made
        if name in here and not _same(made[name], here[name])
    ]


def refuse_foreign(
    made: EngineFacts, here: Iterable[Identity], on_foreign: OnForeign | None = None
) -> None:
    """Raise `ForeignError` where a measurement on `made` is used on something else.

    Where `on_foreign` is given, it gets the message instead.
    """
    foreign = next(filter(None, (differences(identity(made), used) for used in here)), None)
    if foreign:
        message = f"the fit was made with another {', another '.join(foreign)}"
        if on_foreign is None:
            raise ForeignError(message, REMEDY)
        on_foreign(message)


def _same(first: str, second: str) -> bool:
    """Whether names agree. A bare 'transformers' or 'CPU' agrees with any version or kind of it."""
    short, long = sorted((first, second), key=len)
    return first == second or (" " not in short and long.startswith(f"{short} "))
