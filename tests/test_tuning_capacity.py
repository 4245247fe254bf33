"""The capacity: the highest load that keeps every limit, on the whole trace."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from test_tuning import trace

from toolkit.errors import InputError
from toolkit.files.tuning import Evaluation
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.types import Sessions, Trace
from toolkit.traces.windows import busiest, mean_rate
from toolkit.tuning import capacity
from toolkit.tuning.capacity import (
    BELOW,
    BESIDE,
    LASTING,
    LONG,
    MOST_REPEATED,
    NEAR,
    SESSIONS,
    TOLERANCE,
    LoadSearch,
    at_rate,
    busiest_part,
    judged_s,
    most_rate_rps,
    own_rate_rps,
    rate_capacity,
    try_together,
)
from toolkit.tuning.deployments import capacity_of, variants_of
from toolkit.tuning.evaluate import Task
from toolkit.tuning.workload import in_process, whole_task

pytestmark = pytest.mark.whole_traces
LOADS = st.floats(0.01, 1000.0)
ABOVE = 1.05  # times the capacity: is broken


def search(keeps, **options) -> LoadSearch:
    """A search over loads where `keeps` says whether one is kept."""

    def at(load: float) -> Task:
        return Task(None, [], own_rps=load)

    def evaluate(tasks) -> list[Evaluation]:
        loads = [task.own_rps for task in tasks]
        used = [{"ttft_p99_s": 0.5 if keeps(load) else 2.0} for load in loads]
        return [samples.evaluation("slice", {}, {}, one) for one in used]

    return LoadSearch(at, evaluate, **options)


@pytest.mark.slow
@given(guess=LOADS, edge=LOADS)
def test_the_capacity_is_within_its_tolerance_of_the_edge(guess, edge):
    found = search(lambda load: load <= edge).found(guess)
    if found is None:
        assert edge < 0.001 * guess
        return
    assert found.load <= edge < found.broken
    assert found.broken <= found.load * (1 + TOLERANCE) * (1 + 1e-9)
    assert found.binding == "ttft_p99_s"
    assert found.at_capacity.kept


@pytest.mark.slow
@given(guess=LOADS, edge=LOADS, holes=st.lists(st.tuples(LOADS, st.floats(1.0, 1.2)), max_size=3))
def test_no_tried_load_below_the_capacity_is_broken(guess, edge, holes):
    """Although a simulation may keep a load and break a lower one."""

    def keeps(load: float) -> bool:
        return load <= edge and not any(low < load < low * width for low, width in holes)

    found = search(keeps).found(guess)
    if found is not None:
        shares = {point.load / found.load: point.kept for point in found.points}
        for share in BELOW:
            beside = BESIDE * (1.0 - share) + 1e-9
            assert any(kept and abs(one - share) <= beside for one, kept in shares.items())
        assert all(kept for one, kept in shares.items() if one < 1.0)


@pytest.mark.parametrize("guess", [9.7, 10.0, 10.3, 7.0, 20.0])
def test_a_search_from_a_good_guess_takes_two_loads(guess):
    found = search(lambda load: load <= 10.0, tolerance=0.05, below=()).found(guess, NEAR)
    assert found.load <= 10.0 < found.broken <= found.load * 1.05 * (1 + 1e-9)
    assert len(found.points) <= (2 if abs(guess - 10.0) <= 10.0 * (NEAR - 1.0) else 12)


@pytest.mark.parametrize("edge", [0.3, 1.0, 3.0])
def test_two_loads_say_where_a_limit_breaks(edge):
    """A share that grows with the load's square is known from two loads."""

    def evaluate(tasks) -> list[Evaluation]:
        used = [{"tpot_p99_s": (task.own_rps / edge) ** 2} for task in tasks]
        return [samples.evaluation("slice", {}, {}, one) for one in used]

    found = LoadSearch(lambda load: Task(None, [], own_rps=load), evaluate).found(1.0)
    assert found.load <= edge < found.broken <= found.load * (1 + TOLERANCE) * (1 + 1e-9)
    assert len(found.points) <= 14


@pytest.mark.parametrize("edge", [0.7, 1.07, 1.9])
def test_two_broken_loads_say_where_a_queue_becomes_too_long(edge):
    """What waits use of a limit grows in a straight line from the load at which a queue grows."""

    def evaluate(tasks) -> list[Evaluation]:
        used = [{"ttft_p99_s": max(0.05, 1.0 + 50 * (task.own_rps / edge - 1.0))} for task in tasks]
        return [samples.evaluation("slice", {}, {}, one) for one in used]

    found = LoadSearch(lambda load: Task(None, [], own_rps=load), evaluate).found(1.0)
    assert found.load <= edge < found.broken <= found.load * (1 + TOLERANCE) * (1 + 1e-9)
    assert len(found.points) <= 14


@pytest.mark.parametrize("factor", [0.5, 0.95, 1.05])
def test_slower_passes_serve_a_rate_that_is_as_much_lower_in_longer_time(factor):
    """A target is then as if it were shorter, and the points say where that one breaks."""

    def evaluate(tasks) -> list[Evaluation]:
        used = [
            {"ttft_p99_s": task.own_rps / 10.0, "behind_percent": task.own_rps / 30.0}
            for task in tasks
        ]
        return [samples.evaluation("slice", {}, {}, one) for one in used]

    found = LoadSearch(lambda load: Task(None, [], own_rps=load), evaluate).found(20.0)
    assert found.load_if(factor) == pytest.approx(10.0 / factor / factor, rel=0.01)


def test_a_capacity_of_slower_passes_between_tried_loads_takes_no_simulation():
    """It is known only where two loads were tried near to it."""

    def evaluate(tasks) -> list[Evaluation]:
        used = [{"ttft_p99_s": task.own_rps / 10.0} for task in tasks]
        return [samples.evaluation("slice", {}, {}, one) for one in used]

    found = LoadSearch(lambda load: Task(None, [], own_rps=load), evaluate).found(20.0)
    assert found.served_if(1.01) == pytest.approx(10.0 / 1.01 / 1.01, rel=0.005)
    assert found.served_if(0.7) is None  # the next load is nearly twice as high
    assert found.served_if(100.0) is None  # no load as low was tried
    assert found.served_if(0.01) is None


def test_a_whole_number_of_requests_at_once_is_found_exactly():
    found = search(lambda load: load <= 37, whole=True).found(10)
    assert (found.load, found.broken) == (37, 38)


def test_where_the_trace_is_too_short_for_more_the_capacity_is_at_least():
    found = search(lambda load: True, most=50.0).found(10)
    assert (found.load, found.broken, found.error_percent) == (50.0, None, 0.0)


def test_no_load_is_kept_where_the_target_breaks_at_all():
    assert search(lambda load: False).found(10) is None


def kept(where: Task, rates: list[float]) -> list[bool]:
    """Whether each rate keeps all limits."""
    search = LoadSearch(partial(at_rate, where), in_process)
    try_together([search], [rates])
    return [search.points[rate].kept for rate in rates]


def setup(sla: dict[str, float], requests: Trace) -> Task:
    return whole_task(Deployment.of(samples.recipe(sla=sla), samples.fit()), requests)


@pytest.mark.slow
def test_the_whole_trace_keeps_the_limits_below_the_capacity_and_not_above():
    where = setup({"ttft_p99_s": 2.0}, trace(1000))
    found = rate_capacity(where, in_process)
    assert kept(where, [0.98 * found.load, ABOVE * found.load]) == [True, False]


@pytest.mark.slow
def test_the_ends_of_an_interval_keep_the_limits_with_times_at_the_ends_of_the_laws_range():
    requests = trace(1000)
    recipe = samples.recipe(sla={"ttft_p99_s": 2.0})
    [own] = variants_of(recipe, samples.fit())
    found = capacity_of(own, requests, in_process, concurrency=False).interval
    law = found.law
    assert law.fast < 1.0 < law.slow
    for factor, rate in ((law.slow, found.low_rps), (law.fast, found.high_rps)):
        where = whole_task(replace(own.deployment, slowdown=factor), requests)
        assert kept(where, [0.95 * rate, ABOVE * rate]) == [True, False]


@pytest.mark.slow
def test_the_interval_of_a_long_trace_follows_from_its_busiest_part(monkeypatch):
    requests = trace(2000)
    [own] = variants_of(samples.recipe(sla={"ttft_p99_s": 2.0}), samples.fit())
    whole = capacity_of(own, requests, in_process, concurrency=False)
    monkeypatch.setattr(capacity, "LONG", 1000)
    monkeypatch.setattr(capacity, "PART", 800)
    found = capacity_of(own, requests, in_process, concurrency=False)
    assert found.rate.load == pytest.approx(whole.rate.load, rel=0.05)
    assert found.interval.low_rps == pytest.approx(whole.interval.low_rps, rel=0.1)
    assert found.interval.high_rps == pytest.approx(whole.interval.high_rps, rel=0.1)
    assert found.interval.low_rps < found.rate.load < found.interval.high_rps


@pytest.mark.slow
def test_without_a_capacity_there_is_no_interval():
    recipe = samples.recipe(sla={"ttft_p99_s": 1e-6})
    [own] = variants_of(recipe, samples.fit())
    assert capacity_of(own, trace(100), in_process, concurrency=False).interval is None


def test_requests_that_arrive_at_once_have_no_rate_to_search():
    requests = trace(100)
    at_once = Trace(
        np.zeros(100), requests.prompt_tokens, requests.output_tokens, requests.max_tokens
    )
    where = setup({"ttft_p99_s": 2.0}, at_once)
    with pytest.raises(InputError):
        rate_capacity(where, in_process)


def test_a_short_trace_is_repeated_until_it_lasts_many_times_the_longest_wait():
    where = setup({"ttft_p99_s": 2.0, "mtpot_p99_s": 60.0}, trace(1001))
    for rate, repeats in ((5.0, 1), (50.0, 5), (500.0, 50)):
        [judged] = at_rate(where, rate).windows
        assert judged.trace.repeats == repeats
        assert mean_rate(judged.trace) == pytest.approx(rate)
        assert judged.trace.arrival_s[-1] >= LASTING * 2.0 * 0.99


def test_a_rate_that_takes_too_many_repeats_is_refused():
    where = setup({"ttft_p99_s": 2.0}, trace(1001))
    most_rps = most_rate_rps(where)
    assert most_rps == pytest.approx(MOST_REPEATED / (LASTING * 2.0))
    with pytest.raises(InputError):
        at_rate(where, 1.01 * most_rps)


def test_a_trace_of_sessions_lasts_many_times_as_long_as_one():
    requests = trace(400)
    previous = np.where(np.arange(400) % 2, np.arange(400) - 1, -1)
    think_s = np.where(previous < 0, 0.0, 60.0)
    where = setup({"ttft_p99_s": 2.0}, replace(requests, sessions=Sessions(previous, think_s)))
    assert judged_s(where) == pytest.approx(SESSIONS * 60.0)
    assert judged_s(setup({"ttft_p99_s": 2.0}, requests)) == pytest.approx(LASTING * 2.0)


def test_the_rate_of_a_busiest_part_is_the_whole_trace_s():
    gaps_s = np.concatenate([np.full(LONG, 1.0), np.full(LONG // 5, 0.1)])
    ones = np.ones(len(gaps_s), dtype=np.int64)
    whole = Trace(np.cumsum(gaps_s) - 1.0, ones, ones, 0 * ones)
    where = setup({"ttft_p99_s": 2.0}, whole)
    part = busiest_part(replace(where, windows=[Workload(whole)], own_rps=0.0))
    assert part is not None
    assert own_rate_rps(part) == pytest.approx(mean_rate(whole))
    [before] = part.windows
    assert mean_rate(before.trace) > 1.2 * mean_rate(whole)
    [judged] = at_rate(part, 2.0 * mean_rate(whole)).windows
    assert mean_rate(judged.trace) == pytest.approx(2.0 * mean_rate(before.trace)), (
        "twice the trace's rate"
    )


def test_a_trace_that_is_too_long_is_judged_on_its_busiest_part():
    calm = np.arange(0, 1000, 1.0)
    burst = np.arange(1000, 1010, 0.1)
    after = np.arange(1010, 2000, 1.0)
    arrival_s = np.concatenate([calm, burst, after])
    ones = np.ones(len(arrival_s), dtype=np.int64)
    long = Trace(arrival_s, ones, ones, 0 * ones)
    part = busiest(long, 500)
    assert len(part.trace) == 500
    assert part.start_s < 1000
    assert part.end_s > 1010
    whole = busiest(long, 5000)
    assert whole.trace is long
