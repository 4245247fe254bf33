"""Whether a vLLM server still generates: its engine may hang while /health answers 200.

`figures` are what its engine reports after each pass: while they change, it is alive. Where they
stand still, it is asked for a token (`generates`). llmctl asks the server that it started. In a
container this file is the program of a probe, in the Python of vLLM's image, and so it imports
nothing but the standard library:

    python3 alive.py URL MODEL SECONDS NOTE [end]

It exits with 0 if the server is alive, 1 if it never was, and 3 if it hangs: its figures are those
of the last call, which NOTE keeps, it gives no token within SECONDS, and they are the same after
that. `end` then kills all processes of the container, for a manager that restarts only what ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

PAGE_S = 5.0  # for /metrics
MOST_BYTES = 32 << 20  # of an answer
NEVER = 1
HANGS = 3  # exit codes
# What vLLM's engine reports with each pass; vLLM's API server changes none of it by itself.
_FIGURES = re.compile(
    r"^vllm:(?:prompt_tokens_total|generation_tokens_total|num_requests_running"
    r"|num_requests_waiting|kv_cache_usage_perc)\b.*$",
    re.MULTILINE,
)


def metrics(url: str) -> str:
    """The server's page of metrics; '' without an answer."""
    try:
        page: bytes = (
            build_opener(ProxyHandler({})).open(f"{url}/metrics", timeout=PAGE_S).read(MOST_BYTES)
        )
    except (OSError, HTTPException):
        return ""
    return page.decode(errors="replace")


def figures(url: str) -> str:
    """The engine's figures, as its /metrics has them; '' without an answer or any of them."""
    return "\n".join(_FIGURES.findall(metrics(url)))


def blocks(url: str) -> int:
    """The blocks of KV cache that the server says it has; 0 where it does not say so."""
    found = re.search(r'num_gpu_blocks="(\d+)"', metrics(url))
    return int(found[1]) if found else 0


def generates(url: str, model: str, limit_s: float, key: str = "") -> bool:
    """Whether the server gives a token within `limit_s`. One that refuses to try is no hang."""
    fields = {"model": model, "prompt": "a", "max_tokens": 1, "ignore_eos": True, "stream": False}
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    request = Request(f"{url}/v1/completions", json.dumps(fields).encode(), headers)
    try:
        build_opener(ProxyHandler({})).open(request, timeout=limit_s).read(MOST_BYTES)
    except HTTPError as error:
        return error.code < 500
    except (OSError, HTTPException):
        return False
    return True


def main() -> None:
    """The program; see above."""
    url, model, seconds, note, *mode = sys.argv[1:]
    path = Path(note)
    now = figures(url)
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if not now or now == before:
        has_token = generates(url, model, float(seconds))
        now = figures(url)
        if not has_token and before is None and not now:
            raise SystemExit(NEVER)
        if not has_token and now in ("", before):
            print(f"no token within {seconds} s", file=sys.stderr)
            if mode == ["end"]:
                os.kill(-1, signal.SIGKILL)
            raise SystemExit(HANGS)
    path.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    main()
