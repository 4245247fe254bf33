"""The control of a server with workers of its own: new parameters of its policy, between ticks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from toolkit.errors import InputError
from toolkit.sched.live import Settings, SettingsControl, knobs_of_policy
from toolkit.sched.policies.parameters import Value
from toolkit.sched.scheduler import Scheduler
from toolkit.serve.control import App, Scope, SettingsMiddleware
from toolkit.serve.driver import Driver

AFTER_S = 0.01  # the end of a lease
NEEDS_RESTART = {
    "policy": "a restart: jobs that wait are in the order of their policy",
    "workers": "a restart: each worker loads its engine at the start",
}


def refuse_fixed(scheduler: Scheduler) -> None:
    """`InputError` for a policy of which nothing can change while jobs wait."""
    policy = scheduler.policy
    if not scheduler.live_parameters():
        why = (
            "waiting jobs are ranked by them"
            if policy.continuous
            else "batches wait that were made by them"
        )
        raise InputError(
            f"--live: policy '{policy.name}' takes no new parameters while it runs: {why}",
            "leave --live out, and restart it with others",
        )


class PolicySettings(Settings):
    """The parameters of a driver's policy, as knobs. New values are one call of `configure`, which
    is one event of the log.
    """

    def __init__(self, driver: Driver) -> None:
        super().__init__(knobs_of_policy(driver.scheduler, driver.configure), NEEDS_RESTART)
        self._driver = driver

    def apply(self, settings: Mapping[str, Any]) -> dict[str, Value]:
        self.refuse(settings)
        before = self.values()
        changed = {name: value for name, value in settings.items() if before[name] != value}
        if changed:
            self._driver.configure(
                {name.removeprefix("policy."): value for name, value in changed.items()}
            )
        return changed


def with_control(app: App, driver: Driver, key: str, say: Callable[[str], None]) -> App:
    """The application behind the control of its policy's parameters; `say` gets each change."""

    def tell(changed: Mapping[str, Value], why: str) -> None:
        words = ", ".join(f"{name}={value}" for name, value in changed.items())
        say(f"{words} ({why})")

    control = SettingsControl(PolicySettings(driver), tell, time.monotonic)

    async def ask(_: Scope, fields: object) -> dict[str, Any]:
        answer = control.handle(fields)
        if lease := answer.get("lease"):
            asyncio.get_running_loop().call_later(lease["left_s"] + AFTER_S, control.expire)
        return answer

    return SettingsMiddleware(app, key, ask)
