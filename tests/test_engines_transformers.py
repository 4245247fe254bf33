"""What is the transformers engine's own: the slab beside transformers' cache, rows past the
positions, the ledger.
"""

import pytest
import tiny
import torch
from transformers.cache_utils import DynamicCache

from toolkit.engines.loading import load_model
from toolkit.engines.memory import ByteLedger, at_the_seam
from toolkit.engines.protocol import OutOfMemory, Row, SamplingParams
from toolkit.engines.slab import PaddedBatch, SlabCache
from toolkit.engines.transformers_engine import TransformersEngine

ARCHITECTURES = ["llama", "qwen3", "gpt2", "opt"]
FREE = SamplingParams(ignore_eos=True)


def engine_of(kind: str, budget_mib: float = 16.0) -> TransformersEngine:
    return TransformersEngine(
        tiny.model_spec(kind), tiny.engine_spec(kind, budget_mib=budget_mib), tiny.CPU
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_slab_gives_the_same_bits_as_the_dynamic_cache(kind: str) -> None:
    model = load_model(tiny.model_spec(kind), tiny.CPU)
    rows = [[7] * 20, list(range(33)), [5, 6]]
    slab = PaddedBatch(rows, 40, tiny.MAX_MODEL_LEN - 1, SlabCache(2, 40), torch.device("cpu"))
    dynamic = DynamicCache(config=model.config)
    tokens = slab.input_ids
    with torch.inference_mode():
        for column in range(33, 40):
            logits = [
                model(
                    input_ids=tokens,
                    attention_mask=slab.mask[:, :column],
                    position_ids=slab.positions[:, column - tokens.shape[1] : column],
                    past_key_values=cache,
                    logits_to_keep=1,
                ).logits
                for cache in (slab.cache, dynamic)
            ]
            assert torch.equal(logits[0], logits[1])
            tokens = logits[0].argmax(dim=-1)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_batch_may_grow_wider_than_the_model_has_positions(kind: str) -> None:
    engine = engine_of(kind)
    long = Row("long", tuple(range(90)), 0, 6, FREE)
    short = Row("short", (1, 2, 3), 0, 90, FREE)
    together = engine.run_slice(
        [long, short], 90, lambda step: True
    )  # 90 + 90 columns, and 96 positions
    alone = [engine.run_slice([row], 90, lambda step: True).tokens[0] for row in (long, short)]
    assert list(together.tokens) == alone


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_kv_bytes_per_token_are_what_the_config_says(kind: str) -> None:
    heads, dim = {"llama": (2, 8), "qwen3": (2, 16), "gpt2": (4, 8), "opt": (4, 8)}[kind]
    assert engine_of(kind).facts.kv_bytes_per_token == 2 * 2 * heads * dim * 4


def test_the_ledger_is_charged_before_memory_is_taken_and_its_peak_stays_below_the_budget() -> None:
    engine = engine_of("llama", budget_mib=1.0)
    facts = engine.facts
    ok = largest_batch(engine, 64, 16)
    engine.run_slice(
        [Row(str(index), (1,) * 64, 0, 16, FREE) for index in range(ok)], 16, lambda step: True
    )
    with pytest.raises(OutOfMemory, match=r"do not fit"):
        engine.run_slice(
            [Row(str(index), (1,) * 64, 0, 16, FREE) for index in range(ok + 1)],
            16,
            lambda step: True,
        )
    assert engine.ledger.used_bytes == 0
    assert engine.ledger.peak_bytes == engine.slice_bytes(ok, 64, 16) <= facts.kv_budget_bytes
    assert (
        0.1 < ok * (64 + 16) / facts.capacity_tokens < 1.0
    )  # zeta of SCLS Eq. 9: the prefill's workspace takes its share


def largest_batch(engine: TransformersEngine, length: int, steps: int) -> int:
    budget = engine.facts.kv_budget_bytes
    return max(size for size in range(1, 200) if engine.slice_bytes(size, length, steps) <= budget)


@pytest.mark.parametrize(
    "row", [Row("empty", (), 0, 5), Row("long", (1,) * 90, 0, 7), Row("later", (1,) * 90, 3, 10)]
)
def test_a_row_that_cannot_be_is_a_bug_and_not_a_guess(row: Row) -> None:
    with pytest.raises(ValueError, match=f"row {row.request_id}: .* at most 96"):
        engine_of("llama").run_slice([row], 5, lambda step: True)


def test_a_ledger_without_a_budget_only_counts() -> None:
    ledger = ByteLedger(None)
    with ledger.reserve(10), ledger.reserve(1 << 50):
        assert ledger.used_bytes == (1 << 50) + 10
    assert (ledger.used_bytes, ledger.peak_bytes) == (0, (1 << 50) + 10)


def test_the_cpu_allocator_running_out_counts_as_out_of_memory() -> None:
    with pytest.raises(OutOfMemory) as raised:
        at_the_seam(lambda: torch.empty(1 << 60))
    assert raised.value.__context__ is None  # it would keep the batch's tensors alive


def test_other_errors_stay_loud() -> None:
    with pytest.raises(RuntimeError, match="shape"):
        at_the_seam(lambda: torch.zeros(2, 3).view(7))
