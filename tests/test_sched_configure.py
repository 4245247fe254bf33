"""New parameters of a policy while its scheduler runs, and their place in the log."""

from itertools import pairwise

import pytest

from toolkit.errors import InputError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.eventlog import Configure, RecordingScheduler, from_lines, replay, to_line
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import PassResult, Request, Worker


def worker(slots: int = 8) -> Worker:
    return Worker(0, unit_step(), ZetaMemory(1000), slots=slots)


def drive(scheduler: Scheduler, change) -> list[int]:
    """Rows that run after each round, with a change before round 6."""
    rows = []
    for number in range(30):
        now_s = float(number)
        scheduler.submit(Request(str(number), now_s, 8, 200), now_s)
    for number in range(12):
        now_s = 30.0 + number
        if number == 6:
            change(scheduler)
        for batch in scheduler.tick(now_s):
            running = scheduler.workers[0].running.jobs
            ended = tuple(job.request_id for job in running)[: number % 3 == 2]
            result = PassResult(batch.pass_id, 0, min(batch.steps, 4), ended)
            scheduler.complete(result, now_s)
        rows.append(len(scheduler.workers[0].running.jobs))
    return rows


def test_a_new_parameter_holds_from_the_next_tick_on():
    low = {"watermark": 0.05}
    usual = drive(Scheduler(make_policy("aggressive", low), [worker(30)]), lambda _: None)
    changed = drive(
        Scheduler(make_policy("aggressive", low), [worker(30)]),
        lambda scheduler: scheduler.configure({"watermark": 0.9}),
    )
    assert changed[:6] == usual[:6]
    assert max(changed[6:]) > max(usual[6:])


def test_fewer_slots_evict_nobody():
    scheduler = Scheduler(make_policy("aggressive", {}), [worker(8)])
    rows = drive(scheduler, lambda one: one.configure({}, slots=2))
    assert rows[5] > 2
    assert all(after <= before for before, after in pairwise(rows[6:]))
    assert rows[-1] < rows[5]


def test_the_log_of_changes_replays():
    events = []
    policy = make_policy("aggressive", {"watermark": 0.05})
    scheduler = RecordingScheduler(policy, [worker(30)], events.append)
    drive(scheduler, lambda one: one.configure({"watermark": 0.9}, slots=25))
    assert Configure({"watermark": 0.9}, 25) in events
    read = list(from_lines(to_line(event) for event in events))
    again = Scheduler(make_policy("aggressive", {"watermark": 0.05}), [worker(30)])
    assert list(replay(read, again)) == []
    without = [event for event in read if not isinstance(event, Configure)]
    other = Scheduler(make_policy("aggressive", {"watermark": 0.05}), [worker(30)])
    assert list(replay(without, other)) != []


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("past-future", {"window": 10}),
        ("past-future", {"reserve": 2.0}),
        ("past-future", {"nothing": 1}),
        ("mlfq", {"growth": 2.0}),
        ("slice", {"slice_tokens": 8}),
    ],
)
def test_what_a_running_policy_does_not_take_is_refused(name, settings):
    scheduler = Scheduler(make_policy(name, {}), [worker()])
    before = scheduler.policy
    with pytest.raises(InputError):
        scheduler.configure(settings)
    assert scheduler.policy == before
