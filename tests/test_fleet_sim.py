"""A fleet: workers of unequal speed and memory behind one scheduler, each by its own laws."""

from dataclasses import replace
from itertools import zip_longest

import msgspec
import numpy as np
import pytest
from around import Around
from hypothesis import given
from hypothesis import strategies as st
from said import says
from test_sim_contract import CASES, HOST_TOKENS, LAW, trace_of
from test_sim_prefix import LAW as PAGED_LAW
from test_sim_prefix import world as paged_world
from test_sim_replicas import made_up

from toolkit.estimators.laws import LinearSwap, WithOverhead
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.pipeline import PassTimes
from toolkit.routing.balancer import Balancer, RoutingLogHeader, read_routes, replay_routes
from toolkit.routing.routers import RoundRobinRouter, make_router
from toolkit.routing.types import ReplicaTraits, RoutedRequest, weighed
from toolkit.sched.policies import POLICIES, make_policy
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.queues import by_pace, requests_per_s
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import BatchResult, Job, Request, Worker
from toolkit.sched.view import LengthHistory, View
from toolkit.sched.waiting import RETURN_S
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.replicas import Routing
from toolkit.sim.world import World, fleet
from toolkit.traces.types import Trace

SMALL = 180
LARGE = 400  # tokens; a request has up to 180
SLOWER = 4.0
requests = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 100), st.integers(1, 80), st.integers(1, 80)),
    min_size=1,
    max_size=40,
)


def world(workers: int, capacity: int = LARGE, slowdown: float = 1.0, joining=None) -> World:
    law = WithOverhead(LAW, 0.0, slowdown)
    link = LinearSwap(2e-3, 4e4, 8e4)
    return World(
        law, ZetaMemory(capacity), workers, 80, swap=link, host_tokens=HOST_TOKENS, joining=joining
    )


def unequal(large: int = 1, small: int = 2, joining=None) -> World:
    return fleet([world(large, joining=joining), world(small, SMALL, SLOWER, joining)])


def crowd(count: int = 120, longest: int = 60, seconds: float = 1.0) -> Trace:
    rng = np.random.default_rng(3)
    arrival = np.sort(rng.uniform(0, seconds, count))
    return Trace(
        arrival,
        rng.integers(1, 100, count),
        rng.integers(1, longest, count),
        np.full(count, longest),
    )


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("joining", [None, "embed"])
def test_a_fleet_of_one_kind_is_the_plain_world(case, joining):
    name, parameters = CASES[case]
    policy = make_policy(name, parameters)
    plain = replace(world(3, joining=joining), future_memory=True)
    written = fleet([replace(plain, workers=1), replace(plain, workers=2)])
    expected = simulate(crowd(), policy, plain)
    actual = simulate(crowd(), policy, written)
    assert actual.metrics({}) == pytest.approx(expected.metrics({}), rel=1e-12)
    assert np.array_equal(actual.served.finish_s, expected.served.finish_s)


class Watch(Around):
    """Checks the batches of a static policy against the memory of the workers they are for."""

    def plan(self, view, now_s):
        decision = super().plan(view, now_s)
        for batch in decision.batches:
            worker = view.workers[batch.worker]
            longest = max(job.limit_tokens for job in batch.jobs)
            assert longest <= worker.longest
            ends = min(batch.input_length + batch.steps, longest)
            assert batch.size == 1 or batch.size * ends <= worker.capacity_tokens
            law = worker.latency
            steps = batch.steps - worker.latency.prefill_emits_token
            by_own = law.prefill_s(batch.size, batch.input_length) + law.decode_s(
                batch.size, batch.input_length, steps
            )
            assert batch.estimated_s == pytest.approx(by_own)
        return decision


STATIC = [case for case, (name, _) in CASES.items() if not POLICIES[name].continuous]


@given(rows=requests, case=st.sampled_from(STATIC))
def test_no_batch_exceeds_its_worker_s_memory(rows, case):
    name, parameters = CASES[case]
    result = simulate(trace_of(rows), Watch(make_policy(name, parameters)), unequal())
    assert result.served.ok.all()


@given(
    rows=requests,
    case=st.sampled_from(sorted(set(CASES) - set(STATIC) - {"aggressive, overfilling"})),
    joining=st.sampled_from([None, "embed", "shape"]),
)
def test_rounds_stay_within_the_memory_of_each_worker(rows, case, joining):
    name, parameters = CASES[case]
    result = simulate(trace_of(rows), make_policy(name, parameters), unequal(joining=joining))
    assert result.served.ok.all()
    metrics = result.metrics({})
    assert metrics["peak_memory_percent"] <= 100.0
    assert metrics["oom_percent"] == 0.0


class Counting(Watch):
    """Counts the rows that each worker is given."""

    def __init__(self, policy):
        super().__init__(policy)
        self.continuous = policy.continuous
        self.rows = {}

    def plan(self, view, now_s):
        decision = self._policy.plan(view, now_s)
        for batch in decision.batches:
            self.rows[batch.worker] = self.rows.get(batch.worker, 0) + batch.size
        return decision


@pytest.mark.slow
@pytest.mark.parametrize("case", ["slice", "slice, in turn", "sequence", "conservative", "baton",
"fcfs",
                                  "aggressive, least-loaded", "conservative, max-min",
                                  "past-future, future-memory"])  # fmt: skip
def test_the_faster_one_gets_more(case):
    name, parameters = CASES[case]
    counting = Counting(make_policy(name, parameters))
    simulate(crowd(300), counting, unequal(1, 1))
    assert counting.rows[0] > 1.5 * counting.rows[1]


def test_large_requests_never_go_to_a_small_worker():
    trace = Trace(np.zeros(6), np.full(6, 200), np.full(6, 20), np.full(6, 20))
    for name in ("slice", "sequence", "past-future", "slice-continuous", "mlfq"):
        result = simulate(trace, make_policy(name, {}), unequal())
        assert result.served.ok.all()
        assert result.counters["utilisation_worker_1_percent"] == 0.0


def test_what_fits_nowhere_is_refused_with_the_most_that_fits():
    trace = Trace(np.zeros(1), np.full(1, LARGE), np.full(1, 9), np.full(1, 9))
    result = simulate(trace, make_policy("slice", {}), unequal())
    (refusal,) = result.refusals
    assert says(refusal.reason, "409", "400")


@pytest.mark.slow
def test_knowing_each_workers_law_is_better_than_one_for_all():
    known = unequal(1, 1)
    slow = known.others[0]
    believed = fleet(
        [replace(known, believed=slow.latency, others=()), slow]
    )  # the fast one is thought slow
    policy = make_policy("slice", {"slice_tokens": 16, "min_interval_s": 0.05})
    better, worse = (
        simulate(crowd(300), policy, one).metrics({})["e2e_mean_s"] for one in (known, believed)
    )
    assert better < worse


def test_turns_are_in_proportion_to_speed():
    fast, slow = unequal(1, 1).scheduled()
    pace = [requests_per_s(worker, 50, 20) for worker in (fast, slow)]
    jobs = [Job(Request(str(k), 0.0, 50, 20), k, 50) for k in range(1000)]
    both = np.array([0, 1])
    share = sum(by_pace(job, [fast, slow], both, 20, 256) == 0 for job in jobs) / len(jobs)
    assert share == pytest.approx(pace[0] / sum(pace), abs=0.005)


def scheduler(policy: str = "slice", **parameters) -> Scheduler:
    return Scheduler(make_policy(policy, parameters), unequal(1, 1).scheduled())


LONG = Request("long", 0.0, 300, 20)
SHORT = Request("short", 0.0, 30, 20)


def crash(of: Scheduler, worker: int, now_s: float = 1.0) -> None:
    """What a driver says of a worker that died."""
    batch = of.workers[worker].batch
    if batch is not None:
        nothing = [0] * batch.size
        of.complete(
            BatchResult(batch.batch_id, worker, nothing, [False] * batch.size, "crashed"), now_s
        )
    of.worker_lost(worker, now_s)


def running(of: Scheduler) -> dict[str, int]:
    """The worker of each running request."""
    return {job.request_id: w.index for w in of.workers if w.batch for job in w.batch.jobs}


def test_other_kinds_take_over_what_they_can_hold():
    tested = scheduler()
    for request in (SHORT, LONG):
        tested.submit(request, 0.0)
        tested.tick(0.0)
    crash(tested, 0)
    tested.tick(1.0)
    assert running(tested) == {"short": 1}
    tested.worker_ready(0, 2.0)
    tested.tick(2.0)
    assert running(tested) == {"short": 1, "long": 0}


@pytest.mark.parametrize("before", [True, False])
def test_a_request_is_refused_if_its_kind_stays_away(before):
    tested = scheduler()
    if before:
        tested.submit(LONG, 0.0)
        tested.tick(0.0)
    crash(tested, 0)
    if not before:
        tested.submit(LONG, 1.0)
    assert tested.wake_at_s == 1.0 + RETURN_S
    assert tested.tick(RETURN_S) == []
    assert tested.take_refusals() == []
    assert tested.waiting_jobs == 1
    tested.tick(1.0 + RETURN_S)
    (refusal,) = tested.take_refusals()
    assert says(refusal.reason, "320", "300 s")
    assert tested.jobs == 0


def test_rounds_of_a_lost_kind_continue_elsewhere_or_wait():
    tested = scheduler("conservative")
    for request in (LONG, Request("also short", 0.0, 40, 20)):
        tested.submit(request, 0.0)
    tested.tick(0.0)
    lost = 0
    crash_round = [job.request_id for job in tested.workers[lost].running.jobs]
    tested.worker_lost(lost, 1.0)
    tested.workers[lost].batch = None
    tested.tick(1.0)
    assert "long" in crash_round
    assert {job.request_id for job in tested.workers[1].running.jobs} == {"also short"}
    assert tested.waiting_jobs == 1
    tested.worker_ready(lost, 2.0)
    tested.tick(2.0)
    assert {job.request_id for job in tested.workers[lost].running.jobs} == {"long"}


def test_a_request_cancelled_without_its_kind_is_removed():
    tested = scheduler()
    crash(tested, 0)
    tested.submit(LONG, 1.0)
    tested.cancel("long", 1.5)
    assert tested.jobs == tested.waiting_jobs == 0


def test_a_view_groups_the_living_by_kind_the_larger_last():
    history = LengthHistory(1)
    rng = np.random.default_rng(0)
    view = View([], unequal(2, 1).scheduled(), 0.0, history, rng)
    for worker, longest in zip(view.workers, (LARGE, LARGE, SMALL), strict=True):
        worker.longest = longest
    view.workers[0].alive = False
    view.workers_changed()
    assert [[worker.index for worker in kind] for kind in view.kinds] == [[2], [1]]
    assert not View([], world(3).scheduled(), 0.0, history, rng).mixed


def test_an_idle_slow_worker_waits_if_a_fast_one_is_sooner():
    fast = WithOverhead(LAW, 0.0, 1.0)
    slow = WithOverhead(LAW, 0.0, 50.0)
    workers = [Worker(0, fast, ZetaMemory(LARGE)), Worker(1, slow, ZetaMemory(LARGE))]
    tested = Scheduler(make_policy("slice", {"min_interval_s": 0.001}), workers)
    for k in range(4):
        tested.submit(Request(str(k), 0.0, 20, 20), 0.0)
        tested.tick(0.0)
    assert workers[1].batch is None


def servers(*kinds: tuple[int, float, int], flags: tuple[int, ...] = (), **more) -> World:
    """Paged engines: how many of a kind, how many times as slow, and blocks; the rows that kinds
    after the first run at once.
    """
    worlds = [
        replace(
            paged_world(PagedEngine(PAGED_LAW.times(slower), blocks, 4), count),
            flags=VllmPolicy(max_num_seqs=rows, max_num_batched_tokens=64) if rows else None,
            **more,
        )
        for (count, slower, blocks), rows in zip_longest(kinds, (0, *flags), fillvalue=0)
    ]
    return fleet(worlds)


SERVED = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=64)


@pytest.mark.parametrize("name", ["round-robin", "least-tokens", "prefix", "by-law"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_fleet_of_servers_of_one_kind_is_its_replicas(name, shares):
    trace = made_up(1, gap_s=0.01)
    trace = trace if shares else replace(trace, shared=None)
    routing = Routing.of_front(make_router(name, {}))
    plain = replace(servers((3, 1.0, 30)), routing=routing, token_gaps=True)
    parted = replace(servers((1, 1.0, 30), (2, 1.0, 30)), routing=routing, token_gaps=True)
    expected = simulate(trace, SERVED, plain)
    actual = simulate(trace, SERVED, parted)
    for column in ("first_token_s", "finish_s", "max_gap_s", "ok"):
        assert np.array_equal(getattr(actual.served, column), getattr(expected.served, column))
    assert actual.metrics({}) == pytest.approx(expected.metrics({}), rel=1e-12)
    assert expected.counters["evicted_percent"] > 0
    assert sum(len(part.served) for part in actual.kinds) == len(trace)


@pytest.mark.slow
def test_the_law_gives_the_slow_one_less_and_beats_turns():
    trace = made_up(2, 300, gap_s=0.006)
    unlike = servers((1, 1.0, 60), (1, 4.0, 60))
    found = {
        name: simulate(trace, SERVED, replace(unlike, routing=Routing(make_router(name, {}))))
        for name in ("round-robin", "least-requests", "least-tokens", "vllm-dp", "by-law")
    }
    shares = {name: len(result.kinds[1].served) / len(trace) for name, result in found.items()}
    assert max(shares["by-law"], shares["round-robin"], shares["least-tokens"]) < 0.35, shares
    e2e = {name: result.metrics({})["e2e_mean_s"] for name, result in found.items()}
    assert e2e["by-law"] < min(each for name, each in e2e.items() if name != "by-law"), e2e
    alike = simulate(trace, SERVED, replace(unlike, routing=Routing(Alike())))
    assert 0.49 < len(alike.kinds[1].served) / len(trace) < 0.51
    assert e2e["round-robin"] < 0.7 * alike.metrics({})["e2e_mean_s"]


class Alike(RoundRobinRouter):
    """Turns that know no weights."""

    def choose(self, request, view):
        return view.replicas[view.routed % len(view.replicas)].index


def test_each_kind_has_its_own_memory_flags_and_cache():
    """Rows at once are those of each kind's flags; what is cached on one is not on the other."""
    trace = Trace(np.zeros(8), np.full(8, 20), np.full(8, 30), np.full(8, 30))
    unlike = servers((1, 1.0, 60), (1, 1.0, 120), flags=(2,))
    found = simulate(trace, SERVED, replace(unlike, routing=Routing(Alike())))
    assert [len(part.served) for part in found.kinds] == [4, 4]
    rows = [part.counters["batch_size_mean"] for part in found.kinds]
    assert rows[0] > 3.0
    assert rows[1] <= 2.0
    used = [part.counters["peak_memory_percent"] for part in found.kinds]
    assert used[1] < 0.3 * used[0]  # half of the rows in twice the memory
    assert found.kinds[1].served.finish_s.max() > found.kinds[0].served.finish_s.max()


def test_a_request_that_one_kind_can_never_serve_is_refused():
    trace = Trace(np.zeros(2), np.array([20, 150]), np.full(2, 9), np.full(2, 9))
    found = simulate(trace, SERVED, servers((1, 1.0, 60), (1, 1.0, 30)))
    (refused,) = found.refusals
    assert says(refused.reason, "158", "120")


def test_the_law_weighs_some_replicas_of_each_kind():
    traits = weighed(
        [
            ReplicaTraits(10_000, 2048, 64, PassTimes(PAGED_LAW.times(slower)), kind)
            for kind, slower in (("fast", 1.0), ("slow", 3.0))
        ]
    )
    assert traits[1].weight == pytest.approx(1 / 3)
    balancer = Balancer(make_router("by-law", {}), [*traits[:1] * 2, *traits[1:] * 30])
    homes = [balancer.route(RoutedRequest(str(k), 500, 50), 0.0) for k in range(4)]
    assert set(homes[:2]) == {0, 1}


def test_weights_are_sizes_of_caches_where_a_kind_has_no_law():
    law = PassTimes(PAGED_LAW)
    found = weighed([ReplicaTraits(1000, law=law), ReplicaTraits(3000)])
    assert [each.weight for each in found] == [1.0, 3.0]


@pytest.mark.parametrize("name", ["round-robin", "least-requests", "session-hash", "by-law"])
def test_the_log_of_a_fleet_replays_with_each_kinds_law(name):
    laws = {"fast": PassTimes(PAGED_LAW), "slow": PassTimes(PAGED_LAW.times(3.0))}
    kinds = weighed([ReplicaTraits(10_000, 64, 6, law, kind) for kind, law in laws.items()])
    events = []
    live = Balancer(make_router(name, {}), [], sink=events.append)
    for each in kinds:
        live.change(live.add(each), is_up=True)
    rng = np.random.default_rng(1)
    for k in range(60):
        live.route(RoutedRequest(str(k), int(rng.integers(5, 200)), 50, (), f"s{k % 7}"), 0.1 * k)
        live.first_token(str(k - 2), 0.1 * k)
        live.ended(str(k - 5), 20)
    lines = [msgspec.json.encode(event) + b"\n" for event in events]
    header = RoutingLogHeader(name, {}, 16, 0)
    again, read = read_routes([msgspec.json.encode(header) + b"\n", *lines])
    assert list(replay_routes(read, again, laws)) == []
    if name == "by-law":
        assert list(replay_routes(read, Balancer(make_router(name, {}), []), laws["fast"])) != []
