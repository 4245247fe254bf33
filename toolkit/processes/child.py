"""A child process, as its parent sees it: its start, its last words, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, ClassVar

# Of what a child prints, this much is kept: two long tracebacks may follow the line that matters.
TAIL_LINES = 400
LINE_BYTES = 4096  # the parts of a longer line count as lines
WORDS_CHARACTERS = 300
DRAIN_S = 1.0  # a process that left the group may hold the output open without end
POLL_GROUP_S = 0.02

# These threads never end: when the thread that started a child ends, Linux regards the child's
# parent as ended.
_SPAWNERS = ThreadPoolExecutor(4, "spawner")


class Child:
    """A process that this one has started, in a process group of its own with all that it starts.

    Its standard input is a pipe that this process holds open and that ends with it: a child that
    calls `toolkit.processes.lifeline.end_with_parent`, or watches its input, ends then. The group
    stays in this session: where it is stopped when this process ends, Linux ends it. Ctrl-C
    reaches only this process. The last lines that the child prints are kept.

    On an event loop, make it in a thread (`asyncio.to_thread`): a start takes 27 to 45 ms from a
    process of 400 MB, and 105 ms from one of 2 GB.

    Args:
        words: the command line.
        environment: None: this process's.
        folder: where it runs; None: here.
        gives: a socket that it gets, closed here; its number becomes the last word of the line.
        shows: whether all that it prints is printed to stderr.

    Raises `OSError` if there is no such program, or no memory for it.
    """

    vague: ClassVar[Sequence[str]] = ("raise ",)  # in lines with 'Error' that say nothing

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        gives: socket.socket | None = None,
        *,
        shows: bool = False,
    ) -> None:
        number = [] if gives is None else [gives.fileno()]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*words, *map(str, number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=number,
                env=environment,
                cwd=folder,
                process_group=0,
            )

        with gives or nullcontext():
            self._process = _SPAWNERS.submit(start).result()
        self._is_over = False  # another group may have its number then
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        assert self._process.stdout is not None
        keep = (self._process.stdout, self._tail, shows)
        self._reader = threading.Thread(target=_keep_output, args=keep, daemon=True)
        self._reader.start()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """End it at once, if it runs."""
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for its end. Returns its exit code; None if it has not ended in time."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def terminate(self) -> None:
        """Send SIGTERM to it, but not to what it has started."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once, with every process of its group; nothing happens after `end`."""
        if not self._is_over:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def end(self, patience_s: float = 0.0, rest_s: float = 0.0) -> str:
        """Wait `patience_s` for its end, then kill it. What it leaves of its group gets SIGTERM,
        and SIGKILL after `rest_s`. Returns how it ended.
        """
        if self.wait(patience_s) is None:
            self._process.kill()
            self._process.wait()
        if not self._is_over:
            end_group(self.pid, rest_s)
            self._is_over = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        return self.ended_by()

    def ended_by(self) -> str:
        """Return its exit code or signal, and its last words. It must have ended."""
        code = self._process.wait()
        self._reader.join(DRAIN_S)
        if code >= 0:
            how = f"exit code {code}"
        else:
            names = {number.value: number.name for number in signal.Signals}
            how = f"killed by {names.get(-code, f'signal {-code}')}"
        words = self.last_words()
        return f"{how}: {words}" if words and code != -signal.SIGKILL else how

    def last_words(self) -> str:
        """Return the last line that it printed about an error, else the last line, or ''."""
        lines = [line for line in self._tail if line.strip()]
        errors = [
            line
            for line in lines
            if "Error" in line and not any(vague in line for vague in self.vague)
        ]
        return ((errors or lines)[-1:] or [""])[0].strip()[-WORDS_CHARACTERS:]


def end_group(group: int, patience_s: float) -> None:
    """Send SIGTERM to a process group, and SIGKILL to what is left of it after `patience_s`."""
    deadline_s = time.monotonic() + patience_s
    with suppress(ProcessLookupError, PermissionError):  # no process is left
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline_s:
            time.sleep(POLL_GROUP_S)
            with suppress(ChildProcessError):
                os.waitpid(-group, os.WNOHANG)  # process 1 of a container inherits orphans
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def _keep_output(stream: IO[bytes], tail: deque[str], shows: bool) -> None:
    """Keep the last lines of a stream."""
    with stream:
        lines: Iterable[bytes] = iter(partial(stream.readline, LINE_BYTES), b"")
        for line in lines:
            text = line.decode(errors="replace")
            tail.append(text.rstrip())
            if shows:
                with suppress(OSError, ValueError):  # stderr is closed
                    print(text, end="", file=sys.stderr)
