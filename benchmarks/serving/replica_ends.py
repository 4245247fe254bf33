"""At every byte at which a replica may end its answer, does the client get the undisturbed one?

    python -m benchmarks.serving.replica_ends --prompts 2 [--direct]

A front stands before two servers of `benchmarks.common.dialects`. For each dialect and each kind of
request, the first attempt ends after 0, 1, 2, ... bytes of its body, and another server goes on.
Text, token ids, finish reason, stop reason, usage, end, one id, one role: all must be those of the
answer that was not disturbed. Servers without token ids cannot go on behind the first byte, nor can
an answer with a stop string that is sent, or with an id before its text: there the client gets the
beginning of that answer, and one error.

With `--direct` there is no front and no socket: the bytes of each attempt go to `MergedAnswer`, and
what it returns is read as the client's. That takes a third of the CPU time.

Takes ten minutes on one core with two prompts. Needs no model and no GPU.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import uvloop

from benchmarks.common.command import make_parser
from benchmarks.common.dialects import CONTEXT, DIALECTS, MODEL, Dialect, Replica, Stream
from benchmarks.common.fronts import front_on
from benchmarks.common.raw_client import Answer, told
from toolkit.openai import requests as wire
from toolkit.openai.errors import ApiError
from toolkit.openai.merge import MergedAnswer
from toolkit.openai.requests import GenerationCall
from toolkit.server.options import ServerOptions

STOPS = {"stop": ["de", "fgab"]}
USAGE = {"stream_options": {"include_usage": True}}
GREEDY = {"temperature": 0}
TEXT = {"prompt": "abcd gaf"}
CHAT = {"messages": [{"role": "user", "content": "gab cde"}]}
SHORT = {"max_tokens": 20}
# By name, the fields of a request; those of chats have messages.
REQUESTS: dict[str, dict[str, Any]] = {
    "completion": TEXT | SHORT | GREEDY,
    "usage": TEXT | SHORT | GREEDY | USAGE,
    "token ids": TEXT | SHORT | GREEDY | USAGE | {"return_token_ids": True},
    "stop": TEXT | {"max_tokens": 60} | GREEDY | USAGE | STOPS,
    "stop, sent": TEXT | {"max_tokens": 60} | GREEDY | USAGE | STOPS
    | {"include_stop_str_in_output": True},
    "stop, token ids": TEXT | {"max_tokens": 60} | GREEDY | USAGE | STOPS
    | {"return_token_ids": True},
    "stop, not met": TEXT | SHORT | GREEDY | USAGE | {"stop": "gggggggg"},
    "ids for a prompt": {"prompt": [1, 2, 3]} | SHORT | GREEDY | USAGE,
    "no limit": TEXT | GREEDY | USAGE | {"max_tokens": None, "stop": ["de", "fa", "b "]},
    "chat": CHAT | SHORT | GREEDY | USAGE,
    "chat, token ids": CHAT | SHORT | GREEDY | USAGE | {"return_token_ids": True},
    "chat, stop": CHAT | {"max_tokens": 60} | GREEDY | USAGE | STOPS,
    "chat, stop, token ids": CHAT | {"max_tokens": 60} | GREEDY | USAGE | STOPS
    | {"return_token_ids": True},
    "chat, no limit": CHAT | GREEDY | USAGE | {"stop": ["de", "fa", "b "]},
    "sampled": TEXT | SHORT | USAGE,
    "sampled chat": CHAT | SHORT | USAGE,
}  # fmt: skip
# Sampled answers differ after each switch at a real server, and so are compared only where nothing
# is generated again: an event of one token.
SAMPLED_BY = ("vllm", "vllm, CRLF")
# The client has, or may have, what no other server can go on behind.
MAY_BREAK = {name for name, fields in REQUESTS.items() if "return_token_ids" in fields}
MAY_BREAK.add("stop, sent")


class Client:
    """One connection to the front, one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self, fields: dict[str, Any]) -> Answer:
        """Send a streamed request, and read its answer."""
        body = json.dumps({"model": MODEL, "stream": True} | fields).encode()
        path = b"/v1/chat/completions" if "messages" in fields else b"/v1/completions"
        head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        self._writer.write(head % path + b"content-length: %d\r\n\r\n" % len(body) + body)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        sizes = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
        if sizes:
            return told(int(lines[0].split()[1]), await self._reader.readexactly(sizes[0]))
        content = bytearray()
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            content += (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)
        return told(int(lines[0].split()[1]), bytes(content))


class Direct:
    """What a front would answer, of the bytes that servers of a dialect answer. The last number of
    `cuts` is how many bytes of the next answer come; none: all.
    """

    def __init__(self, dialect: Dialect, cuts: list[int]) -> None:
        self._dialect = dialect
        self._cuts = cuts
        self._contents: dict[tuple[str, bytes], bytes] = {}

    @property
    def longest(self) -> int:
        """Bytes of the longest answer."""
        return max(map(len, self._contents.values()), default=0)

    async def ask(self, fields: dict[str, Any]) -> Answer:
        """Make attempts until the answer has ended, as `toolkit.server.relay` does."""
        dialect = self._dialect
        body = json.dumps({"model": MODEL, "stream": True} | fields).encode()
        path = wire.CHAT if "messages" in fields else wire.COMPLETIONS
        merged = MergedAnswer(GenerationCall(path, body))
        passed = b""
        while True:
            path, body = merged.request(
                speaks_ids=dialect.ids,
                context=CONTEXT,
                default_tokens=dialect.default_tokens or CONTEXT,
            )
            content = self._content(path, body)
            passed += merged.feed(content[: self._cuts.pop()] if self._cuts else content)
            if not (merged.failure or merged.ended):
                passed += merged.end()
            if not merged.failure:
                return told(200, passed)
            if merged.complete:
                return told(200, passed + merged.finish())
            if not merged.goes_on:
                return told(200, passed + merged.error(ApiError(merged.failure)))

    def _content(self, path: str, body: bytes) -> bytes:
        content = self._contents.get((path, body))
        if content is None:
            stream = Stream(self._dialect, json.loads(body), chat=path == wire.CHAT)
            content = self._contents[path, body] = stream.content()
        return content


@asynccontextmanager
async def front_before(*replicas: Replica) -> Any:
    """A client of a front before these replicas."""
    for replica in replicas:
        await replica.server.start()
    urls = [replica.server.url for replica in replicas]
    async with front_on(urls, MODEL, "round-robin", ServerOptions(), hang_s=30.0) as front:
        pool, listener = front
        while len(pool.up) < len(replicas):
            await asyncio.sleep(0.01)
        streams = await asyncio.open_connection(*listener.getsockname()[:2])
        try:
            yield Client(*streams)
        finally:
            streams[1].close()
    for replica in replicas:
        replica.server.kill()


@dataclass
class Tried:
    """The positions of one dialect and request, at how many of them an answer broke off with an
    error, and where it differed.
    """

    dialect: str
    request: str
    positions: int = 0
    broke_off: int = 0
    differences: list[str] = field(default_factory=list)


def cases() -> Iterator[tuple[Dialect, str]]:
    """Each dialect with each request that has a single right answer there."""
    for dialect in DIALECTS:
        for name in REQUESTS:
            needs_ids = "ids" in name
            if name.startswith("sampled") and dialect.name not in SAMPLED_BY:
                continue
            if needs_ids and not dialect.ids:
                continue
            yield dialect, name


def asked(name: str, variant: int) -> dict[str, Any]:
    """The fields of a request, with one of several prompts: each has another answer."""
    fields = REQUESTS[name]
    more = "fgb"[variant % 3] * variant
    if "messages" in fields:
        content = fields["messages"][0]["content"] + more
        return fields | {"messages": [{"role": "user", "content": content}]}
    prompt = fields["prompt"]
    return fields | {"prompt": prompt + more if isinstance(prompt, str) else [*prompt, variant]}


async def tried(
    dialect: Dialect,
    name: str,
    every: int,
    first: int = 0,
    variant: int = 0,
    *,
    direct: bool = False,
) -> Tried:
    """End the first attempt after `first`, `first` + `every`, ... bytes, and compare."""
    cuts: list[int] = []
    found = Tried(dialect.name, name)
    fields = asked(name, variant)
    replicas = [] if direct else [Replica(dialect, cuts), Replica(dialect, cuts)]
    merger = Direct(dialect, cuts)
    served = nullcontext(merger) if direct else front_before(*replicas)
    async with served as client:
        whole = await client.ask(fields)
        assert whole.status == 200
        assert whole.done == 1
        assert not whole.errors
        length = max([merger.longest, *(one.longest for one in replicas)])
        for position in range(first, length, every):
            cuts[:] = [position]
            answer = await client.ask(fields)
            found.positions += 1
            may_break = not dialect.ids or name in MAY_BREAK
            if may_break and is_told(whole, answer):
                found.broke_off += 1
            elif answer != whole:
                found.differences.append(f"{position}: {_difference(whole, answer)}")
    return found


def is_told(whole: Answer, answer: Answer) -> bool:
    """Whether an answer broke off, and its client was told so, once."""
    begins = whole.text.startswith(answer.text) and not answer.finish[1:]
    return begins and len(answer.errors) == answer.done == 1


def _difference(whole: Answer, answer: Answer) -> str:
    before = asdict(whole)
    after = asdict(answer)
    return "; ".join(
        f"{key} {before[key]!r} became {after[key]!r}"
        for key in before
        if before[key] != after[key]
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth position")
    parser.add_argument("--direct", action="store_true", help="without a front and sockets")
    parser.add_argument("--prompts", type=int, default=1, metavar="N", help="of each request")
    options = parser.parse_args()
    start_s = time.monotonic()
    total = 0
    wrong = 0
    print("| dialect | request | positions | broke off | differences |")
    print("| --- | --- | --- | --- | --- |")
    for dialect, name in cases():
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = Tried(dialect.name, name)
            for variant in range(options.prompts):
                part = runner.run(
                    tried(dialect, name, options.every, 0, variant, direct=options.direct)
                )
                found.positions += part.positions
                found.broke_off += part.broke_off
                found.differences += part.differences
        total += found.positions
        wrong += len(found.differences)
        counts = f"{found.positions:,} | {found.broke_off:,} | {len(found.differences)}"
        print(f"| {dialect.name} | {name} | {counts} |", flush=True)
        for line in found.differences[:3]:
            print(f"  {line}")
    print(f"\n{total:,} positions, {wrong} differences, {time.monotonic() - start_s:.0f} s")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
