"""The transformers engine: its slab compared with transformers' cache, batches wider than the
positions, and the ledger.
"""

import pytest
import tiny
import torch
from rounds import alone, free_row, go_on
from slices import run_slice, slice_bytes
from transformers.cache_utils import DynamicCache

from toolkit.engines.devices import choose_attention_kernels
from toolkit.engines.loading import load_model
from toolkit.engines.memory import ByteLedger, kv_budget_bytes, on_device
from toolkit.engines.protocol import OutOfMemory, Row
from toolkit.engines.slab import MASK_ALIGNMENT, PaddedBatch, additive
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.errors import EngineError

pytestmark = pytest.mark.slow

ARCHITECTURES = ["llama", "qwen3", "gpt2", "opt"]


def engine_of(kind: str, budget_mib: float = 16.0) -> TransformersEngine:
    return TransformersEngine(
        tiny.model_spec(kind), tiny.engine_spec(kind, budget_mib=budget_mib), tiny.CPU
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_slab_gives_the_same_bits_as_the_dynamic_cache(kind: str) -> None:
    model = load_model(tiny.model_spec(kind), tiny.CPU)
    rows = [[7] * 20, list(range(33)), [5, 6]]
    slab = PaddedBatch(rows, 40, tiny.MAX_MODEL_LEN - 1, 2, torch.device("cpu"))
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
def test_a_batch_may_be_wider_than_the_model_s_positions(kind: str) -> None:
    engine = engine_of(kind)
    rows = [free_row(90, 6), free_row(3, 90)]
    together = run_slice(engine, rows, 90, go_on)  # 90 + 90 columns, and 96 positions
    assert list(together.tokens) == alone(engine, rows)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_kv_bytes_per_token_agree_with_the_config(kind: str) -> None:
    heads, dim = {"llama": (2, 8), "qwen3": (2, 16), "gpt2": (4, 8), "opt": (4, 8)}[kind]
    assert engine_of(kind).facts.kv_bytes_per_token == 2 * 2 * heads * dim * 4


def test_the_ledger_s_peak_stays_below_the_budget() -> None:
    engine = engine_of("llama", budget_mib=1.0)
    facts = engine.facts
    ok = largest_batch(engine, 64, 16)
    run_slice(engine, [free_row(64, 16)] * ok, 16, go_on)
    with pytest.raises(OutOfMemory, match=r"do not fit"):
        run_slice(engine, [free_row(64, 16)] * (ok + 1), 16, go_on)
    assert engine.ledger.used_bytes == 0
    assert engine.ledger.peak_bytes == slice_bytes(engine, ok, 64, 16) <= facts.kv_budget_bytes
    assert (
        0.1 < ok * (64 + 16) / facts.capacity_tokens < 1.0
    )  # zeta of SCLS Eq. 9: the prefill's workspace takes its share


def largest_batch(engine: TransformersEngine, length: int, steps: int) -> int:
    budget = engine.facts.kv_budget_bytes
    return max(size for size in range(1, 200) if slice_bytes(engine, size, length, steps) <= budget)


@pytest.mark.parametrize(
    "row", [Row("empty", (), 0, 5), Row("long", (1,) * 90, 0, 7), Row("later", (1,) * 90, 3, 10)]
)
def test_an_impossible_row_raises(row: Row) -> None:
    with pytest.raises(ValueError, match=f"row {row.request_id}: .* at most 96"):
        run_slice(engine_of("llama"), [row], 5, go_on)


def test_a_ledger_without_a_budget_only_counts() -> None:
    ledger = ByteLedger(None)
    with ledger.reserve(10), ledger.reserve(1 << 50):
        assert ledger.used_bytes == (1 << 50) + 10
    assert (ledger.used_bytes, ledger.peak_bytes) == (0, (1 << 50) + 10)


def test_the_cpu_allocator_running_out_counts_as_out_of_memory() -> None:
    with pytest.raises(OutOfMemory) as raised:
        on_device(lambda: torch.empty(1 << 60))()
    assert raised.value.__context__ is None  # it would keep the batch's tensors alive
    with pytest.raises(RuntimeError, match="shape"):
        on_device(lambda: torch.zeros(2, 3).view(7))()


@pytest.mark.parametrize(("length", "timed"), [(40, [38, 39, 40]), (3, [1, 2, 3]), (1, [1, 2])])
def test_timed_decode_steps_grow_as_in_serving(
    length: int, timed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is not timed. Were they all of one length, kernels that are planned for each length
    would look fast.
    """
    engine = engine_of("llama")
    lengths: list[int] = []
    decode = engine._decode

    def noted(parts: list[PaddedBatch], tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(parts[0].cache.get_seq_length())
        return decode(parts, tokens)

    monkeypatch.setattr(engine, "_decode", noted)
    clock = iter([1.0, 7.0])
    assert engine.time_decode(3, length, lambda: next(clock)) == 6.0 / (len(timed) - 1)
    assert lengths == timed


@pytest.mark.parametrize("columns", [1, 7, 8, 61])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_additive_mask_hides_the_invisible_and_is_aligned(
    columns: int, dtype: torch.dtype
) -> None:
    visible = torch.rand(3, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
    mask = additive(visible, dtype)
    assert torch.equal(mask[:, 0, 0] == 0, visible)
    assert torch.equal(mask[:, 0, 0] == -torch.inf, ~visible)
    assert mask.dtype == dtype
    assert all(stride % MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1])


def test_cudnn_s_attention_is_left_out_on_cuda_only() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)  # torch keeps it for all tests of a process
    engine_of("llama")
    assert torch.backends.cuda.cudnn_sdp_enabled()
    try:
        choose_attention_kernels()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_the_budget_of_a_gpu_leaves_room_for_what_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (120 * gib, 140 * gib))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * gib)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *_: None)
    spec = tiny.engine_spec("rebatch")
    device = torch.device("cuda")
    whole = spec.model_copy(update={"kv_cache_memory_mib": None, "gpu_memory_utilization": 0.5})
    assert kv_budget_bytes(whole, device) == 53 * gib
    small = whole.model_copy(update={"kv_cache_memory_mib": 2048.0})
    assert kv_budget_bytes(small, device) == 2 * gib
    full = whole.model_copy(update={"gpu_memory_utilization": 0.1})
    with pytest.raises(EngineError, match=r"122880.*143360.*engine\.gpu_memory_utilization.*0\.1"):
        kv_budget_bytes(full, device)
