"""The child's side: its channel, its end with its parent, and its signs of life.

Threads do the last two, so an engine cannot block them on the main thread. A child imports this
module first, before anything that may hang.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Literal

from toolkit.processes.channel import Channel

SIGN_EVERY_S = 0.5
CPU_S_MIN = 0.001  # less CPU time between two checks does not count as work
PR_SET_PDEATHSIG = 1
State = Literal["loading", "idle", "busy"]


def channel_to_parent() -> Channel:
    """Return the channel over the socket that the last word of the command line numbers."""
    return Channel(socket.socket(fileno=int(sys.argv[-1])))


def end_with_parent(pipe: int = 0) -> None:
    """End this process when its parent ends, or closes the other end of `pipe`: standard input, of
    a `Child`.

    When the parent ends Linux kills this process, even if it is stopped or its engine holds
    Python's lock. On other systems only the thread notices, which does not run in such a process.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def end() -> None:
        poll = select.poll()
        poll.register(pipe, 0)  # POLLHUP and POLLERR are always reported
        poll.poll()
        os._exit(0)  # nothing needs cleaning up, and the main thread may hang

    threading.Thread(target=end, daemon=True, name="lifeline").start()


class LifeSigns:
    """Sends signs of life from a thread, at most one every `SIGN_EVERY_S`.

    - While the child loads: only if it has worked since the last sign, that is, it or its own
      children have used CPU time, or it has read bytes. A load that hangs gives no signs.
    - While it is idle: always.
    - While it is busy: never, because its steps are signs.

    Args:
        send: sends a sign; raises `OSError` if the parent is gone.
        idle: whether to send signs while the child is idle.
    """

    def __init__(self, send: Callable[[], None], *, idle: bool = True) -> None:
        self.state: State = "loading"
        self._send = send
        self._idle = idle
        self._at_last_sign = -1.0, -1  # CPU seconds and bytes read; the first check finds work
        self._children_s = 0.0
        self._pause = threading.Event()  # never set: tests replace time.sleep, so this waits
        threading.Thread(target=self._send_signs, daemon=True, name="signs").start()

    def _send_signs(self) -> None:
        try:
            while True:
                if self._is_due():
                    self._send()
                self._pause.wait(SIGN_EVERY_S)
        except OSError:
            pass  # the parent is gone, which `end_with_parent` notices

    def _is_due(self) -> bool:
        if self.state != "loading":
            return self.state == "idle" and self._idle
        cpu_s = time.process_time() - time.thread_time()
        read = _bytes_read()
        worked = cpu_s - self._at_last_sign[0] >= CPU_S_MIN or read != self._at_last_sign[1]
        if not worked:  # asked second, because it costs more
            children_s = _children_s()
            worked = children_s - self._children_s >= CPU_S_MIN
            self._children_s = children_s
        if worked:
            self._at_last_sign = cpu_s, read
        return worked


def _bytes_read() -> int:
    """Return the bytes that all other threads have read, by any system call; 0 if that is not
    counted.
    """

    def read_by(task: str) -> int:
        with open(f"/proc/{task}/io", "rb", buffering=0) as file:
            return int(file.read(64).split()[1])

    try:
        return read_by("self") - read_by("thread-self")
    except (OSError, ValueError, IndexError):
        return 0


def _children_s() -> float:
    """Return the CPU seconds of this process's descendants, such as compilers and other ranks."""
    import psutil

    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total
