"""A guard process that kills child processes which must not outlive this one.

A child can tie itself to its parent only once its own code runs. A child that is stopped before
that, a forked child that has not started its program, and the children of a child cannot. The guard
waits for the end of this process, however it ends, and kills the registered process groups. `watch`
starts the guard on first use.

This file is also the guard's program. It imports nothing of llmctl, so that it starts in 20 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time

POLL_S = 0.1
READ_BYTES = 1 << 16


class _Guard:
    """The guarded process's side. It is thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, float] = {}
        self._pipe: int | None = None
        self._owner = 0  # the process id: a fork of this process needs its own guard

    def watch(self, group: int, grace_s: float = 0.0) -> None:
        """Have a process group killed when this process ends, however it ends.

        Args:
            group: the id of the group, which is that of its first process.
            grace_s: seconds that the first process has to end by itself. Once it has ended, the
                rest of the group is killed at once.

        Raises `OSError` if the guard cannot be started. Starting takes 20 to 30 ms, once per
        process.
        """
        with self._lock:
            if self._owner != os.getpid():
                self._groups = {}
                self._pipe = None
                self._owner = os.getpid()
            self._groups[group] = grace_s
            self._send(f"+{group} {grace_s}\n")

    def forget(self, group: int) -> None:
        """The group has ended: do not kill it. Its id may be reused from now on."""
        with self._lock:
            if self._owner == os.getpid() and self._groups.pop(group, None) is not None:
                self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        if self._pipe is not None:
            try:
                os.write(self._pipe, line.encode())
                return
            except BlockingIOError:
                return  # the guard is stopped; waiting for it would block this process
            except BrokenPipeError:
                os.close(self._pipe)  # the guard was killed
                self._pipe = None
        self._pipe = _start()
        lines = "".join(f"+{group} {grace_s}\n" for group, grace_s in self._groups.items())
        os.write(self._pipe, lines.encode())


def _start() -> int:
    """Start a guard and return the writing end of its pipe, which only this process holds."""
    reader, writer = os.pipe()
    try:
        subprocess.run(
            (sys.executable, "-I", "-S", __file__, str(reader), str(os.getpid())),
            pass_fds=(reader,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to this process's group does not reach the guard
            check=True,
        )
    except subprocess.CalledProcessError as error:
        os.close(writer)
        raise OSError(error.returncode, "the process that guards its children ended") from None
    except BaseException:  # also Ctrl-C: the guard ends when its pipe is closed
        os.close(writer)
        raise
    finally:
        os.close(reader)
    os.set_blocking(writer, False)
    return writer


_GUARD = _Guard()
watch = _GUARD.watch
forget = _GUARD.forget


def main() -> None:
    """The guard: `python guard.py PIPE PID`. PID is the guarded process."""
    pipe = int(sys.argv[1])
    guarded = int(sys.argv[2])
    ends = [pipe]
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        ends.append(os.pidfd_open(guarded))
    if os.fork():
        os._exit(0)  # the guard must not be an unknown child of the guarded process
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # sent to a whole service, while its guarded process may continue
        signal.signal(number, signal.SIG_IGN)
    _kill_groups(_listen(pipe, ends), pipe)


def _listen(pipe: int, ends: list[int]) -> dict[int, float]:
    """Wait for the end of the guarded process; return its groups with their grace in seconds."""
    groups: dict[int, float] = {}
    poll = select.poll()
    rest = b""
    for descriptor in ends:
        poll.register(descriptor, select.POLLIN)
    os.set_blocking(pipe, False)
    while True:
        ended = any(descriptor != pipe for descriptor, _ in poll.poll())
        try:
            data = os.read(pipe, READ_BYTES)
            ended = ended or not data
        except BlockingIOError:
            data = b""
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            group, _, grace_s = line[1:].partition(b" ")
            if line[:1] == b"+":
                groups[int(group)] = float(grace_s)
            else:
                groups.pop(int(group), None)
        if ended and not data:
            return groups


def _kill_groups(groups: dict[int, float], pipe: int) -> None:
    for process in _pipe_holders(pipe):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    began_s = time.monotonic()
    while groups:
        for group, grace_s in list(groups.items()):
            if time.monotonic() - began_s >= grace_s or not _exists(group):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)
                del groups[group]
        if groups:
            time.sleep(POLL_S)


def _pipe_holders(pipe: int) -> list[int]:
    """Processes that still hold the pipe: forked, and without a program of their own yet.

    On systems other than Linux none are found; there the guard learns of the end only after they
    end.
    """
    try:
        wanted = os.readlink(f"/proc/self/fd/{pipe}")
        others = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {os.getpid()}
    except OSError:
        return []
    holders = []
    for process in others:
        folder = f"/proc/{process}/fd"
        with contextlib.suppress(OSError):  # another user's process, or it has ended
            if any(os.readlink(f"{folder}/{name}") == wanted for name in os.listdir(folder)):
                holders.append(process)
    return holders


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


if __name__ == "__main__":
    main()
