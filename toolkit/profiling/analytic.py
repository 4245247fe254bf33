"""A profile of a GPU that is not at hand, computed from the recipe's numbers for engine vllm.

It has the grid and the sections of a measured profile, so everything that reads a profile reads it
too. It is marked as analytic, and its assumptions are written into it (`engine.analytic`).

A pass is the sum of its operators (`estimators.gpu_operators`), which others measured on that GPU.
How far off predictions by these laws were beside measured servers of that GPU is written into the
profile and the fit (`engine.analytic_error`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

from toolkit.catalogue.classes import HINT, refused
from toolkit.catalogue.gpus import gpu_of
from toolkit.catalogue.models import (
    cache_parts,
    experts_of,
    kv_bytes_per_token,
    not_computed,
    special_of,
)
from toolkit.catalogue.quantization import scheme_of
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.elsewhere import error_words, measured_elsewhere
from toolkit.estimators.fitting import fit_profile
from toolkit.estimators.forms import Floats
from toolkit.estimators.gpu_operators import (
    ACTIVATION_BYTES,
    MEASURE,
    GpuOperators,
    ModelShapes,
    operators_of,
)
from toolkit.estimators.part_fits import point_of
from toolkit.estimators.steps import StepShape, chunk_attended
from toolkit.files.fit import Fit
from toolkit.files.io import EnvelopeFields
from toolkit.files.modelled import classes_of
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
from toolkit.profiling.grid import PROMPTS, grid, slice_shapes
from toolkit.profiling.measure import probe_shapes, safe_tokens
from toolkit.profiling.shapes import shapes_of
from toolkit.units import GIB, MIB

Number = TypeVar("Number", int, float)
BLOCK_TOKENS = 16  # tokens of a KV block, vLLM's default on a GPU
NOT_COMPUTED_FLAGS = {  # how flags in `engine.vllm.args` begin, and what they turn on
    "--kv-cache-dtype": "a KV cache of another dtype",
    "--quantization": "quantized weights",
    "--tensor-parallel-size": "tensor parallelism",
    "--enable-expert-parallel": "expert parallelism",
}
NARROW_CACHES = ("fp8", "fp8_e4m3")  # one format; its kernels were measured on some GPUs
EAGER_LAYER_S = 0.8e-3  # launches of a layer's kernels one by one: our own H200 run, 25.5 ms of 32
FRONT_ROWS = (1, 16, 64)  # at which the front is written down
PASS_TOKENS = 8192  # new tokens in the largest pass: the upper bound of tuning's search


@dataclass(slots=True, frozen=True)
class ComputedPasses:
    """Seconds [n] of passes [n], where they come from, how far off they are known to be, and what
    clients wait beside them, constant and for each running row.
    """

    seconds: Callable[[Sequence[StepShape]], Floats]
    source: str
    error: AnalyticError | None = None
    front_s: float = 0.0
    front_row_s: float = 0.0

    def one(self, shape: StepShape) -> float:
        """Seconds of one pass."""
        return float(self.seconds([shape])[0])


def pass_times(recipe: Recipe) -> ComputedPasses:
    """Return the times of the recipe's passes, by the sums of operators.

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

    engine = operators.engine
    return ComputedPasses(seconds, source, error, engine.front_s, engine.front_row_s)


def by_operators(recipe: Recipe) -> bool:
    """Whether the recipe is for vLLM on a GPU, of which passes are sums of operators."""
    return traits_of(recipe.engine.name).timed_by_pass and recipe.hardware.device == "cuda"


def _refuse_cache(recipe: Recipe, model: ModelShapes, operators: GpuOperators) -> None:
    """Raise `InputError` for a KV cache of 8 bits on a GPU where its reading was not measured, or
    was measured faster than the memory is, and for bytes of a token that are not the cache's.
    """
    vllm = recipe.engine.vllm
    dtype = vllm.kv_cache_dtype if vllm else None
    if model.cache_bytes >= ACTIVATION_BYTES or dtype is None:
        return
    read = operators.decode
    # Faster than the memory: what was measured was not read from there.
    if read.narrow == 1.0 or read.narrow * read.bytes_per_s > operators.bandwidth:
        _refuse([f"a KV cache in {dtype} on {operators.name}"], MEASURE)
    found = kv_bytes_per_token(recipe.model.config, dtype)
    claimed = recipe.model.kv_bytes_per_token
    if found and claimed not in (None, found[0]):
        problem = f"model.kv_bytes_per_token is {claimed}, and a cache in {dtype} has {found[0]}"
        raise InputError(problem, found[1])


def analytic_profile(recipe: Recipe, head: EnvelopeFields) -> Profile:
    """Return the profile that `pass_times` predict.

    Raises `InputError` with the name of what they do not know of the recipe's model or GPU, or of
    numbers that the recipe lacks.
    """
    times = pass_times(recipe)
    facts = _facts(recipe, times)
    return computed_profile(recipe, head, facts, times, _steps(recipe, facts, times))


def prefill_shape(batch_size: int, input_length: int) -> StepShape:
    """Return the pass over [N, L] tokens."""
    n = batch_size
    return StepShape(0, 0, n, n * input_length, n * chunk_attended(0, input_length))


def decode_shape(batch_size: int, cached_length: int) -> StepShape:
    """Return a step of N rows with L cached tokens each."""
    return StepShape(batch_size, batch_size * cached_length)


def computed_profile(
    recipe: Recipe,
    head: EnvelopeFields,
    facts: EngineFacts,
    times: ComputedPasses,
    passes: StepsProfile,
) -> Profile:
    """Return the recipe's grid as `times` compute it, beside `passes`."""
    points, skipped = grid(recipe.profile, facts)
    prefill = []
    decode = []
    probes = []
    slices = []
    for point in points:
        n = point.batch_size
        length = point.length
        if point.kind == "prefill":
            seconds = [times.one(prefill_shape(n, length))]
            prefill.append(PrefillPoint(batch_size=n, input_length=length, seconds=seconds))
        else:
            seconds = [times.one(decode_shape(n, length))]
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
        each = [decode_shape(n, length + step) for step in range(1, steps)]
        decode_s = sum(times.seconds(each).tolist()) if each else 0.0
        slice_s = times.one(prefill_shape(n, length)) + decode_s
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


def analytic_fit(recipe: Recipe, head: EnvelopeFields) -> Fit:
    """Return the laws of `analytic_profile`, which raises `InputError`."""
    return fit_profile(analytic_profile(recipe, head), head)


def refuse_not_computed(recipe: Recipe) -> None:
    """Raise `InputError` for another engine than vLLM on a GPU, and for what would be computed as
    something else.
    """
    if not by_operators(recipe):
        engine = f"engine '{recipe.engine.name}' on {recipe.hardware.name}"
        _refuse([engine], f"it computes engine vllm on a GPU; {MEASURE}")
    model = recipe.model
    vllm = recipe.engine.vllm
    unmodelled = refused(classes_of(recipe))
    reasons = not_computed(special_of(model.config, model.max_model_len), _scheme(recipe))
    reasons += [one.what for one in unmodelled]
    for flag in vllm.args if vllm else ():
        reasons += [what for start, what in NOT_COMPUTED_FLAGS.items() if flag.startswith(start)]
    cache = vllm.kv_cache_dtype if vllm else None
    if cache not in (None, model.dtype, *NARROW_CACHES):
        reasons.append(f"a KV cache in {cache}")
    reasons = list(dict.fromkeys(reasons))
    if recipe.hardware.gpu and model.dtype == "float32":
        reasons.append(f"float32 on a {recipe.hardware.gpu}, of which it knows 16 bits")
    _refuse(reasons, HINT if unmodelled else MEASURE)


def _refuse(reasons: list[str], hint: str) -> None:
    if reasons:
        raise InputError(f"an analytic profile does not know {', '.join(reasons)}", hint)


def _scheme(recipe: Recipe) -> str:
    scheme = scheme_of(recipe.model.config, recipe.model.quantization or "")
    return scheme.name if scheme else ""


def _needed(numbers: Mapping[str, Number | None]) -> list[Number]:
    """These numbers of a recipe. Raises `InputError` with the names of those that it lacks."""
    if missing := [name for name, number in numbers.items() if number is None]:
        why = f"an analytic profile needs {', '.join(missing)}"
        raise InputError(why, "see the data sheet and the model")
    return [number for number in numbers.values() if number is not None]


def _facts(recipe: Recipe, times: ComputedPasses) -> EngineFacts:
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
    parameters = weight_bytes // DTYPE_BYTES[model.dtype]
    kv_bytes //= cache_parts(special_of(model.config), ranks)
    if engine.kv_cache_memory_mib is not None:
        budget = int(engine.kv_cache_memory_mib * MIB)
    else:
        (memory_gib,) = _needed({"hardware.memory_gib": recipe.hardware.memory_gib})
        weight_bytes //= ranks
        budget = int(memory_gib * GIB * engine.gpu_memory_utilization) - weight_bytes
        if budget < kv_bytes:
            share = f"{engine.gpu_memory_utilization:g} of {memory_gib:g} GiB"
            each = "" if ranks == 1 else f" on each of {ranks} GPUs"
            weights = f"the weights, {weight_bytes / GIB:.1f} GiB{each}"
            hint = "use more GPUs a worker (engine.tensor_parallel_size), or smaller weights"
            raise InputError(f"{weights}, leave no KV cache in {share}", hint)
    return EngineFacts(
        engine=engine.name,
        engine_version="",
        model_type=str(model.config.get("model_type", "")),
        parameters=parameters,
        dtype=model.dtype,
        device=recipe.hardware.name,
        threads=engine.threads,
        kv_bytes_per_token=kv_bytes,
        kv_budget_bytes=budget,
        capacity_tokens=budget // kv_bytes,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        prefill_emits_token=True,
        tensor_parallel_size=ranks,
        analytic=times.source,
        analytic_error=times.error,
    )


def _steps(recipe: Recipe, facts: EngineFacts, times: ComputedPasses) -> StepsProfile:
    """Return passes over the recipe's grid: decoding rows, prompts, and both together. A pass
    includes the gap between two passes.
    """
    spec = recipe.profile
    vllm = recipe.engine.vllm
    experts, per_token = experts_of(recipe.model.config)
    block_tokens = (vllm.block_size if vllm else None) or BLOCK_TOKENS
    # All numbers of rows alone, and a few beside chunks, so that both kinds of pass weigh alike.
    alone = list(product(spec.batch_sizes, _few(spec.cached_lengths, 5), [(0, 0)]))
    beside = [(0, 0), *product(_few(spec.batch_sizes, 3), _few(spec.cached_lengths, 2))]
    chunks = list(product((1, PROMPTS), spec.input_lengths))
    mixed = [(rows, cached, chunk) for (rows, cached), chunk in product(beside, chunks)]
    shapes = []
    for rows, cached, (count, length) in [*alone, *mixed]:
        if rows + count * length > PASS_TOKENS:
            continue
        attended = count * chunk_attended(0, length)
        shapes.append(StepShape(rows, rows * cached, count, count * length, attended))
    pairs = zip(shapes, times.seconds(shapes).tolist(), strict=True)
    return StepsProfile(
        block_tokens=block_tokens,
        blocks=facts.capacity_tokens // block_tokens,
        max_num_batched_tokens=PASS_TOKENS,
        async_scheduling=False,
        experts=experts,
        experts_per_token=per_token,
        points=[point_of(*pair) for pair in pairs],
        front=[
            FrontPoint(rows=rows, prompt_tokens=0, seconds=times.front_s + times.front_row_s * rows)
            for rows in (FRONT_ROWS if times.front_s else ())
        ],
    )


def _few(values: Sequence[int], count: int) -> list[int]:
    """At most so many of the values, the least and the greatest among them."""
    ordered = sorted(set(values))
    places = np.linspace(0, len(ordered) - 1, min(count, len(ordered)))
    return [ordered[int(place)] for place in places]
