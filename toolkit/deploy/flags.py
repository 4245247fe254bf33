"""The flags of target `vllm`: vLLM with the plan's values, each with its reason.

Where the plan's policy can run inside vLLM, llmctl's scheduler is used. Flags are named as in `vllm
serve --help` of 0.32; a test checks them with vLLM's own parser where vLLM is installed. The laws
hold for the engine that was measured; for another engine the values are a starting point.
"""

from __future__ import annotations

from toolkit.backends.vllm.command import VllmCommand, draft_flags, flags_of, grouped
from toolkit.backends.vllm.setup import refuse_inside
from toolkit.backends.vllm.touched import REQUIREMENT
from toolkit.deploy.order import Order, Sourced
from toolkit.deploy.reckon import gap_target, rows, ttft_targets
from toolkit.deploy.values import Values
from toolkit.errors import InputError
from toolkit.estimators.laws import RoundsByPass
from toolkit.estimators.load import laws_from_fit
from toolkit.files.recipe import Recipe
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import VllmPolicy

MIN_CHUNK = 256
MAX_CHUNK = 65536  # prompt tokens of one pass
SCHEDULER = "toolkit.backends.vllm.scheduler.LlmctlScheduler"


# The words of a flag with its value, and why; without words the reason why there is no flag.
Flag = Sourced[list[str]]


def vllm_start(values: Values) -> dict[str, object]:
    """Return what the template of serve.sh reads: flags, variables of the environment, remarks, and
    whether llmctl schedules inside vLLM. Raises `InputError` if vLLM cannot load the model.
    """
    order = values.order
    plan = values.plan
    recipe = values.recipe
    check_servable_elsewhere(recipe, "vLLM")
    command = VllmCommand(recipe, values.model, values.served_model)
    flags = [
        Sourced(["--host", recipe.serve.host], "recipe: serve.host"),
        Sourced(["--port", str(values.port)], "recipe: serve.port"),
        *(Sourced(words, f"recipe: {key}") for words, key in command.settings()),
    ]
    scheduling, inside = _scheduling(order)
    flags += [*scheduling, _queued_tokens(order)]
    flags.append(Sourced(["--shutdown-timeout", str(values.drain)], values.drain.source))
    remarks = []
    measured = plan.fit.engine
    if not measured.is_server:
        remarks.append(
            f"The laws are of engine '{measured.engine}', not of vLLM: these values are a starting "
            "point. Measure vLLM itself (engine 'vllm' or 'openai' in a recipe) for its own values."
        )
    if recipe.workers > 1:
        remarks.append(
            f"The plan has {recipe.workers} workers, and this starts one server: start one for "
            "each, and before them llmctl serve plan.json --replica URL ..."
        )
    install = "Needs vLLM with --max-num-queued-tokens (0.32 has it)."
    if inside:
        install = f"Needs {REQUIREMENT} and llmctl in one environment (pip install --no-deps)."
    variables = recipe.engine.vllm.env if recipe.engine.vllm else {}
    return {
        "flags": flags,
        "variables": variables,
        "remarks": [*remarks, install],
        "inside": inside,
    }


def check_servable_elsewhere(recipe: Recipe, engine: str) -> None:
    """Raise `InputError` if `engine` cannot load the recipe's model."""
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


def _scheduling(order: Order) -> tuple[list[Flag], bool]:
    """Return the flags of vLLM's scheduler, or of llmctl's inside it, and whether it is ours."""
    plan = order.plan
    settings = plan.settings
    if settings.policy == VllmPolicy.name:
        words = flags_of(settings.policy, settings.parameters)
        words += draft_flags(plan.recipe, settings.parameters, [])
        return [Sourced(group, "plan: policy 'vllm'") for group in grouped(words)], False
    running = rows(order)
    flags = [Sourced(["--max-num-seqs", str(running)], running.source)]
    if (tokens := chunk(order, running.value)) is None:
        why = "no target on the time between tokens bounds a pass, so it is vLLM's own"
        flags.append(Sourced([], f"--max-num-batched-tokens: {why}"))
    else:
        why = f"{tokens.source}; and a token for each of {running} rows"
        words = ["--max-num-batched-tokens", str(tokens.value + running.value)]
        flags.append(Sourced(words, why))
    try:
        refuse_inside(make_policy(settings.policy, settings.parameters), timed=True)
    except InputError as error:
        return [*flags, Sourced([], f"The scheduler is vLLM's own: {error.message}")], False
    source = f"plan: policy '{settings.policy}', read from LLMCTL_VLLM_PLAN"
    flags.append(Sourced(["--scheduler-cls", SCHEDULER], source))
    if settings.policy == "mlfq":
        flags.append(
            Sourced(["--no-async-scheduling"], "policy 'mlfq' pauses requests between passes")
        )
    return flags, True


def chunk(order: Order, running: int) -> Sourced[int] | None:
    """Return the prompt tokens of a pass in which `running` rows decode; None without a bound."""
    tokens = order.plan.settings.parameters.get("chunk_tokens")
    if isinstance(tokens, int) and tokens > 0:
        return Sourced(tokens, f"plan: chunk_tokens of policy '{order.plan.settings.policy}'")
    gap = gap_target(order.plan.recipe)
    if gap is None:
        return None
    key, limit = gap
    law = laws_from_fit(order.plan.fit).rounds
    valid = order.plan.fit.decode.valid
    running = min(running, valid.rows_max)
    middle = valid.length_max // 2

    def pass_s(prompt: int) -> float:
        return law.prefill_s(1, prompt) + law.decode_s(running, middle, 1)

    size = MIN_CHUNK
    while 2 * size <= MAX_CHUNK and pass_s(2 * size) <= limit:
        size *= 2
    decodes = f"{running} decodes of {middle} cached tokens"
    about = f"{size} prompt tokens and {decodes} take {pass_s(size):.3g} s"
    return Sourced(size, f"fit: the largest power of two that keeps {key} {limit:g} s: {about}")


def _queued_tokens(order: Order) -> Flag:
    """Return the flag for prompt tokens that may wait: target TTFT x prefill rate, as in vLLM."""
    targets = ttft_targets(order.plan.recipe)
    if not targets:
        why = "the recipe has no TTFT target, so there is no limit"
        return Sourced([], f"--max-num-queued-tokens: {why}")
    key, limit = min(targets.items(), key=lambda target: target[1])
    fit = order.plan.fit
    length = fit.prefill.valid.length_max
    error = fit.off_percent(fit.prefill)
    law = RoundsByPass(fit.steps.law) if fit.steps else laws_from_fit(fit).rounds
    rate = length / law.prefill_s(1, length)
    measured = f"fit, a prompt of {length:,} tokens alone; median error {error:.1f} %"
    source = f"{key} {limit:g} s x {rate:,.0f} tokens/s: {measured}"
    return Sourced(["--max-num-queued-tokens", str(max(int(limit * rate), 1))], source)
