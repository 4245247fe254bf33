"""Tests that need a GPU: copies on their own stream, device memory that runs out, timings. Skipped
without a GPU.

Weights drawn on a GPU differ from weights drawn on a CPU, so the compared engines share the CPU's.
"""

import random
from collections.abc import Iterator

import pytest
import tiny
import torch
from rounds import (
    RUNS,
    SWAPPED,
    WAITS,
    RoundDriver,
    alone,
    free_row,
    go_on,
    kept_bytes,
    random_rows,
    rebatch_engine,
    step_logits,
)
from slices import run_slice

from toolkit.engines.attention import FlashRows, GatheredRows, TokenRows, choose_rows
from toolkit.engines.protocol import EnginePass, OutOfMemory, StepOutput
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.engines.transformers_engine import TransformersEngine
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.profiling.grid import GridPoint, SliceShape
from toolkit.profiling.process import LocalTimedEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"
    ),
]

GPU = HardwareSpec(device="cuda", name="any GPU")
ROWS = random_rows(0, 24)
# 64 KiB of KV cache per token, 32 MiB per row: some dozens of rows fill a small share of a GPU
LARGE = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
}
SHARE = 0.03  # of the GPU's memory


def on_gpu(cpu: RebatchEngine, **changes: object) -> RebatchEngine:
    """The same tiny model on the GPU."""
    engine = RebatchEngine(tiny.model_spec(), tiny.engine_spec("rebatch", **changes), GPU)
    engine._model.load_state_dict(cpu._model.state_dict())
    return engine


@pytest.fixture
def small_gpu() -> Iterator[EngineSpec]:
    """An engine that may use `SHARE` of the memory; the allocator's limit is removed afterwards."""
    torch.cuda.empty_cache()
    yield EngineSpec(name="rebatch", gpu_memory_utilization=SHARE)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def large_spec() -> ModelSpec:
    return ModelSpec(
        source="random", config=LARGE, dtype="float32", tokenizer="bytes", max_model_len=512
    )


@pytest.mark.parametrize(
    ("chunk_tokens", "changes"),
    [
        (0, {"cuda_graphs": True}),
        (0, {"cuda_graphs": False}),
        (0, {"joining": "shape"}),
        (9, {"cuda_graphs": True}),
    ],
    ids=["embed", "no graphs", "shape", "chunks"],
)
def test_rows_that_come_go_and_are_swapped_get_the_cpu_s_tokens(
    chunk_tokens: int, changes: dict[str, object]
) -> None:
    cpu = rebatch_engine(**changes)
    driver = RoundDriver(on_gpu(cpu, **changes), ROWS, chunk_tokens=chunk_tokens)
    rng = random.Random(5)
    for _ in range(25):
        driver.at_random(rng)
    assert driver.finish() == alone(cpu, ROWS)
    assert driver.engine.ledger.used_bytes == kept_bytes(driver.engine)
    assert driver.engine.host_ledger.used_bytes == 0
    fixed = driver.engine._batch.fixed
    assert fixed is None or fixed.captures  # no capture has failed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (8, 8, 64), (4, 2, 16)])
def test_flash_attention_reads_each_row_s_own_tokens(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    """All other places hold what is no number. A captured step reads the lengths of its replay."""
    like = torch.empty(0, dtype=dtype, device="cuda")
    shape = torch.Size([1, kv_heads, 1, dim])
    assert choose_rows(like, heads, [(shape, shape)]) is FlashRows
    keys, values = (like.new_full((4000, kv_heads, dim), torch.nan) for _ in range(2))
    firsts = torch.tensor([3000, 7, 1500, 0], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([700, 1300, 1], dtype=torch.int32, device="cuda")
    for first, length in zip(firsts.tolist(), lengths.tolist(), strict=False):
        for each in (keys, values):
            each[first : first + length] = torch.randn(length, kv_heads, dim, device="cuda")
    query = torch.randn(3, heads, dim, device="cuda").to(dtype)

    def attended(kind: type[TokenRows]) -> torch.Tensor:
        return kind(firsts, lengths, 1536, dtype).attend(query, keys, values, 0.1)

    attended(FlashRows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attended(FlashRows)
    for shorter in (0, 300):
        lengths[:2] -= shorter
        graph.replay()
        expected = attended(GatheredRows)
        for found in (attended(FlashRows), captured):
            assert (found - expected).norm() / expected.norm() < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_decode_in_captured_steps(dtype: str) -> None:
    """In float32 the tokens are the CPU's; in half precision rounding may turn one."""
    spec = tiny.model_spec("qwen3", dtype=dtype)
    cpu = TransformersEngine(spec, tiny.engine_spec(), tiny.CPU)
    wanted = True if dtype == "float32" else None  # where FlashAttention serves it is the default
    gpu = TransformersEngine(spec, tiny.engine_spec(cuda_graphs=wanted), GPU)
    gpu._model.load_state_dict(cpu._model.state_dict())
    assert gpu._fixed is not None
    for _ in range(3):
        for size in (1, 5, 18):
            found, expected = (run_slice(each, ROWS[:size], 30, go_on) for each in (gpu, cpu))
            assert dtype != "float32" or found == expected
    assert gpu._fixed.captures
    assert gpu._fixed.graphs
    assert gpu._fixed._rows_kind is (FlashRows if dtype == "bfloat16" else GatheredRows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"cuda_graphs": False}],
    ids=["graphs", "slab"],
)
def test_half_precision_logits_are_float32_s_but_for_rounding(
    dtype: str, changes: dict[str, object]
) -> None:
    """In float32 the kernels of cuDNN and of flash attention are never chosen."""
    cpu = rebatch_engine("qwen3", dtype=dtype)
    spec = tiny.model_spec("qwen3", dtype=dtype)
    half = RebatchEngine(spec, tiny.engine_spec("rebatch", **changes), GPU)
    half._model.load_state_dict(cpu._model.state_dict())
    whole = rebatch_engine("qwen3")
    whole._model.load_state_dict(cpu._model.state_dict())
    lengths = [5, 60, 33, 12]
    expected = step_logits(whole, lengths)
    for _ in range(3):  # the last time from graphs
        found = step_logits(half, lengths)
        assert (found - expected).norm() / expected.norm() < 0.02


def test_the_ledger_has_a_budget_and_no_cudnn_attention() -> None:
    spec = EngineSpec(name="rebatch")
    engine = RebatchEngine(tiny.model_spec(), spec, GPU)
    assert engine.ledger.budget_bytes == engine.facts.kv_budget_bytes
    assert engine.host_ledger.budget_bytes == 4 << 30
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_transfers_in_parallel_with_computation_move_every_value(overlap: bool) -> None:
    """Steps that reuse the device's memory follow at once each swap out, and a step each swap
    in.
    """
    cpu = rebatch_engine()
    driver = RoundDriver(on_gpu(cpu), ROWS)
    while driver.having(WAITS):
        driver.run(2, enter=driver.having(WAITS)[:4])
        runs = driver.having(RUNS)[:2]
        driver.run(3, swap_out=runs, overlap=overlap)
        back = [number for number in runs if number in driver.having(SWAPPED)]
        driver.run(1, swap_in=back, resume=() if overlap else back, overlap=overlap)
    assert driver.finish() == alone(cpu, ROWS)


def test_slices_survive_running_out_of_device_memory(small_gpu: EngineSpec) -> None:
    engine = TransformersEngine(
        large_spec(), small_gpu.model_copy(update={"name": "transformers"}), GPU
    )
    row = free_row(300, 8)
    before = run_slice(engine, [row], 8, go_on)
    too_many = 2 * engine.facts.capacity_tokens // 512 + 1
    with pytest.raises(OutOfMemory):
        run_slice(engine, [free_row(400, 112)] * too_many, 112, go_on)
    assert run_slice(engine, [row], 8, go_on) == before


def test_running_out_of_device_memory_spares_swapped_rows(
    small_gpu: EngineSpec,
) -> None:
    engine = RebatchEngine(large_spec(), small_gpu, GPU)
    row = free_row(300, 40)
    alone = run_slice(engine, [row], 40, go_on).tokens[0]
    got: list[int] = []

    def keep(step: StepOutput) -> bool:
        got.extend(
            token for number, token in zip(step.rows, step.tokens, strict=True) if number == 0
        )
        return True

    engine.run(EnginePass(steps=4, enter=(row,), numbers=(0,)), keep)
    engine.run(EnginePass(steps=0, swap_out=(0,)), keep)
    count = 2 * engine.facts.capacity_tokens // 512 + 1
    many = tuple(free_row(400, 112, first=number) for number in range(count))
    numbers = tuple(range(1, count + 1))
    assert engine.run(EnginePass(steps=112, enter=many, numbers=numbers), go_on).dropped
    engine.run(EnginePass(steps=0, evict=numbers), go_on)
    engine.run(EnginePass(steps=40, swap_in=(0,), resume=(0,)), keep)
    assert tuple(got) == alone


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_points_of_a_profile_are_timed_on_the_device(dtype: str) -> None:
    spec = tiny.model_spec(dtype=dtype)
    bench = LocalTimedEngine(TransformersEngine(spec, tiny.engine_spec(), GPU), "wall")
    for kind in ("prefill", "decode"):
        assert min(bench.time(GridPoint(kind, 4, 64), 1)) > 0
    assert bench.facts.device == torch.cuda.get_device_name()
    rows = bench.facts.capacity_tokens // 96
    assert bench.fits(SliceShape(1, 64, 8))
    assert not bench.fits(SliceShape(2 * rows, 64, 32))
