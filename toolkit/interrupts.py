"""Ctrl-C: the one place that catches it.

While a command runs, the first Ctrl-C raises `InterruptedByUserError` and starts a clock: `MOST_S`
later the process ends, wherever it then is. The second ends it at once. So a command ends in time
also where a library loses the exception or a thread never ends.

`held` work is not interrupted before its end, or before it calls `check` where an exception is
safe. A file is written in it, and a simulation runs in it: Python runs handlers of signals also
inside the product of two large integers, which compiled code takes for an operation that cannot
fail.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

EXIT_CODE = 130  # as shells have it: 128 + SIGINT
MOST_S = 0.75  # from Ctrl-C to the end of the process
SHOW_CURSOR = "\x1b[?25h"  # a progress bar has hidden it


class InterruptedByUserError(KeyboardInterrupt):
    """Ctrl-C. Python ends itself by SIGINT, whatever the exit code is, once a plain
    `KeyboardInterrupt` has passed through `exec`, as in the making of a dataclass.
    """


class InterruptedReplayError(Exception):
    """Ctrl-C ended a replay against a server, or its warm-up, early."""


class _CtrlC:
    """What is known of Ctrl-C in this process."""

    def __init__(self) -> None:
        self.leaves = ""  # what the command leaves behind
        self.came = False
        self.is_pending = False  # it came in `held` work
        self.blocks = 0  # of `held` work, one within another
        self.writes = 0  # of these, those that must reach their end
        self.is_over = False  # the command has ended, and what remains is Python's own end


_ctrl_c = _CtrlC()


def catch() -> None:
    """Make Ctrl-C end this process in time. Without effect where SIGINT is ignored (`nohup`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _of_command)
        sys.unraisablehook = _unless_interrupted
        # the last that Python does, when it no longer runs handlers
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _of_command(*_: object) -> None:
    """The handler while a command runs."""
    if _ctrl_c.is_over:
        os._exit(EXIT_CODE)
    if _ctrl_c.came and not _ctrl_c.writes:
        end_now()
    _start_clock()
    _in_library()


def _start_clock() -> None:
    if not _ctrl_c.came:
        _ctrl_c.came = True
        # not `threading.Thread`: its lock may be held by this thread just now
        _thread.start_new_thread(_end_late, ())


def _in_library(*_: object) -> None:
    """The handler during `held` work in a program that is not the command line."""
    _ctrl_c.is_pending = True
    if not _ctrl_c.blocks:
        _deliver()


def _deliver() -> None:
    if _ctrl_c.is_pending and threading.current_thread() is threading.main_thread():
        _ctrl_c.is_pending = False
        raise InterruptedByUserError


def _unless_interrupted(lost: sys.UnraisableHookArgs) -> None:
    """Say nothing of a Ctrl-C that Python lost in a destructor: the clock runs."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)


def _end_late() -> None:
    time.sleep(MOST_S)
    while _ctrl_c.writes:
        time.sleep(MOST_S / 10)
    end_now()


@contextmanager
def held(*, writes: bool = True) -> Iterator[None]:
    """Until the block ends, Ctrl-C is raised at its end alone; without `writes` also in `check`.

    `writes`: the block must reach its end, as where it writes a file; the clock waits for it. A
    block within another one leaves Ctrl-C to the outer one. Without effect in other threads.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _in_library)
    _ctrl_c.blocks += 1
    _ctrl_c.writes += writes
    try:
        yield
    finally:
        _ctrl_c.blocks -= 1
        _ctrl_c.writes -= writes
        if handler is signal.default_int_handler:
            signal.signal(signal.SIGINT, handler)
        if not _ctrl_c.blocks:
            _deliver()


def check() -> None:
    """Raise Ctrl-C here if it came, unless a block around this one must reach its end."""
    if not _ctrl_c.writes:
        _deliver()


@contextmanager
def cancelling() -> Iterator[None]:
    """For `asyncio.Runner`, which cancels its task at Ctrl-C where Python's own handler is set."""
    handler = signal.getsignal(signal.SIGINT)
    ours = handler in (_of_command, _in_library)
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        if handler is _of_command:
            _start_clock()
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)


def leaves(what: str) -> None:
    """Say what the command that begins now leaves behind where Ctrl-C ends it."""
    _ctrl_c.leaves = what


def note() -> None:
    """Ctrl-C came to a server, which has a handler of its own and ends in order."""
    _ctrl_c.came = True


def exit_code(error: BaseException) -> int | None:
    """Say that Ctrl-C ended the command, and return the exit code; None where `error` is not of
    Ctrl-C. A library may have made another error of it; an exit code above 0 is of the command.
    """
    if isinstance(error, SystemExit):
        return None if error.code or not _ctrl_c.came else EXIT_CODE
    if not (_ctrl_c.came or isinstance(error, KeyboardInterrupt)):
        return None
    _tell()
    return EXIT_CODE


def _tell() -> None:
    left = _ctrl_c.leaves
    print(f"\ninterrupted{'; ' if left else ''}{left}", file=sys.stderr, flush=True)


def over() -> None:
    """The command has ended: a Ctrl-C from now on ends the process at once."""
    _ctrl_c.is_over = True


def end_now() -> None:
    """End the process at once, and say why unless that was said."""
    with suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        if not _ctrl_c.is_over:
            _tell()
    os._exit(EXIT_CODE)
