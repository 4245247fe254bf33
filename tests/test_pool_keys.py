"""Fields that a front before replicas reads strictly, and which keys may ask for priority."""

from typing import Any

import pytest
from test_pool import Front, asked, behind, chatted, run
from test_pool_responses import wanted

from benchmarks.common.standin import StandIn
from toolkit.server.access import ApiKey

SHA = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
HEADERS = {"authorization": "Bearer secret"}
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def keyed(*, urgent: bool = False) -> list[ApiKey]:
    return [ApiKey(name="a", sha256=SHA, urgent=urgent)]


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
@behind({}, keys=keyed())
async def test_a_field_of_another_type_gets_400_with_its_name(
    front: Front,
    servers: list[StandIn],
    path: str,
    good: dict[str, Any],
    cases: list[dict[str, Any]],
):
    for wrong in cases:
        answer = await front.http.post(path, json=good | wrong, headers=HEADERS)
        assert answer.status_code == 400, (wrong, answer.text)
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
    body = (wanted if path == RESPONSES else asked)() | {"priority": priority}

    async def test(front: Front, servers: list[StandIn]) -> None:
        answer = await front.http.post(path, json=body, headers=HEADERS)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["error"]["code"] == "priority_not_allowed"
            assert servers[0].used == 0

    run(test, StandIn(), keys=keyed(urgent=urgent))
