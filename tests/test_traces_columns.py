"""Logs are read by the names of their columns, and nothing is lost in silence."""

import gzip
import json
from pathlib import Path

import pytest
from commands import shown as llmctl

from toolkit.errors import InputError
from toolkit.traces.chats import TokenCounter
from toolkit.traces.columns import parse_columns
from toolkit.traces.read import read_trace


def jsonl(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder: Path, text: str) -> Path:
    path = folder / "log"
    path.write_text(text, encoding="utf-8")
    return path


OPENAI = jsonl(
    {"id": "a", "created": 1700000000, "usage": {"prompt_tokens": 5, "completion_tokens": 6}},
    {"id": "b", "created": 1700000002, "usage": {"prompt_tokens": 7, "completion_tokens": 8}},
)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([json.loads(line) for line in OPENAI.splitlines()], indent=1),
        "time;prompt_tokens;completion_tokens\n0.5;5;6\n2.5;7;8\n",
        "ts\tinput_tokens\toutput_tokens\n0.5\t5\t6\n2.5\t7\t8\n",
        "TIME,num_prefill_tokens,num_decode_tokens\n0.5,5,6\n2.5,7,8\n",
    ],
)
def test_the_form_of_a_file_is_found_by_its_content(tmp_path, text):
    trace, _ = read_trace(written(tmp_path, text))
    assert trace.arrival_s.tolist() == pytest.approx([0, 2], abs=1e-6)
    assert trace.prompt_tokens.tolist() == [5, 7]
    assert trace.output_tokens.tolist() == [6, 8]


NGINX = [
    {"msec": "1700158546.680", "request_time": "2.500", "status": "200", "pt": "5", "ct": "6"},
    {"msec": "1700158547.180", "request_time": "0.500", "status": "200", "pt": "7", "ct": "8"},
    {"msec": "1700158548.180", "request_time": "0.001", "status": "200", "pt": "", "ct": "-"},
    {"msec": "1700158548.180", "request_time": "0.001", "status": "502", "pt": "", "ct": ""},
]


def nginx(**times: str) -> str:
    """nginx' log, in which `times` names the variables of time."""
    rows = []
    for row in NGINX:
        named = {times.get(key, key): value for key, value in row.items()}
        rows.append({{"pt": "prompt_tokens", "ct": "completion_tokens"}.get(k, k): v
                     for k, v in named.items()})  # fmt: skip
    return jsonl(*rows)


@pytest.mark.parametrize("name", ["msec", "time", "ts", "@timestamp"])
def test_an_nginx_line_is_written_at_the_end_of_its_request(tmp_path, name):
    trace, report = read_trace(written(tmp_path, nginx(msec=name)))
    assert trace.arrival_s.tolist() == pytest.approx([0, 2.5], abs=1e-6)
    assert trace.prompt_tokens.tolist() == [5, 7]
    assert report.dropped == {"failed responses": 1, "without token counts": 1}


@pytest.mark.parametrize(
    ("values", "arrivals"),
    [
        ([1700000000, 1700000003], [0, 3]),
        ([1700000000123, 1700000003123], [0, 3]),
        ([1700000000123000, 1700000003123000], [0, 3]),
        ([1700000000123000000, 1700000003123000000], [0, 3]),
        (["1700000000.5", "1700000003.5"], [0, 3]),
        ([0, 3], [0, 3]),
        (["2023-11-16T18:15:46Z", "2023-11-16 18:15:49"], [0, 3]),
        (["2023-11-16T18:15:46+01:00", "2023-11-16T17:15:49+00:00"], [0, 3]),
    ],
)
def test_dates_and_calendar_times_are_known_by_their_values(tmp_path, values, arrivals):
    rows = [{"time": value, "input_tokens": 5, "output_tokens": 6} for value in values]
    trace, report = read_trace(written(tmp_path, jsonl(*rows)))
    assert trace.arrival_s.tolist() == pytest.approx(arrivals, abs=1e-6)
    assert "time 'time' (" in report.understood


def test_other_numbers_are_seconds_and_the_report_says_how_to_name_another_unit(tmp_path):
    text = "ts,prompt_tokens,completion_tokens\n0,5,6\n3000,7,8\n"
    trace, report = read_trace(written(tmp_path, text))
    assert trace.arrival_s.tolist() == [0, 3000]
    assert "a request every 3e+03 s" in report.understood
    assert "--columns time=ts:ms" in report.understood
    trace, _ = read_trace(written(tmp_path, text.replace("ts", "ts_ms")))
    assert trace.arrival_s.tolist() == [0, 3]


@pytest.mark.parametrize(("unit", "last"), [("s", 40.0), ("ms", 0.04), ("us", 4e-5), ("ns", 4e-8)])
def test_a_unit_can_be_named(tmp_path, unit, last):
    text = "when,prompt_tokens,completion_tokens\n0,5,6\n40,7,8\n"
    trace, _ = read_trace(written(tmp_path, text), parse_columns(f"time=when:{unit}"))
    assert trace.arrival_s[-1] == pytest.approx(last)


def test_columns_are_named_by_the_user_and_others_found(tmp_path):
    text = jsonl(
        {"a": {"b": 3}, "p": 5, "o": 6, "max_tokens": 9, "session": "x"},
        {"a": {"b": 1}, "p": 7, "o": 8, "max_tokens": None, "session": "y"},
    )
    chosen = parse_columns("time=a.b:s, prompt=P,output=o")
    trace, report = read_trace(written(tmp_path, text), chosen)
    assert trace.arrival_s.tolist() == [0, 2]
    assert trace.prompt_tokens.tolist() == [7, 5]
    assert trace.max_tokens.tolist() == [0, 9]
    assert report.reordered


@pytest.mark.parametrize(
    "words",
    [
        "prompt",
        "prompt=",
        "tiem=ts",
        "time=ts:min",
        "time=a,time=b",
        "duration=d:iso",
        "prompt=a,output=a",
        "",
    ],
)
def test_words_that_name_no_column_are_refused(words):
    with pytest.raises(InputError):
        parse_columns(words)


def test_a_named_column_that_is_missing_gets_the_nearest(tmp_path):
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, OPENAI), parse_columns("prompt=usage.promt_tokens"))
    assert "usage.prompt_tokens" in caught.value.hint


def test_lengths_that_are_not_found_are_named_with_the_columns(tmp_path):
    with pytest.raises(InputError) as caught:
        read_trace(written(tmp_path, "timestamp,bytes\n1,2\n"))
    assert "'bytes'" in caught.value.message
    assert "--columns" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "unused"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens,Session ID\n2023-11-16 18:15:46,5,6,1\n",
         "'Session ID'"),
        ("Timestamp,Request tokens,Response tokens,Elapsed time\n5,5,6,1\n", "'Elapsed time'"),
        ("prompt_tokens,completion_tokens,my time\n5,6,soon\n", "'my time'"),
        ("time,prompt_tokens,completion_tokens,input_length\n0,5,6,9\n", "'input_length'"),
    ],
)  # fmt: skip
def test_a_column_that_looks_useful_and_is_not_used_is_named(tmp_path, text, unused):
    trace, _ = read_trace(written(tmp_path, text))
    assert any("not used" in note and unused in note for note in trace.notes)


def test_a_packed_file_reads_as_the_plain_one_whatever_its_name(tmp_path):
    plain = written(tmp_path, OPENAI)
    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(OPENAI.encode()))
    assert list(read_trace(packed)[0].rows()) == list(read_trace(plain)[0].rows())
    packed.write_bytes(gzip.compress(OPENAI.encode())[:-9])
    with pytest.raises(InputError, match="damaged"):
        read_trace(packed)


@pytest.mark.parametrize(("more", "linked"), [({}, 1), ({"dotted_order": "x"}, 0)])
def test_a_project_of_langsmith_is_not_a_session(tmp_path, more, linked):
    rows = [
        {"start_time": f"2025-01-01T00:00:0{k}", "end_time": f"2025-01-01T00:00:0{k + 1}",
         "prompt_tokens": 50 * (k + 1), "completion_tokens": 5, "session_id": "s", **more}
        for k in range(2)
    ]  # fmt: skip
    trace, _ = read_trace(written(tmp_path, jsonl(*rows)))
    assert (trace.sessions is not None) == bool(linked)


SHAREGPT = json.dumps(
    [
        {
            "id": "a",
            "conversations": [
                {"from": "system", "value": "x" * 4},
                {"from": "human", "value": "x" * 7},
                {"from": "gpt", "value": "x" * 8},
                {"from": "human", "value": "x" * 12},
                {"from": "gpt", "value": "x" * 4},
            ],
        },
        {"id": "b", "conversations": [{"from": "human", "value": "no answer"}]},
        {"id": "c", "conversations": [{"from": "gpt", "value": "no question"}]},
        {"id": "d", "messages": [{"role": "user", "content": "x" * 4},
                                 {"role": "assistant", "content": "x" * 4}]},
    ]
)  # fmt: skip


def test_answers_of_conversations_are_turns(tmp_path):
    counter = TokenCounter(lambda text: -(-len(text) // 4), "made")
    trace, report = read_trace(written(tmp_path, SHAREGPT), counter=counter)
    assert trace.prompt_tokens.tolist() == [1 + 2, 1 + 2 + 2 + 3, 1]
    assert trace.output_tokens.tolist() == [2, 1, 1]
    assert trace.sessions is not None
    assert trace.sessions.previous.tolist() == [-1, 0, -1]
    assert report.dropped == {"without an answer": 1, "with a non-positive length": 1}
    assert report.timeless


def test_conversations_need_a_counter(tmp_path):
    with pytest.raises(InputError, match="no lengths in tokens"):
        read_trace(written(tmp_path, SHAREGPT))


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "no-such-recipe"],
        ["--tokenizer", "absent.json"],
        ["--columns", "prompt=nothing"],
    ],
)
def test_impossible_ways_to_count_are_refused(capsys, tmp_path, words):
    path = written(tmp_path, SHAREGPT)
    out = tmp_path / "out.jsonl"
    code, _, err = llmctl(capsys, "trace", "convert", path, out, *words)
    assert code == 2
    assert err.startswith("error: ")
    assert not out.exists()


@pytest.mark.slow
def test_inspect_says_what_was_taken_as_what(capsys, tmp_path):
    path = written(tmp_path, OPENAI)
    code, out, _ = llmctl(capsys, "trace", "inspect", path, "--columns", "time=created:s")
    assert code == 0
    for said in ("'created' (s, as named)", "'usage.prompt_tokens'", "'usage.completion_tokens'"):
        assert said in " ".join(out.split())
    code, out, _ = llmctl(capsys, "trace", "inspect", path, "--json")
    assert "s since 1970" in json.loads(out)["report"]["understood"]
    code, out, _ = llmctl(capsys, "trace", "inspect", "chat-small")
    assert "time 'timestamp' (ms)" in out


def test_other_commands_read_the_same_logs(capsys, tmp_path):
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(OPENAI.encode()))
    words = ["unit-step", "--policies", "fcfs", "--trace", packed, "--json"]
    code, out, _ = llmctl(capsys, "simulate", *words)
    assert code == 0, out
