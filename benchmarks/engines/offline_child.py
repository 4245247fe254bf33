"""The protocol of the systems of `offline_throughput`: each is a process that serves on request.

A system writes a line of JSON when it has loaded, {"ready": facts}. For each line that it reads, a
number n, it serves the first n requests and writes {"seconds": ..., "cpu_s": ..., "outputs":
{request: tokens}}. It ends at the end of its input. Only the standard library is needed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Outputs = Mapping[int, Sequence[int]]
Serve = Callable[[int], Outputs]


def answer(
    load: Callable[[], tuple[Mapping[str, Any], Serve]],
    cpu_clock: Callable[[], float] = time.process_time,
) -> None:
    """Load, and serve as often as requested. Output of libraries goes to stderr. `cpu_clock` covers
    all serving processes.
    """
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        facts, serve = load()
        print(json.dumps({"ready": dict(facts)}), file=out, flush=True)
        for line in sys.stdin:
            start = time.perf_counter()
            cpu_start = cpu_clock()
            outputs = serve(int(line))
            seconds = time.perf_counter() - start
            cpu_s = cpu_clock() - cpu_start
            tokens = {index: [int(token) for token in found] for index, found in outputs.items()}
            reply = {"seconds": seconds, "cpu_s": cpu_s, "outputs": tokens}
            print(json.dumps(reply), file=out, flush=True)
