"""One streaming request: the times that it notes, and its ends."""

import asyncio
import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sse_server import DONE, chunked, event, head, sse_server, tokens_event, usage_event, whole

from toolkit.bench.client import served
from toolkit.endpoints.load import Sample, StreamedAnswer, load_client, send_timed
from toolkit.endpoints.target import Target
from toolkit.metrics import Served, summarize
from toolkit.openai import events


def fed(*pieces: tuple[float, bytes]) -> tuple[Sample, StreamedAnswer]:
    """What an answer notes that gets each piece of its body at its time."""
    sample = Sample(0.25, 10, 3)
    answer = StreamedAnswer(sample)
    for at_s, piece in pieces:
        answer.feed(piece, at_s)
    return sample, answer


def answer(data: bytes | None, timeout_s: float = 30.0) -> Sample:
    """What the client notes if its server answers with these bytes, and closes."""
    sample = Sample(0.25, 10, 3)

    async def send(url: str) -> None:
        target = Target(url, "", "m", None, own=False)
        sample.write(target, {"prompt": [1]})
        async with contextlib.aclosing(load_client(target)) as server:
            await send_timed(server, sample, lambda: 0.5, timeout_s)

    with sse_server(lambda _: data) as server:
        asyncio.run(send(server.url))
    return sample


def test_the_times_of_tokens_are_noted_as_they_come():
    piece = tokens_event()
    sample, answer = fed((1.5, piece), (3.5, piece), (4.0, piece), (4.5, usage_event(3) + DONE))
    times = (sample.first_token_s, sample.last_token_s, sample.max_gap_s)
    assert times == (1.5, 4.0, 2.0)
    assert (sample.output_tokens, answer.complete, answer.failure) == (3, True, "")


def test_one_token_is_measured_as_it_is_simulated():
    """The event that ends its stream, here 0.4 s later, is no token."""
    several = ((1.5, tokens_event()), (3.5, tokens_event()), (4.0, tokens_event() + usage_event(3)))
    one, _ = fed((1.0, tokens_event()), (1.4, tokens_event("") + usage_event(1)))
    three, _ = fed(*several)
    one.failure = three.failure = ""
    columns = ([0.25, 0.25], [1.0, 1.5], [1.0, 4.0], [1, 3], [0.0, 2.0], [True, True])
    simulated = summarize(Served(*map(np.array, columns)), {"mtpot_p99_s": 3.0, "tpot_p99_s": 2.0})
    measured = summarize(served([one, three]), {"mtpot_p99_s": 3.0, "tpot_p99_s": 2.0})
    of_gaps = [name for name in simulated if name.startswith(("tpot", "mtpot", "sla"))]
    assert [measured[name] for name in of_gaps] == [simulated[name] for name in of_gaps]
    assert (measured["mtpot_p50_s"], measured["sla_attainment_percent"]) == (2.0, 100.0)


def test_comments_and_lines_of_other_kinds_are_no_tokens():
    waiting = b": waiting\n\n" + b"event: ping\nid: 3\n\n"
    end = tokens_event() + usage_event(2) + DONE
    sample, answer = fed((1.0, waiting), (2.0, tokens_event()), (3.0, end))
    assert (sample.first_token_s, answer.complete) == (2.0, True)


def test_carriage_returns_a_missing_space_and_a_missing_end_are_fine():
    stream = tokens_event("three tokens") + usage_event(3)
    stream = stream.replace(b"\n", b"\r\n").replace(b"data: ", b"data:")
    sample = answer(head() + stream)
    assert (sample.output_tokens, sample.failure) == (3, "")


@given(cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_any_cut_of_the_bytes_gives_the_same_result(cuts):
    sent = (b": waiting\n\n", tokens_event("ä"), tokens_event(), usage_event(2), DONE)
    data = b"".join(sent)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    sample, answer = fed(*((1.0, piece) for piece in pieces))
    assert (sample.output_tokens, sample.max_gap_s, answer.complete) == (2, 0.0, True)


@pytest.mark.parametrize(
    ("data", "failure"),
    [
        (whole({"error": {"message": "too long a prompt"}}, 400), "HTTP 400: too long a prompt"),
        (whole({"error": "overloaded"}, 503), "HTTP 503: overloaded"),
        (whole({"message": "no such route"}, 404), "HTTP 404: no such route"),
        (head(500, "text/plain") + b"oops\nagain", "HTTP 500: oops again"),
        (head(502, "text/plain") + b"x" * 100_000, "HTTP 502: " + "x" * 200),
        (
            chunked(tokens_event(), event({"error": {"message": "a worker died"}})),
            "error in the stream: a worker died",
        ),
        (chunked(event({"error": "worker died"}), DONE), "error in the stream: worker died"),
        (chunked(tokens_event(), DONE), "the stream ended without tokens or their usage"),
        (chunked(usage_event(0), DONE), "the stream ended without tokens or their usage"),
        (chunked(usage_event(5), DONE), "the stream ended without tokens or their usage"),
        (chunked(b"data: {broken\n\n"), "an event is not OpenAI's"),
        (chunked(b'data: {"choices": 3}\n\n'), "an event is not OpenAI's"),
        (chunked(tokens_event(), usage_event(1))[:120], "the connection was lost"),
        (head() + tokens_event(), "the stream ended without tokens or their usage"),
        (b"", "the connection was lost"),
        (b"SSH-2.0-OpenSSH\r\n", "its answer is not HTTP"),
    ],
)
def test_any_other_answer_is_a_failure_with_a_reason(data, failure):
    assert answer(data).failure == failure


def test_a_silent_server_is_awaited_for_the_given_time():
    assert answer(None, timeout_s=0.05).failure == "no end within 0.05 s"


def test_empty_lines_are_one_event_however_the_stream_is_cut():
    stream = b"\n\n\n\r\ndata: a\n\n\n\r\n\n:\r\n\r\n\r\ndata: b\r\r\r\r\n" + b"\n" * 10_000
    for at in range(60):
        reader = events.EventReader()
        found = reader.feed(stream[:at]) + reader.feed(stream[at:])
        assert b"".join(found) + reader.rest == stream
        assert len(found) <= 8
        data = [events.data_of(events.lines_of(one)) for one in found]
        assert [one for one in data if one] == [b"a", b"b"]


def test_others_run_between_the_parts_of_a_piece():
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def pieces():
        yield b"x" * (10 * events.PART_BYTES)
        yield b"y"

    async def read() -> bytes:
        counting = asyncio.create_task(count())
        parts = [part async for part in events.in_parts(pieces())]
        counting.cancel()
        assert max(map(len, parts)) <= events.PART_BYTES
        return b"".join(parts)

    assert asyncio.run(read()) == b"x" * (10 * events.PART_BYTES) + b"y"
    assert turns >= 9


@pytest.mark.slow
def test_interim_answers_without_end_are_no_answer():
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    good = chunked(tokens_event(), usage_event(1), DONE)
    assert answer(interim * 32 + good).failure == ""
    assert answer(interim * 33 + good).failure
