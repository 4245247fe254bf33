"""The world of a running server by the law of its own passes."""

from __future__ import annotations

from dataclasses import replace

from toolkit.backends.vllm.from_log import PassHistory, steps_of_log
from toolkit.estimators.load import law_of_steps
from toolkit.estimators.part_fits import fit_steps
from toolkit.files.recipe import Recipe
from toolkit.sim.paged_engine import PassRange
from toolkit.sim.world import World


def refitted(recipe: Recipe, world: World, history: PassHistory) -> World:
    """`world` with the law of these passes and the blocks that the server has; the front is not in
    a log, and stays. Raises as `steps_of_log`.
    """
    fitted = fit_steps(steps_of_log(recipe, history), 0)
    valid = fitted.valid
    engine = replace(
        world.engine(),
        steps=law_of_steps(fitted),
        blocks=history.header.blocks,
        valid=PassRange(valid.rows_max, valid.tokens_max, valid.cached_max),
    )
    return replace(world, paged=engine)
