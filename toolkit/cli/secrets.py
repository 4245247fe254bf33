"""A secret that was handed over in the environment, and should not stay there."""

from __future__ import annotations

import ctypes
import os
import sys


def forget_variable(name: str) -> None:
    """Remove a variable from this process's environment, and from what Linux shows of it in /proc/PID/environ.

    That is the memory that the process was started with, which unsetting a variable does not touch.
    """
    value = os.environ.get(name)
    if value is None:
        return
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        address, size = libc.getenv(os.fsencode(name)), len(os.fsencode(value))
        if address and ctypes.string_at(address) == os.fsencode(value):
            ctypes.memset(address, 0, size)
    del os.environ[name]
