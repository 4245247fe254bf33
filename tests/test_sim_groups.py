"""The simulator's vLLM with several groups of caches: against passes of vLLM's own schedulers, and
by hand. `test_sim_leaps` compares it with itself without counting and without leaps.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from paged import FLAT, trace_of, world
from said import says

from benchmarks.engines import workloads
from toolkit.backends.vllm.conformance.modelled import passes_of_case
from toolkit.catalogue.resolved import CacheGroup
from toolkit.errors import InputError
from toolkit.sched.policies import make_any
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import simulate
from toolkit.sim.cache_settings import CacheSettings
from toolkit.sim.drafts import DrawnDrafts
from toolkit.sim.kv_cache import KVCache, PagedRow
from toolkit.sim.loop import SimulationStalledError
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.vllm import VllmScheduler

DATA = Path(__file__).parent / "data"
FULL = CacheGroup("full", "FullAttentionSpec", 4, 1, 16)
WINDOW = CacheGroup("window", "SlidingWindowSpec", 4, 1, 16, window=8)
STATE = CacheGroup("state", "MambaSpec", 4, 1, 16, mode="align")


def caches(groups: list[CacheGroup], **more) -> CacheSettings:
    return CacheSettings(tuple(groups), max_model_len=96, **more)


def test_counting_changes_nothing_where_prompts_get_keys_late() -> None:
    """With blocks of two sizes, others may look for a block of a prompt that gets its key while the
    row decodes. vLLM 0.32 and 0.33 plan this workload as row by row.
    """
    case = workloads.make("block sizes", 50005, True) | {"version": "0.33.0"}
    counted = passes_of_case(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KVCache, "can_join", lambda *_: False)
        assert counted == passes_of_case(case)


def test_a_prefix_needs_the_tail_of_the_window_too() -> None:
    """The third prompt goes on where the second parted from the first: the full group has that
    beginning at the second prompt already, and the window its tail only after it.
    """
    settled = caches([FULL, WINDOW])
    rows = [(20.0 * number, 33, 2, 0) for number in range(3)]
    ids = [[*range(6), *range(100 * number, 100 * number + 3)] for number in range(3)]
    engine = PagedEngine(FLAT, 90, 4, caches=settled)
    found = simulate(trace_of(rows, ids=ids), VllmPolicy(), world(engine)).counters
    assert (found["query_tokens"], found["hit_tokens"]) == (99.0, 24.0)
    kept = replace(engine, caches=replace(settled, retention=None))
    found = simulate(trace_of(rows, ids=ids), VllmPolicy(), world(kept)).counters
    assert found["hit_tokens"] == 48.0


TIGHT = CacheSettings((FULL, STATE), max_model_len=16)  # its longest request needs 6 blocks


def test_a_request_that_waits_for_ever_is_refused() -> None:
    """In a cache with one block less than it needs, the longest request preempts itself, and is
    then never admitted. vLLM's check at its start allows that cache, since it counts the block that
    it never gives out.
    """
    engine = PagedEngine(FLAT, 5, 4, caches=TIGHT)
    with pytest.raises(SimulationStalledError) as refused:
        simulate(trace_of([(0.0, 9, 7, 0)]), VllmPolicy(), world(engine))
    assert says(refused.value.message, "5 blocks", "13 tokens")


def test_a_live_lock_is_refused() -> None:
    """The same where a request need not fit whole to be admitted: it is admitted and preempts
    itself for ever.
    """
    scheduler = VllmScheduler(VllmPolicy(), 5, 4, caches=TIGHT, reserves=False)
    scheduler.add(PagedRow(0, 9, 7))

    def run() -> None:
        for _ in range(1000):
            if scheduler.schedule().rows:
                scheduler.commit()
            scheduler.settle()

    with pytest.raises(SimulationStalledError) as refused:
        run()
    assert says(refused.value.message, "5 blocks", "13 tokens")


@pytest.mark.parametrize(
    ("groups", "blocks", "policy", "words"),
    [
        ([FULL, WINDOW], 40, VllmPolicy(), ("96", "40")),
        ([FULL, STATE], 60, VllmPolicy(prefix_caching=False), ("prefix_caching", "align")),
        (
            [FULL, STATE],
            60,
            VllmPolicy(chunked_prefill=False),
            ("chunked_prefill",),
        ),
        ([FULL, STATE], 60, VllmPolicy(max_num_seqs=64), ("64", "60")),
    ],
)
def test_a_server_that_would_not_start_is_refused(groups, blocks, policy, words) -> None:
    with pytest.raises(InputError) as refused:
        VllmScheduler(policy, blocks, 4, caches=caches(groups, rows_within_blocks=True))
    assert says(refused.value.message, *words)


def test_flags_are_moved_to_those_with_which_it_starts() -> None:
    """A request of 96 tokens takes 24 blocks of full attention, and of a window of 8 with passes of
    n tokens (7 + n) / 4 + 1.
    """
    settled = caches([FULL, WINDOW])
    wide = VllmPolicy(max_num_seqs=4, max_num_batched_tokens=64)
    narrow = settled.allowed(wide, 34, ahead=False)
    assert (narrow.max_num_seqs, narrow.max_num_batched_tokens) == (4, 33)
    settled.refuse(34, narrow, ahead=False)
    with pytest.raises(InputError):
        settled.refuse(34, replace(narrow, max_num_batched_tokens=34), ahead=False)
    assert settled.allowed(wide, 90, ahead=False) == wide
    rows = caches([FULL, STATE], rows_within_blocks=True)
    assert rows.allowed(replace(wide, max_num_seqs=50), 30, ahead=False).max_num_seqs == 30


def test_a_request_longer_than_the_model_is_refused() -> None:
    engine = PagedEngine(FLAT, 200, 4, caches=caches([FULL, WINDOW]))
    result = simulate(trace_of([(0.0, 90, 8, 0), (0.0, 90, 6, 0)]), VllmPolicy(), world(engine))
    assert result.served.ok.tolist() == [False, True]


def test_other_policies_do_not_know_groups() -> None:
    engine = PagedEngine(FLAT, 200, 4, caches=caches([FULL, WINDOW]))
    with pytest.raises(InputError, match="'past-future'"):
        simulate(trace_of([(0.0, 9, 8, 0)]), make_any("past-future", {}), world(engine))


def test_prompts_that_share_nothing_find_nothing() -> None:
    engine = PagedEngine(FLAT, 200, 4, caches=caches([FULL, WINDOW]))
    ids = [[100 * number] for number in range(4)]
    rows = [(9.0 * number, 20, 3, 0) for number in range(4)]
    found = simulate(trace_of(rows, ids=ids), VllmPolicy(), world(engine)).counters
    assert (found["query_tokens"], found["hit_tokens"]) == (80.0, 0)


requests = st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(1, 30))


@settings(max_examples=60)
@given(
    rows=st.lists(requests, min_size=1, max_size=12),
    blocks=st.sampled_from([70, 90, 400]),
    window=st.sampled_from([{"window": 8}, {"window": 10}, {"block": 2, "window": 24}]),
    retention=st.sampled_from([0, None]),
    ahead=st.booleans(),
)
def test_keys_that_nobody_looks_for_change_nothing(rows, blocks, window, retention, ahead) -> None:
    """Without ids no block gets a key, unless a row is preempted; with them all blocks do."""
    settled = caches([FULL, replace(WINDOW, **window)], retention=retention)
    engine = PagedEngine(FLAT, blocks, 4, caches=settled, ahead=ahead)
    flags = VllmPolicy(max_num_seqs=8, max_num_batched_tokens=16)
    rows = [(came / 50, prompt, output, 0) for came, prompt, output in sorted(rows)]
    ids = [[100 * number] for number in range(len(rows))]
    plain, keyed = (simulate(trace_of(rows, ids=one), flags, world(engine)) for one in (None, ids))
    for column in ("first_token_s", "finish_s", "max_gap_s"):
        assert getattr(plain.served, column) == pytest.approx(getattr(keyed.served, column))
    counted = {"evicted_percent", "peak_memory_percent", "rounds", "batches", "batch_size_mean"}
    assert counted <= plain.counters.keys()
    for name in counted:
        assert plain.counters[name] == keyed.counters[name]
    event(f"{min(plain.counters['evicted_percent'], 1):.0f} preempted")


@pytest.mark.parametrize("number", range(10))
def test_drafts_thresholds_and_live_settings_together_are_vllm_s(number: int) -> None:
    """As vLLM 0.32.0's own classes made them: drafts, thresholds and live settings with several
    groups of caches, live settings with drafts.
    """
    case, theirs = json.loads((DATA / "vllm-0.32.0-combined.json").read_text())[number]
    assert json.loads(json.dumps(passes_of_case(case))) == theirs


@pytest.mark.parametrize("number", range(8))
def test_passes_are_those_of_vllm_s_schedulers(number: int) -> None:
    """As vLLM 0.32.0's own classes made them, with the blocks that each group holds."""
    case, theirs = json.loads((DATA / "vllm-0.32.0-groups.json").read_text())[number]
    assert json.loads(json.dumps(passes_of_case(case))) == theirs


@pytest.mark.parametrize(
    ("groups", "method", "policy", "word"),
    [
        ([FULL, STATE], "ngram", VllmPolicy(), "states"),
        ([FULL, WINDOW], "eagle", VllmPolicy(), "eagle"),
        ([FULL], "ngram", VllmPolicy(prefill_schedule_interval=2), "prefill_schedule_interval"),
    ],
)
def test_drafts_that_are_not_modelled_are_refused_by_name(groups, method, policy, word) -> None:
    drafts = DrawnDrafts(method, (0.5,))
    with pytest.raises(InputError) as refused:
        VllmScheduler(policy, 3000, 4, caches=caches(groups), drafts=drafts)
    assert says(refused.value.message, word)
