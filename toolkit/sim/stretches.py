"""A round whose newcomers are prefilled in passes between its steps, laid out in time before it runs.

As the engine does it: a bounded pass, a step, the next pass, until nobody waits; from then on steps alone. Where nobody
decodes a pass takes all that is left of its group. Each stretch of steps is one evaluation of the law, so a round costs
its passes and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolkit.sched.passes import Pass, Passes
from toolkit.sched.protocols import LatencyLaw
from toolkit.sched.types import Job

Left = Callable[[Job], int]  # tokens that a job will still generate
Steps = Callable[[int, float, int], float]  # seconds of decode steps: a law's `decode_s`
Cost = Callable[[Pass[Job]], float]  # seconds of a pass


@dataclass(slots=True, frozen=True)
class Stretch:
    """Passes, and then steps of all who decode: `rows`, of length `length` before the first.

    Attributes:
        passes: each one's bound (0: none) and when it ends, in seconds.
        begin_s, end_s: of its steps.
    """

    passes: tuple[tuple[int, float], ...]
    begin_s: float
    steps: int
    end_s: float
    rows: int
    length: float


@dataclass(slots=True)
class Outlook:
    """The rows that decode, as they will be.

    Attributes:
        rows: how many.
        steps: the worker's decode steps so far.
        keys: sum of length - steps at entry; `longest` the largest.
        first_end: at which of the worker's steps the first of them ends.
    """

    rows: int
    steps: int
    keys: int
    longest: int
    first_end: int

    def join(self, jobs: Sequence[Job], left: Left, emits: int) -> None:
        """These are prefilled, and have a token of it where prefill `emits` one."""
        for job in jobs:
            key = job.length - self.steps
            self.longest = key if not self.rows else max(self.longest, key)
            self.keys += key
            self.rows += 1
            self.first_end = min(self.first_end, self.steps - emits + left(job))

    def length(self, *, padded: bool) -> float:
        """L of the next step."""
        return (self.longest if padded else self.keys / self.rows) + self.steps


def lay_out(
    look: Outlook,
    newcomers: Passes[Job],
    law: LatencyLaw,
    left: Left,
    cost: Cost,
    *,
    begin_s: float,
    chunk_tokens: int,
    steps: int,
    step_is_due: bool,
) -> list[Stretch]:
    """The stretches of a round that begins at `begin_s` and makes `steps` decode steps at most.

    Args:
        look, newcomers: who decodes and who does not yet; both are used up.
        law, left, cost: of time, of what jobs will generate, and of passes.
        chunk_tokens: of a pass while anybody decodes; 0: no bound, and all passes come before the first step.
        step_is_due: whether a bounded pass was made since the last step, so that the next comes first.
    """
    emits, last, now_s = int(law.prefill_emits_token), look.steps + steps, begin_s
    stretches: list[Stretch] = []
    while True:
        passes = []
        while newcomers and not (step_is_due and look.rows):
            if chunk_tokens and look.first_end <= look.steps:
                break
            bound = chunk_tokens if look.rows else 0
            one = newcomers.next(bound)
            now_s += cost(one)
            passes.append((bound, now_s))
            newcomers.made(one)
            if one.completes:
                look.join(one.group.keys, left, emits)
            step_is_due = bound > 0
        due = look.first_end - look.steps
        ran = min(due, last - look.steps, 1 if newcomers else due)
        length, begins_s = look.length(padded=law.padded), now_s
        now_s += law.decode_s(look.rows, length, ran) if ran else 0.0
        if ran and ran == due:
            now_s += law.leave_s(length + ran)
        stretches.append(Stretch(tuple(passes), begins_s, ran, now_s, look.rows, length))
        look.steps += ran
        if not newcomers or ran == due or look.steps == last:
            return stretches
        step_is_due = False


def steps_by(stretches: Sequence[Stretch], now_s: float, law: LatencyLaw) -> int:
    """The first count of steps, at least one, after which the round might stop at `now_s` or later."""
    count = 0
    for stretch in stretches:
        if now_s <= stretch.end_s:
            return count + max(steps_in(stretch, now_s, law), 1)
        count += stretch.steps
    return count


def steps_in(stretch: Stretch, now_s: float, law: LatencyLaw) -> int:
    """How many of a stretch's steps end before or first at `now_s`."""
    span = stretch.steps, stretch.begin_s, stretch.end_s
    return steps_within(stretch.rows, stretch.length, *span, now_s, law.decode_s)


def steps_within(n: int, length: float, ran: int, begin_s: float, end_s: float, now_s: float, decode_s: Steps) -> int:
    """The same of `ran` steps of n rows of `length`, from `begin_s` to `end_s`."""
    guess = int(ran * (now_s - begin_s) / (end_s - begin_s)) if now_s > begin_s and ran else 0
    while guess > 0 and begin_s + decode_s(n, length, guess - 1) >= now_s:
        guess -= 1
    while guess < ran and begin_s + (decode_s(n, length, guess) if guess else 0.0) < now_s:
        guess += 1
    return guess


def cut(stretches: Sequence[Stretch], steps: int, law: LatencyLaw) -> list[Stretch]:
    """The same round, stopped after so many steps and before a pass that comes after them."""
    kept: list[Stretch] = []
    for stretch in stretches:
        if stretch.steps >= steps:
            took_s = law.decode_s(stretch.rows, stretch.length, steps) if steps else 0.0
            end_s = stretch.end_s if steps == stretch.steps else stretch.begin_s + took_s
            return [*kept, replace(stretch, steps=steps, end_s=end_s)]
        kept.append(stretch)
        steps -= stretch.steps
    return kept
