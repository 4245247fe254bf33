"""The control of a running vLLM: new settings over HTTP, without a restart, with a key of its own.

A client's request reaches `Control` in vLLM's API server (`MIDDLEWARE` is the value of vLLM's flag
--middleware). That makes a utility call of `EngineCore.llmctl_settings`, which `install` adds in
the engine's process. There `EngineControl` gives the settings to the scheduler between two passes.

vLLM's own code is unchanged: `--middleware` is its flag, and its engine runs utility calls by name,
in order with requests. GET /llmctl/settings answers with the settings and their bounds; POST takes
a `ControlRequest` and answers the same afterwards.

A tuner holds a lease, which ends by itself: then the settings from before it are back. Meanwhile no
other program changes settings.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Any

from toolkit.backends.vllm.knobs import LiveSettings
from toolkit.backends.vllm.setup import CONTROL_VARIABLE
from toolkit.errors import InputError
from toolkit.sched.policies.parameters import Value

ROUTE = "/llmctl/settings"
METHOD = "llmctl_settings"
MIDDLEWARE = "toolkit.backends.vllm.control.Control"
HEADER = b"authorization"
MAX_BODY_BYTES = 1 << 14
BODY_S = 5.0  # for a body to arrive
MAX_WAITING = 8  # requests with the key that are answered in turn
MAX_LEASE_S = 600.0
MAX_NAME = 80
FIELDS = {"set", "owner", "lease_s", "why"}
HOW_TO_START = (
    "start it with: llmctl serve PLAN.json --live; or add --middleware "
    f"{MIDDLEWARE} and --scheduler-cls toolkit.backends.vllm.iterations.logged_scheduler to it"
)

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
log = logging.getLogger("vllm.llmctl")


class ControlRequest:
    """What a client asks for.

    Attributes:
        settings: new values by name; all are taken, or none.
        owner: the tuner that holds or wants the lease; '': none, for a change by hand.
        lease_s: seconds from now that the lease lasts; 0 ends it; None: nothing about it.
        why: for the log, in one line; without settings it is a word that `llmctl set` shows.
    """

    __slots__ = ("lease_s", "owner", "settings", "why")

    def __init__(self, fields: object) -> None:
        if not isinstance(fields, dict) or not fields.keys() <= FIELDS:
            raise InputError(
                "the body is no object with set, owner, lease_s and why alone",
                "llmctl set KEY=VALUE sends one",
            )
        settings = fields.get("set", {})
        owner = fields.get("owner", "")
        lease_s = fields.get("lease_s")
        why = fields.get("why", "")
        is_number = isinstance(lease_s, int | float) and not isinstance(lease_s, bool)
        if not isinstance(settings, dict):
            raise InputError("set is no object of settings", 'such as {"max_num_seqs": 32}')
        if not (isinstance(owner, str) and isinstance(why, str)):
            raise InputError("owner and why are text", "leave them out")
        if lease_s is not None and not (is_number and 0 <= lease_s <= MAX_LEASE_S and owner):
            raise InputError(
                f"lease_s is a number from 0 to {MAX_LEASE_S:g}, with an owner", "renew it in time"
            )
        self.settings: dict[str, Any] = settings
        self.owner = owner[:MAX_NAME]
        self.lease_s: float | None = lease_s
        self.why = " ".join(why.split())[:200]


class Lease:
    """The tuner that may change settings until `until_s`, and the settings from before."""

    __slots__ = ("before", "owner", "until_s")

    def __init__(self, owner: str, until_s: float, before: dict[str, Value]) -> None:
        self.owner = owner
        self.until_s = until_s
        self.before = before


class EngineControl:
    """The settings of one scheduler, in its own process. All calls are between two passes.

    Attributes:
        changed: what has changed since `take` was called last; at first, all settings.
    """

    def __init__(self, live: LiveSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._live = live
        self._clock = clock
        self._lease: Lease | None = None
        self._changes = 0
        self._word = ""  # the newest one
        self.changed = live.values()
        _show(self.changed, changes=0)

    def begin(self, planned: Mapping[str, Value]) -> None:
        """Begin with the planned values of those settings that are live."""
        known = self._live.values()
        self._apply({name: planned[name] for name in planned if name in known}, "the plan's")

    def take(self) -> dict[str, Value]:
        """What has changed since the last call."""
        changed = self.changed
        if changed:
            self.changed = {}
        return changed

    def expire(self) -> None:
        """End a lease that was not renewed in time: the settings from before it are back."""
        lease = self._lease
        if lease is None or self._clock() < lease.until_s:
            return
        self._lease = None
        self._apply(lease.before, f"the lease of {lease.owner} ended without a word")

    def handle(self, fields: object) -> dict[str, Any]:
        """Answer a client's request, in plain values. `error`, `hint` and `status` say why it was
        refused; then nothing has changed.
        """
        self.expire()
        try:
            request = ControlRequest(fields)
            lease = self._lease
            wants = bool(request.settings or request.why) or request.lease_s is not None
            if lease is not None and wants and request.owner != lease.owner:
                return self._held(lease)
            self._live.refuse(request.settings)
        except InputError as error:
            return {"error": error.message, "hint": error.hint, "status": 422}
        if request.lease_s:
            before = self._live.values() if lease is None else lease.before
            self._lease = Lease(request.owner, self._clock() + request.lease_s, before)
        if request.why:
            self._word = request.why
        changed = self._apply(request.settings, request.why or request.owner or "set by hand")
        if request.lease_s == 0:
            self._lease = None
        return self._state() | {"changed": changed}

    def _held(self, lease: Lease) -> dict[str, Any]:
        left_s = lease.until_s - self._clock()
        return {
            "error": f"{lease.owner} tunes this server: no other program changes its settings",
            "hint": f"end it, or wait: without a word from it, its lease ends in {left_s:.0f} s",
            "status": 409,
        }

    def _apply(self, settings: Mapping[str, Any], why: str) -> dict[str, Value]:
        changed = self._live.apply(settings)
        if changed:
            self._changes += 1
            self.changed |= changed
            words = ", ".join(f"{name}={value}" for name, value in changed.items())
            log.warning("llmctl: %s (%s)", words, why)
            _show(changed, changes=1)
        return changed

    def _state(self) -> dict[str, Any]:
        lease = self._lease
        held = None
        if lease is not None:
            held = {"owner": lease.owner, "left_s": lease.until_s - self._clock()}
        return {
            "settings": self._live.described(),
            "lease": held,
            "changes": self._changes,
            "word": self._word,
        }


@cache
def _series() -> Any:
    """The gauge of each setting and the counter of changes, in vLLM's /metrics."""
    from prometheus_client import Counter, Gauge

    gauge = Gauge(
        "llmctl_setting",
        "A live setting's value; true is 1, and policy priority is 1.",
        ["name"],
        multiprocess_mode="mostrecent",
    )
    return gauge, Counter("llmctl_setting_changes", "Changes of live settings.")


def _show(values: Mapping[str, Value], changes: int) -> None:
    gauge, counter = _series()
    for name, value in values.items():
        number = float(value == "priority") if isinstance(value, str) else float(value)
        gauge.labels(name).set(number)
    counter.inc(changes)


def install() -> None:
    """Give vLLM's engine the method that `Control` calls. This runs in the engine's process."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, METHOD, _settings_of_engine)


def _settings_of_engine(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    control: EngineControl = engine.scheduler.control
    return control.handle(request)


class Control:
    """ASGI middleware in vLLM's API server: it answers `ROUTE`, and passes on everything else.

    Without a key in the environment it answers nothing.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        key = os.environ.get(CONTROL_VARIABLE, "")
        self._digest = hashlib.sha256(key.encode()).digest() if key else b""
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope.get("path", "")).removeprefix(str(scope.get("root_path", "")))
        if scope["type"] != "http" or path != ROUTE or not self._digest:
            await self._app(scope, receive, send)
            return
        status, answer = await self._answer(scope, receive)
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        headers.append((b"content-length", str(len(body)).encode()))
        if status >= 400:
            headers.append((b"connection", b"close"))  # its body may not have been read
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[int, dict[str, Any]]:
        """Status and body. Nothing reaches the engine without the key."""
        if not self._knows_key(scope):
            return 401, {"error": "the control needs its key", "hint": "give LLMCTL_CONTROL_KEY"}
        if scope["method"] not in ("GET", "POST"):
            return 405, {"error": f"{scope['method']}: only GET and POST", "hint": ""}
        if self._waiting >= MAX_WAITING:
            return 429, {"error": "too many requests at once", "hint": "ask again later"}
        self._waiting += 1
        try:
            fields: object = {}
            if scope["method"] == "POST":
                try:
                    fields = json.loads(await asyncio.wait_for(_body(receive), BODY_S))
                except (ValueError, RecursionError, TimeoutError):
                    return 400, {"error": "the body is no short JSON", "hint": ""}
            async with self._lock:
                return await self._ask(scope, fields)
        finally:
            self._waiting -= 1

    async def _ask(self, scope: Scope, fields: object) -> tuple[int, dict[str, Any]]:
        core = scope["app"].state.engine_client.engine_core
        call = getattr(core, "call_utility_all_async", None) or core.call_utility_async
        try:
            answered = await call(METHOD, fields)
        except Exception as error:  # noqa: BLE001  (vLLM raises this class for any failure there)
            text = " ".join(str(error).split())[:200]
            if METHOD not in text or "attribute" not in text:
                return 503, {"error": f"the engine did not answer: {text}", "hint": ""}
            why = "this engine's scheduler is not llmctl's"
            return 501, {"error": why, "hint": HOW_TO_START}
        answer: dict[str, Any] = answered[0] if isinstance(answered, list) else answered
        return int(answer.pop("status", 200)), answer

    def _knows_key(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == HEADER:
                scheme, _, key = value.partition(b" ")
                digest = hashlib.sha256(key).digest()
                return scheme.lower() == b"bearer" and hmac.compare_digest(digest, self._digest)
        return False


async def _body(receive: Receive) -> bytes:
    """The body of a request. `ValueError` where it is long or cut off."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise ValueError("the client has gone")
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise ValueError("too long")
        if not message.get("more_body"):
            return bytes(body)
