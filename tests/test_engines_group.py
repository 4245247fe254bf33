"""A model that several processes share: the same tokens as from one process, and a group that is
lost and replaced as one worker.
"""

import asyncio
import os
import signal
from types import SimpleNamespace

import psutil
import pytest
import tiny
import torch
from said import says
from test_workers_pool import Events, with_workers
from torch import nn

from toolkit.engines.loading import load_model
from toolkit.engines.protocol import Round, Row, SamplingParams, make_engine
from toolkit.engines.tensor_parallel import RankShare, cut
from toolkit.errors import EngineError
from toolkit.files.recipe import EngineSpec
from toolkit.workers.pool import ProcessWorkers
from toolkit.workers.protocol import (
    BatchDone,
    BatchProgress,
    RoundDone,
    RunRound,
    RunSlice,
    WorkerLost,
    WorkerReady,
)

ROWS = [Row("a", (1, 2, 3, 4, 5), 0, 24), Row("b", (6, 7), 0, 24), Row("c", tuple(range(40)), 0, 9)]
DRAWN = [Row("d", (9, 8), 0, 12, SamplingParams(temperature=1.0, seed=3))]
BIG = [Row("big", (1,) * 40, 0, 50, SamplingParams(ignore_eos=True))] * 64


def pair(kind: str) -> ProcessWorkers:
    engine = tiny.engine_spec(kind, budget_mib=0.5, tensor_parallel_size=2)
    return ProcessWorkers([tiny.recipe(tiny.model_spec(kind), engine)])


@pytest.mark.slow
def test_two_processes_are_one_worker_with_its_tokens() -> None:
    alone = make_engine(tiny.model_spec(), tiny.engine_spec(budget_mib=0.5), tiny.CPU)

    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        (ready,) = await events.until(WorkerReady)
        facts = ready.facts
        assert (facts.tensor_parallel_size, facts.parameters) == (2, alone.facts.parameters)
        assert 2 * facts.kv_bytes_per_token == alone.facts.kv_bytes_per_token, (
            "each rank caches half of the KV heads"
        )
        assert facts.capacity_tokens == 2 * alone.facts.capacity_tokens, "the budget is per process"
        for batch_id, rows in enumerate((ROWS, DRAWN, BIG, ROWS)):
            workers.run(0, RunSlice(batch_id, rows, 24))
            done = (await events.until(BatchDone, batch_id + 1))[-1]
            if rows is BIG:
                assert done.failure == "oom", (
                    "every rank's ledger refuses the batch, and the group goes on"
                )
            else:
                assert done.output == alone.run_slice(rows, 24, lambda _: True)
        workers.run(0, RunSlice(9, ROWS, 24))
        await events.until(BatchProgress, 4)
        rank_0 = psutil.Process(workers.pid(0))
        (rank_1,) = rank_0.children()
        os.kill(rank_1.pid, signal.SIGKILL)
        assert (await events.until(BatchDone, 5))[-1].batch_id == 9
        (lost,) = await events.until(WorkerLost)
        assert says(lost.reason, "rank 1", "-9")
        await events.until(WorkerReady, 2)
        workers.run(0, RunSlice(10, ROWS, 24))
        assert (await events.until(BatchDone, 6))[-1].output == alone.run_slice(
            ROWS, 24, lambda _: True
        )
        (new_rank_1,) = psutil.Process(workers.pid(0)).children()
        workers.kill(0)
        await events.until(WorkerLost, 2)
        assert await asyncio.to_thread(new_rank_1.wait, 60) is not False, (
            "without rank 0 the other ranks end"
        )

    with_workers(scenario, pair("llama"))


@pytest.mark.slow
def test_rounds_are_shared_too() -> None:
    alone = make_engine(tiny.model_spec("rebatch"), tiny.engine_spec("rebatch"), tiny.CPU)
    plans = [
        Round(3, enter=tuple(ROWS[:2]), numbers=(0, 1)),
        Round(9, enter=(ROWS[2],), numbers=(2,), pause=(0,)),
        Round(30, resume=(0,), evict=(1,)),
    ]
    expected = [alone.run_round(plan, lambda _: True) for plan in plans]

    async def scenario(workers: ProcessWorkers, events: Events) -> None:
        for batch_id, plan in enumerate(plans):
            workers.run(0, RunRound(batch_id, plan))
            assert (await events.until(RoundDone, batch_id + 1))[-1].output == expected[batch_id]

    with_workers(scenario, pair("rebatch"))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_shares_add_up_to_the_model(kind: str) -> None:
    shares = []
    for rank in range(2):
        model = load_model(tiny.model_spec(kind), tiny.CPU)
        share = RankShare(rank, 2, "")
        cut(model, share)
        assert share.parameters == sum(
            w.numel() for w in load_model(tiny.model_spec(kind), tiny.CPU).parameters()
        )
        shares.append(dict(model.named_parameters()))
    for name, whole in load_model(tiny.model_spec(kind), tiny.CPU).named_parameters():
        parts = [share[name] for share in shares if name in share]
        same = all(torch.equal(part, whole) for part in parts)
        assert same or any(
            torch.equal(torch.cat(parts, dim), whole) for dim in range(whole.dim())
        ), name


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(EngineError, match=r"model_type.*'gpt2'.*tp_plan"):
        cut(load_model(tiny.model_spec("gpt2"), tiny.CPU), RankShare(0, 2, ""))


def test_uneven_heads_and_unknown_cuts_are_refused() -> None:
    model = load_model(tiny.model_spec(), tiny.CPU)
    with pytest.raises(
        EngineError,
        match=r"tensor_parallel_size .*3.*num_attention_heads.*4",
    ):
        cut(model, RankShare(0, 3, ""))
    fused = SimpleNamespace(config=model.config, tp_plan={"o": "rowwise", "qkv": "packed_colwise"})
    fused.named_modules = lambda: [("qkv", nn.Linear(2, 2))]
    fused.parameters = list
    with pytest.raises(EngineError, match="'packed_colwise'"):
        cut(fused, RankShare(0, 2, ""))


def test_recipes_are_checked_before_a_model_is_loaded() -> None:
    with pytest.raises(ValueError, match="'deepspeed'"):
        EngineSpec(name="deepspeed", tensor_parallel_size=2)
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size.*4.*model\.config\.num_key_value_heads.*2",
    ):
        tiny.recipe(tiny.model_spec(), tiny.engine_spec(tensor_parallel_size=4))
