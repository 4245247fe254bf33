"""vLLM's own server as a child: started, waited for, ended in order, and never left behind."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import psutil

from toolkit.endpoints.vllm_command import VllmCommand, link_package, vllm_version
from toolkit.errors import EngineError

LOAD_S = 1800.0  # a large model from a slow disk, and its compiling
LOOK_EVERY_S = 0.25
END_S = 30.0  # from SIGTERM to SIGKILL
REST_S = 5.0  # the same while it loads, and for processes that it leaves behind
LOOK_AGAIN_S = 0.02
TAIL_LINES = 40
UP_S = 5.0  # for an answer of /health


class VllmServer:
    """A server that runs. `url` is where; its standard error goes to ours, or is kept for when it dies."""

    def __init__(self, command: VllmCommand, host: str, port: int, *, quiet: bool, folder: Path) -> None:
        self.url = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}"
        self._quiet, self._ready = quiet, False
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._engine_cpus, self._other_cpus = command.cpus
        link_package(folder)
        # Its session is its own: Ctrl-C is for us, who then end it in order. Its input ends with us.
        self._child = subprocess.Popen(
            command.words(host, port),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=command.environment(folder),
            cwd=folder,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._keep_output, args=(self._child.stdout,), daemon=True)
        self._reader.start()

    def wait_until_ready(self, limit_s: float = LOAD_S) -> None:
        """Until it answers. `EngineError` with its own words where it ends before, or takes longer."""
        deadline_s = time.monotonic() + limit_s
        while not self.healthy():
            if self._child.poll() is not None:
                raise self.died("while it loaded")
            if time.monotonic() > deadline_s:
                raise EngineError(f"vLLM was not ready within {limit_s:g} s: {self._last_words()}")
            time.sleep(LOOK_EVERY_S)
        self._ready = True
        self._keep_clear()

    def healthy(self) -> bool:
        """Whether /health says so now."""
        try:
            return httpx.get(f"{self.url}/health", timeout=UP_S, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    @property
    def running(self) -> bool:
        """Whether the process is there."""
        return self._child.poll() is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None where it has not ended within `timeout_s`."""
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def died(self, when: str) -> EngineError:
        """The error that says how it ended."""
        code = self._child.wait()
        self._reader.join(UP_S)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return EngineError(f"vLLM ended {when} ({how}): {self._last_words()}", "its own output says more")

    def signal_end(self) -> None:
        """Ask it to end: it refuses new requests and drops those that run."""
        if self.running:
            self._child.terminate()

    def stop(self) -> None:
        """End it, by force where it does not, and whatever of it stays behind.

        While it loads it waits for its engine, and hears no signal (vLLM 0.32).
        """
        self.signal_end()
        if self.wait(END_S if self._ready else REST_S) is None:
            self._child.kill()
            self._child.wait()
        self._end_group()
        if self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.close()
        self._reader.join(UP_S)

    def _end_group(self) -> None:
        """vLLM ends its engine in order; one that was killed leaves it behind."""
        group = self._child.pid
        deadline_s = time.monotonic() + REST_S
        with contextlib.suppress(ProcessLookupError):  # nobody is left
            os.killpg(group, signal.SIGTERM)
            while time.monotonic() < deadline_s:
                time.sleep(LOOK_AGAIN_S)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(-group, os.WNOHANG)  # process 1 of a container inherits them
                os.killpg(group, 0)
            os.killpg(group, signal.SIGKILL)

    def _keep_clear(self) -> None:
        """Move what is not the engine off the CPUs that its threads are bound to, now that they are.

        vLLM's API server and its scheduler's process, which waits busily, would run there at times: that costs passes
        a tenth of their speed, now more and now less. Threads that begin later are where those are that begin them.
        """
        if not self._other_cpus:
            return
        server = psutil.Process(self._child.pid)
        for process in (server, *server.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.cpu_affinity() == self._engine_cpus:
                    continue
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, self._other_cpus)

    def _keep_output(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self._tail.append(line.rstrip())
                if not self._quiet:
                    print(line, end="", file=sys.stderr)

    def _last_words(self) -> str:
        """The last line that names an error, else the last one."""
        lines = [line for line in self._tail if line.strip()]
        named = [line for line in lines if "Error" in line and "Engine core initialization failed" not in line]
        return (named or lines or ["it said nothing"])[-1].strip()[-300:]


@contextlib.contextmanager
def vllm_server(command: VllmCommand, host: str = "127.0.0.1", port: int = 0, *, quiet: bool) -> Iterator[VllmServer]:
    """A server that answers; port 0: a free one. It is ended at the end of the block.

    Raises `InputError` for a version that was not tried, and `EngineError` where vLLM is not there or does not load.
    """
    vllm_version(command.recipe)
    with tempfile.TemporaryDirectory(prefix="llmctl-vllm-") as name:
        server = VllmServer(command, host, port or free_port(host), quiet=quiet, folder=Path(name))
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.stop()


def free_port(host: str) -> int:
    """A port that nobody has at the moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
