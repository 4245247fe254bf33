"""Attention over the caches: it reads what it should, no more, and repeats no keys.

Flash attention needs a GPU: test_engines_gpu.py holds its values beside what is tested here.
"""

from typing import Any

import pytest
import torch
from rounds import RoundDriver, free_row, rebatch_engine
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.engines import attention
from toolkit.engines.attention import (
    FlashRows,
    GatheredRows,
    attend,
)
from toolkit.engines.slab import additive

pytestmark = pytest.mark.slow

Shapes = list[tuple[torch.Size, torch.Size, torch.Size | None]]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """The shapes of queries, keys and masks of all calls of SDPA."""
    shapes: Shapes = []

    def noted(query: Any, key: Any, value: Any, attn_mask: Any = None, **others: Any) -> Any:
        shapes.append((query.shape, key.shape, None if attn_mask is None else attn_mask.shape))
        assert key.shape[:3] == value.shape[:3]
        return scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **others)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    return shapes


def test_rows_attend_to_their_own_tokens_wherever_these_are() -> None:
    """All other places hold what is no number."""
    generator = torch.Generator().manual_seed(1)
    firsts = [30, 2, 21, 9]
    lengths = [4, 19, 1, 12]
    keys, values = (torch.full((40, 2, 16), torch.nan) for _ in range(2))
    for first, length in zip(firsts, lengths, strict=True):
        for each in (keys, values):
            each[first : first + length] = torch.randn(length, 2, 16, generator=generator)
    query = torch.randn(4, 8, 16, generator=generator)
    rows = GatheredRows(torch.tensor([*firsts, 0]), torch.tensor(lengths), 24, torch.float32)
    found = rows.attend(query, keys, values, 0.3)
    for index, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        own = slice(first, first + length)
        expected = scaled_dot_product_attention(
            query[index, :, None],
            keys[own].repeat_interleave(4, dim=1).transpose(0, 1),
            values[own].repeat_interleave(4, dim=1).transpose(0, 1),
            scale=0.3,
        )
        assert torch.allclose(found[index], expected[:, 0], atol=1e-6)


def test_a_step_of_fixed_shape_reads_no_more_than_its_rows(
    read: Shapes,
) -> None:
    """No mask has more than one query, and no key is repeated: the model has 4 heads, 2 of keys."""
    engine = rebatch_engine(cuda_graphs=True)
    driver = RoundDriver(engine, [free_row(60, 30), free_row(9, 30), free_row(20, 30)])
    driver.run(1, enter=(0, 1, 2))
    bound = 128
    assert engine._batch.cache.columns > bound
    read.clear()
    driver.run(10)
    layers = 2
    dim = 8
    assert len(read) == 10 * layers
    for query, keys, mask in read:
        assert query == (3, 2, 2, dim)
        assert keys == (3, 2, bound, dim)
        assert mask == (3, 1, 1, bound)


def test_flash_attention_is_called_as_pytorch_declares_it() -> None:
    """On the device "meta" operators only check their arguments and infer shapes."""
    query = torch.empty(3, 8, 64, device="meta", dtype=torch.bfloat16)
    keys, values = (torch.empty(900, 2, 64, device="meta", dtype=torch.bfloat16) for _ in range(2))
    firsts = torch.empty(4, device="meta", dtype=torch.int32)
    lengths = torch.empty(3, device="meta", dtype=torch.int32)
    rows = FlashRows(firsts, lengths, 512, torch.bfloat16)
    assert rows.attend(query, keys, values, 0.1).shape == (3, 8, 64)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_queries_that_share_a_key_need_no_repeated_keys(queries: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 4
    module.is_causal = False
    query = torch.randn(3, 8, queries, 16, generator=generator)
    key, value = (torch.randn(3, 2, 40, 16, generator=generator) for _ in range(2))
    visible = torch.arange(40)[None, :] >= torch.tensor([[0], [7], [30]])
    mask = additive(visible, torch.float32) if masked else None
    found, _ = attend(module, query, key, value, mask, scaling=0.25)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.25)
    assert found.shape == (3, queries, 8, 16)
    assert torch.allclose(found, expected, atol=1e-6)
