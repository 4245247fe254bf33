"""Passes of an engine that schedules by itself, reconstructed from the requests that got a token.

Before each of its steps the engine asks which requests may run (`Steps.plan`, which returns
`StartedPass`). Afterwards it reports the step (`Steps.stepped`). In between it decides alone: it
prefills in chunks next to decodes, skips requests that have no room, and preempts others. All of
that is in the `PassResult`, so the scheduler's state matches what the engine holds, and the log of
a `RecordingScheduler` replays. The engine may be one step ahead: a step that began before an order
counts to the pass that the order began, and only requests in both take part in it.

`CountedBlocks` counts a block of tokens that several requests share once. `AdmissionGate` is the
engine's queue of waiting requests: the engine sees only requests that the policy admits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from toolkit.sched.eventlog import StartedPass, in_ids
from toolkit.sched.policies.parameters import Value
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Request


class Steps:
    """Drives a scheduler that has the engine as its only worker.

    Args:
        scheduler: in its initial state, with one worker. Its policy is continuous, and nothing is
            swapped to host memory.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        (self._worker,) = scheduler.workers
        # The scheduler counts a prefill's token at once; this engine yields it with a step.
        self._emits = int(self._worker.latency.prefill_emits_token)
        self._entering: set[str] = set()  # admitted, and without a token since
        self._changed = False  # since the last tick: the policy may decide anew
        self._begin()

    def resize(self, capacity_tokens: int) -> None:
        """Set the tokens of requests for which the engine's cache has room."""
        if capacity_tokens != self._worker.capacity_tokens:
            self.scheduler.resize(self._worker.index, capacity_tokens)
            self._changed = True

    def configure(self, settings: Mapping[str, Value], slots: int = 0) -> None:
        """New parameters of the policy, and of the rows at once; see `Scheduler.configure`."""
        self.scheduler.configure(settings, slots)
        self._changed = True

    def submit(self, request: Request, now_s: float) -> bool:
        """Submit a request. False if it can never fit; the scheduler then knows nothing of it."""
        if self.scheduler.submit(request, now_s) is not None:
            return False
        self._changed = True
        return True

    def cancel(self, request_id: str, now_s: float) -> None:
        """A request was aborted; the engine has already dropped its cache."""
        self.scheduler.cancel(request_id, now_s)
        self._entering.discard(request_id)
        self._changed = self._aborted = True

    def drop(self, request_id: str) -> None:
        """The engine dropped a request's cache to make room; the request waits again."""
        worker = self._worker
        if any(job.request_id == request_id for job in (*worker.running.jobs, *worker.paused.jobs)):
            self._dropped.append(request_id)
        self._entering.discard(request_id)

    def plan(self, now_s: float) -> StartedPass | None:
        """The pass that begins before the next step, in request ids; None if nothing changes.

        Requests that are evicted or released lose their cache and wait; some of them may have ended
        meanwhile. Paused ones keep it and take no part in the steps. Entering requests are
        prefilled as soon as the engine can, first come, first served.
        """
        batch = self._worker.batch
        if batch is not None:
            if self._changed:
                self._changed = False
                self.scheduler.tick(now_s)
                self.scheduler.take_interrupts()  # `batch.interrupted` has the same information
            if not (self._dropped or self._aborted or self._should_stop(batch)):
                return None
            self._complete(batch, (), now_s)
        self._changed = False
        begun = self.scheduler.tick(now_s)
        if not begun:
            return None
        orders = in_ids(begun[0])
        self._entering.update(orders.entered)
        self._entering.difference_update(orders.evicted, orders.released)
        return orders

    def stepped(self, tokens: Collection[str], ended: Sequence[str], now_s: float) -> None:
        """The engine has taken a step: `tokens` got a token, and `ended` ended with it."""
        batch = self._worker.batch
        if batch is None or not tokens:
            return
        for job in self._worker.running.jobs:
            request_id = job.request_id
            if request_id in self._entering:
                if request_id in tokens:
                    self._entering.discard(request_id)
                    self._joined[request_id] = self._steps + self._emits
            elif request_id not in tokens:
                self._missed[request_id] = 1
        self._steps += 1
        if ended or self._missed or self._steps >= batch.steps or self._should_stop(batch):
            self._complete(batch, ended, now_s)

    def _should_stop(self, batch: Pass) -> bool:
        steps = self._worker.running.steps + self._steps
        return batch.interrupted and steps % batch.stop_every == 0

    def _begin(self) -> None:
        """Reset what is counted per pass."""
        self._steps = 0
        self._joined: dict[str, int] = {}
        self._missed: dict[str, int] = {}
        self._dropped: list[str] = []
        self._aborted = False  # a request was: perhaps none is left that could take a step

    def _complete(self, batch: Pass, ended: Sequence[str], now_s: float) -> None:
        result = PassResult(
            batch.pass_id,
            batch.worker,
            self._steps,
            tuple(ended),
            joined=tuple(self._joined.items()),
            missed=tuple(self._missed.items()),
            dropped=tuple(self._dropped),
        )
        self.scheduler.complete(result, now_s)
        self._begin()


class CountedBlocks:
    """Which blocks of tokens are counted, and with which request.

    The scheduler adds up the lengths of requests. With prefix caching the engine holds a block once
    for several requests; it is counted with the first of them. When that one ends while others hold
    the block, the block is `uncounted`: the capacity is smaller by it, and a new request with it
    brings only its other blocks, as in the engine. A request that comes when none holds the block
    is counted with it again. If the last holder ends while a request waits that was not counted
    with the block, the block is uncounted as soon as this request runs.
    """

    def __init__(self) -> None:
        self.uncounted = 0  # blocks that running requests hold and none of them is counted with
        self._counted: dict[Hashable, str] = {}
        self._blocks: dict[str, Sequence[Hashable]] = {}
        self._running: set[str] = set()
        self._holders: dict[Hashable, int] = {}  # running requests with the block

    def enter(self, request_id: str, blocks: Sequence[Hashable]) -> int:
        """A request comes, with the keys of its full blocks; a key stands for all tokens up to the
        block's end. Returns how many of them are counted without it.
        """
        counted = self._counted
        holders = self._holders
        self._blocks[request_id] = blocks
        shared = 0
        for block in blocks:
            if block in counted or block in holders:
                shared += 1
            else:
                counted[block] = request_id
        return shared

    def run(self, request_id: str) -> None:
        """A request is admitted and holds its blocks."""
        if request_id in self._running or request_id not in self._blocks:
            return
        self._running.add(request_id)
        holders = self._holders
        counted = self._counted
        for block in self._blocks[request_id]:
            before = holders.get(block, 0)
            holders[block] = before + 1
            owner = counted.get(block)
            if owner == request_id:
                self.uncounted -= before > 0
            elif not before:
                self.uncounted += owner not in self._running

    def stop(self, request_id: str) -> None:
        """A request holds its blocks no longer: it waits again or has ended."""
        if request_id not in self._running:
            return
        self._running.remove(request_id)
        holders = self._holders
        counted = self._counted
        for block in self._blocks[request_id]:
            holders[block] -= 1
            owner = counted.get(block)
            if owner == request_id:
                self.uncounted += holders[block] > 0
            elif not holders[block]:
                self.uncounted -= owner not in self._running
            if not holders[block]:
                del holders[block]

    def leave(self, request_id: str) -> None:
        """A request has ended, or was not accepted."""
        self.stop(request_id)
        for block in self._blocks.pop(request_id, ()):
            if self._counted.get(block) == request_id:
                del self._counted[block]


class Queued(Protocol):
    """The part of a request that a queue needs."""

    @property
    def request_id(self) -> str: ...


class AdmissionGate:
    """A queue of waiting requests in the place of vLLM's `RequestQueue` (`vllm.v1.core.sched`).

    It is true while an admitted request waits, and `pop_request` returns admitted requests only, in
    the policy's order. Length, iteration and removal cover all waiting requests.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Queued] = OrderedDict()
        self._open: set[str] = set()  # admitted, waiting or running
        self._ready: OrderedDict[str, None] = OrderedDict()  # admitted and waiting, in order

    def open(self, request_ids: Iterable[str]) -> None:
        """Admit these requests, behind the admitted ones."""
        for request_id in request_ids:
            self._open.add(request_id)
            if request_id in self._waiting:
                self._ready[request_id] = None

    def close(self, request_id: str) -> None:
        """Withdraw a request's admission."""
        self._open.discard(request_id)
        self._ready.pop(request_id, None)

    def add_request(self, request: Queued) -> None:
        """Append a request to the queue."""
        self._waiting[request.request_id] = request
        if request.request_id in self._open:
            self._ready[request.request_id] = None

    def prepend_request(self, request: Queued) -> None:
        """Put a request at the front: its admission failed, or it was preempted."""
        self.add_request(request)
        self._waiting.move_to_end(request.request_id, last=False)
        if request.request_id in self._ready:
            self._ready.move_to_end(request.request_id, last=False)

    def prepend_requests(self, requests: Iterable[Queued]) -> None:
        """Put requests at the front, one after the other."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Queued:
        """The next admitted request. Raises `IndexError` if there is none."""
        for request_id in self._ready:
            return self._waiting[request_id]
        raise IndexError("no waiting request is admitted")

    def pop_request(self) -> Queued:
        """Remove and return the next admitted request."""
        request = self.peek_request()
        self.remove_request(request)
        return request

    def remove_request(self, request: Queued) -> None:
        """Remove a request from the queue."""
        del self._waiting[request.request_id]
        self._ready.pop(request.request_id, None)

    def remove_requests(self, requests: Iterable[Queued]) -> None:
        """Remove the requests that wait."""
        for request in list(requests):
            if request.request_id in self._waiting:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return bool(self._ready)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Queued]:
        return iter(list(self._waiting.values()))
