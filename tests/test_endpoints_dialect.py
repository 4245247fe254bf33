"""Dialects: each server accepts other fields, and the fullest set that it accepts is used."""

import json

import pytest
from sse_server import chunked, event, sse_server, tokens_event, usage_event, whole

from toolkit.endpoints.target import FULL, find_target, learn
from toolkit.errors import InputError


def strict_server(*refused: str, token_ids: bool = True, tokens_per_word: int = 1):
    """Answers requests without the fields `refused`, and names the ones that it does not accept."""

    def answer(body: dict) -> bytes:
        unknown = [name for name in refused if name in body]
        if unknown or (isinstance(body["prompt"], list) and not token_ids):
            return whole({"detail": f"unexpected: {unknown or 'prompt'}"}, 422)
        prompt = body["prompt"]
        tokens = (
            len(prompt) if isinstance(prompt, list) else 3 + tokens_per_word * len(prompt.split())
        )
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        if body["stream"]:
            return chunked(*[tokens_event()] * body["max_tokens"], usage_event(body["max_tokens"]))
        return whole({"choices": [{"text": "x"}], "usage": usage})

    return answer


def learned(answer):
    with sse_server(answer) as server:
        return learn(find_target(server.url)), server.bodies


def test_a_server_that_accepts_all_fields_gets_one_request():
    dialect, bodies = learned(strict_server())
    assert (dialect.token_ids, dialect.ignore_eos, dialect.usage_option) == (True, True, True)
    assert len(bodies) == 1
    assert dialect.lacks == []


def test_refused_fields_are_left_out_and_named():
    dialect, _ = learned(strict_server("ignore_eos", "stream_options", token_ids=False))
    assert (dialect.token_ids, dialect.ignore_eos, dialect.usage_option) == (False, False, False)
    assert dialect.lacks == ["prompts of token ids", "ignore_eos"]


@pytest.mark.parametrize("tokens_per_word", [1, 2, 6])
def test_prompts_of_text_are_as_long_as_the_server_counts(tokens_per_word):
    import numpy as np

    dialect, _ = learned(strict_server(token_ids=False, tokens_per_word=tokens_per_word))
    prompt = dialect.prompt(np.random.default_rng(1), 123, 256)
    assert abs(3 + tokens_per_word * len(prompt.split()) - 123) <= tokens_per_word / 2


def test_a_server_that_refuses_everything_is_an_error():
    with pytest.raises(InputError, match="HTTP 400: no model loaded"):
        learned(lambda body: whole({"error": {"message": "no model loaded"}}, 400))


def test_another_status_ends_the_search():
    with sse_server(lambda body: whole({"error": {"message": "busy"}}, 503)) as server:
        with pytest.raises(InputError, match="HTTP 503: busy"):
            learn(find_target(server.url))
        assert len(server.bodies) == 1


def test_a_server_that_counts_no_tokens_is_refused():
    def answer(body: dict) -> bytes:
        if isinstance(body["prompt"], list):
            return whole({}, 400)
        return (
            chunked(event({"choices": [{}]}))
            if body["stream"]
            else whole({"choices": [{"text": "x"}]})
        )

    with pytest.raises(InputError, match="usage"):
        learned(answer)


def test_requests_are_greedy_and_name_their_end_to_llmctl_only():
    dialect, (body,) = learned(strict_server())
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)
    assert "llmctl_end_after" not in json.dumps(body)
    assert dialect.request("m", [1], 8, end_after=3)["llmctl_end_after"] == 3


def test_a_priority_other_than_zero_is_sent():
    assert FULL.request("m", [1], 4, priority=-2)["priority"] == -2
    assert "priority" not in FULL.request("m", [1], 4)
