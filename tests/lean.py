"""What a tuning does beside the subject of a test, left out."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def without_capacity() -> Iterator[None]:
    """Tunings search no capacities, which takes two thirds of their time; also a decorator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.tuning.tune._capacity", lambda runs, default, recommended: None)
        yield
