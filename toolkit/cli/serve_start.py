"""`llmctl serve`: from an order to a server that people, systemd, `llmctl status` and `llmctl stop` know of."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from toolkit.cli.output import WIDTH, emit, note
from toolkit.cli.serve_target import remembering

if TYPE_CHECKING:
    from toolkit.files.plan import Plan
    from toolkit.serve.drift import Check
    from toolkit.serve.launch import Launch
    from toolkit.serve.vllm_launch import VllmLaunch


def start(order: Launch, *, certificate: Path | None, strict: bool, as_json: bool) -> None:
    """Serve until a signal ends it.

    With `strict` points of the fit that do not hold any more end it before it serves.
    """
    from toolkit.serve.drift import judge
    from toolkit.serve.launch import launch

    plan, front = order.plan, order.settings
    with remembering("ray" if order.ray else "local") as memory:

        def on_ready(url: str) -> None:
            memory.ready(url, front.model, plan, certificate)
            order.manager.tell("READY=1")
            _announce(as_json, url, front.model, plan, status_page=front.status_page)

        memory.ended(launch(order, on_ready, lambda found: judge(found, strict=strict, say=note)))


def start_vllm(order: VllmLaunch, *, as_json: bool) -> None:
    """The same of vLLM's own server."""
    from toolkit.sched.policies import make_any, refuse_unservable
    from toolkit.serve.vllm_launch import launch_vllm

    plan = order.plan
    refuse_unservable(make_any(plan.policy.name, plan.policy.parameters), "vllm")
    note(f"starting vLLM for {plan.recipe.name}")
    with remembering("local") as memory:

        def on_ready(url: str) -> None:
            memory.ready(url, order.served_model, plan)
            _announce(as_json, url, order.served_model, plan)

        memory.ended(launch_vllm(order, on_ready))


def points_to_check(plan: Plan, seconds: float | None) -> list[Check]:
    """What of the fits is measured again before the first request, in so many seconds; None: as many as is usual."""
    from toolkit.serve.drift import BUDGET_S, checks_of

    if seconds is None:
        fake = all(kind.recipe.engine.name == "fake" for kind in plan.kinds)
        seconds = 0.0 if fake else BUDGET_S  # a fake's times are what it was told
    return checks_of(plan, seconds) if seconds else []


def _announce(as_json: bool, url: str, model: str, plan: Plan, *, status_page: bool = False) -> None:
    from toolkit.files.limits import breaks, broken

    page, broken_limits = f"{url}/" if status_page else None, broken(plan.limits)
    facts: dict[str, Any] = {
        "url": url,
        "model": model,
        "workers": plan.workers,
        "policy": plan.policy.name,
        "parameters": plan.policy.parameters,
        "status_page": page,
        "broken_limits": broken_limits,
    }

    def show() -> None:
        parameters = ", ".join(f"{name}={value}" for name, value in plan.policy.parameters.items())
        print(f"ready: {url} serves {model} on {plan.workers} worker{'s' * (plan.workers > 1)}")
        print(fill(f"policy: {plan.policy.name} ({parameters})", WIDTH, subsequent_indent="  "))
        if broken_limits:
            print(fill(f"warning: predicted to {breaks(plan.limits)}", WIDTH, subsequent_indent="  "))
        if page:
            print(f"status page: {page}")

    emit(as_json, facts, show)
    sys.stdout.flush()
