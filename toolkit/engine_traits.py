"""The table of engines: what llmctl knows of each engine before it loads any of its code.

`engine.name` in a recipe is a key of `ENGINES`. To add an engine, write its backend (see
`toolkit.backends`) and add one `EngineTraits` here; no other module branches on an engine's name.
Another package adds an engine through the entry point group `llmctl.engines`, under the engine's
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Literal

from toolkit.errors import InputError, nearest
from toolkit.extras import install, require


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """How llmctl treats an engine. References to code are written `module:attribute`."""

    name: str
    summary: str
    backend: str  # the `toolkit.backends.Backend`
    load: str = ""  # loads it in a worker process of llmctl; '': it has its own processes
    # A server of its own: it queues requests that do not fit, schedules by itself, and counts as
    # one worker.
    server: bool = False
    started: bool = True  # llmctl starts it; False: it runs already, at `engine.url`
    keeps_rows: bool = False  # rows keep their caches between rounds: our continuous policies run
    hosts_policies: bool = False  # our continuous policies run inside its own scheduler
    timed_by_pass: bool = False  # it logs its forward passes: the fit has a law of passes
    loads_model: bool = True  # a model is loaded on this machine's device
    shares_model: bool = False  # `tensor_parallel_size` may be above 1
    quantizes: bool = False  # `model.quantization` may be given
    policy: str = "slice"  # that serves where a recipe names none
    for_tests: bool = False  # tables of what can serve leave it out
    settings: tuple[str, ...] = ()  # keys of the recipe's `engine` that not all engines take
    extra: str = ""  # the extra of this package that installs it
    libraries: tuple[str, ...] = ()  # what `load` imports that is not in the core
    metrics: Literal["llmctl", "vllm"] = "llmctl"  # the names that its metrics use

    def require(self) -> None:
        """Raise `EngineError` if a library of the engine is not installed here."""
        require(self.libraries, f"engine '{self.name}'", install(self.extra))


PLUGINS = "llmctl.engines"  # the entry point group
LOCAL = "toolkit.backends:LocalBackend"
MODEL_LIBRARIES = ("torch", "transformers")
ENGINES: dict[str, EngineTraits] = {
    traits.name: traits
    for traits in (
        EngineTraits(
            "vllm",
            "vLLM's own server, with its scheduler or one of ours inside it",
            backend="toolkit.backends.vllm.backend:VllmBackend",
            server=True,
            hosts_policies=True,
            timed_by_pass=True,
            shares_model=True,
            quantizes=True,
            policy="vllm",
            settings=("vllm",),
            extra="vllm",
            metrics="vllm",
        ),
        EngineTraits(
            "rebatch",
            "a transformers model; its running batch changes between steps",
            backend=LOCAL,
            load="toolkit.engines.rebatch_engine:RebatchEngine",
            keeps_rows=True,
            settings=("cuda_graphs",),
            extra="engines",
            libraries=MODEL_LIBRARIES,
        ),
        EngineTraits(
            "transformers",
            "a transformers model in static batches",
            backend=LOCAL,
            load="toolkit.engines.transformers_engine:TransformersEngine",
            settings=("cuda_graphs",),
            extra="engines",
            libraries=MODEL_LIBRARIES,
        ),
        EngineTraits(
            "deepspeed",
            "a transformers model with DeepSpeed's kernels, in static batches",
            backend=LOCAL,
            load="toolkit.engines.deepspeed_engine:DeepSpeedEngine",
            settings=("kernel_injection",),
            extra="deepspeed",
            libraries=(*MODEL_LIBRARIES, "deepspeed"),
        ),
        EngineTraits(
            "openai",
            "a server that runs already and speaks OpenAI's API",
            backend="toolkit.backends.openai:OpenaiBackend",
            server=True,
            started=False,
            loads_model=False,
            settings=("url", "served_model"),
        ),
    )
}


def traits_of(name: str) -> EngineTraits:
    """The traits of an engine. Raises `InputError` for an unknown name."""
    if name not in ENGINES:
        for point in entry_points(group=PLUGINS, name=name):
            ENGINES[name] = point.load()
    if name not in ENGINES:
        raise InputError(f"there is no engine '{name}'", nearest(name, ENGINES))
    return ENGINES[name]
