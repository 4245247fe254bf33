"""Damaged requests get an error of the API, or no answer where their client has left."""

import asyncio
import random
from collections.abc import Iterator

import fuzzing
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from toy_server import ToyWorkers, client

from benchmarks.common.serving import Server, fake_plan

pytestmark = pytest.mark.slow

few = settings(
    max_examples=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


async def answer(**asked: object) -> httpx.Response:
    async with client(ToyWorkers()) as http:
        response = await http.request(**asked)
        assert http.driver.error is None
        return response


@few
@given(fuzzing.bodies())
def test_mutated_bodies_get_an_api_error(sent: tuple[str, bytes]) -> None:
    path, body = sent
    asked = {
        "method": "POST",
        "url": path,
        "content": body,
        "headers": {"content-type": "application/json"},
    }
    assert fuzzing.complaint_of(asyncio.run(answer(**asked))) == ""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("fuzz")
    fake_plan(folder)
    with Server(folder / "plan.json") as server:
        yield int(server.url.rpartition(":")[2])
        assert server.end() == 0


@pytest.mark.parametrize("name", fuzzing.RAW)
def test_random_bytes_get_an_error_or_nothing(port: int, name: str) -> None:
    data, statuses = fuzzing.RAW[name]
    received = asyncio.run(fuzzing.converse(port, data, patience_s=0.1 if 0 in statuses else 60.0))
    assert fuzzing.raw_complaint(data, received) == ""
    first = next(fuzzing.answers(received), (0,))
    assert first[0] in statuses, received[:300]


def test_torn_requests_get_an_error_or_nothing(port: int) -> None:
    rng = random.Random(0)

    async def one(data: bytes) -> None:
        received = await fuzzing.converse(port, data, patience_s=0.1)
        assert fuzzing.raw_complaint(data, received) == "", data

    async def all_of_them() -> None:
        await asyncio.gather(*[one(fuzzing.torn(rng)) for _ in range(200)])

    asyncio.run(all_of_them())
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
