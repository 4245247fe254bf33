"""recipe.yaml: one model on one kind of hardware, how to measure it, its targets, its server.

In this order: the names of latency targets, types and limits, one model per section, and `Recipe`.
`recipe_schema` is the JSON Schema in recipes/recipe.schema.json, so descriptions here show there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue

from toolkit.catalogue.gpus import GPUS, gpu_of
from toolkit.catalogue.models import DTYPE_BYTES as DTYPE_BYTES
from toolkit.engine_traits import ENGINES, traits_of
from toolkit.errors import InputError, nearest
from toolkit.files.strict import Strict, optional

METRICS = ("ttft", "tpot", "itl", "mtpot", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
# A target's name is a metric, a statistic and the unit, which is seconds.
SLA_KEYS = [f"{metric}_{statistic}_s" for metric in METRICS for statistic in STATISTICS]

NAME_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,63}$"
MAX_WORKERS = 256
WORKERS_LIMIT = f"the limit is {MAX_WORKERS:,}, since one scheduler plans for all of them"
MORE_WORKERS = "for more, put several servers behind a router"
MAX_TRIALS = 100_000  # TPE's time for a trial grows with the number of trials before it
REVISION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
COMMIT_PATTERN = r"[0-9a-f]{40}"

VALUE_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"  # of a label of Kubernetes

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0)]
Grid = Annotated[list[Positive], Field(min_length=1)]


def _within_one_scheduler(workers: int) -> int:
    if workers > MAX_WORKERS:
        raise ValueError(f"{workers:,}: {WORKERS_LIMIT}")
    return workers


def _known_engine(name: str) -> str:
    try:
        return traits_of(name).name
    except InputError as error:
        raise ValueError(error.whole) from None


EngineName = Annotated[
    str, AfterValidator(_known_engine), Field(json_schema_extra={"enum": list(ENGINES)})
]
Workers = Annotated[
    Positive,
    AfterValidator(_within_one_scheduler),
    Field(json_schema_extra={"maximum": MAX_WORKERS}),
]


def sla_problem(key: str, limit: float) -> str:
    """What is wrong with a key that is not a latency target, and the right key; '' for a target."""
    if key in SLA_KEYS:
        return ""
    stem, _, unit = key.rpartition("_")
    if f"{stem}_s" in SLA_KEYS:
        in_seconds = f"{stem}_s: {limit / 1000:g}" if unit == "ms" else f"{stem}_s"
        return f"targets are in seconds; write '{in_seconds}'"
    if f"{key}_s" in SLA_KEYS:
        return f"the unit is missing; write '{key}_s', in seconds"
    return f"unknown target; {nearest(key, SLA_KEYS)}"


SAFE_VOCABULARY = 256  # every tokenizer has tokens below this number


def is_secret(variable: str) -> bool:
    """Return whether a variable of the environment holds a secret, by its name."""
    return re.search(r"(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS?)$", variable.upper()) is not None


# What vLLM stores a KV cache as, in all releases that llmctl was tried with.
CacheDtype = Literal[
    "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"
]


class DraftsSpec(Strict):
    """Speculative decoding of vLLM: how drafts are made. How many is the parameter
    `num_speculative_tokens` of policy `vllm`, and `serve.acceptance` says how many are accepted.
    """

    method: Literal["ngram", "eagle", "eagle3", "mtp"] = Field(
        description="vLLM's `method`: n-grams of the text so far, or layers that draft"
    )
    model: str | None = optional("of eagle and eagle3: the model that drafts, a folder or a hub id")
    options: dict[str, JsonValue] = Field(
        {}, description="further keys of --speculative-config, such as prompt_lookup_max"
    )


class AcceptanceSpec(Strict):
    """How many drafts the model accepts, which the texts of the traffic decide: by `rates`, as
    vLLM's metrics have them, or by the mean `length`.
    """

    rates: list[Annotated[float, Field(ge=0, le=1)]] | None = optional(
        "of each position, the share of passes in which its draft is accepted; none exceeds the "
        "one before"
    )
    length: Annotated[float, Field(ge=1)] | None = optional(
        "tokens that a row gets from a pass, on average, its own among them; each draft then has "
        "the same probability"
    )
    tokens: Positive | None = optional(
        "the number of drafts that `length` is of; None: the number that runs"
    )
    proposed: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="share of a row's passes with drafts; n-grams propose some only where the text "
        "repeats itself",
    )
    synthetic: bool = Field(
        False,
        description="vLLM accepts drafts at these rates whatever they are: for measurements with "
        "made-up prompts, since the texts are then wrong",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> AcceptanceSpec:
        if (self.rates is None) == (self.length is None):
            raise ValueError("serve.acceptance needs either `rates` or `length`")
        if self.rates is not None and self.tokens is not None:
            raise ValueError("serve.acceptance.tokens is of `length`, and `rates` are given")
        if self.rates is not None and any(b > a for a, b in pairwise(self.rates)):
            raise ValueError("serve.acceptance.rates: none exceeds the one before it")
        return self


class VllmSpec(Strict):
    """Flags of `vllm serve` that decide the cost of a forward pass. Flags of the scheduler, which
    decide the rows in a pass, belong to policy `vllm`.
    """

    python: str | None = optional(
        "the Python of the environment that has vLLM; None: LLMCTL_VLLM_PYTHON, else llmctl's own"
    )
    block_size: Positive | None = optional("tokens of a KV block; None: vLLM's default")
    kv_cache_dtype: CacheDtype | None = optional(
        "of the KV cache, where it is not model.dtype; model.kv_bytes_per_token counts its bytes"
    )
    num_gpu_blocks_override: Positive | None = optional(
        "KV blocks; vLLM keeps one of them for itself; None: as many as the memory holds"
    )
    enforce_eager: bool = Field(
        False, description="no compiled graphs: starts sooner, steps take longer"
    )
    drafts: DraftsSpec | None = optional("speculative decoding; None: there is none")
    args: list[str] = Field(
        [], description="more flags, as on vLLM's command line: ['--seed', '4']"
    )
    env: dict[str, str] = Field(
        {},
        description="variables of its environment, such as VLLM_* that choose kernels; no secrets",
    )

    @field_validator("env")
    @classmethod
    def _check_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name in env:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise ValueError(f"'{name}' is no name of a variable")
            if is_secret(name):
                raise ValueError(f"{name} is a secret; set it where the server starts")
        return env


class ModelSpec(Strict):
    """Which model, and the facts about it that planning needs without loading it."""

    source: str = Field(
        description="'random' builds `config` with random weights; else a local folder or a hub id "
        "with safetensors"
    )
    config: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="transformers config keys, `model_type` among them; needed where source is "
        "'random'",
    )
    revision: Annotated[str, Field(pattern=REVISION_PATTERN)] | None = optional(
        "of a model on the hub: a commit of 40 hex digits; a branch or a tag may move"
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="of weights and KV cache"
    )
    quantization: Literal["fp8"] | None = optional(
        "vllm: it quantizes 16-bit weights to this while it loads them; None: as they are stored"
    )
    tokenizer: Literal["model", "bytes"] = Field(
        "model", description="'bytes' is the built-in byte-level tokenizer; it needs no download"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto",
        description="'dummy' gives a known model random weights: profiles as well as real ones",
    )
    seed: Seed = Field(0, description="of random weights")
    max_model_len: Positive = Field(description="longest prompt + output, in tokens")
    kv_bytes_per_token: Positive | None = optional(
        "2 * layers * kv_heads * head_dim * bytes; checked against the loaded model"
    )
    weight_bytes: Positive | None = optional(
        "parameters * bytes per value; lets `doctor` reckon the memory before anything is loaded"
    )

    def size(self, key: str) -> int | None:
        """The integer `key` of the config; None where it is another value."""
        value = self.config.get(key)
        return value if isinstance(value, int) else None

    @property
    def vocab_size(self) -> int:
        """Tokens from 0 to below this are in the vocabulary."""
        size = self.size("vocab_size")
        return SAFE_VOCABULARY if size is None else size

    @property
    def from_hub(self) -> bool:
        """Whether the model or its tokenizer comes from the hub."""
        return self.source != "random" and not self.source.startswith(("/", "."))

    @property
    def pinned(self) -> bool:
        """Whether every load takes the same files."""
        return not self.from_hub or re.fullmatch(COMMIT_PATTERN, self.revision or "") is not None

    @model_validator(mode="after")
    def _random_needs_config(self) -> ModelSpec:
        if self.source == "random" and "model_type" not in self.config:
            raise ValueError(
                "model.source is 'random', so model.config needs 'model_type' and the sizes"
            )
        return self


def _gpu_or_figures(schema: JsonSchemaValue) -> None:
    """In the JSON Schema, `gpu` stands for the keys that are needed without it."""
    needed = schema.pop("required")
    schema["anyOf"] = [{"required": ["gpu"]}, {"required": needed}]


class HardwareSpec(Strict):
    """The device that one worker runs on."""

    model_config = ConfigDict(json_schema_extra=_gpu_or_figures)

    gpu: str | None = optional(
        "a GPU of `llmctl recipe gpus`: it gives the figures that are not given here; "
        "`hardware: NAME` alone is enough"
    )
    device: Literal["cpu", "cuda"] = Field(description="where workers run")
    name: str = Field(description="for readers and for doctor's check, like 'A100-80GB'")
    memory_gib: PositiveFloat | None = optional("of one device")
    peak_tflops: PositiveFloat | None = optional(
        "dense, in model.dtype, from the data sheet; for analytic profiles"
    )
    bandwidth_gb_s: PositiveFloat | None = optional(
        "of the device's memory, from the data sheet; for analytic profiles"
    )
    usd_per_hour: PositiveFloat | None = optional(
        "price of one worker's devices for an hour; for the cost of tokens"
    )


def _with_figures(given: object) -> object:
    """The name of a GPU, or keys with its name, with the figures of the catalogue."""
    if isinstance(given, str):
        given = {"gpu": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("gpu"), str):
        return given
    try:
        gpu = gpu_of(given["gpu"])
    except InputError as error:
        raise ValueError(error.whole) from None
    figures = {
        "device": "cuda",
        "name": gpu.device,
        "memory_gib": gpu.memory_gib,
        "peak_tflops": gpu.tflops["bf16"],
        "bandwidth_gb_s": gpu.bandwidth_gb_s,
    }
    return {**figures, **given, "gpu": gpu.name}


Hardware = Annotated[
    HardwareSpec,
    BeforeValidator(_with_figures, json_schema_input_type=Literal[tuple(GPUS)] | HardwareSpec),
]

# Pinned memory cannot be swapped out by the system, so it has a bound even if none is set.
GPU_SWAP_MIB = 4096.0


class EngineSpec(Strict):
    """What runs the model."""

    name: EngineName = Field(
        "transformers",
        description="what runs the model; 'vllm' is vLLM's own server, 'openai' a server that "
        "runs already",
    )
    url: str | None = optional("openai: the server, like http://127.0.0.1:8000")
    served_model: str | None = optional(
        "openai: the model's name there; None: the server's first model"
    )
    threads: Positive | None = optional("CPU threads of one worker; None: all")
    tensor_parallel_size: Positive = Field(
        1,
        description="processes that share each worker's model, one device each; must divide heads "
        "and KV heads",
    )
    kv_cache_memory_mib: PositiveFloat | None = optional(
        "KV cache of one worker's process; None on a GPU: from gpu_memory_utilization"
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="share of a GPU's memory for weights and KV cache"
    )
    share_gpus: bool = Field(
        False,
        description="workers may share GPUs where there are too few: each gets an equal part of "
        "gpu_memory_utilization; false: that is refused",
    )
    joining: Literal["embed", "shape"] = Field(
        "embed",
        description="rebatch: newcomers are prefilled apart and embedded, or (for comparison) "
        "within the running batch",
    )
    cuda_graphs: bool | None = optional(
        "transformers and rebatch: decode steps of fixed shapes, on a GPU "
        "captured as CUDA graphs; None: on a GPU, where they can be captured"
    )
    swap_memory_mib: PositiveFloat | None = optional(
        "rebatch: host memory of one worker for swapped caches, pinned on a GPU; None: no limit on "
        "a CPU, and 4096 on a GPU"
    )
    kernel_injection: bool | None = optional(
        "deepspeed: true: its own kernels, and an error where they do not work; false: the "
        "model's; None: its own where they work"
    )
    vllm: VllmSpec | None = optional("vllm: how to start its server; None: vLLM's defaults")
    flush_s: Annotated[float, Field(ge=0)] = Field(
        0.05,
        description="a worker reports first tokens at once, others at this interval or, where "
        "cores are scarce, a longer one",
    )

    def on_part_of_gpu(self, workers: int) -> EngineSpec:
        """The settings of one of `workers` that share a GPU."""
        part = self.gpu_memory_utilization / workers
        return self.model_copy(update={"gpu_memory_utilization": part}) if workers > 1 else self

    def swap_bytes(self, device: str) -> int | None:
        """Host memory of one worker for swapped caches; None: no limit."""
        mib = self.swap_memory_mib
        if mib is None and device == "cuda":
            mib = GPU_SWAP_MIB
        return None if mib is None else int(mib * (1 << 20))

    @model_validator(mode="after")
    def _check_settings_of_the_engine(self) -> EngineSpec:
        name = self.name
        traits = traits_of(self.name)
        for other in ENGINES.values():
            for key in other.settings:
                if getattr(self, key) is not None and key not in traits.settings:
                    raise ValueError(
                        f"engine.{key} is for engine '{other.name}'; engine.name is '{name}'"
                    )
        if self.url is None and not traits.started:
            raise ValueError(f"engine.name is '{name}', so engine.url must be its address")
        if self.url and any(mark in self.url for mark in "@?#"):
            # The message does not repeat the address: it may hold a secret.
            raise ValueError(
                "engine.url may have scheme, host, port and path only; "
                "give a key in LLMCTL_ENGINE_API_KEY"
            )
        if self.tensor_parallel_size > 1 and not traits.shares_model:
            able = [f"'{other.name}'" for other in ENGINES.values() if other.shares_model]
            raise ValueError(
                f"engine.tensor_parallel_size: {self.tensor_parallel_size}: a worker of '{name}' "
                f"is one process; {', '.join(able)} share models"
            )
        return self


class ProfileSpec(Strict):
    """The grid to measure. Every point is measured `repeats` times after `warmups`. A vLLM with
    async scheduling has a grid of its own instead (docs/explanation/vllm.md).
    """

    batch_sizes: Grid = Field(description="N: prefill and decode are measured at each")
    input_lengths: Grid = Field(
        description="L, in tokens: prefill is measured at each of batch_sizes x input_lengths"
    )
    cached_lengths: Grid = Field(
        description="tokens in the cache when one more is decoded, measured at each of "
        "batch_sizes x cached_lengths"
    )
    slice_tokens: Grid = Field([16, 32], description="slice lengths of the end-to-end samples")
    slices: Positive = Field(24, description="end-to-end slices, on all workers at once")
    sequences: Positive = Field(
        24, description="rebatch: end-to-end sequences of rounds, on all workers at once"
    )
    repeats: Positive = Field(5, description="timings of each point; all are kept")
    warmups: Annotated[int, Field(ge=0)] = Field(
        1, description="runs before the first timing of a point, not counted"
    )
    memory_lengths: Grid = Field(description="input lengths at which the memory edge is probed")
    clock: Literal["cpu", "wall"] = Field(
        "wall", description="'cpu' is process CPU time: steadier on shared cores with one thread"
    )
    seed: Seed = Field(0, description="of the tokens and the order of the points")


class PolicySpec(Strict):
    """The policy that serves without a tuning. It is trial 0 of `llmctl tune`."""

    name: str = Field(
        "slice", description="a policy that the engine runs; of engine vllm, 'vllm' by default"
    )
    parameters: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="values of the policy's parameters; the policy's defaults for the others",
    )


class RouterSpec(Strict):
    """A router before replicas of a server, and its parameters."""

    name: str = Field("round-robin", description="a router, such as 'by-law'")
    parameters: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="values of the router's parameters; the router's defaults for the others",
    )


class ScalingSpec(Strict):
    """The rule that decides how many replicas run, and how fast that may change."""

    rule: str = Field("by-law", description="a rule, such as 'hpa' or 'by-law'")
    parameters: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="values of the rule's parameters; the rule's defaults for the others",
    )
    behaviour: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="how fast the number may change; Kubernetes' defaults for the others",
    )


class ScaleSpec(Strict):
    """Replicas of a server that come and go with the traffic."""

    min: Annotated[int, Field(ge=0, le=MAX_WORKERS)] = Field(1, description="the fewest replicas")
    max: Workers = Field(10, description="the most replicas")
    start_s: list[PositiveFloat] = Field(
        default_factory=list,
        description="seconds from the start of a replica until it takes requests, as measured, in "
        "a place where none ran before; one of them is drawn for each start. Empty: as a fit has "
        "measured the load",
    )
    warm_start_s: list[PositiveFloat] = Field(
        default_factory=list,
        description="the same in a place where one ran before; empty: as start_s",
    )
    drain_s: PositiveFloat | None = optional(
        "a replica that is to go is ended after so many seconds, and its requests are lost; None: "
        "when its last request has ended"
    )
    scrape_s: PositiveFloat = Field(15.0, description="seconds between two readings of metrics")
    poll_s: PositiveFloat = Field(15.0, description="seconds between two decisions")
    gpus_free: Positive | None = optional(
        "GPUs that there are for replicas; others wait to be started. None: enough for max"
    )
    replica_requests: Annotated[int, Field(ge=0)] = Field(
        0,
        description="requests that the router gives one replica at once; more wait before the "
        "router, where a new replica gets them. 0: any number",
    )
    scaling: ScalingSpec = Field(
        ScalingSpec(), description="the rule that decides, where none was found by a search"
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> ScaleSpec:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        return self


class TuneSpec(Strict):
    """How to search."""

    trials: Annotated[int, Field(gt=0, le=MAX_TRIALS)] = Field(60, description="settings to try")
    seed: Seed = Field(0, description="the same seed gives the same result")
    windows: Positive = Field(4, description="trace windows used for the search")
    held_out_windows: Positive = Field(
        4, description="other windows, used for the certainty of the gain"
    )
    window_s: PositiveFloat | None = optional(
        "length of a window in the scaled trace, where the trace allows it; None: as long as all "
        "fit with gaps"
    )
    request_rate_rps: PositiveFloat | None = optional(
        "scale arrivals to this mean rate; None: the trace's own"
    )
    load: PositiveFloat | None = optional(
        "instead of a rate: scale arrivals to this multiple of the highest rate at which the "
        "recipe's settings keep all limits"
    )
    concurrency: Positive | None = optional(
        "instead of a rate: so many requests at once; the next one starts when any one ends"
    )
    policies: list[str] = Field(
        ["all"],
        description="policies to search besides the recipe's own; 'all': every policy that knows "
        "no more than a server does; 'own': no other",
    )
    routers: list[str] = Field(
        ["all"],
        description="where several replicas of a server run: routers to search besides the "
        "recipe's own; 'all': every router; 'own': no other",
    )
    trace: str = Field(
        "chat-small",
        description="the traffic to tune for: the file of a trace, or the name of a shipped trace",
    )
    space: dict[str, Annotated[list[bool | int | float | str], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="ranges {parameter: [low, high]} and choices {parameter: [one, other]}; of "
        "other policies {policy.parameter: ...}, of routers {router.parameter: ...}. Every "
        "parameter that is named here is searched",
    )
    max_oom_percent: Annotated[float, Field(ge=0, le=100)] = Field(
        1.0, description="share of batches that may run out of memory"
    )
    max_evicted_percent: Annotated[float, Field(ge=0)] | None = optional(
        "evictions per 100 requests that continuous policies may cause"
    )
    min_attainment_percent: Annotated[float, Field(ge=0, lt=100)] | None = optional(
        "share of requests that must meet all targets, judged by its lower confidence bound"
    )
    max_refused_percent: Annotated[float, Field(ge=0, le=100)] | None = optional(
        "share of requests that a front before replicas may refuse by its forecast; None: "
        "simulated without refusals"
    )


class ServeSpec(Strict):
    """The server."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8000, description="0 takes a free one")
    served_model_name: str | None = optional("what clients call the model; None: the recipe's name")
    max_new_tokens: Positive = Field(
        256, description="default of a request's limit, and its upper bound"
    )
    max_waiting: Positive = Field(4096, description="requests waiting before new ones get 503")
    hang_s: PositiveFloat = Field(
        30.0,
        description="a worker is killed that reports nothing for this long and 10 times its "
        "batch's estimate, or that loads or is idle without a sign of work for 4 times this long",
    )
    request_timeout_s: PositiveFloat | None = optional(
        "default of a request's deadline, and its upper bound; None: no deadline"
    )
    load_timeout_s: PositiveFloat = Field(
        3600.0, description="a load of a worker takes at most this long, downloads included"
    )
    admission: Literal["targets", "queue"] = Field(
        "targets",
        description="'queue': new requests get 503 at max_waiting; 'targets': also while they "
        "would miss the recipe's targets for TTFT or E2E",
    )
    acceptance: AcceptanceSpec | None = optional(
        "vllm with speculative decoding: how many drafts are accepted"
    )


class Recipe(Strict):
    """recipe.yaml."""

    schema_version: Literal[1] = Field(1, description="of this format")
    name: Name = Field(description="lower-case letters, digits, `.`, `_` and `-`; at most 64")
    description: str = Field("", description="one line for readers")
    model: ModelSpec
    hardware: Hardware
    engine: EngineSpec = EngineSpec()
    workers: Workers = Field(
        1,
        description="engine instances, each a process with a model and a device of its own; of a "
        "server: its replicas, behind replica_router",
    )
    replica_router: RouterSpec = Field(
        RouterSpec(), description="chooses the replica of a server for each request"
    )
    scale: ScaleSpec | None = optional(
        "of a server: its replicas come and go with the traffic; None: `workers` of them"
    )
    profile: ProfileSpec
    sla: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="latency targets in seconds: ttft_p99_s, e2e_p95_s, tpot_mean_s, ...",
        json_schema_extra={
            "properties": {key: {"type": "number", "exclusiveMinimum": 0} for key in SLA_KEYS},
            "additionalProperties": False,
        },
    )
    policy: PolicySpec = PolicySpec()
    tune: TuneSpec = TuneSpec()
    serve: ServeSpec = ServeSpec()

    @model_validator(mode="after")
    def _name_policy(self) -> Recipe:
        """The policy that the engine has built in, where none is named."""
        usual = traits_of(self.engine.name).policy
        if "name" not in self.policy.model_fields_set and self.policy.name != usual:
            given = self.policy.model_fields_set  # the name still counts as not given
            named = self.policy.model_copy(update={"name": usual})
            named.__pydantic_fields_set__.intersection_update(given)
            self.__dict__["policy"] = named
        return self

    @model_validator(mode="after")
    def _check_sections_together(self) -> Recipe:
        for key in ("input_lengths", "cached_lengths", "memory_lengths"):
            longest = max(getattr(self.profile, key))
            if longest > self.model.max_model_len:
                limit = f"model.max_model_len is {self.model.max_model_len}"
                raise ValueError(f"profile.{key}: {longest} is too long; {limit}")
        size = self.engine.tensor_parallel_size
        for key in ("num_attention_heads", "num_key_value_heads"):
            heads = self.model.size(key)
            repeated = key == "num_key_value_heads" and heads and size % heads == 0
            if heads is not None and heads % size and not repeated:
                raise ValueError(
                    f"engine.tensor_parallel_size: {size}: does not divide model.config.{key}, "
                    f"{heads}"
                )
        if self.model.quantization and not traits_of(self.engine.name).quantizes:
            able = [f"'{other.name}'" for other in ENGINES.values() if other.quantizes]
            raise ValueError(
                f"model.quantization: {self.model.quantization}: engine '{self.engine.name}' does "
                f"not quantize weights; {', '.join(able)} does"
            )
        if self.replica_router != RouterSpec() and not traits_of(self.engine.name).server:
            raise ValueError(
                f"replica_router: '{self.replica_router.name}': engine '{self.engine.name}' has no "
                "replicas: its workers take requests from one scheduler"
            )
        for key, seconds in self.sla.items():
            problem = sla_problem(key, seconds)
            if problem:
                raise ValueError(f"sla.{key}: {seconds:g}: {problem}")
        return self

    @property
    def measured(self) -> Recipe:
        """The same recipe without what no measurement depends on: prices, and how many replicas of
        a server run. One replica is measured, since each has devices of its own.
        """
        hardware = self.hardware.model_copy(update={"usd_per_hour": None})
        workers = 1 if traits_of(self.engine.name).server else self.workers
        return self.model_copy(update={"hardware": hardware, "workers": workers})


def recipe_schema() -> JsonSchemaValue:
    """The JSON Schema of recipes; editors use it to complete and check them."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()}
