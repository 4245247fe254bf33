"""Targets `vllm` and `sglang`: another server with the plan's values as its flags.

Where the plan's policy can run inside vLLM, llmctl's scheduler is used; SGLang has its own. Flags
of vLLM are those of `vllm serve --help` of 0.32; a test checks them with vLLM's own parser where
vLLM is installed. Flags of SGLang follow its "Server Arguments"
(docs/advanced_features/server_arguments.md). They were not checked with its parser, which was not
available.

The first half derives values from a fit's laws and a plan's policy. The laws hold for the engine
that was measured; for another engine the values are a starting point, and `foreign` says so.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.backends.vllm.command import draft_flags, flags_of
from toolkit.backends.vllm.setup import refuse_inside
from toolkit.backends.vllm.touched import REQUIREMENT
from toolkit.deploy.order import ExplainedValue, Order, Rendered, Sourced, explain_value
from toolkit.deploy.reckon import drain_s, gap_target, rows, ttft_targets, waiting_threshold
from toolkit.errors import InputError
from toolkit.estimators.load import laws_from_fit
from toolkit.files.plan import Plan
from toolkit.files.recipe import Recipe
from toolkit.routing.routers import VllmRouter
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import LATER, VllmPolicy
from toolkit.units import GIB

UTILIZATION = "recipe: engine.gpu_memory_utilization"
TENSOR_PARALLEL = "recipe: engine.tensor_parallel_size"
UNBOUNDED = "no target on the time between tokens bounds a pass"
NO_TARGET = "the recipe has no TTFT target"
MIN_CHUNK = 256
MAX_CHUNK = 65536  # prompt tokens of one pass
SCHEDULER = "toolkit.backends.vllm.scheduler.LlmctlScheduler"
# SGLang's tuning guide advises this conservativeness where requests are often evicted.
CONSERVATIVE = 1.3
OFTEN_EVICTED_PERCENT = 1.0
SGLANG_KEY = (
    "Set SGLANG_API_KEY for a server with a key; SGLang takes the key as an option, which `ps` "
    "shows."
)


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


def foreign(order: Order, engine: str) -> list[str]:
    """A remark where the laws were measured on another kind of engine."""
    measured = order.plan.fit.engine
    if measured.is_server:
        return []
    return [
        f"the laws are of engine '{measured.engine}', not of {engine}: these values are a starting "
        f"point. Measure {engine} itself (engine 'openai' in a recipe) for its own values"
    ]


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
    law = laws_from_fit(order.plan.fit).rounds
    valid = order.plan.fit.decode.valid
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
    """Prompt tokens that may wait: target TTFT x prefill rate, as in vLLM; None without one."""
    targets = ttft_targets(order.plan.recipe)
    if not targets:
        return None
    key, limit = min(targets.items(), key=lambda target: target[1])
    fit = order.plan.fit
    length = fit.prefill.valid.length_max
    error = fit.off_percent(fit.prefill)
    rate = length / laws_from_fit(fit).latency.prefill_s(1, length)
    measured = f"fit, a prompt of {length:,} tokens alone; median error {error:.1f} %"
    source = f"{key} {limit:g} s x {rate:,.0f} tokens/s: {measured}"
    return Sourced(max(int(limit * rate), 1), source)


def static_share(order: Order) -> Sourced[float]:
    """The share of a device's memory that weights and KV cache take."""
    recipe = order.plan.recipe
    facts = order.plan.fit.engine
    memory = recipe.hardware.memory_gib
    weights = recipe.model.weight_bytes
    cache = facts.kv_budget_bytes
    if memory and weights and not facts.is_server:
        share = (weights + cache) / (memory * GIB)
        if 0 < share < 1:
            sizes = f"({weights / GIB:.1f} + {cache / GIB:.1f}) of {memory:g} GiB"
            return Sourced(round(share, 3), f"recipe and fit: weights and KV cache take {sizes}")
    return Sourced(recipe.engine.gpu_memory_utilization, UTILIZATION)


def render_vllm(order: Order) -> Rendered:
    """Render serve.sh, which starts vLLM. `InputError` where vLLM cannot load the model."""
    lines = [*_model_lines(order, "vLLM"), *_vllm_lines(order), *_scheduler(order)]
    ours = any(line.key == "--scheduler-cls" for line in lines)
    install = "Needs vLLM with --max-num-queued-tokens (0.32 has it)."
    if ours:
        install = f"Needs {REQUIREMENT} and llmctl in one environment (pip install --no-deps): "
        install += "llmctl docs how-to/vllm."
    script = order.fill(
        "engine.sh",
        engine="vLLM",
        key="Set VLLM_API_KEY for a server with a key.",
        key_flag="",
        remarks=[*foreign(order, "vLLM"), install],
        environment={"LLMCTL_VLLM_PLAN": "plan.json"} if ours else {},
        command=["vllm", "serve", order.plan.recipe.model.source],
        flags=_flags(lines),
    )
    start = "`./serve.sh` starts it, SIGTERM drains; `llmctl status --url URL` shows it."
    return Rendered({"serve.sh": script}, lines, f"{install}\n\n{start}")


def render_sglang(order: Order) -> Rendered:
    """Render serve.sh, which starts SGLang. `InputError` where SGLang cannot load the model."""
    lines = [*_model_lines(order, "SGLang"), *_sglang_lines(order)]
    model = order.plan.recipe.model.source
    script = order.fill(
        "engine.sh",
        engine="SGLang",
        key=SGLANG_KEY,
        key_flag='${SGLANG_API_KEY:+--api-key "$SGLANG_API_KEY"}',
        remarks=foreign(order, "SGLang"),
        environment={},
        command=["python3", "-m", "sglang.launch_server", "--model-path", model],
        flags=_flags(lines),
    )
    start = "`./serve.sh` starts it; `llmctl status --url URL` shows it."
    return Rendered({"serve.sh": script}, lines, start)


def _flags(lines: Sequence[ExplainedValue]) -> list[tuple[str, object]]:
    """The flags of a command among the lines of EXPLAIN.md; None: a switch."""
    return [(line.key, line.value or None) for line in lines if line.key.startswith("--")]


def _model_lines(order: Order, engine: str) -> list[ExplainedValue]:
    """The flags about the model, from the recipe; vLLM and SGLang share most of their names."""
    recipe = order.plan.recipe
    model = order.plan.recipe.model
    check_servable_elsewhere(recipe, engine)
    name = recipe.serve.served_model_name
    given = {
        "--served-model-name": (name, "serve.served_model_name"),
        "--revision": (model.revision, "model.revision"),
        "--quantization": (model.quantization, "model.quantization"),
        "--load-format": ("dummy" if model.load_format == "dummy" else "", "model.load_format"),
    }
    lines = [
        ExplainedValue("--host", recipe.serve.host, "recipe: serve.host"),
        ExplainedValue("--port", str(recipe.serve.port or 8000), "recipe: serve.port"),
        ExplainedValue("--dtype", model.dtype, "recipe: model.dtype"),
    ]
    for flag, (value, key) in given.items():
        if value:
            lines.append(ExplainedValue(flag, value, f"recipe: {key}"))
    if model.trust_remote_code:
        lines.append(ExplainedValue("--trust-remote-code", "", "recipe: model.trust_remote_code"))
    return lines


def _vllm_lines(order: Order) -> list[ExplainedValue]:
    plan = order.plan
    running = rows(order)
    lines = [
        explain_value("--max-model-len", _longest(order)),
        explain_value("--max-num-seqs", running),
    ]
    spec = plan.recipe.engine.vllm
    if spec is not None and spec.kv_cache_dtype is not None:
        source = "recipe: engine.vllm.kv_cache_dtype"
        lines.append(ExplainedValue("--kv-cache-dtype", spec.kv_cache_dtype, source))
    if plan.recipe.hardware.device == "cuda":
        share = f"{plan.recipe.engine.gpu_memory_utilization:g}"
        lines.append(ExplainedValue("--gpu-memory-utilization", share, UTILIZATION))
    tokens = chunk(order, running.value)
    if tokens is not None:
        source = f"{tokens.source}; and a token for each of {running.value} rows"
        tokens = Sourced(tokens.value + running.value, source)
    return [
        *lines,
        _flag("--max-num-batched-tokens", tokens, "vLLM's own", UNBOUNDED),
        _flag("--max-num-queued-tokens", queued_tokens(order), "no limit", NO_TARGET),
        *_parallel(plan),
        explain_value("--shutdown-timeout", drain_s(order)),
    ]


def _longest(order: Order) -> Sourced[int]:
    return Sourced(order.plan.fit.engine.max_model_len, "fit: engine.max_model_len")


def _flag(flag: str, value: Sourced[int] | None, own: str, why: str) -> ExplainedValue:
    """A flag with its value, or what the engine does without the flag, and why it has none."""
    return explain_value(flag, value) if value else ExplainedValue(flag.lstrip("-"), own, why)


def _parallel(plan: Plan) -> list[ExplainedValue]:
    """How one start uses several GPUs. Replicas that were simulated behind a router of llmctl are
    not vLLM's data-parallel engines, which have a balancer of their own.
    """
    engine = plan.recipe.engine
    count = plan.recipe.workers
    router = plan.replica_router
    lines = []
    if engine.tensor_parallel_size > 1:
        size = str(engine.tensor_parallel_size)
        lines.append(ExplainedValue("--tensor-parallel-size", size, TENSOR_PARALLEL))
    if count == 1:
        return lines
    steps = plan.fit.steps
    if steps is not None and steps.experts:
        source = (
            f"{count} replicas were simulated, each with all experts, and this starts one: vLLM's "
            "data-parallel engines of a mixture of experts wait for one another; start one for "
            "each, and before them llmctl serve plan.json --replica URL ..."
        )
        return [*lines, ExplainedValue("data-parallel-size", "1", source)]
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
        source = "plan: policy 'vllm', vLLM's own scheduler"
        rest = flags_of(VllmPolicy.name, plan.policy.parameters)
        switches = [word for word in rest if word.startswith(("--enable", "--no-enable"))]
        lines = [ExplainedValue(word, "", source) for word in switches]
        given = plan.policy.parameters
        drafts = draft_flags(plan.recipe, given, [])
        if drafts:
            lines.append(ExplainedValue(drafts[0], drafts[1], source))
        lines.append(ExplainedValue("--watermark", str(given.get("watermark", 0.0)), source))
        for name, flag in LATER.items():
            if given.get(name, flag.default) != flag.default:
                word = f"--{name.replace('_', '-')}"
                lines.append(ExplainedValue(word, str(given[name]), source))
        return lines
    try:
        if plan.recipe.workers > 1:
            raise InputError("llmctl's scheduler was not tried with data parallelism")
        refuse_inside(make_policy(plan.policy.name, plan.policy.parameters), timed=True)
    except InputError as error:
        return [ExplainedValue("scheduler", "vLLM's own", error.message)]
    source = f"plan: policy '{plan.policy.name}', read from LLMCTL_VLLM_PLAN"
    lines = [ExplainedValue("--scheduler-cls", SCHEDULER, source)]
    if plan.policy.name == "mlfq":
        why = "policy 'mlfq' pauses requests between passes: llmctl docs how-to/vllm"
        lines.append(ExplainedValue("--no-async-scheduling", "", why))
    return lines


def _sglang_lines(order: Order) -> list[ExplainedValue]:
    plan = order.plan
    running = rows(order)
    tokens = chunk(order, running.value)
    waiting = waiting_threshold(plan, order.trace)
    most = None if waiting.value is None else Sourced(waiting.value, waiting.source)
    lines = [
        explain_value("--context-length", _longest(order)),
        explain_value("--max-running-requests", running),
    ]
    if plan.recipe.hardware.device == "cuda":
        lines.append(explain_value("--mem-fraction-static", static_share(order)))
    lines += [
        _flag("--chunked-prefill-size", tokens, "SGLang's own", UNBOUNDED),
        _flag("--max-queued-requests", most, "SGLang's own: no limit", waiting.source),
        explain_value("--schedule-conservativeness", conservativeness(order)),
    ]
    if plan.recipe.engine.tensor_parallel_size > 1:
        size = str(plan.recipe.engine.tensor_parallel_size)
        lines.append(ExplainedValue("--tp-size", size, TENSOR_PARALLEL))
    if plan.recipe.workers > 1:
        lines.append(ExplainedValue("--dp-size", str(plan.recipe.workers), "recipe: workers"))
    return [*lines, ExplainedValue("--enable-metrics", "", "for Prometheus, and for llmctl status")]


def conservativeness(order: Order) -> Sourced[float]:
    """SGLang's default, or 1.3 where the plan is predicted to evict often."""
    evicted = order.plan.predicted.get("evicted_percent")
    if evicted is None:
        return Sourced(1.0, "SGLang's default: the plan predicts no evictions, or is not tuned")
    predicted = f"{evicted:.2g} evictions predicted per 100 requests"
    if evicted > OFTEN_EVICTED_PERCENT:
        return Sourced(CONSERVATIVE, f"plan: {predicted}; SGLang advises 1.3 then")
    return Sourced(1.0, f"SGLang's default: {predicted}")
