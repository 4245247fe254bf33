"""20,000 requests that try to get the server to do what it should not: by its own schema, at
random, byte by byte.

    python bench/fuzz_server.py [--requests 20000] [--seed 0] [--out fuzz.json]

Four kinds, a quarter each: requests that the server's OpenAPI document allows and ones that it
forbids (schemathesis), bodies near good ones (hypothesis), all three into the application in this
process; and torn bytes through sockets to a server of its own with two workers. The engine is a
fake, so that the figure is the front's. It prints statuses by kind and every answer that is none of
a 2xx, a 4xx or a deliberate 503 in the API's words, or that a valid request got without being too
long. Exit code 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import fuzzing
from serving import Client, Server, ToyWorkers, client, fake_plan

AT_ONCE = 50
Asked = TypeVar("Asked")


class Tally:
    """What came back, by kind of request, and what should not have."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[int]] = {}
        self.wrong: list[str] = []

    def count(self, kind: str, status: int, complaint: str, asked: object) -> None:
        self.statuses.setdefault(kind, Counter())[status] += 1
        if complaint:
            self.wrong.append(f"{kind}: {complaint} after {str(asked)[:600]}")


def generated(
    kind: str,
    strategy: SearchStrategy[Asked],
    ask: Callable[[Asked], Mapping[str, Any]],
    tally: Tally,
    count: int,
    seed: int,
) -> None:
    """`count` requests that hypothesis makes, into one application."""

    async def one(http: Client, asked: Asked) -> None:
        response = await http.request(**ask(asked))
        complaint = fuzzing.complaint_of(response)
        if kind == "valid" and response.status_code != 200 and not fuzzing.beyond_schemas(response):
            complaint = (
                complaint or f"a valid request got {response.status_code}: {response.text[:300]}"
            )
        tally.count(kind, response.status_code, complaint, ask(asked))

    with asyncio.Runner() as runner:
        holder = client(ToyWorkers())
        http = runner.run(holder.__aenter__())

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(strategy)
        def run(asked: Asked) -> None:
            runner.run(one(http, asked))

        run()
        if http.driver.bug:
            tally.wrong.append(f"{kind}: the scheduler stopped at {http.driver.bug!r}")
        runner.run(holder.__aexit__(None, None, None))


def torn(tally: Tally, count: int, seed: int) -> None:
    """`count` connections with damaged requests, and the named ones before."""
    rng = random.Random(seed)

    async def one(port: int, data: bytes) -> None:
        received = await fuzzing.converse(port, data, patience_s=0.2)
        status = next(fuzzing.answers(received), (0,))[0] if received.startswith(b"HTTP/") else 0
        tally.count("bytes", status, fuzzing.raw_complaint(data, received), data)

    async def all_of_them(port: int) -> None:
        sent = [raw for raw, _ in fuzzing.RAW.values()]
        sent += [fuzzing.torn(rng) for _ in range(count - len(sent))]
        for start in range(0, count, AT_ONCE):
            await asyncio.gather(*[one(port, data) for data in sent[start : start + AT_ONCE]])

    with tempfile.TemporaryDirectory() as folder:
        fake_plan(Path(folder))
        with Server(Path(folder) / "plan.json") as server:
            asyncio.run(all_of_them(int(server.url.rpartition(":")[2])))
            code = server.end()
            if code:
                tally.wrong.append(f"bytes: the server ended with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="what was counted, as JSON")
    options = parser.parse_args()
    tally, share, begin_s = Tally(), options.requests // 4, time.monotonic()
    plain = {"method": "POST", "headers": {"content-type": "application/json"}}
    kinds: dict[str, tuple[SearchStrategy[Any], Callable[[Any], Mapping[str, Any]]]] = {
        "valid": (fuzzing.cases(GenerationMode.POSITIVE), fuzzing.wire),
        "invalid": (fuzzing.cases(GenerationMode.NEGATIVE), fuzzing.wire),
        "near": (fuzzing.bodies(), lambda sent: {**plain, "url": sent[0], "content": sent[1]}),
    }
    for kind, (strategy, ask) in kinds.items():
        generated(kind, strategy, ask, tally, share, options.seed)
        print(
            f"{kind:8} {dict(sorted(tally.statuses[kind].items()))}  {time.monotonic() - begin_s:.0f} s",
            flush=True,
        )
    torn(tally, options.requests - 3 * share, options.seed)
    print(
        f"{'bytes':8} {dict(sorted(tally.statuses['bytes'].items()))}  {time.monotonic() - begin_s:.0f} s"
    )
    total = sum(map(Counter.total, tally.statuses.values()))
    print(f"{total:,} requests, seed {options.seed}: {len(tally.wrong)} answers that should not be")
    print("\n".join(tally.wrong[:20]))
    if options.out:
        options.out.write_text(
            json.dumps({"statuses": tally.statuses, "wrong": tally.wrong}, indent=2)
        )
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
