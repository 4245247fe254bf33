"""CPU time of the front process per streamed token and per event.

    python -m benchmarks.serving.front_cpu [--clients 32] [--tokens 200] [--step-ms 20]

Takes about half a minute. Needs nothing but the package: two worker processes with fake engines.

Clients are raw sockets, so that the figure is the server's. A worker reports its steps every 50 ms;
a slower step means fewer tokens per event, hence more events per token. Worker processes are not
counted, since their engine computes nothing.
"""

from __future__ import annotations

import asyncio

from benchmarks.common.command import make_parser
from benchmarks.common.raw_client import request, send
from benchmarks.common.serving import fake_server


async def stream(port: int, tokens: int) -> int:
    """One streamed request; its number of events."""
    asked = request(prompt="x" * 50, max_tokens=tokens, stream=True, temperature=0)
    reader, writer = await send(port, asked)
    events = (await reader.read(-1)).count(b"data: {")
    writer.close()
    return events


async def crowd(port: int, clients: int, tokens: int) -> int:
    return sum(await asyncio.gather(*[stream(port, tokens) for _ in range(clients)]))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=20.0)
    options = parser.parse_args()
    with fake_server(eos_one_in=0, decode_s=options.step_ms / 1e3) as server:
        asyncio.run(crowd(server.port, 4, 8))  # warms up
        before = server.front.cpu_times()
        events = asyncio.run(crowd(server.port, options.clients, options.tokens))
        after = server.front.cpu_times()
        server.end()
    used_s = after.user + after.system - before.user - before.system
    total = options.clients * options.tokens
    print(
        f"{total:,} tokens in {events:,} events: {1e6 * used_s / total:.1f} us of front CPU per"
        f" token, {1e6 * used_s / events:.0f} us per event, {total / used_s:,.0f} tokens per CPU"
        " second"
    )


if __name__ == "__main__":
    main()
