"""The protocol of the systems of `offline_throughput`: each is a process that serves on request.

A system writes a line of JSON when it has loaded. For each line that it reads, a number n, it
serves the first n requests and writes {"seconds": ..., "outputs": {request: tokens}}. It ends at
the end of its input. Only the standard library is needed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

Outputs = Mapping[int, Sequence[int]]
Serve = Callable[[int], Outputs]


def answer(load: Callable[[], Serve]) -> None:
    """Load, and serve as often as requested. Output of libraries goes to stderr."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        serve = load()
        print("{}", file=out, flush=True)
        for line in sys.stdin:
            start_s = time.perf_counter()
            outputs = serve(int(line))
            seconds = time.perf_counter() - start_s
            tokens = {index: [int(token) for token in found] for index, found in outputs.items()}
            print(json.dumps({"seconds": seconds, "outputs": tokens}), file=out, flush=True)
