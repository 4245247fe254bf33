"""How far analytic predictions were off beside servers that others measured.

`elsewhere.json` has the errors of the commands themselves (`benchmarks.public.scoreboard`,
docs/results/scoreboard.md): by GPU and class of model (`groups`), and of each class with constants
that the server's model did not set (`left_out`). `all` has what the compared servers reach.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from toolkit.catalogue.models import special_of
from toolkit.estimators.gpu_operators import read_json
from toolkit.files.profile import AnalyticError, ErrorSpread
from toolkit.files.recipe import Recipe

FILE = Path(__file__).with_name("elsewhere.json")
SUFFIXES = re.compile(r"(-(instruct|chat|it|hf|fp8|fp4|nvfp4|bf16|awq|gptq))+$")


def is_of_model(source: str, compared: str) -> bool:
    """Return whether a recipe's model counts as a compared one, by their names alone.

    The last path component of `source` must begin with the name `compared`, and go on with another
    word or not at all. Case does not matter, nor do suffixes of `compared` such as -Instruct or
    -FP8. So Qwen/Qwen2-7B-Chat counts as Qwen2-7B-Instruct, and Qwen/Qwen2.5-7B does not.
    """
    name = Path(source).name.lower()
    family = SUFFIXES.sub("", compared.lower())
    return re.match(rf"{re.escape(family)}(?![a-z0-9.])", name) is not None


def measured_elsewhere(gpu: str, recipe: Recipe, *, experts: bool) -> AnalyticError:
    """Return the errors of predictions for servers like the recipe's.

    Args:
        gpu: the name in `measured_operators`.
        experts: whether the model has experts.
    """
    content = read_json(FILE)
    classes = {one["experts"]: one for one in content["left_out"]}
    groups = {(one["gpu"], one["experts"]): one for one in content["groups"]}
    group = groups.get((gpu, experts))
    models: list[str] = group["models"] if group else []
    return AnalyticError(
        experts=experts,
        gpu=gpu,
        here=ErrorSpread(**group["errors"]) if group else None,
        models=models,
        listed=any(is_of_model(recipe.model.source, model) for model in models),
        left_out=ErrorSpread(**classes[experts]["errors"]),
        beyond=_beyond(recipe, content["all"]),
    )


def _beyond(recipe: Recipe, reach: dict[str, Any]) -> list[str]:
    """Return what of the recipe is beyond all servers that were compared, in words."""
    tokens = recipe.model.max_model_len
    ranks = recipe.engine.tensor_parallel_size
    found = []
    if tokens > reach["tokens_max"]:
        found.append(f"requests of {tokens:,} tokens (compared: {reach['tokens_max']:,})")
    if ranks > reach["ranks_max"]:
        found.append(f"{ranks} GPUs a worker (compared: {reach['ranks_max']})")
    special = special_of(recipe.model.config)
    found += [f"{one} (compared: none)" for one in (special.states, special.sparse) if one]
    return found


def error_words(error: AnalyticError) -> str:
    """Return an error of `measured_elsewhere` as commands quote it."""
    kind = "models with experts" if error.experts else "dense models"
    left_out = f"of models that set no constant {_off(error.left_out)} servers with {kind}"
    if error.here is None:
        words = f"never compared on {error.gpu} with {kind}; {left_out} elsewhere"
    else:
        models = ", ".join(error.models)
        words = f"{_off(error.here)} measured servers of {error.gpu} ({models}); {left_out}"
    if error.beyond:
        words = f"beyond what was compared: {', '.join(error.beyond)}; {words}"
    return words


def _off(spread: ErrorSpread) -> str:
    return (
        f"TPOT {spread.tpot_percent:g} % off in the median, {spread.tpot_p90_percent:g} at p90, "
        f"TTFT {spread.ttft_percent:g} and {spread.ttft_p90_percent:g} %, over {spread.servers}"
    )
