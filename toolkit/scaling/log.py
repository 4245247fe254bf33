"""What happened to a fleet: when each replica started, took requests, drained and was gone; and the
lines of a live fleet's log, from which its decisions can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Literal

import msgspec

from toolkit.scaling.autoscaler import ScalingRule
from toolkit.scaling.rules import make_behaviour, make_rule
from toolkit.scaling.types import FleetSample
from toolkit.sched.policies.parameters import Value, parameters

State = Literal["starting", "ready", "draining", "gone"]
SWINGS = 8  # turns in a row after about the same time: the number does not settle
LONGEST_SWING_S = 4 * 3600.0  # a slower one follows the day
LIVES: tuple[State, ...] = (
    "starting",
    "ready",
    "draining",
)  # states in which a replica has its GPUs


class ReplicaChange(msgspec.Struct, frozen=True, tag="replica"):
    """A replica enters a state. `place` is where it runs: a gone replica's place is used again."""

    at_s: float
    place: int
    state: State


class FleetHeader(msgspec.Struct, frozen=True, tag="fleet"):
    """The first line of a live fleet's log: the autoscaler, and the replicas at the beginning."""

    rule: str
    parameters: dict[str, Value]
    behaviour: dict[str, Value]
    least: int
    most: int
    scrape_s: float
    poll_s: float
    begin: int

    @classmethod
    def of(cls, scaling: ScalingRule, begin: int) -> FleetHeader:
        """Return the line for an autoscaler that begins with this many replicas."""
        return cls(
            scaling.rule.name,
            parameters(scaling.rule),
            parameters(scaling.behaviour),
            scaling.least,
            scaling.most,
            scaling.scrape_s,
            scaling.poll_s,
            begin,
        )

    def scaling(self) -> ScalingRule:
        """Return the rule."""
        return ScalingRule(
            make_rule(self.rule, self.parameters),
            make_behaviour(self.behaviour),
            self.least,
            self.most,
            self.scrape_s,
            self.poll_s,
        )


class FleetStep(msgspec.Struct, frozen=True, tag="step"):
    """A call of a live fleet's autoscaler: what it was told, and what it wants then."""

    at_s: float
    ready: int
    wanted: int
    sample: FleetSample | None  # None: none was due


FleetLine = FleetHeader | FleetStep | ReplicaChange


class FleetPoint(msgspec.Struct, frozen=True):
    """The fleet at one decision."""

    at_s: float
    wanted: int
    ready: int
    starting: int
    draining: int
    under_way: int  # requests that have come and not ended


class FleetLog:
    """The changes and decisions of one run, in order of time.

    Attributes:
        begin_s, end_s: the time that the run is judged over.
        lost: requests that ended with their replica.
    """

    def __init__(self, begin_s: float) -> None:
        self.begin_s = begin_s
        self.end_s = begin_s
        self.changes: list[ReplicaChange] = []
        self.points: list[FleetPoint] = []
        self.lost = 0

    def change(self, at_s: float, place: int, state: State) -> None:
        """A replica enters a state."""
        self.changes.append(ReplicaChange(at_s, place, state))

    @property
    def starts(self) -> int:
        """Replicas that were started after the beginning."""
        return sum(change.state == "starting" for change in self.changes)

    def steps(self, states: tuple[State, ...]) -> list[tuple[float, int]]:
        """Return how many replicas were in one of these states, as (from when, number) in order of
        time; the first from `begin_s` on.
        """
        present: set[int] = set()
        steps = [(self.begin_s, 0)]
        for change in self.changes:
            if change.state in states:
                present.add(change.place)
            else:
                present.discard(change.place)
            if steps[-1][0] == max(change.at_s, self.begin_s):
                steps.pop()
            if not steps or steps[-1][1] != len(present):
                steps.append((max(change.at_s, self.begin_s), len(present)))
        return steps

    def replica_s(self, states: tuple[State, ...] = LIVES) -> float:
        """Return the seconds that replicas were in these states, summed; by default all seconds
        that are paid, from the start to the end of each.
        """
        return sum(count * seconds for count, seconds in self._stretches(states))

    def mean(self, states: tuple[State, ...]) -> float:
        """Return the mean number of replicas in these states."""
        return self.replica_s(states) / max(self.end_s - self.begin_s, 1e-9)

    def most(self, states: tuple[State, ...]) -> int:
        """Return the largest number of replicas that were in these states at once."""
        return max((count for count, _ in self._stretches(states)), default=0)

    def _stretches(self, states: tuple[State, ...]) -> Iterator[tuple[int, float]]:
        """The numbers, and for how many seconds each held."""
        steps = self.steps(states)
        ends = [at_s for at_s, _ in steps[1:]] + [self.end_s]
        for (from_s, count), to_s in zip(steps, ends, strict=True):
            if min(to_s, self.end_s) > from_s:
                yield count, min(to_s, self.end_s) - from_s

    def metrics(self) -> dict[str, float]:
        """Return the figures of the run, the unit in each name; means are over time."""
        return {
            "replica_hours": self.replica_s() / 3600.0,
            "replicas_mean": self.mean(("ready",)),
            "replicas_max": float(self.most(("ready",))),
            "replica_starts": float(self.starts),
            "lost_requests": float(self.lost),
            "run_hours": (self.end_s - self.begin_s) / 3600.0,
        }

    def period_s(self) -> float | None:
        """Return how long a swing of the wanted number lasts, up and down; None: it settles.

        A rule swings where the number turns at least `SWINGS` times in a row, always after about
        the same time. Daily traffic turns twice a day, so a period is at most `LONGEST_SWING_S`.
        """
        turns: list[float] = []
        direction = 0
        for before, after in pairwise(self.points):
            step = (after.wanted > before.wanted) - (after.wanted < before.wanted)
            if step and step != direction:
                turns.append(after.at_s)
                direction = step
        gaps = [later - earlier for earlier, later in pairwise(turns)]
        for first in range(len(gaps) - SWINGS + 1):
            part = gaps[first : first + SWINGS]
            usual = median(part)
            if 2.0 * usual <= LONGEST_SWING_S and all(
                0.4 * usual <= gap <= 1.6 * usual for gap in part
            ):
                return 2.0 * usual
        return None
