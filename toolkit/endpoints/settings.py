"""The settings of a running server from outside: read them with their bounds, change them, hold the
lease. The server's side is `toolkit.backends.vllm.control`.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from toolkit.endpoints.ask import ask
from toolkit.endpoints.target import base_url
from toolkit.errors import InputError
from toolkit.openai.errors import error_text
from toolkit.openai.foreign import decoded
from toolkit.sched.policies.parameters import Value

ROUTE = "/llmctl/settings"
CONTROL_KEY_VARIABLE = "LLMCTL_CONTROL_KEY"
TIMEOUT_S = 30.0  # an engine answers between two passes
START = "start it with: llmctl serve PLAN.json --live"


class LiveSetting(msgspec.Struct, frozen=True):
    """A setting: its value now and at the start, and its bounds. `beyond` says what a larger value
    needs.
    """

    name: str
    value: Value
    start: Value
    low: float | None = None
    high: float | None = None
    choices: list[Value] = []
    doc: str = ""
    beyond: str = ""


class HeldLease(msgspec.Struct, frozen=True):
    """The tuner of the server, and for how long it holds the lease without another word."""

    owner: str
    left_s: float


class LiveState(msgspec.Struct, frozen=True):
    """The settings, which tuner holds the lease, how many changes there were, what this one
    changed, and the newest word of the tuners that change them.
    """

    settings: list[LiveSetting]
    lease: HeldLease | None = None
    changes: int = 0
    changed: dict[str, Value] = {}
    word: str = ""

    @property
    def by_name(self) -> dict[str, LiveSetting]:
        """The settings by name."""
        return {one.name: one for one in self.settings}


class _Problem(msgspec.Struct):
    error: str = ""
    hint: str = ""


class SettingsClient:
    """The control of the server at `url`, with its key. With an `owner` it may hold the lease.

    Every call raises `InputError`, in one line, where the server has no control, refuses the key or
    the values, or does not answer, and while another one tunes.
    """

    def __init__(self, url: str, key: str, owner: str = "") -> None:
        self.url = base_url(url)
        self._key = key
        self._owner = owner

    def get(self) -> LiveState:
        """The settings now."""
        return self._ask(None)

    def set(self, settings: Mapping[str, Value], why: str = "") -> LiveState:
        """Change settings, all or none."""
        return self._ask({"set": dict(settings), "owner": self._owner, "why": why})

    def hold(self, lease_s: float, settings: Mapping[str, Value] | None = None) -> LiveState:
        """Take the lease or renew it, and change settings. If it is not renewed in time, the
        settings from before it come back.
        """
        asked = {"set": dict(settings or {}), "owner": self._owner, "lease_s": lease_s}
        return self._ask(asked)

    def release(self, settings: Mapping[str, Value], why: str = "") -> LiveState:
        """Leave these settings behind, and end the lease."""
        return self._ask({"set": dict(settings), "owner": self._owner, "lease_s": 0.0, "why": why})

    def _ask(self, fields: Mapping[str, object] | None) -> LiveState:
        where = self.url + ROUTE
        status, body = ask(where, fields, key=self._key, timeout_s=TIMEOUT_S)
        if status == 200:
            state = decoded(body, LiveState)
            if state is None:
                raise InputError(f"{where} is no control of llmctl's", START)
            return state
        if status == 404:
            raise InputError(f"{self.url} has no live settings", START)
        if status == 401:
            raise InputError(
                f"{where}: the control's key is missing or wrong",
                f"give it in {CONTROL_KEY_VARIABLE}; llmctl serve --live takes it from there, too",
            )
        problem = decoded(body, _Problem) or _Problem()
        raise InputError(problem.error or f"HTTP {status}: {error_text(body)}", problem.hint)
