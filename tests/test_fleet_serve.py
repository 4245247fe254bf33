"""A fleet that serves: each worker starts as its kind, and a replay of its log decides as the live
one did.
"""

import asyncio
from pathlib import Path

import pytest
import test_serve_replay
import tiny
from live import ThreadWorkers
from test_fleet_files import write_fleet, write_kind

from benchmarks.common.serving import LAW, Server
from toolkit.cli.basis import plan_from
from toolkit.engines.protocol import make_engine
from toolkit.estimators.laws import LinearSwap, WithOverhead
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.io import write_file
from toolkit.sched.eventlog import Complete, CompleteRound, Tick, from_lines, replay
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Joining, Worker
from toolkit.serve.assemble import make_scheduler

CAPACITIES = (220, 80)  # tokens of KV cache, as the scheduler has it
BUDGETS_MIB = (16.0, 4.0)  # of the engines
CASES = {
    "slice": ("transformers", "slice", test_serve_replay.SLICE),
    "sequence": ("transformers", "sequence", {"batch_size": 3}),
    "past-future": ("embed", "past-future", {"interval_steps": 2}),
    "slice-continuous": ("embed", "slice-continuous", {"slice_tokens": 5, "interval_steps": 2}),
    "mlfq": ("embed", "mlfq", test_serve_replay.MLFQ),
}


def planned(joining: Joining | None = None) -> list[Worker]:
    """A worker that holds much and is fast, and one that holds little and takes three times as
    long.
    """
    swap = LinearSwap(0.001, 1e5, 1e5)
    laws = (WithOverhead(LAW, 0.0, 1.0), WithOverhead(LAW, 0.0, 3.0))
    return [
        Worker(index, law, ZetaMemory(tokens), swap=swap, host_tokens=150, joining=joining)
        for index, (law, tokens) in enumerate(zip(laws, CAPACITIES, strict=True))
    ]


class UnequalWorkers(ThreadWorkers):
    """Engines of different memory; one that was killed comes back with its own."""

    def __init__(self, kind: str, **changes: object) -> None:
        specs = [tiny.engine_spec(kind, budget_mib=budget, **changes) for budget in BUDGETS_MIB]
        self.made = [
            lambda spec=spec: make_engine(tiny.model_spec(), spec, tiny.CPU) for spec in specs
        ]
        super().__init__(self.made[0])
        self.engines = [make() for make in self.made]

    def revive(self, worker: int, failure: str) -> None:
        self.make = self.made[worker]
        super().revive(worker, failure)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_live_run_of_unequal_workers_replays_exactly(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name, parameters = CASES[case]
    policy = make_policy(name, parameters)
    joining = None if kind == "transformers" else kind
    monkeypatch.setattr(test_serve_replay, "planned", planned)
    workers = UnequalWorkers("rebatch", joining=joining) if joining else UnequalWorkers("llama")
    lines: list[bytes] = []
    crowd = asyncio.run(test_serve_replay.serve(workers, policy, lines, joining))
    for said, shown in crowd:
        assert (said.live.status, said.tokens, "".join(said.texts)) == (
            shown.finish,
            shown.tokens,
            shown.text,
        )
    events = list(from_lines(lines))
    decided = [batch for event in events if isinstance(event, Tick) for batch in event.started]
    assert {batch.worker for batch in decided} == {0, 1}
    failures = [
        event.result.failure for event in events if isinstance(event, Complete | CompleteRound)
    ]
    assert (failures.count("crashed"), failures.count("oom")) == (1, 0)
    assert list(replay(events, Scheduler(policy, planned(joining)))) == []


@pytest.mark.slow
def test_a_fleet_is_served_by_processes_and_its_log_replays(tmp_path: Path) -> None:
    import openai  # here: it takes half a second, and only slow tests need it

    fast = {"name": "fake", "kv_cache_memory_mib": 64.0}
    write_kind(tmp_path, "large", 8192, 4.0, engine=fast, serve={"port": 0, "max_new_tokens": 64})
    write_kind(tmp_path, "small", 256, engine={"name": "fake", "kv_cache_memory_mib": 1.0})
    plan, _ = plan_from(write_fleet(tmp_path, ("large", 1), ("small", 1)), None, None)
    write_file(plan, tmp_path / "plan.json")
    log = tmp_path / "events.jsonl"
    with Server(
        tmp_path / "plan.json", "--event-log", str(log), "--served-model-name", "toy"
    ) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            some = [chr(97 + k) * (k + 1) for k in range(12)]
            before = client.completions.create(
                model="toy", prompt=some, max_tokens=40, temperature=0
            )
            server.workers()[0].kill()
            after = client.completions.create(
                model="toy", prompt=some, max_tokens=40, temperature=0
            )
            long = client.completions.create(
                model="toy", prompt="x" * 300, max_tokens=20, temperature=0
            )
        assert server.end() == 0
    assert [choice.text for choice in before.choices] == [choice.text for choice in after.choices]
    assert long.usage.completion_tokens > 0
    events = list(from_lines(log.read_bytes().splitlines(keepends=True)))
    assert list(replay(events, make_scheduler(plan))) == []
