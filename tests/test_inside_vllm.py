"""Our scheduler inside a fake of vLLM: admission, preemption, and the state of the scheduler."""

import os
import subprocess
import sys

import fake_vllm
import pytest
import samples
from fake_vllm import FullAttentionSpec, Request, UniformTypeKVCacheSpecs, run
from hypothesis import given
from hypothesis import strategies as st
from said import says

from toolkit.backends.vllm.command import link_package
from toolkit.backends.vllm.setup import make_worker, read_setup
from toolkit.errors import InputError
from toolkit.files.io import write_file
from toolkit.sched.eventlog import Complete, EventLogHeader, Resize, Tick, from_lines, replay
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler

NAME = "toolkit.backends.vllm.scheduler"
POLICIES = [
    "past-future",
    "aggressive",
    "conservative",
    "fcfs max_batch_size=2",
    "slice-continuous slice_tokens=4",
]
SLA = "past-future-sla mtpot_s=1 interval_steps=2"
MLFQ = "mlfq quantum_s=0.03 growth=1.0 interval_steps=2 max_batch_size=2"
CASES = [(policy, ahead) for policy in (*POLICIES, SLA) for ahead in (0, 1)] + [(MLFQ, 0)]
every_policy = pytest.mark.parametrize(("policy", "ahead"), CASES)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    path = tmp_path_factory.mktemp("inside") / "fit.json"
    write_file(samples.fit(), path)
    return path


@pytest.fixture
def make(monkeypatch, fitted):
    scheduler_class = fake_vllm.imported(NAME).LlmctlScheduler
    all_made = []

    def made(policy="past-future", log="", **shape):
        monkeypatch.setenv("LLMCTL_VLLM_POLICY", policy)
        if policy in (SLA, MLFQ):
            monkeypatch.setenv("LLMCTL_VLLM_FIT", str(fitted))
        monkeypatch.setenv("LLMCTL_VLLM_EVENT_LOG", log)
        all_made.append(scheduler_class(**shape))
        return all_made[-1]

    yield made
    for scheduler in all_made:
        scheduler.shutdown()


def several(count=8, every=1):
    return [
        Request(f"r{n}", 6 + n % 3, 20, length=3 + 5 * n % 20, arrival_time=float(n * every))
        for n in range(count)
    ]


def read(log):
    return from_lines(log.read_bytes().splitlines(keepends=True))


def truth(requests):
    return {request.request_id: min(request.length, request.max_tokens) for request in requests}


@every_policy
def test_every_request_gets_every_token_once_and_the_log_replays(make, tmp_path, policy, ahead):
    """Our scheduler counts the tokens that vLLM holds. The server is killed: it ends no log."""
    log = tmp_path / "events.jsonl"
    scheduler = make(policy, log=str(log), ahead=bool(ahead))
    ours = scheduler.steps.scheduler
    residents = ours.workers[0].running
    requests = several()
    by_id = {request.request_id: request for request in requests}
    complete = ours.complete

    def checked(result, now_s):
        complete(result, now_s)
        for job in residents.jobs:
            generated = job.generated + residents.steps - job.joined
            assert generated == by_id[job.request_id].generated

    ours.complete = checked
    assert run(scheduler, requests, ahead=ahead) == truth(requests)
    assert ours.jobs == 0
    assert sorted(ours._view.finished.recent) == sorted(truth(requests).values())
    header, *events = read(log)
    assert isinstance(header, EventLogHeader)
    assert any(isinstance(event, Tick) and event.started for event in events)
    fresh = make_policy(header.policy, header.parameters)
    worker = make_worker(read_setup(os.environ), header.capacity_tokens, header.slots)
    assert list(replay(events, Scheduler(fresh, [worker]))) == []


@pytest.mark.slow
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 16), st.integers(1, 16), st.integers(0, 9)),
        max_size=8,
    ),
    case=st.sampled_from(CASES),
    budget=st.integers(4, 20),
    block_size=st.sampled_from([1, 4, 9]),
)
def test_no_request_is_lost(fitted, shapes, case, budget, block_size):
    policy, ahead = case
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("LLMCTL_VLLM_POLICY", policy)
        monkeypatch.setenv("LLMCTL_VLLM_FIT", str(fitted))
        scheduler_class = fake_vllm.imported(NAME).LlmctlScheduler
        scheduler = scheduler_class(
            ahead=bool(ahead), budget=budget, block_size=block_size, blocks=30 // block_size + 2
        )
    requests = [
        Request(f"r{n}", prompt, limit, length, arrival_time=float(at))
        for n, (prompt, limit, length, at) in enumerate(shapes)
    ]
    assert run(scheduler, requests, ahead=ahead) == truth(requests)


def test_the_policy_admits_requests_in_its_order(make):
    scheduler = make("fcfs max_batch_size=1")
    for request in several(3, every=0):
        request.priority = -int(request.request_id[1])
        scheduler.add_request(request)
    scheduler.schedule()
    assert [request.request_id for request in scheduler.running] == ["r2"]
    assert [request.request_id for request in scheduler.waiting] == ["r0", "r1"]


def test_the_policy_preempts_before_vllm_has_to(make):
    scheduler = make(
        "aggressive watermark=1.0 interval_steps=1", block_size=1, blocks=41, budget=40
    )
    requests = [Request(f"r{n}", 10, 30, 30) for n in range(3)]
    run(scheduler, requests)
    assert (scheduler.made_way > 0, scheduler.ran_out) == (True, 0)


def test_a_dropped_cache_is_logged_and_its_request_waits(make, tmp_path):
    log = tmp_path / "events.jsonl"
    scheduler = make(
        "aggressive watermark=1.0 interval_steps=1", log=str(log), block_size=8, blocks=8, budget=40
    )
    requests = [Request(f"r{n}", 8, 24, 24) for n in range(4)]
    assert run(scheduler, requests) == truth(requests)
    dropped = [event.result.dropped for event in read(log) if isinstance(event, Complete)]
    assert sum(map(len, dropped)) == scheduler.ran_out > 0


def alike(count, shared=8):
    """Prompts of 36 tokens in blocks of 4, of which the first `shared` blocks are the same."""
    return [
        Request(
            f"r{n}",
            36,
            12,
            12,
            arrival_time=float(n),
            block_hashes=[*(f"common {k}" for k in range(shared)), f"own {n}"],
        )
        for n in range(count)
    ]


def submitted(scheduler):
    """The prompts' tokens as the policy's scheduler gets them, by request, in a dict to come."""
    found = {}
    submit = scheduler.steps.submit

    def recorded(request, now_s):
        found[request.request_id] = request.prompt_tokens
        return submit(request, now_s)

    scheduler.steps.submit = recorded
    return found


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_policy_counts_the_tokens_that_vllm_holds(make, ahead):
    """Prompts in a tree, so that those of several requests end while others go on; a pass of the
    prompts that were admitted is not over at once. Half a block is added to each.
    """
    scheduler = make("aggressive watermark=1.0", blocks=60, slots=6, budget=400, ahead=bool(ahead))
    worker = scheduler.steps.scheduler.workers[0]
    requests = [
        Request(
            f"r{n}",
            36,
            20,
            2 + 7 * n % 18,
            arrival_time=float(n),
            block_hashes=[f"{n % 2 ** (k // 2)}/{k}" for k in range(9)],
        )
        for n in range(24)
    ]
    seen = []

    def look():
        residents = worker.running
        rows = {job.request_id for job in residents.jobs}
        assert rows == {request.request_id for request in scheduler.running}
        prompts = scheduler.held([(scheduler.requests[name], 32) for name in rows])
        charged = sum(sizes[name] - 2 - 4 for name in rows)
        assert charged == 4 * (prompts - scheduler._counted.uncounted)
        assert worker.capacity_tokens <= scheduler.capacity_tokens
        seen.append(scheduler._counted.uncounted)

    sizes = submitted(scheduler)
    assert run(scheduler, requests, ahead=ahead, look=look) == truth(requests)
    assert max(seen) > 0
    assert scheduler._counted.uncounted == 0


@pytest.mark.parametrize(("ended", "uncounted"), [(["r0"], 8), (["r0", "r1"], 0)])
def test_a_request_brings_only_its_unshared_blocks(make, ended, uncounted):
    """21 blocks hold three requests of a common prompt, also after the first of them has ended;
    its blocks count again when all of them have.
    """
    scheduler = make("conservative", blocks=22, slots=8, budget=400)
    first, second, third = alike(3)
    sizes = submitted(scheduler)
    scheduler.add_request(first)
    scheduler.add_request(second)
    scheduler.schedule()
    scheduler.finish_requests(ended, None)
    assert scheduler._counted.uncounted == uncounted
    scheduler.add_request(third)
    scheduler.schedule()
    whole = 36 + 2
    left = ["r1", "r2"][len(ended) - 1 :]
    assert sizes == {"r0": whole, "r1": whole - 32, "r2": whole - (32 if uncounted else 0)}
    assert [request.request_id for request in scheduler.running] == left
    scheduler.finish_requests(left, None)
    assert scheduler._counted.uncounted == 0


def test_a_log_with_shared_blocks_replays(make, tmp_path):
    log = tmp_path / "events.jsonl"
    scheduler = make("past-future", log=str(log), blocks=26, slots=8, budget=80)
    run(scheduler, alike(10))
    scheduler.shutdown()
    events = list(read(log))
    assert any(isinstance(event, Resize) for event in events)
    worker = make_worker(read_setup(os.environ), events[0].capacity_tokens, events[0].slots)
    assert list(replay(events, Scheduler(make_policy("past-future", {}), [worker]))) == []


def test_without_prefix_caching_nothing_is_shared(make):
    scheduler = make("conservative", blocks=101, slots=8, budget=400)
    scheduler.cache_config.enable_prefix_caching = False
    sizes = submitted(scheduler)
    for request in alike(2):
        scheduler.add_request(request)
    assert sizes == {"r0": 38, "r1": 38}


def test_mlfq_pauses_after_a_quantum_and_keeps_the_cache(make):
    scheduler = make(MLFQ, blocks=100)
    requests = [Request(f"r{n}", 6, 20, 20) for n in range(4)]
    paused = []
    run(scheduler, requests, look=lambda: paused.append(len(scheduler._paused)))
    assert max(paused) == 2
    assert [request.preemptions for request in requests] == [0, 0, 0, 0]


def test_a_paused_request_keeps_its_row(make):
    scheduler = make(MLFQ, blocks=1000, slots=3)
    rows = []
    requests = several(10)
    found = run(scheduler, requests, look=lambda: rows.append(len(scheduler.running)))
    assert found == truth(requests)
    assert max(rows) == 3


@every_policy
def test_vllm_may_drop_every_cache_between_any_two_steps(make, tmp_path, policy, ahead):
    log = tmp_path / "events.jsonl"
    scheduler = make(policy, log=str(log), ahead=bool(ahead))
    update = scheduler.update_from_output
    steps = []

    def updated(*args):
        outputs = update(*args)
        steps.append(None)
        while len(steps) % 7 == 0 and scheduler.running:  # as its `reset_prefix_cache` does
            scheduler._preempt_request(scheduler.running.pop(), 0.0, drop_stale_output=True)
        return outputs

    scheduler.update_from_output = updated
    requests = several()
    assert run(scheduler, requests, ahead=ahead) == truth(requests)
    assert scheduler.steps.scheduler.jobs == 0
    assert "dropped" in log.read_text()


def test_mlfq_refuses_async_scheduling(make):
    with pytest.raises(InputError, match=r"'mlfq'.*--no-async-scheduling"):
        make(MLFQ, ahead=True)


def test_an_aborted_request_leaves_the_scheduler(make):
    scheduler = make()
    for request in several(4, every=0):
        scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), None)
    scheduler.finish_requests(["r0", "r3"], "aborted")
    assert run(scheduler, []) == {}
    assert scheduler.steps.scheduler.jobs == 0
    assert len(scheduler.steps.scheduler._view.finished.recent) == 2


def test_a_request_too_large_for_us_is_left_to_vllm(make):
    scheduler = make(blocks=9, block_size=4)
    session = Request("session", 4, 4, 4, resumable=True)
    long = Request("long", 20, 500, 5)
    assert run(scheduler, [session, long]) == {"session": 4, "long": 5}
    assert not scheduler.steps.scheduler._view.finished.recent
    assert not scheduler.waiting._open  # nothing of them is kept


def test_a_request_as_large_as_the_cache_is_scheduled(make):
    scheduler = make(blocks=9, block_size=4)
    request = Request("full", 20, 12, 12)
    assert run(scheduler, [request]) == {"full": 12}
    assert len(scheduler.steps.scheduler._view.finished.recent) == 1


@pytest.mark.parametrize("version", ["0.27.2", "0.99.0", "1.0", "nonsense"])
def test_an_unknown_release_without_what_is_needed_is_refused(version):
    with pytest.raises(InputError) as caught:
        fake_vllm.imported(NAME, version)
    assert says(str(caught.value), version, "vllm.v1.core", "policy vllm")


@pytest.mark.parametrize("version", ["0.28.0", "0.31.2", "0.33.0"])
def test_releases_that_were_tried_are_taken(version):
    assert fake_vllm.imported(NAME, version).LlmctlScheduler


@pytest.mark.parametrize(
    ("policy", "named"),  # the last one is in the hint
    [
        ("past-futur", ("'past-futur'", "'past-future'")),
        ("past-future reserv=1", ("'past-future'", "'reserv'", "'reserve'")),
        ("past-future reserve=2", ("'past-future'", "reserve", "2", "0.99")),
        ("past-future reserve", ("'reserve'", "KEY=VALUE")),
        ("slice", ("'slice'", "docs/how-to/vllm.md")),
        ("baton", ("'baton'", "docs/how-to/vllm.md")),
        ("srpt-oracle", ("'srpt-oracle'", "docs/explanation/policies.md")),
        ("past-future-sla", ("'past-future-sla'", "LLMCTL_VLLM_FIT")),
    ],
)
def test_a_policy_that_cannot_run_inside_vllm_is_refused(make, policy, named):
    with pytest.raises(InputError) as caught:
        make(policy)
    assert says(str(caught.value), *named)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"LLMCTL_VLLM_PLAN": "none.json"}, ("none.json",)),
        ({"LLMCTL_VLLM_FIT": "none.json"}, ("none.json",)),
        (
            {"LLMCTL_VLLM_PLAN": "a", "LLMCTL_VLLM_FIT": "b"},
            ("LLMCTL_VLLM_PLAN", "LLMCTL_VLLM_FIT"),
        ),
        ({"LLMCTL_VLLM_POLICE": "fcfs"}, ("LLMCTL_VLLM_POLICE",)),
    ],
)
def test_an_invalid_setup_is_refused(environ, named):
    with pytest.raises(InputError) as caught:
        read_setup(environ)
    assert says(caught.value.message, *named)
    assert caught.value.hint


def test_past_future_is_the_default():
    assert read_setup({}).policy == make_policy("past-future", {})


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        ({"speculative_config": object()}, "speculative"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"kind": object()}, "cache"),
        ({"kind": UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": object()})}, "cache"),
    ],
)
def test_untested_features_are_refused(make, shape, what):
    assert make(kind=UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "b": FullAttentionSpec()}))
    with pytest.raises(InputError, match=what) as caught:
        make(**shape)
    assert says(str(caught.value), "--scheduler-cls")


def test_a_log_that_cannot_be_written_is_refused(make, tmp_path):
    with pytest.raises(InputError, match="no/such"):
        make(log=str(tmp_path / "no" / "such"))


@pytest.mark.slow
def test_it_imports_no_heavy_library_that_vllm_does_not_import():
    code = (
        f"import sys, fake_vllm; fake_vllm.install(); import {NAME};"
        "print(sorted({'torch', 'transformers', 'optuna', 'typer', 'fastapi', 'httpx'} & "
        "sys.modules.keys()))"
    )
    here = os.path.dirname(__file__)
    paths = os.pathsep.join([here, os.path.dirname(here)])
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.slow
def test_what_vllm_s_environment_lacks_is_linked_into_it(tmp_path):
    """The marks of compiled classes: vLLM 0.32 does not bring them along."""
    link_package(tmp_path)
    code = (
        "import sys; sys.path.append(sys.argv[1]); import fake_vllm; fake_vllm.install();"
        f"import {NAME}, mypy_extensions;"
        f"print(mypy_extensions.__file__, sys.modules[{NAME!r}].__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert all(file.startswith(str(tmp_path)) for file in done.stdout.split())
