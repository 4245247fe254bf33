"""vLLM with the plan's values as its flags and, where the policy can run inside it, our scheduler.

Flags as `vllm serve --help` of 0.32 has them; a test holds them against vLLM's own parser where
there is one.
"""

from __future__ import annotations

from toolkit.backends.vllm.command import TRIED, flags_of
from toolkit.backends.vllm.setup import refuse_inside
from toolkit.deploy.order import ExplainedValue, Order, Reckoned, Rendered, fill, told
from toolkit.deploy.reckon import GIB, drain_s, gap_target, ttft_targets
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.protocols import LatencyLaw

# Values that other engines' flags take, out of a fit's laws and a plan's policy.
#
# The laws hold for the engine that was measured. Where that is another than the one whose flags
# these become, they are a place to start from, and `foreign` says so.

SERVERS = (
    "openai",
    "vllm",
    "sglang",
)  # engines that schedule by themselves, as those do whose flags these are
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
            f"model.source {recipe.model.source!r} would be an option of {engine}",
            "give its folder as ./-...",
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
    """Prompt tokens of one pass beside `running` rows that decode; None where nothing bounds the
    pass.
    """
    tokens = order.plan.policy.parameters.get("max_num_batched_tokens")
    if isinstance(tokens, int):  # decodes included
        policy = f"policy '{order.plan.policy.name}'"
        source = f"plan: max_num_batched_tokens {tokens} of {policy}, less a token for each row"
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
    about = (
        f"{size} prompt tokens beside {running} rows of {middle} cached tokens take {seconds:.3g} s"
    )
    return Reckoned(size, f"fit: the largest power of two that keeps {key} {limit:g} s: {about}")


def _pass_s(law: LatencyLaw, prompt: int, running: int, cached: int) -> float:
    return law.prefill_s(1, prompt) + law.decode_s(running, cached, 1)


def queued_tokens(order: Order) -> Reckoned[int] | None:
    """Prompt tokens that may be on their way to a first token: target TTFT x prefill rate, as vLLM
    documents it.
    """
    targets = ttft_targets(order.plan.recipe)
    if not targets:
        return None
    key, limit = min(targets.items(), key=lambda one: one[1])
    rate = prefill_rate(order.plan.fit)
    return Reckoned(
        max(int(limit * rate.value), 1),
        f"{key} {limit:g} s x {rate.value:,.0f} tokens/s: {rate.source}",
    )


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
    return Reckoned(
        plan.recipe.engine.gpu_memory_utilization, "recipe: engine.gpu_memory_utilization"
    )


SCHEDULER = "toolkit.backends.vllm.scheduler.LlmctlScheduler"
Flags = list[tuple[str, object]]  # None: a switch


def render(order: Order) -> Rendered:
    """serve.sh, which starts vLLM. `InputError` where vLLM could not load the model."""
    recipe = order.plan.recipe
    check_servable_elsewhere(recipe, "vLLM")
    scheduler = _scheduler(order)
    lines = [*model_lines(recipe), *_fitted(order), *scheduler]
    given = [one for one in lines if one.key.startswith("--")]
    flags: Flags = [(one.key, one.value if one.value else None) for one in given]
    ours = any(one.key == "--scheduler-cls" for one in scheduler)
    remarks = [line for line in (foreign(order, "vLLM"), _install(ours)) if line]
    script = fill(
        "engine.sh",
        comment=order.comment(),
        engine="vLLM",
        key="The key, if there is to be one, is in the environment: VLLM_API_KEY.",
        key_flag="",
        remarks=remarks,
        environment={"LLMCTL_VLLM_PLAN": "plan.json"} if ours else {},
        command=["vllm", "serve", recipe.model.source],
        flags=flags,
    )
    start = f"{_install(ours)}\n\n`./serve.sh` starts it, SIGTERM drains; `llmctl status --url URL` looks at it."
    return Rendered({"serve.sh": script}, lines, start)


def _install(ours: bool) -> str:
    if not ours:
        return "Needs vLLM with --max-num-queued-tokens (0.32 has it)."
    return f"Needs vLLM {TRIED} with llmctl beside it (pip install --no-deps): docs/vllm.md."


def model_lines(recipe: Recipe) -> list[ExplainedValue]:
    """Flags about the model, which the recipe says; vLLM and SGLang share the names of most."""
    model = recipe.model
    lines = [
        ExplainedValue("--host", recipe.serve.host, "recipe: serve.host"),
        ExplainedValue("--port", str(recipe.serve.port or 8000), "recipe: serve.port"),
        ExplainedValue("--dtype", model.dtype, "recipe: model.dtype"),
    ]
    if recipe.serve.served_model_name:
        lines.append(
            ExplainedValue(
                "--served-model-name",
                recipe.serve.served_model_name,
                "recipe: serve.served_model_name",
            )
        )
    if model.revision:
        lines.append(ExplainedValue("--revision", model.revision, "recipe: model.revision"))
    if model.load_format == "dummy":
        lines.append(ExplainedValue("--load-format", "dummy", "recipe: model.load_format"))
    if model.trust_remote_code:
        lines.append(ExplainedValue("--trust-remote-code", "", "recipe: model.trust_remote_code"))
    return lines


def _fitted(order: Order) -> list[ExplainedValue]:
    plan = order.plan
    running, drain, queued = rows(order), drain_s(order), queued_tokens(order)
    prompt = chunk(order, running.value)
    lines = [
        ExplainedValue(
            "--max-model-len", str(plan.fit.engine.max_model_len), "fit: engine.max_model_len"
        ),
        told("--max-num-seqs", running),
    ]
    if plan.recipe.hardware.device == "cuda":
        share = plan.recipe.engine.gpu_memory_utilization
        lines.append(
            ExplainedValue(
                "--gpu-memory-utilization", f"{share:g}", "recipe: engine.gpu_memory_utilization"
            )
        )
    if prompt is not None:
        beside = f"{prompt.source}; and a token for each of {running.value} rows"
        lines.append(
            ExplainedValue("--max-num-batched-tokens", str(prompt.value + running.value), beside)
        )
    else:
        lines.append(
            ExplainedValue(
                "max-num-batched-tokens",
                "vLLM's own",
                "no target on gaps between tokens bounds a pass",
            )
        )
    if queued is not None:
        lines.append(told("--max-num-queued-tokens", queued))
    else:
        lines.append(
            ExplainedValue("max-num-queued-tokens", "no limit", "the recipe has no TTFT target")
        )
    return [*lines, *_parallel(plan.recipe), told("--shutdown-timeout", drain)]


def _parallel(recipe: Recipe) -> list[ExplainedValue]:
    sizes = {"tensor": recipe.engine.tensor_parallel_size, "data": recipe.workers}
    names = {"tensor": "engine.tensor_parallel_size", "data": "workers"}
    return [
        ExplainedValue(f"--{kind}-parallel-size", str(n), f"recipe: {names[kind]}")
        for kind, n in sizes.items()
        if n > 1
    ]


def _scheduler(order: Order) -> list[ExplainedValue]:
    """Our scheduler, or why it is vLLM's own."""
    plan = order.plan
    if plan.policy.name == VllmPolicy.name:
        rest = flags_of(VllmPolicy.name, plan.policy.parameters)
        switches = [word for word in rest if word.startswith(("--enable", "--no-enable"))]
        lines = [
            ExplainedValue(word, "", "plan: policy 'vllm', vLLM's own scheduler")
            for word in switches
        ]
        watermark = str(plan.policy.parameters.get("watermark", 0.0))
        return [
            *lines,
            ExplainedValue("--watermark", watermark, "plan: policy 'vllm', vLLM's own scheduler"),
        ]
    try:
        if plan.recipe.workers > 1:
            raise InputError("our scheduler was not tried with data parallelism")
        refuse_inside(make_policy(plan.policy.name, plan.policy.parameters), timed=True)
    except InputError as error:
        return [ExplainedValue("scheduler", "vLLM's own", error.message)]
    lines = [
        ExplainedValue(
            "--scheduler-cls",
            SCHEDULER,
            f"plan: policy '{plan.policy.name}', out of LLMCTL_VLLM_PLAN",
        )
    ]
    if plan.policy.name == "mlfq":
        lines.append(
            ExplainedValue(
                "--no-async-scheduling",
                "",
                "policy 'mlfq' pauses requests between passes: docs/vllm.md",
            )
        )
    return lines
