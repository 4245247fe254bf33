"""Which class runs a recipe's engine. Imports only the one that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.engine_traits import attribute, traits_of
from toolkit.engines.protocol import Engine, RoundEngine
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec

if TYPE_CHECKING:
    from toolkit.engines.tensor_parallel import RankShare


def make_engine(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> Engine:
    """Load the engine, in as many processes as share its model. `EngineError` or `InputError` where
    it cannot be.
    """
    if engine.tensor_parallel_size > 1:
        from toolkit.engines.tensor_parallel import TensorParallelEngine

        return TensorParallelEngine(model, engine, hardware)
    return load_engine(model, engine, hardware)


def load_engine(
    model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec, share: RankShare | None = None
) -> Engine | RoundEngine:
    """This process's engine, or its share of one: by `EngineTraits.load`, imported now."""
    load = attribute(traits_of(engine.name).load)
    loaded: Engine | RoundEngine = (
        load(model, engine, hardware, share) if share else load(model, engine, hardware)
    )
    return loaded
