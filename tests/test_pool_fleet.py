"""Own replicas of a front that come and go by a scaling rule, and the log that makes its decisions
again.
"""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import samples
import test_serve_vllm
from orders import changed
from said import says
from test_pool import Front, OwnStandIns, answer_of, asked, behind, fake_plan_of, own_replicas
from test_pool_serve import plan_for

from benchmarks.common.standin import MODEL, StandIn
from toolkit.errors import EngineError, InputError
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.recipe import ScaleSpec, ScalingSpec
from toolkit.scaling.autoscaler import Autoscaler
from toolkit.scaling.log import FleetHeader, FleetLine, FleetLog, FleetStep, ReplicaChange
from toolkit.scaling.places import to_end, to_start
from toolkit.scaling.rules import scaling_of
from toolkit.server.log import EventLog
from toolkit.server.own_replicas import OwnReplicas

pytestmark = pytest.mark.slow

AT_ONCE: dict[str, Any] = {"up_percent": 0, "up_pods": 0, "down_percent": 0, "down_window_s": 0.0}
ONE_EACH = ScalingSpec(
    rule="keda", parameters={"waiting": 0.0, "running": 1.0}, behaviour=AT_ONCE
)  # fmt: skip


def under(plan: Plan, scaling: ScalingSpec, **scale: Any) -> Plan:
    """The plan with one replica under a rule that is asked every 20 ms."""
    spec = ScaleSpec(**{"max": 2, "scrape_s": 0.02, "poll_s": 0.02, "scaling": scaling} | scale)
    return changed(plan, workers=1, settings__scaling=scaling, recipe__scale=spec)


def lines_of(path: Path) -> list[FleetLine]:
    decoder = msgspec.json.Decoder(FleetLine)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def decides_again(lines: list[FleetLine]) -> bool:
    """Whether a new autoscaler wants the same numbers at each step of a log."""
    header, *others = lines
    assert isinstance(header, FleetHeader)
    scaler = Autoscaler(header.scaling(), header.begin, 0.0)
    wanted = []
    steps = [line for line in others if isinstance(line, FleetStep)]
    for step in steps:
        scaler.step(step.at_s, step.ready, lambda sample=step.sample: sample)
        wanted.append(scaler.wanted)
    return wanted == [step.wanted for step in steps]


def test_places_are_filled_from_the_lowest_and_left_from_the_highest() -> None:
    states = ("ready", "gone", "draining", "starting", "ready")
    assert to_start(states, 5, 10.0) == [1, 5]
    assert to_start(states, 5, 5.0) == [1]
    assert to_start(states, 5, 4.0) == to_start(states, 3, 10.0) == []
    assert to_end(states, 1) == [3, 4]
    assert to_end(states, 0) == [3, 4, 0]
    assert to_end(states, 4) == []


async def following(own: OwnReplicas) -> asyncio.Task[None]:
    """Follow the autoscaler, as soon as the first replica is up."""
    while not own.servers or not own.servers[0].up:
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.1)  # `start` looks every 50 ms
    return asyncio.create_task(own.follow())


@behind(starts=())
async def test_a_further_replica_starts_serves_and_drains_without_losing_a_request(
    front: Front, servers: list[StandIn], tmp_path: Path
):
    plan = under(fake_plan_of(samples.paged_fit()), ONE_EACH)
    backend = OwnStandIns(2)
    first, second = backend.standins
    first.token_s = second.token_s = 0.01
    said: list[str] = []
    path = tmp_path / "fleet.jsonl"
    with EventLog(path) as log:
        async with own_replicas(plan, backend, front, said, log) as own:
            task = await following(own)
            short = [asyncio.create_task(front.stream(asked(80))) for _ in range(2)]
            while own.counts() != {"wanted": 2, "ready": 2, "starting": 0}:
                await asyncio.sleep(0.005)
            long = await front.stream(asked(300))
            assert second.served.total() == 1
            assert [(await one).text for one in short] == [answer_of(asked(80))] * 2
            assert long.text == answer_of(asked(300))
            while own.states != ["ready", "gone"]:
                await asyncio.sleep(0.005)
            assert (await front.stream(asked(5))).text == answer_of(asked(5))
            task.cancel()
    assert [each.stopped for each in backend.made] == [True, True]
    assert front.backend.continued == 0
    lines = lines_of(path)
    changes = [line for line in lines if isinstance(line, ReplicaChange)]
    assert [(each.place, each.state) for each in changes] == [
        (0, "ready"), (1, "starting"), (1, "ready"), (1, "draining"), (1, "gone"),
    ]  # fmt: skip
    assert decides_again(lines)
    run = FleetLog(0.0)
    run.changes = changes
    run.end_s = changes[-1].at_s
    assert 1.0 < run.mean(("starting", "ready", "draining")) <= 2.0
    last = [line.sample for line in lines if isinstance(line, FleetStep) and line.sample][-1]
    assert (last.arrived, last.prompt_tokens > 0) == (4, True)


@behind(starts=())
async def test_a_replica_that_cannot_start_is_tried_again(front: Front, servers: list[StandIn]):
    failures = [EngineError("no room")]

    def check(plan: Plan, number: int) -> None:
        assert plan.workers == 2  # which divide the devices
        if number and failures:
            raise failures.pop()

    plan = under(fake_plan_of(samples.paged_fit()), ScalingSpec(
        rule="static", parameters={"replicas": 2}, behaviour=AT_ONCE
    ))  # fmt: skip
    backend = OwnStandIns(2, check)
    said: list[str] = []
    async with own_replicas(plan, backend, front, said) as own:
        task = await following(own)
        while own.states != ["ready", "ready"]:
            await asyncio.sleep(0.005)
        task.cancel()
    assert not failures
    assert any(says(line, "replica 1 could not be started", "no room") for line in said), said


def test_serve_scales_its_own_servers_and_shows_them(tmp_path: Path):
    scaling = ScalingSpec(rule="static", parameters={"replicas": 2}, behaviour=AT_ONCE)
    path = plan_for(tmp_path)
    write_file(under(read_file(Plan, path), scaling), path)
    log = tmp_path / "fleet.jsonl"
    words = ["--served-model-name", MODEL, "--event-log", str(log)]
    with test_serve_vllm.served(path, *words) as server:
        while 'llmctl_replicas_ready{model_name="standin",router="round-robin"} 2.0' not in (
            told := httpx.get(f"{server.url}/metrics").text
        ):
            pass
        assert "llmctl_replicas_wanted" in told
        asked = {"model": MODEL, "prompt": [1, 2], "max_tokens": 3, "stream": False}
        for _ in range(4):
            answer = httpx.post(f"{server.url}/v1/completions", json=asked)
            assert answer.json()["usage"]["completion_tokens"] == 3
        data = httpx.get(f"{server.url}/status.json").json()
        assert data["fleet"] == {"wanted": 2, "ready": 2, "starting": 0}
        assert all(each["requests"] for each in data["replicas"])
        assert server.end() == 0, server.said
    assert says(server.said, "1 to 2 by the rule static")
    assert decides_again(lines_of(log))


@pytest.mark.parametrize(
    ("rule", "scale", "expected"),
    [
        ("static", {"min": 0}, "scale.min 0"),
        ("static", {"replica_requests": 8}, "scale.replica_requests 8"),
        ("clairvoyant", {}, "rule 'clairvoyant'"),
        ("sttic", {}, "there is no scaling rule 'sttic'"),
    ],
)
def test_what_only_a_simulation_can_do_is_refused(
    rule: str, scale: dict[str, Any], expected: str
) -> None:
    scaling = ScalingSpec(rule=rule, parameters={}, behaviour={})
    with pytest.raises(InputError, match=expected):
        scaling_of(under(fake_plan_of(samples.paged_fit()), scaling, **scale))


def test_a_plan_with_a_rule_needs_bounds() -> None:
    plan = changed(fake_plan_of(samples.paged_fit()), settings__scaling=ScalingSpec())
    with pytest.raises(InputError, match="scale"):
        scaling_of(plan)
