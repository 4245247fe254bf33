"""The cache in which every row has its own block: what it charges, and which models it refuses."""

import pytest
import tiny
import torch
from rounds import free_row, rebatch_engine

from toolkit.engines.memory import ByteLedger
from toolkit.engines.protocol import Round
from toolkit.engines.row_cache import GROWTH, RowCache
from toolkit.engines.sampling import Sampler
from toolkit.engines.slab import KVShape
from toolkit.errors import EngineError, InputError

SHAPE: KVShape = (torch.Size([1, 2, 1, 4]), torch.Size([1, 2, 1, 4]))
BYTES = 2 * 2 * 2 * 4 * 4  # per token: two layers, keys and values, two heads of four float32


def row(length: int, layers: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(2, length, 4), torch.randn(2, length, 4)) for _ in range(layers)]


def test_blocks_are_charged_in_steps_of_their_growth_and_freed() -> None:
    ledger = ByteLedger(None)
    cache = RowCache([SHAPE, SHAPE], torch.empty(0), ledger)
    for length in (1, GROWTH - 1, GROWTH):
        cache.join(row(length))
    assert (cache.tokens, cache.padded_tokens) == (2 * GROWTH, 4 * GROWTH)
    assert ledger.used_bytes == cache.padded_tokens * BYTES
    cache.advance()
    cache.make_room(3, 0, ahead=1)  # the second row has 32 tokens now, and no room for another
    assert ledger.used_bytes == 5 * GROWTH * BYTES
    assert cache.leave([0, 2]) == [1]
    assert ledger.used_bytes == 2 * GROWTH * BYTES
    cache.clear()
    assert ledger.used_bytes == 0


def test_a_block_that_grows_keeps_its_content() -> None:
    cache = RowCache([SHAPE, SHAPE], torch.empty(0), ByteLedger(None))
    before = row(GROWTH)
    cache.join(before)
    cache.advance()
    cache.make_room(1, 0, ahead=GROWTH)
    for (keys, values), (old_keys, old_values) in zip(cache.read(0), before, strict=True):
        assert torch.equal(keys[:, :GROWTH], old_keys)
        assert torch.equal(values[:, :GROWTH], old_values)


@pytest.mark.slow
def test_rows_that_do_not_fit_are_dropped_and_the_others_go_on() -> None:
    engine = rebatch_engine(kv_layout="rows", budget_mib=0.5)
    many = tuple(free_row(40, 30) for _ in range(64))
    output = engine.run_round(Round(steps=30, enter=many, numbers=tuple(range(64))), lambda _: True)
    joined = [number for number, _ in output.joined if number not in output.dropped]
    assert 0 < len(joined) < 64
    assert len(joined) + len(output.dropped) == 64
    ended: set[int] = set()
    while left := set(joined) - ended:
        output = engine.run_round(Round(steps=30), lambda _: True)
        assert output.ended or output.dropped
        ended.update(output.ended, output.dropped)
        assert len(output.dropped) < len(left), (
            "blocks grow, and not all of them may have room for it"
        )
    assert engine.ledger.used_bytes == 0


def test_shaping_needs_a_slab() -> None:
    with pytest.raises(InputError, match=r"engine\.kv_layout.*rows"):
        rebatch_engine(kv_layout="rows", joining="shape")


def test_layers_of_different_shapes_are_refused() -> None:
    other = (torch.Size([1, 4, 1, 4]), torch.Size([1, 4, 1, 4]))
    with pytest.raises(EngineError) as caught:
        RowCache([SHAPE, other], torch.empty(0), ByteLedger(None))
    assert "engine.kv_layout" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_draws_are_the_first_of_the_largest_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 300).to(dtype)
    logits[2, 7] = logits[2, 200] = 9.0
    sampler = Sampler([free_row(3, 4)] * 5, tiny.EOS_IDS, 300, torch.device("cpu"))
    assert sampler.draw(logits, 0).tolist() == logits.argmax(dim=-1).tolist()
