"""What the server of llmctl's own engines refuses by name, and where it is served instead."""

import json
from typing import Any

import httpx
import pytest
from within import with_server

from toolkit.openai.engine_requests import (
    IGNORED,
    NOT_IN_VLLM,
    UNSUPPORTED,
    read_engine_request,
)
from toolkit.openai.errors import ApiError

SERVED_BY_VLLM: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "structured_outputs": {"choice": ["a"]},
    "logprobs": True,
    "top_logprobs": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"1": 2},
    "reasoning_effort": "low",
    "return_token_ids": True,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "continue_final_message": True,
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "chat_template": "{{ messages }}",
    "truncate_prompt_tokens": 5,
}


def refused(**fields: Any) -> ApiError:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as caught:
        read_engine_request(json.dumps(body).encode(), chat=True)
    return caught.value


@pytest.mark.parametrize("name", SERVED_BY_VLLM)
def test_a_refusal_names_the_engine_that_serves_the_parameter(name: str) -> None:
    error = refused(**{name: SERVED_BY_VLLM[name]})
    assert (error.status, error.param) == (400, name)
    assert "vllm" in str(error)


@pytest.mark.parametrize("name", sorted(NOT_IN_VLLM))
def test_no_engine_is_named_for_what_none_serves(name: str) -> None:
    assert name in UNSUPPORTED
    error = refused(**{name: {"any": 1}})
    assert (error.status, error.param) == (400, name)
    assert "vllm" not in str(error)


MESSAGE = {"role": "user", "content": "x"}
CHAT: dict[str, Any] = {"messages": [MESSAGE]}


@pytest.mark.parametrize(
    ("chat", "body", "param"),
    [
        (True, CHAT | {"temprature": 0.5}, "temprature"),
        (True, CHAT | {"web_search_options": {}}, "web_search_options"),
        (True, CHAT | {"prompt": "a"}, "prompt"),
        (True, {"messages": [MESSAGE | {"name": "b"}]}, "messages.0.name"),
        (True, {"messages": [MESSAGE | {"tool_calls": [{}]}]}, "messages.0.tool_calls"),
        (
            True,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages.0.content.0.b",
        ),
        (True, CHAT | {"stream_options": {"usage": True}}, "stream_options.usage"),
        (
            True,
            CHAT | {"stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        (False, {"prompt": "a", "max_completion_tokens": 5}, "max_completion_tokens"),
        (False, {"prompt": "a", "x" * 500: 5}, "x" * 80),
    ],
)
def test_an_unknown_field_is_refused_by_its_name(
    chat: bool, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read_engine_request(json.dumps(body).encode(), chat=chat)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("name", [*IGNORED, "nothing_known"])
def test_what_has_no_effect_may_be_sent(name: str) -> None:
    value = None if name == "nothing_known" else {"any": "value"}
    read_engine_request(json.dumps(CHAT | {name: value}).encode(), chat=True)
    read_engine_request(json.dumps({"prompt": "a", name: value}).encode(), chat=False)


@pytest.mark.parametrize("name", [*UNSUPPORTED, "logprobs", "add_special_tokens"])
def test_the_values_of_no_effect_of_an_unsupported_parameter_are_taken(name: str) -> None:
    for value in (None, *UNSUPPORTED.get(name, (False,))):
        read_engine_request(json.dumps(CHAT | {name: value}).encode(), chat=True)


@with_server()
async def test_a_request_for_a_response_gets_one_line_that_names_the_route(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post("/v1/responses", json={"input": "a"})
    message = answer.json()["error"]["message"]
    assert (answer.status_code, message) == (404, "Not Found: POST /v1/responses")
