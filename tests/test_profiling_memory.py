"""The search for the memory edge."""

from hypothesis import given
from hypothesis import strategies as st
from llmctl_fake import FakeEngine
from synthetic_profiles import FACTS

from toolkit.files.profile import MemoryPoint
from toolkit.files.recipe import ProfileSpec
from toolkit.profiling.measure import find_edge, probe_memory, probe_shapes, safe_tokens
from toolkit.profiling.process import LocalTimedEngine

NEVER = float("inf")


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 4096))
def test_the_edge_is_bracketed_for_every_guess(edge, guess, limit):
    largest_ok, smallest_oom = find_edge(lambda size: size <= edge, guess, limit)
    if edge >= limit:
        assert smallest_oom is None
        assert largest_ok <= limit
    else:
        assert smallest_oom is not None
        assert largest_ok <= edge < smallest_oom
        assert smallest_oom - largest_ok <= max(1, 0.005 * largest_ok)


def test_the_search_ends_when_it_is_enough():
    probes = []
    found = find_edge(
        lambda size: probes.append(size) or size <= 700, 10, 4096, enough=lambda: len(probes) == 3
    )
    assert found == (13, None)  # 10, 11, 13


def test_an_engine_is_probed_to_the_row():
    bench = LocalTimedEngine(FakeEngine(FACTS), "wall")
    edge = MemoryPoint(input_length=112, steps=16, largest_ok=64, smallest_oom=65)
    assert probe_memory(bench, 112, 16, NEVER) == edge


def test_an_engine_without_an_edge_is_probed_to_twice_that():
    class Endless(FakeEngine):
        def _check_memory(self, batch_size, columns):
            pass

    probe = probe_memory(LocalTimedEngine(Endless(FACTS), "wall"), 112, 16, NEVER)
    assert (probe.largest_ok, probe.smallest_oom) == (128, None)


def test_lengths_are_probed_with_the_longest_generations():
    spec = ProfileSpec(
        batch_sizes=[1],
        input_lengths=[8],
        cached_lengths=[8],
        memory_lengths=[64, 500, 600],
        slice_tokens=[16, 32],
    )
    assert probe_shapes(spec, FACTS) == [(64, 32), (64, 448), (500, 12)]


def test_slices_are_kept_below_the_probed_edge():
    probes = [
        MemoryPoint(input_length=64, steps=32, largest_ok=28, smallest_oom=29),
        MemoryPoint(input_length=256, steps=32, largest_ok=7, smallest_oom=8),
        MemoryPoint(input_length=500, steps=12, largest_ok=0, smallest_oom=1),
    ]
    assert safe_tokens(probes, FACTS) == 0.9 * (7 * 288)
    assert safe_tokens([], FACTS) == 0.9 * FACTS.capacity_tokens
