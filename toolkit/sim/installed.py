"""The installed vLLM's own scheduler in the simulator: it plans, and this simulator keeps the time.

vLLM's classes run in another process, which a `SchedulerLink` leads to
(`toolkit.backends.vllm.driver`). Each pass is a question to it, so that a simulation takes as long
as vLLM's scheduler does: 0.5 to 5 ms a pass. What requests have in common it gets as tokens, which
are numbers of no meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from toolkit.errors import EngineError
from toolkit.estimators.steps import StepShape, chunk_attended
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import BlockPool, Node, PagedRequest
from toolkit.sim.drafts import DrawnDrafts
from toolkit.sim.groups.caches import CacheSettings
from toolkit.sim.link import InstalledPlan, SchedulerLink
from toolkit.sim.passes import Chunk, PagedPass, PassScheduler

FIRST_TOKEN: Final = 1_000  # vLLM's side has tokens below for itself


class InstalledScheduler(PassScheduler):
    """The passes of one engine as the installed vLLM plans them.

    Args: as `DraftScheduler`, and `caches` as of `PagedEngine`; with prefix caching, requests with
    contents share blocks.
    """

    def __init__(
        self,
        link: SchedulerLink,
        flags: VllmPolicy,
        blocks: int,
        block_tokens: int,
        *,
        ahead: bool,
        drafts: DrawnDrafts | None,
        caches: CacheSettings | None = None,
    ) -> None:
        super().__init__(BlockPool(blocks, block_tokens, keeps=False))
        self._link = link
        self._ahead = ahead
        self._drafts = drafts
        self._number = link.open(
            flags, blocks, block_tokens, ahead=ahead, drafts=drafts, caches=caches
        )
        self._rows: dict[int, PagedRequest] = {}
        self._turns: dict[int, int] = {}  # passes with drafts of each request so far
        self._entered: set[int] = set()  # running rows with a complete input
        self._tokens: dict[Node, int] = {}  # the first token of each stretch of content
        self._next_token = FIRST_TOKEN
        self._plan: InstalledPlan | None = None
        self._fresh: set[int] = set()  # rows that the planned pass admits
        # of passes that are under way, by request: accepted drafts, and drafts proposed next
        self._under_way: deque[tuple[dict[int, int], dict[int, int]]] = deque()
        self._asked: dict[int, int] = {}  # times that drafts were asked for, of each request
        self._idle = False  # the last plan had no rows

    def add(self, row: PagedRequest) -> None:
        self._rows[row.number] = row
        self._link.add(self._number, row, self._tokens_of(row))
        self.waiting.append(row)

    def schedule(self) -> PagedPass:
        plan = self._link.plan(self._number)
        pool = self._pool
        rows = self._rows
        preempted: list[PagedRequest] = []
        for number in plan.preempted:
            row = rows[number]
            preempted.append(row)
            del self.running[row]
            self._entered.discard(number)
            row.preempted = True
            if row.left:
                self.waiting.appendleft(row)
        self._fresh = set()
        decodes = cached = drafted = getting = 0
        chunks: list[Chunk] = []
        attended = 0.0
        new_tokens = before = 0
        for number, computed, new, drafts, _ in plan.rows:
            row = rows[number]
            if row not in self.running:
                self._fresh.add(number)
                self.waiting.remove(row)
                self.running[row] = None
            if number in self._entered:
                decodes += 1
                cached += computed
                drafted += drafts
                if row.left:
                    getting += 1
                continue
            chunks.append(Chunk(row, computed, new))
            new_tokens += new
            before += computed
            attended += chunk_attended(computed, new)
        queries, hits, again, again_hits = plan.found
        pool.queries += queries
        pool.hits += hits
        pool.preempted_queries += again
        pool.preempted_hits += again_hits
        pool.free = plan.free
        self.decoding = getting
        self._plan = plan
        self._idle = not plan.rows
        shape = StepShape(
            decodes, cached, len(chunks), new_tokens, attended, before, draft_tokens=drafted
        )
        return PagedPass(shape, chunks, preempted)

    def commit(self, steps: int = 1) -> list[PagedRequest]:
        plan = self._plan
        assert plan is not None
        assert steps == 1
        self._plan = None
        self.accepted = self.drafted = 0
        accepted_of: dict[int, int] = {}
        offered: dict[int, int] = {}
        ended: list[PagedRequest] = []
        for number, _, _, drafts, samples in plan.rows:
            if not samples:
                continue
            row = self._rows[number]
            accepted = 0
            if drafts and number not in self._fresh and self._drafts is not None:
                turn = self._turns.get(number, 0)
                self._turns[number] = turn + 1
                accepted = min(self._drafts.accepted(number, turn), drafts)
                accepted_of[number] = accepted
                if row.left:
                    self.drafted += drafts
            if self._drafts is not None and not self._ahead:
                asked = self._asked.get(number, 0)
                self._asked[number] = asked + 1
                offered[number] = self._drafts.offered(number, asked)
            self._entered.add(number)
            if not row.left:
                continue  # it has ended, which vLLM does not know
            gets = min(1 + accepted, row.left)
            row.left -= gets
            row.prompt += gets  # to be computed if it loses its blocks
            self.accepted += gets - 1
            if not row.left:
                ended.append(row)
        self._under_way.append((accepted_of, offered))
        return ended

    def settle(self, ended: Sequence[PagedRequest]) -> None:
        under_way = self._under_way
        if under_way and (not self._ahead or len(under_way) == 2 or self._idle):
            accepted, offered = under_way.popleft()
            updated = self._link.update(self._number, accepted, offered)
            self._pool.free = updated.free
            expected = sorted([row.number for row in ended])
            if sorted(updated.ended) != expected:
                raise EngineError(
                    f"vLLM ended the requests {sorted(updated.ended)} with a pass, and by their "
                    f"lengths {expected} end",
                    "it has a limit that is not simulated, such as a shorter context",
                )
        for row in ended:
            self.running.pop(row, None)
            self._entered.discard(row.number)
            self._rows.pop(row.number, None)

    def close(self) -> None:
        self._link.close(self._number)

    def _tokens_of(self, row: PagedRequest) -> list[tuple[int, int]]:
        """The tokens of a request's prompt and output; equal ones have equal content."""
        total = row.prompt + row.left
        found: list[tuple[int, int]] = []
        node = row.content
        if node is None:
            found.append((self._new_tokens(total), total))
        while node is not None:
            if node not in self._tokens:
                self._tokens[node] = self._new_tokens(node.end - node.start)
            if node.end > node.start:
                found.append((self._tokens[node], node.end - node.start))
            node = node.parent
        found.reverse()
        return found

    def _new_tokens(self, count: int) -> int:
        first = self._next_token
        self._next_token += count
        return first
