"""Drafts as a variable: their laws in one fit, and the search among them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import samples
from lean import without_capacity
from said import says
from test_estimators_steps_fit import LAW, measured
from test_sim_paged_commands import trace

from toolkit.backends.vllm.command import draft_flags
from toolkit.errors import InputError
from toolkit.estimators.fitting import laws_of_drafts
from toolkit.estimators.part_fits import fit_steps
from toolkit.estimators.pipeline_fit import shape_of
from toolkit.files.fit import Fit
from toolkit.files.recipe import HardwareSpec, Recipe
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.search import search_settings
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace

ACCEPTANCE = {"length": 2.5, "tokens": 3}


def fit_with(numbers: tuple[int, ...]) -> Fit:
    """A fit with the same law for each number of drafts."""
    fit = samples.paged_fit()
    assert fit.steps is not None
    law = replace(fit.steps.law, knots=(0,), token_s=(1e-5,))
    own, *others = (
        fit.steps.model_copy(
            update={"law": law}
            | {"draft_tokens": number, "draft_method": "ngram" if number else ""}
        )
        for number in numbers
    )
    return fit.model_copy(update={"steps": own, "drafts": others})


def recipe_with(**tuned: object) -> Recipe:
    return samples.recipe(
        engine={"name": "vllm", "vllm": {"drafts": {"method": "ngram"}}},
        workers=1,
        policy={"name": "vllm"},
        tune={"trials": 10, "window_s": 4, "load": 0.4, "policies": ["own"]} | tuned,
        serve={"acceptance": ACCEPTANCE},
    )


def test_the_numbers_with_laws_are_searched() -> None:
    [space] = search_settings(recipe_with(), fit_with((0, 2, 4))).spaces
    assert space.distributions["num_speculative_tokens"].choices == (0, 2, 4)
    narrowed = recipe_with(space={"num_speculative_tokens": [0, 3]})
    [space] = search_settings(narrowed, fit_with((0, 2, 4))).spaces
    assert space.distributions["num_speculative_tokens"].choices == (0, 2)
    [space] = search_settings(recipe_with(), fit_with((0,))).spaces
    assert "num_speculative_tokens" not in space.distributions


@pytest.mark.slow
@without_capacity()
def test_cheap_drafts_are_recommended() -> None:
    fit = fit_with((0, 3))
    recipe = recipe_with()
    inputs = TuneInputs(recipe, fit, cut_trace(recipe, fit, trace(300)))
    result = tune(inputs, InProcessRunner(), samples.HEAD, lambda best: None)
    assert result.best.settings.parameters["num_speculative_tokens"] == 3


def test_a_fit_has_the_laws_of_several_profiles() -> None:
    plain = measured()
    drafting = plain.model_copy(update={"draft_tokens": 2, "draft_method": "ngram"})
    engine = SimpleNamespace(dtype="float32")
    profiles = [
        SimpleNamespace(steps=steps, recipe_name="one", engine=engine)
        for steps in (plain, drafting)
    ]
    [law] = laws_of_drafts(profiles[0], profiles[1:])
    assert (law.draft_tokens, law.draft_method) == (2, "ngram")
    with pytest.raises(InputError) as error:
        laws_of_drafts(profiles[0], profiles[:1])
    assert says(error.value.whole, "0")


def test_passes_with_drafts_have_the_price_of_their_tokens() -> None:
    """A pass of n rows with k drafts each costs as n + nk tokens do, and n rows."""
    rng = np.random.default_rng(0)
    profile = measured()
    points = []
    for point in profile.points:
        drafts = 2 * point.decodes if rng.random() < 0.7 else 0
        given = point.model_copy(update={"draft_tokens": drafts})
        points.append(given.model_copy(update={"seconds": [LAW.forward_s(shape_of(given))]}))
    fit = fit_steps(profile.model_copy(update={"points": points}), 0)
    assert fit.error.median_percent < 1.0


def test_the_flags_of_drafts() -> None:
    recipe = recipe_with()
    assert draft_flags(recipe, {}, []) == []
    flag, text = draft_flags(recipe, {"num_speculative_tokens": 2}, [])
    assert flag == "--speculative-config"
    assert json.loads(text) == {"method": "ngram", "num_speculative_tokens": 2}
    on_gpu = recipe.model_copy(update={"hardware": HardwareSpec(device="cuda", name="any")})
    _, text = draft_flags(on_gpu, {"num_speculative_tokens": 2}, [0.5, 0.2])
    assert json.loads(text)["synthetic_acceptance_rates"] == [0.5, 0.2]
    with pytest.raises(InputError):
        draft_flags(recipe, {"num_speculative_tokens": 2}, [0.5, 0.2])
