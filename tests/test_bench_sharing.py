"""Prompts share what the trace says, sessions are a closed loop, and hits are reported."""

import asyncio
import json
from dataclasses import replace

import commands
import numpy as np
import pytest
import samples
from said import says
from sse_server import (
    DONE,
    chunked,
    event,
    serve_request,
    sse_server,
    tokens_event,
    usage_event,
    whole,
)

from toolkit.bench.client import NOT_CONTINUED, LoadSpec, Prompts, replay, run
from toolkit.bench.predict import counts_or_none, other_requests, predicted
from toolkit.bench.report import CACHE_HITS, CACHE_QUERIES, cache_use
from toolkit.bench.session import RequestSettings, prepare_replay
from toolkit.endpoints.load import Sample
from toolkit.endpoints.target import (
    FULL,
    Target,
    find_target,
    with_answer_ids,
)
from toolkit.errors import InputError
from toolkit.files.recipe import RouterSpec
from toolkit.routing.routers import make_router
from toolkit.sched.policies import make_any
from toolkit.sim.api import simulate
from toolkit.sim.world import world_from_fit
from toolkit.traces.types import Sessions, SharedBlocks, Trace


def trace_of(lengths, ids=None, block=4, sessions=None, outputs=None, arrivals=None) -> Trace:
    count = len(lengths)
    shared = None
    if ids is not None:
        flat = np.array([one for row in ids for one in row], np.int64)
        shared = SharedBlocks(block, flat, np.cumsum([0, *map(len, ids)]))
    return Trace(
        np.zeros(count) if arrivals is None else np.array(arrivals, dtype=float),
        np.array(lengths),
        np.full(count, 3) if outputs is None else np.array(outputs),
        np.zeros(count, np.int64),
        "t",
        shared=shared,
        sessions=sessions,
    )


def common(one, other) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return [*same, False].index(False)


IDS = [[1, 2, 3], [1, 2, 4], [9, 10], [1, 2, 3], []]
LENGTHS = [11, 12, 7, 11, 9]


def test_prompts_begin_alike_where_blocks_are_shared():
    made = Prompts(trace_of(LENGTHS, IDS), 50_000, seed=5)
    prompts = [made.prompt(row) for row in range(5)]
    assert [len(prompt) for prompt in prompts] == LENGTHS
    assert (common(prompts[0], prompts[1]), prompts[0] == prompts[3]) == (8, True)
    assert max(common(prompts[row], prompts[0]) for row in (2, 4)) == 0
    assert all(0 <= token < 50_000 for prompt in prompts for token in prompt)
    assert len(set(prompts[1])) > 9  # not one token all over


def test_prompts_follow_from_the_seed_alone():
    trace = trace_of(LENGTHS, IDS)
    first, same, other = (Prompts(trace, 256, seed).prompt(0) for seed in (1, 1, 2))
    assert first == same != other
    # Pinned: another process, machine or version sends the same prompt.
    assert first == [46, 54, 35, 255, 31, 185, 152, 118, 148, 193, 113]


SESSIONS = Sessions(np.array([-1, -1, 0, 2]), np.array([0, 0, 0.05, 0.0]))


def answers_with_ids(body: dict) -> bytes:
    """A server that gives token ids and says what it hit."""
    count = body["max_tokens"]
    if not body["stream"]:
        return whole({"choices": [{"text": "x", "token_ids": [7]}], "usage": {"prompt_tokens": 1}})
    start = sum(body["prompt"]) % 1000
    events = [
        event({"choices": [{"index": 0, "text": "x", "token_ids": [start + k]}]})
        for k in range(count)
    ]
    usage = {
        "prompt_tokens": len(body["prompt"]),
        "completion_tokens": count,
        "prompt_tokens_details": {"cached_tokens": 4} if len(body["prompt"]) > 11 else None,
    }
    return chunked(*events, event({"choices": [], "usage": usage}), DONE)


def play(server, trace, dialect=FULL, seed=0):
    load = LoadSpec("given", 64, 5000, seed=seed, dialect=dialect)
    return run(find_target(server.url), trace, load, lambda: None).samples


def test_a_turn_holds_the_prompt_and_answer_before_it():
    trace = trace_of([10, 6, 17, 30], sessions=SESSIONS)
    with sse_server(answers_with_ids) as server:
        samples = play(server, trace, replace(FULL, answer_ids=True))
    assert [one.failure for one in samples] == [""] * 4
    by_length = {len(body["prompt"]): body for body in server.bodies}
    assert sorted(by_length) == [6, 10, 17, 30]
    first, second, third = (by_length[n]["prompt"] for n in (10, 17, 30))
    answer = [sum(first) % 1000 + k for k in range(3)]
    assert second[:13] == first + answer
    assert third[:20] == second + [sum(second) % 1000 + k for k in range(3)]
    asked_for_ids = [by_length[n].get("return_token_ids") for n in (10, 17, 30, 6)]
    assert asked_for_ids == [True, True, None, None]
    # It thought for 50 ms after the end; its latency counts from then.
    assert samples[2].scheduled_s == pytest.approx(samples[0].last_token_s + 0.05)
    assert samples[2].sent_s >= samples[2].scheduled_s - 0.002
    assert samples[3].scheduled_s == pytest.approx(samples[2].last_token_s)
    assert [one.cached_tokens for one in samples] == [None, None, 4, 4]


def test_without_token_ids_other_tokens_stand_for_the_answer():
    with sse_server() as server:
        samples = play(server, trace_of([10, 6, 17, 12], sessions=SESSIONS))
    prompts = sorted((body["prompt"] for body in server.bodies), key=len)
    assert [len(prompt) for prompt in prompts] == [6, 10, 17, 20]  # a prompt is never cut
    assert prompts[2][:10] == prompts[1]
    assert prompts[3][:17] == prompts[2]
    assert samples[3].prompt_tokens == 20


def test_turns_after_a_failed_one_are_not_sent():
    def answer(body):
        if len(body["prompt"]) == 10:
            return whole({"error": {"message": "busy"}}, 503)
        return serve_request(body)

    done = []
    trace = trace_of([10, 6, 17, 30], sessions=SESSIONS)
    with sse_server(answer) as server:
        load = LoadSpec("given", 64, 50)
        samples = run(find_target(server.url), trace, load, lambda: done.append(1)).samples
    assert [one.failure for one in samples] == ["HTTP 503: busy", "", NOT_CONTINUED, NOT_CONTINUED]
    assert len(server.bodies) == 2
    assert len(done) == 4


def test_a_session_does_not_wait_for_another():
    """The server answers the first turn of one session when it has the later turn of the other."""
    sessions = Sessions(np.array([-1, -1, 1]), np.zeros(3))

    async def main() -> list[str]:
        later = asyncio.Event()

        async def handle(reader, writer):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].split()[0])
            prompt = json.loads(await reader.readexactly(size))["prompt"]
            if len(prompt) == 30:
                later.set()
            if len(prompt) == 10:
                await later.wait()
            writer.write(chunked(tokens_event(), usage_event(1), DONE))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as listening:
            url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            target = Target(url, "", "tiny", None, own=True)
            load = LoadSpec("given", 64, 50)
            trace = trace_of([10, 6, 30], sessions=sessions)
            result = await replay(target, trace, load, lambda: None)
        return [one.failure for one in result.samples]

    assert asyncio.run(main()) == ["", "", ""]


def test_a_server_is_asked_whether_it_gives_token_ids():
    with sse_server(answers_with_ids) as server:
        assert with_answer_ids(find_target(server.url), FULL).answer_ids
        assert server.bodies[-1]["return_token_ids"] is True
    with sse_server() as server:
        assert not with_answer_ids(find_target(server.url), FULL).answer_ids
    with sse_server(lambda body: whole({"error": "unknown field"}, 400)) as server:
        assert with_answer_ids(find_target(server.url), FULL) == FULL


def test_sessions_are_replayed_in_closed_loop_by_default():
    trace = trace_of([10, 6, 17, 30], [[1, 2, 3], [5, 6], [1, 2, 7, 8, 9], []], sessions=SESSIONS)
    with sse_server() as server:
        target = find_target(server.url)
        closed = prepare_replay(target, trace, None, RequestSettings())
        assert closed.trace.sessions is not None
        assert says(" ".join(closed.notes), "closed loop", "2 of 4")
        assert any("token ids" in line for line in closed.notes)
        opened = prepare_replay(target, trace, None, RequestSettings(loop="open"))
        assert opened.trace.sessions is None
        assert opened.trace.shared is not None
        assert not any("closed loop" in line for line in opened.notes)
        with pytest.raises(InputError, match=trace.source) as caught:
            prepare_replay(
                target, replace(trace, sessions=None), None, RequestSettings(loop="closed")
            )
        assert says(caught.value.hint, "--loop")


def test_replicas_are_predicted_behind_the_router_of_the_plan():
    """Three sessions of three turns each on two replicas: in turn, each session is on both."""
    previous = np.array([-1, -1, -1, 0, 1, 2, 3, 4, 5])
    lengths = np.repeat([64, 128, 192], 3)
    sessions = Sessions(previous, np.full(9, 0.5))
    trace = trace_of(lengths, sessions=sessions, arrivals=np.repeat([0.0, 5.0, 10.0], 3))
    recipe = samples.recipe(engine={"name": "vllm", "vllm": {"python": "python"}})
    found = {}
    for name in ("round-robin", "session"):
        router = RouterSpec(name=name)
        plan = samples.plan(recipe, samples.paged_fit(), workers=2)
        settings = plan.settings.model_copy(update={"replica_router": router})
        plan = plan.model_copy(update={"settings": settings})
        found[name] = predicted(plan, trace)
        world = world_from_fit(plan.fit, workers=2, max_new_tokens=recipe.serve.max_new_tokens)
        routed = replace(world, router=make_router(name, {}))
        behind = simulate(trace, make_any("vllm", plan.settings.parameters), routed)
        assert found[name].counters == behind.counters
    hits = {name: result.counters["hit_percent"] for name, result in found.items()}
    assert hits["session"] > hits["round-robin"]
    settings = plan.settings.model_copy(update={"replica_router": None})
    without = plan.model_copy(update={"settings": settings})
    assert predicted(without, trace).counters == found["round-robin"].counters


def test_a_warm_up_is_in_open_loop():
    warm = other_requests(
        trace_of([10, 6, 17, 30], sessions=SESSIONS, arrivals=[0, 1, 2, 3]), 1.0, 3
    )
    assert warm.sessions is None
    assert warm.arrival_s.tolist() == [0, 1, 2]


def sample(prompt, cached=None, failure="") -> Sample:
    return Sample(
        0.0, prompt, 3, failure=failure, counted_prompt_tokens=prompt, cached_tokens=cached
    )


BLOCKS = trace_of([10, 10], [[1, 2, 3], [1, 2, 4]])
PLAIN = trace_of([10, 10])
NOTHING = ({}, {})
GROWN = (
    {CACHE_QUERIES: 100.0, CACHE_HITS: 10.0},
    {CACHE_QUERIES: 300.0, CACHE_HITS: 60.0},
)


@pytest.mark.parametrize(
    ("samples", "trace", "counted", "predicted", "text"),
    [
        ([sample(100, 30), sample(100)], PLAIN, NOTHING, {}, "15.0 % of 200 prompt tokens"),
        (
            [sample(100, 30), sample(100, 9, "lost")], PLAIN, NOTHING, {},
            "30.0 % of 100 prompt tokens",
        ),
        ([sample(100)], PLAIN, GROWN, {}, "25.0 % by the server's counters"),
        (
            [sample(200, 50)], BLOCKS, GROWN, {"query_tokens": 200.0, "hit_tokens": 48.0},
            "25.0 % of 200 prompt tokens, 25.0 % by the server's counters; predicted 24.0 %",
        ),
        (
            [sample(200)], BLOCKS, NOTHING, {"throughput_rps": 1.0},
            "the server does not say what it hit; the prediction computes every prompt whole",
        ),
    ],
)  # fmt: skip
def test_hits_are_reported_beside_their_prediction(samples, trace, counted, predicted, text):
    assert cache_use(samples, trace, *counted, predicted).text() == f"prefix cache: {text}"
    assert cache_use([sample(10)], BLOCKS, {}, {}, {}) is None, "no cache is known"


def test_the_counters_of_all_engines_are_added():
    lines = "".join(
        f'vllm:prefix_cache_{name}_total{{engine="{engine}"}} {value}\n'
        for name, value in (("queries", 50.0), ("hits", 20.0))
        for engine in (0, 1)
    )
    with sse_server() as server:
        target = find_target(server.url)
        server.metrics = lines
        found = counts_or_none(target)
        assert (found[CACHE_QUERIES], found[CACHE_HITS]) == (100.0, 40.0)
    assert counts_or_none(target) == {}  # it has gone


def test_bench_replays_sessions_and_shows_hits(capsys, tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 10, "output_length": 3, "session": 1},
        {"timestamp": 9, "input_length": 16, "output_length": 3, "session": 1, "think_ms": 5},
    ]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    models = {"data": [{"id": "m", "max_model_len": 100}]}
    with sse_server(answers_with_ids, models=models) as server:
        out = tmp_path / "b.json"
        code = commands.llmctl("bench", "--url", server.url, "--trace", path, "--out", out)
    err = capsys.readouterr().err
    assert code == 0
    assert says(err, "closed loop", "1 of 2")
    assert says(err, "15.4", "26")
    assert json.loads(out.read_text())["cache"]["hit_tokens"] == 4
