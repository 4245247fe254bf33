"""The control of a running vLLM: new settings over HTTP, without a restart, with a key of its own.

A client's request reaches `Control` in vLLM's API server (`MIDDLEWARE` is the value of vLLM's flag
--middleware). That makes a utility call of `EngineCore.llmctl_settings`, which `install` adds in
the engine's process. There `EngineControl` gives the settings to the scheduler between two passes.

vLLM's own code is unchanged: `--middleware` is its flag, and its engine runs utility calls by name,
in order with requests. Bounds, leases and requests are those of `toolkit.sched.live`, and the HTTP
is that of `toolkit.serve.control`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from toolkit.backends.vllm.knobs import LiveSettings
from toolkit.backends.vllm.setup import CONTROL_VARIABLE
from toolkit.sched.live import SettingsControl
from toolkit.sched.policies.parameters import Value
from toolkit.serve.control import App, Scope, SettingsMiddleware

METHOD = "llmctl_settings"
MIDDLEWARE = "toolkit.backends.vllm.control.Control"
HOW_TO_START = (
    "start it with: llmctl serve PLAN.json --live; or add --middleware "
    f"{MIDDLEWARE} and --scheduler-cls toolkit.backends.vllm.iterations.logged_scheduler to it"
)
log = logging.getLogger("vllm.llmctl")


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


class Control(SettingsMiddleware):
    """The middleware in vLLM's API server. Without a key in the environment it answers nothing."""

    def __init__(self, app: App) -> None:
        super().__init__(app, os.environ.get(CONTROL_VARIABLE, ""), _ask)


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
