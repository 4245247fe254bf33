"""What the server of llmctl's own engines refuses by name, and where it is served instead."""

import json
from typing import Any

import pytest

from toolkit.serve.errors import ApiError
from toolkit.serve.forms import NOT_IN_VLLM, UNSUPPORTED, ChatForm, read_form

SERVED_BY_VLLM: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
    "structured_outputs": {"choice": ["a"]},
    "logprobs": True,
    "top_logprobs": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"1": 2},
}


def refused(**fields: Any) -> ApiError:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    with pytest.raises(ApiError) as caught:
        read_form(ChatForm, json.dumps(body).encode())
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
