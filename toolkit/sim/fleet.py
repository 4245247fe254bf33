"""Replicas that start and end while requests come, as an autoscaler says.

A replica is starting, then ready with an empty cache, then draining, then gone. The autoscaler is
the one that serves (`toolkit.scaling`), and sees only what it scrapes. A place is where a replica
runs: the lowest place that is free is taken next, and a replica starts warm where one ran before.
Scaling down ends replicas that still start first, then those in the highest places.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from toolkit.files.recipe import ScaleSpec
from toolkit.scaling.autoscaler import Autoscaler, ScalingRule
from toolkit.scaling.clairvoyant import ClairvoyantRule
from toolkit.scaling.log import FleetLog, FleetPoint, State
from toolkit.scaling.places import to_end, to_start
from toolkit.scaling.types import FleetSample, ReplicaLoad
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Request
from toolkit.sim.clock import ENDS
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.sim.replicas import ReplicaClock
from toolkit.traces.types import Trace

if TYPE_CHECKING:
    from toolkit.sim.world import World

SCALES = 3  # the rank of events of the fleet: after all else at their time
GIVEN_UP_S = 3600.0  # no replica starts for so long after the last arrival: none will
AUTOSCALER = -1  # in the place of a replica's index: the autoscaler's next step


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas under an autoscaler. At first as many are ready as the world has workers.

    Attributes:
        scaling: the rule and its bounds.
        spec: the recipe's: how long a start and a drain take, and requests of a replica at once.
        free: replicas that there are GPUs for; others wait to be started.
        seed: of the starts, which are drawn.
    """

    scaling: ScalingRule
    spec: ScaleSpec
    free: float = math.inf
    seed: int = 0


class FleetClock(ReplicaClock):
    """Engines behind a router, of which there are as many as an autoscaler wants."""

    def __init__(
        self,
        requests: Sequence[Request],
        flags: VllmPolicy,
        engine: PagedEngine,
        ledger: Ledger,
        trace: Trace,
        world: World,
    ) -> None:
        super().__init__(requests, flags, engine, ledger, trace, world)
        assert self._balancer is not None  # a fleet has a router
        assert world.fleet is not None
        self._front = self._balancer
        self._fleet = world.fleet
        self._ledger = ledger
        self._flags = flags
        begin_s = float(trace.arrival_s[0])
        self._log = FleetLog(begin_s)
        scaling = world.fleet.scaling
        if isinstance(scaling.rule, ClairvoyantRule):
            rule = scaling.rule.with_requests(
                trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), self._outputs
            )
            scaling = replace(scaling, rule=rule)
        begin = ledger.workers
        self._scaler = Autoscaler(scaling, begin, begin_s)
        self._rng = np.random.default_rng(world.fleet.seed)
        self._states: list[State] = ["ready"] * begin
        self._due_s = [begin_s] * begin  # when a start, or a drain, is over
        for place in range(begin):
            self._log.change(begin_s, place, "ready")
        self._queued: deque[int] = deque()
        self._places: dict[int, int] = {}  # of the requests that replicas have
        self._arrived = 0
        self._prompt_tokens = 0
        self._ended = 0
        self._output_tokens = 0
        self._last_s = begin_s
        self.add(self._scaler.next_s, SCALES, 0, AUTOSCALER)

    def happen(self, rank: int, order: int, index: int) -> None:
        if rank == SCALES:
            self._hear()
            if index == AUTOSCALER:
                self._scale()
            elif self._due_s[index] == self.now_s:
                self._come_due(index)
            return
        super().happen(rank, order, index)
        if rank == ENDS and order % 2:
            self._end(order // 2)

    def arrive(self, number: int, came_s: float) -> None:
        self._last_s = self.now_s
        if number not in self._refused:
            self._arrived += 1
            self._prompt_tokens += self._requests[number].prompt_tokens
        super().arrive(number, came_s)

    def run(self) -> None:
        super().run()
        self._log.end_s = max(self._last_s, max(self._ledger.completed_s, default=0.0))
        self.log = self._log

    def _route(self, number: int, came_s: float, full: tuple[int, ...] = ()) -> None:
        self._queued.append(number)
        self._dispatch(came_s)

    def _dispatch(self, came_s: float) -> None:
        """Give replicas the requests that wait before the router, as far as they may take them."""
        queued = self._queued
        while queued:
            full = self._full()
            if len(full) == self._states.count("ready"):
                return
            number = queued.popleft()
            super()._route(number, came_s, full)
            if number not in self._places:
                self._ended += 1  # it was refused

    def _full(self) -> tuple[int, ...]:
        """Return the ready replicas that may take no more requests."""
        most = self._fleet.spec.replica_requests
        if not most:
            return ()
        return tuple(
            [
                replica.index
                for replica in self._front.replicas
                if replica.is_up and replica.requests >= most
            ]
        )

    def _give(self, number: int, index: int, came_s: float) -> None:
        self._places[number] = index
        super()._give(number, index, came_s)

    def _end(self, number: int) -> None:
        """A client has seen the end of a request."""
        place = self._places.pop(number, None)
        if place is None:
            return  # it was lost with its replica
        self._ended += 1
        self._output_tokens += self._outputs[number]
        self._last_s = self.now_s
        if self._states[place] == "draining" and not self._front.replicas[place].requests:
            self._enter(place, "gone")
            self._reconcile()
        if self._fleet.spec.replica_requests:
            self._dispatch(self.now_s)

    def _scale(self) -> None:
        """Let the autoscaler work, and do what it says."""
        scaler = self._scaler
        states = self._states
        if scaler.step(self.now_s, states.count("ready"), self._sample):
            self._reconcile()
            under_way = len(self._queued) + len(self._places)
            self._log.points.append(
                FleetPoint(
                    self.now_s,
                    scaler.wanted,
                    states.count("ready"),
                    states.count("starting"),
                    states.count("draining"),
                    under_way,
                )
            )
        waits = self._queued and self.now_s < self._last_s + GIVEN_UP_S
        if self.arrivals.left or self._places or waits or "starting" in states:
            self.add(scaler.next_s, SCALES, 0, AUTOSCALER)

    def _sample(self) -> FleetSample:
        """Return what a scrape shows."""
        loads = []
        for place, state in enumerate(self._states):
            if state == "ready":
                run = self._runs[place]
                report = run.report(self.now_s)
                running = len(run.scheduler.running)
                loads.append(ReplicaLoad(place, report.waiting, running, report.kv_usage))
        return FleetSample(
            self.now_s,
            tuple(loads),
            self._states.count("starting"),
            len(self._queued),
            self._arrived,
            self._prompt_tokens,
            self._ended,
            self._output_tokens,
        )

    def _reconcile(self) -> None:
        """Start and end replicas until there are as many as are wanted, or no GPU is free."""
        states = self._states
        wanted = self._scaler.wanted
        for place in to_start(states, wanted, self._fleet.free):
            self._start(place)
        for place in to_end(states, wanted):  # it gets no more requests, and is gone without any
            self._front.change(place, is_up=False)
            if self._front.replicas[place].requests:
                self._enter(place, "draining", self._fleet.spec.drain_s or math.inf)
            else:
                self._enter(place, "gone")

    def _start(self, place: int) -> None:
        """Start a replica, with an empty cache, in a free place."""
        spec = self._fleet.spec
        samples = spec.start_s
        engine = PagedRun(place, self._engine, self._flags, self._ledger, tells=True)
        if place < len(self._states):
            samples = spec.warm_start_s or samples
            self._copies[place] = {}
            self._runs[place] = engine
        else:
            self._states.append("gone")
            self._due_s.append(math.inf)
            self._front.add(self._traits)
            self._ledger.busy_s.append(0.0)
            self._ledger.completed_s.append(0.0)
            self._copies.append({})
            self._runs.append(engine)
        self._enter(place, "starting", samples[int(self._rng.integers(len(samples)))])

    def _enter(self, place: int, state: State, lasts_s: float = math.inf) -> None:
        """A replica enters a state, and leaves it by itself after `lasts_s` seconds."""
        self._states[place] = state
        self._due_s[place] = self.now_s + lasts_s
        self._log.change(self.now_s, place, state)
        if lasts_s < math.inf:
            self.add(self._due_s[place], SCALES, 0, place)

    def _come_due(self, place: int) -> None:
        """A replica has started, or has drained for as long as it may."""
        if self._states[place] == "starting":
            self._front.change(place, is_up=True, is_fresh=True)
            self._enter(place, "ready")
            self._dispatch(self.now_s)
        else:
            self._lose(place)
            self._enter(place, "gone")
            self._reconcile()

    def _lose(self, place: int) -> None:
        """End the requests of a replica with it."""
        self._runs[place].next_s = math.inf
        for number, home in list(self._places.items()):
            if home == place:
                del self._places[number]
                self._front.ended(self._requests[number].request_id, -1)
                self.arrivals.ended([number], self.now_s, 0.0)
                self._log.lost += 1
                self._ended += 1
