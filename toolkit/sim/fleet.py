"""Replicas that start and end while requests come, as an autoscaler says.

A replica is starting, then ready with an empty cache, then draining, then gone. The autoscaler is
the one that serves (`toolkit.scaling`), and sees only what it scrapes. A place is where a replica
runs: the lowest place that is free is taken next, and a replica starts warm where one ran before.
Scaling down ends replicas that still start first, then those in the highest places.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from toolkit.scaling.autoscaler import Autoscaler, ScalingRule
from toolkit.scaling.clairvoyant import ClairvoyantRule
from toolkit.scaling.log import FleetLog, FleetPoint, State
from toolkit.scaling.places import to_end, to_start
from toolkit.scaling.types import FleetSample, ReplicaLoad
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Refusal, Request
from toolkit.sim.clock import ENDS
from toolkit.sim.ledger import Ledger
from toolkit.sim.paged_engine import PagedEngine, PagedRun
from toolkit.sim.replicas import ReplicaClock, never_served
from toolkit.traces.types import Trace

if TYPE_CHECKING:
    from toolkit.sim.world import World

SCALES = 3  # the rank of events of the fleet: after all else at their time
GIVEN_UP_S = 3600.0  # no replica starts for so long after the last arrival: none will
AUTOSCALER = -1  # in the place of a replica's index: the autoscaler's next step


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds from the start of a replica until it takes requests, drawn from samples.

    Attributes:
        cold: of a replica in a place where none ran before.
        warm: of one where one ran before; empty: as cold.
        seed: of the draws.
    """

    cold: tuple[float, ...]
    warm: tuple[float, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas under an autoscaler.

    Attributes:
        scaling: the rule and its bounds.
        begin: replicas that are ready when the first request comes.
        starts: how long a start takes.
        free: replicas that there are GPUs for; others wait to be started.
        drain_s: a replica that drains for longer is ended, and its requests are lost.
        replica_requests: requests that the router gives one replica at once; others wait before
            the router. 0: any number.
    """

    scaling: ScalingRule
    begin: int
    starts: StartTimes
    free: float
    drain_s: float = math.inf
    replica_requests: int = 0


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
        refused: Container[int],
        fleet: Fleet,
    ) -> None:
        super().__init__(requests, flags, engine, ledger, trace, world, refused)
        assert self._balancer is not None  # a fleet has a router
        self._front = self._balancer
        self._fleet = fleet
        self._ledger = ledger
        self._flags = flags
        begin_s = float(trace.arrival_s[0])
        self.log = FleetLog(begin_s)
        scaling = fleet.scaling
        if isinstance(scaling.rule, ClairvoyantRule):
            rule = scaling.rule.with_requests(
                trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), self._outputs
            )
            scaling = replace(scaling, rule=rule)
        self._scaler = Autoscaler(scaling, fleet.begin, begin_s)
        self._rng = np.random.default_rng(fleet.starts.seed)
        self._states: list[State] = ["ready"] * fleet.begin
        self._due_s = [begin_s] * fleet.begin  # when a start, or a drain, is over
        for place in range(fleet.begin):
            self.log.change(begin_s, place, "ready")
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
            number = order // 2
            self._end(number, self._outputs[number])

    def arrive(self, number: int, came_s: float) -> None:
        self._last_s = self.now_s
        if number in self._refused:
            self.arrivals.ended([number], came_s, self._engine.seen_after_s(0))
            return
        self._arrived += 1
        self._prompt_tokens += self._requests[number].prompt_tokens
        self._queued.append(number)
        self._dispatch(came_s)

    def run(self) -> None:
        super().run()
        self.log.end_s = max(self._last_s, max(self._ledger.completed_s, default=0.0))

    def _dispatch(self, came_s: float) -> None:
        """Give replicas the requests that wait before the router, as far as they may take them."""
        self._hear()
        queued = self._queued
        while queued:
            full = self._full()
            if len(full) == self._ready:
                return
            number = queued.popleft()
            place = self._choose(number, full)
            if isinstance(place, Refusal):
                self.refusals.append(place)
                self.arrivals.ended([number], came_s, self._engine.seen_after_s(0))
                self._ended += 1
            else:
                self._places[number] = place
                self._give(number, place, came_s)

    def _full(self) -> tuple[int, ...]:
        """Return the ready replicas that may take no more requests."""
        most = self._fleet.replica_requests
        if not most:
            return ()
        return tuple(
            [
                replica.index
                for replica in self._front.replicas
                if replica.is_up and replica.requests >= most
            ]
        )

    @property
    def _ready(self) -> int:
        return self._states.count("ready")

    def _end(self, number: int, output_tokens: int) -> None:
        """A client has seen the end of a request."""
        place = self._places.pop(number, None)
        if place is None:
            return  # it was lost with its replica
        self._ended += 1
        self._output_tokens += output_tokens
        self._last_s = self.now_s
        if self._states[place] == "draining" and not self._front.replicas[place].requests:
            self._enter(place, "gone")
            self._reconcile()
        if self._fleet.replica_requests:
            self._dispatch(self.now_s)

    def _scale(self) -> None:
        """Let the autoscaler work, and do what it says."""
        scaler = self._scaler
        if scaler.step(self.now_s, self._ready, self._sample):
            self._reconcile()
            states = self._states
            under_way = len(self._queued) + len(self._places)
            self.log.points.append(
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
        if self.arrivals.left or self._places or waits or "starting" in self._states:
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
        for place in to_end(states, wanted):
            if states[place] == "starting":
                self._enter(place, "gone")
            else:
                self._empty(place)

    def _start(self, place: int) -> None:
        """Start a replica in a free place."""
        starts = self._fleet.starts
        fresh = place == len(self._states)
        samples = starts.cold if fresh else starts.warm or starts.cold
        if fresh:
            self._states.append("gone")
            self._due_s.append(math.inf)
            self._front.add(self._traits)
            self._ledger.busy_s.append(0.0)
            self._ledger.completed_s.append(0.0)
            self._copies.append({})
            self._runs.append(self._engine_at(place))
        else:
            self._copies[place] = {}
            self._runs[place] = self._engine_at(place)
        self._enter(place, "starting", samples[int(self._rng.integers(len(samples)))])

    def _engine_at(self, place: int) -> PagedRun:
        """Return an engine with an empty cache."""
        return PagedRun(place, self._engine, self._flags, self._ledger, tells=True)

    def _empty(self, place: int) -> None:
        """Send a replica no more requests; it is gone when it has none."""
        self._front.change(place, is_up=False)
        if self._front.replicas[place].requests:
            self._enter(place, "draining", self._fleet.drain_s)
        else:
            self._enter(place, "gone")

    def _enter(self, place: int, state: State, lasts_s: float = math.inf) -> None:
        """A replica enters a state, and leaves it by itself after `lasts_s` seconds."""
        self._states[place] = state
        self._due_s[place] = self.now_s + lasts_s
        self.log.change(self.now_s, place, state)
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
                self.log.lost += 1
                self._ended += 1


def serve_fleet(
    requests: Sequence[Request],
    flags: VllmPolicy,
    engine: PagedEngine,
    ledger: Ledger,
    trace: Trace,
    world: World,
    fleet: Fleet,
) -> tuple[list[Refusal], FleetLog]:
    """Serve the requests of a trace on the replicas of a fleet. Returns the refusals, and what
    happened to the replicas.
    """
    refused = never_served(requests, ledger.output_tokens, flags, engine)
    clock = FleetClock(requests, flags, engine, ledger, trace, world, refused, fleet)
    clock.run()
    return [*refused.values(), *clock.refusals], clock.log
