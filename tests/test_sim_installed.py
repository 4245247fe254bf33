"""The installed vLLM's scheduler in the simulator: with the model behind the link, both are one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import samples
from commands import llmctl
from paged import LAW, trace_of, world
from said import says

from toolkit.catalogue.resolved import CacheGroup
from toolkit.files.io import write_file
from toolkit.files.recipe import AcceptanceSpec
from toolkit.metrics import differences
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.blocks import Node, PagedRequest
from toolkit.sim.drafts import DraftScheduler, DrawnDrafts
from toolkit.sim.groups.caches import CacheSettings
from toolkit.sim.groups.scheduler import GroupedScheduler
from toolkit.sim.paged import PagedScheduler
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.passes import PagedPass, PassScheduler
from toolkit.traces.types import Sessions, Trace

ROWS = [(0.004 * k, 5 + 11 * k % 60, 9 + 7 * k % 23, k % 3) for k in range(40)]


@dataclass
class Planned:
    rows: list[tuple[int, int, int, int, bool]]
    preempted: list[int]
    free: int
    found: tuple[int, int, int, int]


@dataclass
class Updated:
    ended: list[int]
    free: int


class ModelLink:
    """The model of vLLM's scheduler where the installed one would be. It learns of contents by
    tokens alone.
    """

    def __init__(self) -> None:
        self.schedulers: dict[int, PassScheduler | GroupedScheduler] = {}
        self.rows: dict[int, dict[int, PagedRequest]] = {}
        self.ended: dict[int, list[list[PagedRequest]]] = {}
        self.ahead = False
        self.open_ones = 0

    def open(
        self,
        flags: VllmPolicy,
        blocks: int,
        block_tokens: int,
        *,
        ahead: bool,
        drafts: DrawnDrafts | None,
        caches: CacheSettings | None,
    ) -> int:
        number = len(self.schedulers)
        self.ahead = ahead
        self.open_ones += 1
        self.rows[number] = {}
        self.ended[number] = []
        made: PassScheduler | GroupedScheduler
        if caches is not None:
            made = GroupedScheduler(caches, flags, blocks, ahead=ahead)
        elif drafts is None:
            made = PagedScheduler(flags, blocks, block_tokens, ahead=ahead, shares=True)
        else:
            made = DraftScheduler(flags, blocks, block_tokens, drafts, ahead=ahead, shares=True)
        self.schedulers[number] = made
        self.nodes: dict[int, Node] = {}
        return number

    def add(self, scheduler: int, row: PagedRequest, tokens: Sequence[tuple[int, int]]) -> None:
        node: Node | None = None
        at = 0
        for first, count in tokens:
            if first not in self.nodes:
                self.nodes[first] = Node(node, at, at + count)
            node = self.nodes[first]
            at += count
        assert at == row.prompt + row.left
        own = PagedRequest(
            row.number, row.prompt, row.left, stops=row.stops, limit=row.limit, content=node,
            watched=row.watched,
        )  # fmt: skip
        self.rows[scheduler][row.number] = own
        self.schedulers[scheduler].add(own)

    def plan(self, scheduler: int) -> Planned:
        made = self.schedulers[scheduler]
        pool = made.pool
        before = (pool.queries, pool.hits, pool.preempted_queries, pool.preempted_hits)
        plan = made.schedule()
        after = (pool.queries, pool.hits, pool.preempted_queries, pool.preempted_hits)
        rows = self._rows(scheduler, plan)
        numbers = [row.number for row in plan.preempted]
        if rows:
            self.ended[scheduler].append(made.commit())
        found = tuple(now - then for now, then in zip(after, before, strict=True))
        return Planned(rows, numbers, pool.free, found)  # type: ignore[arg-type]

    def update(
        self, scheduler: int, accepted: Mapping[int, int], offered: Mapping[int, int]
    ) -> Updated:
        made = self.schedulers[scheduler]
        ended = self.ended[scheduler].pop(0)
        made.settle(ended)
        return Updated([row.number for row in ended], made.pool.free)

    def close(self, scheduler: int) -> None:
        self.open_ones -= 1

    def _rows(self, scheduler: int, plan: PagedPass) -> list[tuple[int, int, int, int, bool]]:
        chunks = {chunk.row.number: chunk for chunk in plan.chunks}
        return [
            (
                row[0],
                row[1],
                row[2],
                row[3] if len(row) > 3 else 0,
                row[0] not in chunks or chunks[row[0]].completes,
            )
            for row in self.schedulers[scheduler].rows()  # type: ignore[attr-defined]
        ]


def shared(rows) -> Trace:
    """The rows of every third request as the turns of a session."""
    import numpy as np

    trace = trace_of(rows)
    previous = np.array([k - 3 if k >= 3 else -1 for k in range(len(trace))])
    return replace(trace, sessions=Sessions(previous, np.zeros(len(trace))))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("blocks", [24, 200])
@pytest.mark.parametrize("closed", [False, True])
def test_a_link_to_the_model_changes_nothing(ahead: bool, blocks: int, closed: bool) -> None:
    engine = PagedEngine(LAW, blocks, 4, ahead=ahead)
    flags = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=32)
    link = ModelLink()
    trace = shared(ROWS) if closed else trace_of(ROWS)
    model = simulate(trace, flags, world(engine))
    asked = simulate(trace, flags, world(replace(engine, link=link)))
    first_s = pytest.approx(model.served.first_token_s.tolist())  # leaps add up in another order
    assert asked.served.first_token_s.tolist() == first_s
    assert asked.served.finish_s.tolist() == pytest.approx(model.served.finish_s.tolist())
    assert asked.counters["rounds"] == model.counters["rounds"]
    assert asked.counters["evicted_percent"] == model.counters["evicted_percent"]
    assert differences(model.metrics({}), asked.metrics({})) == {}
    assert link.open_ones == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_groups_of_caches_reach_the_link(ahead: bool) -> None:
    groups = (
        CacheGroup("full", "", 4, 1, 4),
        CacheGroup("window", "", 4, 1, 4, window=16),
    )
    engine = PagedEngine(LAW, 90, 4, ahead=ahead, caches=CacheSettings(groups, 200))
    flags = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=32)
    model = simulate(trace_of(ROWS), flags, world(engine))
    asked = simulate(trace_of(ROWS), flags, world(replace(engine, link=ModelLink())))
    assert differences(model.metrics({}), asked.metrics({})) == {}


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_are_accepted_alike_behind_a_link(ahead: bool) -> None:
    rates = (0.8, 0.5)
    engine = PagedEngine(LAW, 40, 4, ahead=ahead, draft_method="eagle", draft_tokens=2)
    flags = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=32, num_speculative_tokens=2)
    acceptance = AcceptanceSpec(rates=list(rates))
    model = simulate(trace_of(ROWS), flags, world(engine, acceptance=acceptance))
    there = world(replace(engine, link=ModelLink()), acceptance=acceptance)
    asked = simulate(trace_of(ROWS), flags, there)
    assert differences(model.metrics({}), asked.metrics({})) == {}


@pytest.fixture
def fit(tmp_path: Path) -> Path:
    write_file(samples.paged_fit(), tmp_path / "fit.json")
    return tmp_path / "fit.json"


def words(fit: Path, *more: object) -> list[object]:
    limits = ["--fit", fit, "--max-new-tokens", 64, "--policy", "vllm"]
    return ["--trace", "chat-small", *limits, *more]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--scheduler", "instaled"], "installed"),
        (["--vllm-python", "/x/python"], "/x/python"),
    ],
)
def test_other_schedulers_are_refused(
    fit: Path, capsys: pytest.CaptureFixture[str], more: list[object], named: str
) -> None:
    assert llmctl("simulate", *words(fit, *more)) == 2
    assert says(capsys.readouterr().err, named)


def test_another_policy_has_no_installed_scheduler(
    fit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--trace", "chat-small", "--fit", fit, "--max-new-tokens", 64, "--policy", "fcfs"]
    assert llmctl("simulate", *given, "--scheduler", "installed") == 2
    assert says(capsys.readouterr().err, "fcfs")


@pytest.mark.slow
def test_a_python_without_vllm_is_named(
    fit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    given = words(fit, "--scheduler", "installed", "--vllm-python", python)
    assert llmctl("simulate", *given) == 3
    assert says(capsys.readouterr().err, str(python))


@pytest.mark.slow
def test_a_process_that_loads_another_version_is_refused(
    fit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    loaded = json.dumps({"version": "0.31.0", "path": "/elsewhere/vllm"})
    python.write_text(
        f"#!/bin/sh\nif [ \"$1\" = -c ]; then echo 0.32.0; else echo '{loaded}'; cat; fi\n"
    )
    python.chmod(0o755)
    given = words(fit, "--scheduler", "installed", "--vllm-python", python)
    assert llmctl("simulate", *given) == 3
    assert says(capsys.readouterr().err, "0.32.0", "0.31.0", "/elsewhere/vllm")
