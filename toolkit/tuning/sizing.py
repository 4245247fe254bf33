"""How few workers serve this trace within the limits: a gallop, a bisection, and a search at each count it ends on.

Each count is judged on all windows, those of the search and those held out: a count that is too small must not pass by
the luck of one. More workers need not be better (a router may deal badly), so nothing is inferred: the answer has been
simulated and keeps the limits, the count below it has been and breaks one, and the one above is looked at too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from toolkit.errors import LimitsBrokenError
from toolkit.files.tuning import Outcome, Sibling, Sizing, SizingRow
from toolkit.tuning.crew import Runner, collect
from toolkit.tuning.evaluate import Bench, Evaluation, Limits, Task

WORKERS_MAX = 256
RECIPE = "recipe"  # the name of the recipe's own settings


@dataclass(slots=True)
class Sizes:
    """Worker counts tried with settings: each count and settings are simulated once."""

    bench: Bench
    runner: Runner
    limits: Limits
    tick: Callable[[], None]
    rows: list[SizingRow]

    def keeps(self, settings: str, outcome: Outcome, workers: int) -> bool:
        """Whether `outcome`'s policy and parameters keep every limit with so many workers."""
        known = [row for row in self.rows if (row.settings, row.workers) == (settings, workers)]
        return known[0].feasible if known else self._try(settings, outcome, workers).feasible

    def _try(self, settings: str, outcome: Outcome, workers: int) -> SizingRow:
        bench = at_size(self.bench, workers)
        [done] = collect(self.runner, [Task(bench, outcome.policy, outcome.parameters)], self.tick)
        self.rows.append(_row(settings, workers, done, self.limits))
        return self.rows[-1]


def at_size(bench: Bench, workers: int) -> Bench:
    """The same bench with so many workers."""
    return replace(bench, world=replace(bench.world, workers=workers), label=f"{bench.label}, {workers} workers")


def fewest(keeps: Callable[[int], bool], known: int | None = None) -> int | None:
    """The least count found that `keeps`, while the one below it does not; `known` is one that does.

    Doubles until a count keeps, then halves the gap. Where more workers are not always better there may be a smaller
    one. None where no power of two up to `WORKERS_MAX` does.
    """
    low, high = 0, 1
    while high != known and not keeps(high):
        low, high = high, min(2 * high, known or 2 * high)
        if high > WORKERS_MAX:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if keeps(middle):
            high = middle
        else:
            low = middle
    return high


def answer(sizes: Sizes, settings: str, workers: int, one_more: Callable[[], bool] | None) -> Sizing:
    """The table with the answer, and whether `one_more` worker keeps the limits as well; None: there cannot be one."""
    return Sizing(
        workers=workers,
        settings=settings,
        one_more_keeps=one_more() if one_more else None,
        rows=sorted(sizes.rows, key=lambda row: (row.settings != RECIPE, row.settings, row.workers)),
    )


def nothing_suffices(sizes: Sizes, siblings: Sequence[Sibling] = ()) -> LimitsBrokenError:
    """The error where no number of workers keeps the limits: which one binds, even with the most that were tried.

    Its hint names one of the `siblings` that does.
    """
    able = next((one for one in siblings if one.feasible), None)
    last = max(sizes.rows, key=lambda row: row.workers)
    return LimitsBrokenError(
        f"no number of workers up to {last.workers} keeps all limits: {last.binding} is at "
        f"{last.binding_ratio:.0%} of its limit even with {last.workers}",
        f"tune {able.recipe} (engine {able.engine}): on {able.workers} it keeps them"
        if able
        else "a looser target in the recipe's sla, or other parameters: more workers do not help",
    )


def _row(settings: str, workers: int, done: Evaluation, limits: Limits) -> SizingRow:
    usage = done.usage(limits)
    binding = max(usage, key=lambda key: usage[key])
    metrics = done.outcome.metrics
    return SizingRow(
        settings=settings,
        workers=workers,
        feasible=done.feasible(limits),
        goodput_rps=done.goodput_rps,
        attainment_percent=metrics.get("sla_attainment_percent", 0.0),
        binding=binding,
        binding_ratio=usage[binding],
    )
