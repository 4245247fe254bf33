"""Which class runs a recipe's engine. Imports only the one that is asked for."""

from __future__ import annotations

from toolkit.engines.protocol import Engine
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec


def make_engine(model: ModelSpec, engine: EngineSpec, hardware: HardwareSpec) -> Engine:
    """Load the engine. `EngineError` or `InputError` where that is not possible."""
    if engine.name == "fake":
        from toolkit.engines.fake_rounds import FakeRoundEngine

        return FakeRoundEngine.from_specs(model, engine)
    if engine.name == "rebatch":
        from toolkit.engines.rebatch_engine import RebatchEngine

        return RebatchEngine(model, engine, hardware)
    if engine.name == "deepspeed":
        from toolkit.engines.deepspeed_engine import DeepSpeedEngine

        return DeepSpeedEngine(model, engine, hardware)
    from toolkit.engines.transformers_engine import TransformersEngine

    return TransformersEngine(model, engine, hardware)
