"""Others' runs: a made-up checkout with a run that took as long as its own operators say."""

import csv
import hashlib
import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.public import llmservingsim
from toolkit.errors import InputError
from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.estimators.steps import StepLaw
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.world import World
from toolkit.traces.types import Trace

GPU = "GPU"
MODEL = "Tiny"
LAYERS = 2
BLOCKS = 40
ROWS = 8
TOKENS = 64
US = 1e-6
# of one layer or of the head, in microseconds
LINEAR = 50.0
LINEAR_TOKEN = 2.0
HEAD = 100.0
HEAD_ROW = 5.0
CACHED = 0.5
BESIDE = 1.0
ATTENDED = 0.01
BEHIND = 0.25
LAW = StepLaw(
    base_s=US * (LAYERS * LINEAR + HEAD),
    row_s=US * HEAD_ROW,
    prefill_s=0.0,
    cached_s=US * LAYERS * CACHED,
    attended_s=US * LAYERS * ATTENDED,
    token_s=(US * LAYERS * LINEAR_TOKEN,),
    behind_s=US * LAYERS * BEHIND,
    beside_s=US * LAYERS * BESIDE,
)


def write_table(path: Path, columns: str, rows: Iterable[Iterable[object]]) -> None:
    with path.open("w") as file:
        writer = csv.writer(file)
        writer.writerow(columns.split(","))
        writer.writerows(rows)


def attention_us(chunk: int, behind: int, cached: float) -> float:
    """Of one layer, with `cached` tokens of all decodes."""
    read_us = (BESIDE if chunk else CACHED) * cached
    return read_us + ATTENDED * chunk * (behind + chunk / 2) + BEHIND * behind


def write_profile(data: Path) -> None:
    tables = data / "profiler/perf" / GPU / MODEL / "bf16/tp1"
    tables.mkdir(parents=True)
    about = {"architecture": "tiny", "measurement_iterations": 3}
    (tables.parent / "meta.yaml").write_text(json.dumps(about))
    (data / "profiler/models").mkdir()
    parts = {"pre_attn": ["linear", "attention"], "head": ["lm_head"]}
    (data / "profiler/models/tiny.yaml").write_text(json.dumps({"sequence": parts}))
    (data / "configs/model").mkdir(parents=True)
    (data / f"configs/model/{MODEL}.json").write_text(json.dumps({"num_hidden_layers": LAYERS}))
    sizes = (1, 16, TOKENS)
    linear = [("linear", size, LINEAR + LINEAR_TOKEN * size) for size in sizes]
    write_table(tables / "dense.csv", "layer,tokens,time_us", linear)
    head = [("lm_head", size, HEAD + HEAD_ROW * size) for size in (1, ROWS)]
    write_table(tables / "per_sequence.csv", "layer,sequences,time_us", head)
    grid = list(product((0, 8, 32), (0, 16, 48), (0, 1, 2, 6), (16, 64)))
    equal = [
        (chunk, behind, decodes, cached, attention_us(chunk, behind, decodes * cached))
        for chunk, behind, decodes, cached in grid
        if (chunk or decodes) and (chunk or not behind)
    ]
    columns = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    write_table(tables / "attention.csv", columns, equal)
    unequal = [
        (decodes, chunk, behind, mean, mean + 8, 3 * attention_us(chunk, behind, decodes * mean))
        for chunk, behind, decodes, mean in grid
        if decodes > 1 and (chunk or not behind)
    ]
    write_table(tables / "skew.csv", "n,pc,kp,kv_mean,kv_big,t_skew_us", unequal)


def write_run(data: Path, **kwargs: object) -> None:
    """A run of 30 requests with lengths up to 60 + 40, as long as `LAW` says."""
    rng = np.random.default_rng(0)
    count = 30
    arrival_s = np.sort(rng.uniform(0.0, 0.05, count))
    arrival_s[0] = 0.0
    prompts = rng.integers(4, 60, count)
    outputs = rng.integers(1, 40, count)
    trace = Trace(arrival_s, prompts, outputs, outputs)
    engine = PagedEngine(LAW, BLOCKS - 1, 16, ahead=True)
    world = World(unit_step(), ZetaMemory(engine.capacity_tokens, 1.0), 1, 1, paged=engine)
    served = simulate(trace, VllmPolicy(ROWS, TOKENS), world).served
    workload = data / "workload.jsonl"
    lines = [
        json.dumps({"input_tok_ids": [number] * int(prompt)})
        for number, prompt in enumerate(prompts)
    ]
    workload.write_text("\n".join(lines))
    folder = data / "bench/examples" / GPU / MODEL / "vllm"
    folder.mkdir(parents=True)
    meta = {
        "model": MODEL,
        "vllm_version": "0.19.0",
        "engine_kwargs": {
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "enable_expert_parallel": False,
            "max_num_seqs": ROWS,
            "max_num_batched_tokens": TOKENS,
            **kwargs,
        },
        "dataset_path": workload.name,
        "dataset_hash": hashlib.sha256(workload.read_bytes()).hexdigest(),
        "kv_cache": {"num_gpu_blocks": BLOCKS},
        "resolved_config": {"scheduler_config": {"async_scheduling": True}},
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    requests = [
        {
            "input_toks": int(prompts[k]),
            "output_toks": int(outputs[k]),
            "arrival_time": 1000.0 + arrival_s[k],
            "queued_ts": 5.0 + arrival_s[k] + (0.0 if k == 3 else 0.002),
            "first_token_ts": 5.0 + served.first_token_s[k],
            "last_token_ts": 5.0 + served.finish_s[k],
        }
        for k in range(count)
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, requests)))


def folder_of(data: Path) -> Path:
    return data / "bench/examples" / GPU / MODEL / "vllm"


def test_a_run_by_its_operators_is_predicted_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(tmp_path)
    write_run(tmp_path)
    monkeypatch.setattr(llmservingsim, "KNOTS", (0,))
    case = llmservingsim.read_case(tmp_path, folder_of(tmp_path))
    measured = llmservingsim.metrics(case.measured)
    for unequal in (False, True):
        law = llmservingsim.law_of(tmp_path, case, unequal=unequal).law
        predicted = llmservingsim.predict(case, law).served
        assert llmservingsim.metrics(predicted) == pytest.approx(measured, rel=1e-3)
        assert (law.cached_s, law.beside_s) == pytest.approx((LAW.cached_s, LAW.beside_s))
        assert law.attended_s == pytest.approx(LAW.attended_s)


def test_passes_with_as_many_decodes_as_may_run_count_beside_chunks(tmp_path: Path) -> None:
    write_profile(tmp_path)
    write_run(tmp_path, max_num_seqs=6)
    case = llmservingsim.read_case(tmp_path, folder_of(tmp_path))
    for unequal in (False, True):
        shapes = llmservingsim.read_attention(tmp_path, case, unequal=unequal).shapes
        assert max(shape.decodes for shape in shapes if shape.prefills) == 6
        assert max(shape.decodes for shape in shapes) == 6


@pytest.mark.parametrize(
    "kwargs",
    [
        {"data_parallel_size": 2},
        {"data_parallel_size": 4, "enable_expert_parallel": True},
        {"enable_expert_parallel": True},
        {"tensor_parallel_size": 4},
    ],
)
def test_a_run_that_is_not_modelled_is_refused_by_name(
    kwargs: dict[str, object], tmp_path: Path
) -> None:
    write_profile(tmp_path)
    write_run(tmp_path, **kwargs)
    with pytest.raises(InputError, match=f"^{GPU} {MODEL}"):
        llmservingsim.read_case(tmp_path, folder_of(tmp_path))


def test_another_workload_than_the_run_had_is_refused(tmp_path: Path) -> None:
    write_profile(tmp_path)
    write_run(tmp_path)
    (tmp_path / "workload.jsonl").write_text('{"input_tok_ids": [1]}')
    with pytest.raises(InputError, match=r"workload\.jsonl"):
        llmservingsim.read_case(tmp_path, folder_of(tmp_path))


def test_a_folder_without_runs_is_no_checkout(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="LLMServingSim"):
        llmservingsim.runs_of(tmp_path)
