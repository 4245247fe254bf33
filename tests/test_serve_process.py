"""The server as users run it: worker processes and a real port."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from orders import changed

from benchmarks.common.serving import Server, fake_plan
from toolkit.files.io import read_file, write_file
from toolkit.files.plan import Plan
from toolkit.files.tuning import Settings
from toolkit.sched.eventlog import from_lines, replay
from toolkit.server.engine import make_scheduler

pytestmark = pytest.mark.slow

GREEDY = {"model": "toy", "temperature": 0, "max_tokens": 60}
POLICIES = {
    "slice": Settings(policy="slice", parameters={"slice_tokens": 16}),
    "past-future": Settings(policy="past-future", parameters={"interval_steps": 2}),
}
LOGS = ("--event-log", "--request-log")
ENGINE = {"eos_one_in": 0, "decode_s": 0.004}


@pytest.fixture(scope="module", params=POLICIES)
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """With a plan of a slice-level policy, and one of a continuous policy."""
    path = tmp_path_factory.mktemp(request.param)
    fake_plan(path, POLICIES[request.param], **ENGINE)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    logs = [word for option in LOGS for word in (option, str(folder / f"log{option}.jsonl"))]
    with Server(folder / "plan.json", "--served-model-name", "toy", *logs) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_the_ready_line_says_what_is_served(server: Server):
    assert (server.ready["model"], server.ready["workers"]) == ("toy", 2)
    given = POLICIES[server.ready["policy"]].parameters
    assert given.items() <= server.ready["parameters"].items()
    assert httpx.get(f"{server.url}/ready").status_code == 200


def test_openais_client_completes(client: openai.OpenAI):
    whole = client.completions.create(prompt="hello", **GREEDY)
    pieces = list(
        client.completions.create(
            prompt="hello", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert len(pieces) > 3
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == whole.choices[0].text
    assert pieces[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert pieces[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 60


def test_openais_client_assembles_a_streamed_chat(client: openai.OpenAI):
    """The client's helper accepts a chat that stopped, but not one that was cut off."""
    messages = [{"role": "user", "content": "hello"}]
    made = client.chat.completions.create(messages=messages, **GREEDY).choices[0].message
    whole = made.content
    options = {"messages": messages, "stop": whole[20:24], **GREEDY}
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    found = choice.message.role, choice.message.content, choice.finish_reason
    assert found == ("assistant", whole[:20], "stop")
    for answer in (made, made.model_dump()):  # it goes back with the next question
        talk = [*messages, answer, *messages]
        assert client.chat.completions.create(messages=talk, **GREEDY).usage.completion_tokens == 60


def test_openais_client_knows_our_errors(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="512") as refused:
        client.completions.create(model="toy", prompt="a" * 600)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="a")


def test_a_killed_worker_fails_no_request(server: Server, client: openai.OpenAI):
    """Kill every worker with SIGKILL while four streams run: their text does not change."""
    prompts = ["first", "second", "third", "fourth"]
    long = GREEDY | {"max_tokens": 200}
    expected = [choice.text for choice in client.completions.create(prompt=prompts, **long).choices]
    streams = [client.completions.create(prompt=prompt, stream=True, **long) for prompt in prompts]
    texts = [next(iter(stream)).choices[0].text for stream in streams]
    victims = server.workers()
    assert len(victims) == 2
    for victim in victims:
        victim.kill()
    for index, stream in enumerate(streams):
        texts[index] += "".join(piece.choices[0].text for piece in stream)
    assert texts == expected
    while (
        'llmctl_worker_restarts_total{model_name="toy"} 2.0'
        not in httpx.get(f"{server.url}/metrics").text
    ):
        time.sleep(0.02)  # the workers need the processor to load
    assert not {victim.pid for victim in victims} & {worker.pid for worker in server.workers()}


def test_a_disconnect_frees_the_worker(server: Server, client: openai.OpenAI):
    with client.completions.create(
        prompt="hello", stream=True, **GREEDY | {"max_tokens": 256}
    ) as stream:
        next(iter(stream))
    for _ in itertools.count():
        metrics = httpx.get(f"{server.url}/metrics").text
        if "llmctl_requests_running{" in metrics and 'running{model_name="toy"} 0.0' in metrics:
            break
    assert 'finish_reason="cancelled"' in metrics


def test_its_log_replays_to_the_same_decisions(server: Server, client: openai.OpenAI, folder: Path):
    """Of all tests of the server, which ends here, also of its killed workers."""
    client.completions.create(prompt=["a", "bb", "ccc"], **GREEDY)
    stream = client.completions.create(prompt="d", stream=True, **GREEDY)
    next(iter(stream))
    server.workers()[0].kill()
    list(stream)
    client.completions.create(prompt=["a", "bb", "ccc"], **GREEDY)
    assert server.end() == 0
    events, requests = (folder / f"log{option}.jsonl" for option in LOGS)
    lines = events.read_bytes().splitlines(keepends=True)
    kinds = {json.loads(line)["type"] for line in lines}
    assert kinds >= {"header", "submit", "tick", "complete", "worker"}
    plan = read_file(Plan, folder / "plan.json")
    assert list(replay(from_lines(lines), make_scheduler(plan))) == []
    rows = [json.loads(line) for line in requests.read_text().splitlines()][-7:]
    lengths = sorted((row["input_length"], row["output_length"]) for row in rows)
    assert lengths == [(1, 60)] * 3 + [(2, 60)] * 2 + [(3, 60)] * 2
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["ttft_ms"] <= row["e2e_ms"] for row in rows)


def test_a_hung_worker_is_replaced_and_fails_no_request(tmp_path: Path):
    plan = fake_plan(tmp_path, POLICIES["slice"], **ENGINE)
    hanging = changed(plan, recipe__serve=plan.recipe.serve.model_copy(update={"hang_s": 1.0}))
    write_file(hanging, tmp_path / "plan.json")
    words = ["--served-model-name", "toy", "--workers", "1"]
    with Server(tmp_path / "plan.json", *words) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            long = GREEDY | {"max_tokens": 200}
            expected = client.completions.create(prompt="hello", **long).choices[0].text
            stream = client.completions.create(prompt="hello", stream=True, **long)
            text = next(iter(stream)).choices[0].text
            (hung,) = server.workers()
            hung.suspend()
            while httpx.get(f"{server.url}/ready").status_code == 200:
                assert httpx.get(f"{server.url}/health").status_code == 200
                time.sleep(0.02)
            assert text + "".join(piece.choices[0].text for piece in stream) == expected
            assert httpx.get(f"{server.url}/ready").status_code == 200
            assert [worker.pid for worker in server.workers()] != [hung.pid]
        assert server.end() == 0


def test_a_request_that_kills_its_workers_fails_alone(tmp_path: Path):
    fake_plan(tmp_path, POLICIES["slice"], **ENGINE, crash_token=7)
    with Server(tmp_path / "plan.json", "--served-model-name", "toy") as server:

        async def ask(prompt: str) -> str:
            options = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
            async with openai.AsyncOpenAI(**options) as client:
                try:
                    answer = await client.completions.create(prompt=prompt, **GREEDY)
                except openai.InternalServerError as error:
                    return f"{error.status_code} {error.code}"
                return answer.choices[0].text

        async def ask_all(prompts: list[str]) -> list[str]:
            return await asyncio.gather(*[ask(prompt) for prompt in prompts])

        mates = ["first", "second", "third"]
        expected = asyncio.run(ask_all(mates))
        assert asyncio.run(ask_all([*mates, "\a poison"])) == [*expected, "503 request_failed"]
        assert server.end() == 0
