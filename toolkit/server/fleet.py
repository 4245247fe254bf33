"""Own replicas that come and go, as an autoscaler says: a fleet on the real clock.

The simulator's fleet (`toolkit.sim.fleet`) makes the same calls to the same `Autoscaler`, and the
same functions choose the places. Unlike there, a replica that drains for too long loses no request:
its requests go on elsewhere. Its place is free when nothing of its process is left.

With a log, each call of the autoscaler is a line with all that it was told, so the decisions can be
made again. Times are in seconds since all first replicas were up.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from toolkit.errors import InputError
from toolkit.files.plan import Plan
from toolkit.scaling.autoscaler import Autoscaler, ScalingRule
from toolkit.scaling.clairvoyant import ClairvoyantRule
from toolkit.scaling.log import FleetHeader, FleetLine, FleetStep, ReplicaChange, State
from toolkit.scaling.places import to_end, to_start
from toolkit.scaling.rules import scaling_rule
from toolkit.scaling.types import FleetSample, ReplicaLoad
from toolkit.server.log import EventLog
from toolkit.server.own_replicas import POLL_EVERY_S, OwnReplicas
from toolkit.server.replicas import LiveReplica, ReplicaPool
from toolkit.server.stats import Stats

_logger = logging.getLogger(__name__)


class LiveFleet:
    """Starts and drains own replicas until there are as many as an autoscaler wants.

    Args:
        scaling: the rule and its bounds.
        own: the servers; they have started.
        pool: asks the replicas for their figures.
        stats: the counters of the front.
        log: gets the decisions.

    Attributes:
        states: of the replicas, by place.
    """

    def __init__(
        self,
        scaling: ScalingRule,
        own: OwnReplicas,
        pool: ReplicaPool,
        stats: Stats,
        log: EventLog | None = None,
    ) -> None:
        self.states: list[State] = []
        self._own = own
        self._pool = pool
        self._stats = stats
        self._log = log
        self._begin_s = math.nan
        self._scaler = Autoscaler(scaling, own.size, 0.0)

    def counts(self) -> dict[str, int]:
        """Return how many replicas are wanted, ready and starting."""
        states = self.states
        return {
            "wanted": self._scaler.wanted,
            "ready": states.count("ready"),
            "starting": states.count("starting"),
        }

    async def run(self) -> None:
        """Follow the autoscaler until the servers are ended."""
        if math.isnan(self._begin_s):
            self._begin_s = time.monotonic()
            self._write(FleetHeader.of(self._scaler.scaling, self._own.size))
        while not self._own.ending.is_set():
            self._note_states()
            if self._now_s() >= self._scaler.next_s:
                await self._step()
            left_s = self._scaler.next_s - self._now_s()
            await asyncio.sleep(min(max(left_s, 0.0), POLL_EVERY_S / 2))

    def _now_s(self) -> float:
        return time.monotonic() - self._begin_s

    async def _step(self) -> None:
        """Let the autoscaler work with what the replicas say now, and do what it says."""
        places = [(place, one) for place, one in self._own.servers.items() if one.up]
        loads = await asyncio.gather(*[self._load(place, one) for place, one in places])
        self._note_states()
        now_s = self._now_s()
        scaler = self._scaler
        sample = self._sample(now_s, tuple(sorted(loads, key=lambda load: load.place)))
        ready = self.states.count("ready")
        decides = scaler.step(now_s, ready, lambda: sample)
        taken = sample if scaler.history.latest is sample else None
        self._write(FleetStep(now_s, ready, scaler.wanted, taken))
        if decides:
            self._reconcile()

    async def _load(self, place: int, replica: LiveReplica) -> ReplicaLoad:
        """Return a replica's figures; of one without metrics, what the front has sent there."""
        figures = await self._pool.figures(replica)
        waiting, running, kv_usage = figures or (0, len(replica.attempts), 0.0)
        return ReplicaLoad(place, waiting, running, kv_usage)

    def _sample(self, now_s: float, loads: tuple[ReplicaLoad, ...]) -> FleetSample:
        """Return what a scrape shows."""
        stats = self._stats
        at_replicas = sum(len(replica.attempts) for replica in self._pool.by_index.values())
        return FleetSample(
            now_s,
            loads,
            self.states.count("starting"),
            max(stats.arrived - stats.departed - at_replicas, 0),
            stats.arrived,
            stats.arrived_tokens,
            stats.departed,
            stats.ended_tokens,
        )

    def _reconcile(self) -> None:
        """Start and end replicas until there are as many as are wanted, or no device is free."""
        wanted = self._scaler.wanted
        for place in to_start(self.states, wanted, self._own.most):
            self._own.start_child(place)
        for place in to_end(self.states, wanted):
            self._own.drain(place)
        self._note_states()

    def _note_states(self) -> None:
        """Note what the replicas do now, and log what has changed."""
        before = self.states
        self.states = self._own.states()
        for place, state in enumerate(self.states):
            if state == (before[place] if place < len(before) else None):
                continue
            _logger.info("replica %d is %s", place, state)
            self._write(ReplicaChange(self._now_s(), place, state))
            child = self._own.children[place]
            if state == "gone" and not child.is_retired:
                error = child.first.exception()
                _logger.warning("replica %d could not be started: %s", place, error)

    def _write(self, line: FleetLine) -> None:
        if self._log is not None:
            self._log.add(line)
            self._log.flush()


def scaling_of(plan: Plan) -> ScalingRule | None:
    """Return the rule by which a plan's own replicas come and go; None: their number is fixed.
    Raises InputError for what only a simulation can do.
    """
    chosen = plan.settings.scaling
    spec = plan.recipe.scale
    if chosen is None:
        return None
    why = ""
    if spec is None:
        why = "the recipe has no bounds for its replicas (scale)"
    elif not spec.min:
        why = "scale.min 0: a front keeps at least one of its replicas"
    elif spec.replica_requests:
        why = f"scale.replica_requests {spec.replica_requests}: no replica has a bound in a front"
    elif chosen.rule == ClairvoyantRule.name:
        why = f"rule '{chosen.rule}' knows the requests that will come, as only a simulation does"
    if spec is None or why:
        raise InputError(why, "change the recipe or the rule, and render the plan again")
    return scaling_rule(chosen, spec)
