"""profile.json: every sample that was measured, and what the engine said of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Literal

from pydantic import Field

from toolkit.engine_traits import traits_of
from toolkit.errors import ForeignError
from toolkit.files.strict import Envelope, Strict

MEASURED_SECTIONS = (
    "model",
    "hardware",
    "engine",
    "workers",
    "profile",
)  # of the recipe: what measurements depend on


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
    """A whole slice through a worker process, all workers busy, from dispatch to result. Always
    wall time.
    """

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
    """A round through a worker process, all workers busy, from dispatch to result. Always wall
    time.
    """

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
    """What was measured of rounds, besides prefills and decode steps, which are rounds' own on such
    an engine.
    """

    parts: list[PartPoint]
    sequences: list[RoundSequence]
    memory: list[MemoryPoint] = Field(
        description="rows that were admitted one by one at a length; `steps` is 1"
    )
    host_bytes: int = Field(
        description="host memory for caches, per worker; 0: caches are not swapped"
    )


class StepPoint(Strict):
    """Forward passes of one composition; of decodes alone, passes that follow one another, by their
    mean.

    Shape as in `toolkit.estimators.steps.StepShape`.
    """

    decodes: int
    decode_cached: float
    prefills: int
    prefill_tokens: int
    prefill_attended: float
    seconds: list[float] = Field(description="from the pass's schedule to its tokens")
    host_s: list[float] = Field(
        description="from there to the next pass's schedule, where there was work for one"
    )


class FrontPoint(Strict):
    """What a client waits for its first token beside forward passes; with several rows, for its
    last one alone.
    """

    rows: int = Field(description="requests at once; 1: there and back, more: back alone")
    prompt_tokens: int
    seconds: float


class StepsProfile(Strict):
    """What was measured of a paged engine pass by pass."""

    block_tokens: int
    blocks: int = Field(description="that requests can have")
    max_num_batched_tokens: int = Field(description="while this was measured")
    async_scheduling: bool
    points: list[StepPoint]
    front: list[FrontPoint]


class FailedPoint(Strict):
    """A point that could not be measured, and why."""

    kind: Literal[
        "prefill",
        "decode",
        "mix",
        "traffic",
        "slice",
        "memory",
        "rounds",
        "join",
        "leave",
        "grow",
        "swap_out",
        "swap_in",
    ]
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
    prefill_emits_token: bool = Field(
        description="True: a slice of S tokens is a prefill and S - 1 decode iterations"
    )
    max_rows: int | None = Field(
        default=None, description="requests that run at once; None: memory alone limits"
    )
    torch: str = Field(default="", description="its version, where the engine runs on it here")
    processor: str = Field(default="", description="its name, where the engine runs on a CPU")
    config_sha256: str = Field(
        default="", description="of the model's config, whatever it was saved with"
    )
    tensor_parallel_size: int = Field(
        default=1, description="processes that share a worker's model; bytes are of each"
    )
    analytic: str = Field(default="", description="nothing was measured: what was assumed instead")
    lacks: list[str] = Field(
        default=[], description="of a server: what it does not do as OpenAI's API has it"
    )
    deepspeed: str = Field(
        default="",
        description="what init_inference made of the model: 'kernel injection' or 'pass-through', and why",
    )
    joining: Literal["embed", "shape"] | None = Field(
        default_factory=lambda facts: "embed" if facts["engine"] == "rebatch" else None,
        description="how rows join the running batch where that is one padded slab of rows x the longest; "
        "none: what rows hold adds up, as in a paged cache",
    )

    @property
    def is_server(self) -> bool:
        """Whether it queues what does not fit: it has no memory edge, and batches as it likes."""
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
    rounds: RoundsProfile | None = Field(
        default=None, description="none: the engine does not keep its rows"
    )
    steps: StepsProfile | None = Field(
        default=None, description="none: the engine's passes were not seen one by one"
    )


# What measurements hold for: one device, one version of one engine, one model. Said in words, and
# compared.
#
# Times and memory of another GPU, engine or model look as good as the right ones, so whoever
# would use them compares first and refuses, naming both sides. What either side does not know is
# not compared: a recipe's hardware is a claim, a foreign server tells little, and files of
# earlier versions say less.

Identity = Mapping[str, str]  # what it is to what it is called; absent: not known
OnForeign = Callable[[str], None]

REMEDY = "profile and fit it here, or go on with --force: times and memory may then be wrong"


def identity(facts: EngineFacts) -> dict[str, str]:
    """What `facts` were measured on, or are of. Without the device and the versions where nothing
    was measured.
    """
    engine, device = facts.engine, facts.device
    where = {
        "device": f"CPU {facts.processor}".strip() if device == "cpu" else device,
        "engine": f"{engine} {facts.engine_version}".strip(),
        "torch": ".".join(facts.torch.split(".")[:2]),
    }
    what = {
        "model": _model(facts),
        "model_config": facts.config_sha256[:12],
        "dtype": facts.dtype,
        "tensor_parallel_size": str(facts.tensor_parallel_size),
    }
    known = ({"engine": engine} if facts.analytic else where) | what
    return {name: value for name, value in known.items() if value}


def differences(made: Identity, here: Identity) -> list[str]:
    """Where both know and do not agree: 'device NVIDIA A100 (here NVIDIA H100)'."""
    return [
        f"{name} {made[name]} (here {here[name]})"
        for name in made
        if name in here and not _same(made[name], here[name])
    ]


def refuse_foreign(
    made: EngineFacts, here: Iterable[Identity], on_foreign: OnForeign | None = None
) -> None:
    """`ForeignError` where what was measured on `made` is used on something else; `on_foreign` is
    told instead.
    """
    for each in here:
        found = differences(identity(made), each)
        if not found:
            continue
        message = f"the fit was made with another {', another '.join(found)}"
        if on_foreign is None:
            raise ForeignError(message, REMEDY)
        on_foreign(message)
        return


def _model(facts: EngineFacts) -> str:
    return (
        f"{facts.model_type} of {facts.parameters:,} parameters"
        if facts.parameters
        else facts.model_type
    )


def _same(one: str, other: str) -> bool:
    """A name alone, 'transformers' or 'CPU', is the same as one with its version or its kind."""
    short, long = sorted((one, other), key=len)
    return one == other or (" " not in short and long.startswith(f"{short} "))
