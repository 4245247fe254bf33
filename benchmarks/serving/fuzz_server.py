"""20,000 requests, near good ones and torn: every answer must be a documented one.

    python -m benchmarks.serving.fuzz_server [--requests 20000] [--seed 0]

Takes about 40 minutes on two shared, busy cores. Needs hypothesis (`pip install
'llmctl-toolkit[dev]'`).

Two kinds, a half each: bodies near good ones (hypothesis) go to the application in this process;
torn bytes go through sockets to a server with two workers. The engine is a fake, so that the figure
is the front's. Prints the statuses by kind, and every answer that is neither a 2xx, a 4xx nor a
deliberate 503 in the API's form. The exit code is 1 if there is one.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter

import hypothesis
from hypothesis import HealthCheck, Phase

from benchmarks.common import fuzzing
from benchmarks.common.command import make_parser
from benchmarks.common.results_file import keep
from benchmarks.common.serving import Client, ToyWorkers, client, fake_server

AT_ONCE = 50


class Tally:
    """The statuses by kind of request, and the wrong answers."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[int]] = {}
        self.wrong: list[str] = []

    def count(self, kind: str, status: int, complaint: str, asked: object) -> None:
        self.statuses.setdefault(kind, Counter())[status] += 1
        if complaint:
            self.wrong.append(f"{kind}: {complaint} after {str(asked)[:600]}")


def near(tally: Tally, count: int, seed: int) -> None:
    """Send `count` requests that hypothesis makes to one application."""

    async def one(http: Client, path: str, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        response = await http.post(path, content=body, headers=headers)
        tally.count("near", response.status_code, fuzzing.complaint_of(response), (path, body))

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
        @hypothesis.given(fuzzing.bodies())
        def run(asked: tuple[str, bytes]) -> None:
            runner.run(one(http, *asked))

        run()
        if http.driver.bug:
            tally.wrong.append(f"near: the scheduler stopped at {http.driver.bug!r}")
        runner.run(holder.__aexit__(None, None, None))


def torn(tally: Tally, count: int, seed: int) -> None:
    """Open `count` connections with damaged requests, the named ones first."""
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

    with fake_server() as server:
        asyncio.run(all_of_them(server.port))
        if code := server.end():
            tally.wrong.append(f"bytes: the server ended with {code}")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tally = Tally()
    share = options.requests // 2
    begin_s = time.monotonic()

    def show(kind: str) -> None:
        statuses = dict(sorted(tally.statuses[kind].items()))
        print(f"{kind:8} {statuses}  {time.monotonic() - begin_s:.0f} s", flush=True)

    near(tally, share, options.seed)
    show("near")
    torn(tally, options.requests - share, options.seed)
    show("bytes")
    total = sum(map(Counter.total, tally.statuses.values()))
    print(f"{total:,} requests, seed {options.seed}: {len(tally.wrong)} answers that should not be")
    print("\n".join(tally.wrong[:20]))
    keep("counted", vars(tally))
    return bool(tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
