"""A profile of a GPU that is not at hand, computed from the recipe's numbers for engine vllm.

It has the grid and the sections of a measured profile, so everything that reads a profile reads it
too. It is marked as analytic, and its assumptions are written into it (`engine.analytic`).

A pass is the sum of its operators (`estimators.gpu_operators`), which others measured on that GPU.
How far off predictions by these laws were beside measured servers of that GPU is written into the
profile and the fit (`engine.analytic_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

import numpy as np

from toolkit.catalogue.caches import (
    IN_FLIGHT,
    bytes_per_block,
    groups_of_config,
    is_plain,
    logged_tokens,
)
from toolkit.catalogue.flags import known_flags, read_flags
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.layers import experts_of, text_config
from toolkit.catalogue.models import (
    cache_parts,
    kv_bytes_per_token,
    not_computed,
    special_of,
    weight_bytes_on,
)
from toolkit.catalogue.quantization import scheme_of
from toolkit.catalogue.resolved import Resolved
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.elsewhere import error_words, measured_elsewhere
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.gpu_operators import (
    MEASURE,
    EngineConstants,
    GpuOperators,
    operators_of,
)
from toolkit.estimators.least_squares import Floats
from toolkit.estimators.model_shapes import ACTIVATION_BYTES, LatentShapes, ModelShapes
from toolkit.estimators.part_fits import COMPUTED_KNOTS, point_of
from toolkit.files.fit import Fit
from toolkit.files.io import EnvelopeFields
from toolkit.files.modelled import refuse_recipe
from toolkit.files.profile import (
    AnalyticError,
    DecodePoint,
    EngineFacts,
    FrontPoint,
    MemoryPoint,
    PrefillPoint,
    Profile,
    SlicePoint,
    StepsProfile,
)
from toolkit.files.recipe import DTYPE_BYTES, Recipe
from toolkit.laws.features import StepShape, chunk_attended, chunk_inside
from toolkit.profiling.grid import grid, slice_shapes
from toolkit.profiling.measure import probe_shapes, safe_tokens
from toolkit.profiling.shapes import shapes_of
from toolkit.units import GIB, MIB

Number = TypeVar("Number", int, float)
BLOCK_TOKENS = 16  # tokens of a KV block, vLLM's default on a GPU
NOT_COMPUTED_FLAGS = {  # flags in `engine.vllm.args`, and what they turn on
    "--kv-cache-dtype": "a KV cache of another dtype",
    "--quantization": "quantized weights",
    "--tensor-parallel-size": "tensor parallelism",
}
ONE_BY_ONE = "--no-async-scheduling"  # the host works between two passes, not beside them
NARROW_CACHES = ("fp8", "fp8_e4m3")  # one format; its kernels were measured on some GPUs
EAGER_LAYER_S = 0.8e-3  # launches of a layer's kernels one by one: our own H200 run, 25.5 ms of 32
FRONT_ROWS = (1, 16, 64)  # at which the front is written down
PASS_ROWS = 1024  # rows in the largest pass, and its new tokens: bounds of tuning's search
PASS_TOKENS = 16384
ROWS = (1, 3, 6, 12, 24, 40, 80, 112, 160, 320, 640, 900)  # between the knots of a law
BESIDE_ROWS = (1, 16, 64, 256, 1024)  # of decodes beside chunks
# Memory of a GPU that is neither weights nor KV cache: activations, CUDA graphs, communicators. On
# our own H200 it was 2.3 % of the tokens of the cache (docs/results/vllm.md).
RESERVED = 0.03


@dataclass(slots=True, frozen=True)
class ComputedPasses:
    """Seconds [n] of passes [n], where they come from, how far off they are known to be, and what
    no pass contains.

    Attributes:
        least_s: the shortest pass with chunks.
        window: tokens of the model's sliding windows; 0: there are none.
        engine: what clients wait beside passes, and the host's time between them.
    """

    seconds: Callable[[Sequence[StepShape]], Floats]
    source: str
    error: AnalyticError | None = None
    least_s: float = 0.0
    window: int = 0
    engine: EngineConstants = field(default_factory=EngineConstants)

    def one(self, shape: StepShape) -> float:
        """Seconds of one pass."""
        return float(self.seconds([shape])[0])


def pass_times(recipe: Recipe, constants: EngineConstants | None = None) -> ComputedPasses:
    """Return the times of the recipe's passes, by the sums of operators.

    Args:
        constants: of the engine; None: those that ship.

    Raises `InputError` with the name of what is not known of the model or the GPU.
    """
    refuse_not_computed(recipe)
    bandwidth_gb_s, tflops = _needed(
        {
            "hardware.bandwidth_gb_s": recipe.hardware.bandwidth_gb_s,
            "hardware.peak_tflops": recipe.hardware.peak_tflops,
        }
    )
    vllm = recipe.engine.vllm
    gpu = recipe.hardware.gpu
    link = gpu_of(gpu).link_gb_s * 1e9 if gpu else None
    name = gpu or recipe.hardware.name
    operators = operators_of(name, bandwidth_gb_s * 1e9, tflops * 1e12, link)
    if constants is not None:
        operators = replace(operators, engine=constants)
    model = shapes_of(recipe)
    _refuse_cache(recipe, model, operators)
    ranks = recipe.engine.tensor_parallel_size
    operators.pass_seconds(model, [StepShape(1, 1)], ranks)  # refuses what has no coefficients
    experts = model.experts > 0
    error = measured_elsewhere(operators.name, recipe, experts=experts)
    source = f"{error_words(error)}; sum of {operators.source}"
    launch_s = model.layers * EAGER_LAYER_S if vllm and vllm.enforce_eager else 0.0
    if launch_s:
        source += f"; without CUDA graphs a pass takes at least {launch_s * 1e3:.0f} ms"

    def seconds(shapes: Sequence[StepShape]) -> Floats:
        return np.maximum(operators.pass_seconds(model, shapes, ranks), launch_s)

    least_s = max(launch_s, model.layers * operators.engine.launch_s)
    return ComputedPasses(seconds, source, error, least_s, model.window, operators.engine)


def by_operators(recipe: Recipe) -> bool:
    """Whether the recipe is for vLLM on a GPU, of which passes are sums of operators."""
    return traits_of(recipe.engine.name).timed_by_pass and recipe.hardware.device == "cuda"


def _refuse_cache(recipe: Recipe, model: ModelShapes, operators: GpuOperators) -> None:
    """Raise `InputError` for a KV cache of 8 bits on a GPU where its reading was not measured, or
    was measured faster than the memory is, and for bytes of a token that are not the cache's.
    """
    vllm = recipe.engine.vllm
    dtype = vllm.kv_cache_dtype if vllm else None
    if special_of(recipe.model.config).best and dtype is None:
        problem = "with sparse attention vLLM chooses the dtype of the KV cache by the GPU"
        raise InputError(problem, "name one: engine.vllm.kv_cache_dtype: bfloat16, or fp8")
    if model.cache_bytes >= ACTIVATION_BYTES or dtype is None:
        return
    read = operators.kernels["decode"].get("fp8")
    # Faster than the memory: what was measured was not read from there.
    unknown = read is None or read.terms["bytes_per_s"] > operators.bandwidth
    if unknown and not any(isinstance(sort.mixer, LatentShapes) for sort in model.sorts):
        _refuse([f"a KV cache in {dtype} on {operators.name}"], MEASURE)
    gpu = recipe.hardware.gpu
    packed = gpu_of(gpu).packs_sparse if gpu else True
    found = kv_bytes_per_token(recipe.model.config, dtype, packed=packed)
    claimed = recipe.model.kv_bytes_per_token
    if found and claimed not in (None, found[0]):
        problem = f"model.kv_bytes_per_token is {claimed}, and a cache in {dtype} has {found[0]}"
        raise InputError(problem, found[1])


def analytic_profile(
    recipe: Recipe, head: EnvelopeFields, constants: EngineConstants | None = None
) -> Profile:
    """Return the profile that `pass_times` predict.

    Raises `InputError` with the name of what they do not know of the recipe's model or GPU, or of
    numbers that the recipe lacks.
    """
    times = pass_times(recipe, constants)
    budget = _budget(recipe)
    resolved = _resolved(recipe, budget)
    facts = _facts(recipe, times, budget, resolved)
    return computed_profile(recipe, head, facts, times, _steps(recipe, facts, times, resolved))


def pass_shape(
    rows: int, cached: int, prompts: int = 0, new: int = 0, before: int = 0, window: int = 0
) -> StepShape:
    """Return the pass of `rows` decodes with `cached` tokens each, beside chunks of these
    `prompts`: `new` tokens each, behind `before` cached ones. `window`: see `PassLaw`.
    """
    attended = prompts * chunk_attended(before, new)
    shape = StepShape(rows, rows * cached, prompts, prompts * new, attended, prompts * before)
    if window:
        shape.decode_inside = rows * min(cached, window - 1)
        shape.prefill_inside = prompts * chunk_inside(before, new, window)
    return shape


def computed_profile(
    recipe: Recipe,
    head: EnvelopeFields,
    facts: EngineFacts,
    times: ComputedPasses,
    passes: StepsProfile,
) -> Profile:
    """Return the recipe's grid, computed by `times`, beside `passes`."""
    points, skipped = grid(recipe.profile, facts)
    prefill = []
    decode = []
    probes = []
    slices = []
    for point in points:
        n = point.batch_size
        length = point.length
        if point.kind == "prefill":
            seconds = [times.one(pass_shape(0, 0, n, length, window=times.window))]
            prefill.append(PrefillPoint(batch_size=n, input_length=length, seconds=seconds))
        else:
            seconds = [times.one(pass_shape(n, length, window=times.window))]
            decode.append(DecodePoint(batch_size=n, cached_length=length, seconds=seconds))
    for length, steps in probe_shapes(recipe.profile, facts):
        rows = facts.capacity_tokens // (length + steps)
        probes.append(
            MemoryPoint(input_length=length, steps=steps, largest_ok=rows, smallest_oom=rows + 1)
        )
    shapes = slice_shapes(recipe.profile, safe_tokens(probes, facts), facts.max_model_len)
    for shape in shapes.values():
        n = shape.batch_size
        length = shape.input_length
        steps = shape.steps
        each = [pass_shape(n, length + step, window=times.window) for step in range(1, steps)]
        decode_s = sum(times.seconds(each).tolist()) if each else 0.0
        slice_s = times.one(pass_shape(0, 0, n, length, window=times.window)) + decode_s
        slices.append(SlicePoint(batch_size=n, input_length=length, steps=steps, seconds=slice_s))
    return Profile(
        **head,
        recipe_name=recipe.name,
        workers=recipe.workers,
        clock="wall",
        engine=facts,
        prefill=prefill,
        decode=decode,
        slices=slices,
        memory=probes,
        failed=skipped,
        steps=passes,
    )


def analytic_fit(
    recipe: Recipe, head: EnvelopeFields, constants: EngineConstants | None = None
) -> Fit:
    """Return the laws of `analytic_profile`, which raises `InputError`."""
    return fit_profile(analytic_profile(recipe, head, constants), head)


def refuse_not_computed(recipe: Recipe) -> None:
    """Raise `InputError` for another engine than vLLM on a GPU, and for what would be computed as
    something else.
    """
    if not by_operators(recipe):
        engine = f"engine '{recipe.engine.name}' on {recipe.hardware.name}"
        _refuse([engine], f"it computes engine vllm on a GPU; {MEASURE}")
    model = recipe.model
    vllm = recipe.engine.vllm
    refuse_recipe(recipe)
    scheme = scheme_of(text_config(model.config), model.quantization or "")
    reasons = not_computed(model.config, model.max_model_len, scheme)
    for flag in read_flags(vllm.args if vllm else ())[0]:
        if flag.name in NOT_COMPUTED_FLAGS:
            reasons.append(NOT_COMPUTED_FLAGS[flag.name])
        known = known_flags().get(flag.name)
        if known is not None and known.caches and not flag.negated:
            reasons.append(f"what {flag.name} does to the caches")
    cache = vllm.kv_cache_dtype if vllm else None
    if cache not in (None, model.dtype, *NARROW_CACHES):
        reasons.append(f"a KV cache in {cache}")
    reasons = list(dict.fromkeys(reasons))
    if recipe.hardware.gpu and model.dtype == "float32":
        reasons.append(f"float32 on a {recipe.hardware.gpu}, of which it knows 16 bits")
    _refuse(reasons, MEASURE)


def _refuse(reasons: list[str], hint: str) -> None:
    if reasons:
        raise InputError(f"an analytic profile does not know {', '.join(reasons)}", hint)


def _needed(numbers: Mapping[str, Number | None]) -> list[Number]:
    """These numbers of a recipe. Raises `InputError` with the names of what it lacks."""
    if missing := [name for name, number in numbers.items() if number is None]:
        why = f"an analytic profile needs {', '.join(missing)}"
        raise InputError(why, "see the data sheet and the model")
    return [number for number in numbers.values() if number is not None]


def _resolved(recipe: Recipe, budget: int) -> Resolved | None:
    """Return the cache groups of a model with several, or with sparse attention, in `budget` bytes
    of each GPU; None: it has one cache of full attention.

    Raises `InputError` where the caches of its layers are not all known.
    """
    model = recipe.model
    vllm = recipe.engine.vllm
    groups = groups_of_config(
        model.config,
        (vllm.kv_cache_dtype if vllm else None) or model.dtype,
        (vllm.block_size if vllm else None) or BLOCK_TOKENS,
        recipe.engine.tensor_parallel_size,
        model.max_model_len,
    )
    if groups is None:
        _refuse(["the caches of this model's layers"], MEASURE)
    best = special_of(model.config).best
    if not groups or (is_plain(groups) and not best):
        return None
    if best and model.kv_bytes_per_token:
        groups = [replace(one, page_bytes=one.block * model.kv_bytes_per_token) for one in groups]
    size = bytes_per_block(groups)
    return Resolved(
        groups,
        budget // size - 1,  # vLLM never gives out one of them
        size,
        retention=0,
        max_in_flight_tokens=IN_FLIGHT,
        index_topk=best,
        tp=recipe.engine.tensor_parallel_size,
    )


def _budget(recipe: Recipe) -> int:
    """Return the bytes of each of a worker's GPUs that are left for the KV cache.

    Raises `InputError` where the weights leave no room for a token.
    """
    engine = recipe.engine
    if engine.kv_cache_memory_mib is not None:
        return int(engine.kv_cache_memory_mib * MIB)
    memory_gib, weight_bytes, kv_bytes = _needed(
        {
            "hardware.memory_gib": recipe.hardware.memory_gib,
            "model.weight_bytes": recipe.model.weight_bytes,
            "model.kv_bytes_per_token": recipe.model.kv_bytes_per_token,
        }
    )
    ranks = engine.tensor_parallel_size
    share = engine.gpu_memory_utilization - RESERVED
    model = recipe.model
    own_bytes = weight_bytes_on(model.config, model.quantization or "", weight_bytes, ranks)
    budget = int(memory_gib * GIB * share - own_bytes)
    if budget < kv_bytes / ranks:
        each = "" if ranks == 1 else f" on each of {ranks} GPUs"
        weights = f"the weights, {own_bytes / GIB:.1f} GiB{each}"
        hint = "use more GPUs a worker (engine.tensor_parallel_size), or smaller weights"
        problem = f"{weights}, leave no KV cache in {share:g} of {memory_gib:g} GiB"
        raise InputError(problem, hint)
    return budget


def _facts(
    recipe: Recipe, times: ComputedPasses, budget: int, resolved: Resolved | None
) -> EngineFacts:
    """Return what the engine would resolve; bytes are of each of a worker's GPUs."""
    engine = recipe.engine
    model = recipe.model
    ranks = engine.tensor_parallel_size
    weight_bytes, kv_bytes = _needed(
        {
            "model.weight_bytes": model.weight_bytes,
            "model.kv_bytes_per_token": model.kv_bytes_per_token,
        }
    )
    kv_bytes //= cache_parts(model.config, ranks)
    capacity = budget // kv_bytes
    if resolved is not None:
        longest = model.max_model_len
        capacity = logged_tokens(resolved.groups, resolved.blocks, longest, IN_FLIGHT)
    return EngineFacts(
        engine=engine.name,
        engine_version="",
        model_type=str(model.config.get("model_type", "")),
        parameters=weight_bytes // DTYPE_BYTES[model.dtype],
        dtype=model.dtype,
        device=recipe.hardware.name,
        threads=engine.threads,
        kv_bytes_per_token=kv_bytes,
        kv_budget_bytes=budget,
        capacity_tokens=capacity,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        prefill_emits_token=True,
        tensor_parallel_size=ranks,
        analytic=times.source,
        analytic_error=times.error,
    )


def passes_of(longest: int, capacity: int, window: int = 0) -> list[StepShape]:
    """Return the compositions of passes that a law is fitted to: decodes alone, and chunks of
    prompts beside none, few and many decodes.

    Args:
        longest: tokens of the longest request.
        capacity: tokens of the KV cache; the rows of a pass fit into it.
        window: see `PassLaw`.
    """
    knots = [knot for knot in COMPUTED_KNOTS if knot]
    counts = sorted({*ROWS, *(knot for knot in knots if knot <= PASS_ROWS)})
    lengths = sorted({max(longest >> k, 1) for k in (0, 1, 2, 4, 6)})
    if window:
        lengths = sorted({*lengths, window // 4, window // 2})
    found = [
        pass_shape(count, cached, window=window)
        for count, cached in product(counts, lengths)
        if count * cached <= capacity
    ]
    beside = [(0, 0), *product(BESIDE_ROWS, lengths)]
    totals = [*(knot for knot in knots if knot >= 32), PASS_TOKENS]
    for total, (rows, cached), before in product(totals, beside, (0, longest // 2)):
        chunk = total - rows
        prompts = -(-chunk // (longest - before))
        if chunk > 0 and rows * cached + chunk + prompts * before <= capacity:
            found.append(pass_shape(rows, cached, prompts, chunk // prompts, before, window))
    return found


def _steps(
    recipe: Recipe, facts: EngineFacts, times: ComputedPasses, resolved: Resolved | None
) -> StepsProfile:
    """Return the passes of `passes_of`, and what lies between them where the engine does not plan a
    pass while another one runs.
    """
    vllm = recipe.engine.vllm
    ahead = not (vllm and ONE_BY_ONE in vllm.args)
    experts, per_token = experts_of(recipe.model.config)
    block_tokens = (vllm.block_size if vllm else None) or BLOCK_TOKENS
    shapes = passes_of(facts.max_model_len, facts.capacity_tokens, times.window)
    engine = times.engine
    points = []
    for shape, seconds in zip(shapes, times.seconds(shapes).tolist(), strict=True):
        host_s = [] if ahead else [engine.host_s + engine.host_row_s * shape.rows]
        points.append(point_of(shape, seconds).model_copy(update={"host_s": host_s}))
    return StepsProfile(
        block_tokens=block_tokens,
        blocks=resolved.blocks if resolved else facts.capacity_tokens // block_tokens,
        max_num_batched_tokens=PASS_TOKENS,
        async_scheduling=ahead,
        least_s=times.least_s,
        experts=experts,
        experts_per_token=per_token,
        resolved=resolved,
        points=points,
        front=[
            FrontPoint(
                rows=rows, prompt_tokens=0, seconds=engine.front_s + engine.front_row_s * rows
            )
            for rows in (FRONT_ROWS if engine.front_s else ())
        ],
    )
