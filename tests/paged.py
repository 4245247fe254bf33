"""The simulated vLLM: laws, made-up traces, worlds, and the comparison of two simulations."""

from collections.abc import Iterator
from contextlib import contextmanager
from operator import itemgetter

import numpy as np
import pytest

from toolkit.estimators.laws import unit_step
from toolkit.estimators.memory import ZetaMemory
from toolkit.laws.passes import PassLaw
from toolkit.sim.api import SimResult
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.vllm import VllmScheduler
from toolkit.sim.world import World
from toolkit.traces.types import Sessions, SharedBlocks, Trace

FLAT = PassLaw({"pass": 1.0})  # every pass takes a second
LAW = PassLaw(
    {
        "pass": 2e-3,
        "row": 1e-4,
        "chunk": 5e-4,
        "cached": 1e-6,
        "attended": 1e-7,
        "host": 3e-4,
        "host_row": 1e-5,
    },
    (2e-4, 1e-4),
    (0, 16),
)


def trace_of(rows, *, ids=None, size=4, previous=None, think_s=0.0) -> Trace:
    """Rows are (arrival, prompt, output), or have a fourth value: how much more the limit allows.

    `ids` of blocks of `size` tokens and `previous` turns are of the rows in order of arrival.
    """
    columns = zip(*sorted(rows, key=itemgetter(0)), strict=True)
    arrival, prompt, output, *more = map(np.array, columns)
    shared = sessions = None
    if ids is not None:
        offsets = np.cumsum([0, *map(len, ids)])
        shared = SharedBlocks(size, np.array([k for one in ids for k in one], np.int64), offsets)
    if previous is not None:
        sessions = Sessions(np.array(previous), np.full(len(rows), think_s))
    limit = output + sum(more)
    return Trace(arrival.astype(float), prompt, output, limit, shared=shared, sessions=sessions)


def world(engine: PagedEngine, workers: int = 1, **more) -> World:
    memory = ZetaMemory(engine.capacity_tokens)
    return World(unit_step(), memory, workers, 100, paged=engine, token_gaps=True, **more)


@contextmanager
def pass_by_pass() -> Iterator[pytest.MonkeyPatch]:
    """The simulator leaps over no passes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VllmScheduler, "ahead", lambda _: 1)
        yield patch


def same_times(one: SimResult, other: SimResult, *, rtol: float = 0.0, atol: float = 1e-9) -> None:
    for name in ("arrival_s", "first_token_s", "finish_s", "max_gap_s", "ok"):
        found = getattr(one.served, name), getattr(other.served, name)
        np.testing.assert_allclose(*found, rtol=rtol, atol=atol)
