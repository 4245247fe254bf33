"""A front that starts and drains replicas by a scaling rule, beside the simulation of its traffic.

    python -m benchmarks.serving.autoscale_live [--seconds N] [--runs N] [--shape NAME ...]

Takes about `seconds` for each shape and run. Needs nothing but the package.

The front of llmctl runs in this process, with its own `OwnReplicas`. A replica is a
process without a model: it runs `ROWS` requests at once, and a pass of all of them takes `TOKEN_S`,
so its law is known exactly, and two cores are enough for several replicas. It starts as fast as
Python does on this machine. Requests come by chance, at three rates over time: `step`, `ramp` and
`bursts`. The load client of `llmctl bench` sends them.

The simulation gets the same trace, rule and law, and the start-up times of the live run. The
decisions of each live run are made again from its log by a new autoscaler.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import httpx
import msgspec
import numpy as np

from benchmarks.common import samples
from benchmarks.common.command import make_parser
from benchmarks.common.fixed_server import ROWS, TOKEN_S
from benchmarks.common.standin import MODEL
from toolkit.bench.client import LoadSpec, replay, served
from toolkit.endpoints.target import find_target
from toolkit.errors import EngineError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.plan import Plan
from toolkit.files.recipe import ScaleSpec, ScalingSpec
from toolkit.files.tuning import NO_OUTCOME, Settings
from toolkit.laws.passes import PassLaw
from toolkit.metrics import summarize
from toolkit.routing.routers import make_router
from toolkit.scaling.autoscaler import Autoscaler
from toolkit.scaling.log import LIVES, FleetHeader, FleetLine, FleetLog, FleetStep, ReplicaChange
from toolkit.scaling.rules import scaling_of
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.server.options import ServerOptions
from toolkit.server.pool import pool_backend
from toolkit.server.server import Server
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.fleet import Fleet
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import Trace

PROMPT, OUTPUT = 32, 20
MOST = 3
ROUTER = "least-requests"
SLA = {"ttft_p99_s": 2.0, "e2e_p99_s": 4.5}
SHAPE_S = 150.0  # of a shape
# Requests/s at a time of a shape of `SHAPE_S` seconds; one replica serves 2.
SHAPES: dict[str, Callable[[float], float]] = {
    "step": lambda s: 4.5 if 40 <= s < 105 else 1.2,
    "ramp": lambda s: 1.0 + 4.0 * (1 - abs(s - 75) / 75),
    "bursts": lambda s: 5.0 if s % 50 >= 30 else 1.0,
}
SCALING = ScalingSpec(
    rule="keda",
    parameters={"waiting": 1.0, "running": 3.0},
    behaviour={"up_pods": 0, "up_percent": 0, "down_percent": 0, "down_window_s": 10.0},
)
SCALE = ScaleSpec(min=1, max=MOST, scrape_s=1.0, poll_s=2.0, gpus_free=MOST, scaling=SCALING)


class FixedProcess:
    """A process of `FixedServer`: `toolkit.server.own_replicas.HostedServer`."""

    @classmethod
    def start(cls, _plan: Plan, _options: ServerOptions, _number: int, _folder: Path) -> Self:
        return cls()

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.common.fixed_server", str(port)]
        self._process = subprocess.Popen(command)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def ended_by(self) -> str:
        return f"exit code {self._process.poll()}"

    def wait_until_ready(self) -> None:
        while self.running:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.05)
        raise EngineError(self.ended_by())

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def make_plan() -> Plan:
    """The plan that the front serves: one replica at first."""
    return Plan(
        tool_version="0",
        environment=samples.ENVIRONMENT,
        inputs={},
        recipe=samples.recipe(scale=SCALE.model_dump(), sla=SLA),
        fit=samples.fit(),
        workers=1,
        settings=Settings(policy="vllm", parameters={"max_num_seqs": ROWS}, scaling=SCALING),
        outcome=NO_OUTCOME,
        explained={},
    )


def trace_of(shape: str, seconds: float, seed: int) -> Trace:
    """Poisson arrivals at the rates of a shape."""
    rng = np.random.default_rng(seed)
    rate = SHAPES[shape]
    times = [0.0]
    while times[-1] < seconds:  # thinning
        times.append(times[-1] + rng.exponential(1 / 5.0))
    kept = [s for s in times if rng.random() < rate(s / seconds * SHAPE_S) / 5.0]
    count = len(kept)
    arrival = np.array(kept) - kept[0]
    outputs = np.full(count, OUTPUT)
    return Trace(arrival, np.full(count, PROMPT), outputs, outputs)


async def live(plan: Plan, trace: Trace, log: Path) -> tuple[dict[str, float], FleetLog]:
    """Serve a trace by the front. Returns the client's metrics, and what the replicas did."""
    options = ServerOptions(model=MODEL, router=ROUTER, event_log=log)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with Server.open(options, pool_backend(plan, options, FixedProcess.start)) as server:
        serving = asyncio.create_task(server.serve(ready.set_result))
        url = await ready
        zero_s = time.monotonic()
        target = await asyncio.to_thread(find_target, url)
        load = LoadSpec("given", OUTPUT, 256)
        began_s = time.monotonic() - zero_s
        found = await replay(target, trace, load, lambda: None)
        ended_s = time.monotonic() - zero_s
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    run = FleetLog(began_s)
    run.changes = [line for line in lines_of(log) if isinstance(line, ReplicaChange)]
    run.end_s = ended_s
    late_s = float(np.percentile(found.beats_late_s, 99)) if found.beats_late_s else math.nan
    return summarize(served(found.samples), SLA) | {"late_s": late_s}, run


def simulated(plan: Plan, trace: Trace, starts: tuple[float, ...]) -> SimResult:
    engine = PagedEngine(PassLaw({"pass": TOKEN_S}), 4000, 16)
    scaling = scaling_of(plan)
    assert scaling is not None
    world = World(
        unit_step(),
        ZetaMemory(engine.capacity_tokens),
        1,
        OUTPUT,
        paged=engine,
        router=make_router(ROUTER, {}),
        fleet=Fleet(scaling, ScaleSpec(start_s=list(starts) or [1.0]), MOST),
    )
    return simulate(trace, VllmPolicy(max_num_seqs=ROWS, max_num_batched_tokens=2048), world)


def lines_of(log: Path) -> list[FleetLine]:
    decoder = msgspec.json.Decoder(FleetLine)
    return [decoder.decode(line) for line in log.read_bytes().splitlines()]


def start_times(changes: list[ReplicaChange]) -> tuple[float, ...]:
    """The seconds from the start of each replica until it took requests."""
    began: dict[int, float] = {}
    found = []
    for change in changes:
        if change.state == "starting":
            began[change.place] = change.at_s
        elif change.state == "ready" and change.place in began:
            found.append(change.at_s - began.pop(change.place))
    return tuple(found)


def decided_again(log: Path) -> tuple[int, int]:
    """The decisions of a log that a new autoscaler makes again, and all."""
    header, *others = lines_of(log)
    assert isinstance(header, FleetHeader)
    scaler = Autoscaler(header.scaling(), header.begin, 0.0)
    steps = [line for line in others if isinstance(line, FleetStep)]
    same = 0
    for step in steps:
        scaler.step(step.at_s, step.ready, lambda sample=step.sample: sample)  # type: ignore[misc]
        same += scaler.wanted == step.wanted
    return same, len(steps)


def compare(shape: str, seconds: float, seed: int) -> None:
    """Print one live run beside its simulation."""
    plan = make_plan()
    trace = trace_of(shape, seconds, seed)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "fleet.jsonl"
        metrics, run = asyncio.run(live(plan, trace, log))
        same, steps = decided_again(log)
    starts = start_times(run.changes)
    result = simulated(plan, trace, starts)
    own = result.metrics(SLA)
    assert result.fleet is not None
    shown = []
    for name, values, fleet in (("live", metrics, run), ("simulated", own, result.fleet)):
        shown.append(
            f"{name}: {fleet.mean(('ready',)):.3f} replicas ready, {fleet.mean(LIVES):.3f} paid, "
            f"{fleet.starts} starts, {values['sla_attainment_percent']:.1f} % within, "
            f"TTFT P50 {values['ttft_p50_s']:.3f} P99 {values['ttft_p99_s']:.3f} s, "
            f"E2E P50 {values['e2e_p50_s']:.3f} s"
        )
    mean_s = sum(starts) / max(len(starts), 1)
    print(
        f"{shape}, seed {seed}: {len(trace)} requests, {len(starts)} starts of {mean_s:.2f} s "
        f"({min(starts, default=0):.2f} to {max(starts, default=0):.2f}); client late by "
        f"{metrics['late_s'] * 1e3:.0f} ms (P99); {same} of {steps} decisions made again"
    )
    print("  " + "\n  ".join(shown), flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=SHAPE_S, help="of each shape")
    parser.add_argument("--runs", type=int, default=1, help="of each shape, each with its own seed")
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: all")
    options = parser.parse_args()
    for seed in range(options.runs):
        for shape in options.shape or SHAPES:
            compare(shape, options.seconds, seed)


if __name__ == "__main__":
    main()
