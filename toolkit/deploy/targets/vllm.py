"""Target `vllm`: vLLM with the plan's values as its flags.

Where the plan's policy can run inside vLLM, llmctl's scheduler is used. Flags are those of
`vllm serve --help` of 0.32; a test checks them with vLLM's own parser where vLLM is installed.

The first half derives values from a fit's laws and a plan's policy, also for SGLang's flags. The
laws hold for the engine that was measured; for another engine the values are a starting point, and
`foreign` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.backends.vllm.command import TRIED, flags_of
from toolkit.backends.vllm.setup import refuse_inside
from toolkit.deploy.order import ExplainedValue, Order, Rendered, Sourced, explain_value, fill
from toolkit.deploy.reckon import drain_s, gap_target, ttft_targets
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.fit import Fit
from toolkit.files.plan import Plan
from toolkit.files.recipe import Recipe
from toolkit.routing.routers import VllmRouter
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.units import GIB

SERVERS = ("openai", "vllm", "sglang")  # engines with schedulers of their own
UNBOUNDED = "no target on the time between tokens bounds a pass"
MIN_CHUNK, MAX_CHUNK = 256, 65536  # prompt tokens of one pass
SCHEDULER = "toolkit.backends.vllm.scheduler.LlmctlScheduler"


def check_servable_elsewhere(recipe: Recipe, engine: str) -> None:
    """Raise `InputError` where `engine` cannot load the recipe's model."""
    if recipe.model.source == "random":
        raise InputError(
            f"{engine} cannot load the model of '{recipe.name}': llmctl builds its random weights",
            "choose a recipe with a folder or a hub id as model.source",
        )
    if recipe.model.source.startswith("-"):
        raise InputError(
            f"model.source {recipe.model.source!r} would be read as an option of {engine}",
            "give its folder as ./-...",
        )


def foreign(order: Order, engine: str) -> str:
    """A remark where the laws were measured on another kind of engine; '' otherwise."""
    measured = order.plan.fit.engine.engine
    if measured in SERVERS:
        return ""
    return (
        f"the laws are of engine '{measured}', not of {engine}: these values are a starting point. "
        f"Measure {engine} itself (engine 'openai' in a recipe) for its own values"
    )


def rows(order: Order) -> Sourced[int]:
    """The greatest number of requests that run at once."""
    plan = order.plan
    for name in ("max_batch_size", "max_num_seqs"):
        named = plan.policy.parameters.get(name)
        if isinstance(named, int) and named > 0:
            return Sourced(named, f"plan: {name} of policy '{plan.policy.name}'")
    if plan.fit.engine.max_rows:
        return Sourced(plan.fit.engine.max_rows, "fit: the greatest number the engine runs")
    largest = plan.fit.decode.valid.batch_size_max
    return Sourced(largest, "fit: the largest measured batch; the laws extrapolate beyond it")


def chunk(order: Order, running: int) -> Sourced[int] | None:
    """Prompt tokens of a pass in which `running` rows decode; None where it has no bound."""
    tokens = order.plan.policy.parameters.get("max_num_batched_tokens")
    if isinstance(tokens, int):  # decodes included
        policy = f"policy '{order.plan.policy.name}'"
        source = f"plan: max_num_batched_tokens {tokens} of {policy}, less a token for each row"
        return Sourced(tokens - running, source)
    named = order.plan.policy.parameters.get("chunk_tokens")
    if isinstance(named, int) and named > 0:
        return Sourced(named, f"plan: chunk_tokens of policy '{order.plan.policy.name}'")
    gap = gap_target(order.plan.recipe)
    if gap is None:
        return None
    key, limit = gap
    law, valid = laws_from_fit(order.plan.fit).rounds, order.plan.fit.decode.valid
    running = min(running, valid.batch_size_max)
    middle = valid.length_max // 2

    def pass_s(prompt: int) -> float:
        return law.prefill_s(1, prompt) + law.decode_s(running, middle, 1)

    size = MIN_CHUNK
    while 2 * size <= MAX_CHUNK and pass_s(2 * size) <= limit:
        size *= 2
    decodes = f"{running} decodes of {middle} cached tokens"
    about = f"{size} prompt tokens and {decodes} take {pass_s(size):.3g} s"
    return Sourced(size, f"fit: the largest power of two that keeps {key} {limit:g} s: {about}")


def queued_tokens(order: Order) -> Sourced[int] | None:
    """Prompt tokens that may wait for their first token: target TTFT x prefill rate, as vLLM
    documents it. None without such a target.
    """
    targets = ttft_targets(order.plan.recipe)
    if not targets:
        return None
    key, limit = min(targets.items(), key=lambda target: target[1])
    rate = prefill_rate(order.plan.fit)
    return Sourced(
        max(int(limit * rate.value), 1),
        f"{key} {limit:g} s x {rate.value:,.0f} tokens/s: {rate.source}",
    )


def prefill_rate(fit: Fit) -> Sourced[float]:
    """Prompt tokens per second of a prefill of the greatest measured length."""
    length = fit.prefill.valid.length_max
    rate = length / laws_from_fit(fit).latency.prefill_s(1, length)
    error = fit.prefill.error.median_percent
    return Sourced(rate, f"fit, a prompt of {length:,} tokens alone; median error {error:.1f} %")


def static_share(order: Order) -> Sourced[float]:
    """The share of a device's memory that weights and KV cache take."""
    plan = order.plan
    memory, weights = plan.recipe.hardware.memory_gib, plan.recipe.model.weight_bytes
    if memory and weights and plan.fit.engine.engine not in SERVERS:
        share = (weights + plan.fit.engine.kv_budget_bytes) / (memory * GIB)
        if 0 < share < 1:
            cache = plan.fit.engine.kv_budget_bytes
            sizes = f"({weights / GIB:.1f} + {cache / GIB:.1f}) of {memory:g} GiB"
            return Sourced(round(share, 3), f"recipe and fit: weights and KV cache take {sizes}")
    return Sourced(
        plan.recipe.engine.gpu_memory_utilization, "recipe: engine.gpu_memory_utilization"
    )


def render(order: Order) -> Rendered:
    """Render serve.sh, which starts vLLM. `InputError` where vLLM cannot load the model."""
    recipe = order.plan.recipe
    check_servable_elsewhere(recipe, "vLLM")
    scheduler = _scheduler(order)
    lines = [*model_lines(recipe), *_fitted(order), *scheduler]
    ours = any(line.key == "--scheduler-cls" for line in scheduler)
    install = "Needs vLLM with --max-num-queued-tokens (0.32 has it)."
    if ours:
        install = f"Needs vLLM {TRIED} and llmctl in one environment (pip install --no-deps): "
        install += "docs/how-to/vllm.md."
    remarks = [line for line in (foreign(order, "vLLM"), install) if line]
    script = fill(
        "engine.sh",
        comment=order.comment(),
        engine="vLLM",
        key="Set VLLM_API_KEY for a server with a key.",
        key_flag="",
        remarks=remarks,
        environment={"LLMCTL_VLLM_PLAN": "plan.json"} if ours else {},
        command=["vllm", "serve", recipe.model.source],
        flags=flags_of_lines(lines),
    )
    start = "`./serve.sh` starts it, SIGTERM drains; `llmctl status --url URL` shows it."
    return Rendered({"serve.sh": script}, lines, f"{install}\n\n{start}")


def flags_of_lines(lines: Sequence[ExplainedValue]) -> list[tuple[str, object]]:
    """The flags of a command among the lines of EXPLAIN.md; None: a switch."""
    return [(line.key, line.value or None) for line in lines if line.key.startswith("--")]


def model_lines(recipe: Recipe) -> list[ExplainedValue]:
    """The flags about the model, from the recipe; vLLM and SGLang share most of their names."""
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
        explain_value("--max-num-seqs", running),
    ]
    if plan.recipe.hardware.device == "cuda":
        share = plan.recipe.engine.gpu_memory_utilization
        lines.append(
            ExplainedValue(
                "--gpu-memory-utilization", f"{share:g}", "recipe: engine.gpu_memory_utilization"
            )
        )
    if prompt is not None:
        tokens = str(prompt.value + running.value)
        source = f"{prompt.source}; and a token for each of {running.value} rows"
        lines.append(ExplainedValue("--max-num-batched-tokens", tokens, source))
    else:
        lines.append(ExplainedValue("max-num-batched-tokens", "vLLM's own", UNBOUNDED))
    if queued is not None:
        lines.append(explain_value("--max-num-queued-tokens", queued))
    else:
        lines.append(
            ExplainedValue("max-num-queued-tokens", "no limit", "the recipe has no TTFT target")
        )
    return [*lines, *_parallel(plan), explain_value("--shutdown-timeout", drain)]


def _parallel(plan: Plan) -> list[ExplainedValue]:
    """How one start uses several GPUs. Replicas that were simulated behind a router of llmctl are
    not vLLM's data-parallel engines, which have a balancer of their own.
    """
    engine, count, router = plan.recipe.engine, plan.recipe.workers, plan.replica_router
    lines = []
    if engine.tensor_parallel_size > 1:
        size, source = str(engine.tensor_parallel_size), "recipe: engine.tensor_parallel_size"
        lines.append(ExplainedValue("--tensor-parallel-size", size, source))
    if count == 1:
        return lines
    if router is None or router.name == VllmRouter.name:
        source = "recipe: workers; vLLM's own balancer, which was not simulated"
        if router is not None:
            source = f"recipe: workers; vLLM's own balancer, simulated as router '{router.name}'"
        return [*lines, ExplainedValue("--data-parallel-size", str(count), source)]
    source = (
        f"{count} replicas were simulated behind router '{router.name}', and this starts one: "
        "start one for each, and before them llmctl serve plan.json --replica URL ...; or render "
        "target systemd, compose or kubernetes"
    )
    return [*lines, ExplainedValue("data-parallel-size", "1", source)]


def _scheduler(order: Order) -> list[ExplainedValue]:
    """The flags of llmctl's scheduler or, for policy 'vllm', of vLLM's own; or why it is vLLM's."""
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
            raise InputError("llmctl's scheduler was not tried with data parallelism")
        refuse_inside(make_policy(plan.policy.name, plan.policy.parameters), timed=True)
    except InputError as error:
        return [ExplainedValue("scheduler", "vLLM's own", error.message)]
    lines = [
        ExplainedValue(
            "--scheduler-cls",
            SCHEDULER,
            f"plan: policy '{plan.policy.name}', read from LLMCTL_VLLM_PLAN",
        )
    ]
    if plan.policy.name == "mlfq":
        lines.append(
            ExplainedValue(
                "--no-async-scheduling",
                "",
                "policy 'mlfq' pauses requests between passes: docs/how-to/vllm.md",
            )
        )
    return lines
