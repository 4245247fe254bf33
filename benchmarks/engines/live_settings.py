"""A real vLLM on a CPU; its settings change at random under load: what becomes of its requests.

    python -m benchmarks.engines.live_settings --vllm-python PYTHON [--changes 200]
        [--requests 400] [--at-once 24] [--seed 0]

Two minutes. The same greedy requests are served twice by a server of `tiny-llama-vllm` that was
started in the same way: without a change, and while all live settings are drawn anew, one after the
other, over HTTP. No request may be lost, and each must get the same text. The second server's log
of passes is followed by the simulator, which gets the same changes at the same passes: rows, their
order, computed and new tokens, preempted requests, free blocks and waiting requests are compared.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.command import make_parser
from toolkit.backends.vllm.command import VllmCommand, flags_of, vllm_server
from toolkit.backends.vllm.conformance.modelled import step_of
from toolkit.backends.vllm.control import MIDDLEWARE
from toolkit.backends.vllm.from_log import read_passes
from toolkit.backends.vllm.setup import CONTROL_VARIABLE, ITERATIONS_VARIABLE, PYTHON_VARIABLE
from toolkit.endpoints.settings import LiveState, SettingsClient
from toolkit.engines.saved import saved_model
from toolkit.files.shipped import load_recipe, recipe_path
from toolkit.sched.iterations import IterationLogHeader, LoggedPass
from toolkit.sched.policies.parameters import Value
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.blocks import PagedRequest
from toolkit.sim.paged import PagedScheduler

KEY = "of this benchmark"
LOGGED = "toolkit.backends.vllm.iterations.logged_scheduler"
FLAGS = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
VOCABULARY = 512
LONGEST = 512


def drawn_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Prompts of random tokens, and outputs of a given length."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        prompt = draw.choice([draw.randint(4, 60), draw.randint(60, 380)])
        output = min(draw.choice([draw.randint(1, 20), draw.randint(20, 110)]), LONGEST - prompt)
        tokens = [draw.randrange(3, VOCABULARY) for _ in range(prompt)]
        found.append({"prompt": tokens, "max_tokens": output})
    return found


def drawn_change(state: LiveState, draw: random.Random) -> dict[str, Value]:
    """New values of one to three settings, within their bounds."""
    found: dict[str, Value] = {}
    for one in draw.sample(state.settings, draw.randint(1, 3)):
        if one.choices:
            found[one.name] = draw.choice(one.choices)
        elif isinstance(one.start, int):
            low, high = int(one.low or 0), int(one.high or 0)
            found[one.name] = draw.choice([low, high, draw.randint(low, high)])
            if one.name == "long_prefill_token_threshold":
                found[one.name] = draw.choice([0, 1, 16, 64, draw.randint(low, high)])
        else:
            found[one.name] = round(draw.uniform(0.0, 0.5), 3)
    return found


async def serve(
    url: str, model: str, requests: Sequence[dict[str, Any]], at_once: int
) -> list[str | None]:
    """The text of each request; None: it was lost."""
    texts: list[str | None] = [None] * len(requests)
    left = list(range(len(requests)))[::-1]
    async with httpx.AsyncClient(timeout=300.0, trust_env=False) as client:

        async def work() -> None:
            while left:
                number = left.pop()
                fields = {"model": model, "temperature": 0.0, "ignore_eos": True}
                answer = await client.post(f"{url}/v1/completions", json=fields | requests[number])
                if answer.status_code == 200:
                    texts[number] = answer.json()["choices"][0]["text"]

        await asyncio.gather(*[work() for _ in range(at_once)])
    return texts


async def change(control: SettingsClient, count: int, seed: int, done: asyncio.Event) -> int:
    """Change settings so many times, evenly over the time that requests take; the changes made."""
    draw = random.Random(seed)
    state = await asyncio.to_thread(control.get)
    made = 0
    while made < count and not done.is_set():
        await asyncio.to_thread(control.set, drawn_change(state, draw), "at random")
        made += 1
        await asyncio.sleep(0.02)
    await asyncio.to_thread(control.set, {one.name: one.start for one in state.settings})
    return made


async def disturbed(
    url: str, model: str, requests: Sequence[dict[str, Any]], at_once: int, count: int, seed: int
) -> tuple[list[str | None], int]:
    """The texts of requests that are served while settings change, and the number of changes. The
    requests are sent again until all changes are made.
    """
    done = asyncio.Event()
    changing = asyncio.create_task(change(SettingsClient(url, KEY), count, seed, done))
    texts = await serve(url, model, requests, at_once)
    while not changing.done():
        again = await serve(url, model, requests, at_once)
        texts = [one if one == other else None for one, other in zip(texts, again, strict=True)]
    done.set()
    return texts, await changing


def modelled(header: IterationLogHeader, passes: Sequence[LoggedPass]) -> list[Any]:
    """The passes of our model for a server with live settings. Its log says which requests have
    come and which settings are new with each pass. No request stops before its limit.
    """
    flags = VllmPolicy(
        max_num_seqs=header.max_num_seqs,
        max_num_batched_tokens=header.max_num_batched_tokens,
        chunked_prefill=header.enable_chunked_prefill,
        prefix_caching=header.prefix_caching,
    )
    scheduler = PagedScheduler(
        flags, header.blocks, header.block_tokens, ahead=header.async_scheduling
    )
    arrived = 0
    found: list[Any] = []
    under_way: list[PagedRequest] = []
    for one in passes:
        scheduler.change(one.changed)
        for _, _, prompt, limit in one.arrived:
            scheduler.add(PagedRequest(arrived, prompt, limit))
            arrived += 1
        step = step_of(scheduler)
        found.append(step)
        ended: list[PagedRequest] = []
        if step["rows"]:
            ended = scheduler.commit()
        scheduler.settle(under_way if header.async_scheduling else ended)
        under_way = ended if header.async_scheduling else []
    return found


def logged(passes: Sequence[LoggedPass]) -> list[Any]:
    """The log's passes in the same form."""
    names = [arrival.request_id for one in passes for arrival in one.arrived]
    number = {name: k for k, name in enumerate(names)}
    return [
        {
            "rows": [[number[row.request_id], row.computed, row.new] for row in one.rows],
            "preempted": [number[name] for name in one.preempted],
            "free": one.free_blocks,
            "waiting": one.waiting,
        }
        for one in passes
    ]


@dataclass(frozen=True)
class Found:
    """What became of the requests, and the passes in which the simulator differs."""

    made: int
    lost: int
    other: int
    passes: list[LoggedPass]
    differ: list[int]
    ours: list[Any]
    theirs: list[Any]


def measure(changes: int, count: int, at_once: int, seed: int) -> Found:
    """Serve the requests by both servers, and follow the second one's log."""
    recipe = load_recipe(recipe_path("tiny-llama-vllm"))
    requests = drawn_requests(count, seed)
    model = saved_model(recipe.model, recipe.hardware)
    flags = [*flags_of("vllm", FLAGS), "--scheduler-cls", LOGGED, "--middleware", MIDDLEWARE]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "passes.jsonl"
        variables = {ITERATIONS_VARIABLE: str(log), CONTROL_VARIABLE: KEY}
        command = VllmCommand(recipe, model, recipe.name, flags, variables)
        with vllm_server(command, quiet=True) as server:
            usual = asyncio.run(serve(server.url, recipe.name, requests, at_once))
        with vllm_server(command, quiet=True) as server:
            served, made = asyncio.run(
                disturbed(server.url, recipe.name, requests, at_once, changes, seed)
            )
        history = read_passes(log)
    lost = sum(one is None for one in served)
    other = sum(one != two for one, two in zip(usual, served, strict=True)) - lost
    passes = history.passes
    ours = modelled(history.header, passes)
    theirs = logged(passes)
    differ = [k for k, (one, two) in enumerate(zip(ours, theirs, strict=True)) if one != two]
    return Found(made, lost, other, passes, differ, ours, theirs)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vllm-python", required=True)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ[PYTHON_VARIABLE] = given.vllm_python
    found = measure(given.changes, given.requests, given.at_once, given.seed)
    of_all = f"of {given.requests} requests"
    print(f"{found.made} changes; {found.lost} {of_all} lost, {found.other} with another text")
    changed = sum(bool(one.changed) for one in found.passes) - 1
    preempted = sum(len(one.preempted) for one in found.passes)
    print(
        f"{len(found.passes):,} passes, {changed} with new settings, {preempted:,} preemptions; "
        f"{len(found.differ)} differ from the simulator's"
    )
    for at in found.differ[:1]:
        print(f"pass {at}:\n  ours   {found.ours[at]}\n  vLLM's {found.theirs[at]}")
        print(f"  {found.passes[at].changed}")


if __name__ == "__main__":
    main()
