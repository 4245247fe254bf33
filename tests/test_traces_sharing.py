"""What prompts share, and sessions, are read, checked, and written again."""

import json

import pytest
from said import says

from toolkit.errors import InputError
from toolkit.traces.columns import parse_columns
from toolkit.traces.read import read_trace
from toolkit.traces.write import write_trace


def file_of(folder, rows, name="trace.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(timestamp, prompt, output=5, **more):
    return {"timestamp": timestamp, "input_length": prompt, "output_length": output, **more}


def blocks(trace) -> list[list[int]]:
    return [trace.shared.of(place).tolist() for place in range(len(trace))]


def test_mooncakes_hash_ids_are_blocks_of_512_tokens(tmp_path):
    rows = [row(9, 1000, hash_ids=[1, 3]), row(4, 513, hash_ids=[1, 2]), row(7, 10)]
    trace, report = read_trace(file_of(tmp_path, rows))
    assert trace.shared.block_tokens == 512
    assert blocks(trace) == [[1, 2], [], [1, 3]]
    assert says(" ".join(report.lines()), "512")
    assert trace.sessions is None
    assert report.unshared.counts == {}


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            row(1, 2000, hash_ids=[1, 2, 3]),
            "with hash_ids that contradict the length "
            "(row 2: 3 for 2,000 tokens in blocks of 512, must be 4)",
        ),
        (row(1, 9, hash_ids=[]), "(row 2: 0 for 9 tokens in blocks of 512, must be 1)"),
        (row(1, 9, hash_ids="7"), "with hash_ids that are not a list of whole numbers (row 2)"),
        (row(1, 9, hash_ids=[1.5]), "with hash_ids that are not a list of whole numbers (row 2)"),
        (row(1, 9, hash_ids=[2**63]), "that are not a list of whole numbers (row 2)"),
        (
            row(1, 1500, hash_ids=[1, 4, 3]),
            "with hash_ids that are no chain (row 2: 3 stands after 4, and after 2 in row 1)",
        ),
        (row(1, 9, hash_ids=[3]), "(row 2: 3 stands first, and after 2 in row 1)"),
        (row(1, 1500, hash_ids=[7, 7, 7]), "(row 2: 7 stands after 7, and first in row 2)"),
    ],
)
def test_a_row_with_impossible_blocks_shares_nothing(tmp_path, bad, said):
    rows = [row(0, 1500, hash_ids=[1, 2, 3]), bad, row(2, 1500, hash_ids=[1, 2, 3])]
    trace, report = read_trace(file_of(tmp_path, rows))
    assert blocks(trace) == [[1, 2, 3], [], [1, 2, 3]]
    [line] = [line for line in trace.notes if "sharing nothing" in line]
    assert says(line, "1 row", "1 with hash_ids")
    assert said in line
    assert (report.kept, report.dropped) == (3, {})


def test_blocks_of_two_sizes_are_an_error(tmp_path):
    rows = [row(0, 20, block_tokens=16, hash_ids=[1, 2]), row(1, 20, hash_ids=[1])]
    with pytest.raises(InputError, match=r"row 2.*512.*row 1.*16"):
        read_trace(file_of(tmp_path, rows))
    with pytest.raises(InputError, match=r"block_tokens\b.*\b0\b"):
        read_trace(file_of(tmp_path, [row(0, 20, block_tokens=0, hash_ids=[1])]))


TURNS = [
    row(0, 10, session="a"),
    row(5, 20, session="b"),
    row(6, 15, session="a", think_ms=900),
    row(9, 30, session="a", think_ms=20.5),
    row(9, 25, 1, session="b"),
]


def test_a_turn_continues_the_last_row_of_its_session(tmp_path):
    trace, _ = read_trace(file_of(tmp_path, TURNS))
    assert trace.sessions.previous.tolist() == [-1, -1, 0, 2, 1]
    assert trace.sessions.think_s.tolist() == pytest.approx([0, 0, 0.9, 0.0205, 0])
    assert "2 sessions have 5 turns" in trace.notes


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (2, {"input_length": 14}, "1 shorter than the turn before and its answer "
            "(row 3: 14 tokens, row 1: 10 + 5)"),
        (3, {"think_ms": -1}, "1 with an impossible time to think "
            "(row 4: think_ms is -1, must be at least 0 ms)"),
    ],
)  # fmt: skip
def test_turns_that_cannot_follow_are_named_and_start_anew(tmp_path, place, change, said):
    rows = [{**one, **(change if k == place else {})} for k, one in enumerate(TURNS)]
    trace, report = read_trace(file_of(tmp_path, rows))
    [line] = [line for line in trace.notes if "first turns" in line]
    assert line == f"1 row is read as first turns: {said}"
    assert report.unlinked.counts.total() == 1
    assert (trace.sessions.previous >= 0).sum() == 2


def test_lengths_that_may_be_of_what_is_new_in_a_turn_are_refused(tmp_path):
    rows = [row(1000 * k, 100 + 50 * k, session_id="a") for k in range(3)]
    path = file_of(tmp_path, rows)
    with pytest.raises(InputError, match="what is new"):
        read_trace(path)
    trace, _ = read_trace(path, parse_columns("session=session_id"))
    assert trace.sessions.previous.tolist() == [-1, 0, 1]


def test_turns_follow_by_their_times_also_over_a_dropped_one(tmp_path):
    moved = [{**one, "timestamp": 5.5} if k == 3 else one for k, one in enumerate(TURNS)]
    trace, _ = read_trace(file_of(tmp_path, moved))
    assert trace.prompt_tokens.tolist() == [10, 20, 30, 15, 25]
    assert trace.sessions.previous.tolist() == [-1, -1, 0, -1, 1]  # 15 tokens do not hold 30
    failed = [{**one, "status": "timeout"} if k == 2 else one for k, one in enumerate(TURNS)]
    trace, _ = read_trace(file_of(tmp_path, failed))
    assert trace.sessions.previous.tolist() == [-1, -1, 0, 1]


def test_a_turn_with_other_blocks_starts_anew(tmp_path):
    rows = [
        row(0, 10, block_tokens=4, hash_ids=[1, 2, 3], session=1),
        row(1, 16, block_tokens=4, hash_ids=[1, 2, 7, 8], session=1),  # only whole blocks count
        row(2, 24, block_tokens=4, hash_ids=[1, 2, 7, 9, 10, 11], session=1),
    ]
    trace, _ = read_trace(file_of(tmp_path, rows))
    assert trace.sessions.previous.tolist() == [-1, 0, -1]
    said = "1 row is read as first turns: 1 with other blocks than the turn before (row 3, row 2)"
    assert said in trace.notes


def test_what_was_read_is_written_and_read_again(tmp_path):
    rows = [
        row(0, 10, block_tokens=4, hash_ids=[5, 6, 7], session="x"),
        row(1, 3),
        row(2, 16, block_tokens=4, hash_ids=[5, 6, 8, 9], session="x", think_ms=70.5),
        row(3, 2, session="alone"),
    ]
    trace, _ = read_trace(file_of(tmp_path, rows))
    out = tmp_path / "out.jsonl"
    write_trace(trace, out)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line.get("session") for line in lines] == [0, None, 0, None]
    assert [line.get("block_tokens") for line in lines] == [4, None, 4, None]
    assert "think_ms" not in lines[0]
    again, report = read_trace(out)
    assert blocks(again) == blocks(trace)
    assert again.sessions.previous.tolist() == trace.sessions.previous.tolist()
    assert again.sessions.think_s.tolist() == trace.sessions.think_s.tolist()
    assert (report.unshared.counts, report.unlinked.counts) == ({}, {})
