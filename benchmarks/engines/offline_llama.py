"""llama.cpp's server as a system of `offline_throughput`: float32 weights and cache, over HTTP.

    python -m benchmarks.engines.offline_llama FOLDER LLAMA-SERVER SLOTS

Started by `offline_throughput`. All requests are sent at once, each on a connection of its own, and
answered whole, so that HTTP costs little.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from psutil import Process

from benchmarks.common.command import read_words
from benchmarks.common.gguf_file import write_llama
from benchmarks.common.raw_client import free_ports
from benchmarks.engines.offline_child import Outputs, Serve, answer

HOST = "127.0.0.1"
START_S = 60.0


def cpu_s() -> float:
    """CPU seconds of the server; the client's are few."""
    return sum(sum(child.cpu_times()[:2]) for child in Process().children())


def load() -> tuple[Mapping[str, Any], Serve]:
    from safetensors.numpy import load_file

    where, server, slot_count = read_words(__doc__, "FOLDER", "LLAMA-SERVER", "SLOTS")
    folder = Path(where)
    slots = int(slot_count)
    work = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    path = folder / "model.gguf"
    if not path.exists():
        config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
        write_llama(path, config, load_file(folder / "model" / "model.safetensors"))
    port = _start(server, path, slots, work)

    def one(index: int) -> list[int]:
        connection = HTTPConnection(HOST, port, timeout=600.0)
        body = {
            "prompt": work["prompts"][index],
            "n_predict": work["outputs"][index],
            "ignore_eos": True,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "cache_prompt": False,
            "return_tokens": True,
        }
        kind = {"Content-Type": "application/json"}
        connection.request("POST", "/completion", json.dumps(body), kind)
        reply = json.loads(connection.getresponse().read())
        connection.close()
        if "tokens" not in reply:
            raise RuntimeError(f"llama-server: {reply}")
        found: list[int] = reply["tokens"]
        return found

    def serve(count: int) -> Outputs:
        with ThreadPoolExecutor(count) as pool:
            return dict(enumerate(pool.map(one, range(count))))

    return {"slots": slots}, serve


def _start(server: str, model: Path, slots: int, work: Mapping[str, Any]) -> int:
    (port,) = free_ports(1)
    threads = str(work["threads"])
    command = [server, "-m", str(model), "--host", HOST, "--port", str(port)]
    command += ["-t", threads, "-tb", threads]
    command += ["-np", str(slots), "-c", str(work["kv_tokens"]), "-ctk", "f32", "-ctv", "f32"]
    pairs = zip(work["prompts"], work["outputs"], strict=True)
    longest = max(len(prompt) + output for prompt, output in pairs)
    # with room for it each slot has a cache of its own, and attention reads no other slot's
    shared = work["kv_tokens"] // slots < longest
    command.append("--kv-unified" if shared else "--no-kv-unified")
    process = subprocess.Popen(
        [*command, "--no-webui"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    atexit.register(process.kill)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            connection = HTTPConnection(HOST, port, timeout=1.0)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return port
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{' '.join(command)}: did not start (exit code {process.poll()})")


if __name__ == "__main__":
    answer(load, cpu_s)
