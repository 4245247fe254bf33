"""The passes of a paged engine that are under way: when each is planned, and when its tokens exist.

An engine with a queue of depth one (`Flight`) plans a pass when the tokens of the one before exist.
With a queue of depth two (`OverlappingFlight`: vLLM's `async_scheduling`) it plans pass n + 1 while
pass n runs. `toolkit.laws.passes` has the law of that: S when a pass is planned, c its
launch on the CPU, L when that has ended, g its work on the GPU, G its end there, E when its tokens
exist.

A flight is a leap: passes of the same rows. All but the first of several passes only decode, and
each reads more of the cache than the one before, so that their times have a closed form where the
GPU limits all of them. Where launches do, and the queue has depth two, the flight goes from pass to
pass.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise
from typing import Final

from toolkit.laws.features import StepShape
from toolkit.laws.passes import PassLaw, overlapped

Gaps = tuple[int, float, float]  # how many, and the first and the last one in seconds; they grow
EMPTY_S: Final = 3e-4  # to plan and launch a pass without rows, where launches take time; assumed
# The most passes that a flight computes one by one: a request that comes may undo them.
WALKED_MAX: Final = 32


class Flight:
    """Passes of the same rows, one after the other. With a queue of depth one, the engine plans
    each when the tokens of the one before exist and the host has handed them out.

    Attributes:
        shape: of the first pass.
        steps: how many passes.
        begin_s: when the first begins.
        first_s: when its tokens exist, where others follow it.
        due_s: when the engine does what follows: here when the last tokens exist.
        end_s: when the last tokens exist if no launch delays them.
    """

    def __init__(self, law: PassLaw) -> None:
        self._law = law
        self.shape = StepShape(0, 0)
        self.steps = 0
        self.begin_s = 0.0
        self.first_s = 0.0
        self.due_s = 0.0
        self.end_s = -math.inf
        # pass k begins at base + the seconds of k - 1 passes; the first takes `period`, and each
        # following one `growth` more
        self._base_s = 0.0
        self._period_s = 0.0
        self._growth_s = 0.0

    def follow(self, shape: StepShape | None, now_s: float) -> float:
        """Plan a pass of `shape` at `now_s`; None: one without rows. Return when the tokens of the
        passes that are under way exist.
        """
        return self.end_s

    def start(self, shape: StepShape, now_s: float, steps: int) -> None:
        """Begin at most `steps` passes, the first of `shape` at `now_s`."""
        law = self._law
        self.shape = shape
        self.begin_s = now_s
        self._base_s = now_s
        if steps > 1:
            forward_s = law.forward_s(shape)
            self.first_s = now_s + forward_s
            self._period_s = forward_s + law.after_s(shape.rows)
            self._growth_s = law.growth_s(shape)
            launch_s = law.launch_s(shape)
            if launch_s > 0.0 and not law.waits_for_launch(shape):
                gpu_s = law.gpu_s(shape)
                if gpu_s < launch_s:  # which hides the GPU's work
                    steps = _steps_below(launch_s - gpu_s, self._growth_s, steps)
                    self._growth_s = 0.0
        self.keep(steps)

    def cut(self, now_s: float) -> None:
        """A request comes: only passes that are planned already remain."""
        self.keep(self._planned(now_s, self.steps))

    def keep(self, steps: int) -> None:
        """Only the first `steps` passes remain."""
        self.steps = steps
        grown = self.shape if steps == 1 else grown_shape(self.shape, steps)
        self.due_s = self.end_s = self._begins_s(steps) + self._law.forward_s(grown)

    def gaps(self, end_s: float) -> list[Gaps]:
        """Return the gaps between the tokens of several passes, the last at `end_s`."""
        last_s = self._law.after_s(self.shape.rows) + end_s - self._begins_s(self.steps)
        return [_growing(self.steps - 1, self._growth_s, last_s)]

    def _begins_s(self, step: int) -> float:
        """When a pass begins, in the sequence; the first is 1."""
        if step == 1:
            return self._base_s
        return self._base_s + stretch_s(self._period_s, self._growth_s, step - 1)

    def _planned(self, now_s: float, limit: int) -> int:
        """Return how many of at most `limit` passes are planned before `now_s`; at least 1."""
        begun = steps_before(self._period_s, self._growth_s, now_s - self._base_s, limit)
        return begun if begun > 1 else 1


class OverlappingFlight(Flight):
    """Passes with a queue of depth two: each is planned when the tokens of the pass before the last
    one exist, S[n+1] = E[n-1].

    So tokens exist, and passes are planned, at the times T[1] <= T[2] <= ...: pass 2 is planned at
    T[1], and T[k] is when pass k + 1 is planned and, for k > 1, when the tokens of pass k - 1
    exist. `due_s` is T[steps], when the pass after the last is planned. The tokens of the last pass
    are held back by the launch of that pass; `follow` says until when.
    """

    def __init__(self, law: PassLaw) -> None:
        super().__init__(law)
        self._apart = law.apart
        # the longest drawn launch, over their mean
        self._spread_max = max(law.spread, default=1.0)
        self._empty_s = min(EMPTY_S, law.launch_s(StepShape(1, 1)))
        self._launches = 0  # so far, but for those of CUDA graphs
        self._launch_s = 0.0  # of the pass that is planned
        self._launched_s = -math.inf  # when the last launch has ended
        # of the flight: what its first pass is like
        self._waits = True  # for its launch
        self._launches_before = 0
        # of the first pass, and of each one where the flight goes from pass to pass
        self._times_s: list[float] = []  # T
        self._gpu_s: list[float] = []  # G
        self._launched: list[float] = []  # L

    def follow(self, shape: StepShape | None, now_s: float) -> float:
        """Plan a pass of `shape` at `now_s`; None: one without rows. Return when the tokens of the
        passes that are under way exist: the new pass's launch holds them back.
        """
        if shape is None:
            self._launch_s = self._empty_s
            held_s = now_s + self._launch_s
        else:
            self._launch_s = self._law.drawn_launch_s(shape, self._launches)
            held_s = now_s if self._apart else now_s + self._launch_s
        self.begin_s = max(self.end_s, held_s)
        return self.begin_s

    def start(self, shape: StepShape, now_s: float, steps: int) -> None:
        """Begin at most `steps` passes, the first of `shape` at `now_s`, which `follow` has
        planned.
        """
        law = self._law
        launch_s = self._launch_s
        planned_s = self.begin_s  # the second pass
        self.shape = shape
        self._waits = law.waits_for_launch(shape)
        self._launches_before = self._launches
        # the first pass
        gpu_s = law.gpu_s(shape)
        launched_s, base_s, end_s = overlapped(
            now_s,
            self._launched_s,
            self.end_s,
            launch_s,
            gpu_s,
            waits=self._waits,
            apart=self._apart,
        )
        if base_s + gpu_s < end_s:
            base_s = end_s - gpu_s
        self._times_s = [planned_s]
        self._gpu_s = [end_s]
        self._launched = [launched_s]
        if steps > 1:
            growth_s = law.growth_s(shape)
            self.first_s = end_s
            self._base_s = base_s
            self._period_s = gpu_s
            self._growth_s = growth_s
            if not self._gpu_limits(end_s, planned_s, launched_s):
                self._walk(gpu_s, growth_s, steps)
                return
        self.keep(steps)

    def keep(self, steps: int) -> None:
        """Only the first `steps` passes remain."""
        self.steps = steps
        if not self._waits:
            self._launches = self._launches_before + steps
        if steps <= len(self._times_s):
            self.due_s = self._times_s[steps - 1]
            self.end_s = self._gpu_s[steps - 1]
            self._launched_s = self._launched[steps - 1]
        else:
            self.due_s = self._begins_s(steps)
            self.end_s = self.due_s + self._law.gpu_s(grown_shape(self.shape, steps))
            self._launched_s = self.due_s  # it ended before that, and no launch begins before that

    def gaps(self, end_s: float) -> list[Gaps]:
        """Return the gaps between the tokens of several passes, the last at `end_s`."""
        last_s = end_s - self.due_s
        last = (1, last_s, last_s)
        if self.steps <= len(self._times_s):
            inner_s = [after - before for before, after in pairwise(self._times_s[1 : self.steps])]
            return [*[(1, gap_s, gap_s) for gap_s in inner_s], last]
        if end_s <= self.end_s:
            return [_growing(self.steps - 1, self._growth_s, last_s)]
        if self.steps == 2:
            return [last]
        before_s = self._period_s + self._growth_s * (self.steps - 2)
        return [_growing(self.steps - 2, self._growth_s, before_s), last]

    def _planned(self, now_s: float, limit: int) -> int:
        """Return how many of at most `limit` passes are planned before `now_s`; at least 1. The
        pass after the first is planned at T[1].
        """
        if len(self._times_s) > 1:
            return 1 + bisect_left(self._times_s, now_s, 0, limit - 1)
        if now_s <= self.begin_s or limit < 2:
            return 1
        return 1 + super()._planned(now_s, limit - 1)

    def _gpu_limits(self, end_s: float, planned_s: float, launched_s: float) -> bool:
        """Whether the GPU sets the times of all following passes: the launch of the next one, which
        is planned at `planned_s`, ends before the GPU is free. Then launches take no longer than
        the GPU's work, which only grows.
        """
        launch_s = self._law.launch_s(self.shape)
        if not self._waits:
            launch_s *= self._spread_max
        begins_s = max(launched_s, planned_s) if self._apart else planned_s
        return begins_s + launch_s <= end_s

    def _walk(self, gpu_s: float, growth_s: float, steps: int) -> None:
        """Go from pass to pass, the first of which has been computed, until the GPU limits."""
        law = self._law
        shape = self.shape
        apart = self._apart
        times_s = self._times_s
        planned_s = times_s[0]
        end_s = self._gpu_s[0]
        launched_s = self._launched[0]
        most = min(steps, WALKED_MAX)
        while len(times_s) < most:
            launch_s = law.drawn_launch_s(shape, self._launches_before + len(times_s))
            gpu_s += growth_s
            before_s = end_s
            launched_s, _, end_s = overlapped(
                planned_s, launched_s, end_s, launch_s, gpu_s, waits=self._waits, apart=apart
            )
            planned_s = before_s if apart else max(before_s, launched_s)
            times_s.append(planned_s)
            self._gpu_s.append(end_s)
            self._launched.append(launched_s)
            if self._gpu_limits(end_s, planned_s, launched_s):
                break
        if len(times_s) > 1:
            self.first_s = times_s[1]
        self.keep(len(times_s))


def grown_shape(shape: StepShape, steps: int) -> StepShape:
    """The shape of the last of `steps` > 1 passes of decodes alone, the first of which has
    `shape`.
    """
    more = steps - 1
    cached = shape.decode_cached + more * shape.decodes
    if not shape.decode_inside:
        return StepShape(shape.decodes, cached)
    inside = shape.decode_inside + more * shape.growing
    return StepShape(shape.decodes, cached, decode_inside=inside, growing=shape.growing)


def _growing(count: int, growth_s: float, last_s: float) -> Gaps:
    return count, last_s - (count - 1) * growth_s, last_s


def stretch_s(first_s: float, growth_s: float, steps: int) -> float:
    """Seconds of `steps` consecutive passes: the first takes `first_s`, and each following one
    `growth_s` more.
    """
    return steps * (first_s + growth_s * 0.5 * (steps - 1))


def steps_before(first_s: float, growth_s: float, seconds: float, limit: int) -> int:
    """Return how many of such passes begin less than `seconds` after the first, at most `limit`:
    the least k with stretch_s(first_s, growth_s, k) >= seconds.
    """
    low = 0
    high = limit
    while low < high:
        middle = (low + high) // 2
        if stretch_s(first_s, growth_s, middle) < seconds:
            low = middle + 1
        else:
            high = middle
    return low


def _steps_below(seconds: float, growth_s: float, limit: int) -> int:
    """How many passes, at most `limit`, grow by at most `seconds` over the first, which counts."""
    if growth_s * (limit - 1) <= seconds:
        return limit
    return 1 + int(seconds / growth_s)
