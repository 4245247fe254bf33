"""What the script of target `vllm` reads: the command of a server of vLLM, each flag with its
reason.

The command is the one that every other target starts (`ServerCommand`). Two flags are this
target's own, since no front of llmctl stands before the server: how many prompt tokens may wait,
and how long running requests get after SIGTERM.
"""

from __future__ import annotations

from toolkit.backends import ServerCommand
from toolkit.backends.vllm.backend import VllmBackend
from toolkit.backends.vllm.setup import refuse_inside
from toolkit.backends.vllm.touched import REQUIREMENT
from toolkit.deploy.order import Sourced
from toolkit.deploy.reckon import ttft_targets
from toolkit.deploy.values import Values
from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.estimators.laws import RoundsByPass
from toolkit.estimators.load import laws_from_fit
from toolkit.files.plan import Plan
from toolkit.files.recipe import Recipe
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.vllm import VllmPolicy

# The words of a flag with its value, and why; without words the reason why there is no flag.
Flag = Sourced[list[str]]


def vllm_start(values: Values) -> dict[str, object]:
    """Return what the template of serve.sh reads: the command, its flags, and remarks.

    Raises `InputError` where the plan is of another engine, where its policy cannot run inside
    vLLM, and where vLLM cannot load the model.
    """
    plan = values.plan
    recipe = values.recipe
    check_servable_elsewhere(recipe, "vLLM")
    if not traits_of(recipe.engine.name).server:
        raise InputError(
            f"the laws and the settings are of engine '{recipe.engine.name}', not of vLLM",
            "make the plan with a recipe of engine vllm or openai",
        )
    if plan.settings.policy != VllmPolicy.name:
        refuse_inside(make_policy(plan.settings.policy, plan.settings.parameters), timed=True)
    command = VllmBackend().described(plan, values.served_model)
    flags = [
        Sourced(["--host", recipe.serve.host], "recipe: serve.host"),
        Sourced(["--port", str(values.port)], "recipe: serve.port"),
        *(Sourced(list(words), source) for words, source in command.flags),
        _queued_tokens(plan),
        Sourced([command.drain, str(values.drain)], values.drain.source),
    ]
    return {"command": command, "flags": flags, "remarks": _remarks(recipe, command)}


def _remarks(recipe: Recipe, command: ServerCommand) -> list[str]:
    remarks = ["Needs vLLM with --max-num-queued-tokens (0.32 has it)."]
    if command.plan_variable:
        remarks = [f"Needs {REQUIREMENT} and llmctl in one environment (pip install --no-deps)."]
    if recipe.workers > 1:
        remarks.append(
            f"The plan has {recipe.workers} workers, and this starts one server: start one for "
            "each, and before them llmctl serve plan.json --replica URL ..."
        )
    return remarks


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


def _queued_tokens(plan: Plan) -> Flag:
    """Return the flag for prompt tokens that may wait: target TTFT x prefill rate, as in vLLM."""
    targets = ttft_targets(plan.recipe)
    if not targets:
        why = "the recipe has no TTFT target, so there is no limit"
        return Sourced([], f"--max-num-queued-tokens: {why}")
    key, limit = min(targets.items(), key=lambda target: target[1])
    fit = plan.fit
    length = fit.prefill.valid.length_max
    error = fit.off_percent(fit.prefill)
    law = RoundsByPass(fit.steps.law) if fit.steps else laws_from_fit(fit).rounds
    rate = length / law.prefill_s(1, length)
    measured = f"fit, a prompt of {length:,} tokens alone; median error {error:.1f} %"
    source = f"{key} {limit:g} s x {rate:,.0f} tokens/s: {measured}"
    return Sourced(["--max-num-queued-tokens", str(max(int(limit * rate), 1))], source)
