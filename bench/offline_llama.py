"""llama.cpp's server as a system of bench/offline_throughput.py: float32 weights and cache, over
HTTP on this machine.

    python bench/offline_llama.py FOLDER LLAMA-SERVER SLOTS

All requests are sent at once, each on a connection of its own, and answered whole, so HTTP costs
little.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from gguf_file import write_llama
from offline_child import Outputs, Serve, answer
from psutil import Process

HOST = "127.0.0.1"
START_S = 60.0


def cpu_s() -> float:
    """Of the server; its client's is small."""
    return sum(sum(child.cpu_times()[:2]) for child in Process().children())


def load() -> tuple[Mapping[str, Any], Serve]:
    from safetensors.numpy import load_file

    folder, server, slots = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
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
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
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
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    threads = str(work["threads"])
    command = [
        server,
        "-m",
        str(model),
        "--host",
        HOST,
        "--port",
        str(port),
        "-t",
        threads,
        "-tb",
        threads,
    ]
    command += ["-np", str(slots), "-c", str(work["kv_tokens"]), "-ctk", "f32", "-ctv", "f32"]
    longest = max(
        len(prompt) + output
        for prompt, output in zip(work["prompts"], work["outputs"], strict=True)
    )
    shared = (
        work["kv_tokens"] // slots < longest
    )  # else each slot has its own part, whose attention reads no other's
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
