"""Attention over the caches: it reads what it should, no more, and repeats no keys.

Flash attention needs a GPU: test_engines_gpu.py holds it beside what is tested here.
"""

import random
from typing import Any

import pytest
import tiny
import torch
from rounds import RoundDriver, alone, free_row, go_on, random_rows, rebatch_engine
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from toolkit.engines import attention, transformers_engine
from toolkit.engines.attention import (
    OUR_ATTENTION,
    FlashRows,
    GatheredRows,
    attend,
    choose_rows,
    use_our_attention,
)
from toolkit.engines.slab import additive
from toolkit.engines.transformers_engine import TransformersEngine

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


def plain_flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries_from: torch.Tensor,
    keys_from: torch.Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float | None,
    seqused_k: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """What FlashAttention computes for one query per row, and what it demands of its arguments."""
    assert (most_queries, dropout, causal, debug) == (1, 0.0, False, False)
    assert queries_from.tolist() == list(range(len(query) + 1))
    assert len(keys_from) == len(query) + 1 == len(seqused_k) + 1
    for numbers in (queries_from, keys_from, seqused_k):
        assert numbers.dtype == torch.int32
        assert numbers.is_contiguous()
    for each in (query, keys, values):
        assert each.ndim == 3
        assert each.stride(-1) == 1
    assert 0 < int(seqused_k.min()) <= int(seqused_k.max()) <= most_keys
    assert int((keys_from[:-1] + seqused_k).max()) <= len(keys)
    rows = GatheredRows(keys_from, seqused_k, most_keys, query.dtype)
    return (rows.attend(query, keys, values, scale),)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_flash_attention_changes_no_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def noted(*arguments: Any, **named: Any) -> tuple[torch.Tensor, ...]:
        calls.append(len(arguments[0]))
        return plain_flash(*arguments, **named)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", noted)
    monkeypatch.setattr(transformers_engine, "choose_rows", lambda *_: FlashRows)
    rows = random_rows(4, 14)
    plain = rebatch_engine(kind)
    expected = alone(plain, rows)
    driver = RoundDriver(rebatch_engine(kind, cuda_graphs=True), rows)
    for _ in range(15):
        driver.at_random(random.Random(5))
    assert driver.finish() == expected
    spec = tiny.engine_spec(kind, cuda_graphs=True)
    slices = TransformersEngine(tiny.model_spec(kind), spec, tiny.CPU)
    assert list(slices.run_slice(rows, 1000, go_on).tokens) == expected
    assert max(calls) == 16  # rows of a slice, rounded


def test_the_device_decides_how_rows_attend() -> None:
    shape = torch.Size([1, 2, 1, 64])
    for dtype in (torch.float32, torch.bfloat16):
        assert choose_rows(torch.empty(0, dtype=dtype), 8, [(shape, shape)]) is GatheredRows


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


@pytest.mark.slow
def test_tokens_stay_the_same_with_packed_queries() -> None:
    packed = rebatch_engine("qwen3")
    plain = rebatch_engine("qwen3")
    use_our_attention(packed._model)
    assert packed._model.config._attn_implementation == OUR_ATTENTION
    rows = random_rows(2, 10)
    got = [RoundDriver(engine, rows).finish() for engine in (packed, plain)]
    assert got[0] == got[1]
