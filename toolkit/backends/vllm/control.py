"""The control of a running vLLM: new settings over HTTP, without a restart, with a key of its own.

A client's request reaches `Control` in vLLM's API server (`MIDDLEWARE` is the value of vLLM's flag
--middleware). That makes a utility call of `EngineCore.llmctl_settings`, which `install` adds in
the engine's process. There `EngineControl` gives the settings to the scheduler between two passes.

vLLM's own code is unchanged: `--middleware` is its flag, and its engine runs utility calls by name,
in order with requests. `toolkit.backends.vllm.settings` has the bounds, leases and requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from functools import cache
from typing import Any

from toolkit.backends.vllm.knobs import LiveSettings
from toolkit.backends.vllm.settings import SettingsControl
from toolkit.backends.vllm.setup import CONTROL_VARIABLE
from toolkit.sched.policies.parameters import Value

METHOD = "llmctl_settings"
MIDDLEWARE = "toolkit.backends.vllm.control.Control"
HOW_TO_START = (
    "start it with: llmctl serve PLAN.json --live; or add --middleware "
    f"{MIDDLEWARE} and --scheduler-cls toolkit.backends.vllm.iterations.logged_scheduler to it"
)
log = logging.getLogger("vllm.llmctl")
ROUTE = "/llmctl/settings"
HEADER = b"authorization"
MAX_BODY_BYTES = 1 << 14
BODY_S = 5.0  # for a body to arrive
MAX_WAITING = 8  # requests with the key that are answered in turn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class EngineControl(SettingsControl):
    """The settings of a scheduler in vLLM's engine, each change in its log and its metrics."""

    def __init__(self, live: LiveSettings, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(live, _tell, clock)
        _show(live.values(), changes=0)


def _tell(changed: Mapping[str, Value], why: str) -> None:
    words = ", ".join(f"{name}={value}" for name, value in changed.items())
    log.warning("llmctl: %s (%s)", words, why)
    _show(changed, changes=1)


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
    """ASGI middleware in vLLM's API server, which passes on everything but `ROUTE`. GET shows the
    settings and their bounds; POST takes a `ControlRequest` (`toolkit.backends.vllm.settings`) and
    answers the same afterwards. Without a key in the environment it answers nothing.
    """

    def __init__(self, app: App) -> None:
        key = os.environ.get(CONTROL_VARIABLE, "")
        self._app = app
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
                answer = await _ask(scope, fields)
                return int(answer.pop("status", 200)), answer
        finally:
            self._waiting -= 1

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


async def _ask(scope: Scope, fields: object) -> dict[str, Any]:
    core = scope["app"].state.engine_client.engine_core
    call = getattr(core, "call_utility_all_async", None) or core.call_utility_async
    try:
        answered = await call(METHOD, fields)
    except Exception as error:  # noqa: BLE001  (vLLM raises this class for any failure there)
        text = " ".join(str(error).split())[:200]
        if METHOD not in text or "attribute" not in text:
            return {"status": 503, "error": f"the engine did not answer: {text}", "hint": ""}
        why = "this engine's scheduler is not llmctl's"
        return {"status": 501, "error": why, "hint": HOW_TO_START}
    answer: dict[str, Any] = answered[0] if isinstance(answered, list) else answered
    return answer
