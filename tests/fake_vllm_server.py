"""A Python with a fake "vLLM": a server with its flags, pages and iteration log, without a model.

The server batches continuously, prefills in chunks and never preempts. A pass sleeps as long as
`FORWARD_S` says. The model's name chooses a fault: 'dies' ends while it loads; 'breaks' answers
groups of 3 with 500; 'loads' is never ready and ignores signals, as vLLM does while it loads;
'stubborn' does not end when told to; 'engine' starts a second process, and leaves it behind;
'overlaps' schedules and launches passes ahead, as vLLM does on a GPU, by the law `LAW`. After
SIGUSR1 the server hangs: it answers /health and /metrics, and generates nothing.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

FORWARD_S = (0.001, 2e-6, 2e-5)  # flat, per cached token of a decode, per token of a chunk
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64]
LAW = {
    "pass_read": 4e-3,
    "token_alone": 2e-5,
    "cached_alone": 2e-7,
    "token_arithmetic": 4e-5,
    "attended": 1e-9,
    "cached_beside": 3e-7,
    "graph": 2e-3,
    "graph_row": 1e-5,
    "piece": 5e-3,
    "piece_row": 1e-5,
    "eager": 1e-2,
    "eager_chunk": 2e-4,
}


def install(folder: Path, version: str = "0.32.0+cpu", distribution: str = "vllm") -> str:
    """Make it in `folder`, as if `distribution` had installed it; return the path of its Python."""
    site = folder / "site"
    package = site / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for each in (site / "vllm", site / "vllm" / "entrypoints", package):
        (each / "__init__.py").touch()
    (package / "main.py").write_text(f"from {__name__} import main\n")
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)
    here = Path(__file__).resolve().parent
    python = folder / "python"
    python.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        PYTHONPATH="$PYTHONPATH:{site}:{here}:{here.parent}" exec {sys.executable} "$@"
        """)
    )
    python.chmod(0o755)
    return str(python)


class Row:
    """A request that waits or runs."""

    def __init__(self, name: str, prompt: int, limit: int) -> None:
        self.name = name
        self.prompt = prompt
        self.limit = limit
        self.computed = self.generated = 0  # computed: also what was found in the cache
        self.planned = 0  # tokens that were generated or are under way, where passes overlap
        self.tokens: asyncio.Queue[bool] = asyncio.Queue()


class Engine:
    """Runs one pass after the other while requests are there."""

    overlaps = False

    def __init__(self, flags: dict[str, str]) -> None:
        self.slots = int(flags.get("--max-num-seqs", 256))
        self.budget = int(flags.get("--max-num-batched-tokens", 2048))
        self.caches = "--enable-prefix-caching" in sys.argv
        self.block = int(flags.get("--block-size", 16))
        self.kept: set[tuple[int, ...]] = set()  # beginnings of whole blocks
        self.rows: list[Row] = []
        self.news = asyncio.Event()
        self.hangs = False
        self.generated = 0
        self.step = 0
        path = os.environ.get("LLMCTL_VLLM_ITERATIONS")
        self.log = open(path, "wb", buffering=0) if path else None  # noqa: SIM115
        if self.log:
            self.log.write(self._header(flags))

    def _header(self, flags: dict[str, str]) -> bytes:
        from toolkit.files.iterations import IterationLogHeader, to_line

        return to_line(
            IterationLogHeader(
                max_num_seqs=self.slots,
                max_num_batched_tokens=self.budget,
                block_tokens=self.block,
                blocks=8192 if self.overlaps else 256,
                enable_chunked_prefill=True,
                prefix_caching=False,
                async_scheduling=self.overlaps,
                policy="fcfs",
                version="0.32.0",
                model_type="llama",
                dtype="float32",
                device="cpu",
                max_model_len=int(flags["--max-model-len"]),
                vocab_size=512,
                kv_bytes_per_token=4096,
                graph_sizes=GRAPH_SIZES if self.overlaps else [],
                graph_mode="FULL_AND_PIECEWISE" if self.overlaps else "",
                executor="uni" if self.overlaps else "",
            )
        )

    def found(self, prompt: list[int]) -> int:
        """The number of leading tokens of a prompt that are cached. All of its whole blocks are
        cached from now on.
        """
        ends = range(self.block, len(prompt), self.block)
        beginnings = [tuple(prompt[:end]) for end in ends] if self.caches else []
        count = sum(one in self.kept for one in beginnings)
        self.kept.update(beginnings)
        return count * self.block

    async def run(self) -> None:
        from toolkit.files.iterations import LoggedRow as Logged

        while True:
            while not self.rows or self.hangs:
                self.news.clear()
                await self.news.wait()
            start_s = time.monotonic()
            budget = self.budget
            part = []
            for row in self.rows[: self.slots]:
                new = min(row.prompt + row.generated - row.computed, budget)
                if new:
                    part.append((row, Logged(row.name, row.computed, new, row.prompt)))
                budget -= new
            flat, cached, token = FORWARD_S
            reading = sum(one.computed for _, one in part if one.decodes)
            new = sum(one.new for _, one in part if not one.decodes)
            await asyncio.sleep(flat + cached * reading + token * new)
            for row, one in part:
                row.computed += one.new
            self._settle(part, start_s)

    def _settle(self, part: list[tuple], start_s: float, **stamps: float) -> None:
        """A pass of these rows has ended: a row gets a token if its prompt is computed."""
        from toolkit.files.iterations import LoggedPass, to_line

        ended = []
        for row, one in part:
            if one.computed + one.new >= row.prompt:
                row.generated += 1
                self.generated += 1
                if row.generated == row.limit:
                    ended.append(row)
                row.tokens.put_nowait(row.generated == row.limit)
        self.rows = [row for row in self.rows if row not in ended]
        self.step += 1
        if self.log:
            logged = LoggedPass(
                step=self.step,
                start_s=start_s,
                end_s=time.monotonic(),
                rows=[one for _, one in part],
                preempted=[],
                ended=[row.name for row in ended],
                waiting=max(len(self.rows) - self.slots, 0),
                free_blocks=1,
                **stamps,
            )
            self.log.write(to_line(logged))


async def until(time_s: float) -> None:
    """Wait until then. Timers of an event loop are a millisecond late; the last ones are spun."""
    await asyncio.sleep(max(time_s - time.monotonic() - 2e-3, 0.0))
    while time.monotonic() < time_s:
        await asyncio.sleep(0)


class OverlappingEngine(Engine):
    """Launches a pass while the one before it runs, and then hands out the tokens of that one."""

    overlaps = True

    async def run(self) -> None:
        from toolkit.files.iterations import shape_of_rows
        from toolkit.laws.passes import GraphSettings, PassLaw

        law = PassLaw(LAW, graphs=GraphSettings("FULL_AND_PIECEWISE", tuple(GRAPH_SIZES)))
        under_way: list[tuple] = []
        gpu_s = 0.0
        while True:
            while not under_way and (not self.rows or self.hangs):
                self.news.clear()
                await self.news.wait()
            start_s = time.monotonic()
            if part := self._plan():
                shape = shape_of_rows([one for _, one in part])
                launched_s = start_s + law.launch_s(shape)
                await until(launched_s)
                begins_s = launched_s if law.waits_for_launch(shape) else start_s
                gpu_s = max(max(gpu_s, begins_s) + law.gpu_s(shape), launched_s)
                under_way.append((part, start_s, launched_s, gpu_s))
                if len(under_way) == 1:
                    continue
            await until(under_way[0][3])
            settled, start_s, launched_s, _ = under_way.pop(0)
            self._settle(settled, start_s, launched_s=launched_s, ready_s=time.monotonic())

    def _plan(self) -> list[tuple]:
        from toolkit.files.iterations import LoggedRow as Logged

        budget = self.budget
        part = []
        for row in self.rows[: self.slots]:
            new = min(row.prompt + row.planned - row.computed, budget)
            if row.planned < row.limit and new > 0:
                part.append((row, Logged(row.name, row.computed, new, row.prompt)))
                row.computed += new
                row.planned += row.computed == row.prompt + row.planned
                budget -= new
        return part


class Front:
    """The part of HTTP that the tests need."""

    def __init__(self, flags: dict[str, str], model: str) -> None:
        kind = OverlappingEngine if "overlaps" in model else Engine
        self.engine = kind(flags)
        self.model = model
        self.name = flags["--served-model-name"]
        self.flags = flags
        self.count = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *fields = head.split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (field.partition(": ") for field in fields)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1]
        if path == "/v1/completions":
            await self.complete(json.loads(body), headers, writer)
        else:
            pages = {
                "/v1/models": json.dumps({"data": [{"id": self.name, "max_model_len": 512}]}),
                "/health": "",
                "/metrics": 'vllm:cache_config_info{block_size="16",num_gpu_blocks="257"} 1.0\n'
                f'vllm:generation_tokens_total{{engine="0"}} {self.engine.generated}\n',
                "/flags": json.dumps(sys.argv),
            }
            self.write(writer, pages.get(path, "{}"))
        writer.close()

    def write(self, writer: asyncio.StreamWriter, text: str, status: int = 200) -> None:
        writer.write(
            f"HTTP/1.1 {status} x\r\ncontent-length: {len(text)}\r\nconnection: "
            f"close\r\n\r\n{text}".encode()
        )

    async def complete(
        self, asked: dict, headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> None:
        self.count += 1
        row = Row(
            f"cmpl-{headers.get('x-request-id', self.count)}-0-abc",
            len(asked["prompt"]),
            asked["max_tokens"],
        )
        row.computed = self.engine.found(asked["prompt"])
        self.engine.rows.append(row)
        self.engine.news.set()
        usage = {"prompt_tokens": row.prompt, "completion_tokens": row.limit}
        if "breaks" in self.model and len(self.engine.rows) > 2:
            return self.write(writer, json.dumps({"error": {"message": "the fake breaks"}}), 500)
        if not asked.get("stream"):
            while not await row.tokens.get():
                pass
            return self.write(writer, json.dumps({"choices": [{"text": "x"}], "usage": usage}))
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            last = await row.tokens.get()
            writer.write(b'data: {"choices": [{"text": "x"}]}\n\n')
            if last:
                writer.write(
                    b"data: %s\n\ndata: [DONE]\n\n"
                    % json.dumps({"choices": [], "usage": usage}).encode()
                )
                return None


async def serve() -> None:
    _, verb, model, *words = sys.argv
    assert verb == "serve"
    if "engine" in model:
        code = "import signal; print('INFO: engine', flush=True); signal.pause()"
        subprocess.Popen([sys.executable, "-c", code])
    if "loads" in model:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    if "dies" in model:
        raise SystemExit("ValueError: the fake dies")
    flags = {
        word: (words[k + 1] if k + 1 < len(words) else "")
        for k, word in enumerate(words)
        if word[:2] == "--"
    }
    front = Front(flags, model)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, (lambda: None) if "stubborn" in model else ended.set
    )
    hang = partial(setattr, front.engine, "hangs", True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, hang)
    running = asyncio.create_task(front.engine.run())
    async with await asyncio.start_server(front.answer, flags["--host"], int(flags["--port"])):
        print("INFO: ready")
        await ended.wait()
    running.cancel()


def main() -> None:
    importlib.metadata.version("vllm")  # as vLLM's own does, for --version
    asyncio.run(serve())
