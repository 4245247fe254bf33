"""Routers: what each chooses, and what a balancer knows."""

import math
import random

import numpy as np
import pytest

from toolkit.errors import InputError
from toolkit.laws.passes import PassLaw
from toolkit.routing.admission import UNLIMITED, LatencyLimits, Overload
from toolkit.routing.balancer import Balancer
from toolkit.routing.replicas import PrefixIndex
from toolkit.routing.routers import ROUTERS, TARGETS, make_router
from toolkit.routing.types import (
    DEFAULT_EXPECTED_TOKENS,
    ReplicaReport,
    ReplicaTraits,
)
from toolkit.sched.policies.parameters import declared
from toolkit.sched.types import Request

# A pass takes 10 ms, 0.1 ms per new token and 1 us per cached token.
LAW = PassLaw({"pass": 0.01, "token": 1e-4, "cached": 1e-6})


def balancer(name: str, replicas: int = 3, limits=UNLIMITED, **parameters) -> Balancer:
    traits = [ReplicaTraits(4_000, 512, 8, LAW) for _ in range(replicas)]
    router = make_router(name, parameters)
    return Balancer(router, traits, block_tokens=10, limits=limits)


def request(name: str, prompt: int = 50, blocks: tuple[int, ...] = (), session: str = ""):
    return Request(name, 0.0, prompt, 100, blocks=blocks, session=session)


def index_of(replicas: int, *, capacity: int = 0, ttl_s: float = 0.0) -> PrefixIndex:
    index = PrefixIndex(ttl_s)
    for _ in range(replicas):
        index.add_replica(capacity)
    return index


def matched(index: PrefixIndex, replicas: int, blocks: tuple[int, ...], now_s: float) -> list[int]:
    return [index.matched(replica, blocks, now_s) for replica in range(replicas)]


def test_an_index_finds_each_replicas_leading_blocks():
    index = index_of(3)
    index.add(0, (1, 2, 3), 0.0)
    index.add(2, (1, 2, 9), 0.0)
    assert matched(index, 3, (1, 2, 3, 4), 0.0) == [3, 0, 2]
    assert matched(index, 3, (2,), 0.0) == [1, 0, 1]
    index.clear(0)
    assert matched(index, 3, (1, 2, 3), 0.0) == [0, 0, 2]


def test_an_index_forgets_the_least_recently_used():
    index = index_of(1, capacity=4)
    index.add(0, (1, 2, 3), 0.0)
    index.add(0, (7, 8), 1.0)
    assert index.matched(0, (1, 2, 3), 1.0) == 2
    index.add(0, (1,), 2.0)
    index.add(0, (9,), 3.0)
    assert index.matched(0, (1, 2), 3.0) == 1


def test_an_index_with_a_time_to_live_forgets_unused_blocks():
    index = index_of(2, ttl_s=10.0)
    index.add(0, (1, 2), 0.0)
    index.add(1, (1,), 8.0)
    assert matched(index, 2, (1, 2), 10.0) == [2, 1]
    assert matched(index, 2, (1, 2), 10.5) == [0, 1]


class PlainIndex:
    """Each replica's blocks with their times, the least recently used first."""

    def __init__(self, ttl_s: float, replicas: int, capacity: int) -> None:
        self.ttl_s = ttl_s or math.inf
        self.capacity = capacity
        self.used_s: list[dict[int, float]] = [{} for _ in range(replicas)]

    def matched(self, blocks: tuple[int, ...], now_s: float) -> list[int]:
        found = []
        for used_s in self.used_s:
            known = {block for block, at_s in used_s.items() if now_s - at_s <= self.ttl_s}
            missing = (count for count, block in enumerate(blocks) if block not in known)
            found.append(next(missing, len(blocks)))
        return found

    def add(self, index: int, blocks: tuple[int, ...], now_s: float) -> None:
        used_s = self.used_s[index]
        for block in reversed(blocks):  # so that a prompt's last blocks are forgotten first
            used_s.pop(block, None)
            used_s[block] = now_s
        while 0 < self.capacity < len(used_s):
            del used_s[next(iter(used_s))]


@pytest.mark.parametrize("ttl_s", [0.0, 2.0])
@pytest.mark.parametrize("capacity", [0, 9])
@pytest.mark.parametrize("replicas", [2, 70])
def test_forgetting_is_as_block_by_block(ttl_s, capacity, replicas):
    rng = random.Random(3)
    now_s = 0.0
    index = index_of(replicas, capacity=capacity, ttl_s=ttl_s)
    plain = PlainIndex(ttl_s, replicas, capacity)
    for _ in range(1_000):
        now_s += rng.random() * rng.choice((0.0, 0.01, 0.3))
        blocks = tuple(rng.randrange(2) + 10 * depth for depth in range(rng.randrange(5)))
        expected = plain.matched(blocks, now_s)
        replica = rng.randrange(replicas)
        if rng.random() < 0.5:  # all may be asked, or the chosen one alone
            assert matched(index, replicas, blocks, now_s) == expected
        assert index.matched(replica, blocks, now_s) == expected[replica]
        if rng.random() < 0.01:
            index.clear(replica)
            plain.used_s[replica].clear()
        index.add(replica, blocks, now_s)
        plain.add(replica, blocks, now_s)


def test_round_robin_skips_replicas_that_are_down():
    front = balancer("round-robin")
    front.change(1, is_up=False)
    assert [front.route(request(str(k)), 0.0) for k in range(4)] == [0, 2, 0, 2]


def test_a_barred_replica_is_better_than_none():
    front = balancer("least-requests", 2)
    assert front.route(request("a"), 0.0, excluded=[0]) == 1
    front.change(1, is_up=False)
    assert front.route(request("b"), 0.0, excluded=[0]) == 0
    front.change(0, is_up=False)
    assert front.route(request("c"), 0.0) is None


def test_least_requests_counts_what_has_not_ended():
    front = balancer("least-requests", 2)
    first = front.route(request("a"), 0.0)
    assert front.route(request("b"), 0.0) == 1 - first
    front.ended("a", 5)
    assert front.route(request("c"), 0.0) == first


def test_few_sessions_move_when_a_replica_leaves():
    front = balancer("session", 4)
    homes = [front.route(request(str(k), session=f"s{k}"), 0.0) for k in range(400)]
    assert [front.route(request(f"again {k}", session=f"s{k}"), 0.0) for k in range(400)] == homes
    assert np.bincount(homes).min() > 50
    front.change(3, is_up=False)
    moved = [front.route(request(f"third {k}", session=f"s{k}"), 0.0) for k in range(400)]
    assert all(new == old for new, old in zip(moved, homes, strict=True) if old != 3)


@pytest.mark.parametrize("name", ["llm-d", "dynamo", "sglang", "by-law"])
def test_a_prompt_goes_where_its_prefix_is(name):
    front = balancer(name, 4)
    blocks = tuple(range(100))
    home = front.route(request("a", 1_005, blocks), 0.0)
    front.first_token("a")
    front.ended("a", 10)
    for k in range(8):
        assert front.route(request(f"b{k}", 1_005, (*blocks[:99], 200 + k)), 1.0) == home
        front.first_token(f"b{k}")
        front.ended(f"b{k}", 10)


@pytest.mark.parametrize("name", ["llm-d", "dynamo", "sglang", "by-law"])
def test_a_full_queue_outweighs_a_short_prefix(name):
    front = balancer(name, 2, **({"abs_load": 8} if name == "sglang" else {}))
    blocks = tuple(range(5))
    home = front.route(request("a", 55, blocks), 0.0)
    for k in range(60):
        front.route(request(f"own {k}", 55, blocks), 0.0)
    counts = [replica.requests for replica in front.replicas]
    assert min(counts) >= 8, (home, counts)


def test_llm_d_weighs_match_queue_and_cache():
    front = balancer("llm-d", 2, prefix=3.0, queue=2.0, kv=2.0)
    front.route(request("a", 100, tuple(range(10))), 0.0)
    home = next(r.index for r in front.replicas if r.requests)
    # a full match gives 3; an empty queue and an empty cache of the other give at most 2 + 2
    front.report(home, ReplicaReport(9, 0.4))
    front.report(1 - home, ReplicaReport(0, 0.0))
    assert front.route(request("b", 100, tuple(range(10))), 0.0) == home  # 3 + 1.2 > 2 + 2
    front.report(home, ReplicaReport(9, 0.6))
    assert front.route(request("c", 100, tuple(range(10))), 0.0) == 1 - home  # 3.8 < 4


def test_dynamo_chooses_as_its_own_formula_in_blocks():
    """Prefill load scale P and overlap credit C are the weights P C + 1, P and 1."""
    rng = random.Random(4)
    scale, credit, size, own = 2.0, 0.75, 16, 8
    router = make_router("dynamo", {"prefix": scale * credit + 1.0, "queue": scale})
    front = Balancer(router, [ReplicaTraits(100_000)] * 4, block_tokens=size)
    for k in range(400):
        blocks = tuple(rng.randrange(3) + 10 * depth for depth in range(own))
        matched = [front._index.matched(one.index, blocks, 0.0) for one in front.replicas]
        costs = []
        for replica, cached in zip(front.replicas, matched, strict=True):
            prefill = (replica.prefill_tokens + own * size) / size - credit * cached
            costs.append(scale * prefill + replica.blocks + own - cached)
        home = front.route(Request(str(k), 0.0, own * size, 9, blocks=blocks), 0.0)
        assert costs[home] == min(costs)
        for number in range(max(k - 30, 0), k):
            if rng.random() < 0.05:
                front.first_token(str(number))
            if rng.random() < 0.03:
                front.ended(str(number), 9)


def test_sglang_follows_a_match_only_if_it_is_long_and_the_load_is_balanced():
    front = balancer("sglang", 2, abs_load=4, rel_load=1.5)
    blocks = tuple(range(10))
    home = front.route(request("a", 100, blocks), 0.0)
    assert front.route(request("b", 100, (*blocks[:4], *range(20, 26))), 0.0) == home  # 0.4 > 0.3
    assert front.route(request("c", 100, (*blocks[:3], *range(30, 37))), 0.0) == 1 - home
    homes = [front.route(request(f"d{k}", 100, blocks), 0.0) for k in range(6)]
    # at the fifth, 6 and 1: more than 4 requests and 1.5 times apart
    assert homes == [home] * 4 + [1 - home, home]


def test_by_law_prefers_the_replica_on_which_rows_lose_least():
    front = balancer("by-law", 2)
    busy = front.route(request("a", 50), 0.0)
    front.first_token("a")
    assert front.route(request("b", 400), 0.0) == 1 - busy


def test_by_law_expects_a_first_token_with_the_pass_that_ends_its_prompt():
    front = balancer("by-law", 1)
    front.route(request("a"), 0.0)
    front.first_token("a")
    for name, new_tokens in (("b", 100), ("c", 200)):  # c's prompt is in the pass of b's
        front.route(request(name, 100), 0.0)
        half_of_its_output = DEFAULT_EXPECTED_TOKENS / 2
        expected_s = LAW.pass_s(1, 50 + half_of_its_output, 1, new_tokens, 0)
        assert front.replicas[0].sent[name].first_s == pytest.approx(expected_s)


def test_a_router_of_others_in_plain_python_reads_what_ours_read():
    class Foreign:
        """The fewest rows, blocks and reported requests, less what is cached."""

        name = "foreign"
        reads_reports = True
        index_blocks = 0
        index_ttl_s = 0.0

        def choose(self, request, view):
            seen.append([view.matched(replica) for replica in view.every])
            costs = (
                replica.requests + replica.blocks + replica.waiting + replica.kv_usage
                - view.cached_tokens(request, replica)
                for replica in view.replicas
            )  # fmt: skip
            return view.least(list(costs))

    seen: list[list[int]] = []
    front = Balancer(Foreign(), [ReplicaTraits(4_000)] * 3, block_tokens=10)
    front.report(0, ReplicaReport(5, 0.5))
    front.report(1, ReplicaReport(4, 0.5))
    assert front.route(request("a", 35, (1, 2, 3)), 0.0) == 2
    assert front.route(request("b", 35, (1, 2, 9)), 0.0) == 2
    assert seen == [[0, 0, 0], [0, 0, 2]]
    with pytest.raises(ValueError, match=r"2 costs.*3 replicas"):
        front._view.least([1, 2])


def test_unknown_routers_and_parameters_are_named():
    with pytest.raises(InputError, match="'llmd'"):
        make_router("llmd", {})
    with pytest.raises(InputError, match=r"'llm-d'.*'prefx'"):
        make_router("llm-d", {"prefx": 1.0})
    with pytest.raises(InputError, match=r"threshold.*2.*0.*1"):
        make_router("sglang", {"threshold": 2})


def check_counts(front: Balancer) -> None:
    """What replicas keep up to date is what their requests come to."""
    for replica in front.replicas:
        sent = list(replica.sent.values())
        prefilling = [each for each in sent if not each.has_token]
        assert replica.prefills == len(prefilling)
        assert replica.prefill_tokens == sum(each.new_tokens for each in prefilling)
        assert replica.prefill_cached == sum(each.cached_tokens for each in prefilling)
        assert replica.prompt_tokens == sum(each.prompt_tokens for each in sent)
        assert replica.decode_tokens == sum(each.prompt_tokens for each in sent if each.has_token)
        assert replica.blocks == len({block for each in sent for block in each.request.blocks})
        assert replica.in_time == sum(each.after_stalls == replica._stalls for each in sent)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [*((name, {}) for name in ROUTERS), ("by-law", {"ttft_s": 0.05, "gap_s": 0.02})],
)
def test_counts_are_those_of_the_requests(name, parameters):
    rng = random.Random(1)
    front = balancer(name, 4, **parameters)
    alive = list[str]()
    for k in range(300):
        check_counts(front)
        now_s = k / 10
        blocks = tuple(rng.randrange(4) + 10 * depth for depth in range(rng.randrange(6)))
        if front.route(request(str(k), 60, blocks, f"s{k % 7}"), now_s) is not None:
            alive.append(str(k))
        if k % 3 == 0:
            front.first_token(rng.choice(alive))
        if len(alive) > 20:
            front.ended(alive.pop(rng.randrange(len(alive))), rng.choice((-1, 20)))
        if k % 10 == 0:
            report = ReplicaReport(rng.randrange(5), rng.random())
            front.report(rng.randrange(4), report)
        if k % 40 == 0:
            front.change(rng.randrange(4), is_up=rng.random() < 0.7, is_fresh=rng.random() < 0.5)
    for name_left in alive:
        front.ended(name_left, 5)
    check_counts(front)
    assert not any(replica.requests for replica in front.replicas)


def test_every_parameter_has_a_search_range_that_is_valid():
    for name, router in ROUTERS.items():
        for parameter, limits in declared(router).items():
            if parameter in TARGETS.values():  # the recipe's targets are not searched
                continue
            assert limits.search is not None
            for value in limits.search:
                whole = int(value) if parameter == "abs_load" else float(value)
                make_router(name, {parameter: whole})


@pytest.mark.parametrize("name", ["round-robin", "by-law"])
def test_admission_refuses_what_is_late_everywhere(name: str):
    limits = LatencyLimits(ttft_s=0.2)
    front = balancer(name, 2, limits=limits)
    assert front.route(request("long", 3_000), 0.0) in (0, 1)  # late even alone: no wait helps
    front.ended("long", 1)
    placed = [front.route(request(f"r{k}", 600), 0.0) for k in range(6)]
    late = [found for found in placed if isinstance(found, Overload)]
    assert len(late) == 2
    assert {found for found in placed if not isinstance(found, Overload)} == {0, 1}
    assert all(found.predicted.ttft_s > 0.18 and 0 < found.wait_s < 0.2 for found in late)
    assert front.route(request("moved", 600), 0.0, accepted=True) in (
        0,
        1,
    )  # accepted before: never refused
    small = front.route(request("small", 10), 1.0)  # the prompts there have been computed since
    assert small in (0, 1)


def test_a_late_request_goes_where_it_is_in_time():
    limits = LatencyLimits(ttft_s=0.2)
    front = balancer("session", 2, limits=limits)
    homes = [front.route(request(f"r{k}", 600, session="one"), 0.0) for k in range(4)]
    assert homes[0] == homes[1] != homes[2] == homes[3]
    assert isinstance(front.route(request("r4", 600, session="one"), 0.0), Overload)


def test_admission_by_the_whole_requests_time():
    front = balancer("round-robin", 1, limits=LatencyLimits(e2e_s=2.5))
    found = [front.route(request(f"r{k}", 400), 0.0) for k in range(12)]
    late = [each for each in found if isinstance(each, Overload)]
    assert late
    assert found[0] == 0
    assert late[0].predicted.e2e_s > 0.9 * 2.5


def test_admission_learns_what_the_law_leaves_out():
    """Each first token comes 60 ms later than forecast, so fewer prompts fit before a target."""

    def admitted(extra_s: float) -> int:
        front = balancer("round-robin", 1, limits=LatencyLimits(ttft_s=0.4))
        now_s = 0.0
        for k in range(64):
            now_s = 10.0 * k
            assert front.route(request(f"a{k}", 600), now_s) == 0
            expected_s = front.replicas[0].sent[f"a{k}"].first_s
            front.first_token(f"a{k}", expected_s + extra_s)
            front.ended(f"a{k}", 100)
        placed = [front.route(request(f"b{k}", 600), now_s + 10) for k in range(12)]
        return sum(not isinstance(found, Overload) for found in placed)

    assert admitted(0.06) < admitted(0.0) < 12
