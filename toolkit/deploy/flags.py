"""Values that other engines' flags take, out of a fit's laws and a plan's policy.

The laws hold for the engine that was measured. Where that is another than the one whose flags these become, they are a
place to start from, and `foreign` says so.
"""

from __future__ import annotations

from toolkit.deploy.order import Order, Reckoned
from toolkit.deploy.reckon import GIB, gap_target
from toolkit.deploy.threshold import ttft_targets
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.sched.protocols import LatencyLaw

SERVERS = ("openai", "vllm", "sglang")  # engines that schedule by themselves, as those do whose flags these are
LEAST_CHUNK, MOST_CHUNK = 256, 65536


def check_servable_elsewhere(recipe: Recipe, engine: str) -> None:
    """`InputError` where `engine` could not load the recipe's model."""
    if recipe.model.source == "random":
        raise InputError(
            f"{engine} cannot load the model of '{recipe.name}': its random weights are built by llmctl",
            "choose a recipe whose model.source is a folder or a hub id",
        )
    if recipe.model.source.startswith("-"):
        raise InputError(
            f"model.source {recipe.model.source!r} would be an option of {engine}", "give its folder as ./-..."
        )


def foreign(order: Order, engine: str) -> str:
    """What to know where the laws are not of such an engine; ''."""
    measured = order.plan.fit.engine.engine
    if measured in SERVERS:
        return ""
    return (
        f"the laws are of engine '{measured}', not of {engine}: these values are a place to start from. "
        f"Measure {engine} itself (engine 'openai' in a recipe) to have its own"
    )


def rows(order: Order) -> Reckoned[int]:
    """Requests that run at once."""
    plan = order.plan
    for name in ("max_batch_size", "max_num_seqs"):
        named = plan.policy.parameters.get(name)
        if isinstance(named, int) and named > 0:
            return Reckoned(named, f"plan: {name} of policy '{plan.policy.name}'")
    if plan.fit.engine.max_rows:
        return Reckoned(plan.fit.engine.max_rows, "fit: what the measured engine runs at most")
    largest = plan.fit.decode.valid.batch_size_max
    return Reckoned(largest, "fit: the largest batch that was measured; beyond it the laws guess")


def chunk(order: Order, running: int) -> Reckoned[int] | None:
    """Prompt tokens of one pass beside `running` rows that decode; None where nothing bounds the pass."""
    tokens = order.plan.policy.parameters.get("max_num_batched_tokens")
    if isinstance(tokens, int):  # decodes included
        source = (
            f"plan: max_num_batched_tokens {tokens} of policy '{order.plan.policy.name}', less a token for each row"
        )
        return Reckoned(tokens - running, source)
    named = order.plan.policy.parameters.get("chunk_tokens")
    if isinstance(named, int) and named > 0:
        return Reckoned(named, f"plan: chunk_tokens of policy '{order.plan.policy.name}'")
    gap = gap_target(order.plan.recipe)
    if gap is None:
        return None
    key, limit = gap
    law, valid = laws_from_fit(order.plan.fit).rounds, order.plan.fit.decode.valid
    running = min(running, valid.batch_size_max)
    middle = valid.length_max // 2
    size = LEAST_CHUNK
    while 2 * size <= MOST_CHUNK and _pass_s(law, 2 * size, running, middle) <= limit:
        size *= 2
    seconds = _pass_s(law, size, running, middle)
    about = f"{size} prompt tokens beside {running} rows of {middle} cached tokens take {seconds:.3g} s"
    return Reckoned(size, f"fit: the largest power of two that keeps {key} {limit:g} s: {about}")


def _pass_s(law: LatencyLaw, prompt: int, running: int, cached: int) -> float:
    return law.prefill_s(1, prompt) + law.decode_s(running, cached, 1)


def queued_tokens(order: Order) -> Reckoned[int] | None:
    """Prompt tokens that may be on their way to a first token: target TTFT x prefill rate, as vLLM documents it."""
    targets = ttft_targets(order.plan.recipe)
    if not targets:
        return None
    key, limit = min(targets.items(), key=lambda one: one[1])
    rate = prefill_rate(order.plan.fit)
    return Reckoned(max(int(limit * rate.value), 1), f"{key} {limit:g} s x {rate.value:,.0f} tokens/s: {rate.source}")


def prefill_rate(fit: Fit) -> Reckoned[float]:
    """Prompt tokens per second of a prefill as long as was measured."""
    length = fit.prefill.valid.length_max
    rate = length / laws_from_fit(fit).latency.prefill_s(1, length)
    error = fit.prefill.error.median_percent
    return Reckoned(rate, f"fit, a prompt of {length:,} tokens alone; median error {error:.1f} %")


def static_share(order: Order) -> Reckoned[float]:
    """The share of a device's memory that weights and KV cache take."""
    plan = order.plan
    memory, weights = plan.recipe.hardware.memory_gib, plan.recipe.model.weight_bytes
    if memory and weights and plan.fit.engine.engine not in SERVERS:
        share = (weights + plan.fit.engine.kv_budget_bytes) / (memory * GIB)
        if 0 < share < 1:
            sizes = f"({weights / GIB:.1f} + {plan.fit.engine.kv_budget_bytes / GIB:.1f}) of {memory:g} GiB"
            return Reckoned(round(share, 3), f"recipe and fit: weights and KV cache take {sizes}")
    return Reckoned(plan.recipe.engine.gpu_memory_utilization, "recipe: engine.gpu_memory_utilization")
