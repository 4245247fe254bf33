"""SGLang with the plan's values as its flags. Its scheduler is its own.

Flags after SGLang's "Server Arguments" (docs/advanced_features/server_arguments.md); not held
against its parser, which was not at hand.
"""

from __future__ import annotations

from toolkit.deploy.order import ExplainedValue, Order, Reckoned, Rendered, fill, told
from toolkit.deploy.reckon import waiting_threshold
from toolkit.deploy.targets.vllm import (
    Flags,
    check_servable_elsewhere,
    chunk,
    foreign,
    model_lines,
    rows,
    static_share,
)

CAREFUL, OFTEN_EVICTED_PERCENT = 1.3, 1.0
KEY = "The key, if there is to be one, is in SGLANG_API_KEY; SGLang takes it as an option, which `ps` shows."


def render(order: Order) -> Rendered:
    """serve.sh, which starts SGLang. `InputError` where SGLang could not load the model."""
    recipe = order.plan.recipe
    check_servable_elsewhere(recipe, "SGLang")
    lines = [*model_lines(recipe), *_fitted(order)]
    flags: Flags = [
        (one.key, one.value if one.value else None) for one in lines if one.key.startswith("--")
    ]
    script = fill(
        "engine.sh",
        comment=order.comment(),
        engine="SGLang",
        key=KEY,
        key_flag='${SGLANG_API_KEY:+--api-key "$SGLANG_API_KEY"}',
        remarks=[line for line in (foreign(order, "SGLang"),) if line],
        environment={},
        command=["python3", "-m", "sglang.launch_server", "--model-path", recipe.model.source],
        flags=flags,
    )
    return Rendered(
        {"serve.sh": script},
        lines,
        "`./serve.sh` starts it; `llmctl status --url URL` looks at it.",
    )


def _fitted(order: Order) -> list[ExplainedValue]:
    plan, running = order.plan, rows(order)
    prompt, waiting = chunk(order, running.value), waiting_threshold(plan, order.trace)
    lines = [
        ExplainedValue(
            "--context-length", str(plan.fit.engine.max_model_len), "fit: engine.max_model_len"
        ),
        told("--max-running-requests", running),
    ]
    if plan.recipe.hardware.device == "cuda":
        lines.append(told("--mem-fraction-static", static_share(order)))
    if prompt is not None:
        lines.append(told("--chunked-prefill-size", prompt))
    else:
        lines.append(
            ExplainedValue(
                "chunked-prefill-size",
                "SGLang's own",
                "no target on gaps between tokens bounds a pass",
            )
        )
    if waiting.value is None:
        lines.append(told("max-queued-requests", waiting, "SGLang's own: no limit"))
    else:
        lines.append(told("--max-queued-requests", waiting))
    lines.append(told("--schedule-conservativeness", conservativeness(order)))
    if plan.recipe.engine.tensor_parallel_size > 1:
        lines.append(
            ExplainedValue(
                "--tp-size",
                str(plan.recipe.engine.tensor_parallel_size),
                "recipe: engine.tensor_parallel_size",
            )
        )
    if plan.recipe.workers > 1:
        lines.append(ExplainedValue("--dp-size", str(plan.recipe.workers), "recipe: workers"))
    return [*lines, ExplainedValue("--enable-metrics", "", "for Prometheus, and for llmctl status")]


def conservativeness(order: Order) -> Reckoned[float]:
    """SGLang's own default, or 1.3 where the plan is predicted to evict often, as its tuning guide
    advises.
    """
    evicted = order.plan.predicted.get("evicted_percent")
    if evicted is None:
        return Reckoned(1.0, "SGLang's default: the plan predicts no evictions, or nobody tuned it")
    if evicted > OFTEN_EVICTED_PERCENT:
        return Reckoned(
            CAREFUL,
            f"plan: {evicted:.2g} evictions predicted per 100 requests; SGLang advises 1.3 there",
        )
    return Reckoned(1.0, f"SGLang's default: {evicted:.2g} evictions predicted per 100 requests")
