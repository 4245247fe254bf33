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

from benchmarks.common.serving import Server, fake_plan
from toolkit.files.io import write_file
from toolkit.files.plan import PlannedPolicy
from toolkit.sched.eventlog import from_lines, replay
from toolkit.serve.assemble import make_scheduler

pytestmark = pytest.mark.slow

GREEDY = {"model": "toy", "temperature": 0, "max_tokens": 60}
POLICIES = {
    "slice": PlannedPolicy(name="slice", parameters={"slice_tokens": 16}),
    "past-future": PlannedPolicy(name="past-future", parameters={"interval_steps": 2}),
}
ENGINE = {"eos_one_in": 0, "decode_s": 0.004}


@pytest.fixture(scope="module", params=POLICIES)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """A server with a slice-level policy, and one with a continuous policy."""
    folder = tmp_path_factory.mktemp(request.param)
    fake_plan(folder, POLICIES[request.param], **ENGINE)
    with Server(folder / "plan.json", "--served-model-name", "toy") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_the_ready_line_says_what_is_served(server: Server):
    assert server.ready["model"] == "toy"
    assert server.ready["workers"] == 2
    parameters = server.ready["parameters"]
    assert (
        server.ready["policy"],
        parameters.get("slice_tokens"),
        parameters.get("interval_steps"),
    ) in (
        ("slice", 16, None),
        ("past-future", None, 2),
    )
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


def test_openais_client_chats(client: openai.OpenAI):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(messages=messages, n=2, **GREEDY)
    texts = ["", ""]
    for piece in client.chat.completions.create(messages=messages, n=2, stream=True, **GREEDY):
        (choice,) = piece.choices
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert {choice.message.role for choice in whole.choices} == {"assistant"}


def test_openais_client_assembles_a_streamed_chat(client: openai.OpenAI):
    """The client's helper accepts a chat that stopped, but not one that was cut off."""
    messages = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content
    options = {"messages": messages, "stop": whole[20:24], **GREEDY}
    with client.chat.completions.stream(**options) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        whole[:20],
        "stop",
    )


async def ask_asynchronously(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.completions.create(prompt=["a", "b"], **GREEDY)
        stream = await client.completions.create(prompt=["a", "b"], stream=True, **GREEDY)
        texts = ["", ""]
        async for piece in stream:
            texts[piece.choices[0].index] += piece.choices[0].text
        assert texts == [choice.text for choice in whole.choices]
        assert [model.id async for model in client.models.list()] == ["toy"]
        assert (await client.models.retrieve("toy")).object == "model"


def test_openais_asynchronous_client(server: Server):
    asyncio.run(ask_asynchronously(f"{server.url}/v1"))


def test_openais_client_knows_our_errors(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="512") as refused:
        client.completions.create(model="toy", prompt="a" * 600)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-5", prompt="a")


def test_a_keyless_server_refuses_foreign_host_names(server: Server):
    assert httpx.get(f"{server.url}/v1/models", headers={"host": "evil.com"}).status_code == 403
    assert httpx.get(f"{server.url}/health", headers={"host": "evil.com"}).status_code == 200


def test_a_large_body_gets_the_answer_of_a_small_one(server: Server):
    small = {"prompt": "hello", "max_tokens": 5, "temperature": 0}
    large = small | {"user": "x" * 40_000}
    answers = [
        httpx.post(f"{server.url}/v1/completions", json=body).json() for body in (small, large)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]


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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_log_of_a_live_server_replays_to_the_same_decisions(tmp_path: Path, policy: str):
    plan = fake_plan(tmp_path, POLICIES[policy], **ENGINE)
    log = tmp_path / "events.jsonl"
    trace = tmp_path / "requests.jsonl"
    logs = ["--event-log", str(log), "--request-log", str(trace)]
    with Server(tmp_path / "plan.json", *logs) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            options = {**GREEDY, "model": "test"}
            client.completions.create(prompt=["a", "bb", "ccc"], **options)
            stream = client.completions.create(prompt="d", stream=True, **options)
            next(iter(stream))
            server.workers()[0].kill()
            list(stream)
            client.completions.create(prompt=["a", "bb", "ccc"], **options)
        assert server.end() == 0
    lines = log.read_bytes().splitlines(keepends=True)
    kinds = {json.loads(line)["type"] for line in lines}
    assert kinds == {
        "header",
        "submit",
        "tick",
        "complete" if policy == "slice" else "round",
        "worker",
    }
    assert list(replay(from_lines(lines), make_scheduler(plan))) == []
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [(row["input_length"], row["output_length"], row["status"]) for row in rows].count(
        (1, 60, "ok")
    ) == 3
    assert all(row["ttft_ms"] <= row["e2e_ms"] for row in rows)


def test_a_hung_worker_is_replaced_and_fails_no_request(tmp_path: Path):
    plan = fake_plan(tmp_path, POLICIES["slice"], **ENGINE)
    served = plan.recipe.serve.model_copy(update={"hang_s": 2.0})
    write_file(
        plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"serve": served})}),
        tmp_path / "plan.json",
    )
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
            async with openai.AsyncOpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=0
            ) as client:
                try:
                    return (
                        (await client.completions.create(prompt=prompt, **GREEDY)).choices[0].text
                    )
                except openai.InternalServerError as error:
                    return f"{error.status_code} {error.code}"

        async def ask_all(prompts: list[str]) -> list[str]:
            return await asyncio.gather(*[ask(prompt) for prompt in prompts])

        mates = ["first", "second", "third"]
        expected = asyncio.run(ask_all(mates))
        assert asyncio.run(ask_all([*mates, "\a poison"])) == [*expected, "503 request_failed"]
        assert server.end() == 0
