"""vLLM 0.32's scheduler once more, block by block and as plainly as possible: what the simulator's
model, which keeps runs of blocks, is held to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolkit.backends.vllm.conformance.cases import CaseArrivals, outputs_of, tokens_of


@dataclass(eq=False)
class Block:
    rows: int = 0  # that hold it
    key: tuple[int, ...] = ()  # the tokens up to its end, once it is registered


@dataclass(eq=False)
class Row:
    number: int
    tokens: list[int]  # known ones
    to_come: list[int]
    limit: int  # tokens at the most
    computed: int = 0
    under_way: list[int] = field(default_factory=list)  # passes in which it computes a token
    blocks: list[Block] = field(default_factory=list)
    preempted: bool = False


class PlainScheduler:
    """One workload of `llmctl vllm-check`; `run` returns its passes."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.size = case["block_tokens"]
        self.queue = [Block() for _ in range(case["blocks"])]  # free, the first is given out first
        self.known: dict[tuple[int, ...], list[Block]] = {}
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.gets: list[dict[Row, int]] = []  # passes under way: rows and the tokens they get
        self.queues: list[list[tuple[int, ...]]] = []  # the registered free blocks in each pass
        self.passes: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        case = self.case
        arrivals = CaseArrivals(self.case)
        prompts = tokens_of(self.case)
        while True:
            for number in arrivals.due(len(self.passes)):
                limit = case["requests"][number][3] + len(prompts[number])
                to_come = outputs_of(case, number)
                self.waiting.append(Row(number, list(prompts[number]), to_come, limit))
            if self.schedule():
                if case["ahead"] and len(self.gets) < 2:
                    continue
            elif not self.gets:
                if not arrivals.skip(len(self.passes)):
                    return self.passes
                continue
            for number in self.update():
                arrivals.ended(number, len(self.passes))

    def schedule(self) -> bool:
        """Plan a pass; False where it computes nothing."""
        case = self.case
        planned = {}
        preempted = []
        budget = case["max_num_batched_tokens"]
        counts = [0, 0, 0, 0]
        k = 0
        while k < len(self.running):
            row = self.running[k]
            k += 1
            if len(row.tokens) + len(row.under_way) >= row.limit and row.under_way:
                continue  # its last token is under way
            new = min(len(row.tokens) + len(row.under_way) - row.computed, budget)
            while not self.allocate(row, new):
                victim = self.running.pop()
                self.release(victim)
                victim.computed = 0
                victim.under_way = []
                victim.preempted = True
                self.waiting.insert(0, victim)
                preempted.append(victim)
                if victim is row:
                    break
            if row in preempted:
                break
            planned[row] = (row.computed, new)
            budget -= new
        while (
            not preempted and self.waiting and budget and len(self.running) < case["max_num_seqs"]
        ):
            row = self.waiting[0]
            hits = self.look_up(row)
            found = len(hits) * self.size
            new = len(row.tokens) - found
            if new > budget and not case["chunked_prefill"]:
                break
            new = min(new, budget)
            reserve = int(case["watermark"] * (case["blocks"] + 1)) if self.running else 0
            whole = len(row.tokens) if case["reserve_full_isl"] else found + new
            free_hits = sum(not block.rows for block in hits)
            needed = -(-whole // self.size) - len(hits) + free_hits
            if needed + reserve > len(self.queue):
                break
            if case["prefix_caching"]:
                counts[2 * row.preempted] += len(row.tokens)
                counts[2 * row.preempted + 1] += found
            for block in hits:
                if not block.rows:
                    self.queue.remove(block)
                block.rows += 1
            row.blocks = hits
            row.computed = found
            assert self.allocate(row, new)
            self.running.append(self.waiting.pop(0))
            planned[row] = (found, new)
            budget -= new
        if planned or preempted:
            self.passes.append(
                {
                    "rows": [[row.number, *part] for row, part in planned.items()],
                    "preempted": [row.number for row in preempted],
                    "free": len(self.queue),
                    "waiting": len(self.waiting),
                    "found": counts,
                }
            )
            self.queues.append([block.key for block in self.queue if block.key])
        gets: dict[Row, int] = {}
        for row, (_, new) in planned.items():
            row.computed += new
            if row.computed == len(row.tokens) + len(row.under_way):
                gets[row] = len(row.under_way)
                row.under_way.append(len(self.passes))
            else:
                gets[row] = -1
        if planned:
            self.gets.append(gets)
        return bool(planned)

    def update(self) -> list[int]:
        """The first pass under way is done: its tokens are known. Returns the ended rows."""
        ended = []
        for row, place in self.gets.pop(0).items():
            if place < 0 or not row.to_come:
                continue
            row.tokens.append(row.to_come.pop(0))
            if row.under_way:
                row.under_way.pop(0)
            stale = row not in self.running
            if not stale:
                self.register(row, row.computed - len(row.under_way))
            if not row.to_come:
                ended.append(row.number)
                (self.waiting if stale else self.running).remove(row)
                self.release(row)
        return ended

    def look_up(self, row: Row) -> list[Block]:
        hits: list[Block] = []
        if self.case["prefix_caching"]:
            for k in range((len(row.tokens) - 1) // self.size):
                key = tuple(row.tokens[: (k + 1) * self.size])
                if key not in self.known:
                    break
                hits.append(self.known[key][0])
        return hits

    def allocate(self, row: Row, new: int) -> bool:
        count = -(-(row.computed + new) // self.size) - len(row.blocks)
        if count > len(self.queue):
            return False
        for _ in range(count):
            block = self.queue.pop(0)
            if block.key:
                self.known[block.key].remove(block)
                if not self.known[block.key]:
                    del self.known[block.key]
                block.key = ()
            block.rows = 1
            row.blocks.append(block)
        self.register(row, min(row.computed + new, len(row.tokens)))
        return True

    def register(self, row: Row, tokens: int) -> None:
        if not self.case["prefix_caching"]:
            return
        for k, block in enumerate(row.blocks[: tokens // self.size]):
            if not block.key:
                block.key = tuple(row.tokens[: (k + 1) * self.size])
                self.known.setdefault(block.key, []).append(block)

    def release(self, row: Row) -> None:
        first = []
        last = []
        for block in reversed(row.blocks):
            block.rows -= 1
            if not block.rows:
                (last if block.key else first).append(block)
        self.queue = [*first, *self.queue, *last]
        row.blocks = []
