"""`capacity --also`: which recipe results, which laws hold for it, what is refused."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from test_sim_paged_commands import trace
from test_tuning_drafts import fit_with, recipe_with

from toolkit.cli.scenario import computed_fit
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe, recipe_path
from toolkit.traces.types import SharedBlocks
from toolkit.tuning.changes import RecipeChange, changed_recipe
from toolkit.tuning.deployments import (
    changed_variant,
    check_sharing,
    variants_of,
)

NAME = "llama-3.1-8b-h200"
FP8_BYTES = 9_081_200_640  # linear layers in 8 bits, the rest in 16: as in `recipe new`


@pytest.fixture(scope="module")
def shipped() -> Recipe:
    return load_recipe(recipe_path(NAME))


@pytest.fixture(scope="module")
def own_fit(shipped: Recipe) -> Fit:
    return compute(shipped)


def compute(recipe: Recipe) -> Fit:
    return computed_fit(recipe_path(NAME), recipe)


def changed(recipe: Recipe, words: str) -> Recipe:
    return changed_recipe(recipe, RecipeChange.parsed(words, recipe))


@pytest.mark.parametrize(
    "words", ["prefix_caching=false", "policy.parameters.prefix_caching=false"]
)
def test_a_parameter_has_its_own_name_or_its_path(shipped: Recipe, words: str) -> None:
    found = changed(shipped, words)
    assert found.policy.parameters["prefix_caching"] is False
    assert found.model_copy(update={"policy": shipped.policy}) == shipped


def test_bytes_follow_from_the_config(shipped: Recipe) -> None:
    assert changed(shipped, "model.quantization=fp8").model.weight_bytes == FP8_BYTES
    cache = changed(shipped, "engine.vllm.kv_cache_dtype=fp8").model
    assert cache.kv_bytes_per_token == shipped.model.kv_bytes_per_token // 2
    assert cache.weight_bytes == shipped.model.weight_bytes
    given = changed(shipped, "model.quantization=fp8,model.weight_bytes=9000000000")
    assert given.model.weight_bytes == 9_000_000_000
    back = load_recipe(recipe_path("llama-3.3-70b-h200-fp8-tp2"))
    assert changed(back, "model.quantization=null").model.weight_bytes == 141_107_412_992


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("prefix_caching", "prefix_caching"),
        ("prefix_cachin=false", "prefix_caching"),
        ("kv_cache_dtype=fp8", "engine.vllm.kv_cache_dtype"),
        ("engine.vllm.kv_cache_dtyp=fp8", "kv_cache_dtype"),
        ("max_num_seqs=many", "many"),
        ("max_num_seqs=1024", "max_num_seqs"),  # the recipe's own
        ("max_num_seqs=3,max_num_seqs=4", "max_num_seqs"),
        ("model.quantization=int4", "int4"),
        ("sla.ttft=3", "ttft"),
        ("policy.name=past-future", "--policies"),
        ("hardware.usd_per_hour=3", "--price"),
        ("serve.max_new_tokens=64", "serve.max_new_tokens"),
        ("engine={name: transformers}", "engine"),
        ("tune.trials=3", "tune.trials"),
        ("replica_router.name=by-law", "--workers"),  # there is one
        ("serve.acceptance.length=2", "num_speculative_tokens"),
    ],
)
def test_what_cannot_be_is_refused_by_name(shipped: Recipe, words: str, named: str) -> None:
    with pytest.raises(InputError) as error:
        changed(shipped, words)
    assert "\n" not in error.value.whole
    assert words.partition("=")[0] in error.value.message
    assert named in error.value.whole


def test_laws_are_computed_for_the_changed_recipe(shipped: Recipe, own_fit: Fit) -> None:
    words = "model.quantization=fp8,engine.vllm.kv_cache_dtype=fp8"
    found = changed_variant(shipped, own_fit, RecipeChange.parsed(words, shipped), compute)
    assert found.deployment.fit.steps is not None
    assert own_fit.steps is not None
    for term in ("pass", "cached_alone"):
        assert found.deployment.fit.steps.law.terms[term] < own_fit.steps.law.terms[term]
    assert found.deployment.fit.engine.capacity_tokens > 2 * own_fit.engine.capacity_tokens
    assert found.deployment.recipe.model.weight_bytes == FP8_BYTES


def test_scheduling_keeps_its_laws(shipped: Recipe, own_fit: Fit) -> None:
    change = RecipeChange.parsed("prefix_caching=false", shipped)
    for laws in (compute, None):
        found = changed_variant(shipped, own_fit, change, laws)
        assert found.deployment.fit is own_fit
        assert found.deployment.settings.parameters["prefix_caching"] is False
        assert found.changed == {"policy.parameters.prefix_caching": False}


@pytest.mark.parametrize(
    "words",
    [
        "model.quantization=fp8",
        "engine.vllm.kv_cache_dtype=fp8",
        "engine.vllm.drafts.method=ngram",
        "engine.gpu_memory_utilization=0.5",
    ],
)
def test_measured_laws_answer_no_other_recipe(shipped: Recipe, own_fit: Fit, words: str) -> None:
    with pytest.raises(InputError) as error:
        changed_variant(shipped, own_fit, RecipeChange.parsed(words, shipped), None)
    assert words.partition("=")[0] in error.value.message
    assert "profile" in error.value.hint


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("engine.vllm.drafts.method=ngram", "profile"),
        ("num_speculative_tokens=3", "profile"),
        ("engine.vllm.kv_cache_dtype=fp8_e5m2", "fp8_e5m2"),
        ("engine.vllm.num_gpu_blocks_override=100", "num_gpu_blocks_override"),
        ("engine.gpu_memory_utilization=0.1", "GiB"),
    ],
)
def test_what_is_not_computed_is_refused(
    shipped: Recipe, own_fit: Fit, words: str, named: str
) -> None:
    with pytest.raises(InputError) as error:
        changed_variant(shipped, own_fit, RecipeChange.parsed(words, shipped), compute)
    assert named in error.value.whole


def test_drafts_stand_beside_none_where_both_laws_were_measured() -> None:
    recipe = recipe_with()
    drafting = RecipeChange.parsed("num_speculative_tokens=3", recipe)
    found = changed_variant(recipe, fit_with((0, 3)), drafting, None)
    assert found.deployment.settings.parameters["num_speculative_tokens"] == 3
    with pytest.raises(InputError) as error:
        changed_variant(recipe, fit_with((0, 2)), drafting, None)
    assert "3" in error.value.message


def test_a_prefix_cache_needs_a_trace_that_shares(shipped: Recipe, own_fit: Fit) -> None:
    change = RecipeChange.parsed("prefix_caching=false", shipped)
    found = changed_variant(shipped, own_fit, change, compute)
    plain = trace(20)
    blocks = -(-plain.prompt_tokens // 16)
    offsets = [0, *blocks.cumsum()]
    apart = blocks_of(range(int(blocks.sum())), offsets)
    for lacking in (plain, replace(plain, shared=apart)):
        with pytest.raises(InputError) as error:
            check_sharing(found, lacking)
        assert plain.source in error.value.message
    alike = blocks_of([k for count in blocks for k in range(count)], offsets)
    check_sharing(found, replace(plain, shared=alike))
    [own] = variants_of(shipped, own_fit)
    check_sharing(own, plain)


def blocks_of(ids: Iterable[int], offsets: Iterable[int]) -> SharedBlocks:
    return SharedBlocks(16, np.array(list(ids)), np.array(list(offsets)))


def test_the_price_of_a_worker_follows_its_gpus() -> None:
    one = load_recipe(recipe_path("llama-3.1-8b-h100-sxm"))
    four = changed(one, "engine.tensor_parallel_size=4")
    assert one.hardware.usd_per_hour is not None
    assert four.hardware.usd_per_hour == pytest.approx(4 * one.hardware.usd_per_hour)


def test_a_size_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(InputError):
        changed(load_recipe(recipe_path("llama-3.1-8b-h100-sxm")), "engine.tensor_parallel_size=3")
