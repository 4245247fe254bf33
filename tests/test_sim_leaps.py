"""The simulated vLLM leaps over passes, and counts rows that just decode. Neither changes anything:
random worlds of several models are served with leaps, pass by pass, and row by row.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import LAW as DENSE
from paged import pass_by_pass, same_times, trace_of, world

from toolkit.catalogue.resolved import CacheGroup
from toolkit.laws.passes import PassLaw
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.cache_settings import CacheSettings
from toolkit.sim.kv_cache import KVCache
from toolkit.sim.paged_engine import PagedEngine

FULL = CacheGroup("full", "FullAttentionSpec", 4, 1, 16)
WINDOW = CacheGroup("window", "SlidingWindowSpec", 4, 1, 16, window=8)
STATE = CacheGroup("state", "MambaSpec", 4, 1, 16, mode="align")
LAW = PassLaw(
    {
        "pass": 2e-3,
        "row": 1e-4,
        "chunk": 5e-4,
        "cached": 1e-6,
        "attended": 1e-7,
        "inside": 1e-5,
        "attended_inside": 1e-6,
        "host": 3e-4,
    },
    (2e-4,),
    (0,),
    window=8,
)
MODELS = {
    "dense": [],
    "full and windows": [FULL, WINDOW],
    "windows that are no multiple of a block": [replace(WINDOW, window=7), FULL],
    "three groups of windows": [FULL, WINDOW, WINDOW, WINDOW],
    "windows alone": [WINDOW],
    "windows and blocks of two sizes": [FULL, replace(WINDOW, block=8)],
    "full attention in blocks of two sizes": [FULL, replace(FULL, block=8)],
    "states": [FULL, STATE, STATE],
    "states with checkpoints": [replace(STATE, checkpoints=1), FULL],
    "states without prefix caching": [FULL, replace(STATE, block=112, mode="none")],
}
LONGEST = 110  # tokens of a request
COUNTERS = (
    "evicted_percent", "rounds", "batch_size_mean", "itl_mean_s", "hit_tokens", "query_tokens",
    "peak_memory_percent",
)  # fmt: skip

lengths = st.tuples(st.integers(1, 40), st.integers(1, 50), st.sampled_from([0, 0, 3, 9]))
flags = st.builds(
    VllmPolicy,
    max_num_seqs=st.integers(1, 8),
    max_num_batched_tokens=st.integers(8, 64),
    watermark=st.sampled_from([0.0, 0.1]),
    prefix_caching=st.booleans(),
    long_prefill_token_threshold=st.sampled_from([0, 0, 3, 9]),
    prefill_schedule_interval=st.sampled_from([1, 1, 3]),
)


@st.composite
def traces(draw):
    """Up to 25 requests, of which some share the beginnings of their prompts."""
    rows = draw(st.lists(lengths, min_size=1, max_size=25))
    gap_s = draw(st.sampled_from([0.0, 0.01, 0.1, 0.6]))
    ids = None
    if draw(st.booleans()):
        common = st.integers(0, 8).map(lambda count: list(range(count)))
        ids = [draw(common) for _ in rows]
    return trace_of([(gap_s * k, *row) for k, row in enumerate(rows)], ids=ids)


def same(one: SimResult, other: SimResult) -> None:
    same_times(one, other)
    for name in COUNTERS:
        assert one.counters.get(name) == pytest.approx(other.counters.get(name)), name


@pytest.mark.parametrize("groups", MODELS.values(), ids=list(MODELS))
@given(trace=traces(), policy=flags, ahead=st.booleans(), more=st.sampled_from([0, 2, 10, 30]))
@settings(deadline=None, max_examples=12)
def test_leaps_and_counted_rows_change_nothing(groups, trace, policy, ahead, more) -> None:
    engine = PagedEngine(DENSE, 24 + more, 4, ahead)
    if groups:
        policy = replace(policy, prefix_caching=all(one.mode != "none" for one in groups))
        settled = CacheSettings(tuple(groups), max_model_len=LONGEST)
        engine = PagedEngine(LAW, 84 + more, 4, ahead, caches=settled)
        policy = engine.allowed(policy)  # with more tokens in a pass vLLM would not start
    leaping = simulate(trace, policy, world(engine))
    with pass_by_pass() as patch:
        stepping = simulate(trace, policy, world(engine))
        patch.setattr(KVCache, "can_join", lambda *_: False)
        row_by_row = simulate(trace, policy, world(engine))
    same(leaping, stepping)
    same(stepping, row_by_row)
