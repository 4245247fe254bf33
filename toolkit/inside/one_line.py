"""Errors as an engine that we run inside of prints them: it shows what an exception says, and knows of no hints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.errors import InputError


@contextmanager
def one_line() -> Iterator[None]:
    """Message and hint in one line."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{error.message}: {error.hint}" if error.hint else error.message) from None
