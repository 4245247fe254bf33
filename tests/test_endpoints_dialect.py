"""Dialects: each server accepts other fields, and the fullest set that it accepts is used."""

import json

import pytest
from said import says
from sse_server import chunked, sse_server, tokens_event, usage_event, whole

from toolkit.endpoints.target import FULL, find_target, learn
from toolkit.errors import InputError


def strict_server(*refused: str, token_ids: bool = True):
    """Answers requests without the fields `refused`, and names the ones that it does not accept."""

    def answer(body: dict) -> bytes:
        unknown = [name for name in refused if name in body]
        if unknown or not token_ids:
            return whole({"message": f"unexpected: {unknown or 'prompt'}"}, 422)
        return chunked(*[tokens_event()] * body["max_tokens"], usage_event(body["max_tokens"]))

    return answer


def learned(answer):
    with sse_server(answer) as server:
        return learn(find_target(server.url)), server.bodies


def test_a_server_that_accepts_all_fields_gets_one_request():
    dialect, bodies = learned(strict_server())
    assert dialect == FULL
    assert len(bodies) == 1
    assert dialect.lacks == []


def test_a_refused_field_is_left_out_and_named():
    dialect, bodies = learned(strict_server("ignore_eos"))
    assert not dialect.ignore_eos
    assert len(bodies) == 2
    assert dialect.lacks == ["ignore_eos"]


def test_a_server_of_text_prompts_alone_is_refused_by_name():
    with pytest.raises(InputError, match="HTTP 422: unexpected: prompt") as caught:
        learned(strict_server(token_ids=False))
    assert says(caught.value.hint, "token ids", "vLLM")


def test_a_server_that_refuses_everything_is_an_error():
    with pytest.raises(InputError, match="HTTP 400: no model loaded"):
        learned(lambda body: whole({"error": {"message": "no model loaded"}}, 400))


def test_another_status_ends_the_search():
    with sse_server(lambda body: whole({"error": {"message": "busy"}}, 503)) as server:
        with pytest.raises(InputError, match="HTTP 503: busy"):
            learn(find_target(server.url))
        assert len(server.bodies) == 1


def test_requests_are_greedy_and_name_their_end_to_llmctl_only():
    dialect, (body,) = learned(strict_server())
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
    assert "llmctl_end_after" not in json.dumps(body)
    assert dialect.request("m", [1], 8, end_after=3)["llmctl_end_after"] == 3


def test_a_priority_other_than_zero_is_sent():
    assert FULL.request("m", [1], 4, priority=-2)["priority"] == -2
    assert "priority" not in FULL.request("m", [1], 4)
