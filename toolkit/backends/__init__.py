"""Engines as verticals: everything that one engine needs beyond its row in the table of engines.

An engine is one folder or file here, whose backend is named by its `EngineTraits`. A backend
answers for one engine: how it is profiled, how it is started where it is a server of its own, and
what it lacks on this machine. `backend_of` loads it when it is first needed, so an engine whose
library is absent costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from toolkit.engine_traits import attribute, traits_of

if TYPE_CHECKING:  # alone: what runs inside an engine's own process imports this package too
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from toolkit.files.plan import Plan
    from toolkit.files.profile import OnForeign
    from toolkit.files.recipe import Recipe
    from toolkit.profiling.run import ProfileBench
    from toolkit.serve.server import Ending


@dataclass(slots=True, frozen=True)
class Check:
    """What was looked at, what was found, and the remedy where something is missing.

    A `note` stops nothing; what is `missing` must be there before the recipe can be used here.
    """

    name: str
    status: Literal["ok", "note", "missing"]
    found: str
    remedy: str = ""


@dataclass(slots=True, frozen=True)
class ServerOrder:
    """A server to start: what it serves, where, and how it ends.

    `event_log` is for a policy of ours. `on_foreign` is told where the engine's version or the CPU
    is not the fitted one; without it, that is refused.
    """

    plan: Plan
    served_model: str
    host: str
    port: int
    ending: Ending
    api_key: str = ""
    insecure: bool = False
    event_log: Path | None = None
    on_foreign: OnForeign | None = None


class Backend(Protocol):
    """What every engine has."""

    def timed(self, recipe: Recipe) -> AbstractContextManager[ProfileBench]:
        """The engine, loaded or found, ready to be profiled.

        Raises `EngineError` where it cannot be loaded, `InputError` where it refuses the recipe.
        """
        ...


@runtime_checkable
class Serves(Protocol):
    """A backend whose engine is a server that llmctl starts: requests do not pass through ours."""

    def launch(self, order: ServerOrder, on_ready: Callable[[str], None]) -> Mapping[str, int]:
        """Serve until a signal ends it; `on_ready` gets the URL once it answers.

        Returns how many requests ended, by reason. Raises `InputError` for an address or a plan
        that cannot be served, and `EngineError` where the server cannot start or ends by itself.
        """
        ...


@runtime_checkable
class Checks(Protocol):
    """A backend that can tell whether its engine is on this machine."""

    def check(self, recipe: Recipe) -> Check:
        """One line for `llmctl doctor`."""
        ...


def backend_of(engine: str) -> Backend:
    """The backend of the engine of this name, imported now. `InputError` for an unknown engine."""
    backend: Backend = attribute(traits_of(engine).backend)()
    return backend
