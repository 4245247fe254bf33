"""Tokens per second that the front streams, beside bare endpoints on the same server software.

    python -m benchmarks.serving.front_stream [--clients 128] [--tokens 64] [--repeats 5]

Takes two minutes with one repeat on two shared, busy cores. Needs nothing but the package;
`--beside CHECKOUT` adds the servers of another checkout, for a comparison in pairs.

`ours` is the whole server with a fake engine that takes no time, in two worker processes. `ours,
every step` is the same server with workers that report each step at once, so that hardly any tokens
share an event. The bare endpoints send one event per token and have no scheduler: FastAPI's
StreamingResponse over an asynchronous generator that writes OpenAI's chunk with `json.dumps`, and a
raw ASGI application with the bytes ready. Both run on uvicorn with uvloop and httptools, FastAPI
also on asyncio and h11. In each repeat every server is asked once, in another order. Clients are
raw sockets in a process of their own.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import free_port, request, send, wait_for
from benchmarks.common.serving import Server, fake_plan
from toolkit.files.io import write_file

BARE = """
import json
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

app = FastAPI()
HEAD = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1700000000,
        "model": "test"}
CHOICE = {"index": 0, "text": "x", "finish_reason": None, "logprobs": None}
READY = ("data: " + json.dumps({**HEAD, "choices": [CHOICE]}) + "\\n\\n").encode()


@app.post("/v1/completions")
async def completions(body: dict):
    async def events():
        for index in range(body["max_tokens"]):
            choice = {"index": 0, "text": "x", "finish_reason": None, "logprobs": None}
            yield "data: " + json.dumps({**HEAD, "choices": [choice]}) + "\\n\\n"
        yield "data: [DONE]\\n\\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def raw(scope, receive, send):
    body = json.loads((await receive())["body"])
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(body["max_tokens"]):
        await send({"type": "http.response.body", "body": READY, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n", "more_body": False})
"""


class Run(NamedTuple):
    """One crowd of clients at one server."""

    tokens_per_s: float
    events: int
    front_cpu_s: float


class Served(NamedTuple):
    """A server of ours or a bare one."""

    name: str
    port: int
    process: subprocess.Popen[str]

    def cpu_s(self) -> float:
        """CPU seconds of the serving process. Our workers do not count: their engine is a fake."""
        spent = psutil.Process(self.process.pid).cpu_times()
        return float(spent.user + spent.system)

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


async def stream(port: int, tokens: int) -> tuple[int, bool]:
    """One streamed request: its number of events, and whether it was complete."""
    asked = request(prompt="x" * 50, max_tokens=tokens, stream=True, temperature=0)
    reader, writer = await send(port, asked)
    received = await reader.read(-1)
    writer.close()
    return received.count(b"data: {"), b"[DONE]" in received


async def crowd(port: int, clients: int, tokens: int) -> tuple[float, int]:
    begin_s = time.perf_counter()
    answers = await asyncio.gather(*[stream(port, tokens) for _ in range(clients)])
    if not all(whole for _, whole in answers):
        raise RuntimeError("a stream was cut off")
    return time.perf_counter() - begin_s, sum(events for events, _ in answers)


def measure(server: Served, clients: int, tokens: int) -> Run:
    before_s = server.cpu_s()
    took_s, events = asyncio.run(crowd(server.port, clients, tokens))
    return Run(clients * tokens / took_s, events, server.cpu_s() - before_s)


def write_plan(folder: Path, flush_s: float) -> Path:
    """The path of our server's plan; its workers report at this interval."""
    folder.mkdir()
    plan = fake_plan(folder, eos_one_in=0)
    engine = plan.recipe.engine.model_copy(update={"flush_s": flush_s})
    recipe = plan.recipe.model_copy(update={"engine": engine})
    write_file(plan.model_copy(update={"recipe": recipe}), folder / "plan.json")
    return folder / "plan.json"


def start_all(folder: str, beside: str | None) -> list[Served]:
    Path(folder, "bare.py").write_text(BARE)
    servers = []
    checkouts = {"": None} | ({", beside": Path(beside)} if beside else {})
    for name, flush_s in (("ours", 0.05), ("ours, every step", 0.0)):
        plan = write_plan(Path(folder, name.replace(", ", "-").replace(" ", "-")), flush_s)
        for suffix, checkout in checkouts.items():
            ours = Server(plan, "--admission", "queue", log=Path(os.devnull), cwd=checkout)
            servers.append(Served(name + suffix, ours.port, ours.process))
    uvicorn = [sys.executable, "-m", "uvicorn", "--log-level", "critical", "--no-access-log"]
    plain = [*uvicorn, "--loop", "asyncio", "--http", "h11"]
    bare = [
        ("FastAPI on uvicorn", "bare:app", uvicorn),
        ("raw ASGI on uvicorn", "bare:raw", uvicorn),
        ("FastAPI on asyncio and h11", "bare:app", plain),
    ]
    for name, app, command in bare:
        port = free_port()
        words = [*command, "--port", str(port), app]
        process = subprocess.Popen(words, cwd=folder, stderr=subprocess.DEVNULL, text=True)
        wait_for(port)
        servers.append(Served(name, port, process))
    return servers


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--beside", help="another checkout of the project")
    options = parser.parse_args()
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        servers = start_all(folder, options.beside)
        runs: dict[str, list[Run]] = {server.name: [] for server in servers}
        for repeat in range(options.repeats + 1):  # the first warms up
            for server in rng.sample(servers, len(servers)):
                run = measure(server, options.clients, options.tokens)
                if repeat:
                    runs[server.name].append(run)
        for server in servers:
            server.end()
    bare = [run.tokens_per_s for run in runs["FastAPI on uvicorn"]]
    total = options.clients * options.tokens
    clients = f"{options.clients} clients, {options.tokens} tokens each"
    print(f"{clients}, medians; % of bare FastAPI, paired")
    for name, found in runs.items():
        shares = [100 * run.tokens_per_s / other for run, other in zip(found, bare, strict=True)]
        events = statistics.median(run.events for run in found)
        cpu_us = 1e6 * statistics.median(run.front_cpu_s for run in found)
        rate = statistics.median(run.tokens_per_s for run in found)
        ours = f"{statistics.median(shares):5.0f} % ({min(shares):.0f} to {max(shares):.0f})"
        cost = f"{cpu_us / events:5.0f} us CPU per event {cpu_us / total:5.1f} per token"
        print(f"{name:28} {rate:8,.0f} tokens/s {ours} {events:6,.0f} events {cost}")


if __name__ == "__main__":
    main()
