"""One wire: what our server writes is read by the front and the load generator."""

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.endpoints.load import Sample, StreamedAnswer
from toolkit.openai.answers import AnswerWriter, Usage, about_answer, error_event
from toolkit.openai.bodies import parse_json
from toolkit.openai.engine_requests import EngineChat, EngineCompletion, read_engine_request
from toolkit.openai.errors import ApiError, error_body, error_text
from toolkit.openai.events import DONE, EventReader, data_of, lines_of
from toolkit.openai.merge import MergedAnswer
from toolkit.openai.requests import CHAT, COMPLETIONS, GenerationCall

TEXTS = st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=6)


def written(texts: list[str], *, chat: bool, shows_usage: bool = True) -> bytes:
    """The stream of an answer with one choice, as our server writes it."""
    writer = AnswerWriter(about_answer("m", chat=chat), chat=chat, shows_usage=shows_usage)
    ends = [""] * (len(texts) - 1) + ["stop"]
    events = [writer.event(0, *pair) for pair in zip(texts, ends, strict=True)]
    return b"".join([*events, writer.usage(Usage(7, len(texts))), DONE])


def call(*, chat: bool) -> GenerationCall:
    prompt = {"messages": []} if chat else {"prompt": "a"}
    asked = {"stream": True, "max_tokens": 20, "stream_options": {"include_usage": True}} | prompt
    return GenerationCall(CHAT if chat else COMPLETIONS, json.dumps(asked).encode())


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 400), max_size=8))
def test_every_reader_understands_what_our_server_writes(
    texts: list[str], chat: bool, cuts: list[int]
) -> None:
    stream = written(texts, chat=chat)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(edges)]
    sample = Sample(0.0, 7, len(texts))
    client = StreamedAnswer(sample)
    merged = MergedAnswer(call(chat=chat))
    passed = b""
    for at_s, piece in enumerate(pieces):
        client.feed(piece, float(at_s))
        passed += merged.feed(piece)
    assert (client.failure, client.complete) == ("", True)
    assert (sample.counted_prompt_tokens, sample.output_tokens) == (7, len(texts))
    assert merged.usage == Usage(7, len(texts))
    assert (merged.failure, merged.ended, merged.finish_reason) == ("", True, "stop")
    assert passed == stream


def test_every_reader_sees_an_error_in_a_stream() -> None:
    event = error_event(ApiError("it broke", status=503))
    sample = Sample(0.0, 1, 1)
    client = StreamedAnswer(sample)
    client.feed(event, 1.0)
    merged = MergedAnswer(call(chat=False))
    assert merged.feed(event) == b""
    assert "it broke" in client.failure
    assert math.isnan(sample.first_token_s)
    assert merged.failure
    assert error_text(error_body(ApiError("it broke"))) == "it broke"


@pytest.mark.parametrize("chat", [False, True])
def test_the_role_comes_once_and_usage_where_it_is_shown(chat: bool) -> None:
    for shows_usage in (False, True):
        events = EventReader().feed(written(["a", "b"], chat=chat, shows_usage=shows_usage))
        first, second, _, _ = (data_of(lines_of(event)) for event in events)
        deltas = [json.loads(data)["choices"][0].get("delta") for data in (first, second)]
        expected = [{"role": "assistant", "content": "a"}, {"content": "b"}]
        assert deltas == (expected if chat else [None, None])
        assert ("usage" in json.loads(first)) == shows_usage


def test_a_stream_has_bounds() -> None:
    for reader in (EventReader(most_event_bytes=10), EventReader(most_bytes=10)):
        assert reader.feed(b"data: 1\n\n")
        assert reader.failure == ""
        reader.feed(b"data: 23456789")
        assert reader.failure


def test_null_is_absent_at_any_depth() -> None:
    body = {"prompt": "a", "n": None, "stop": None, "stream_options": {"include_usage": None}}
    completion = read_engine_request(json.dumps(body).encode(), chat=False)
    assert isinstance(completion, EngineCompletion)
    assert (completion.n, completion.stops, completion.prompts) == (1, [], ["a"])
    part = {"type": "text", "text": "a", "cache_control": None}
    message = {"role": "user", "content": [part, part], "name": None}
    body = {"messages": [message], "max_completion_tokens": 3, "max_tokens": 5}
    chat = read_engine_request(json.dumps(body).encode(), chat=True)
    assert isinstance(chat, EngineChat)
    assert (chat.messages[0].text, chat.limit) == ("a\na", 3)
    assert parse_json(b'{"a": {"b": null, "c": [null]}}') == {"a": {"c": [None]}}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"n": 0}, "n", None),
        ({"stop": ["a", ""]}, "stop.1", None),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids.1", None),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
        ({"stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"x` - at `$.y`": 1}, None, None),
        ({"echo": True}, "echo", "unsupported_parameter"),
    ],
)
def test_an_error_names_its_field(fields: dict, param: str | None, code: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read_engine_request(json.dumps({"prompt": "a"} | fields).encode(), chat=False)
    assert caught.value.status == 400
    if param is not None:
        assert (caught.value.param, caught.value.code) == (param, code)
