"""vLLM's own server as a child: `python -m toolkit.inside.vllm_serve MODEL FLAGS`, as `vllm serve MODEL FLAGS`.

It runs in vLLM's Python and imports nothing of ours. It ends when its standard input does, so that it does not outlive
whoever started it, however that died. Whoever did gave it a session of its own: vLLM's engine, a process that an API
server which is ended while it loads leaves behind, is in there and hears the signal too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """Until a signal, or the end of standard input."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[:1] = ["vllm", "serve"]
    vllm()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":  # vLLM's own children import this file again
    main()
