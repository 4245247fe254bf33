"""OpenAI's API over the toy model, in this process."""

import asyncio

import httpx
import pytest
from toy_server import events, text, turns
from within import with_server

GREEDY = {"temperature": 0, "max_tokens": 10}


@with_server()
async def test_a_completion_returns_the_models_text(http: httpx.AsyncClient):
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


@with_server()
async def test_a_prompt_may_have_four_forms(http: httpx.AsyncClient):
    for prompt, texts in (
        ("hello", ["hello"]),
        (["hello", "world"], ["hello", "world"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [104, 101, 121]], ["hi", "hey"]),
    ):
        body = {"prompt": prompt, "n": 2, **GREEDY}
        reply = (await http.post("/v1/completions", json=body)).json()
        wanted = [text(one, 10) for one in texts for _ in range(2)]
        assert [one["text"] for one in reply["choices"]] == wanted
        assert [one["index"] for one in reply["choices"]] == list(range(len(wanted)))
        usage = {"prompt_tokens": sum(map(len, texts)), "completion_tokens": 10 * len(wanted)}
        assert usage.items() <= reply["usage"].items()


@with_server(max_new_tokens=40)
async def test_default_max_tokens_is_16_for_completions_and_the_recipes_limit_for_chats(
    http: httpx.AsyncClient,
):
    for prompt, tokens in (("a", 16), ("a" * 505, 7)):  # what the context has left
        reply = (await http.post("/v1/completions", json={"prompt": prompt})).json()
        assert reply["usage"]["completion_tokens"] == tokens
    messages = [{"role": "user", "content": "hi"}]
    reply = (await http.post("/v1/chat/completions", json={"messages": messages})).json()
    assert reply["usage"]["completion_tokens"] == 40


@with_server()
async def test_a_chat_uses_the_models_template(http: httpx.AsyncClient):
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


@with_server()
async def test_a_stream_is_the_same_text_in_pieces_and_ends_with_done(http: httpx.AsyncClient):
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


@with_server()
async def test_a_stream_with_usage_ends_with_a_chunk_of_the_usage_alone(http: httpx.AsyncClient):
    more = {"stream": True, "stream_options": {"include_usage": True}, "n": 2, **GREEDY}
    messages = [{"role": "user", "content": "x"}]
    for route, body in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        *chunks, usage, _ = events((await http.post(route, json=body | more)).text)
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 20
    choices = [chunk["choices"][0] for chunk in chunks]
    deltas = [choice["delta"] for choice in choices if choice["index"] == 1]
    assert [delta.get("role") for delta in deltas] == ["assistant", None, None]
    assert "".join(delta["content"] for delta in deltas) == text("user: x\nassistant:", 10)


@pytest.mark.parametrize("stream", [False, True])
@with_server()
async def test_a_stop_string_may_span_chunks(http: httpx.AsyncClient, stream: bool):
    whole = text("hello", 30)
    stop = whole[6:10]  # the workers report every 4 tokens, slices end after 8
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


@with_server(allow_end_after=True)
async def test_end_after_works_only_if_the_server_allows_it(http: httpx.AsyncClient):
    body = {"prompt": "hello", "max_tokens": 100, "llmctl_end_after": 12}
    reply = (await http.post("/v1/completions", json=body)).json()
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["choices"][0]["text"] == text("hello", 11)
    assert reply["usage"]["completion_tokens"] == 12


@with_server()
async def test_sampling_parameters_reach_the_worker(http: httpx.AsyncClient):
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
    for _ in range(2):
        await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
    (first,), (second,) = http.workers.rows[-2:]
    assert first.sampling.temperature == 1.0
    assert first.sampling.seed != second.sampling.seed


@with_server(hands=1, max_waiting=2)
async def test_a_full_queue_refuses_with_retry_after(http: httpx.AsyncClient):
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


@with_server(capacity=50)
async def test_all_prompts_of_a_request_are_accepted_or_none(http: httpx.AsyncClient):
    body = {"prompt": ["a", "b" * 100], "max_tokens": 10}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "memory holds 50" in response.json()["error"]["message"]
    assert http.driver.scheduler.jobs == 0


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@with_server(hands=1)
async def test_a_request_that_can_never_fit_is_refused(http: httpx.AsyncClient, stream: bool):
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


@with_server(model="org/toy")
async def test_models_lists_the_served_model(http: httpx.AsyncClient):
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("org/toy", "model", 512)


@with_server()
async def test_a_plain_request_id_is_returned_and_any_other_replaced(http: httpx.AsyncClient):
    response = await http.get("/health", headers={"X-Request-Id": "abc-1.2_3"})
    assert response.headers["x-request-id"] == "abc-1.2_3"
    made_up = set()
    for given in ("a b", "x" * 129, "<script>", ""):
        response = await http.get("/nowhere", headers={"X-Request-Id": given})
        made_up.add(response.headers["x-request-id"])
        assert given not in made_up
    assert len(made_up) == 4


@with_server(api_key="secret")
async def test_with_a_key_only_health_and_readiness_stay_open(http: httpx.AsyncClient):
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


FOREIGN = ["evil.com", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "1@evil.com"]
LOCAL = ["localhost:8000", "LOCALHOST.", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7", ""]


@with_server(host="127.0.0.1")
async def test_a_keyless_local_server_refuses_foreign_host_names(http: httpx.AsyncClient):
    for host in (*FOREIGN, *LOCAL):
        headers = {"host": host}
        for path in ("/v1/models", "/v1/completions", "/metrics", "/version", "/nowhere"):
            reply = await http.get(path, headers=headers)
            assert (reply.status_code == 403) is (host in FOREIGN), (host, path)
            if host in FOREIGN:
                assert reply.json()["error"]["code"] == "host_refused"
        assert (await http.get("/health", headers=headers)).status_code == 200


@with_server(api_key="k")
async def test_a_server_with_a_key_accepts_every_host_name(http: httpx.AsyncClient):
    headers = {"host": "llm.example.com", "authorization": "Bearer k"}
    assert (await http.get("/v1/models", headers=headers)).status_code == 200
