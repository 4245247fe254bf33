"""Fields that a front before replicas reads strictly, and which keys may ask for priority."""

from typing import Any

import pytest
from test_gateway import PROMPT, Front, asked, behind, chatted, run

from benchmarks.common.standin import StandIn
from toolkit.serve.access import ApiKey

SHA = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
HEADERS = {"authorization": "Bearer secret"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def keyed(*, urgent: bool = False) -> list[ApiKey]:
    return [ApiKey(name="a", sha256=SHA, urgent=urgent)]


def responded(max_output_tokens: int | None = 40, **more: Any) -> dict[str, Any]:
    body = {"model": "standin", "input": PROMPT, "max_output_tokens": max_output_tokens}
    return body | {"ignore_eos": True} | more


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (COMPLETIONS, {"stream": "true"}),
        (COMPLETIONS, {"stream": 1}),
        (COMPLETIONS, {"n": "64"}),
        (COMPLETIONS, {"n": 64.0}),
        (COMPLETIONS, {"n": 0}),
        (COMPLETIONS, {"n": 100_000}),
        (COMPLETIONS, {"best_of": "64"}),
        (COMPLETIONS, {"max_tokens": "60000"}),
        (COMPLETIONS, {"max_tokens": 10**400}),
        (COMPLETIONS, {"priority": "-5"}),
        (COMPLETIONS, {"temperature": "0"}),
        (COMPLETIONS, {"stop": 7}),
        (COMPLETIONS, {"stop": [7]}),
        (COMPLETIONS, {"model": 7}),
        (COMPLETIONS, {"prompt": {"a": 1}}),
        (COMPLETIONS, {"prompt": ["a", 1]}),
        (COMPLETIONS, {"prompt": ["a", [1]]}),
        (COMPLETIONS, {"prompt": [1, True]}),
        (COMPLETIONS, {"prompt": [10**400]}),
        (COMPLETIONS, {"prompt": ["a"] * 5000}),
        (COMPLETIONS, {"return_token_ids": "yes"}),
        (COMPLETIONS, {"stream_options": {"include_usage": "true"}}),
        (COMPLETIONS, {"stream_options": [1]}),
        (CHAT, {"max_completion_tokens": "9"}),
        (CHAT, {"messages": "hello"}),
    ],
)
@behind({}, keys=keyed())
async def test_a_field_of_another_type_gets_400_with_its_name(
    front: Front, servers: list[StandIn], path: str, wrong: dict[str, Any]
):
    body = {CHAT: chatted}.get(path, asked)() | wrong
    answer = await front.http.post(path, json=body, headers=HEADERS)
    assert answer.status_code == 400, answer.text
    (name,) = wrong
    assert answer.json()["error"]["param"].startswith(name)
    assert servers[0].used == 0


@pytest.mark.parametrize(
    ("urgent", "priority", "status"), [(False, -5, 403), (True, -5, 200), (False, 5, 200)]
)
@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
def test_only_an_urgent_key_may_ask_for_priority(
    path: str, urgent: bool, priority: int, status: int
):
    body = (responded if path == RESPONSES else asked)() | {"priority": priority}

    async def test(front: Front, servers: list[StandIn]) -> None:
        answer = await front.http.post(path, json=body, headers=HEADERS)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["code"] == "priority_not_allowed"
            assert servers[0].used == 0

    run(test, StandIn(), keys=keyed(urgent=urgent))
