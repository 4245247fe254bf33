"""The data-parallel engines of a mixture of experts, in lock step: which engine gets each request,
the passes of all, dummy passes, the ends of waves, and the figures that the balancer hears.

A pass here is one of an engine, dummy passes included. The simulator's are those of
`toolkit.sim.paged.PagedScheduler`, `Waves` and `RankBalancer`.
"""

from __future__ import annotations

import random
from typing import Any

from toolkit.backends.vllm.conformance.kinds import ModelKind, first_difference
from toolkit.backends.vllm.conformance.kinds.full import rows_of, scheduler_of, step_of
from toolkit.backends.vllm.conformance.workloads import Case, CaseArrivals, Pass, make_case
from toolkit.catalogue.releases import release_of
from toolkit.routing.rank_balancer import RankBalancer, RankFigures
from toolkit.sim.blocks import Node, PagedRequest, copy_of
from toolkit.sim.paged import PagedScheduler
from toolkit.sim.ranks import FIRST_SYNC, Waves, sync_rule


def make(seed: int, ahead: bool) -> Case:
    """A made-up workload of 2 or 4 engines, of which some come faster the more there are."""
    draw = random.Random(f"{seed} ranks")
    case = make_case(seed)
    ranks = draw.choice([2, 4])
    faster = draw.choice([1, ranks, 8 * ranks])
    more = {
        "ranks": ranks,
        "servers": draw.choice([1, 1, 2, ranks]),
        "sync": draw.choice([None, 1, 2, 5]),
        "publish": draw.choice([1, 3, 10, 40]),
        "requests": [[at // faster, *rest] for at, *rest in case["requests"]],
    }
    return case | more | {"ahead": ahead}


class _Engine:
    """One engine, without time."""

    def __init__(self, case: Case) -> None:
        scheduler = scheduler_of(case)
        assert isinstance(scheduler, PagedScheduler)
        self.scheduler = scheduler
        self._ahead: bool = case["ahead"]
        self._blocks: int = case["blocks"]
        self._under_way: list[PagedRequest] = []
        self._told = (0, 0)
        self.figures: RankFigures = (0, 0, 0.0)
        self.copies: dict[Node, Node] = {}

    @property
    def unfinished(self) -> bool:
        """Whether a request is, as far as it knows."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    def tell(self) -> None:
        """Tell its figures, if its requests have changed."""
        scheduler = self.scheduler
        counts = (len(scheduler.waiting), len(scheduler.running))
        if counts != self._told:
            self._told = counts
            used = (self._blocks - scheduler.pool.free) / self._blocks
            self.figures = (*counts, round(used, 9))

    def work(self) -> tuple[Pass, list[int]]:
        """A pass, and the requests that it learns have ended."""
        self.tell()
        step: Pass = {"dummy": True}
        ended: list[PagedRequest] = []
        if self.unfinished:
            planned = step_of(self.scheduler, counts=True)
            if planned["rows"]:
                step = {"dummy": False, **planned}
                ended = self.scheduler.commit()
            elif planned["preempted"]:
                step = {"dummy": True, **planned}
        known = ended
        if self._ahead:
            known = self._under_way
            self._under_way = ended
        self.scheduler.settle(known)
        self.tell()
        return step, [row.number for row in known]


def passes_of_ranks(case: Case) -> list[Pass]:
    """The passes of our model for a made-up workload."""
    ranks: int = case["ranks"]
    servers: int = case["servers"]
    release = release_of(case["version"]) or FIRST_SYNC
    sync_passes, first = sync_rule(release)
    if case["sync"] and release >= FIRST_SYNC:
        sync_passes = case["sync"]
    waves = Waves(sync_passes, syncs_first=first)
    balancers = [RankBalancer(ranks, servers, server) for server in range(servers)]
    engines = [_Engine(case) for _ in range(ranks)]
    arrivals = CaseArrivals(case)
    rows = rows_of(case)
    homes: dict[int, tuple[int, int]] = {}  # API server and engine
    found: list[Pass] = []

    def send(number: int) -> int:
        server = len(homes) % servers
        rank = balancers[server].choose()
        homes[number] = (server, rank)
        row = rows[number]
        assert row.content is not None
        row.content = copy_of(row.content, engines[rank].copies)
        engines[rank].scheduler.add(row)
        return rank

    rounds = 0
    while True:
        came = [[number, send(number)] for number in arrivals.due(rounds)]
        if not waves.running and not came:
            if not arrivals.skip(rounds):
                return found
            came = [[number, send(number)] for number in arrivals.due(rounds)]
        waves.begin()
        for rank, engine in enumerate(engines):
            step, ended = engine.work()
            found.append({"rank": rank, **step})
            for number in sorted(ended):
                arrivals.ended(number, rounds + 1)
                server, home = homes[number]
                balancers[server].ended(home)
        waves.passed(unfinished=any(engine.unfinished for engine in engines))
        found[-1] |= {"came": came, "ends": not waves.running}
        rounds += 1
        if rounds % case["publish"] == 0:
            figures = [engine.figures for engine in engines]
            found[-1]["figures"] = [list(one) for one in figures]
            for balancer in balancers:
                balancer.hear(figures)


def differs(case: Case, theirs: list[Pass]) -> int | None:
    """The first pass in which the simulator differs."""
    ours: list[Any] = passes_of_ranks(case)
    return first_difference(ours, theirs)


KIND = ModelKind("data parallel", ("data parallel",), make, differs, one_in=10, order=50)
