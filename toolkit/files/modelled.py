"""Refuses by name what a recipe or a fit has and llmctl does not model (`catalogue.classes`)."""

from __future__ import annotations

from toolkit.catalogue.classes import ClassFound, of_recipe, of_resolved, refuse
from toolkit.engine_traits import traits_of
from toolkit.files.fit import Fit
from toolkit.files.recipe import Recipe


def classes_of(recipe: Recipe) -> list[ClassFound]:
    """The classes of a recipe's model and of its flags; none of a server that runs already, which
    is measured from outside.
    """
    if not traits_of(recipe.engine.name).started:
        return []
    vllm = recipe.engine.vllm
    model = recipe.model
    return of_recipe(model.config, vllm.args if vllm else (), model.max_model_len)


def refuse_recipe(recipe: Recipe) -> None:
    """Raise `InputError` for what the recipe has and is not modelled."""
    refuse(f"recipe '{recipe.name}'", classes_of(recipe))


def refuse_fit(fit: Fit) -> None:
    """Raise `InputError` for what the measured server had and is not modelled."""
    if fit.steps is not None and fit.steps.resolved is not None:
        found = of_resolved(fit.steps.resolved, fit.engine.engine_version or "")
        refuse(f"the server of the fit of '{fit.recipe_name}'", found)
