"""What passes that overlap took, beside what their law says.

A pass is predicted when it has ended, since it may end with the launch of the next one, and behind
the measured times of the passes before it, so that no error of a pass counts again in the next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toolkit.files.iterations import LoggedPass, LoggedRow, shape_of_rows
from toolkit.laws.passes import PassLaw, overlapped

# A pass waited for the GPU if its tokens came so much later than the launches that hold them back.
WAITED_S = 2e-4


@dataclass(frozen=True, slots=True)
class Following:
    """The pass that was scheduled before the one before it ended. `launched_s` as in `LoggedPass`:
    0: not known.
    """

    start_s: float
    rows: list[LoggedRow]
    launched_s: float


def sampler_s(one: LoggedPass, following: Following, *, from_idle: bool) -> float:
    """At most so long a launch goes on after `launched_s`: the sampler's, which has no stamp.

    The engine takes the tokens of a pass once it has launched the following one; after a pass
    `from_idle` it schedules the following one at once. Infinity where neither has a stamp.
    """
    shown_s = math.inf
    if following.launched_s and one.ready_s:
        shown_s = one.ready_s - following.launched_s
    if from_idle and one.launched_s:
        shown_s = min(shown_s, max(following.start_s - one.launched_s, 0.0))
    return shown_s


class OverlappingPasses:
    """Follows the passes of one engine, in their order."""

    def __init__(self, law: PassLaw) -> None:
        self._law = law
        self._end_s = -math.inf  # of the pass before: its tokens
        self._launched_s = -math.inf  # its launch
        self._gpu_s = -math.inf  # its end on the GPU
        self._sampler_s = math.inf  # of a launch, after `launched_s`: the least that was seen

    def ended(self, one: LoggedPass, following: Following | None) -> tuple[float, float]:
        """Return the measured and predicted seconds of a pass that has ended: from the end of the
        pass before, or from its schedule after idle time, to its tokens.

        `following` is the pass that was scheduled behind it meanwhile, if there is one that
        computes something.
        """
        law = self._law
        apart = law.apart
        shape = shape_of_rows(one.rows)
        waits = law.waits_for_launch(shape)
        work_s = law.gpu_s(shape)
        usual_s, starts_s, usual_done_s = overlapped(
            one.start_s,
            self._launched_s,
            self._gpu_s,
            law.launch_s(shape),
            work_s,
            waits=waits,
            apart=apart,
        )
        usual_next_s = held_s = -math.inf  # launches that hold back the tokens
        if following is not None and not apart:
            next_launch_s = law.launch_s(shape_of_rows(following.rows))
            usual_next_s = held_s = following.start_s + next_launch_s
            from_idle = one.start_s >= self._end_s
            shown_s = sampler_s(one, following, from_idle=from_idle)
            self._sampler_s = min(self._sampler_s, shown_s)
            if following.launched_s and self._sampler_s < math.inf:
                held_s = following.launched_s + self._sampler_s
        from_s = max(self._end_s, one.start_s)
        stamped = bool(one.launched_s and one.ready_s) and self._sampler_s < math.inf
        self._launched_s = one.launched_s + self._sampler_s if stamped else usual_s
        if waits:
            starts_s = max(self._gpu_s, self._launched_s)
        waited = stamped and one.ready_s > max(self._launched_s, held_s) + WAITED_S
        done_s = max(starts_s + work_s, self._launched_s)
        self._gpu_s = one.ready_s if waited else min(done_s, one.ready_s or done_s)
        self._end_s = one.end_s
        return one.end_s - from_s, max(usual_done_s, usual_next_s) - from_s
