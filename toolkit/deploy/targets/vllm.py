"""vLLM with the plan's values as its flags and, where the policy can run inside it, our scheduler.

Flags as `vllm serve --help` of 0.32 has them; a test holds them against vLLM's own parser where there is one.
"""

from __future__ import annotations

from toolkit.deploy.flags import check_servable_elsewhere, chunk, foreign, queued_tokens, rows
from toolkit.deploy.order import Order, Rendered, Told, told
from toolkit.deploy.reckon import drain_s
from toolkit.deploy.templating import fill
from toolkit.endpoints.vllm_flags import flags_of
from toolkit.endpoints.vllm_versions import TRIED
from toolkit.errors import InputError
from toolkit.files.recipe import Recipe
from toolkit.inside.setup import refuse_inside
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import VllmPolicy

SCHEDULER = "toolkit.inside.vllm_scheduler.LlmctlScheduler"
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


def model_lines(recipe: Recipe) -> list[Told]:
    """Flags about the model, which the recipe says; vLLM and SGLang share the names of most."""
    model = recipe.model
    lines = [
        Told("--host", recipe.serve.host, "recipe: serve.host"),
        Told("--port", str(recipe.serve.port or 8000), "recipe: serve.port"),
        Told("--dtype", model.dtype, "recipe: model.dtype"),
    ]
    if recipe.serve.served_model_name:
        lines.append(Told("--served-model-name", recipe.serve.served_model_name, "recipe: serve.served_model_name"))
    if model.revision:
        lines.append(Told("--revision", model.revision, "recipe: model.revision"))
    if model.load_format == "dummy":
        lines.append(Told("--load-format", "dummy", "recipe: model.load_format"))
    if model.trust_remote_code:
        lines.append(Told("--trust-remote-code", "", "recipe: model.trust_remote_code"))
    return lines


def _fitted(order: Order) -> list[Told]:
    plan = order.plan
    running, drain, queued = rows(order), drain_s(order), queued_tokens(order)
    prompt = chunk(order, running.value)
    lines = [
        Told("--max-model-len", str(plan.fit.engine.max_model_len), "fit: engine.max_model_len"),
        told("--max-num-seqs", running),
    ]
    if plan.recipe.hardware.device == "cuda":
        share = plan.recipe.engine.gpu_memory_utilization
        lines.append(Told("--gpu-memory-utilization", f"{share:g}", "recipe: engine.gpu_memory_utilization"))
    if prompt is not None:
        beside = f"{prompt.source}; and a token for each of {running.value} rows"
        lines.append(Told("--max-num-batched-tokens", str(prompt.value + running.value), beside))
    else:
        lines.append(Told("max-num-batched-tokens", "vLLM's own", "no target on gaps between tokens bounds a pass"))
    if queued is not None:
        lines.append(told("--max-num-queued-tokens", queued))
    else:
        lines.append(Told("max-num-queued-tokens", "no limit", "the recipe has no TTFT target"))
    return [*lines, *_parallel(plan.recipe), told("--shutdown-timeout", drain)]


def _parallel(recipe: Recipe) -> list[Told]:
    sizes = {"tensor": recipe.engine.tensor_parallel_size, "data": recipe.workers}
    names = {"tensor": "engine.tensor_parallel_size", "data": "workers"}
    return [Told(f"--{kind}-parallel-size", str(n), f"recipe: {names[kind]}") for kind, n in sizes.items() if n > 1]


def _scheduler(order: Order) -> list[Told]:
    """Our scheduler, or why it is vLLM's own."""
    plan = order.plan
    if plan.policy.name == VllmPolicy.name:
        rest = flags_of(VllmPolicy.name, plan.policy.parameters)
        switches = [word for word in rest if word.startswith(("--enable", "--no-enable"))]
        lines = [Told(word, "", "plan: policy 'vllm', vLLM's own scheduler") for word in switches]
        watermark = str(plan.policy.parameters.get("watermark", 0.0))
        return [*lines, Told("--watermark", watermark, "plan: policy 'vllm', vLLM's own scheduler")]
    try:
        if plan.recipe.workers > 1:
            raise InputError("our scheduler was not tried with data parallelism")
        refuse_inside(make_policy(plan.policy.name, plan.policy.parameters), timed=True)
    except InputError as error:
        return [Told("scheduler", "vLLM's own", error.message)]
    lines = [Told("--scheduler-cls", SCHEDULER, f"plan: policy '{plan.policy.name}', out of LLMCTL_VLLM_PLAN")]
    if plan.policy.name == "mlfq":
        lines.append(Told("--no-async-scheduling", "", "policy 'mlfq' pauses requests between passes: docs/vllm.md"))
    return lines
