"""A recipe with some of its keys changed, to be shown beside itself: `capacity --also`.

`RecipeChange.parsed` reads the words, `changed_recipe` applies them and checks the result with the
recipe's own model. Some keys decide how long a pass takes or how much memory there is
(`RecipeChange.of_laws`): for these the caller needs other laws. Keys that decide neither laws nor
scheduling nor targets are refused, and so are keys that change the requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue, ValidationError

from toolkit.catalogue.models import facts_of
from toolkit.catalogue.models import kv_bytes_per_token as kv_bytes_of
from toolkit.errors import InputError, nearest
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.strict import problems, yaml_value
from toolkit.routing.routers import router_of
from toolkit.sched.policies import make_any
from toolkit.sched.policies.parameters import declared
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.world import world_from_fit

EXAMPLE = "for example --also prefix_caching=false"
PARAMETERS = "policy.parameters"
PREFIX_CACHING = f"{PARAMETERS}.prefix_caching"
DRAFTS = "engine.vllm.drafts"
# The keys that decide how long passes take and how much memory there is.
LAW_KEYS = (
    "model.quantization",
    "model.dtype",
    "model.weight_bytes",
    "model.kv_bytes_per_token",
    "engine",
)
# The keys that decide the scheduling, or what is demanded of it.
SCHEDULING_KEYS = (
    PARAMETERS,
    "replica_router",
    "workers",
    "sla",
    "serve.acceptance",
    "serve.admission",
    "tune.max_oom_percent",
    "tune.max_evicted_percent",
    "tune.min_attainment_percent",
    "tune.max_refused_percent",
)
OWN_RECIPE = "make a recipe of its own, and name both"
# The keys that are changed in another way, or not at all.
INSTEAD = {
    "policy.name": "use --policies NAME",
    "engine.name": OWN_RECIPE,
    "hardware.usd_per_hour": "use --price USD",
    "hardware": OWN_RECIPE,
    "model.max_model_len": f"it changes the requests' lengths, too: {OWN_RECIPE}",
    "serve.max_new_tokens": f"it changes the requests' lengths, too: {OWN_RECIPE}",
    "model.config": OWN_RECIPE,
    "model.source": OWN_RECIPE,
    "tune.seed": "use --seed",
    "tune.trace": "use --trace",
    "tune.request_rate_rps": "use --rate",
}
LAWS = ("engine", "prefill", "decode", "overhead", "memory", "rounds", "swap", "steps", "drafts")


@dataclass(frozen=True, slots=True)
class RecipeChange:
    """Keys of a recipe, by their dotted paths, and their new values. `text`: as it was typed."""

    text: str
    values: Mapping[str, JsonValue]

    @classmethod
    def parsed(cls, text: str, recipe: Recipe) -> RecipeChange:
        """Read `KEY=VALUE,...`: KEY is a recipe's key by its path, or a parameter of its policy.

        Raises `InputError` for other words, and for a key that is nearly a parameter.
        """
        own = declared(type(make_any(recipe.policy.name, {})))
        values: dict[str, JsonValue] = {}
        for word in re.split(r",(?=[a-z_][\w.]*=)", text):
            name, sign, given = word.partition("=")
            if not sign or not re.fullmatch(r"[a-z_][\w.]*", name):
                raise InputError(f"--also {text}: '{word}' is not KEY=VALUE", EXAMPLE)
            key = f"{PARAMETERS}.{name}" if name in own else name
            if key in values:
                raise InputError(f"--also {text}: {name} is given twice", "give it once")
            if "." not in key and key not in Recipe.model_fields:
                hint = nearest(key, own)
                if hint.startswith("did you mean"):
                    problem = f"policy '{recipe.policy.name}' has no parameter '{key}'"
                    raise InputError(f"--also {text}: {problem}", hint)
            values[key] = yaml_value(given, f"--also {word}")
        return cls(text, values)

    @property
    def of_laws(self) -> bool:
        """Whether a key decides how long passes take, or how much memory there is."""
        return any(under(key, LAW_KEYS) for key in self.values)

    def error(self, problem: str, hint: str) -> InputError:
        """Return the error of this change."""
        return InputError(f"--also {self.text}: {problem}", hint)


def under(key: str, paths: Iterable[str]) -> bool:
    """Whether a key is one of these paths, or inside one of them."""
    return any(key == path or key.startswith(f"{path}.") for path in paths)


def changed_recipe(recipe: Recipe, change: RecipeChange) -> Recipe:
    """Return the recipe with the change. The bytes of weights and of the KV cache follow from the
    model's config, unless they are given.

    Raises `InputError` for keys and values that a recipe cannot have, for keys that cannot change
    the capacity, and for a value that the recipe has already.
    """
    data = recipe.model_dump(mode="json", exclude_unset=True)
    for key, value in change.values.items():
        _put(data, key, value, change)
    changed = _checked(data, change)
    for key in change.values:
        _refuse_key(key, changed, change)
    if changed == recipe:
        raise change.error("the recipe has this value already", "give another value")
    changed = _with_bytes(recipe, changed, change)
    try:
        make_any(changed.policy.name, changed.policy.parameters)
    except InputError as error:
        raise change.error(error.message, error.hint) from None
    return changed


def _put(data: dict[str, Any], key: str, value: JsonValue, change: RecipeChange) -> None:
    """Set the value at a dotted path; sections that are absent or null on the way are made."""
    *sections, last = key.split(".")
    for name in sections:
        inner = data.get(name)
        if inner is None:
            inner = data[name] = {}
        if not isinstance(inner, dict):
            raise change.error(f"{key}: '{name}' has no keys", "see docs/reference/recipe.md")
        data = inner
    data[last] = deepcopy(value)


def _checked(data: dict[str, Any], change: RecipeChange) -> Recipe:
    """The recipe of this content. `InputError` has the first problem in one line."""
    try:
        return Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = problems(error, Recipe, data)[0]
        raise change.error(first, "see docs/reference/recipe-keys.md") from None


def _refuse_key(key: str, changed: Recipe, change: RecipeChange) -> None:
    """Raise `InputError` for a key that cannot change how many of these requests are served."""
    for path, remedy in INSTEAD.items():
        if under(key, [path]):
            raise change.error(f"{key} is not a key that --also changes", remedy)
        if under(path, [key]):
            raise change.error(f"{key} is a section", f"name a key in it, such as {key}.KEY=VALUE")
    if not under(key, (*LAW_KEYS, *SCHEDULING_KEYS)):
        raise change.error(f"{key} does not change the capacity", "leave it out")
    if under(key, ["replica_router"]) and router_of(changed) is None:
        problem = f"{key} changes nothing: there is one worker, and no router before it"
        raise change.error(problem, "give several replicas of a server: --workers 2")
    if under(key, ["serve.admission"]) and changed.tune.max_refused_percent is None:
        problem = f"{key} changes nothing: tune.max_refused_percent is not set, so none is refused"
        raise change.error(problem, "set both: serve.admission=...,tune.max_refused_percent=...")
    drafts = changed.policy.parameters.get("num_speculative_tokens", 0)
    if under(key, ["serve.acceptance"]) and not drafts:
        problem = f"{key} changes nothing: num_speculative_tokens is 0, so there are no drafts"
        raise change.error(problem, "set both: num_speculative_tokens=...,serve.acceptance...")


def _with_bytes(recipe: Recipe, changed: Recipe, change: RecipeChange) -> Recipe:
    """Return the changed recipe with the bytes of its weights and of a cached token, by its config,
    and with the price of a worker's GPUs. Raises `InputError` where the unchanged bytes are not the
    ones that its config gives.
    """
    updates = {}
    for key, (bytes_of, sources) in BYTES.items():
        of_bytes = any(under(changed_key, sources) for changed_key in change.values)
        if key in change.values or not of_bytes:
            continue
        name = key.removeprefix("model.")
        hint = f"give it too: --also {change.text},{key}=BYTES"
        try:
            before = bytes_of(recipe)
            after = bytes_of(changed)
        except InputError as error:
            raise change.error(f"{key} changes with it, and {error.message}", hint) from None
        if getattr(recipe.model, name) != before:
            own = getattr(recipe.model, name)
            problem = f"{key} changes with it: it is {own}, and model.config gives {before}"
            raise change.error(problem, hint)
        updates[name] = after
    made = changed.model_copy(update={"model": changed.model.model_copy(update=updates)})
    usd = recipe.hardware.usd_per_hour
    if usd is None:
        return made
    gpus, before_gpus = (one.engine.tensor_parallel_size for one in (changed, recipe))
    price = {"usd_per_hour": usd * gpus / before_gpus}
    return made.model_copy(update={"hardware": made.hardware.model_copy(update=price)})


def _weight_bytes(recipe: Recipe) -> int:
    """Bytes of the weights by the model's config. `InputError` where it does not tell."""
    model = recipe.model
    config = {**model.config, "torch_dtype": model.dtype}
    return facts_of(config, model.quantization or "").weight_bytes


def _cache_bytes(recipe: Recipe) -> int:
    """Bytes of a cached token by the model's config. `InputError` where it does not tell."""
    vllm = recipe.engine.vllm
    dtype = (vllm.kv_cache_dtype if vllm else None) or recipe.model.dtype
    found = kv_bytes_of(recipe.model.config, dtype)
    if found is None:
        raise InputError(f"model.config does not give it for a cache in {dtype}")
    return found[0]


# What a change of some keys changes with them: how it follows from the recipe, and these keys.
BYTES: dict[str, tuple[Callable[[Recipe], int], tuple[str, ...]]] = {
    "model.weight_bytes": (_weight_bytes, ("model.quantization", "model.dtype")),
    "model.kv_bytes_per_token": (_cache_bytes, ("model.dtype", "engine.vllm.kv_cache_dtype")),
}


def measured_laws(change: RecipeChange, recipe: Recipe) -> InputError:
    """Return the error for a change of keys on which laws depend that are not computed anew."""
    [key, *_] = [key for key in change.values if under(key, LAW_KEYS)]
    return change.error(
        f"{key} changes the laws, and those of '{recipe.name}' were measured",
        "copy the recipe under a new name with that key, profile and fit it, and name both: "
        "llmctl capacity RECIPE RECIPE2 --fit fit.json --fit fit2.json",
    )


def refuse_drafts(change: RecipeChange) -> None:
    """Raise `InputError` for another way of drafting: its laws are measured, never computed."""
    if any(under(key, [DRAFTS]) for key in change.values):
        raise change.error(
            "what drafts cost is not computed",
            "set engine.vllm.drafts in the recipe and measure it: llmctl profile RECIPE --drafts N",
        )


def check_laws(change: RecipeChange, before: Fit, after: Fit) -> None:
    """Raise `InputError` where no computed law depends on the changed keys."""
    if all(getattr(before, name) == getattr(after, name) for name in LAWS):
        keys = " and ".join(key for key in change.values if under(key, LAW_KEYS))
        raise change.error(
            f"no law that is computed depends on {keys}",
            "leave it out, or measure both: llmctl profile RECIPE",
        )


def check_drafts(change: RecipeChange, recipe: Recipe, fit: Fit) -> None:
    """Raise `InputError` where the law or the acceptance of this number of drafts is not known."""
    policy = make_any(recipe.policy.name, recipe.policy.parameters)
    if isinstance(policy, VllmPolicy):
        world = world_from_fit(fit, workers=1, max_new_tokens=1)
        try:
            replace(world, acceptance=recipe.serve.acceptance).engine_of(policy)
        except InputError as error:
            raise change.error(error.message, error.hint) from None
