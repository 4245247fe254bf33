"""What a tuning does beside the subject of a test, left out."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

TUNE = "toolkit.tuning.tune"


@contextmanager
def without_capacity() -> Iterator[None]:
    """Tunings search no capacities, which takes two thirds of their time; also a decorator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{TUNE}._capacity", lambda inputs, evaluate, default, recommended: None)
        yield


@contextmanager
def verdict_only() -> Iterator[None]:
    """Tunings search and judge, and neither capacities nor sensitivities follow."""
    with without_capacity(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{TUNE}.sensitivity", lambda setup, runner, space, best, progress: [])
        yield
