"""A part of what `benchmarks/serving/fuzz_front.py` does to a front."""

import asyncio

import pytest

from benchmarks.serving.fuzz_front import (
    EVENTS,
    INTERIM,
    cut_heads,
    flaps,
    floods,
    hostile_replicas,
    odd_bodies,
)

pytestmark = pytest.mark.slow


def test_odd_bodies_get_no_5xx():
    found = asyncio.run(odd_bodies(300, 3))
    assert found.complaints == []
    assert found.statuses["200"] > 20
    assert found.statuses["400"] > 20


def test_cut_heads_with_upgrade_reach_no_other_client():
    found = asyncio.run(cut_heads(16))
    assert found.complaints == []
    assert found.statuses == {"closed": 16}


def test_answers_without_end_reach_no_other_request():
    found = asyncio.run(floods((*INTERIM, *EVENTS[3:5]), 2))
    assert found.complaints == []


def test_hostile_replicas_reach_no_other_request():
    found = asyncio.run(hostile_replicas(75, 3))
    assert found.complaints == []
    assert found.statuses["200"] > 20


def test_streams_through_flapping_replicas_are_undisturbed():
    found = asyncio.run(flaps(20, 20, 3))
    assert found.complaints == []
    assert found.statuses.keys() == {"200"}
