"""The cache of a running batch: rows keep their values, the rest of the window is zero, and memory
is charged.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.engines.memory import ByteLedger
from toolkit.engines.rebatch_cache import RebatchCache, RowKV

pytestmark = pytest.mark.slow

SHAPES = [
    (torch.Size((1, 2, 1, 3)), torch.Size((1, 2, 1, 4))),
    (torch.Size((1, 1, 1, 2)), torch.Size((1, 1, 1, 2))),
]
BYTES = 4 * (2 * 3 + 2 * 4 + 2 + 2)


def make_cache(budget: int | None = None) -> RebatchCache:
    return RebatchCache(SHAPES, torch.empty(0), ByteLedger(budget))


def random_row(length: int) -> RowKV:
    return [(torch.randn(k[1], length, k[3]), torch.randn(v[1], length, v[3])) for k, v in SHAPES]


def put(cache: RebatchCache, rows: list[RowKV]) -> None:
    cache.make_room(cache.rows + len(rows), max(row[0][0].shape[1] for row in rows), ahead=1)
    for row in rows:
        cache.join(row)


def step(cache: RebatchCache) -> list[RowKV]:
    """Write one token for each row, as a pass of the model does; returns what it wrote."""
    cache.make_room(cache.rows, 0, ahead=1)
    new = [random_row(1) for _ in range(cache.rows)]
    for index in range(len(SHAPES)):
        keys, values = (torch.stack([row[index][part] for row in new]) for part in (0, 1))
        cache.update(keys, values, index)
    cache.advance()
    return new


def joined(row: RowKV, more: RowKV) -> RowKV:
    return [
        (torch.cat([a, c], dim=1), torch.cat([b, d], dim=1))
        for (a, b), (c, d) in zip(row, more, strict=True)
    ]


def lengths(cache: RebatchCache) -> list[int]:
    return [cache.read(index)[0][0].shape[1] for index in range(cache.rows)]


def check(cache: RebatchCache, expected: list[RowKV], ledger_bytes: int) -> None:
    """Each row has its values, and all else that attention could read is zero."""
    assert lengths(cache) == [row[0][0].shape[1] for row in expected]
    assert cache.width == max(lengths(cache), default=0)
    assert cache.tokens == sum(lengths(cache))
    assert ledger_bytes == cache.slab_tokens * BYTES
    for index, row in enumerate(expected):
        for (keys, values), (own_keys, own_values) in zip(row, cache.read(index), strict=True):
            assert torch.equal(keys, own_keys)
            assert torch.equal(values, own_values)
    window = slice(cache._window.start, cache._window.end)
    for layer in cache.layers:
        for index, length in enumerate(lengths(cache)):
            for slab in (layer.key_slab, layer.value_slab):
                assert not slab[index, :, window][:, : cache.width - length].any()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_rows_keep_their_values_through_any_moves(seed: int) -> None:
    rng = random.Random(seed)
    cache = make_cache()
    expected = []
    for _ in range(40):
        move = rng.random()
        if move < 0.2:
            new = [random_row(rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]
            put(cache, new)
            expected += new
        elif move < 0.4 and expected:
            gone = rng.sample(range(len(expected)), rng.randint(1, min(3, len(expected))))
            expected = [expected[index] for index in cache.leave(gone)]
        elif move < 0.5:
            cache.shrink() if rng.random() < 0.5 else cache.fit()
        elif expected:
            expected = [joined(row, more) for row, more in zip(expected, step(cache), strict=True)]
        check(cache, expected, cache._ledger.used_bytes)
    cache.clear()
    assert cache._ledger.used_bytes == cache.slab_tokens == 0


def test_columns_that_no_row_needs_are_released() -> None:
    cache = make_cache()
    put(cache, [random_row(30), random_row(4), random_row(9)])
    assert cache.padded_tokens == 90
    assert cache.leave([0]) == [2, 1]
    assert (cache.padded_tokens, lengths(cache)) == (18, [9, 4])


def test_at_the_edge_of_memory_a_slab_has_no_spare_columns() -> None:
    cache = make_cache(budget=3 * 21 * BYTES)
    put(cache, [random_row(20) for _ in range(3)])
    assert (cache.row_capacity, cache.columns) == (3, 21)
    step(cache)
    with pytest.raises(torch.OutOfMemoryError, match=r"3 rows.*22.*66"):
        step(cache)
    assert lengths(cache) == [21] * 3


def test_growth_bytes_are_the_least_that_make_room_takes() -> None:
    cache = make_cache()
    assert cache.growth_bytes(2, 10) == 2 * 11 * BYTES
    put(cache, [random_row(10), random_row(10)])
    assert cache.growth_bytes(0, 10) == 0
    held = cache.slab_tokens * BYTES
    assert (
        cache.growth_bytes(100, 10) == 102 * 11 * BYTES - held + held // 2
    )  # one of two layers is there twice
