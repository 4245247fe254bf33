"""Policies without a trial within the limits are tried on the first part of each window first."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import samples

from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import (
    Evaluation,
    Screen,
    Task,
    make_screens,
    rank,
)
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.search import SearchSettings, search
from toolkit.tuning.spaces import make_spaces

SLA = {"ttft_p99_s": 1.0, "e2e_mean_s": 9.0}


def window(requests: int, rate_rps: float, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1 / rate_rps, requests))
    lengths = np.clip(rng.lognormal(4.0, 0.8, (2, requests)), 1, 200).astype(np.int64)
    return Trace(arrival - arrival[0], *lengths, np.zeros(requests, np.int64))


def setup(rate_rps: float, sla: dict[str, float] = SLA) -> Task:
    tune = {"max_oom_percent": 100.0}
    recipe = samples.recipe(engine={"name": "transformers"}, sla=sla, tune=tune)
    return samples.task(window(400, rate_rps), window(200, rate_rps, 1), given=recipe)


def requests_of(task: Task) -> int:
    return sum(len(window.trace) for window in task.windows)


def screen_of(where: Task) -> Screen:
    return make_screens(where)[-1]


def test_more_than_all_windows_may_have_must_be_late_in_the_part() -> None:
    where = setup(20.0)
    screen = screen_of(where)
    share = requests_of(screen.task) / requests_of(where)
    (key,) = screen.targets  # a mean says nothing early
    percentile = float(key.removeprefix("ttft_p").removesuffix("_s"))
    assert percentile == pytest.approx(100 - 2 * 1 / share)


def test_the_first_look_is_at_one_window_where_more_must_be_late() -> None:
    where = setup(20.0)
    one, every = make_screens(where)
    assert [len(screen.task.windows) for screen in (one, every)] == [1, 2]
    assert requests_of(one.task) < requests_of(every.task)
    share = requests_of(one.task) / requests_of(where)
    (key,) = one.targets
    percentile = float(key.removeprefix("ttft_p").removesuffix("_s"))
    assert percentile == pytest.approx(100 - 2 * 1 / share)


def test_a_single_window_is_looked_at_once() -> None:
    where = setup(20.0)
    assert len(make_screens(where.on(0))) == 1


@pytest.mark.parametrize("sla", [{}, {"e2e_mean_s": 9.0}, {"ttft_p50_s": 1.0}])
def test_without_a_target_that_can_tell_early_nothing_is_screened(sla: dict[str, float]) -> None:
    assert make_screens(setup(20.0, sla)) == []


@pytest.mark.parametrize("policy", ["sequence", "slice"])
def test_what_is_hopeless_on_the_part_breaks_the_limits_on_the_whole(policy: str) -> None:
    where = setup(400.0)
    for screen in make_screens(where):
        found = screen.hopeless(screen.task.under(samples.chosen(policy)).run())
        assert found is not None
        assert (found.screened_out, found.outcome.kept) == (True, False)
        assert found.outcome.used.keys() == {*SLA, "oom_percent"}
    assert not where.under(samples.chosen(policy)).run().outcome.kept


def test_what_keeps_the_limits_is_not_hopeless() -> None:
    where = setup(1.0, {"ttft_p99_s": 30.0})
    assert (
        screen_of(where).hopeless(screen_of(where).task.under(samples.chosen("slice")).run())
        is None
    )


class Recorded(InProcessRunner):
    """Evaluations that are made up: `late` policies miss their targets; each task is recorded."""

    def __init__(self, late: set[str]) -> None:
        self.late = late
        self.ran: list[tuple[str, int]] = []  # the policy, and the requests of its windows

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for number, task in enumerate(tasks):
            policy = task.settings.policy
            self.ran.append((policy, requests_of(task)))
            ratio = 9.0 if policy in self.late else 0.5
            # a part looks better than a whole window: queues are still short
            goodput = 50.0 if self.ran[-1][1] < 600 else 5.0 + ratio
            metrics = {"goodput_rps": goodput, "ttft_p99_s": ratio, "e2e_mean_s": ratio}
            used = dict.fromkeys(task.sla, ratio)
            yield number, samples.evaluation(policy, task.settings.parameters, metrics, used)


def searched(late: set[str]) -> tuple[list[Evaluation], Recorded]:
    recipe = samples.recipe(engine={"name": "transformers"})
    spaces = make_spaces(recipe.policy, ["sequence", "past-future"], {}, recipe.workers)
    served = frozenset({"slice", "sequence"})
    runner = Recorded(late)
    settings = SearchSettings(spaces, 20, 0, served)
    return search(setup(20.0), runner, settings, lambda best: None), runner


def test_once_a_trial_keeps_the_limits_the_others_are_screened() -> None:
    found, runner = searched({"past-future"})
    assert runner.ran[0] == ("slice", 600)
    # trial 0 keeps the limits: every first try of another policy is screened
    assert {policy for policy, size in runner.ran if size < 600} == {"sequence", "past-future"}
    looks = [policy for policy, size in runner.ran if size < 600]
    assert looks.count("sequence") == 2  # at one window, then at both
    late = sum(trial.screened_out for trial in found)
    assert looks.count("past-future") == late  # at one window, which tells
    assert "past-future" not in {policy for policy, size in runner.ran if size == 600}
    assert {trial.settings.policy for trial in found if trial.screened_out} == {"past-future"}
    best = max(found, key=rank)
    assert not best.screened_out
    assert best.settings.policy != "past-future"


def test_nothing_is_screened_before_a_trial_keeps_the_limits() -> None:
    found, runner = searched({"slice", "sequence", "past-future"})
    assert {size for _, size in runner.ran} == {600}
    assert not any(trial.screened_out for trial in found)


def test_a_policy_that_the_engine_cannot_run_screens_nothing() -> None:
    _, runner = searched({"slice", "sequence"})  # `past-future` keeps them, and cannot be served
    assert {size for _, size in runner.ran} == {600}
