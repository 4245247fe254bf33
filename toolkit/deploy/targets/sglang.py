"""Target `sglang`: SGLang with the plan's values as its flags, under its own scheduler.

Flags follow SGLang's "Server Arguments" (docs/advanced_features/server_arguments.md). They were not
checked with its parser, which was not available.
"""

from __future__ import annotations

from toolkit.deploy.order import ExplainedValue, Order, Rendered, Sourced, explain_value, fill
from toolkit.deploy.reckon import waiting_threshold
from toolkit.deploy.targets.vllm import (
    UNBOUNDED,
    check_servable_elsewhere,
    chunk,
    flags_of_lines,
    foreign,
    model_lines,
    rows,
    static_share,
)

# SGLang's tuning guide advises this conservativeness where requests are often evicted.
CONSERVATIVE, OFTEN_EVICTED_PERCENT = 1.3, 1.0
KEY = (
    "Set SGLANG_API_KEY for a server with a key; SGLang takes the key as an option, which `ps` "
    "shows."
)


def render(order: Order) -> Rendered:
    """Render serve.sh, which starts SGLang. `InputError` where SGLang cannot load the model."""
    recipe = order.plan.recipe
    check_servable_elsewhere(recipe, "SGLang")
    lines = [*model_lines(recipe), *_fitted(order)]
    script = fill(
        "engine.sh",
        comment=order.comment(),
        engine="SGLang",
        key=KEY,
        key_flag='${SGLANG_API_KEY:+--api-key "$SGLANG_API_KEY"}',
        remarks=[line for line in (foreign(order, "SGLang"),) if line],
        environment={},
        command=["python3", "-m", "sglang.launch_server", "--model-path", recipe.model.source],
        flags=flags_of_lines(lines),
    )
    return Rendered(
        {"serve.sh": script},
        lines,
        "`./serve.sh` starts it; `llmctl status --url URL` shows it.",
    )


def _fitted(order: Order) -> list[ExplainedValue]:
    plan, running = order.plan, rows(order)
    prompt, waiting = chunk(order, running.value), waiting_threshold(plan, order.trace)
    lines = [
        ExplainedValue(
            "--context-length", str(plan.fit.engine.max_model_len), "fit: engine.max_model_len"
        ),
        explain_value("--max-running-requests", running),
    ]
    if plan.recipe.hardware.device == "cuda":
        lines.append(explain_value("--mem-fraction-static", static_share(order)))
    if prompt is not None:
        lines.append(explain_value("--chunked-prefill-size", prompt))
    else:
        lines.append(ExplainedValue("chunked-prefill-size", "SGLang's own", UNBOUNDED))
    if waiting.value is None:
        lines.append(explain_value("max-queued-requests", waiting, "SGLang's own: no limit"))
    else:
        lines.append(explain_value("--max-queued-requests", waiting))
    lines.append(explain_value("--schedule-conservativeness", conservativeness(order)))
    if plan.recipe.engine.tensor_parallel_size > 1:
        size = str(plan.recipe.engine.tensor_parallel_size)
        lines.append(ExplainedValue("--tp-size", size, "recipe: engine.tensor_parallel_size"))
    if plan.recipe.workers > 1:
        lines.append(ExplainedValue("--dp-size", str(plan.recipe.workers), "recipe: workers"))
    return [*lines, ExplainedValue("--enable-metrics", "", "for Prometheus, and for llmctl status")]


def conservativeness(order: Order) -> Sourced[float]:
    """SGLang's default, or 1.3 where the plan is predicted to evict often."""
    evicted = order.plan.predicted.get("evicted_percent")
    if evicted is None:
        return Sourced(1.0, "SGLang's default: the plan predicts no evictions, or is not tuned")
    if evicted > OFTEN_EVICTED_PERCENT:
        return Sourced(
            CONSERVATIVE,
            f"plan: {evicted:.2g} evictions predicted per 100 requests; SGLang advises 1.3 then",
        )
    return Sourced(1.0, f"SGLang's default: {evicted:.2g} evictions predicted per 100 requests")
