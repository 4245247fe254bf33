"""A server with passes that overlap, in virtual time: its passes follow a `PipelineLaw`, and so a
whole profile takes a second. Launches vary as on a real host, in spells.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import numpy as np

from toolkit.backends.vllm.profile import points, timed
from toolkit.estimators.pipeline import PipelineLaw
from toolkit.estimators.steps import shape_of_rows
from toolkit.files.profile import StepPoint, StepsProfile
from toolkit.profiling.grid import (
    APART,
    BESIDE_STEPS,
    HITS,
    LOAD_S,
    MIX_STEPS,
    STEPS,
    GridPoint,
    log_uniform_mean,
)
from toolkit.sched.iterations import LoggedPass, LoggedRow

FRONT_S = 0.004  # on the way in, and again on the way out
FRONT_ROW_S = 2e-4  # between two requests that are sent at once


@dataclass
class Row:
    """A request: `cached` tokens of its prompt are found in a prefix cache."""

    name: str
    prompt: int
    limit: int
    cached: int = 0
    computed: int = 0
    planned: int = 0
    generated: int = 0


@dataclass
class VirtualServer:
    """`cv`: the spread of a launch over the law, of which neighbours share `alike`."""

    law: PipelineLaw
    budget: int
    slots: int
    cv: float = 0.0
    alike: float = 0.95
    seed: int = 0
    now_s: float = 0.0
    passes: list[LoggedPass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._drift = 0.0
        self._count = 0

    def run(self, point: GridPoint) -> list[LoggedPass]:
        """The passes of one run of a point."""
        self.passes = []
        self._beside: list[Row] = []  # prompts that come together when the rows decode
        self._arriving: list[tuple[float, int, Row]] = []
        self._lone: list[Row] = []
        self.now_s += 1.0
        self._send(point)
        self._serve()
        return self.passes

    def _send(self, point: GridPoint) -> None:
        rows = point.batch_size
        length = point.length
        others = point.others
        if point.kind == "prefill":
            self._at_once([Row("", length, 1) for _ in range(rows)])
        elif point.kind == "decode":
            self._at_once([Row("", max(length - STEPS // 2, 1), STEPS) for _ in range(rows)])
        elif point.kind == "hit":
            self._lone = [Row("", length + others, 1, length) for _ in range(HITS)]
            self._at_once([Row("", length + others, 1)])
        elif point.kind == "load":
            self._load(rows, length, others)
        else:
            prompts = [Row("", length, 1) for _ in range(others)]
            if point.kind == "lone":
                self._lone = prompts
            if point.kind == "burst":
                self._beside = prompts
            self._at_once([Row("", MIX_STEPS, BESIDE_STEPS) for _ in range(rows)])
            if not rows:
                self._next_prompt(self.now_s)

    def _at_once(self, rows: list[Row]) -> None:
        for number, row in enumerate(rows):
            self._arrive(self.now_s + FRONT_S + number * FRONT_ROW_S, row)
        self._waited = {row.name for row in rows}

    def _arrive(self, at_s: float, row: Row) -> None:
        self._count += 1
        row.name = f"cmpl-{self._count}"
        heapq.heappush(self._arriving, (at_s, self._count, row))

    def _load(self, rows: int, length: int, percent: int) -> None:
        law = self.law
        step_s = law.period_s(shape_of_rows([LoggedRow("", 256, 1, 256)] * rows))
        prompts_s = law.token_s * log_uniform_mean(length // 2 + 1, 2 * length)
        request_s = prompts_s + log_uniform_mean(8, 512) * step_s / rows
        at_s = self.now_s
        while at_s < self.now_s + LOAD_S:
            prompt, output = (
                round(math.exp(self._rng.uniform(math.log(low), math.log(high))))
                for low, high in ((length // 2 + 1, 2 * length), (8, 512))
            )
            self._arrive(at_s, Row("", prompt, output))
            at_s += self._rng.exponential(request_s * 100.0 / percent)
        self._waited = set()

    def _next_prompt(self, token_s: float) -> None:
        """The client saw a token that it waited for: it sends the next prompts."""
        step_s = self.law.period_s(shape_of_rows([LoggedRow("", 64, 1, 64)]))
        after_s = token_s + 2 * FRONT_S + APART * step_s
        if self._lone:
            row = self._lone.pop(0)
            self._arrive(after_s, row)
            self._waited = {row.name}
        for row in self._beside:
            self._arrive(after_s, row)
        self._beside = []

    def _launch_s(self, shape) -> float:
        noise = self._rng.standard_normal() * math.sqrt(1.0 - self.alike**2)
        self._drift = self.alike * self._drift + noise
        return self.law.launch_s(shape) * max(1.0 + self.cv * self._drift, 0.5)

    def _serve(self) -> None:
        law = self.law
        rows = []
        under_way: list[tuple] = []
        gpu_s = launched_s = -math.inf
        while self._arriving or rows or under_way:
            if not rows and not under_way:
                self.now_s = max(self.now_s, self._arriving[0][0])
            while self._arriving and self._arriving[0][0] <= self.now_s:
                rows.append(heapq.heappop(self._arriving)[2])
            start_s = self.now_s
            plan = self._plan(rows)
            if plan:
                shape = shape_of_rows([one for _, one in plan])
                begins_s = max(start_s, launched_s) if law.graphs.apart else start_s
                launched_s = begins_s + self._launch_s(shape)
                gpu_begins_s = launched_s if law.waits_for_launch(shape) else begins_s
                gpu_s = max(max(gpu_s, gpu_begins_s) + law.gpu_s(shape), launched_s)
                under_way.append((plan, start_s, launched_s, gpu_s))
                if len(under_way) == 1:
                    self.now_s = start_s if law.graphs.apart else launched_s
                    continue
            old, old_start_s, old_launched_s, done_s = under_way.pop(0)
            held_s = launched_s if plan and not law.graphs.apart else -math.inf
            self.now_s = max(done_s, held_s, self.now_s)
            rows = self._settle(old, old_start_s, old_launched_s, rows)

    def _plan(self, rows: list[Row]) -> list[tuple[Row, LoggedRow]]:
        budget = self.budget
        plan = []
        for row in rows[: self.slots]:
            row.computed = row.computed or row.cached
            new = min(row.prompt + row.planned - row.computed, budget)
            if row.planned < row.limit and new > 0:
                plan.append((row, LoggedRow(row.name, row.computed, new, row.prompt)))
                row.computed += new
                row.planned += row.computed == row.prompt + row.planned
                budget -= new
        return plan

    def _settle(self, plan, start_s: float, launched_s: float, rows: list[Row]) -> list[Row]:
        ended = []
        for row, one in plan:
            if one.computed + one.new < row.prompt:
                continue
            row.generated += 1
            if row.generated == 1 and row.name in self._waited:
                self._waited.discard(row.name)
                if not self._waited:
                    self._next_prompt(self.now_s)
            if row.generated == row.limit:
                ended.append(row.name)
        self.passes.append(
            LoggedPass(
                step=len(self.passes),
                start_s=start_s,
                end_s=self.now_s,
                rows=[one for _, one in plan],
                preempted=[],
                ended=ended,
                waiting=0,
                free_blocks=1,
                launched_s=launched_s,
                ready_s=self.now_s,
            )
        )
        return [row for row in rows if row.name not in ended]


def profiled(server: VirtualServer, visits: list[GridPoint], limits: StepsProfile) -> StepsProfile:
    """The passes of these visits, as a profile has them."""
    found: list[StepPoint] = []
    for point in visits:
        found += points(timed(server.run(point)))
    return limits.model_copy(update={"points": found})
