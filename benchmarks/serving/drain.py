"""SIGTERM at a random moment under load: the fate of every request, and how the server ends.

    python -m benchmarks.serving.drain [--rounds 20] [--notice 0.3] [--timeout 20] [--seed 0]

Takes about half a minute per round on two shared, busy cores. Needs nothing but the package: two
workers with fake engines.

48 clients stream requests of random lengths, one after the other, each on a new connection. A
request is accepted when its answer begins with 200; it fails if it then does not end with all its
tokens. With a `--timeout` below 5 s the requests that are left must get a final error and `[DONE]`
instead. Prints one JSON object; the exit code is 1 if a request failed or the server did not exit
with 0.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import request, send
from benchmarks.common.serving import Server, fake_plan

CLIENTS = 48


async def ask(port: int, rng: random.Random) -> str:
    """How one request ended: 'complete', 'final error', 'refused' (503), 'no connection', or an
    error.
    """
    tokens = rng.randint(8, 250)
    asked = request(
        prompt="x" * 20, max_tokens=tokens, stream=True, stream_options={"include_usage": True}
    )
    try:
        reader, writer = await send(port, asked)
    except OSError:
        return "no connection"
    try:
        received = await reader.read(-1)
    except ConnectionError:
        return "reset before an answer"
    finally:
        writer.close()
    if not received:
        return "closed without an answer"
    if not received.startswith(b"HTTP/1.1 200"):
        return "refused" if received.startswith(b"HTTP/1.1 503") else f"answered {received[:40]!r}"
    if b"[DONE]" not in received:
        return "accepted and cut off"
    if b'"error"' in received:
        return "final error"
    return "complete" if b'"completion_tokens":%d' % tokens in received else "accepted and short"


async def not_ready_s(port: int, signalled_s: float) -> float:
    """Seconds until /ready answers 503 or refuses connections."""
    while True:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            ready = (await reader.read(-1)).startswith(b"HTTP/1.1 200")
            writer.close()
        except OSError:
            ready = False
        if not ready:
            return time.perf_counter() - signalled_s


async def one_round(server: Server, rng: random.Random) -> tuple[Counter[str], float, float]:
    port = server.port
    ends = Counter[str]()

    async def client() -> None:
        while server.process.poll() is None and not ends["no connection"]:
            ends[await ask(port, rng)] += 1

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await asyncio.sleep(rng.uniform(0.3, 1.5))
    server.process.terminate()
    signalled_s = time.perf_counter()
    noticed_s = await not_ready_s(port, signalled_s)
    await asyncio.gather(*clients)
    await asyncio.to_thread(server.process.wait, 60)
    return ends, noticed_s, time.perf_counter() - signalled_s


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--notice", type=float, default=0.3)
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    ends = Counter[str]()
    codes = Counter[int | None]()
    noticed: list[float] = []
    took: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        fake_plan(Path(folder), eos_one_in=0, decode_s=0.004)
        command = ["--admission", "queue", "--set", "slice_tokens=32"]
        command += ["--shutdown-notice", str(options.notice)]
        command += ["--shutdown-timeout", str(options.timeout)]
        for _ in range(options.rounds):
            with Server(Path(folder) / "plan.json", *command) as server:
                ended, noticed_s, took_s = asyncio.run(one_round(server, rng))
                ends += ended
                noticed.append(noticed_s)
                took.append(took_s)
                codes[server.process.returncode] += 1
    found = {
        "rounds": options.rounds,
        "requests": dict(ends),
        "exit_codes": dict(codes),
        "not_ready_ms_max": round(1e3 * max(noticed), 1),
        "ended_s_max": round(max(took), 2),
    }
    print(json.dumps(found))
    allowed = {"complete", "refused", "no connection"}
    allowed |= {"final error"} if options.timeout < 5 else set()
    return int(bool(set(ends) - allowed) or set(codes) != {0})


if __name__ == "__main__":
    sys.exit(main())
