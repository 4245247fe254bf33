"""OpenAI's API over the toy model, in this process."""

import asyncio
from collections.abc import Callable, Coroutine

import httpx
import pytest

import toolkit
from benchmarks.common.serving import HandWorkers, client, events, generate, text, turns


def ask(test: Callable[[httpx.AsyncClient], Coroutine], **options) -> None:
    async def run() -> None:
        async with client(**options) as http:
            await test(http)

    asyncio.run(run())


GREEDY = {"temperature": 0, "max_tokens": 10}


def test_a_completion_returns_the_models_text():
    async def test(http: httpx.AsyncClient) -> None:
        reply = (
            await http.post("/v1/completions", json={"model": "toy", "prompt": "hello", **GREEDY})
        ).json()
        assert reply["object"] == "text_completion"
        assert reply["model"] == "toy"
        assert reply["id"].startswith("cmpl-")
        assert reply["choices"] == [
            {"index": 0, "text": text("hello", 10), "finish_reason": "length", "logprobs": None}
        ]
        assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}

    ask(test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hello", ["hello"]),
        (["hello", "world"], ["hello", "world"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [104, 101, 121]], ["hi", "hey"]),
    ],
)
def test_a_prompt_may_have_four_forms(prompt: object, texts: list[str]):
    async def test(http: httpx.AsyncClient) -> None:
        reply = (await http.post("/v1/completions", json={"prompt": prompt, **GREEDY})).json()
        assert [one["text"] for one in reply["choices"]] == [text(one, 10) for one in texts]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, texts))

    ask(test)


def test_choices_are_numbered_over_all_prompts():
    async def test(http: httpx.AsyncClient) -> None:
        body = {"prompt": ["a", "b"], "n": 3, **GREEDY}
        reply = (await http.post("/v1/completions", json=body)).json()
        assert [one["index"] for one in reply["choices"]] == list(range(6))
        assert [one["text"] for one in reply["choices"]] == [text("a", 10)] * 3 + [
            text("b", 10)
        ] * 3
        assert reply["usage"] == {"prompt_tokens": 2, "completion_tokens": 60, "total_tokens": 62}

    ask(test)


def test_default_max_tokens_is_16_for_completions_and_the_recipes_limit_for_chats():
    async def test(http: httpx.AsyncClient) -> None:
        reply = (await http.post("/v1/completions", json={"prompt": "a"})).json()
        assert reply["usage"]["completion_tokens"] == 16
        messages = [{"role": "user", "content": "hi"}]
        reply = (await http.post("/v1/chat/completions", json={"messages": messages})).json()
        assert reply["usage"]["completion_tokens"] == 40

    ask(test, max_new_tokens=40)


def test_the_default_limit_shrinks_to_the_remaining_context():
    async def test(http: httpx.AsyncClient) -> None:
        reply = (await http.post("/v1/completions", json={"prompt": "a" * 505})).json()
        assert reply["usage"]["completion_tokens"] == 7

    ask(test)


def test_a_chat_uses_the_models_template():
    async def test(http: httpx.AsyncClient) -> None:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ]
        body = {"model": "toy", "messages": messages, "max_completion_tokens": 6, "max_tokens": 99}
        reply = (await http.post("/v1/chat/completions", json=body)).json()
        prompt = "system: be brief\nuser: hi\nassistant:"
        assert reply["object"] == "chat.completion"
        assert reply["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text(prompt, 6), "refusal": None},
                "finish_reason": "length",
                "logprobs": None,
            }
        ]
        assert reply["usage"]["prompt_tokens"] == len(prompt)

    ask(test)


def test_a_stream_is_the_same_text_in_pieces_and_ends_with_done():
    async def test(http: httpx.AsyncClient) -> None:
        response = await http.post(
            "/v1/completions", json={"prompt": "hello", "stream": True, **GREEDY}
        )
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(response.text)
        assert last == "[DONE]"
        assert len(chunks) == 3  # the toy workers report every 4 steps, and a slice is 8
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text("hello", 10)
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
        assert not any("usage" in chunk for chunk in chunks)

    ask(test)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_with_usage_ends_with_a_chunk_of_the_usage_alone(route: str):
    async def test(http: httpx.AsyncClient) -> None:
        what = (
            {"prompt": "hello"}
            if route == "/v1/completions"
            else {"messages": [{"role": "user", "content": "x"}]}
        )
        body = {**what, "stream": True, "stream_options": {"include_usage": True}, "n": 2, **GREEDY}
        *chunks, usage, _ = events((await http.post(route, json=body)).text)
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 20

    ask(test)


def test_the_first_chunk_of_each_choice_carries_the_role():
    async def test(http: httpx.AsyncClient) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 2, **GREEDY}
        *chunks, _ = events((await http.post("/v1/chat/completions", json=body)).text)
        deltas = [
            chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == 1
        ]
        assert [delta.get("role") for delta in deltas] == ["assistant", None, None]
        assert "".join(delta["content"] for delta in deltas) == text("user: x\nassistant:", 10)

    ask(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_span_chunks(stream: bool):
    whole = text("hello", 30)
    stop = whole[6:10]  # the workers report every 4 tokens, slices end after 8

    async def test(http: httpx.AsyncClient) -> None:
        body = {
            "prompt": "hello",
            "temperature": 0,
            "max_tokens": 200,
            "stop": [stop],
            "stream": stream,
        }
        response = await http.post("/v1/completions", json=body)
        chunks = events(response.text)[:-1] if stream else [response.json()]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == whole[:6]
        assert choices[-1]["finish_reason"] == "stop"
        if not stream:
            assert chunks[0]["usage"]["completion_tokens"] == 10

    ask(test)


def test_end_after_works_only_if_the_server_allows_it():
    async def test(http: httpx.AsyncClient) -> None:
        body = {"prompt": "hello", "max_tokens": 100, "llmctl_end_after": 12}
        reply = (await http.post("/v1/completions", json=body)).json()
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["choices"][0]["text"] == text("hello", 11)
        assert reply["usage"]["completion_tokens"] == 12

    ask(test, allow_end_after=True)


def test_fields_of_no_effect_are_ignored_and_nulls_are_defaults():
    async def test(http: httpx.AsyncClient) -> None:
        body = {
            "prompt": "a",
            "store": True,
            "user": "u",
            "stop": None,
            "n": None,
            "nothing_known": None,
            "logit_bias": {},
            "best_of": 1,
        }
        assert (await http.post("/v1/completions", json=body)).status_code == 200

    ask(test)


def test_sampling_parameters_reach_the_worker():
    async def test(http: httpx.AsyncClient) -> None:
        sampling = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "seed": 5,
        }
        more = {"ignore_eos": True, "min_tokens": 3, "stop_token_ids": [9]}
        await http.post("/v1/completions", json={"prompt": "a", "n": 2, **sampling, **more})
        first, second = (row.sampling for row in http.workers.rows[0])
        for name, value in {**sampling, **more, "stop_token_ids": (9,)}.items():
            assert getattr(first, name) == value
        assert second.seed == 6

    ask(test)


def test_requests_without_a_seed_get_different_seeds():
    async def test(http: httpx.AsyncClient) -> None:
        for _ in range(2):
            await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        (first,), (second,) = http.workers.rows
        assert first.sampling.temperature == 1.0
        assert first.sampling.seed != second.sampling.seed

    ask(test)


def test_a_full_queue_refuses_with_retry_after():
    async def test(http: httpx.AsyncClient) -> None:
        asking = []
        for _ in range(3):  # one runs, two wait
            asking.append(asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"})))
            await turns(60)
        assert (http.driver.running, http.driver.waiting) == (1, 2)
        response = await http.post("/v1/completions", json={"prompt": "a"})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["code"] == "overloaded"
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert http.driver.waiting == 0

    ask(test, workers=HandWorkers(), max_waiting=2)


def test_all_prompts_of_a_request_are_accepted_or_none():
    async def test(http: httpx.AsyncClient) -> None:
        body = {"prompt": ["a", "b" * 100], "max_tokens": 10}
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert "memory holds 50" in response.json()["error"]["message"]
        assert http.driver.scheduler.jobs == 0

    ask(test, capacity=50)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_can_never_fit_is_refused(stream: bool):
    async def test(http: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(
            http.post("/v1/completions", json={"prompt": "a", "stream": stream})
        )
        for _ in range(2):
            await turns(60)
            http.workers.finish(steps=0, failure="oom")
        response = await asking
        if stream:
            error, done = events(response.text)
            assert done == "[DONE]"
        else:
            assert response.status_code == 503
            assert response.headers["x-should-retry"] == "false"
            error = response.json()
        assert "out of memory" in error["error"]["message"]
        assert error["error"]["type"] == "server_error"

    ask(test, workers=HandWorkers())


def test_models_lists_the_served_model():
    async def test(http: httpx.AsyncClient) -> None:
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["max_model_len"]) == ("org/toy", "model", 512)
        assert (await http.get("/v1/models/org/toy")).json() == model
        assert (await http.get("/v1/models/other")).status_code == 404

    ask(test, model="org/toy")


def test_tokenize_and_detokenize():
    async def test(http: httpx.AsyncClient) -> None:
        reply = (await http.post("/tokenize", json={"prompt": "hi"})).json()
        assert reply == {"count": 2, "max_model_len": 512, "tokens": [104, 105]}
        chat = (
            await http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})
        ).json()
        back = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()
        assert back == {"prompt": "user: x\nassistant:"}

    ask(test)


def test_version():
    async def test(http: httpx.AsyncClient) -> None:
        assert (await http.get("/version")).json() == {"version": toolkit.__version__}

    ask(test)


def test_a_plain_request_id_is_returned_and_any_other_replaced():
    async def test(http: httpx.AsyncClient) -> None:
        response = await http.get("/health", headers={"X-Request-Id": "abc-1.2_3"})
        assert response.headers["x-request-id"] == "abc-1.2_3"
        made_up = set()
        for given in ("a b", "x" * 129, "<script>", ""):
            response = await http.get("/nowhere", headers={"X-Request-Id": given})
            made_up.add(response.headers["x-request-id"])
            assert given not in made_up
        assert len(made_up) == 4

    ask(test)


def test_with_a_key_only_health_and_readiness_stay_open():
    async def test(http: httpx.AsyncClient) -> None:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere", "/health/", "//health"):
            response = await http.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
        for header in ("Bearer wrong", "Bearer", "Basic secret", "Bearer sécret"):
            response = await http.get("/v1/models", headers={"Authorization": header.encode()})
            assert response.status_code == 401
            assert ("is not one of this server's" in response.text) is header.startswith("Bearer ")
        for path in ("/health", "/ready"):
            assert (await http.get(path)).status_code == 200
        assert (
            await http.get("/v1/models", headers={"Authorization": "Bearer secret"})
        ).status_code == 200

    ask(test, api_key="secret")


def test_metrics_can_be_opened():
    async def test(http: httpx.AsyncClient) -> None:
        assert (await http.get("/metrics")).status_code == 200

    ask(test, api_key="secret", open_metrics=True)


@pytest.mark.slow
def test_greedy_text_does_not_depend_on_the_batch():
    async def test(http: httpx.AsyncClient) -> None:
        prompts = [f"request {index}" for index in range(40)]
        bodies = [
            {"prompt": one, "temperature": 0, "max_tokens": 5 + len(one) % 3 * 9} for one in prompts
        ]
        replies = await asyncio.gather(
            *(http.post("/v1/completions", json=body) for body in bodies)
        )
        for reply, body in zip(replies, bodies, strict=True):
            assert reply.json()["choices"][0]["text"] == text(body["prompt"], body["max_tokens"])
        assert http.driver.waiting == http.driver.running == 0

    ask(test)


def test_generate_agrees_with_run_row():
    assert bytes(generate("hello", 5)).decode() == text("hello", 5)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/completions", "/metrics", "/tokenize", "/version", "/nowhere"]
)
@pytest.mark.parametrize(
    ("host", "refused"),
    [
        ("evil.com", True),
        ("evil.com:8000", True),
        ("localhost.evil.com", True),
        ("127.0.0.1.evil.com", True),
        ("localhost:8000", False),
        ("LOCALHOST.", False),
        ("127.0.0.1:8000", False),
        ("[::1]:8000", False),
        ("", False),
    ],
)
def test_a_keyless_local_server_refuses_foreign_host_names(path: str, host: str, refused: bool):
    async def test(http: httpx.AsyncClient) -> None:
        reply = await http.get(path, headers={"host": host})
        assert (reply.status_code == 403) is refused
        if refused:
            assert reply.json()["error"]["code"] == "host_refused"
        assert (await http.get("/health", headers={"host": host})).status_code == 200

    ask(test, local_hosts_only=True)


def test_a_server_with_a_key_accepts_every_host_name():
    async def test(http: httpx.AsyncClient) -> None:
        headers = {"host": "llm.example.com", "authorization": "Bearer k"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200

    ask(test, api_key="k")
