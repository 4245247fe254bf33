"""Backends: everything that one engine needs beyond its row in the table of engines.

An engine's `EngineTraits` names its backend. An engine that is a server of its own has a folder or
a file here; engines in llmctl's worker processes share `LocalBackend`. A backend profiles its
engine, starts it if it is a server, and reports what it lacks on this machine. `backend_of` imports
a backend on first use, so an engine without its library costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from toolkit.engine_traits import traits_of
from toolkit.errors import EngineError

if TYPE_CHECKING:  # for types only: code inside an engine's own process imports this package too
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from toolkit.files.plan import Plan
    from toolkit.files.recipe import Recipe
    from toolkit.profiling.process import ProfileBench
    from toolkit.server.options import ServerOptions
    from toolkit.server.own_replicas import HostedServer


@dataclass(slots=True, frozen=True)
class Check:
    """What was checked and found. A `note` blocks nothing; what is `missing` must be installed or
    fixed, by the `remedy`, before the recipe can be used here.
    """

    name: str
    status: Literal["ok", "note", "missing"]
    found: str
    remedy: str = ""


class Backend(Protocol):
    """What the backend of every engine can do."""

    def timed(self, recipe: Recipe) -> AbstractContextManager[ProfileBench]:
        """Yield the engine, loaded or found, ready to be profiled.

        Raises `EngineError` if it cannot be loaded and `InputError` if it refuses the recipe.
        """
        ...

    def check(self, recipe: Recipe) -> list[Check]:
        """Return lines for `llmctl doctor`: whether the engine is on this machine."""
        ...


@dataclass(slots=True, frozen=True)
class ServerCommand:
    """How a program other than llmctl, such as a container, starts one server of an engine.

    Attributes:
        command: the program and what it serves; `flags`, the address and the drain follow.
        flags: words with the source of their values, in the order of the command line.
        environment: what it needs, besides writable folders.
        drain: the flag for the seconds that running requests get after SIGTERM.
        health: the path that answers 200 once the server is loaded, and while it lives.
        image: the pinned image that has the engine; `image_source` says where it comes from.
        plan_variable: names the plan's file for code of llmctl inside the engine; '': it runs none.
        python_variable: names the engine's Python for `llmctl serve`; '': the plan names it.
        alive: a program for the engine's Python that finds out whether a server that answers
            `health` still generates (`toolkit.backends.vllm.alive`); '': there is none.
    """

    command: Sequence[str]
    flags: Sequence[tuple[Sequence[str], str]]
    environment: Mapping[str, str]
    drain: str
    health: str
    image: str
    image_source: str
    plan_variable: str = ""
    python_variable: str = ""
    alive: str = ""


@runtime_checkable
class Serves(Protocol):
    """A backend that starts its engine's server. Clients send their requests to that server."""

    def launch(
        self, plan: Plan, options: ServerOptions, on_ready: Callable[[str], None]
    ) -> Mapping[str, int]:
        """Serve until a signal ends the server; `on_ready` gets the URL once it answers. With
        `options.control_key` the server's settings can be changed while it runs.

        Returns the number of ended requests by finish reason. Raises `InputError` for an address or
        a plan that cannot be served, and `EngineError` if the server cannot start or ends by
        itself.
        """
        ...


@runtime_checkable
class StartsReplicas(Protocol):
    """A backend that starts servers of its engine as replicas behind llmctl's front."""

    def replica(
        self, plan: Plan, options: ServerOptions, number: int, folder: Path
    ) -> HostedServer:
        """Start server `number` of the plan's `workers`, on a free port of the options' host, with
        its share of the machine's devices. `folder` is empty, and lasts as long as the server.
        """
        ...

    def described(self, plan: Plan, served_model: str) -> ServerCommand:
        """Describe one server of the plan's recipe, as another program starts it."""
        ...


def backend_of(engine: str) -> Backend:
    """Import and make the backend of an engine. Raises `InputError` for an unknown engine."""
    backend: Backend = resolve_name(traits_of(engine).backend)()
    return backend


class LocalBackend:
    """`Backend` of engines with an `EngineTraits.load`: each is profiled in its own process."""

    def timed(self, recipe: Recipe) -> AbstractContextManager[ProfileBench]:
        from toolkit.profiling.process import engine_process

        traits_of(recipe.engine.name).require()
        return engine_process(recipe)

    def check(self, recipe: Recipe) -> list[Check]:
        """See `Backend.check`: the versions of the engine's libraries."""
        traits = traits_of(recipe.engine.name)
        try:
            traits.require()
        except EngineError as error:
            return [Check("libraries", "missing", error.message, error.hint)]
        versions = [f"{name} {metadata.version(name)}" for name in traits.libraries]
        return [Check("libraries", "ok", ", ".join(versions) or "none needed")]
