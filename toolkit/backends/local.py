"""The backend of engines that run in llmctl's worker processes."""

from __future__ import annotations

from contextlib import AbstractContextManager

from toolkit.files.recipe import Recipe
from toolkit.profiling.process import engine_process
from toolkit.profiling.run import ProfileBench


class LocalBackend:
    """`toolkit.backends.Backend` of every engine with an `EngineTraits.load`.

    The engine is profiled in a process of its own.
    """

    def timed(self, recipe: Recipe) -> AbstractContextManager[ProfileBench]:
        """See `Backend.timed`."""
        return engine_process(recipe)
