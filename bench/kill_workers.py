"""kill -9 of a random worker under load, round after round: what every request got, held against the undisturbed text.

    python bench/kill_workers.py [--rounds 100] [--signal KILL|STOP] [--plan plan.json] [--policy slice] [--seed 0]

Without a plan, fake engines, whose next token is a hash of all before it: a token that was lost, doubled or made from
something else changes all that follow. With one, the plan's real model, whose requests are greedy. 16 clients stream
without a pause, each checks text and usage of every answer against what the same server said before the first kill. A
round is: some tokens flow, one random worker gets the signal, and the server has as many workers as before again.
Workers that are stopped (STOP) are as good as hung: the server has to notice, so `serve.hang_s` is 1 s there.
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
from pathlib import Path

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from serving import Server, fake_plan

from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan

CLIENTS = 16
PROMPTS = 24


class Load:
    """Clients that stream, and what they found wrong."""

    def __init__(self, http: httpx.AsyncClient, tokens: int, rng: random.Random) -> None:
        self._http = http
        self._tokens = tokens
        self._rng = rng
        self.expected: dict[str, str] = {}
        self.wrong: list[str] = []
        self.done = 0
        self.events = 0
        self.stopping = False

    async def undisturbed(self) -> None:
        """What each prompt gives."""
        for _ in range(PROMPTS):
            prompt = "".join(self._rng.choice("abcdefgh ") for _ in range(self._rng.randint(5, 120)))
            text, _, error = await self._ask(prompt)
            if error:
                raise RuntimeError(error)
            self.expected[prompt] = text

    async def _ask(self, prompt: str) -> tuple[str, int, str]:
        """Text, tokens by usage, and what went wrong."""
        body = {
            "prompt": prompt,
            "max_tokens": self._tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, tokens, last = "", 0, ""
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
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
        """One client."""
        while not self.stopping:
            prompt = self._rng.choice(list(self.expected))
            text, tokens, error = await self._ask(prompt)
            self.done += 1
            if error or text != self.expected[prompt] or tokens != self._tokens:
                self.wrong.append(f"{error or 'another text'}: {tokens} tokens, {len(text)} characters")


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


async def run(server: Server, options: argparse.Namespace, rng: random.Random) -> dict[str, object]:
    number = getattr(signal, f"SIG{options.signal}")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=300.0, limits=limits) as http:
        load = Load(http, options.tokens, rng)
        await load.undisturbed()
        clients = [asyncio.create_task(load.go()) for _ in range(CLIENTS)]
        begin_s, back_s, ill = time.monotonic(), [], 0
        for done in range(options.rounds):
            before = load.events
            while load.events < before + rng.randint(5, 60):
                await asyncio.sleep(0.005)
            victim = rng.choice(server.workers())
            victim.send_signal(number)
            killed_s = time.monotonic()
            while await metric(http, "llmctl_worker_restarts_total") < done + 1 or await metric(
                http, "llmctl_workers_alive"
            ) < len(server.workers()):
                ill += (await http.get("/health")).status_code != 200
                await asyncio.sleep(0.05)
            back_s.append(time.monotonic() - killed_s)
            if psutil.pid_exists(victim.pid):
                load.wrong.append(f"worker {victim.pid} is still there")
        load.stopping = True
        await asyncio.gather(*clients)
        return {
            "signal": options.signal,
            "rounds": options.rounds,
            "requests": load.done,
            "wrong": load.wrong[:5],
            "wrong_count": len(load.wrong),
            "restarts": await metric(http, "llmctl_worker_restarts_total"),
            "worker_back_s_median": round(sorted(back_s)[len(back_s) // 2], 2),
            "worker_back_s_max": round(max(back_s), 2),
            "unhealthy_polls": ill,
            "seconds": round(time.monotonic() - begin_s),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--signal", choices=["KILL", "STOP"], default="KILL")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--policy", default="slice")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = [part for one in options.set for part in ("--set", one)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan = read_file(Plan, options.plan) if options.plan else fake_plan(Path(folder), eos_one_in=0, decode_s=0.004)
        hang_s = 1.0 if options.signal == "STOP" else plan.recipe.serve.hang_s
        served = plan.recipe.serve.model_copy(update={"admission": "queue", "hang_s": hang_s})
        write_file(plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"serve": served})}), path)
        with Server(path, "--policy", options.policy, *settings, "--port", "0") as server:
            found = asyncio.run(run(server, options, random.Random(options.seed)))
            found["exit_code"] = server.end()
    print(json.dumps(found))
    return bool(found["wrong_count"] or found["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
