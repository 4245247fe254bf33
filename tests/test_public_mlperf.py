"""Runs of MLPerf Inference: what is read of them, and what the commands are asked."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.public import mlperf
from benchmarks.public.mlperf import Answer, Run
from toolkit.catalogue.gpus import gpu_of
from toolkit.files.find_model import find_model
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.shipped import load_recipe

SUMMARY = """
SUT name : PySUT
Scenario : Server
Completed samples per second    : 90.5
Completed tokens per second: 27150.0
Result is : VALID
Mean First Token latency (ns)                : 276185427
99.00 percentile first token latency (ns)   : 534348754
"""
README = """
### Accuracy
axs byquery loadgen_output,task=llama2,max_num_seqs=1,tp=8
### Performance
axs byquery loadgen_output,task=llama2,tp=2,dp=4,gpu_memory_utilization=0.95,model_path=/a/b,\
max_num_seqs=858,sut_name=x
### Compliance TEST06
axs byquery loadgen_output,max_num_seqs=2
"""
RUN = Run(
    name="Krai x",
    gpu="NVIDIA H200-SXM-141GB",
    software="vLLM v0.9.2",
    model="llama-3.1-8b",
    dataset="",
    flags={"tp": "2", "dp": "4", "max_num_seqs": "64", "gpu_memory_utilization": "0.95"},
    queries=4000,
    rate_rps=50.0,
    output_mean=300.0,
    outputs=(100, 200, 600),
    measured={"rps": 10.0, "ttft_mean_s": 0.5},
)
PROMPTS = np.arange(1, 1001)


def test_numbers_of_a_summary() -> None:
    found = mlperf.numbers_in(SUMMARY)
    assert found["Completed samples per second"] == 90.5
    assert found["Completed tokens per second"] == 27150.0
    assert found["Mean First Token latency (ns)"] == 276185427
    assert "SUT name" not in found


def test_flags_of_a_performance_run_and_of_a_command_line() -> None:
    flags = mlperf.flags_in(README)
    assert (flags["tp"], flags["dp"], flags["max_num_seqs"]) == ("2", "4", "858")
    assert flags["gpu_memory_utilization"] == "0.95"
    line = mlperf.flags_in("--max-model-len 2668 --kv-cache-dtype fp8")
    assert line == {"max_model_len": "2668", "kv_cache_dtype": "fp8"}


def test_requests_come_as_loadgen_sends_them() -> None:
    trace = mlperf.trace_of(RUN, PROMPTS)
    assert len(trace) == RUN.queries
    assert trace.arrival_s[-1] == pytest.approx(RUN.queries / RUN.rate_rps, rel=0.1)
    for first in range(0, RUN.queries, len(PROMPTS)):  # the whole data set, again and again
        block = trace.prompt_tokens[first : first + len(PROMPTS)]
        assert sorted(block.tolist()) == PROMPTS.tolist()
    assert trace.output_tokens.mean() == pytest.approx(RUN.output_mean, rel=0.01)
    assert len(set(trace.output_tokens.tolist())) == len(RUN.outputs)

    offline = mlperf.trace_of(replace(RUN, rate_rps=0.0, flags={"max_tokens": "128"}), PROMPTS)
    assert not offline.arrival_s.any()
    assert offline.output_tokens.max() == 128


@pytest.mark.parametrize("varied", mlperf.VARIED)
def test_each_variation_changes_the_requests(varied: str) -> None:
    stated = mlperf.trace_of(RUN, PROMPTS)
    other = mlperf.trace_of(RUN, PROMPTS, varied)
    assert list(stated.rows()) != list(other.rows())
    assert len(other) == len(stated)


def test_a_run_is_put_into_the_words_of_a_recipe(tmp_path: Path) -> None:
    words = mlperf.words_of(RUN)
    assert words[:5] == ["llama-3.1-8b", "--gpu", "h200", "--gpus", "8"]
    assert words[5:7] == ["--tensor-parallel-size", "2"]
    wish = Wish(gpu=gpu_of("h200"), gpus=8, tensor_parallel=2)
    made = new_recipe(find_model("llama-3.1-8b"), wish).text
    path = tmp_path / "recipe.yaml"
    path.write_text(mlperf.with_flags(made, {**RUN.flags, "kv_cache_dtype": "fp8"}))
    recipe = load_recipe(path)
    assert recipe.workers == 4
    assert recipe.engine.gpu_memory_utilization == 0.95
    assert recipe.policy.parameters["max_num_seqs"] == 64
    assert recipe.engine.vllm is not None
    assert recipe.engine.vllm.kv_cache_dtype == "fp8"


@pytest.mark.slow
def test_the_commands_answer_a_run_and_a_refusal_says_why() -> None:
    few = replace(RUN, queries=40)
    assert set(few.measured) <= set(mlperf.ask(few, PROMPTS).predicted)
    assert "MI250" in mlperf.ask(replace(few, gpu="MI250"), PROMPTS).refused


def test_errors_are_those_of_the_answers_and_refusals_are_listed() -> None:
    answers = [
        Answer("Krai x", mlperf.AS_STATED, {"rps": 11.0, "ttft_mean_s": 0.4}),
        Answer("Krai x", mlperf.VARIED[0], {"rps": 12.0, "ttft_mean_s": 0.4}),
        mlperf.ask(replace(RUN, name="Krai y", software="SGLang v0.4.9"), PROMPTS),
    ]
    assert answers[2].refused
    assert mlperf.errors_of(RUN, answers[0]) == pytest.approx({"rps": 10.0, "ttft_mean_s": -20.0})
    text = mlperf.tables("c0ffee", [RUN, replace(RUN, name="Krai y")], answers)
    assert "+10.0 %" in text
    assert "20.0 %" in text
    assert "Krai y" in text
