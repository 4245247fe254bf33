"""Ctrl-C: where it may end the work, and what the command line makes of it.

Python runs the handler of SIGINT between any two steps of a program, and inside some operations of
C: the product of two large integers looks for signals. The handler raises `KeyboardInterrupt`
there. Compiled code holds such a product for an operation that cannot fail, and aborts the process
("fatal: out of memory").

So the handler waits while `held` work runs. Loops of long work call `check` at places where an
exception is safe. The work may be compiled or plain; threads other than the main one never get the
signal.

A simulation writes nothing. Where one does not reach a place to check within a second, a thread
ends the process (`held`). After Ctrl-C Python's own end is left out (`leave`).
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 130  # as shells have it: 128 + SIGINT
AGAIN_S = 0.02
PATIENCE_S = 1.0
MOST_HELD_S = 1.0  # a simulation ends, at the latest, so long after the signal
MOST_ENDING_S = 0.5  # as what libraries do at the process's end
SHOW_CURSOR = "\x1b[?25h"  # a progress bar has hidden it
IMPORTS = "<frozen importlib._bootstrap>"
END_OF_IMPORT = "cb"  # the callback there, which forgets a module's lock


class InterruptedByUserError(KeyboardInterrupt):
    """Ctrl-C. A class of its own: where Python's own passes through `exec`, as in the making of a
    dataclass, Python later ends itself by SIGINT, whatever the exit code is.
    """


class InterruptedReplayError(Exception):
    """Ctrl-C ended a replay against a server, or its warm-up, early."""


class _Waiting:
    """The handler of SIGINT during `held` work: it remembers the signal for the one before it.

    `writes`: the work must reach its end. Else the process ends `MOST_HELD_S` after the signal, or
    at the second signal.
    """

    def __init__(self, handler: Callable[[int, None], object], *, writes: bool) -> None:
        self._handler = handler
        self._writes = writes
        self._came = False

    def __call__(self, *_: object) -> None:
        if not self._writes and isinstance(self._handler, _CommandLine):
            if self._came:
                end_now()
            # Not `threading.Thread`: the signal may have come while this thread holds its lock.
            _thread.start_new_thread(self._end_late, ())
        self._came = True

    def _end_late(self) -> None:
        time.sleep(MOST_HELD_S)
        if self._came:
            end_now()

    def deliver(self) -> None:
        if self._came and threading.current_thread() is threading.main_thread():
            self._came = False
            self._handler(signal.SIGINT, None)


_waiting: _Waiting | None = None


@contextmanager
def held(*, writes: bool = True) -> Iterator[None]:
    """Until the block ends, the handler of SIGINT runs in `check` and at the end alone.

    A block within another one hands the signal to the outer one. Without effect in other threads,
    and where SIGINT is ignored or ends the process without Python.

    `writes`: the block must reach its end, as where it writes a file. Without, a command ends
    `MOST_HELD_S` after the signal, wherever the block is then.
    """
    global _waiting
    outer = _waiting
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler):
        yield
        return
    waiting = _Waiting(handler, writes=writes)
    _waiting = waiting
    signal.signal(signal.SIGINT, waiting)
    try:
        yield
    finally:
        _waiting = outer
        signal.signal(signal.SIGINT, handler)
        waiting.deliver()


def check() -> None:
    """Within `held` work: run the handler if the signal has come. It usually raises
    `KeyboardInterrupt`.
    """
    if _waiting is not None:
        _waiting.deliver()


class _CommandLine:
    """The handler of SIGINT while a command runs: the first Ctrl-C raises, the second ends the
    process at once, also where the first one has to wait.

    Python would lose an exception in a destructor, and in the callback that ends an import.
    Libraries that are half imported turn it into errors of their own. There the signal is sent
    again a little later; an import has `PATIENCE_S` to end.
    """

    def __init__(self) -> None:
        self.leaves = ""  # what the command leaves behind
        self.came = False
        self.noted = False  # it came to a handler of the command's own
        self.done = False  # the command has ended, and what remains is Python's end
        self._came_s = 0.0
        self._sent_again = False

    def __call__(self, _: int, frame: FrameType | None) -> None:
        if self.done or (self.came and not self._sent_again):
            os._exit(EXIT_CODE)
        if not self.came:
            self._came_s = time.monotonic()
        self.came = True
        self._sent_again = False
        patient = time.monotonic() < self._came_s + PATIENCE_S
        if not _is_unsafe(frame, imports_too=patient):
            raise InterruptedByUserError
        signal.signal(signal.SIGALRM, self._send_again)
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    def _send_again(self, *_: object) -> None:
        self._sent_again = True
        signal.raise_signal(signal.SIGINT)


def _is_unsafe(frame: FrameType | None, *, imports_too: bool) -> bool:
    """Whether Python would lose an exception here, or, with `imports_too`, an import runs."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__":
            return True
        if code.co_filename == IMPORTS and (imports_too or code.co_name == END_OF_IMPORT):
            return True
        frame = frame.f_back
    return False


_command_line = _CommandLine()


def catch() -> None:
    """Make the first Ctrl-C an `InterruptedByUserError`, and the second the end at once.

    Without effect where SIGINT is ignored, as under `nohup`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _command_line)
        # the last that Python does, when it no longer runs handlers (of the alarm: `_send_again`)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        atexit.register(signal.signal, signal.SIGALRM, signal.SIG_IGN)


def leaves(what: str) -> None:
    """Say what the command that begins now leaves behind where Ctrl-C ends it."""
    _command_line.leaves = what


def tell() -> None:
    """Print that the command was interrupted, and what it leaves behind."""
    left = _command_line.leaves
    print(f"\ninterrupted{'; ' if left else ''}{left}", file=sys.stderr, flush=True)


def end_now() -> None:
    """End the process at once, and say so: the signal has come, and cannot be raised in time."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        tell()
    os._exit(EXIT_CODE)


def done() -> None:
    """The command has ended: a Ctrl-C from now on ends the process at once."""
    _command_line.done = True


def leave(code: object) -> None:
    """End the process where Ctrl-C has ended the command: within `MOST_ENDING_S`, and without
    Python's own end, which waits for all threads and frees what the system frees faster.
    """
    if not _command_line.came:
        return
    number = code if isinstance(code, int) else EXIT_CODE

    def end_late() -> None:
        time.sleep(MOST_ENDING_S)
        os._exit(number)

    _thread.start_new_thread(end_late, ())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(number)


def note() -> None:
    """Ctrl-C came to a command that has a handler of its own and ends in order."""
    _command_line.noted = True


def noted() -> bool:
    """Whether Ctrl-C came to such a command."""
    return _command_line.noted


def caused(error: BaseException) -> bool:
    """Whether Ctrl-C is why a command ended with `error`.

    A library may turn the exception of Ctrl-C into another one.
    """
    return _command_line.came or isinstance(error, KeyboardInterrupt)


@contextmanager
def cancelling() -> Iterator[None]:
    """For `asyncio.Runner`, which cancels its task at Ctrl-C where Python's own handler is set.

    Also within `held` work, since that is safe there.
    """
    handler = signal.getsignal(signal.SIGINT)
    ours = isinstance(handler, _CommandLine | _Waiting)
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        _command_line.came = handler is _command_line
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)
