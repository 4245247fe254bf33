"""The control of a front before servers that it starts: new settings for one of them, or for all.

A change for all is made on one server after the other; if one refuses, those before it get their
values back. A server that is started again gets what was set for all before it serves. One server
alone may have other settings: a trial, beside the others, which its restart ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from toolkit.endpoints.settings import LiveState, SettingsClient
from toolkit.errors import InputError
from toolkit.sched.policies.parameters import Value
from toolkit.serve.control import Scope


class ReplicaRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client asks a front for; `owner` is of no effect, as it gives no lease."""

    settings: dict[str, bool | int | float | str] = msgspec.field(name="set", default_factory=dict)
    why: str = ""
    owner: str = ""
    replica: str = ""


class ReplicaSettings:
    """The live settings of the servers, by their names. `key` is that of their controls."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._clients: dict[str, SettingsClient] = {}
        self._shared: dict[str, Value] = {}
        self._lock = asyncio.Lock()

    def join(self, name: str, url: str) -> None:
        """A server is ready: give it what all have. It blocks. Raises `InputError`."""
        client = SettingsClient(url, self.key)
        if self._shared:
            client.set(self._shared, "as all replicas")
        self._clients[name] = client

    def leave(self, name: str) -> None:
        """A server has ended."""
        self._clients.pop(name, None)

    def forget(self) -> None:
        """All servers will be started with a new plan: it has their settings."""
        self._shared = {}

    async def ask(self, _: Scope, fields: object) -> dict[str, Any]:
        """Answer a request, as `toolkit.serve.control` passes it."""
        try:
            request = msgspec.convert(fields, ReplicaRequest)
        except msgspec.ValidationError as error:
            return {
                "error": "a front before several servers takes set, replica and why alone: "
                f"{str(error)[:200]}",
                "hint": "it gives no lease: tune one server alone, and set its values here",
                "status": 400,
            }
        try:
            async with self._lock:
                return await self._answer(request)
        except InputError as error:
            return {"error": error.message, "hint": error.hint, "status": 422}

    async def _answer(self, request: ReplicaRequest) -> dict[str, Any]:
        settings, why, name = request.settings, request.why, request.replica
        if not self._clients:
            raise InputError("no replica is ready", "wait until one is")
        if name and name not in self._clients:
            raise InputError(
                f"there is no replica '{name[:40]}'", f"there are: {', '.join(self._clients)}"
            )
        states = {each: await self._state(each) for each in sorted(self._clients)}
        changed: dict[str, Value] = {}
        if settings or why:
            changed = await self._change([name] if name else sorted(states), settings, why, states)
            if not name:
                self._shared |= settings
        shown: dict[str, Any] = msgspec.to_builtins(states[name or min(states)])
        values = {each: state.values for each, state in states.items()}
        urls = {each: self._clients[each].url for each in states}
        return shown | {"changed": changed, "replicas": values, "urls": urls}

    async def _state(self, name: str) -> LiveState:
        return await asyncio.to_thread(self._clients[name].get)

    async def _change(
        self,
        names: list[str],
        settings: Mapping[str, Value],
        why: str,
        states: dict[str, LiveState],
    ) -> dict[str, Value]:
        """Change settings of these servers, all or none; the values that changed on any."""
        changed: dict[str, Value] = {}
        before: list[tuple[str, dict[str, Value]]] = []
        for name in names:
            known = states[name].values
            try:
                states[name] = await asyncio.to_thread(self._clients[name].set, settings, why)
            except InputError as error:
                for other, values in before:
                    await asyncio.to_thread(self._clients[other].set, values, "taken back")
                raise InputError(f"replica {name}: {error.message}", error.hint) from None
            before.append((name, {key: known[key] for key in settings if key in known}))
            changed |= states[name].changed
        return changed
