"""One streaming request, fed with bytes at exact times: the times that it notes, and its ends."""

import asyncio
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sse_server import DONE, chunked, event, head, tokens_event, usage_event, whole

from toolkit.endpoints.load import Sample, StreamCall


class Transport(asyncio.Transport):
    """Remembers what was written, and whether it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def call_with(
    *pieces: tuple[float, bytes], lost: bool = True
) -> tuple[Sample, StreamCall, Transport]:
    """A call that is connected at 0.5 s and gets each piece at its time."""
    times = iter([0.5, *(at for at, _ in pieces)])

    async def feed() -> tuple[Sample, StreamCall, Transport]:
        sample = Sample(0.25, 10, 3)
        transport = Transport()
        call = StreamCall(b"POST ...", sample, lambda: next(times))
        call.connection_made(transport)
        for _, data in pieces:
            call.data_received(data)
        if lost:
            call.connection_lost(None)
        return sample, call, transport

    return asyncio.run(feed())


def answer(data: bytes) -> Sample:
    return call_with((1.0, data))[0]


def test_the_times_of_tokens_are_noted_as_they_come():
    start = head(extra="transfer-encoding: chunked\r\n")
    piece = b"%x\r\n%s\r\n" % (len(tokens_event()), tokens_event())
    tail = (
        b"".join(b"%x\r\n%s\r\n" % (len(data), data) for data in (usage_event(3), DONE))
        + b"0\r\n\r\n"
    )
    sample, call, transport = call_with(
        (1.0, start), (1.5, piece), (3.5, piece), (4.0, piece), (4.5, tail)
    )
    assert transport.written == b"POST ..."
    assert (sample.sent_s, sample.first_token_s, sample.last_token_s, sample.max_gap_s) == (
        0.5,
        1.5,
        4.0,
        2.0,
    )
    assert (sample.output_tokens, sample.failure) == (3, "")
    assert (call.closed.is_set(), transport.aborted) == (True, True)


def test_tokens_are_counted_by_usage_not_by_events():
    sample = answer(chunked(tokens_event("three tokens"), usage_event(3), DONE))
    assert (sample.output_tokens, sample.failure) == (3, "")


def test_comments_and_lines_of_other_kinds_are_no_tokens():
    waiting = b": waiting\n\n" + b"event: ping\nid: 3\n\n"
    sample, *_ = call_with(
        (1.0, head() + waiting),
        (2.0, tokens_event()),
        (3.0, tokens_event() + usage_event(2) + DONE),
    )
    assert (sample.first_token_s, sample.failure) == (2.0, "")


def test_carriage_returns_and_a_missing_space_are_fine():
    stream = (
        (tokens_event() + usage_event(1) + DONE)
        .replace(b"\n", b"\r\n")
        .replace(b"data: ", b"data:")
    )
    assert answer(head() + stream).failure == ""


def test_a_stream_may_end_without_done():
    assert answer(head() + tokens_event() + usage_event(1)).failure == ""


@given(cuts=st.lists(st.integers(0, 1000), max_size=30))
def test_any_cut_of_the_bytes_gives_the_same_result(cuts):
    data = chunked(b": waiting\n\n", tokens_event("ä"), tokens_event(), usage_event(2), DONE)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    sample, *_ = call_with(*((1.0, piece) for piece in pieces))
    assert (sample.output_tokens, sample.max_gap_s, sample.failure) == (2, 0.0, "")


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
        (head() + tokens_event(), "the connection was lost"),
        (b"", "the connection was lost"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is not HTTP"),
    ],
)
def test_any_other_answer_is_a_failure_with_a_reason(data, failure):
    assert answer(data).failure == failure


def test_the_first_reason_stands():
    sample, call, _ = call_with((1.0, chunked(event({"error": "first"}))), lost=False)
    call.end("second")
    call.connection_lost(None)
    assert sample.failure == "error in the stream: first"


def test_an_event_that_never_happened_is_nan():
    sample = answer(whole({"error": "no"}, 503))
    assert math.isnan(sample.first_token_s)
    assert math.isnan(sample.last_token_s)
