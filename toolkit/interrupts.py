"""Ctrl-C: where it may end the work, and what the command line makes of it.

Python runs the handler of SIGINT between any two steps of a program, and inside some operations of
C: the product of two large integers looks for signals. The handler raises `KeyboardInterrupt`
there. Compiled code holds such a product for an operation that cannot fail, and aborts the process
("fatal: out of memory").

So the handler waits while `held` work runs. Loops of long work call `check` at places where an
exception is safe. The work may be compiled or plain; threads other than the main one never get the
signal.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_CODE = 130  # as shells have it: 128 + SIGINT


class InterruptedByUserError(KeyboardInterrupt):
    """Ctrl-C. A class of its own: where Python's own passes through `exec`, as in the making of a
    dataclass, Python later ends itself by SIGINT, whatever the exit code is.
    """


class _Waiting:
    """The handler of SIGINT during `held` work: it remembers the signal for the one before it."""

    def __init__(self, handler: Callable[[int, None], object]) -> None:
        self._handler = handler
        self._came = False

    def __call__(self, *_: object) -> None:
        self._came = True

    def deliver(self) -> None:
        if self._came and threading.current_thread() is threading.main_thread():
            self._came = False
            self._handler(signal.SIGINT, None)


_waiting: _Waiting | None = None


@contextmanager
def held() -> Iterator[None]:
    """Until the block ends, the handler of SIGINT runs in `check` and at the end alone.

    A block within another one hands the signal to the outer one. Without effect in other threads,
    and where SIGINT is ignored or ends the process without Python.
    """
    global _waiting
    outer, handler = _waiting, signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler):
        yield
        return
    waiting = _Waiting(handler)
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


# The command line's own handler. `_came`: Ctrl-C has come.
_came = False


def caused(error: BaseException) -> bool:
    """Whether Ctrl-C is why a command ended with `error`.

    A library may turn the `KeyboardInterrupt` into another error, as where it is being imported.
    """
    return _came or isinstance(error, KeyboardInterrupt)


def catch() -> None:
    """Make the first Ctrl-C an `InterruptedByUserError`, and the second the end at once.

    Without effect where SIGINT is ignored, as under `nohup`.
    """
    global _came
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _came = False
        signal.signal(signal.SIGINT, _interrupt)


def end_at_next() -> None:
    """The work is done: a Ctrl-C from now on ends the process at once."""
    global _came
    _came = True


def _interrupt(*_: object) -> None:
    global _came
    if _came:
        os._exit(EXIT_CODE)
    _came = True
    raise InterruptedByUserError


@contextmanager
def cancelling() -> Iterator[None]:
    """For `asyncio.Runner`, which cancels its task at Ctrl-C where Python's own handler is set.

    Also within `held` work, since that is safe there.
    """
    global _came
    handler = signal.getsignal(signal.SIGINT)
    ours = handler is _interrupt or isinstance(handler, _Waiting)
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        _came = True
        raise
    finally:
        if ours:
            signal.signal(signal.SIGINT, handler)
