"""Processes that must not outlive this one are ended by a guard: a small process of its own.

A child can tie itself to its parent only once its own code runs. A child that is stopped before
that, one that was forked and has not begun its program, and the children of a child cannot. The
guard waits for the end of this process, whatever ends it, and kills the process groups that it was
told of. `watch` starts it on first use.

This file is also the guard's program. It imports nothing of ours, so that it starts in 20 ms.
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

LOOK_EVERY_S = 0.1
READ_BYTES = 1 << 16


class _Guard:
    """The side of the process that is guarded. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[int, float] = {}
        self._pipe: int | None = None
        self._owner = 0  # a process that was forked from this one needs a guard of its own

    def watch(self, group: int, grace_s: float) -> None:
        with self._lock:
            if self._owner != os.getpid():
                self._groups, self._pipe, self._owner = {}, None, os.getpid()
            self._groups[group] = grace_s
            self._tell(f"+{group} {grace_s}\n")

    def forget(self, group: int) -> None:
        with self._lock:
            if self._owner == os.getpid() and self._groups.pop(group, None) is not None:
                self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        if self._pipe is not None:
            try:
                os.write(self._pipe, line.encode())
                return
            except BlockingIOError:
                return  # it is stopped and hears nothing; waiting for it would stop us, too
            except BrokenPipeError:
                os.close(self._pipe)  # it was killed
                self._pipe = None
        self._pipe = _start()
        every = "".join(f"+{group} {grace_s}\n" for group, grace_s in self._groups.items())
        os.write(self._pipe, every.encode())


def _start() -> int:
    """A new guard; the writing end of its pipe, which only this process has."""
    theirs, ours = os.pipe()
    try:
        subprocess.run(
            (sys.executable, "-I", "-S", __file__, str(theirs), str(os.getpid())),
            pass_fds=(theirs,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what ends the group of this process does not end the guard
            check=True,
        )
    except subprocess.CalledProcessError as error:
        os.close(ours)
        raise OSError(error.returncode, "the process that guards its children ended") from None
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    os.set_blocking(ours, False)
    return ours


_GUARD = _Guard()


def watch(group: int, grace_s: float = 0.0) -> None:
    """Have a process group killed when this process ends, however it does.

    Args:
        group: the id of the group, which is that of its first process.
        grace_s: seconds that the first process has to end by itself. When it has ended, the rest of
            the group is killed at once.

    Raises `OSError` where the guard cannot be started, which takes 20 to 30 ms once per process.
    """
    _GUARD.watch(group, grace_s)


def forget(group: int) -> None:
    """The group has ended. Its id may belong to others from now on."""
    _GUARD.forget(group)


def main() -> None:
    """The guard: `python guard.py PIPE PID`. PID is the process that is guarded."""
    pipe, guarded = int(sys.argv[1]), int(sys.argv[2])
    ends = [pipe]
    with contextlib.suppress(AttributeError, OSError):  # Linux's alone
        ends.append(os.pidfd_open(guarded))
    if os.fork():
        os._exit(0)  # so that the guard is no child of a process that does not know of it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole service: those guarded may go on
    _end(_listen(pipe, ends), pipe)


def _listen(pipe: int, ends: list[int]) -> dict[int, float]:
    """The groups, and how long each may take to end, once the guarded process has ended."""
    groups: dict[int, float] = {}
    poll, rest = select.poll(), b""
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


def _end(groups: dict[int, float], pipe: int) -> None:
    for process in _copies(pipe):
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
            time.sleep(LOOK_EVERY_S)


def _copies(pipe: int) -> list[int]:
    """Processes that still hold the other end of the pipe: forked, and not yet a program of their
    own.

    Elsewhere than on Linux none are found; there the guard does not hear of an end before they do.
    """
    try:
        wanted = os.readlink(f"/proc/self/fd/{pipe}")
        others = {int(name) for name in os.listdir("/proc") if name.isdecimal()} - {os.getpid()}
    except OSError:
        return []
    return [process for process in others if _holds(process, wanted)]


def _holds(process: int, wanted: str) -> bool:
    folder = f"/proc/{process}/fd"
    try:
        return any(os.readlink(f"{folder}/{name}") == wanted for name in os.listdir(folder))
    except OSError:  # of another user, or gone meanwhile
        return False


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
