"""vLLM's own server as a child: `python -m toolkit.backends.vllm.child MODEL FLAGS`, as `vllm serve
MODEL FLAGS`.

It runs in vLLM's Python and imports nothing of ours. It ends when its standard input does, so that
it does not outlive whoever started it, however that died, and with it all of the session that it
was given, vLLM's engine too: an API server that loads hears no signal until its engine is there,
which may be never.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

SHUTDOWN = "--shutdown-timeout"  # vLLM's flag: seconds for requests that run
END_S = 10.0  # from then to SIGKILL


def main() -> None:
    """Until a signal, or the end of standard input."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[:1] = ["vllm", "serve"]
    vllm()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    words = sys.argv
    timeout_s = float(words[words.index(SHUTDOWN) + 1]) if SHUTDOWN in words else 0.0
    os.killpg(0, signal.SIGTERM)
    time.sleep(timeout_s + END_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":  # vLLM's own children import this file again
    main()
