"""What the front process costs: its CPU time per streamed token, with fake engines in two worker
processes.

    python bench/front_cpu.py [--clients 32] [--tokens 200] [--step-ms 20]

Clients are raw sockets, so that the figure is the server's. A worker reports its steps every 50 ms;
a slower step means fewer tokens per event, so more events per token. Worker processes are not
counted: their engine is not one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from raw_client import request, send

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from serving import fake_plan


async def stream(port: int, tokens: int) -> int:
    """One streamed request; how many events it took."""
    asked = request(prompt="x" * 50, max_tokens=tokens, stream=True, temperature=0)
    reader, writer = await send(port, asked)
    events = (await reader.read(-1)).count(b"data: {")
    writer.close()
    return events


async def crowd(port: int, clients: int, tokens: int) -> int:
    return sum(await asyncio.gather(*[stream(port, tokens) for _ in range(clients)]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fake_plan(Path(folder), eos_one_in=0, decode_s=options.step_ms / 1e3)
        command = (sys.executable, "-m", "toolkit", "serve", f"{folder}/plan.json", "--json")
        with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            port = int(json.loads(server.stdout.readline())["url"].rpartition(":")[2])
            asyncio.run(crowd(port, 4, 8))  # warms up
            front = psutil.Process(server.pid)
            before = front.cpu_times()
            events = asyncio.run(crowd(port, options.clients, options.tokens))
            after = front.cpu_times()
            server.terminate()
    used_s = after.user + after.system - before.user - before.system
    total = options.clients * options.tokens
    print(
        f"{total:,} tokens in {events:,} events: {1e6 * used_s / total:.1f} us of front CPU per token, ",
        end="",
    )
    print(f"{1e6 * used_s / events:.0f} us per event, {total / used_s:,.0f} tokens per CPU second")


if __name__ == "__main__":
    main()
