"""vLLM as a backend: profiled through its own server, started as a child, checked by version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from toolkit.backends import Check, ServerOrder
from toolkit.backends.vllm.command import vllm_python, vllm_version
from toolkit.errors import LlmctlError
from toolkit.files.recipe import Recipe
from toolkit.profiling.run import ProfileBench


class VllmBackend:
    """`toolkit.backends.Backend`, `Serves` and `Checks`."""

    def timed(self, recipe: Recipe) -> AbstractContextManager[ProfileBench]:
        """See `Backend.timed`."""
        from toolkit.backends.vllm.profile import vllm_bench

        return vllm_bench(recipe)

    def launch(self, order: ServerOrder, on_ready: Callable[[str], None]) -> Mapping[str, int]:
        """See `Serves.launch`."""
        from toolkit.backends.vllm.launch import launch_vllm

        return launch_vllm(order, on_ready)

    def check(self, recipe: Recipe) -> Check:
        """See `Checks.check`."""
        python = vllm_python(recipe)
        try:
            return Check("engine", "ok", f"vLLM {vllm_version(recipe)}, of {python}")
        except LlmctlError as error:
            return Check("engine", "missing", error.message, error.hint)
