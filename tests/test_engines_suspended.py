"""Host memory for swapped caches: an arena that is filled and emptied in any order, and rows that
go through it.
"""

import random

import pytest
import torch
from rounds import RoundDriver, alone, random_rows, rebatch_engine

from toolkit.engines.suspended import ALIGNMENT_BYTES, HostArena

pytestmark = pytest.mark.slow

PIECE = 1 << 16


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.engines.suspended.PIECE_BYTES", PIECE)


def taken_bytes(arena: HostArena) -> int:
    """Bytes of all blocks, with their alignment."""
    return sum(end - start for _, start, end in arena._taken.values())


def test_blocks_keep_their_values_and_pieces_are_used_again() -> None:
    arena = HostArena(4 * PIECE)
    rng = random.Random(0)
    held: list[tuple[torch.Tensor, float]] = []
    for number in range(2000):
        if held and (rng.random() < 0.5 or taken_bytes(arena) > 3 * PIECE):
            block, value = held.pop(rng.randrange(len(held)))
            assert torch.equal(block, torch.full_like(block, value))
            arena.give(block)
        else:
            block = arena.take(rng.randint(1, 4000), torch.float32).fill_(number)
            assert block.data_ptr() % 4 == 0
            held.append((block, float(number)))
    for block, value in held:
        assert torch.equal(block, torch.full_like(block, value))
        arena.give(block)
    assert arena.held_bytes <= 4 * PIECE
    assert taken_bytes(arena) == 0
    # All free places have grown together: a block of a whole piece fits again.
    whole = arena.take(PIECE, torch.uint8)
    assert taken_bytes(arena) == PIECE
    arena.give(whole)


def test_what_exceeds_the_bound_is_ordinary_memory() -> None:
    arena = HostArena(3 * PIECE // 2)
    blocks = [arena.take(PIECE, torch.uint8), arena.take(PIECE // 2, torch.uint8)]
    assert arena.held_bytes == taken_bytes(arena) == 3 * PIECE // 2
    beyond = arena.take(ALIGNMENT_BYTES, torch.uint8)
    assert taken_bytes(arena) == 3 * PIECE // 2
    arena.give(beyond)
    for block in blocks:
        arena.give(block)
    assert arena.take(0, torch.uint8).numel() == 0
    assert taken_bytes(arena) == 0


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = torch.empty

    def refuse(*sizes: object, pin_memory: bool = False, **others: object) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("pinning is not permitted here\nand more")
        return real(*sizes, **others)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", refuse)
    arena = HostArena(None)
    for _ in range(3):
        assert arena.take(PIECE, torch.uint8).shape == (PIECE,)
    (record,) = caplog.records
    assert record.getMessage().endswith("pinning is not permitted here")


@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 20], ids=["many pieces", "one piece"])
def test_swapped_rows_get_their_own_tokens(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.engines.suspended.PIECE_BYTES", piece_bytes)
    engine = rebatch_engine()
    arena = HostArena(1 << 16)
    engine._suspended._arena = arena
    rows = random_rows(0, 24)
    driver = RoundDriver(engine, rows)
    rng = random.Random(5)
    taken = []
    for _ in range(25):
        driver.at_random(rng)
        taken.append(taken_bytes(arena))
    assert driver.finish() == alone(engine, rows)
    assert max(taken) > 0
    assert taken_bytes(arena) == 0
