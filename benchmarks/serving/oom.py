"""The cost of an injected out-of-memory error in every n-th batch, beside runs without errors.

    python -m benchmarks.serving.oom --plan plan.json [--every 5] [--failures 2] [--pairs 3]

Takes two runs of --requests per pair. Needs a plan, such as demo-out/plan.json of `make demo`, and
its model.

24 clients send the same list of requests, of random prompts and lengths, to the plan's workers; a
run is over when all have ended. Runs with and without errors alternate, each on a server of its
own. Goodput is the tokens of requests that ended well per second of the run. How errors are
injected and counted, and what --failures means, is in oom_site/sitecustomize.py; what the server
noticed is in its own counters.

Texts are greedy, and equal in all runs. Where one is not, the benchmark names the request, the
first character that differs, and how far apart the two largest logits are there when the model
computes that request alone. Logits that are nearer than `TIE` change places with the shape of a
batch: such a difference is listed, any other makes the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.common.serving import Server, metric
from toolkit.engines.loading import load_model
from toolkit.engines.tokenizer import load_tokenizer
from toolkit.files.io import read_file
from toolkit.files.plan import Plan

CLIENTS = 24
TIE = 1e-5  # of float32 logits; their last bits depend on the other rows of the batch


class Ask(NamedTuple):
    prompt: str
    tokens: int


class Run(NamedTuple):
    """One list of requests on one server."""

    texts: list[str]
    failed: int
    tokens_per_s: float
    oom_events: float
    batches: float
    errors: int  # that were injected


class Difference(NamedTuple):
    """An answer that differs from the first run's: the first character, and the distance of the
    largest logits there.
    """

    request: int
    position: int
    logits_apart: float


async def replay(url: str, asks: list[Ask], errors: Callable[[], int]) -> Run:
    texts = [""] * len(asks)
    failed = 0
    queue = iter(enumerate(asks))

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal failed
        for index, ask in queue:
            body = {"prompt": ask.prompt, "max_tokens": ask.tokens}
            body |= {"temperature": 0, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            ok = answer.status_code == 200
            failed += not ok
            texts[index] = answer.json()["choices"][0]["text"] if ok else answer.text

    limits = httpx.Limits(max_connections=None)
    warm = {"prompt": "warm", "max_tokens": 8}
    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as http:
        await asyncio.gather(*[http.post("/v1/completions", json=warm) for _ in range(8)])
        before = await metrics(http)
        errors_before = errors()
        begin_s = time.perf_counter()
        await asyncio.gather(*[one(http) for _ in range(CLIENTS)])
        took_s = time.perf_counter() - begin_s
        after = await metrics(http)
    done = sum(ask.tokens for ask in asks)
    names = ("llmctl_oom_events_total", "llmctl_batches_total")
    ooms, batches = (metric(after, name) - metric(before, name) for name in names)
    return Run(texts, failed, done / took_s, ooms, batches, errors() - errors_before)


async def metrics(http: httpx.AsyncClient) -> str:
    return (await http.get("/metrics")).text


def differences(
    plan: Plan, asks: list[Ask], expected: list[str], runs: Iterable[Run]
) -> list[Difference]:
    """The answers of these runs that are not as expected."""
    found = []
    for run in runs:
        for request, (wanted, got) in enumerate(zip(expected, run.texts, strict=True)):
            if wanted != got:
                alike = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, got, strict=False))
                position = sum(1 for _ in alike)
                apart = logits_apart(plan, asks[request], position)
                found.append(Difference(request, position, apart))
    return found


def logits_apart(plan: Plan, ask: Ask, position: int) -> float:
    """The distance of the two largest logits where the model alone produces the character at
    `position`, or has no token for it.
    """
    import torch

    model = load_model(plan.recipe.model, plan.recipe.hardware)
    tokenizer = load_tokenizer(plan.recipe.model)
    ids = torch.tensor([tokenizer.encode(ask.prompt)])
    cache = None
    said = tokenizer.detokenizer()
    length = 0
    least = math.inf
    with torch.inference_mode():
        for _ in range(ask.tokens):
            output = model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            largest = output.logits[0, -1].topk(2)
            ids = largest.indices[None, :1]
            if length >= position:
                least = min(least, float(largest.values[0] - largest.values[1]))
            length += len(said.feed(ids[0].tolist()))
            if length > position:
                break
    return least


def run_pairs(options: argparse.Namespace, asks: list[Ask]) -> dict[int, list[Run]]:
    """The runs by --every, 0 without errors; the order alternates from pair to pair."""
    command = ["--policy", options.policy] if options.policy else []
    command += ["--admission", "queue", "--port", "0"]
    command += [part for setting in options.set for part in ("--set", setting)]
    runs: dict[int, list[Run]] = {0: [], options.every: []}
    with tempfile.NamedTemporaryFile() as log:
        injected = {
            "LLMCTL_BENCH_OOM_LOG": log.name,
            "LLMCTL_BENCH_OOM_FAILURES": str(options.failures),
            "PYTHONPATH": f"{Path(__file__).parent / 'oom_site'}:{ROOT}",
        }
        errors = lambda: Path(log.name).stat().st_size  # noqa: E731
        for pair in range(options.pairs):
            for every in sorted(runs, reverse=bool(pair % 2)):
                injected["LLMCTL_BENCH_OOM_EVERY"] = str(every)
                with Server(options.plan, *command, **injected) as server:
                    runs[every].append(asyncio.run(replay(server.url, asks, errors)))
                    server.end()
    return runs


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--policy")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument(
        "--failures", type=int, default=2, help="passes of a round that fail in a row"
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    plan = read_file(Plan, options.plan)
    asks = [
        Ask("".join(rng.choices("abcdefgh ", k=rng.randint(10, 120))), rng.randint(16, 128))
        for _ in range(options.requests)
    ]
    runs = run_pairs(options, asks)
    without = runs[0]
    with_errors = runs[options.every]
    losses = [
        100 * (1 - bad.tokens_per_s / good.tokens_per_s)
        for good, bad in zip(without, with_errors, strict=True)
    ]
    others = differences(plan, asks, without[0].texts, (*without, *with_errors))
    rates = [[run.tokens_per_s for run in part] for part in (without, with_errors)]
    found = {
        "engine": plan.recipe.engine.name,
        "policy": options.policy or plan.policy.name,
        "requests": len(asks) * len(with_errors),
        "failed": sum(run.failed for run in (*without, *with_errors)),
        "failures_in_a_row": options.failures,
        "same_texts": not others,
        "other_texts": [one._asdict() for one in others],
        "tokens_per_s": [round(statistics.median(part)) for part in rates],
        "loss_percent": [round(loss, 1) for loss in losses],
        "loss_percent_median": round(statistics.median(losses), 1),
        "errors": sum(run.errors for run in with_errors),
        "oom_events": sum(run.oom_events for run in with_errors),
        "batches": sum(run.batches for run in with_errors),
        "batches_calm": sum(run.batches for run in without),
    }
    print(json.dumps(found))
    return int(bool(found["failed"]) or any(one.logits_apart > TIE for one in others))


if __name__ == "__main__":
    sys.exit(main())
