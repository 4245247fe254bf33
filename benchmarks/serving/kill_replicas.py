"""Replicas killed, hung, drained and restarted under load: every answer must equal the undisturbed
one.

    python -m benchmarks.serving.kill_replicas [--requests N] [--rolling]

Takes about two minutes on two shared cores. Needs nothing but the package.

`llmctl serve --replica ...` runs in a process of its own, before stand-in replicas in this one
(`benchmarks.common.standin`). Their next token is a hash of all tokens before it, so a token that
was lost, doubled or made from something else changes all that follow. Clients use both APIs, and
ask for streams and for whole answers; some with stop strings. The replicas give token ids as vLLM
does, by which answers go on. Some streams have log probabilities, or a stop string that is sent,
and cannot go on: where such a stream breaks off, it must end with an error, and its client asks
again. Every fraction of a second one replica is killed, hangs, aborts its requests as a server does
that shuts down, or answers 500; a little later it is well again. The first replica is never
disturbed.

With `--rolling` the replicas come from a file (`--replica FILE`) and none fails. They are updated
one at a time, as an operator would: a new replica starts and is listed; once the front uses it, the
old one leaves the list. The old one ends when it has no request left, or after up to `DRAIN_MAX_S`
seconds with the requests that it still has. On a busy machine that may happen to a request four
times in a row: the front gives it up, as the documentation says, and it is counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import told
from benchmarks.common.serving import Server, fake_plan, metric
from benchmarks.common.standin import MODEL, StandIn, answer_of, prompt_of
from toolkit.files.io import write_file
from toolkit.server.relay import MAX_FAILURES

Figures = dict[str, Any]
CLIENTS = 48
HANG_S = 1.0
DISTURB_S = 0.15  # mean time between two disturbances
TOKEN_S = 0.004
AWAY_S = 1.0  # mean time that a replica is away
KINDS = ("kill", "hang", "drain", "errors")
DRAIN_MAX_S = 0.8  # a long answer takes 0.5 s
POLL_S = 0.05
LETTERS = "acegikmoqsuwy"  # that answers consist of
BROKE = "the answer broke off"  # in the error of a stream that cannot go on
CANNOT_GO_ON = ("logprobs", "include_stop_str_in_output")
GIVEN_UP = f"the request failed on {MAX_FAILURES} replicas"  # as is documented, and told


def request_of(rng: random.Random) -> tuple[dict[str, Any], bool]:
    """A random request, and whether it is a chat."""
    chat = rng.random() < 0.5
    text = "".join(rng.choices("abcdefgh ", k=rng.randint(5, 400)))
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": rng.randint(5, 120)}
    if chat:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    if rng.random() < 0.8:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    kind = rng.random()
    if kind < 0.1:
        body["stop"] = ["".join(rng.choices(LETTERS, k=2)), "qqqq"]
        if kind < 0.03:
            body["include_stop_str_in_output"] = True
    elif kind < 0.2:
        body["logprobs"] = 1
    return body, chat


async def ask(http: httpx.AsyncClient, body: dict[str, Any], *, chat: bool) -> str:
    """Send a request; returns what is wrong with its answer, or ''."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    expected = answer_of(body, chat=chat)
    answer = await http.post(path, json=body)
    if answer.status_code != 200:
        return f"HTTP {answer.status_code}: {answer.text[:200]}"
    if body.get("stream"):
        seen = told(200, answer.content)
        if seen.errors or seen.done != 1 or seen.ids != 1 or not seen.usage:
            return f"{seen.errors}, {seen.ids} ids, {seen.done} ends: {seen.usage}: {seen.text!r}"
        text = seen.text
        usage = seen.usage[-1]
    else:
        read = answer.json()
        choice = read["choices"][0]
        usage = read["usage"]
        text = choice["message"]["content"] if chat else choice["text"]
    if text != expected:
        at = next((k for k, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), -1)
        found = f"{len(text)} for {len(expected)} characters"
        return f"another text at {at}: {found}: {text!r} for {expected!r}"
    prompt = len(prompt_of(body, chat=chat))
    if usage["prompt_tokens"] != prompt:
        return f"usage {usage} for a prompt of {prompt}"
    if "stop" not in body and usage["completion_tokens"] != len(expected):
        return f"usage {usage} for an answer of {len(expected)}"
    return ""


class Trouble:
    """Disturbs all replicas but the first."""

    def __init__(self, replicas: list[StandIn], rng: random.Random) -> None:
        self.replicas = replicas
        self.rng = rng
        self.done: Counter[str] = Counter()
        self.away: set[int] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Disturb until cancelled."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / DISTURB_S))
            here = [k for k in range(1, len(self.replicas)) if k not in self.away]
            if here:
                task = asyncio.create_task(self._disturb(self.rng.choice(here)))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def _disturb(self, index: int) -> None:
        replica = self.replicas[index]
        kind = self.rng.choice(KINDS)
        self.away.add(index)
        self.done[kind] += 1
        away_s = self.rng.expovariate(1 / AWAY_S)
        if kind == "kill":
            replica.kill()
            await asyncio.sleep(away_s)
            await replica.start()
        elif kind == "hang":
            replica.hung = True
            await asyncio.sleep(away_s + 2 * HANG_S)
            replica.hung = False
        elif kind == "drain":
            replica.abort_requests()
            replica.kill_listener()
            await asyncio.sleep(away_s)
            await replica.start()
        else:
            replica.status = 500
            await asyncio.sleep(min(away_s, 0.5))
            replica.status = 0
        self.away.discard(index)


class Rolling:
    """Replaces the replicas that a file lists, one at a time, again and again."""

    def __init__(self, replicas: list[StandIn], rng: random.Random, listed: Path, url: str) -> None:
        self.replicas = replicas
        self.rng = rng
        self.listed = listed
        self.url = url
        self.done: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Update until cancelled."""
        async with httpx.AsyncClient(base_url=self.url, trust_env=False) as http:
            while True:
                old = self.replicas[0]
                new = replace(
                    old, port=0, served=Counter(), bodies=[], connections=set(), _server=None
                )
                await new.start()
                self.replicas.append(new)
                list_replicas(self.replicas, self.listed)
                await _until_listed(http, new, here=True)
                self.replicas.remove(old)
                list_replicas(self.replicas, self.listed)
                await _until_listed(http, old, here=False)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self.rng.uniform(0, DRAIN_MAX_S)):
                        while not old.is_idle:
                            await asyncio.sleep(POLL_S)
                self.done["drained" if old.is_idle else "ended with requests"] += 1
                old.kill()


def list_replicas(replicas: list[StandIn], path: Path) -> None:
    """Write the file that the front reads, whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{each.url}\n" for each in replicas))
    partial.rename(path)


async def _until_listed(http: httpx.AsyncClient, replica: StandIn, *, here: bool) -> None:
    """Wait until the front uses a replica, or no longer."""
    while True:
        shown = (await http.get("/replicas")).json()["replicas"]
        if here is any(each["url"] == replica.url and each["state"] == "up" for each in shown):
            return
        await asyncio.sleep(POLL_S)


class Load:
    """What clients send, and how it ended."""

    def __init__(self, work: list[tuple[dict[str, Any], bool]]) -> None:
        self.left = work
        self.wrong: list[str] = []
        self.broke = 0
        self.given_up = 0

    async def send_all(self, url: str) -> None:
        """Send all requests."""
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=url, timeout=120, limits=limits, trust_env=False
        ) as http:
            await asyncio.gather(*(self._client(http) for _ in range(CLIENTS)))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while self.left:
            body, chat = self.left.pop()
            try:
                problem = await ask(http, body, chat=chat)
            except httpx.HTTPError as error:
                problem = repr(error)
            if BROKE in problem and not body.keys().isdisjoint(CANNOT_GO_ON):
                self.broke += 1
                self.left.append((body, chat))
            elif GIVEN_UP in problem:
                self.given_up += 1
            elif problem:
                self.wrong.append(f"{problem}: {json.dumps(body)}")


async def measure(requests: int, count: int, seed: int, *, rolling: bool) -> Figures:
    """Send `requests` through a front before `count` replicas. Returns the figures of the run."""
    rng = random.Random(seed)
    started_s = time.monotonic()
    replicas = [StandIn(token_s=TOKEN_S) for _ in range(count)]
    for replica in replicas:
        await replica.start()
    load = Load([request_of(rng) for _ in range(requests)])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "plan.json"
        listed = folder / "replicas.txt"
        plan = fake_plan(folder)
        serve = plan.recipe.serve.model_copy(update={"hang_s": HANG_S})
        recipe = plan.recipe.model_copy(update={"serve": serve})
        write_file(plan.model_copy(update={"recipe": recipe}), path)
        list_replicas(replicas, listed)
        words = ["--served-model-name", MODEL, "--port", "0"]
        if rolling:
            words += ["--replica", str(listed)]
        else:
            words += [part for replica in replicas for part in ("--replica", replica.url)]
        said = folder / "said.txt"
        with await asyncio.to_thread(Server, path, *words, log=said) as front:
            url = front.url
            trouble: Trouble | Rolling = Trouble(replicas, rng)
            if rolling:
                trouble = Rolling(replicas, rng, listed, url)
            disturbing = asyncio.create_task(trouble.run())
            await load.send_all(url)
            disturbing.cancel()
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
                shown = (await http.get("/replicas")).json()["replicas"]
                told = (await http.get("/metrics")).text
            exit_code = await asyncio.to_thread(front.end)
    for replica in replicas:
        replica.kill()
    await asyncio.gather(*trouble.tasks, disturbing, return_exceptions=True)
    for replica in replicas:  # again: a disturbance may have started one since
        replica.kill()
    return {
        "requests": requests,
        "wrong": load.wrong,
        "broke": load.broke,
        "given_up": load.given_up,
        "disturbances": dict(trouble.done),
        "attempts": sum(each["requests"] for each in shown),
        "failed_attempts": sum(each["failures"] for each in shown),
        "moved": sum(each["moved"] for each in shown),
        "continued": metric(told, "llmctl_continued_total"),
        "seconds": round(time.monotonic() - started_s, 1),
        "exit_code": exit_code,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rolling", action="store_true", help="update all replicas, again and again"
    )
    given = parser.parse_args()
    run = measure(given.requests, given.replicas, given.seed, rolling=given.rolling)
    found = asyncio.run(run)
    wrong = found.pop("wrong")
    for line in wrong[:20]:
        print(line)
    print(json.dumps(found | {"wrong": len(wrong)}, indent=1))
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
