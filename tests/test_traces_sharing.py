"""What prompts share and sessions are read from every format, checked, and written again."""

import json

import numpy as np
import pytest
from said import says

from toolkit.errors import InputError
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
    trace, report = read_trace(file_of(tmp_path, TURNS))
    assert trace.sessions.previous.tolist() == [-1, -1, 0, 2, 1]
    assert trace.sessions.think_s.tolist() == pytest.approx([0, 0, 0.9, 0.0205, 0])
    assert "2 sessions have 5 turns" in trace.notes
    assert (report.sessions, report.turns) == (2, 5)


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (2, {"input_length": 14}, "1 shorter than the turn before and its answer "
            "(row 3: 14 tokens, row 1: 10 + 5)"),
        (3, {"timestamp": 5.5}, "1 that arrive before the turn before "
            "(row 4: at 0.0055 s, row 3 at 0.006 s)"),
        (3, {"think_ms": -1}, "1 with an impossible time to think "
            "(row 4: think_ms is -1, must be at least 0 ms)"),
        (2, {"status": "timeout"}, "1 after a dropped turn (row 4)"),
    ],
)  # fmt: skip
def test_turns_that_cannot_follow_are_named_and_start_anew(tmp_path, place, change, said):
    rows = [{**one, **(change if k == place else {})} for k, one in enumerate(TURNS)]
    trace, report = read_trace(file_of(tmp_path, rows))
    [line] = [line for line in trace.notes if "first turns" in line]
    assert line == f"1 row is read as first turns: {said}"
    assert report.unlinked.counts.total() == 1
    assert (trace.sessions.previous >= 0).sum() == (1 if place == 2 and "status" in change else 2)


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


def aiperf(session, new, output, ids, **more):
    numbers = {"input_length": new, "output_length": output}
    return {"session_id": session, **numbers, "hash_ids": ids, **more}


def test_aiperfs_turns_get_the_prompts_that_they_add_to(tmp_path):
    rows = [
        aiperf("a", 1100, 30, [0, 1, 2], timestamp=0.0, group_id=4),
        aiperf("a", 40, 200, [9], delay=1500.0),
        aiperf("a", 600, 10, [10, 11], delay=250.0),
        aiperf("b", 1030, 7, [0, 1, 12], timestamp=100.0),
    ]
    trace, report = read_trace(file_of(tmp_path, rows))
    assert report.format == "aiperf"
    order = np.argsort(trace.arrival_s)
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.1, 1.5, 1.75])
    assert trace.prompt_tokens.tolist() == [1100, 1030, 1170, 1970]
    assert trace.sessions.previous.tolist() == [-1, -1, 0, 2]
    assert trace.sessions.think_s.tolist() == pytest.approx([0, 0, 1.5, 0.25])
    first, other, second, third = (blocks(trace)[place] for place in order)
    assert first == [0, 1, 2]
    assert other == [0, 1, 12]
    assert second[:2] == [0, 1]
    assert third[:2] == [0, 1]
    # What a prompt adds is shared by nothing else, except by the turn that continues it.
    assert len({*first, *other, *second, *third}) == 3 + 1 + 1 + 2
    assert min(third) >= 0


def test_a_whole_prompt_of_aiperf_is_not_added_to(tmp_path):
    mode = {"context_mode": "message_array_with_responses"}
    rows = [
        aiperf("a", 600, 20, [0, 1], timestamp=0, **mode),
        aiperf("a", 700, 5, [0, 2], timestamp=9, **mode),
    ]
    trace, _ = read_trace(file_of(tmp_path, rows))
    assert trace.prompt_tokens.tolist() == [600, 700]
    assert blocks(trace) == [[0, 1], [0, 2]]
    assert trace.sessions.previous.tolist() == [-1, 0]
    with pytest.raises(InputError, match=r"context_mode.*'other'"):
        read_trace(file_of(tmp_path, [aiperf("a", 6, 2, [0], timestamp=0, context_mode="other")]))


def test_turns_of_aiperfs_after_an_unusable_one_are_dropped(tmp_path):
    rows = [
        aiperf("a", 600, 20, [0, 1], timestamp=0),
        aiperf("a", "many", 20, [2], delay=5),
        aiperf("a", 10, 20, [3], delay=5),
        aiperf("b", 600, 20, [0, 1], timestamp=0),
        aiperf("b", 10, 20, [4, 5, 6], delay=5),  # too many blocks for what is new
        aiperf("b", 10, 20, [7], delay=5),
    ]
    trace, report = read_trace(file_of(tmp_path, rows))
    assert report.dropped == {"unparsable": 1, "after an unusable turn of their session": 1}
    assert "(row 3: session_id is 'a')" in " ".join(trace.notes)
    assert blocks(trace) == [[0, 1], [0, 1], [], []]
    assert report.unshared.counts.total() == 2
    path = file_of(tmp_path, rows)
    path.write_text(path.read_text() + "no json\n")
    with pytest.raises(InputError, match=r"row 7 .*JSON object"):
        read_trace(path)


def agent(requests, **more):
    return {"id": "t", "block_size": 64, "hash_id_scope": "local", "requests": requests, **more}


def call(t, prompt, output, ids, **more):
    return {"t": t, "type": "s", "in": prompt, "out": output, "hash_ids": ids, **more}


SESSION = agent(
    [
        call(0.0, 200, 10, [1, 2, 3], think_time=0.0, api_time=2.0),  # 3 whole blocks and 8 tokens
        call(5.0, 256, 20, [1, 2, 3, 4], think_time=3.0),
        {"type": "subagent", "t": 6.0, "requests": [
            call(0.0, 70, 5, [21]), call(1.0, 130, 6, [21, 22], think_time=0.5),
        ]},
        call(8.0, 300, 7, [1, 2, 3, 4]),
        call(9.0, 301, 7, [1, 9, 3, 4]),  # no chain
        call(10.0, 310, 7, [1, 2, 10, 11]),  # an edited context
    ]
)  # fmt: skip


def test_a_coding_agents_session_is_read_with_its_subagents(tmp_path):
    trace, report = read_trace(file_of(tmp_path, [SESSION], "trace_1.json"))
    assert report.format == "agents"
    assert trace.arrival_s.tolist() == [0, 5, 6, 7, 8, 9, 10]
    assert trace.shared.block_tokens == 64
    assert trace.shared.counts.tolist() == [4, 4, 2, 3, 5, 0, 5]
    assert trace.sessions.previous.tolist() == [-1, 0, -1, 2, 1, -1, -1]
    assert trace.sessions.think_s.tolist() == pytest.approx([0, 3, 0, 0.5, 3, 0, 0])
    # The partial last block of a prompt is not listed: it is shared with nothing.
    last = [ids[-1] for ids in blocks(trace) if ids]
    assert len(set(last)) == len(last)
    notes = " ".join(trace.notes)
    assert "no chain (row 6: 9 stands" not in notes
    assert says(notes, "64 tokens", "1 row", "5 turns", "2 rows", "row 6")


def test_ids_of_two_agents_are_different_unless_they_are_global(tmp_path):
    one = agent([call(0.0, 128, 10, [1, 2])])
    for scope, expected in (("local", [[1, 2], [4, 5]]), ("global", [[1, 2], [1, 2]])):
        folder = tmp_path / scope
        folder.mkdir()
        for name in ("trace_2.json", "trace_1.json"):
            file_of(folder, [{**one, "hash_id_scope": scope}], name)
        trace, report = read_trace(folder)
        assert blocks(trace) == expected
        assert (report.source, report.rows) == (scope, 2)


def test_a_folder_without_sessions_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"\*\.json"):
        read_trace(tmp_path)
    file_of(tmp_path, [row(0, 5)], "x.json")
    with pytest.raises(InputError, match=r"/x\.json"):
        read_trace(tmp_path)


def test_impossible_requests_of_an_agent_are_dropped(tmp_path):
    bad = [call(0.0, 128, 0, [1, 2]), 7, call("soon", 64, 3, [1]), {"requests": 5, "t": 1}]
    trace, report = read_trace(file_of(tmp_path, [agent([*bad, call(1.0, 64, 3, [1])])], "t.json"))
    assert (len(trace), report.rows) == (1, 5)
    assert report.dropped == {"with a non-positive length": 1, "unparsable": 3}
