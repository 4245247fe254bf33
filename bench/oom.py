"""An injected out-of-memory error in each n-th batch: what it costs, paired with runs that have none.

    python bench/oom.py --plan plan.json [--policy slice] [--every 5] [--requests 120] [--pairs 3] [--seed 0]

The plan's real model in its workers. 24 clients ask for the same list of requests, of random prompts and lengths; a run
is over when all have ended. Runs with and without errors alternate on servers of their own. Goodput is the tokens of
requests that ended well per second of the run; texts are greedy and must be the same in all runs. How an error comes
about is in bench/oom_site/sitecustomize.py; the shares here are the server's own counters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from serving import Server

from toolkit.files.io import read_file
from toolkit.files.plan import Plan

HERE = Path(__file__).parent
CLIENTS = 24


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


async def replay(url: str, asks: list[Ask]) -> Run:
    texts, failed = [""] * len(asks), 0
    queue = iter(enumerate(asks))

    async def one(http: httpx.AsyncClient) -> None:
        nonlocal failed
        for index, ask in queue:
            body = {"prompt": ask.prompt, "max_tokens": ask.tokens, "temperature": 0, "ignore_eos": True}
            answer = await http.post("/v1/completions", json=body)
            failed += answer.status_code != 200
            texts[index] = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text

    async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(
            *[http.post("/v1/completions", json={"prompt": "warm", "max_tokens": 8}) for _ in range(8)]
        )
        before = await metrics(http)
        begin_s = time.perf_counter()
        await asyncio.gather(*[one(http) for _ in range(CLIENTS)])
        took_s = time.perf_counter() - begin_s
        after = await metrics(http)
    done = sum(ask.tokens for ask in asks)
    ooms, batches = (after[name] - before[name] for name in ("llmctl_oom_events_total", "llmctl_batches_total"))
    return Run(texts, failed, done / took_s, ooms, batches)


async def metrics(http: httpx.AsyncClient) -> dict[str, float]:
    lines = (await http.get("/metrics")).text.splitlines()
    return {line.partition("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--policy")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--failures", type=int, default=2, help="passes of a round that fail in a row")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, plan = random.Random(options.seed), read_file(Plan, options.plan)
    asks = [
        Ask("".join(rng.choices("abcdefgh ", k=rng.randint(10, 120))), rng.randint(16, 128))
        for _ in range(options.requests)
    ]
    command = [*(("--policy", options.policy) if options.policy else ()), "--admission", "queue", "--port", "0"]
    command += [part for one in options.set for part in ("--set", one)]
    runs: dict[int, list[Run]] = {0: [], options.every: []}
    for pair in range(options.pairs):
        for every in sorted(runs, reverse=bool(pair % 2)):
            injected = {
                "LLMCTL_BENCH_OOM_EVERY": str(every),
                "LLMCTL_BENCH_OOM_FAILURES": str(options.failures),
                "PYTHONPATH": f"{HERE / 'oom_site'}:{HERE.parent}",
            }
            with Server(options.plan, *command, **injected) as server:
                runs[every].append(asyncio.run(replay(server.url, asks)))
                server.end()
    calm, troubled = runs[0], runs[options.every]
    losses = [100 * (1 - bad.tokens_per_s / good.tokens_per_s) for good, bad in zip(calm, troubled, strict=True)]
    same = all(run.texts == calm[0].texts for run in (*calm, *troubled))
    found = {
        "engine": plan.recipe.engine.name,
        "policy": options.policy or plan.policy.name,
        "requests": len(asks) * len(troubled),
        "failed": sum(run.failed for run in (*calm, *troubled)),
        "same_texts": same,
        "tokens_per_s": [round(statistics.median(run.tokens_per_s for run in part)) for part in (calm, troubled)],
        "loss_percent": [round(loss, 1) for loss in losses],
        "loss_percent_median": round(statistics.median(losses), 1),
        "oom_events": sum(run.oom_events for run in troubled),
        "batches": sum(run.batches for run in troubled),
        "batches_calm": sum(run.batches for run in calm),
    }
    print(json.dumps(found))
    return int(bool(found["failed"]) or not same)


if __name__ == "__main__":
    sys.exit(main())
