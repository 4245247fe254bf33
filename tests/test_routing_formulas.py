"""What routers keep between requests, and compiled, chooses as plain formulas over plain state."""

import random

import plain_routers
import pytest
from plain_routers import PLAIN, PlainBalancer

from toolkit.routing import routers
from toolkit.routing.balancer import Balancer
from toolkit.routing.replicas import PrefixIndex
from toolkit.routing.routers import ROUTERS, make_router
from toolkit.routing.types import ReplicaReport, ReplicaTraits, RoutedRequest


class Law:
    """Seconds that depend on all that a law may depend on."""

    behind_s = 1e-6

    def pass_s(self, decodes, decode_cached, chunks, new_tokens, attended):
        seconds = 0.01 + 1e-4 * (decodes + new_tokens) + 1e-6 * decode_cached
        return seconds + 1e-3 * chunks + 1e-9 * attended


CASES = [
    *[(name, {}) for name in ROUTERS],
    ("session", {"load_factor": 1.1}),
    ("llm-d", {"prefix": 0.5, "queue": 1.7, "kv": 0.3}),
    ("dynamo", {"prefix": 3.2, "queue": 3.1}),
    ("sglang", {"abs_load": 2, "rel_load": 1.1, "threshold": 0.5}),
    ("by-law", {"ttft_s": 0.3, "gap_s": 0.06}),
]


def crowd(front, replicas: int):
    """The choices of random traffic: tokens and ends in any order, reports, outages, bars."""
    rng = random.Random(replicas)
    alive = []
    chosen = []
    now_s = 0.0
    most = 6 * replicas
    for k in range(400):
        now_s += rng.choice((0.0, 0.01, 0.4)) + (150.0 if rng.random() < 0.003 else 0.0)
        blocks = tuple(rng.randrange(3) + 10 * depth for depth in range(rng.randrange(9)))
        session = f"s{rng.randrange(9)}" if rng.random() < 0.5 else ""
        prompt = max(10 * len(blocks), 1) + rng.randrange(200)
        request = RoutedRequest(str(k), prompt, 100, blocks, session)
        barred = rng.sample(range(replicas), min(2, replicas)) if rng.random() < 0.1 else ()
        chosen.append(front.route(request, now_s, barred))
        alive.append(str(k))
        for _ in range(rng.randrange(3)):
            front.first_token(rng.choice(alive))
        while alive and (len(alive) > most or rng.random() < 0.4):
            front.ended(alive.pop(rng.randrange(len(alive))), rng.choice((-1, 20, 90, 350)))
        if rng.random() < 0.5:
            report = ReplicaReport(rng.randrange(5), rng.random(), now_s)
            front.report(rng.randrange(replicas), report)
        if rng.random() < 0.01:
            front.change(rng.randrange(replicas), is_up=False)
        if rng.random() < 0.03:
            front.change(rng.randrange(replicas), is_up=True, is_fresh=rng.random() < 0.5)
    return chosen


@pytest.mark.parametrize("replicas", [1, 3, 20, 70])
@pytest.mark.parametrize(
    ("name", "parameters"), CASES, ids=[f"{name} {len(given)}" for name, given in CASES]
)
def test_choices_are_those_of_the_plain_formula(name, parameters, replicas, monkeypatch) -> None:
    monkeypatch.setattr(routers, "RING_POINTS", 8)
    monkeypatch.setattr(plain_routers, "RING_POINTS", 8)
    traits = [ReplicaTraits(4_000, 512, 8, Law())] * replicas
    router = make_router(name, parameters)
    found = crowd(Balancer(router, traits, block_tokens=10), replicas)
    plain = crowd(PlainBalancer(router, traits, 10), replicas)
    assert found == plain
    assert len(set(found) - {None}) >= min(replicas, 3)


def test_every_router_has_its_plain_formula() -> None:
    assert PLAIN.keys() == ROUTERS.keys()


@pytest.mark.parametrize("ttl_s", [0.0, 2.0])
@pytest.mark.parametrize("capacity", [0, 9])
@pytest.mark.parametrize("replicas", [2, 70])
def test_forgetting_is_as_block_by_block(ttl_s, capacity, replicas):
    rng = random.Random(3)
    now_s = 0.0
    index = PrefixIndex(ttl_s)
    plain = plain_routers.PrefixIndex(ttl_s)
    for _ in range(replicas):
        index.add_replica(capacity)
        plain.add_replica(capacity)
    for _ in range(4_000):
        now_s += rng.random() * rng.choice((0.0, 0.01, 0.3))
        blocks = tuple(rng.randrange(2) + 10 * depth for depth in range(rng.randrange(5)))
        expected = plain.matched(blocks, now_s)
        replica = rng.randrange(replicas)
        if rng.random() < 0.5:  # either may be asked first
            assert index.matched(blocks, now_s) == expected
        assert index.matched_by(replica, blocks, now_s) == expected[replica]
        if rng.random() < 0.01:
            index.clear(replica)
            plain.clear(replica)
        index.add(replica, blocks, now_s)
        plain.add(replica, blocks, now_s)
