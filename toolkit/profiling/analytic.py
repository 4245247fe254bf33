"""A profile of hardware that is not available: a roofline from the recipe's numbers.

It has the grid and the sections of a measured profile, so everything that reads a profile reads it
too. It is marked as analytic, and its assumptions are written into it (`engine.analytic`). The
efficiency factors may come from a measured profile of the same engine on other hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

from toolkit.catalogue.models import not_computed, special_of
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.roofline import Efficiency, ModelSizes, Peaks, Roofline, fit_efficiency
from toolkit.estimators.steps import chunk_attended
from toolkit.files.io import EnvelopeFields
from toolkit.files.profile import (
    DecodePoint,
    EngineFacts,
    MemoryPoint,
    PrefillPoint,
    Profile,
    SlicePoint,
    StepPoint,
    StepsProfile,
)
from toolkit.files.recipe import DTYPE_BYTES, Recipe
from toolkit.profiling.grid import PROMPTS, grid, slice_shapes
from toolkit.profiling.measure import probe_shapes, safe_tokens
from toolkit.units import GIB, MIB

Number = TypeVar("Number", int, float)
# What a plain eager engine reaches, roughly. Not measured.
ASSUMED = Efficiency(compute=0.5, traffic=0.7, pass_s=0.005)
BLOCK_TOKENS = 16  # tokens of a KV block, vLLM's default on a GPU
NOT_COMPUTED_FLAGS = {  # how flags in `engine.vllm.args` begin, and what they turn on
    "--enable-lora": "LoRA",
    "--lora-modules": "LoRA",
    "--kv-cache-dtype": "a KV cache of another dtype",
    "--quantization": "quantized weights",
    "--speculative-config": "speculative decoding",
    "--pipeline-parallel-size": "pipeline parallelism",
    "--tensor-parallel-size": "tensor parallelism",
    "--enable-expert-parallel": "expert parallelism",
}
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
    peaks, sizes = peaks_of(recipe), sizes_of(recipe)
    efficiency, error = fit_efficiency(peaks, sizes, measured.prefill, measured.decode)
    return Basis(efficiency, f"fitted to {measured.recipe_name}, median error {error:.0f} %")


def analytic_profile(recipe: Recipe, head: EnvelopeFields, basis: Basis | None = None) -> Profile:
    """The profile that the roofline predicts. `InputError` names what it does not know of the
    recipe's model (`refuse_not_computed`), and numbers that the recipe lacks.
    """
    refuse_not_computed(recipe)
    basis = basis or Basis(ASSUMED, "assumed")
    line = Roofline(peaks_of(recipe), sizes_of(recipe), basis.efficiency)
    facts = _facts(recipe, line.sizes, basis.text())
    points, skipped = grid(recipe.profile, facts)
    prefill, decode, probes, slices = [], [], [], []
    for point in points:
        n, length = point.batch_size, point.length
        if point.kind == "prefill":
            seconds = [line.prefill_s(n, length)]
            prefill.append(PrefillPoint(batch_size=n, input_length=length, seconds=seconds))
        else:
            seconds = [line.decode_s(n, length)]
            decode.append(DecodePoint(batch_size=n, cached_length=length, seconds=seconds))
    for length, steps in probe_shapes(recipe.profile, facts):
        rows = facts.capacity_tokens // (length + steps)
        probes.append(
            MemoryPoint(input_length=length, steps=steps, largest_ok=rows, smallest_oom=rows + 1)
        )
    shapes = slice_shapes(recipe.profile, safe_tokens(probes, facts), facts.max_model_len)
    for shape in shapes.values():
        n, length, steps = shape.batch_size, shape.input_length, shape.steps
        decode_s = sum(line.decode_s(n, length + step) for step in range(1, steps))
        slice_s = line.prefill_s(n, length) + decode_s
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
        steps=_steps(recipe, facts, line) if traits_of(recipe.engine.name).timed_by_pass else None,
    )


def refuse_not_computed(recipe: Recipe) -> None:
    """Raise `InputError` for what the roofline would compute as something else: it knows a dense
    model with full attention and weights of `model.dtype`, on one device.
    """
    model, vllm = recipe.model, recipe.engine.vllm
    stored = model.config.get("quantization_config")
    scheme: str = model.quantization or ""
    if isinstance(stored, dict):
        scheme = str(stored.get("quant_method") or "quantization_config")
    special = special_of(model.config)
    reasons = not_computed(special, scheme, recipe.engine.tensor_parallel_size)
    for flag in vllm.args if vllm else ():
        reasons += [what for start, what in NOT_COMPUTED_FLAGS.items() if flag.startswith(start)]
    if recipe.hardware.gpu and model.dtype == "float32":
        reasons.append(f"float32 on a {recipe.hardware.gpu}, of which it knows 16 bits")
    if reasons:
        problem = f"an analytic profile does not know {', '.join(reasons)}"
        hint = "measure it on the GPU, without --analytic: llmctl profile RECIPE"
        if special.cache_problem:
            hint = (
                "llmctl models one kind of KV cache per model; choose a model with full attention"
            )
        raise InputError(problem, hint)


def peaks_of(recipe: Recipe) -> Peaks:
    """The device's peak compute and bandwidth, from the recipe."""
    tflops, gb_s = recipe.hardware.peak_tflops, recipe.hardware.bandwidth_gb_s
    tflops, gb_s = _needed({"hardware.peak_tflops": tflops, "hardware.bandwidth_gb_s": gb_s})
    return Peaks(tflops * 1e12, gb_s * 1e9)


def sizes_of(recipe: Recipe) -> ModelSizes:
    """The model's sizes, from the recipe."""
    model, config = recipe.model, recipe.model.config
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    heads, head_dim = config.get("num_attention_heads"), config.get("head_dim")
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


def _facts(recipe: Recipe, sizes: ModelSizes, analytic: str) -> EngineFacts:
    engine = recipe.engine
    if engine.kv_cache_memory_mib is not None:
        budget = int(engine.kv_cache_memory_mib * MIB)
    else:
        (memory_gib,) = _needed({"hardware.memory_gib": recipe.hardware.memory_gib})
        budget = int(memory_gib * GIB * engine.gpu_memory_utilization) - sizes.weight_bytes
        if budget < sizes.kv_bytes_per_token:
            share = f"{engine.gpu_memory_utilization:g} of {memory_gib:g} GiB"
            weights = f"the weights, {sizes.weight_bytes / GIB:.1f} GiB"
            raise InputError(f"{weights}, leave no KV cache in {share}")
    return EngineFacts(
        engine=engine.name,
        engine_version="",
        model_type=str(recipe.model.config.get("model_type", "")),
        parameters=sizes.weights,
        dtype=recipe.model.dtype,
        device=recipe.hardware.name,
        threads=engine.threads,
        kv_bytes_per_token=sizes.kv_bytes_per_token,
        kv_budget_bytes=budget,
        capacity_tokens=budget // sizes.kv_bytes_per_token,
        max_model_len=recipe.model.max_model_len,
        vocab_size=recipe.model.vocab_size,
        prefill_emits_token=True,
        analytic=analytic,
    )


def _steps(recipe: Recipe, facts: EngineFacts, line: Roofline) -> StepsProfile:
    """Passes of a paged engine over the recipe's grid: decoding rows, prompts, and both together.

    `pass_s` includes the gap between two passes. A client's further waiting is unknown: 0.
    """
    spec, vllm = recipe.profile, recipe.engine.vllm
    block_tokens = (vllm.block_size if vllm else None) or BLOCK_TOKENS
    lengths = sorted(set(spec.cached_lengths))
    # A roofline is linear in the cached length, so three lengths are enough.
    few = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    decoding = [(0, 0), *((n, length) for n in spec.batch_sizes for length in few)]
    chunks = [(0, 0), *((k, length) for k in (1, PROMPTS) for length in spec.input_lengths)]
    points = []
    for (rows, cached), (count, length) in product(decoding, chunks):
        held, new = rows * cached, count * length  # tokens of the decoding rows, and of prompts
        if not rows + count or rows + new > PASS_TOKENS:
            continue
        attended = count * chunk_attended(0, length)
        point = StepPoint(
            decodes=rows,
            decode_cached=held,
            prefills=count,
            prefill_tokens=new,
            prefill_attended=attended,
            seconds=[line.pass_s(rows + new, held + attended, held + new)],
            host_s=[],
        )
        points.append(point)
    return StepsProfile(
        block_tokens=block_tokens,
        blocks=facts.capacity_tokens // block_tokens,
        max_num_batched_tokens=PASS_TOKENS,
        async_scheduling=False,
        points=points,
        front=[],
    )
