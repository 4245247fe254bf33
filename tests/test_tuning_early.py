"""Trials that end early: only where a limit is broken whatever the other windows give, and where it
changes no other trial.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import samples
from lean import verdict_only
from optuna.samplers._tpe.sampler import default_gamma

from toolkit.files.tuning import Tuning
from toolkit.metrics import Served
from toolkit.routing.admission import LatencyLimits
from toolkit.routing.routers import make_router
from toolkit.sim.replicas import Routing
from toolkit.traces.types import Trace
from toolkit.tuning.evaluate import (
    ATTAINMENT,
    CandidateLimits,
    Evaluation,
    EvaluationSetup,
    SimulatedWindow,
    Task,
    make_world,
)
from toolkit.tuning.executor import (
    InProcessRunner,
    Pieces,
    ProcessPool,
    Remembering,
    Runner,
    collect,
)
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.journal import EvaluationJournal
from toolkit.tuning.search import most_good
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import Workload, make_workload

LIMITS = CandidateLimits(max_oom_percent=1.0)
SLA = {"ttft_p90_s": 1.0}


def trace(n: int, rate_rps: float, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / rate_rps, n))
    lengths = (np.clip(rng.lognormal(m, 0.8, n), 1, 400).astype(np.int64) for m in (4.5, 3.5))
    return Trace(arrival - arrival[0], *lengths, np.zeros(n, np.int64), source="test")


def setup(
    sizes: Sequence[int] = (100, 100),
    sla: dict[str, float] = SLA,
    limits: CandidateLimits = LIMITS,
) -> EvaluationSetup:
    world = make_world(samples.recipe(), samples.fit())
    windows = [trace(n, 5.0, k) for k, n in enumerate(sizes)]
    return EvaluationSetup(world, windows, sla, limits=limits)


def window(requests: int, late: int, **metrics: float) -> SimulatedWindow:
    """A window of which `late` requests get their first token after 2 s, the others after 0.5 s."""
    first = np.full(requests, 0.5)
    first[:late] = 2.0
    served = Served(
        np.zeros(requests), first, first + 1.0, np.full(requests, 10), np.zeros(requests),
        np.ones(requests, dtype=np.bool_),
    )  # fmt: skip
    zero = {"oom_percent": 0.0, "evicted_percent": 0.0, "refused": 0.0, "goodput_rps": 1.0}
    return SimulatedWindow(served, {"requests": float(requests), **zero, **metrics})


@pytest.mark.parametrize(("late", "hopeless"), [(20, False), (21, True)])
def test_it_is_hopeless_where_more_are_late_than_all_windows_may_have(
    late: int, hopeless: bool
) -> None:
    task = Task(setup(), "slice", stops_above=1.0)
    assert task.hopeless([window(100, late)]) is hopeless
    # with 20 of 200 late, all others in time keep the limit; one more late breaks it
    whole = task.sum_up([window(100, late), window(100, 0)])
    assert whole.feasible(LIMITS) is not hopeless


@pytest.mark.parametrize(
    ("limits", "sla", "first", "hopeless"),
    [
        (LIMITS, {"ttft_mean_s": 0.9}, {"late": 86}, False),  # mean of both: at least 0.895 s
        (LIMITS, {"ttft_mean_s": 0.9}, {"late": 88}, True),  # 0.91 s
        (LIMITS, {}, {"oom_percent": 2.0}, False),
        (LIMITS, {}, {"oom_percent": 2.1}, True),
        (replace(LIMITS, max_evicted_percent=5.0), {}, {"evicted_percent": 10.1}, True),
        (replace(LIMITS, max_evicted_percent=5.0), {}, {"evicted_percent": 9.9}, False),
        (replace(LIMITS, min_attainment_percent=95.0), SLA, {"late": 10}, False),
        (replace(LIMITS, min_attainment_percent=95.0), SLA, {"late": 11}, True),
    ],
)
def test_each_limit_is_judged_as_if_the_other_windows_were_perfect(
    limits: CandidateLimits, sla: dict[str, float], first: dict[str, float], hopeless: bool
) -> None:
    task = Task(setup(sla=sla, limits=limits), "slice", stops_above=1.0)
    late = int(first.pop("late", 0))
    if "ttft_mean_s" in sla:  # of the first window, 2 s and 0.5 s; the other has zeros
        assert ((late * 2.0 + (100 - late) * 0.5) / 200 > 0.9) is hopeless
    assert task.hopeless([window(100, late, **first)]) is hopeless


@pytest.mark.parametrize(("refused", "hopeless"), [(20.0, False), (20.1, True)])
def test_refusals_count_where_the_front_refuses(refused: float, hopeless: bool) -> None:
    where = setup(sla={}, limits=replace(LIMITS, max_refused_percent=10.0))
    front = Routing.of_front(make_router("round-robin", {}), LatencyLimits.of(SLA))
    refuses = replace(where, world=replace(where.world, routing=front))
    results = [window(100, 0, refused=refused)]
    assert Task(refuses, "slice", stops_above=1.0).hopeless(results) is hopeless
    assert not Task(where, "slice", stops_above=1.0).hopeless(results)


@pytest.mark.slow
def test_whatever_the_other_windows_give_a_hopeless_task_breaks_a_limit() -> None:
    rng = np.random.default_rng(0)
    limits = replace(LIMITS, max_evicted_percent=20.0, min_attainment_percent=90.0)
    found = 0
    for _ in range(100):
        sizes = rng.integers(5, 60, 4).tolist()
        task = Task(setup(sizes, limits=limits), "slice", stops_above=1.0)
        late = [int(n * share) for n, share in zip(sizes, rng.random(4) ** 3, strict=True)]
        evicted = rng.exponential(8.0, 4)
        results = [
            window(n, k, evicted_percent=e) for n, k, e in zip(sizes, late, evicted, strict=True)
        ]
        for count in range(1, 4):
            if task.hopeless(results[:count]):
                found += 1
                assert not task.sum_up(results).feasible(limits)
                assert not task.sum_up(results[:count]).feasible(limits)
    assert 20 < found < 250


def test_without_limits_and_on_the_last_window_nothing_ends_early() -> None:
    results = [window(100, 100), window(100, 100)]
    assert not Task(setup(), "slice").hopeless(results[:1])
    assert not Task(setup(), "slice", stops_above=1.0).hopeless(results)


def test_an_attainment_that_the_confidence_bound_alone_breaks_is_not_hopeless() -> None:
    limits = replace(LIMITS, min_attainment_percent=94.0)
    task = Task(setup(limits=limits), "slice", stops_above=1.0)
    whole = task.sum_up([window(100, 10), window(100, 0)])
    assert whole.usage(limits)[ATTAINMENT] > 1.0
    assert not task.hopeless([window(100, 10)])


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]])
def test_the_order_in_which_windows_are_done_changes_nothing(order: list[int]) -> None:
    task = Task(setup((100, 100, 100)), "slice", stops_above=1.0)
    results = [window(100, 40), window(100, 0), window(100, 90)]
    pieces = Pieces([task])
    all_pieces = list(pieces)
    [(index, found)] = [
        each for number in order for each in pieces.add(all_pieces[number], results[number])
    ]
    assert (index, found.stopped_after) == (0, 1)
    assert found == task.sum_up(results[:1])


def test_windows_of_a_task_that_has_ended_are_not_given_out() -> None:
    where = setup((100, 100, 100))
    pieces = Pieces([Task(where, "slice", stops_above=1.0) for _ in range(2)])
    given = iter(pieces)
    first = next(given)
    assert len(list(pieces.add(first, window(100, 90)))) == 1
    assert [(piece.index, piece.window) for piece in given] == [(1, 0), (1, 1), (1, 2)]


def test_tpe_calls_no_more_trials_good_than_assumed() -> None:
    for trials in range(1, 500):
        assert most_good(trials) == max(default_gamma(told) for told in range(trials + 1))


class Whole(InProcessRunner):
    """Ends nothing early."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        return super().run([replace(task, stops_above=None) for task in tasks])


@verdict_only()
def run(runner: Runner, **changes: object) -> Tuning:
    """A search where some settings are too slow for the target."""
    settings = {
        "trials": 30, "window_s": 4, "request_rate_rps": 32, "policies": ["sequence"],
        "space": {"slice_tokens": [1, 256]},
    }  # fmt: skip
    recipe = samples.recipe(
        engine={"name": "transformers"}, tune=settings | changes, sla={"ttft_p90_s": 3.0}
    )
    fit = samples.fit()
    workload: Workload = make_workload(recipe, fit, trace(1200, 10.0))
    return tune(Inputs(recipe, fit, workload), runner, samples.HEAD, lambda best: None)


@pytest.fixture(scope="module")
def early() -> Tuning:
    return run(InProcessRunner())


@pytest.mark.slow
def test_everything_but_the_ended_trials_is_as_without_early_ends(early: Tuning) -> None:
    whole = run(Whole())
    ended = {trial.number for trial in early.trials if trial.stopped_after}
    assert ended
    assert not any(trial.stopped_after for trial in whole.trials)
    for one, other in zip(early.trials, whole.trials, strict=True):
        if one.number in ended:
            assert not other.feasible
            assert one.outcome.same_settings(other.outcome)
        else:
            assert one == other
    changing = {"trials", "front"}
    assert early.model_dump(exclude=changing) == whole.model_dump(exclude=changing)
    assert not ended & set(early.front)


@pytest.mark.slow
def test_several_processes_end_the_same_trials(early: Tuning) -> None:
    with ProcessPool(2) as pool:
        assert run(pool).model_dump_json() == early.model_dump_json()


class Interrupted(InProcessRunner):
    """Is interrupted after so many evaluations."""

    def __init__(self, left: int) -> None:
        self.left = left

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for index, evaluation in super().run(tasks):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield index, evaluation


@pytest.mark.slow
@pytest.mark.parametrize("after", [25, 31])  # of 30 trials
def test_a_resumed_search_ends_the_same_trials(early: Tuning, tmp_path: Path, after: int) -> None:
    def journal() -> EvaluationJournal:
        return EvaluationJournal(tmp_path / "kept", "same")

    with pytest.raises(KeyboardInterrupt):
        run(Remembering(Interrupted(after), journal()))
    kept = journal()
    assert any(evaluation.stopped_after for evaluation in kept.known.values())
    assert run(Remembering(InProcessRunner(), kept)).model_dump_json() == early.model_dump_json()
    # everything is kept now, also what came after the search
    with_all = Remembering(Interrupted(0), journal())
    assert run(with_all).model_dump_json() == early.model_dump_json()


def test_what_ended_early_is_never_taken_for_all_windows(tmp_path: Path) -> None:
    where = setup((60, 60), {"ttft_p90_s": 1e-6})
    task = Task(where, "slice", stops_above=1.0)
    whole = Task(where, "slice")
    runner = Remembering(InProcessRunner(), EvaluationJournal(tmp_path / "kept", "same"))
    [first] = collect(runner, [task])
    [second] = collect(runner, [whole])
    assert (first.stopped_after, second.stopped_after) == (1, None)
    # what is known of all windows is not simulated again
    assert collect(Remembering(Interrupted(0), Kept(runner)), [whole, task]) == [second, first]
    assert collect(runner, [task]) == [second]


class Kept:
    """The journal of another runner."""

    def __init__(self, other: Remembering) -> None:
        self.known = other._known

    def keep(self, key: str, evaluation: Evaluation) -> None:
        raise AssertionError(key)

    def forget(self) -> None:
        raise AssertionError
