"""Runs of vLLM 0.19 that LLMServingSim's authors measured request by request, predicted by the
product.

`benchmarks.public.scoreboard` shows their errors. DIR is a checkout of LLMServingSim (KAIST, MIT
licence): git clone https://github.com/casys-kaist/LLMServingSim DIR

A run in bench/examples has the arrival times and lengths of its requests, what they share, and
vLLM's flags and blocks. The recipe has its model, GPU and flags; the laws are those of
`profile --analytic`. A GPU without shipped operators has no prediction.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks.common.results_file import markdown
from toolkit.catalogue.gpus import gpu_of
from toolkit.errors import InputError
from toolkit.files.find_model import find_model
from toolkit.files.io import head
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.recipe import Recipe
from toolkit.files.shipped import load_recipe
from toolkit.metrics import Served, summarize
from toolkit.profiling.analytic import BLOCK_TOKENS, ONE_BY_ONE, analytic_fit
from toolkit.sim.api import simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.sim.world import policy_for
from toolkit.traces.types import SharedBlocks, Trace
from toolkit.units import MIB

GPUS = {"RTX4090": "rtx-4090", "RTXPRO6000": "rtx-pro-6000"}
COLUMNS = ("run", "prediction", "makespan", "mean TTFT", "mean TPOT", "mean E2E")
COMPARED = ("makespan_s", "ttft_mean_s", "tpot_mean_s", "e2e_mean_s")
PEER_ROWS = ("TTFT Mean", "TPOT Mean", "Latency Mean")


def table(data: Path) -> str:
    """Return the errors of each run as Markdown: the product's, and LLMServingSim's own."""
    folders = sorted(path.parent for path in data.glob("bench/examples/*/*/vllm/meta.json"))
    if not folders:
        raise SystemExit(f"{data}: no runs in bench/examples; is it a checkout of LLMServingSim?")
    lines = []
    for folder in folders:
        name = " ".join(folder.parts[-3:-1])
        lines.append([name, "llmctl", *errors(data, folder)])
        text = (folder.parent / "validation" / "summary.txt").read_text(encoding="utf-8")
        found = dict(re.findall(r"(\w+ Mean) .* ([+-][\d.]+)%", text))
        lines.append([name, "LLMServingSim", "", *(f"{found[key]} %" for key in PEER_ROWS)])
    return markdown(COLUMNS, lines, words=2)


def errors(data: Path, folder: Path) -> list[str]:
    """Return the errors of a run's means as cells, or why there is no prediction."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    trace, measured = read_requests(data, folder, meta)
    try:
        recipe = recipe_of(data, folder.parts[-3], meta, trace)
        fit = analytic_fit(recipe, head({}))
    except InputError as error:
        return [f"refused: {error.message}", "", "", ""]
    policy = policy_for(fit, recipe.policy.name, recipe.policy.parameters)
    world = Deployment.of(recipe, fit).world(Workload(trace))
    predicted = simulate(trace, policy, world).metrics({})
    seen = summarize(measured, {})
    return [f"{100.0 * (predicted[key] / seen[key] - 1.0):+.1f} %" for key in COMPARED]


def recipe_of(data: Path, gpu: str, meta: Mapping[str, Any], trace: Trace) -> Recipe:
    """Return the recipe of a run. Raises `InputError` for one that is refused."""
    given = meta["engine_kwargs"]
    ranks = given["tensor_parallel_size"]
    if given["data_parallel_size"] > 1:
        raise InputError("data parallelism", "measure such a server from outside")
    wish = Wish(
        gpu=gpu_of(GPUS[gpu]),
        tensor_parallel=ranks,
        expert_parallel=bool(given["enable_expert_parallel"]),
    )
    config = (data / "configs" / "model" / f"{meta['model']}.json").read_text(encoding="utf-8")
    with TemporaryDirectory() as name:
        model = Path(name, "model")
        model.mkdir()
        (model / "config.json").write_text(config, encoding="utf-8")
        recipe = yaml.safe_load(new_recipe(find_model(str(model)), wish).text)
        recipe["policy"]["parameters"] = {
            name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens")
        }
        recipe["serve"]["max_new_tokens"] = int(trace.output_tokens.max())
        if "kv_cache" in meta:
            blocks = int(meta["kv_cache"]["num_gpu_blocks"]) - 1
            size = blocks * BLOCK_TOKENS * recipe["model"]["kv_bytes_per_token"] // ranks
            recipe["engine"]["kv_cache_memory_mib"] = size / MIB
        settings = meta.get("resolved_config", {}).get("scheduler_config", {})
        if not settings.get("async_scheduling", True):
            recipe["engine"].setdefault("vllm", {}).setdefault("args", []).append(ONE_BY_ONE)
        path = Path(name, "recipe.yaml")
        path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
        return load_recipe(path)


def read_requests(data: Path, folder: Path, meta: Mapping[str, Any]) -> tuple[Trace, Served]:
    """Return a run's requests, and their times at the engine.

    `arrival_time` is on the wall's clock, the other times are on the machine's. The least time from
    a request's arrival to the engine's queue is taken as their difference.
    """
    lines = (folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()
    requests = [json.loads(line) for line in lines]
    column = {name: np.array([request[name] for request in requests]) for name in requests[0]}
    arrival_s = column["arrival_time"] + (column["queued_ts"] - column["arrival_time"]).min()
    begin_s = arrival_s.min()
    order = np.argsort(arrival_s, kind="stable")
    outputs = column["output_toks"]
    shared = shared_prompts(data / meta["dataset_path"], meta["dataset_hash"])
    trace = Trace(arrival_s - begin_s, column["input_toks"], outputs, outputs, shared=shared)
    trace = trace.take(order)
    return trace, Served(
        trace.arrival_s,
        column["first_token_ts"][order] - begin_s,
        column["last_token_ts"][order] - begin_s,
        trace.output_tokens,
        np.zeros(len(trace)),
        np.ones(len(trace), dtype=bool),
    )


def shared_prompts(path: Path, sha256: str) -> SharedBlocks:
    """Return what the prompts of a workload file share, by their tokens."""
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SystemExit(f"{path}: it is not the workload of the run, with the sha256 {sha256}")
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    ids: list[int] = []
    offsets = [0]
    for line in content.splitlines():
        tokens = json.loads(line)["input_tok_ids"]
        number = -1
        for start in range(0, len(tokens), BLOCK_TOKENS):
            block = number, tuple(tokens[start : start + BLOCK_TOKENS])
            number = numbers.setdefault(block, len(numbers))
            ids.append(number)
        offsets.append(len(ids))
    return SharedBlocks(BLOCK_TOKENS, np.array(ids), np.array(offsets))
