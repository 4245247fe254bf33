"""A worker's ties to its front: signs of life while it loads or waits, and its own end when the
front is gone.

Threads do both, so whatever the engine does on the main thread is no excuse. This is the first
thing that a worker's process imports, before anything that may hang; hence the short list of
imports.
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

BEAT_EVERY_S = 0.5
# the frame `Alive`, whose class takes half a second to import
ALIVE = b"\x00\x00\x00\x0c\x81\xa4type\xa5alive"
CPU_S = 0.001  # less than this between two looks is no work
PR_SET_PDEATHSIG = 1
State = Literal["loading", "idle", "busy"]


class FrontSocket:
    """The socket to the front, on which two threads may send."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send all of it. `BrokenPipeError` or `ConnectionResetError` where the front is gone."""
        with self._lock:
            self.socket.sendall(data)


def end_with_front(descriptor: int) -> None:
    """From now on this process ends when the other end of a socket or pipe closes, and when its
    parent dies.

    Linux kills it in the second case, also where it is stopped or its engine holds Python's lock;
    elsewhere a thread notices, which such a process does not run.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True, name="lifeline").start()


def _end_with(descriptor: int) -> None:
    poll = select.poll()
    poll.register(
        descriptor, getattr(select, "POLLRDHUP", 0)
    )  # POLLHUP and POLLERR are always told
    poll.poll()
    os._exit(0)  # nothing here needs a tidy end, and the main thread may never come to one


class LifeSigns:
    """Signs of life from a thread, at most one every `BEAT_EVERY_S`.

    While the worker loads, only where it has done something since the last one: used CPU time, also
    in processes of its own, or read bytes. A load that waits for something that never comes gives
    none. While it is idle, always. While it is busy, none: its steps are.

    Args:
        send: sends one; `OSError` where the front is gone.
        idle: whether it beats while it is idle, too.
    """

    def __init__(self, send: Callable[[], None], *, idle: bool = True) -> None:
        self.state: State = "loading"
        self._send = send
        self._idle = idle
        self._seen = (
            -1.0,
            -1,
        )  # CPU time and bytes read at the last sign; the first look finds news
        self._children_s = 0.0
        self._pause = (
            threading.Event()
        )  # never set: another clock than time.sleep, which tests replace
        threading.Thread(target=self._beat, daemon=True, name="signs").start()

    def _beat(self) -> None:
        try:
            while True:
                if self._lives():
                    self._send()
                self._pause.wait(BEAT_EVERY_S)
        except OSError:
            pass  # the front is gone, which `end_with_front` notices

    def _lives(self) -> bool:
        if self.state == "busy" or (self.state == "idle" and not self._idle):
            return False
        return self.state == "idle" or self._has_worked()

    def _has_worked(self) -> bool:
        cpu_s, read = time.process_time() - time.thread_time(), _bytes_read()
        worked = cpu_s - self._seen[0] >= CPU_S or read != self._seen[1]
        if not worked:  # looking at other processes costs more
            children_s = _children_s()
            worked, self._children_s = children_s - self._children_s >= CPU_S, children_s
        if worked:
            self._seen = cpu_s, read
        return worked


def _bytes_read() -> int:
    """By all system calls that read, of all threads but this one; 0 where that is not told."""
    try:
        return _rchar("self") - _rchar("thread-self")
    except (OSError, ValueError, IndexError):
        return 0


def _rchar(whose: str) -> int:
    with open(f"/proc/{whose}/io", "rb", buffering=0) as file:
        return int(file.read(64).split()[1])


def _children_s() -> float:
    """CPU time of the processes below this one: compilers, other ranks."""
    import psutil

    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
            total += times.user + times.system
        except psutil.Error:
            continue
    return total
