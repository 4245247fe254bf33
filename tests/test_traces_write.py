"""The canonical format: what is written reads back the same."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.sim.api import requests_of
from toolkit.traces.read import read_trace
from toolkit.traces.types import Trace
from toolkit.traces.windows import cut
from toolkit.traces.write import write_trace

ROWS = st.lists(
    st.tuples(
        st.integers(0, 10**12),  # microseconds
        st.integers(1, 2**31 - 1),
        st.integers(1, 2**31 - 1),
        st.booleans(),
    ),
    min_size=1,
)


@pytest.mark.slow
@given(rows=ROWS)
def test_a_written_trace_reads_back_to_the_microsecond(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    first = min(row[0] for row in rows)
    trace = _trace([(us - first, *numbers) for us, *numbers in rows])
    write_trace(trace, path)
    again, report = read_trace(path)
    assert report.dropped == {}
    assert not report.reordered
    assert np.array_equal(again.arrival_s.round(6), trace.arrival_s.round(6))
    for column in ("prompt_tokens", "output_tokens", "max_tokens"):
        assert np.array_equal(getattr(again, column), getattr(trace, column))


def test_writing_what_was_read_gives_the_same_bytes(tmp_path):
    first = tmp_path / "first.jsonl"
    second = tmp_path / "second.jsonl"
    write_trace(_trace([(0, 5, 6, False), (1_234_567, 7, 8, True)]), first)
    write_trace(read_trace(first)[0], second)
    assert second.read_bytes() == first.read_bytes()


def _trace(rows):
    """Rows of (arrival in microseconds, prompt, output, whether max_tokens is set), sorted by
    arrival.
    """
    rows = sorted(rows, key=lambda row: row[0])
    return Trace(
        arrival_s=np.array([us / 1e6 for us, *_ in rows]),
        prompt_tokens=np.array([row[1] for row in rows]),
        output_tokens=np.array([row[2] for row in rows]),
        max_tokens=np.array([row[2] if row[3] else 0 for row in rows]),
    )


def test_priorities_are_read_and_written_cut_and_simulated(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = _trace([(0, 8, 4, False), (2_000_000, 8, 4, False), (3_000_000, 8, 4, False)])
    write_trace(replace(trace, priority=np.array([0, -3, 7])), path)
    again, _ = read_trace(path)
    assert again.priorities == [0, -3, 7]
    assert cut(again, 1.0, 9.0).priorities == [-3, 7]
    requests, _ = requests_of(again, 16)
    assert [request.priority for request in requests] == [0, -3, 7]


@pytest.mark.parametrize("priority", [0.5, "high", 1 << 40])
def test_a_row_with_an_invalid_priority_is_dropped_and_counted(tmp_path, priority):
    line = {"timestamp": 0, "input_length": 8, "output_length": 4}
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps(each) for each in (line, line | {"priority": priority})]
    path.write_text("\n".join(lines))
    trace, report = read_trace(path)
    assert (len(trace), trace.priority, report.dropped) == (1, None, {"unparsable": 1})
