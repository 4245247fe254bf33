"""The settings of a running vLLM: bounds, leases, and what an attack on their endpoint changes."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from said import says

from toolkit.backends.vllm import control as module
from toolkit.backends.vllm.control import MAX_BODY_BYTES, MAX_WAITING, ROUTE, Control, EngineControl
from toolkit.backends.vllm.knobs import LiveSettings
from toolkit.backends.vllm.setup import CONTROL_VARIABLE
from toolkit.errors import InputError

KEY = "a key of the control"


def scheduler(**more):
    """What the knobs need of vLLM's scheduler, started with 16 rows and 64 tokens."""
    config = SimpleNamespace(
        enable_chunked_prefill=True, long_prefill_token_threshold=0, watermark=0.0
    )
    made = SimpleNamespace(
        scheduler_config=config,
        max_num_running_reqs=16,
        max_num_active_reqs=16,
        max_num_scheduled_tokens=64,
        max_model_len=128,
        num_spec_tokens=0,
        kv_cache_manager=SimpleNamespace(watermark_blocks=0),
        kv_cache_config=SimpleNamespace(num_blocks=101),
        scheduler_reserve_full_isl=True,
        policy=SimpleNamespace(value="fcfs"),
    )
    vars(made).update(more)
    return made


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def no_metrics(monkeypatch):
    monkeypatch.setattr(module, "_show", lambda values, changes: None)


def test_new_values_reach_the_scheduler_all_at_once():
    vllm = scheduler()
    live = LiveSettings(vllm)
    changed = live.apply({"max_num_seqs": 4, "watermark": 0.1, "scheduler_reserve_full_isl": True})
    assert changed == {"max_num_seqs": 4, "watermark": 0.1}
    assert (vllm.max_num_active_reqs, vllm.max_num_running_reqs) == (4, 16)
    assert vllm.kv_cache_manager.watermark_blocks == 10
    with pytest.raises(InputError):
        live.apply({"max_num_seqs": 5, "max_num_batched_tokens": 15})
    assert vllm.max_num_active_reqs == 4
    assert live.start["max_num_seqs"] == 16


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_num_seqs": 17}, "16"),
        ({"max_num_seqs": 0}, "16"),
        ({"max_num_seqs": 2.5}, "whole"),
        ({"max_num_seqs": "8"}, "number"),
        ({"max_num_batched_tokens": 15}, "16"),
        ({"max_num_batched_tokens": 65}, "64"),
        ({"long_prefill_token_threshold": 129}, "128"),
        ({"watermark": float("nan")}, "number"),
        ({"watermark": 1.0}, "0.99"),
        ({"scheduler_reserve_full_isl": 1}, "true or false"),
        ({"policy": "lifo"}, "fcfs, priority"),
        ({"block_size": 8}, "restart"),
        ({"prefix_caching": False}, "restart"),
        ({"max_num_seq": 4}, "max_num_seq"),
    ],
)
def test_a_wrong_value_is_refused_with_its_bounds(settings, said):
    vllm = scheduler()
    live = LiveSettings(vllm)
    before = live.values()
    with pytest.raises(InputError) as raised:
        live.apply(settings)
    assert says(f"{raised.value.message}; {raised.value.hint}", said)
    assert live.values() == before


def test_without_chunked_prefill_a_pass_keeps_its_tokens():
    vllm = scheduler()
    vllm.scheduler_config.enable_chunked_prefill = False
    live = LiveSettings(vllm)
    with pytest.raises(InputError):
        live.apply({"max_num_batched_tokens": 63})
    assert "long_prefill_token_threshold" not in live.values()


def test_only_the_holder_of_the_lease_changes_settings():
    vllm = scheduler()
    control = EngineControl(LiveSettings(vllm), Clock())
    held = control.handle({"owner": "a", "lease_s": 20})
    assert held["lease"] == {"owner": "a", "left_s": 20}
    for other in ({"set": {"max_num_seqs": 2}}, {"owner": "b", "lease_s": 5}):
        assert control.handle(other)["status"] == 409
    assert "error" not in control.handle({})  # anyone may look
    assert control.handle({"set": {"max_num_seqs": 3}, "owner": "a"})["changed"] == {
        "max_num_seqs": 3
    }
    control.handle({"set": {"max_num_seqs": 5}, "owner": "a", "lease_s": 0})
    assert vllm.max_num_active_reqs == 5
    assert control.handle({"set": {"max_num_seqs": 2}})["changed"] == {"max_num_seqs": 2}


def test_a_lease_that_ends_without_a_word_brings_the_settings_back():
    vllm = scheduler()
    clock = Clock()
    control = EngineControl(LiveSettings(vllm), clock)
    control.handle({"set": {"max_num_seqs": 7}})
    control.handle({"set": {"max_num_seqs": 1, "watermark": 0.5}, "owner": "a", "lease_s": 20})
    clock.now_s += 15
    control.handle({"owner": "a", "lease_s": 20})
    clock.now_s += 19
    control.expire()
    assert vllm.max_num_active_reqs == 1
    clock.now_s += 1
    control.expire()
    assert (vllm.max_num_active_reqs, vllm.kv_cache_manager.watermark_blocks) == (7, 0)


def test_the_log_gets_all_settings_once_and_then_what_changes():
    control = EngineControl(LiveSettings(scheduler()), Clock())
    control.begin({"max_num_seqs": 8, "prefix_caching": True})
    first = control.take()
    assert (first["max_num_seqs"], first["max_num_batched_tokens"]) == (8, 64)
    assert control.take() == {}
    control.handle({"set": {"max_num_seqs": 8}})
    assert control.take() == {}
    control.handle({"set": {"max_num_seqs": 9}})
    assert control.take() == {"max_num_seqs": 9}


class Server:
    """The middleware before an app that answers 418, and an engine behind it."""

    def __init__(self, monkeypatch, key=KEY):
        monkeypatch.setenv(CONTROL_VARIABLE, key)
        self.vllm = scheduler()
        self.engine = EngineControl(LiveSettings(self.vllm), Clock())
        self.calls = 0
        self.waits = None
        client = SimpleNamespace(call_utility_async=self.call)
        state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=client))
        self.app = SimpleNamespace(state=state)
        self.control = Control(self.passed_on)

    async def call(self, method, fields):
        assert method == "llmctl_settings"
        self.calls += 1
        if self.waits is not None:
            await self.waits.wait()
        return self.engine.handle(fields)

    async def passed_on(self, scope, receive, send):
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def asked(self, method="POST", body=b"", key=KEY, path=ROUTE, pieces=None):
        parts = list(pieces) if pieces is not None else [body]
        sent = []

        async def receive():
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message):
            sent.append(message)

        headers = [(b"authorization", b"Bearer " + key.encode())] if key is not None else []
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        scope |= {"app": self.app}
        await self.control(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    def ask(self, *args, **more):
        return asyncio.run(self.asked(*args, **more))


def test_the_endpoint_shows_and_changes(monkeypatch):
    server = Server(monkeypatch)
    status, shown = server.ask("GET")
    assert status == 200
    assert {one["name"] for one in shown["settings"]} >= {"max_num_seqs", "watermark", "policy"}
    status, answer = server.ask(body=json.dumps({"set": {"max_num_seqs": 2}}).encode())
    assert (status, answer["changed"]) == (200, {"max_num_seqs": 2})
    assert server.vllm.max_num_active_reqs == 2


ATTACKS = {
    "no key": ({"key": None}, 401),
    "an empty key": ({"key": ""}, 401),
    "another key": ({"key": KEY + "."}, 401),
    "half the key": ({"key": KEY[:-1]}, 401),
    "no JSON": ({"body": b"{"}, 400),
    "deep JSON": ({"body": b"[" * 9000}, 400),
    "a long body": ({"body": b" " * (MAX_BODY_BYTES + 1)}, 400),
    "a long body in pieces": ({"pieces": [b" " * 1000] * 100}, 400),
    "a list": ({"body": b"[1]"}, 400),
    "unknown fields": ({"body": b'{"set": {"max_num_seqs": 2}, "eval": "1"}'}, 400),
    "a list of settings": ({"body": b'{"set": [["max_num_seqs", 2]]}'}, 400),
    "beyond a bound": ({"body": b'{"set": {"max_num_seqs": 999999999999999999999}}'}, 422),
    "not a number": ({"body": b'{"set": {"watermark": NaN}}'}, 422),
    "one of two is wrong": ({"body": b'{"set": {"max_num_seqs": 2, "watermark": -1}}'}, 422),
    "an attribute of the scheduler": ({"body": b'{"set": {"running": 0}}'}, 422),
    "null for a value": ({"body": b'{"set": {"max_num_seqs": null}}'}, 400),
    "a list for a value": ({"body": b'{"set": {"watermark": [0.1]}}'}, 400),
    "an object for a value": ({"body": b'{"set": {"policy": {"a": 1}}}'}, 400),
    "null for all": ({"body": b'{"set": null}'}, 400),
    "null alone": ({"body": b"null"}, 400),
    "null for an owner": ({"body": b'{"owner": null, "lease_s": 1}'}, 400),
    "a number of 4,000 digits": ({"body": b'{"set": {"watermark": %s}}' % (b"9" * 4000)}, 422),
    "half a surrogate pair": ({"body": b'{"set": {"\\ud800": 1}}'}, 422),
    "a lease for ever": ({"body": b'{"owner": "x", "lease_s": 1e9}'}, 400),
    "a lease without an owner": ({"body": b'{"lease_s": 9}'}, 400),
    "another method": ({"method": "DELETE"}, 405),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_changes_nothing(monkeypatch, name):
    how, expected = ATTACKS[name]
    server = Server(monkeypatch)
    before = server.engine._live.values()
    given = {"body": b'{"set": {"max_num_seqs": 2}}'} | how
    status, answer = server.ask(**given)
    assert status == expected
    assert answer["error"]
    assert server.engine._live.values() == before
    assert server.engine._lease is None
    if expected in (401, 405):
        assert server.calls == 0


def test_what_a_tuner_says_moves_no_cursor(monkeypatch):
    server = Server(monkeypatch)
    fields = {"set": {"max_num_seqs": 2}, "owner": "a\x1b[2J", "why": "b\x1b]0;c\x07", "lease_s": 9}
    status, answer = server.ask(body=json.dumps(fields).encode())
    assert status == 200
    assert (answer["word"] + answer["lease"]["owner"]).isprintable()


def test_a_flood_with_the_key_waits_in_turn_and_the_rest_is_refused(monkeypatch):
    server = Server(monkeypatch)

    async def flood():
        server.waits = asyncio.Event()
        body = b'{"set": {"max_num_seqs": 2}}'
        asked = [asyncio.create_task(server.asked(body=body)) for _ in range(200)]
        wrong = await asyncio.gather(*[server.asked(key="x") for _ in range(200)])
        assert {status for status, _ in wrong} == {401}
        assert server.calls <= 1
        server.waits.set()
        return [status for status, _ in await asyncio.gather(*asked)]

    statuses = asyncio.run(flood())
    assert sorted(set(statuses)) == [200, 429]
    assert statuses.count(200) == server.calls == MAX_WAITING


def test_other_routes_pass_and_without_a_key_there_is_no_control(monkeypatch):
    assert Server(monkeypatch).ask(path="/v1/models")[0] == 418
    assert Server(monkeypatch, key="").ask(key="")[0] == 418


def test_an_engine_with_another_scheduler_says_how_to_start_it(monkeypatch):
    server = Server(monkeypatch)

    async def call(method, fields):
        raise Exception(f"Call to {method} method failed: 'X' object has no attribute '{method}'")

    server.app.state.engine_client.engine_core = SimpleNamespace(call_utility_async=call)
    status, answer = server.ask("GET")
    assert status == 501
    assert "--live" in answer["hint"]
