"""The load generator against a tiny server: requests, times, and every outcome of a replay."""

import asyncio
import math
import os
import socket
import threading
import time

import numpy as np
import pytest
from sse_server import chunked, event, serve_request, sse_server, tokens_event, whole

from toolkit.bench.client import LoadSpec, Replay, before_others, client_times, run
from toolkit.endpoints.load import BEAT_S, Sample, addresses_of, heartbeat
from toolkit.endpoints.target import Target, find_target
from toolkit.errors import InputError
from toolkit.files.bench import LEAST_LATE_S
from toolkit.traces.types import Trace


def trace_of(*rows: tuple[float, int, int], max_tokens: int = 0) -> Trace:
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    return Trace(arrival.astype(float), prompt, output, np.full(len(rows), max_tokens))


THREE = trace_of((0, 5, 3), (0.01, 7, 1), (0.02, 9, 4))
HIDDEN = LoadSpec("hidden", max_new_tokens=64, vocab_size=50)


def play(server, trace=THREE, load=HIDDEN):
    return run(find_target(server.url), trace, load, lambda: None)


def test_the_client_waits_for_no_other_thread():
    """A thread has the priority of ordinary programs, and one that polls may hold it up."""
    before = set(threading.enumerate())
    during = []

    def note() -> None:
        during.append((type(asyncio.get_running_loop()), set(threading.enumerate())))

    with sse_server() as server:
        url = server.url.replace("127.0.0.1", "localhost")
        with_server = set(threading.enumerate())
        result = run(find_target(url), THREE, HIDDEN, note)
    assert [sample.failure for sample in result.samples] == ["", "", ""]
    assert [kind.__module__.partition(".")[0] for kind, _ in during] == ["asyncio"] * 3
    assert len(during) == 3
    assert all(threads <= with_server for _, threads in during)
    assert len(with_server) <= len(before) + 1


def test_a_name_is_resolved_once_before_the_first_request(monkeypatch):
    asked = []
    real = socket.getaddrinfo

    def note(host, *rest, **more):
        asked.append((host, threading.current_thread() is threading.main_thread()))
        return real(host, *rest, **more)

    addresses_of.cache_clear()
    with sse_server() as server:
        target = find_target(server.url.replace("127.0.0.1", "localhost"))
        monkeypatch.setattr(socket, "getaddrinfo", note)
        for _ in range(2):
            run(target, THREE, HIDDEN, lambda: None)
        [one] = addresses_of("localhost", int(server.url.rpartition(":")[2]))
    assert asked[0] == ("localhost", True)
    assert "localhost" not in [host for host, _ in asked[1:]]
    assert one["host"] == "127.0.0.1"


def test_a_name_that_nobody_knows_is_a_failure_of_each_request(monkeypatch):
    def refuse(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    addresses_of.cache_clear()
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    target = Target("http://server.invalid:8000", "", "tiny", None, own=True)
    result = run(target, THREE, HIDDEN, lambda: None)
    assert {one.failure.partition(":")[0] for one in result.samples} == {"it cannot be reached"}


def test_a_loop_that_stands_still_misses_every_beat_meanwhile(monkeypatch):
    """The clock jumps by a second between two beats: a hundred events would have been late."""
    jump_s = 0.0
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: real() + jump_s)

    async def main() -> list[float]:
        nonlocal jump_s
        with heartbeat() as late_s:
            await asyncio.sleep(0)
            jump_s = 1.0
        return late_s

    late_s = asyncio.run(main())
    assert len(late_s) >= 1.0 / BEAT_S - 1
    assert late_s == sorted(late_s, reverse=True)
    assert late_s[0] >= 1.0 - BEAT_S


def replayed(
    ttft_s: float = 0.1,
    beats_late_s: float = 0.0,
    sent_late_s: float = 0.0,
    connected_after_s: float = 0.001,
    count: int = 300,
    tls: bool = False,
) -> Replay:
    """Twenty requests; the given times are those of every tenth, or of three in a hundred beats."""
    samples = []
    for k in range(20):
        slow = k % 10 == 9
        sent_s = k + (sent_late_s if slow else 0.0)
        connected_s = k + (connected_after_s if slow else 0.001)
        sample = Sample(float(k), 5, 9, sent_s, k + ttft_s, k + ttft_s + 1.0, 0.02, 9, "")
        sample.connected_s = max(connected_s, sent_s)
        samples.append(sample)
    beats = [beats_late_s if k % 100 >= 97 else 0.0 for k in range(count)]
    return Replay(samples, False, beats_late_s=beats, tls=tls)


LATE_BY_S = 0.02  # beyond a tenth of the usual time to first token here


@pytest.mark.parametrize("what", ["beats_late_s", "sent_late_s", "connected_after_s"])
def test_a_client_is_late_beyond_a_tenth_of_what_it_measures(what):
    late = client_times(replayed(**{what: LATE_BY_S}), {})
    slower_server = client_times(replayed(ttft_s=0.5, **{what: LATE_BY_S}), {})
    assert (late.late, late.limit_s) == (True, pytest.approx(0.01))
    assert (slower_server.late, slower_server.limit_s) == (False, pytest.approx(0.05))


def test_what_a_target_is_about_is_measured_too():
    """The largest gaps between tokens are 20 ms."""
    times = replayed(ttft_s=0.5, beats_late_s=LATE_BY_S)
    assert client_times(times, {"mtpot_p99_s": 0.05}).late
    assert client_times(times, {"mtpot_p99_s": 0.05}).limit_s == LEAST_LATE_S
    assert not client_times(times, {"e2e_p99_s": 9.0}).late


def test_the_network_and_a_handshake_are_not_the_client_s():
    far = replayed()
    for sample in far.samples:
        sample.connected_s = sample.scheduled_s + 0.08
    assert not client_times(far, {}).late
    assert client_times(far, {}).connect_p99_s == pytest.approx(0.08)
    assert not client_times(replayed(connected_after_s=LATE_BY_S, tls=True), {}).late


def test_a_short_replay_and_one_that_served_nothing_are_not_judged():
    assert not client_times(replayed(beats_late_s=LATE_BY_S, count=99), {}).late
    nothing = replayed()
    for sample in nothing.samples:
        sample.failure = "HTTP 503: busy"
    assert client_times(nothing, {}) is None


USUAL = (0, "usual")  # a policy and its parameters


@pytest.fixture
def priorities(monkeypatch):
    """What the client asks of the system's scheduler, in order."""
    asked = []
    monkeypatch.setattr(os, "SCHED_RR", 2, raising=False)
    monkeypatch.setattr(os, "SCHED_RESET_ON_FORK", 1 << 30, raising=False)
    monkeypatch.setattr(os, "sched_param", lambda priority: f"priority {priority}", raising=False)
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: USUAL[0], raising=False)
    monkeypatch.setattr(os, "sched_getparam", lambda pid: USUAL[1], raising=False)
    monkeypatch.setattr(
        os, "sched_setscheduler", lambda pid, *how: asked.append((pid, *how)), raising=False
    )
    return asked


def test_the_client_has_priority_while_it_replays(priorities):
    during = []
    with sse_server() as server:
        target = find_target(server.url)
        run(target, THREE, HIDDEN, lambda: during.append(len(priorities)))
    assert priorities == [(0, 2 | 1 << 30, "priority 1"), (0, *USUAL)]
    assert during == [1, 1, 1]
    with pytest.raises(ZeroDivisionError), before_others():
        raise ZeroDivisionError
    assert priorities[-1] == (0, *USUAL)


@pytest.mark.parametrize("lacks", ["the right", "the call"])
def test_without_priority_the_client_replays_as_usual(monkeypatch, lacks):
    def refuse(pid, *how):
        raise PermissionError(1, "not permitted")

    if lacks == "the right":
        monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    else:
        monkeypatch.delattr(os, "sched_setscheduler", raising=False)
    with sse_server() as server:
        result = play(server)
    assert [sample.failure for sample in result.samples] == ["", "", ""]


def test_requests_are_greedy_streams_with_hidden_lengths():
    ends = []
    with sse_server() as server:
        target = find_target(server.url, api_key="secret")
        result = run(target, THREE, HIDDEN, lambda: ends.append(1))
    hidden = [(len(b["prompt"]), b["llmctl_end_after"], b["max_tokens"]) for b in server.bodies]
    assert sorted(hidden) == [(5, 3, 64), (7, 1, 64), (9, 4, 64)]
    same = {"model": "tiny", "temperature": 0, "ignore_eos": True, "stream": True}
    same |= {"stream_options": {"include_usage": True}}
    assert all(same.items() <= body.items() for body in server.bodies)
    assert all("authorization: Bearer secret" in head for head in server.heads)
    assert [sample.output_tokens for sample in result.samples] == [3, 1, 4]
    assert [sample.failure for sample in result.samples] == ["", "", ""]
    assert (result.interrupted, len(ends)) == (False, 3)
    for sample, at in zip(result.samples, THREE.arrival_s.tolist(), strict=True):
        assert sample.scheduled_s == at
        times = (at, sample.sent_s, sample.connected_s, sample.first_token_s, sample.last_token_s)
        assert list(times) == sorted(times)


def test_given_lengths_and_a_client_s_own_limit_are_max_tokens():
    with sse_server() as server:
        play(server, load=LoadSpec("given", 64, 50))
        play(server, trace_of((0, 5, 3), max_tokens=17))
    *given, own = server.bodies
    assert sorted(body["max_tokens"] for body in given) == [1, 3, 4]
    assert all("llmctl_end_after" not in body for body in given)
    assert own["max_tokens"] == 17


def test_failures_have_reasons_and_do_not_stop_the_others():
    answers = {
        5: whole({"error": {"message": "busy"}}, 503),
        7: chunked(tokens_event(), event({"error": {"message": "worker died"}})),
    }
    with sse_server(lambda body: answers.get(len(body["prompt"])) or serve_request(body)) as server:
        target = find_target(server.url)
        result = run(target, THREE, HIDDEN, lambda: None)
    reasons = ["HTTP 503: busy", "error in the stream: worker died", ""]
    assert [one.failure for one in result.samples] == reasons
    gone = run(target, THREE, HIDDEN, lambda: None)
    assert {one.failure.partition(":")[0] for one in gone.samples} == {"it cannot be reached"}
    assert all(math.isnan(one.sent_s) for one in gone.samples)


def test_a_target_names_its_model_and_its_server():
    with sse_server() as server:
        for url in (server.url, server.url + "/", server.url + "/v1", server.url + "/v1/"):
            target = find_target(url)
            found = (target.url, target.model, target.max_model_len, target.own)
            assert found == (server.url, "tiny", 128, True)
    with sse_server(models={"data": [{"id": "a"}, {"id": "b", "owned_by": "vllm"}]}) as server:
        assert find_target(server.url).model == "a"
        other = find_target(server.url, "b")
        assert (other.own, other.max_model_len) == (False, None)


@pytest.mark.parametrize(
    ("models", "model", "named"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, "c", "'c'"),
        ({"data": []}, None, "None"),
        ({"models": []}, None, "/v1/models"),
        ("hello", None, "/v1/models"),
    ],
)
def test_a_server_without_the_model_is_an_input_error(models, model, named):
    with sse_server(models=models) as server, pytest.raises(InputError, match=named):
        find_target(server.url, model)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:y", "", "/v1"])
def test_an_invalid_server_url_is_an_input_error(url):
    with pytest.raises(InputError, match=f"'{url}'"):
        find_target(url)
