"""Fields that a front before replicas reads strictly."""

from typing import Any

import pytest
from test_pool import Front, asked, behind, chatted

from benchmarks.common.standin import StandIn

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

WRONG = [
    *[{"stream": value} for value in ("true", 1)],
    *[{"n": value} for value in ("64", 64.0, 0, 100_000)],
    {"best_of": "64"},
    *[{"max_tokens": value} for value in ("60000", 10**400)],
    {"priority": "-5"},
    {"temperature": "0"},
    *[{"stop": value} for value in (7, [7])],
    {"model": 7},
    *[{"prompt": value} for value in ({"a": 1}, ["a", 1], ["a", [1]], [1, True], [10**400])],
    {"prompt": ["a"] * 5000},
    {"return_token_ids": "yes"},
    *[{"stream_options": value} for value in ({"include_usage": "true"}, [1])],
]
WRONG_CHATS = [{"max_completion_tokens": "9"}, {"messages": "hello"}]


@pytest.mark.parametrize(
    ("path", "good", "cases"), [(COMPLETIONS, asked(), WRONG), (CHAT, chatted(), WRONG_CHATS)]
)
@behind({})
async def test_a_field_of_another_type_gets_400_with_its_name(
    front: Front,
    servers: list[StandIn],
    path: str,
    good: dict[str, Any],
    cases: list[dict[str, Any]],
):
    for wrong in cases:
        answer = await front.http.post(path, json=good | wrong)
        assert answer.status_code == 400, (wrong, answer.text)
        (name,) = wrong
        assert answer.json()["error"]["param"].startswith(name)
    assert servers[0].used == 0
