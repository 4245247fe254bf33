"""From a plan of engine `vllm` to vLLM's own server, as a child of ours, with exactly the plan's
flags.

vLLM speaks to clients itself; we start it, say when it is ready, hand signals on and see to its
end. A policy of ours runs inside it (`toolkit.backends.vllm.scheduler`), from the same plan. Either
way its passes are counted and held against the plan's laws (`toolkit.backends.vllm.counts`), in
vLLM's own /metrics.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from toolkit.backends import ServerOrder
from toolkit.backends.vllm.command import (
    POLICY,
    VllmCommand,
    VllmServer,
    flags_of,
    vllm_server,
    vllm_version,
)
from toolkit.engines.loading import saved_model
from toolkit.files.io import processor, write_file
from toolkit.files.plan import Plan
from toolkit.files.profile import refuse_foreign
from toolkit.serve.server import Ending, check_exposure, end_signals, listen
from toolkit.workers.process import require_gpu

OURS = "toolkit.backends.vllm.scheduler.LlmctlScheduler"
COUNTED = "toolkit.backends.vllm.counts.counted_scheduler"
METRICS = "metrics"  # a folder: vLLM's processes share them through files
ENDED, REASON = "vllm:request_success", "finished_reason"
LOOK_EVERY_S = 0.2


class AskedToEnd(Exception):  # noqa: N818  (not an error)
    """A signal, while the server loads."""


def launch_vllm(order: ServerOrder, on_ready: Callable[[str], None]) -> dict[str, int]:
    """Serve until a signal ends it; `on_ready` gets the URL once it answers. How requests ended, by
    reason.

    `InputError` for an address that cannot be used, a version of vLLM that was not tried, or a plan
    that was fitted on another CPU or another of vLLM's versions; `EngineError` where vLLM is not
    there, cannot load, or ends by itself.
    """
    require_gpu([order.plan.recipe])
    check_exposure(order.host, asks_key=bool(order.api_key), insecure=order.insecure)
    refuse_foreign(order.plan.fit.engine, [_here(order.plan)], order.on_foreign)
    with listen(
        order.host, order.port
    ) as probe:  # said before anything slow is done; vLLM takes the port later
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="llmctl-plan-") as folder, _signals() as seen:
        command = command_of(order, Path(folder))
        with (
            contextlib.suppress(AskedToEnd),
            vllm_server(command, order.host, port, quiet=False) as server,
        ):
            seen.loading = False
            if not seen.count:
                on_ready(server.url)
                _serve(server, order.ending, seen)
        return _ended(Path(folder) / METRICS)


def command_of(order: ServerOrder, folder: Path) -> VllmCommand:
    """What is started. The plan, for what runs inside, and vLLM's metrics are in `folder`."""
    plan, policy = order.plan, order.plan.policy
    (folder / METRICS).mkdir()
    path = folder / "plan.json"
    write_file(plan, path)
    flags = flags_of(policy.name, policy.parameters)
    variables = {"LLMCTL_VLLM_PLAN": str(path), "PROMETHEUS_MULTIPROC_DIR": str(folder / METRICS)}
    if order.api_key:
        variables["VLLM_API_KEY"] = order.api_key
    if plan.fit.steps is not None:
        flags += ["--scheduler-cls", COUNTED]
    elif policy.name != POLICY:
        flags += ["--scheduler-cls", OURS]
    if policy.name == "mlfq":
        flags += ["--no-async-scheduling"]
    if policy.name != POLICY and order.event_log is not None:
        variables["LLMCTL_VLLM_EVENT_LOG"] = str(order.event_log.absolute())
    flags += ["--shutdown-timeout", str(round(order.ending.timeout_s))]
    model = saved_model(plan.recipe.model, plan.recipe.hardware)
    return VllmCommand(plan.recipe, model, order.served_model, flags, variables)


def _ended(metrics: Path) -> dict[str, int]:
    """How requests ended, by vLLM's finish reasons, from the files that it leaves behind."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(metrics))
    samples = [
        sample for family in registry.collect() if family.name == ENDED for sample in family.samples
    ]
    found: dict[str, int] = {}
    for sample in samples:
        reason = sample.labels.get(REASON, "")
        found[reason] = found.get(reason, 0) + int(sample.value)
    return found


def _here(plan: Plan) -> dict[str, str]:
    """What will serve, as far as can be known before it is loaded."""
    version, _, _ = vllm_version(plan.recipe).partition(
        "+"
    )  # a build's own mark; vLLM does not say it of itself
    found = {"engine": f"vllm {version}"}
    return found | (
        {"device": f"CPU {processor()}"} if plan.recipe.hardware.device == "cpu" else {}
    )


class _Seen:
    """Signals so far. While the server loads, the first ends it; later they are counted."""

    def __init__(self) -> None:
        self.count = 0
        self.loading = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.loading and self.count == 1:
            raise AskedToEnd


@contextlib.contextmanager
def _signals() -> Iterator[_Seen]:
    seen = _Seen()
    before = {number: signal.signal(number, seen) for number in end_signals()}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _serve(server: VllmServer, ending: Ending, seen: _Seen) -> None:
    """Until a signal; then vLLM finishes what runs, for as long as it was given, or until a second
    signal.
    """
    while not seen.count:
        if server.wait(LOOK_EVERY_S) is not None:
            raise server.died("while it served")
    _pause(ending.notice_s, seen)
    server.signal_end()
    deadline_s = time.monotonic() + ending.timeout_s
    while seen.count < 2 and time.monotonic() < deadline_s and server.wait(LOOK_EVERY_S) is None:
        pass


def _pause(seconds: float, seen: _Seen) -> None:
    deadline_s = time.monotonic() + seconds
    while seen.count < 2 and time.monotonic() < deadline_s:
        time.sleep(min(LOOK_EVERY_S, seconds))
