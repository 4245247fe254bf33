"""Rounds of a server beside the time that its laws predict, from its event log.

    python -m benchmarks.serving.round_times PLAN.json EVENTS.jsonl [--from-request 120]

Takes seconds. Needs a plan of a continuous policy and the log of `llmctl serve --event-log`, which
holds every call and decision.

Replayed into a fresh scheduler of the same plan, the log tells which rows were resident in each
round, and so the time that the laws expect; the log has the time that it took. Rounds are grouped
by whether rows entered and by how many rows ran. Slices are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.command import make_parser
from toolkit.files.io import read_file
from toolkit.files.plan import Plan
from toolkit.sched.eventlog import CompleteRound, Event, Submit, Tick, from_lines, replay
from toolkit.sched.types import RoundResult, Worker
from toolkit.serve.assemble import make_scheduler, make_stats
from toolkit.serve.stats import Stats

ROWS = (1, 4, 8, 16, 32, 64)  # the groups' lower bounds


@dataclass(slots=True, frozen=True)
class RoundTime:
    """A round that ended well: its start and duration in seconds, and the time by the laws."""

    start_s: float
    took_s: float
    expected_s: float
    rows: int
    entered: int
    steps: int


def read_events(path: Path) -> list[Event]:
    with path.open("rb") as lines:
        return list(from_lines(lines))


def first_after(events: Iterable[Event], requests: int) -> float:
    """When request number `requests`, from 0, was submitted; infinity if there were fewer."""
    times = [event.now_s for event in events if isinstance(event, Submit)]
    return times[requests] if requests < len(times) else float("inf")


def round_times(plan: Plan, events: Iterable[Event]) -> Iterator[RoundTime]:
    """Every round of a log with its expected time, as they ended. `ValueError` where it does not
    replay.
    """
    scheduler = make_scheduler(plan)
    stats = make_stats(plan)
    for event in events:
        if isinstance(event, CompleteRound) and not event.result.failure:
            worker = scheduler.workers[event.result.worker]
            yield _held_against(worker, stats, event.result.reported(), event.now_s)
        for difference in replay([event], scheduler):
            raise ValueError(difference)


def _held_against(worker: Worker, stats: Stats, result: RoundResult, now_s: float) -> RoundTime:
    batch = worker.batch
    assert batch is not None
    before_s = stats.predicted_batch_s
    stats.count_round(batch, result, now_s, worker)
    times_s = batch.started_s, now_s - batch.started_s, stats.predicted_batch_s - before_s
    return RoundTime(*times_s, len(worker.running), batch.size, result.steps)


def dropped(events: Iterable[Event], since_s: float) -> dict[str, int]:
    """How many caches were dropped, swapped out and paused in rounds that began at `since_s` or
    later.
    """
    counts = {"evictions": 0, "swaps_out": 0, "pauses": 0}
    for event in events:
        if isinstance(event, Tick) and event.now_s >= since_s:
            for batch in event.started:
                counts["evictions"] += len(batch.evicted_ids)
                counts["swaps_out"] += len(batch.moved.swapped_out) if batch.moved else 0
                counts["pauses"] += len(batch.moved.paused) if batch.moved else 0
    return counts


def table(rounds: Iterable[RoundTime]) -> str:
    """Sums by group, as Markdown."""
    groups: dict[tuple[bool, int], list[RoundTime]] = {}
    for one in rounds:
        least = max(bound for bound in ROWS if bound <= max(one.rows, 1))
        groups.setdefault((one.entered > 0, least), []).append(one)
    lines = [
        "| rounds | rows | count | entered | steps | took s | expected s | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (joins, least), found in sorted(groups.items()):
        took_s = sum(one.took_s for one in found)
        expected_s = sum(one.expected_s for one in found)
        entered = sum(one.entered for one in found)
        steps = sum(one.steps for one in found)
        kind = f"{'with a prefill' if joins else 'steps only'} | {least}.. | {len(found)}"
        times = f"{took_s:.2f} | {expected_s:.2f} | {took_s / expected_s:.2f}"
        lines.append(f"| {kind} | {entered} | {steps} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("events", type=Path)
    parser.add_argument(
        "--from-request", type=int, default=0, help="leave out what began before this one came"
    )
    options = parser.parse_args()
    events = read_events(options.events)
    since_s = first_after(events, options.from_request)
    rounds = round_times(read_file(Plan, options.plan), events)
    print(table(one for one in rounds if one.start_s >= since_s))


if __name__ == "__main__":
    main()
