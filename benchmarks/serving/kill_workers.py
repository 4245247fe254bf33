"""Workers killed under load: every answer must equal the undisturbed one.

    python -m benchmarks.serving.kill_workers [--rounds 100] [--signal KILL|STOP]
    python -m benchmarks.serving.kill_workers --mixed [--rounds 100]

Takes about 20 s per round on two shared, busy cores. Needs nothing but the package; `--plan
plan.json` uses that plan's real model.

Without a plan the engines are fakes: their next token is a hash of all tokens before it. A token
that was lost, doubled or made from something else changes all that follow. With a plan its real
model serves greedy requests. 16 clients stream without a pause; each compares text and usage of
every answer with what the same server sent before the first kill. In a round some tokens flow, one
random worker gets the signal, and the server restores its number of workers. A worker that is
stopped (STOP) is as good as hung: the server has to notice, so `serve.hang_s` is 1 s there.

With --mixed each round does one of these at random: a worker is killed, is stopped, hangs while it
loads (its predecessor is killed and it is stopped as soon as it exists), or hangs in its engine (a
request causes it, and gets a deliberate 503). In every fifth round the front is killed right after
it: no process of it may be left after 10 s. The engines are fakes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from benchmarks.common.command import make_parser
from benchmarks.common.serving import Server, fake_plan, metric
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Settings
from toolkit.sched.policies.parameters import from_words

CLIENTS = 16
PROMPTS = 24
RESTARTS = "llmctl_worker_restarts_total"


class Load:
    """Clients that stream, and the errors that they found."""

    def __init__(self, http: httpx.AsyncClient, tokens: int, rng: random.Random) -> None:
        self.http = http
        self._tokens = tokens
        self._rng = rng
        self.expected: dict[str, str] = {}
        self.wrong: list[str] = []
        self.done = 0
        self.events = 0
        self.stopping = self.front_killed = False
        self.hangs: list[asyncio.Task[httpx.Response]] = []

    async def undisturbed(self) -> None:
        """Record the answer to each prompt."""
        for _ in range(PROMPTS):
            letters = range(self._rng.randint(5, 120))
            prompt = "".join(self._rng.choice("abcdefgh ") for _ in letters)
            text, _, error = await self._ask(prompt)
            if error:
                raise RuntimeError(error)
            self.expected[prompt] = text

    async def _ask(self, prompt: str) -> tuple[str, int, str]:
        """Text, tokens by usage, and the error of one request."""
        body = {"prompt": prompt, "max_tokens": self._tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text = ""
        tokens = 0
        last = ""
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return "", 0, f"status {response.status_code}: {(await response.aread())[:200]!r}"
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                last = line.removeprefix("data: ")
                if last == "[DONE]":
                    continue
                event = json.loads(last)
                if "error" in event:
                    return text, tokens, str(event["error"])
                self.events += 1
                text += "".join(choice["text"] for choice in event["choices"])
                tokens = event["usage"]["completion_tokens"] if event["usage"] else tokens
        return text, tokens, "" if last == "[DONE]" else "the stream ended early"

    async def go(self) -> None:
        """Run one client."""
        while not self.stopping:
            prompt = self._rng.choice(list(self.expected))
            try:
                text, tokens, error = await self._ask(prompt)
            except httpx.TransportError:
                if not self.front_killed:
                    raise
                return
            if self.front_killed:
                return
            self.done += 1
            if error or text != self.expected[prompt] or tokens != self._tokens:
                got = f"{tokens} tokens, {len(text)} characters"
                self.wrong.append(f"{error or 'another text'}: {got}")


FAULTS = ("kill", "stop", "loading", "engine")
HANG = 258  # the fake engine hangs at this token, which it never samples
FRONT_EVERY = 5  # rounds of --mixed, after which the front is killed
LEFT_S = 10.0  # for the processes of a killed front to end
ROUND_TIMEOUT_S = 180.0


async def inject_fault(fault: str, server: Server, rng: random.Random, load: Load) -> int:
    """Inject the fault; the number of workers that it costs."""
    if fault == "engine":
        # More tokens than it gets: each try gives one, and tries beside others do not count.
        body = {"prompt": [rng.randrange(97, 123), HANG], "max_tokens": 64, "ignore_eos": True}
        load.hangs.append(asyncio.create_task(load.http.post("/v1/completions", json=body)))
        return 2  # a request that costs two workers fails
    victim = rng.choice(server.workers())
    before = {worker.pid for worker in server.workers()}
    victim.send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    if fault == "loading":
        end_s = time.monotonic() + ROUND_TIMEOUT_S
        while not (new := [one for one in server.workers() if one.pid not in before]):
            if time.monotonic() > end_s:
                raise RuntimeError(f"no worker was started again within {ROUND_TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.002)
        new[0].send_signal(signal.SIGSTOP)
    return 1


async def serve_until_front_killed(
    server: Server, load: Load, options: argparse.Namespace, rng: random.Random, found: Counter[str]
) -> None:
    """Run rounds until all are done or the front is killed."""
    faults = FAULTS if options.mixed else (options.signal.lower(),)
    load.stopping = False
    clients = [asyncio.create_task(load.go()) for _ in range(CLIENTS)]
    http = load.http
    restarts = 0.0
    size = len(server.workers())
    while found["rounds"] < options.rounds:
        before = load.events
        while load.events < before + rng.randint(5, 60):
            await asyncio.sleep(0.005)
        fault = rng.choice(faults)
        found["rounds"] += 1
        found[fault] += 1
        everything = server.front.children(recursive=True)
        restarts += await inject_fault(fault, server, rng, load)
        if options.mixed and found["rounds"] % FRONT_EVERY == 0:
            found["front"] += 1
            await asyncio.sleep(rng.random() * 2)
            everything += server.front.children(recursive=True)
            load.stopping = load.front_killed = True
            server.process.kill()
            killed_s = time.monotonic()
            _, left = await asyncio.to_thread(psutil.wait_procs, everything, LEFT_S)
            found["left"] += len(left)
            gone_ms = round(1000 * (time.monotonic() - killed_s))
            found["gone_ms_max"] = max(found["gone_ms_max"], gone_ms)
            break
        deadline_s = time.monotonic() + ROUND_TIMEOUT_S
        while True:
            told = (await http.get("/metrics")).text
            restarted = metric(told, RESTARTS)
            if restarted >= restarts and metric(told, "llmctl_workers_alive") >= size:
                break
            if time.monotonic() > deadline_s:
                which = f"round {found['rounds']} ({fault})"
                load.wrong.append(f"{which}: the workers did not come back")
                restarts = restarted
                break
            await asyncio.sleep(0.05)
    load.stopping = True
    await asyncio.gather(*clients)
    for hung in await asyncio.gather(*load.hangs, return_exceptions=True):
        if isinstance(hung, httpx.Response) and hung.status_code != 503:
            load.wrong.append(f"a request that hangs got {hung.status_code}")
    load.hangs.clear()


def run(plan: Path, options: argparse.Namespace) -> dict[str, object]:
    """Run all rounds, with a new front after each that was killed."""
    rng = random.Random(options.seed)
    found = Counter[str]()
    wrong: list[str] = []
    expected: dict[str, str] = {}
    done = 0
    begin_s = time.monotonic()
    while found["rounds"] < options.rounds:
        with Server(plan, "--port", "0") as server:

            async def live(server: Server = server) -> Load:
                async with client_of(server) as http:
                    load = Load(http, options.tokens, rng)
                    load.expected = expected
                    if not expected:
                        await load.undisturbed()
                    await serve_until_front_killed(server, load, options, rng, found)
                    return load

            load = asyncio.run(live())
            wrong += load.wrong
            done += load.done
            found["exit_codes"] += 0 if load.front_killed else server.end()
        print(json.dumps(found), "requests:", done, "wrong:", wrong, file=sys.stderr, flush=True)
    counted = {"requests": done, "wrong": wrong[:5], "wrong_count": len(wrong) + found["left"]}
    return {**found, **counted, "seconds": round(time.monotonic() - begin_s)}


def client_of(server: Server) -> httpx.AsyncClient:
    """A client with a new connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=300.0, limits=limits)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--policy", default="slice", help="of the plan that is made without --plan")
    parser.add_argument("--set", action="append", default=[], help="a parameter of that policy")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        fake = {"eos_one_in": 0, "decode_s": 0.004, "hang_token": HANG}
        if options.plan:
            plan = read_file(Plan, options.plan)
        else:
            policy = Settings(policy=options.policy, parameters=from_words(options.set))
            plan = fake_plan(Path(folder), policy, **fake)
        hang_s = 1.0 if options.signal == "STOP" or options.mixed else plan.recipe.serve.hang_s
        served = plan.recipe.serve.model_copy(update={"admission": "queue", "hang_s": hang_s})
        recipe = plan.recipe.model_copy(update={"serve": served})
        write_file(plan.model_copy(update={"recipe": recipe}), path)
        found = run(path, options)
    print(json.dumps(found))
    return bool(found["wrong_count"] or found["exit_codes"])


if __name__ == "__main__":
    sys.exit(main())
