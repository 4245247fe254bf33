"""What `llmctl tune` prints: how long the search will take, and its result as tables."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from toolkit.cli.output import note, paragraph, table
from toolkit.files.tuning import Outcome, Sizing, Tuning, share_used
from toolkit.report.rows import change_rows, policy_rows, settings_of
from toolkit.units import bracketed, number, seconds, word

ESTIMATE_AFTER = 16  # simulations that are timed before the first estimate: two batches
RECENT = 24  # simulations by which the rest is estimated: three batches
DRIFT = 1.5  # ratio of the remaining time to what was printed last
MIN_ESTIMATE_S = 10.0  # a shorter estimate, or a smaller change of it, is not printed
METRICS = (
    "goodput_rps",
    "throughput_rps",
    "sla_attainment_percent",
    "sla_attainment_lower_percent",
    "ttft_mean_s",
    "ttft_p99_s",
    "tpot_mean_s",
    "e2e_mean_s",
    "e2e_p95_s",
    "batch_size_mean",
    "oom_percent",
    "evicted_percent",
    "hit_percent",
)


class TuneProgress:
    """Moves the progress bar, and prints the remaining time: the requests of the evaluations to
    come, at the speed of the last simulations in requests per second.

    So an evaluation on the whole trace counts for more than one on windows. Requests differ in
    cost, too: overloaded settings take longer. So the time is printed again when it differs by
    `DRIFT` from what was printed.

    Args:
        planned: the requests of each evaluation to come, in their order.
        jobs: processes; the first simulation of each includes its start, and is not timed.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        advance: Callable[..., None],
        planned: Sequence[int],
        jobs: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._advance = advance
        self._left = list(reversed(planned))
        self._jobs = jobs
        self._clock = clock
        self._untimed = jobs - 1
        self._requests = 0  # simulated so far
        # of the last simulations: when each was done, and the requests up to then
        self._recent: deque[tuple[float, int]] = deque(maxlen=RECENT + 1)
        self._end_s: float | None = None  # as it was printed last

    def simulated(self, requests: int) -> None:
        """A simulation of so many requests is done; an evaluation that is kept has none."""
        self._requests += requests
        if self._untimed:
            self._untimed -= 1
        else:
            self._recent.append((self._clock(), self._requests))

    def __call__(self, best: float) -> None:
        """An evaluation is done."""
        if self._left:
            self._left.pop()
        self._advance(text=f"best {number(best)} good requests/s" if best else "")
        timed = len(self._recent) - 1
        if timed < ESTIMATE_AFTER:
            return
        began_s, began = self._recent[0]
        now_s = self._recent[-1][0]
        left_s = (now_s - began_s) / max(self._requests - began, 1) * sum(self._left)
        what = f"for {len(self._left)} more simulations, {self._jobs} at a time"
        if self._end_s is None and left_s > MIN_ESTIMATE_S:
            note(f"about {seconds(left_s)} {what}")
            self._end_s = now_s + left_s
        elif self._end_s is not None and timed == RECENT:
            said_s = max(self._end_s - now_s, 0.0)
            less_s, more_s = sorted((said_s, left_s))
            if more_s >= DRIFT * less_s and more_s - less_s > MIN_ESTIMATE_S:
                taken = "longer" if left_s > said_s else "less"
                note(f"now about {seconds(left_s)} {what}: the last {timed} took {taken}")
                self._end_s = now_s + left_s


def show(result: Tuning) -> None:
    """Print a tuning: the recommendation, its gain and certainty, the limits and the trials."""
    from toolkit.report.verdict import size_lines, verdict

    before = result.defaults
    after = result.best
    same = before.key == after.key
    if result.sizing:
        print("\n".join([*size_lines(result), ""]))
        _show_sizing(result.sizing)
    if len(result.policies) > 1:
        _show_policies(result)
    rate = f"{result.load} on {result.workers} workers"
    first = settings_of(before)
    best = settings_of(after)
    settings = [
        (name, *([word(first[name])] if same else []), word(value)) for name, value in best.items()
    ]
    title = f"policy '{after.policy}', {len(result.trials)} trials at {rate}"
    table(["parameter", *(["default"] if same else []), "best"], settings, title=title)
    names = ["default", "best"]
    if not same:
        names = [f"{_short(before)}, default", f"{_short(after)}, best"]
    title = f"predicted on {result.judged.requests:,} requests of the trace"
    title += bracketed(result.changes)
    columns = ["metric", *(f">{name}" for name in names), ">change"]
    table(columns, change_rows(result, METRICS), title=title)
    limits = [(one.name, one.allowed(), one.prediction(), one.kept) for one in result.limits]
    what = "the recipe's settings" if result.keep_defaults else "the best settings"
    title = f"{what} beside the limits"
    table(["limit", ">allowed", ">predicted", "kept"], limits, title=title)
    of_best = [one.importance for one in result.policies if one.outcome.key == after.key]
    shares = of_best[0] if of_best else {}
    swings: list[tuple[object, ...]] = []
    for swept in result.sensitivity:
        share = f"{100 * shares[swept.parameter]:.0f} %" if swept.parameter in shares else "-"
        over = f"{word(swept.values[0])} .. {word(swept.values[-1])}"
        swings.append((swept.parameter, f"{swept.swing_percent:.1f} %", share, over))
    title = "how far goodput moves with one parameter, and its weight among all trials"
    table(["parameter", ">goodput swing", ">importance", "over"], swings, title=title)
    for line in verdict(result):
        paragraph(line)


def _show_policies(result: Tuning) -> None:
    from toolkit.sched.policies import footnote

    what = "router" if result.best.replica_router else "policy"
    columns = [what, ">trials", ">goodput_rps", f">{result.latency_metric}", "in limits"]
    title = f"each {what}'s best settings, on the whole trace"
    table(columns, policy_rows(result), title=title)
    remark = footnote([one.policy for one in result.policies], result.engine)
    if remark:
        paragraph(remark)
        print()


def _show_sizing(sizing: Sizing) -> None:
    """Print the tried numbers of workers."""
    rows: list[list[object]] = []
    for one in sizing.rows:
        used = share_used(one.binding_ratio).removesuffix(" of its limit")
        attained = f"{one.attainment_percent:.1f} %"
        what = f"{one.binding} {used}"
        rows.append([one.settings, one.workers, one.feasible, one.goodput_rps, attained, what])
    columns = ["settings", ">workers", "fits", ">goodput_rps", ">attained", "what binds"]
    table(columns, rows, title="numbers of workers that were tried, on the whole trace")


def _short(outcome: Outcome) -> str:
    """What the search compares: the router, or else the policy."""
    return outcome.replica_router.name if outcome.replica_router else outcome.policy
