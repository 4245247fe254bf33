"""Impossible rows are counted by reason. What each source reads as is in test_traces_frozen."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from said import says

from toolkit.errors import InputError
from toolkit.traces import read
from toolkit.traces.read import read_trace

VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
0.25,374,44,418,8.5
0.75,396.0,109,505,3.6
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 1500.5, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14], \
"max_tokens": 512}
"""


def test_a_byte_order_mark_and_windows_line_ends_are_accepted(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(b"\xef\xbb\xbf" + VIDUR.replace("\n", "\r\n").encode())
    assert read_trace(path)[1].kept == 2


TOKENS = "must be a whole number from 1 to 2,147,483,647"
SECONDS = "must be a finite number of s"


@pytest.mark.parametrize(
    ("row", "reason", "shown"),
    [
        ("0,0,5", "with a non-positive length", f"num_prefill_tokens is '0', {TOKENS}"),
        ("-3,5,5", "with a negative time", "arrived_at is '-3', must be at least 0 s"),
        (
            "1e300,5,5",
            "with a time beyond the year 9999",
            "arrived_at is '1e300', must be at most 2.534e+11 s",
        ),
        ("inf,5,5", "unparsable", f"arrived_at is 'inf', {SECONDS}"),
        ("soon,5,5", "unparsable", f"arrived_at is 'soon', {SECONDS}"),
        (",5,5", "unparsable", f"no arrived_at, {SECONDS}"),
        ("0,5.5,5", "unparsable", f"num_prefill_tokens is '5.5', {TOKENS}"),
        ("0,99999999999,5", "unparsable", f"num_prefill_tokens is '99999999999', {TOKENS}"),
        ("0,5", "unparsable", f"no num_decode_tokens, {TOKENS}"),
        ("0,5," + "x" * 99, "unparsable", f"num_decode_tokens is '{'x' * 39}..., {TOKENS}"),
    ],
)
def test_an_impossible_row_is_counted_and_shown_with_its_value_and_the_limit(
    tmp_path, row, reason, shown
):
    text = f"arrived_at,num_prefill_tokens,num_decode_tokens\n3,10,20\n{row}\n"
    trace, report = read_trace(_file(tmp_path, text))
    assert (report.rows, report.kept, report.dropped) == (2, 1, {reason: 1})
    assert trace.notes == report.lines()
    assert f"dropped 1 row: 1 {reason} (row 2: {shown})" in trace.notes


@pytest.mark.parametrize("array", [False, True])
def test_a_report_names_the_json_value_that_is_nan(tmp_path, array):
    rows = ['{"timestamp": NaN, "input_length": 5, "output_length": 5}'] * 3
    with pytest.raises(InputError) as caught:
        read_trace(_file(tmp_path, "[" + ",".join(rows) + "]" if array else "\n".join(rows)))
    assert says(caught.value.message, "3 unparsable", "row 1", "nan")
    assert caught.value.hint


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.integers(), st.floats(),
    st.text("0159.e-nainf ٣", max_size=6),
    st.just([1]),
    st.sampled_from([1e300, -1e300, 10**400, 2**31, 1.5, "NaN", "1e999"]),
)  # fmt: skip
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(
            ["timestamp", "input_length", "output_length", "max_tokens", "priority", "status"]
        ),
        ODD,
    ),
    max_size=4,
)


@pytest.mark.slow
@given(rows=ROWS, lenient=st.booleans())
def test_a_trace_keeps_only_possible_rows(tmp_path_factory, rows, lenient):
    whole = [{"timestamp": 5, "input_length": 1, "output_length": 1}, *rows]
    text = "\n".join(map(json.dumps, whole)) if lenient else json.dumps(whole)
    trace, report = read_trace(_file(tmp_path_factory.mktemp("odd"), text))
    assert len(trace) == report.kept >= 1
    assert report.kept + sum(report.dropped.values()) == report.rows == len(whole)
    assert report.examples.keys() == report.dropped.keys()
    assert all(example.startswith("row ") for example in report.examples.values())
    assert trace.arrival_s.min() == 0
    assert trace.arrival_s.max() <= 1e12
    assert min(trace.prompt_tokens.min(), trace.output_tokens.min()) >= 1


LINE = '{"timestamp": 0, "input_length": 5, "output_length": 9'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 0, "input_length": 5', "unparsable"),
        ("[1, 2]", "unparsable"),
        ('{"timestamp": 0, "input_length": 5}', "unparsable"),
        ('{"timestamp": 0, "input_length": true, "output_length": 5}', "unparsable"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "unparsable"),
        (LINE + ', "status": "timeout"}', "failed responses"),
        (LINE + ', "status": ["ok"]}', "failed responses"),
        (LINE + ', "max_tokens": 8}', "longer than their max_tokens"),
        (LINE + ', "max_tokens": -1}', "with a non-positive length"),
    ],
)
def test_an_impossible_json_line_is_counted_with_its_reason(tmp_path, line, reason):
    _, report = read_trace(_file(tmp_path, MOONCAKE + line + "\n"))
    assert (report.rows, report.kept, report.dropped) == (3, 2, {reason: 1})


def test_a_broken_first_line_does_not_hide_the_columns(tmp_path):
    _, report = read_trace(_file(tmp_path, '{"timestamp": \n' + MOONCAKE))
    assert (report.kept, report.dropped) == (2, {"unparsable": 1})


def test_rows_out_of_order_are_sorted_and_reported(tmp_path):
    lines = [{"timestamp": ms, "input_length": ms + 1, "output_length": 1} for ms in (30, 10, 20)]
    trace, report = read_trace(_file(tmp_path, "\n".join(map(json.dumps, lines))))
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.01, 0.02])
    assert trace.prompt_tokens.tolist() == [11, 21, 31]
    assert report.reordered
    assert "sorted" in " ".join(trace.notes)


def test_a_missing_column_is_named_with_those_found(tmp_path):
    with pytest.raises(InputError) as caught:
        read_trace(_file(tmp_path, "TIMESTAMP,ContextTokens,Tokens\n2023-11-16 18:15:46,5,7\n"))
    assert "output tokens" in caught.value.message
    assert "'TIMESTAMP', 'ContextTokens', 'Tokens'" in caught.value.message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", ("empty",)),
        (b"\n \n", ("empty",)),
        (b",,\n", ("column", "none")),
        (b"a,b\n1,2\n", ("'a'", "'b'")),
        (b"\xff\xfe\x00", ("UTF-8",)),
        (b"a" * 200_000, ("line 1", "131072")),
        (b"[1, 2", ("JSON array",)),
        (b"[1, 2]", ("JSON object",)),
        (b"{\n", ("JSON object",)),
        (b"arrived_at,num_prefill_tokens,num_decode_tokens\n", ("row", "0")),
        (b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,0,0\n", ("0", "1", "length")),
        (
            b"arrived_at,num_prefill_tokens,num_decode_tokens\n0,1," + b"9" * 200_000,
            ("line 2", "131072"),
        ),
    ],
)
def test_a_file_that_is_no_trace_is_one_clear_error(tmp_path, content, named):
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert says(caught.value.message, "trace", *named)


def test_a_missing_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        read_trace(tmp_path / "nothing.csv")


def _file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_that_unpacks_to_far_more_than_a_trace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.jsonl.gz"
    row = b'{"timestamp": 1, "input_length": 2, "output_length": 3}\n'
    for content in (bytes(8 << 20), row * 200_000, b"[" + bytes(8 << 20)):
        path.write_bytes(gzip.compress(content))
        monkeypatch.setattr(read, "MAX_UNPACKED", 1 << 20)
        with pytest.raises(InputError) as refused:
            read_trace(path)
        assert says(refused.value.message, "100")
    monkeypatch.undo()
    path.write_bytes(gzip.compress(row * 20_000))
    assert len(read_trace(path)[0]) == 20_000


def test_a_line_or_a_value_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "MAX_LINE", 1000)
    monkeypatch.setattr(read, "MAX_WHOLE", 2000)
    path = tmp_path / "trace"
    row = '{"timestamp": 1, "input_length": 2, "output_length": 3}\n'
    long = " " * 1000
    for content in (row + long, "a,b\n" + long, "[" + 3 * long + "]", "{\n" + 3 * row + 3 * long):
        path.write_text(content)
        with pytest.raises(InputError) as refused:
            read_trace(path)
        assert "1,000" in refused.value.message or "2,000" in refused.value.message


@pytest.mark.parametrize("kind", ["csv", "json", "rows", "nested"])
def test_more_columns_than_a_log_has_are_refused_by_their_number(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace"
    names = [f"c{k}" for k in range(20_000)]
    path.write_text(
        {
            "csv": ",".join(names) + "\n" + ",".join(["1"] * 20_000),
            "json": json.dumps([dict.fromkeys(names, 1)]),
            # rows are looked at until there are too many
            "rows": "\n".join(
                json.dumps(dict.fromkeys(names[k : k + 9], 1)) for k in range(0, 20_000, 9)
            ),
            "nested": json.dumps({"in": dict.fromkeys(names, 1)}),
        }[kind]
    )
    with pytest.raises(InputError) as refused:
        read_trace(path)
    assert says(refused.value.message, "4,104" if kind == "rows" else "20,000", "4,096")
