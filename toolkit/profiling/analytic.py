"""A profile of hardware that is not available, computed from the recipe's numbers.

It has the grid and the sections of a measured profile, so everything that reads a profile reads it
too. It is marked as analytic, and its assumptions are written into it (`engine.analytic`).

- A pass of vLLM on a GPU is the sum of its operators (`estimators.gpu_operators`), which others
  measured on that GPU or on one like it. How far off predictions by these laws were beside measured
  servers of that GPU is written into the profile and the fit (`engine.analytic_error`).
- A pass of other engines is a roofline. Its efficiency is assumed, or comes from a measured profile
  of the same engine on other hardware.
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
from toolkit.estimators.fitting import fit_file, fit_profile
from toolkit.estimators.forms import Floats
from toolkit.estimators.gpu_operators import (
    ACTIVATION_BYTES,
    GpuOperators,
    ModelShapes,
    measured_gpus,
    operators_of,
)
from toolkit.estimators.part_fits import point_of
from toolkit.estimators.roofline import (
    Efficiency,
    ModelSizes,
    Peaks,
    Roofline,
    decode_shape,
    fit_efficiency,
    prefill_shape,
)
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
# What a plain eager engine reaches, roughly. Not measured.
ASSUMED = Efficiency(compute=0.5, traffic=0.7, pass_s=0.005)
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
class Basis:
    """The efficiency and its source, in words for `EngineFacts.analytic`."""

    efficiency: Efficiency
    source: str

    def text(self) -> str:
        """All assumptions, in one line."""
        one = self.efficiency
        shares = f"{one.compute:.3g} of the peak FLOP/s, {one.traffic:.3g} of the bandwidth"
        return f"roofline with {shares}, {one.pass_s * 1e3:.3g} ms per pass ({self.source})"


def basis_of(measured: Profile, recipe: Recipe) -> Basis:
    """The efficiency that a profile measured by `recipe` shows; `InputError` if it is analytic."""
    if measured.engine.analytic:
        why = "the profile to learn from is analytic itself"
        raise InputError(why, "give one that was measured")
    peaks = peaks_of(recipe)
    sizes = sizes_of(recipe)
    efficiency, error = fit_efficiency(peaks, sizes, measured.prefill, measured.decode)
    return Basis(efficiency, f"fitted to {measured.recipe_name}, median error {error:.0f} %")


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


def pass_times(recipe: Recipe, basis: Basis | None = None) -> ComputedPasses:
    """The times of the recipe's passes: the sums of operators for vLLM on a GPU, else a roofline
    with the efficiency of `basis`. `InputError` names what is not known of the model.
    """
    refuse_not_computed(recipe)
    if basis is None and by_operators(recipe):
        return _operator_times(recipe)
    _refuse_roofline(recipe)
    basis = basis or Basis(ASSUMED, "assumed")
    line = Roofline(peaks_of(recipe), sizes_of(recipe), basis.efficiency)
    return ComputedPasses(line.pass_seconds, basis.text())


def by_operators(recipe: Recipe) -> bool:
    """Whether the recipe's passes are computed as sums of operators."""
    return traits_of(recipe.engine.name).timed_by_pass and recipe.hardware.device == "cuda"


def _operator_times(recipe: Recipe) -> ComputedPasses:
    peaks = peaks_of(recipe)
    vllm = recipe.engine.vllm
    gpu = recipe.hardware.gpu
    link = gpu_of(gpu).link_gb_s * 1e9 if gpu else None
    name = gpu or recipe.hardware.name
    operators = operators_of(name, peaks.bytes_per_s, peaks.flops_per_s, link)
    model = shapes_of(recipe)
    _refuse_cache(recipe, model, operators)
    ranks = recipe.engine.tensor_parallel_size
    operators.pass_seconds(model, [StepShape(1, 1)], ranks)  # refuses what has no coefficients
    experts = model.experts > 0
    error = measured_elsewhere(operators.name, experts=experts)
    source = f"sum of {operators.source}; {error_words(error, experts=experts)}"
    launch_s = model.layers * EAGER_LAYER_S if vllm and vllm.enforce_eager else 0.0
    if launch_s:
        source += f"; without CUDA graphs a pass takes at least {launch_s * 1e3:.0f} ms"

    def seconds(shapes: Sequence[StepShape]) -> Floats:
        return np.maximum(operators.pass_seconds(model, shapes, ranks), launch_s)

    engine = operators.engine
    return ComputedPasses(seconds, source, error, engine.front_s, engine.front_row_s)


def _refuse_cache(recipe: Recipe, model: ModelShapes, operators: GpuOperators) -> None:
    """Raise `InputError` for a KV cache of 8 bits on a GPU where its reading was not measured, or
    was measured faster than the memory is, and for bytes of a token that are not the cache's.
    """
    vllm = recipe.engine.vllm
    dtype = vllm.kv_cache_dtype if vllm else None
    if model.cache_bytes >= ACTIVATION_BYTES or dtype is None:
        return
    read = operators.decode
    measured = operators.name in measured_gpus() and read.narrow != 1.0
    # Faster than the memory: what was measured was not read from there.
    if not measured or read.narrow * read.bytes_per_s > operators.bandwidth:
        _refuse([f"a KV cache in {dtype} on {operators.name}"], MEASURE)
    found = kv_bytes_per_token(recipe.model.config, dtype)
    claimed = recipe.model.kv_bytes_per_token
    if found and claimed not in (None, found[0]):
        problem = f"model.kv_bytes_per_token is {claimed}, and a cache in {dtype} has {found[0]}"
        raise InputError(problem, found[1])


def analytic_profile(recipe: Recipe, head: EnvelopeFields, basis: Basis | None = None) -> Profile:
    """The profile that `pass_times` predict. `InputError` names what they do not know of the
    recipe's model, and numbers that the recipe lacks.
    """
    times = pass_times(recipe, basis)
    facts = _facts(recipe, sizes_of(recipe), times)
    timed_by_pass = traits_of(recipe.engine.name).timed_by_pass
    passes = _steps(recipe, facts, times) if timed_by_pass else None
    return computed_profile(recipe, head, facts, times, passes)


def computed_profile(
    recipe: Recipe,
    head: EnvelopeFields,
    facts: EngineFacts,
    times: ComputedPasses,
    passes: StepsProfile | None,
) -> Profile:
    """The recipe's grid as `times` compute it, beside `passes`."""
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
    """The laws of `analytic_profile`. `InputError` likewise."""
    profile = analytic_profile(recipe, head)
    return fit_file(profile, fit_profile(profile), head)


def refuse_not_computed(recipe: Recipe) -> None:
    """Raise `InputError` for what would be computed as something else."""
    model = recipe.model
    vllm = recipe.engine.vllm
    unmodelled = refused(classes_of(recipe))
    reasons = not_computed(special_of(model.config, model.max_model_len), _scheme(recipe))
    reasons += [one.what for one in unmodelled]
    for flag in vllm.args if vllm else ():
        reasons += [what for start, what in NOT_COMPUTED_FLAGS.items() if flag.startswith(start)]
    cache = vllm.kv_cache_dtype if vllm else None
    if cache not in (None, model.dtype) and not (cache in NARROW_CACHES and by_operators(recipe)):
        reasons.append(f"a KV cache in {cache}")
    reasons = list(dict.fromkeys(reasons))
    if recipe.hardware.gpu and model.dtype == "float32":
        reasons.append(f"float32 on a {recipe.hardware.gpu}, of which it knows 16 bits")
    hint = MEASURE
    if any(one.name == "lora" for one in unmodelled):
        hint = "measure a server with an adapter from outside: llmctl docs explanation/profiling"
    elif unmodelled:
        hint = HINT
    _refuse(reasons, hint)


def _refuse_roofline(recipe: Recipe) -> None:
    """Raise `InputError` for what a roofline does not know, beside `refuse_not_computed`: it knows
    a dense model with weights of `model.dtype` on one device.
    """
    reasons = []
    if recipe.engine.tensor_parallel_size > 1:
        ranks = recipe.engine.tensor_parallel_size
        reasons.append(f"tensor parallelism (tensor_parallel_size {ranks})")
    if experts := special_of(recipe.model.config).experts:
        reasons.append(f"mixtures of experts ({experts} experts)")
    if scheme := _scheme(recipe):
        reasons.append(f"quantized weights ({scheme})")
    _refuse(reasons, f"of engine '{recipe.engine.name}'; {MEASURE}")


MEASURE = "measure it on the GPU, without --analytic: llmctl profile RECIPE"


def _refuse(reasons: list[str], hint: str) -> None:
    if reasons:
        raise InputError(f"an analytic profile does not know {', '.join(reasons)}", hint)


def _scheme(recipe: Recipe) -> str:
    scheme = scheme_of(recipe.model.config, recipe.model.quantization or "")
    return scheme.name if scheme else ""


def peaks_of(recipe: Recipe) -> Peaks:
    """The device's peak compute and bandwidth, from the recipe."""
    tflops = recipe.hardware.peak_tflops
    gb_s = recipe.hardware.bandwidth_gb_s
    tflops, gb_s = _needed({"hardware.peak_tflops": tflops, "hardware.bandwidth_gb_s": gb_s})
    return Peaks(tflops * 1e12, gb_s * 1e9)


def sizes_of(recipe: Recipe) -> ModelSizes:
    """The model's sizes, from the recipe."""
    model = recipe.model
    config = recipe.model.config
    layers = config.get("num_hidden_layers")
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
    head_dim = config.get("head_dim")
    width = heads * head_dim if isinstance(heads, int) and isinstance(head_dim, int) else hidden
    weight_bytes, kv_bytes, layers, width = _needed(
        {
            "model.weight_bytes": model.weight_bytes,
            "model.kv_bytes_per_token": model.kv_bytes_per_token,
            "model.config.num_hidden_layers": layers if isinstance(layers, int) else None,
            "model.config.hidden_size": width if isinstance(width, int) else None,
        }
    )
    weights = weight_bytes // DTYPE_BYTES[model.dtype]
    return ModelSizes(weight_bytes, weights, layers, width, kv_bytes)


def _needed(numbers: Mapping[str, Number | None]) -> list[Number]:
    """These numbers of a recipe. Raises `InputError` with the names of those that it lacks."""
    if missing := [name for name, number in numbers.items() if number is None]:
        why = f"an analytic profile needs {', '.join(missing)}"
        raise InputError(why, "see the data sheet and the model")
    return [number for number in numbers.values() if number is not None]


def _facts(recipe: Recipe, sizes: ModelSizes, times: ComputedPasses) -> EngineFacts:
    """What the engine would resolve; bytes are of each of a worker's GPUs."""
    engine = recipe.engine
    ranks = recipe.engine.tensor_parallel_size
    kv_bytes = sizes.kv_bytes_per_token // cache_parts(special_of(recipe.model.config), ranks)
    if engine.kv_cache_memory_mib is not None:
        budget = int(engine.kv_cache_memory_mib * MIB)
    else:
        (memory_gib,) = _needed({"hardware.memory_gib": recipe.hardware.memory_gib})
        weight_bytes = sizes.weight_bytes // ranks
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
        model_type=str(recipe.model.config.get("model_type", "")),
        parameters=sizes.weights,
        dtype=recipe.model.dtype,
        device=recipe.hardware.name,
        threads=engine.threads,
        kv_bytes_per_token=kv_bytes,
        kv_budget_bytes=budget,
        capacity_tokens=budget // kv_bytes,
        max_model_len=recipe.model.max_model_len,
        vocab_size=recipe.model.vocab_size,
        prefill_emits_token=True,
        tensor_parallel_size=ranks,
        analytic=times.source,
        analytic_error=times.error,
    )


def _steps(recipe: Recipe, facts: EngineFacts, times: ComputedPasses) -> StepsProfile:
    """Passes of a paged engine over the recipe's grid: decoding rows, prompts, and both together.

    A pass includes the gap between two passes. A client's further waiting is known of vLLM on a
    GPU, and elsewhere taken as 0.
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
