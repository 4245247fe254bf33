"""Python's garbage collector, off while a simulation runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_off() -> Iterator[None]:
    """Switch the collector off until the block ends, unless it was off before.

    A simulation makes many objects and few reference cycles: looking for these would be a fifth of
    its time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
