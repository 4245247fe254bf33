"""Workers on Ray: tests on one cluster of two nodes, and tests that need no cluster."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import samples
import tiny
from msgspec.msgpack import encode
from said import says
from slices import run_slice, tokens_of
from test_tuning import trace
from toy_server import client

from toolkit.cluster.connect import check_address, joined
from toolkit.cluster.workers import RayWorkers, WorkerActor
from toolkit.engines.protocol import Row, SamplingParams, make_engine, slice_of
from toolkit.errors import EngineError, InputError
from toolkit.files.recipe import ModelSpec
from toolkit.tuning.executor import ClusterRunner, InProcessRunner, collect
from toolkit.workers.pool import PATIENCE
from toolkit.workers.protocol import (
    FROM_WORKER,
    FromWorker,
    Interrupt,
    OnEvent,
    PassDone,
    PassProgress,
    Ready,
    Start,
    Stop,
    ToWorker,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
)

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _without_ray_s_handler() -> Iterator[None]:
    """Ray's driver handles SIGTERM from its start, for ever."""
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


CRASH = 200
CANARY = "canary-7f3a"
BODY = {"model": "toy", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
PROMPTS = [f"prompt {number}" for number in range(12)]
ROWS = [Row("a", (1, 2, 3), 0, 40), Row("b", (4, 5), 0, 40, end_after=7)]


def fake(**config: object) -> ModelSpec:
    return tiny.model_spec(
        "fake", config={"model_type": "fake", "eos_one_in": 0, "crash_token": CRASH, **config}
    )


class Watched(RayWorkers):
    """Workers with events that a test can wait for."""

    def __init__(
        self,
        size: int = 1,
        room_s: float = 30.0,
        **config: object,
    ) -> None:
        engine = tiny.engine_spec("fake", budget_mib=64, flush_s=0.01)
        recipe = tiny.recipe(fake(**config), engine)
        super().__init__(recipe, size, PATIENCE)
        self.room_s = room_s
        self.seen: list[WorkerEvent] = []
        self._news = asyncio.Event()

    async def start(self, on_event: OnEvent) -> None:
        def both(event: WorkerEvent) -> None:
            on_event(event)
            self.seen.append(event)
            self._news.set()

        await super().start(both)

    async def until(self, kind: type[WorkerEvent], count: int = 1) -> list[WorkerEvent]:
        """All events of a kind, as soon as they come from `count` workers."""
        while True:
            found = [event for event in self.seen if isinstance(event, kind)]
            if len({event.worker for event in found}) >= count:
                return found
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 100)


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """A head and a second node, of one CPU each, with a token. Ray reads the environment when it
    loads.
    """
    if "ray" in sys.modules:
        pytest.fail("Ray was loaded before its token was set")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", CANARY * 4)
        cluster_utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed")
        options = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        found = cluster_utils.Cluster(initialize_head=True, head_node_args=options)
        try:
            found.add_node(**options)
            with joined(found.address, 0):
                yield found
        finally:
            found.shutdown()


async def complete(http, prompt: str) -> str:
    answer = await http.post("/v1/completions", json=BODY | {"prompt": prompt})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def undisturbed(prompts: Sequence[str] = PROMPTS) -> list[str]:
    """The texts of the prompts from an engine without a server."""
    engine = make_engine(fake(), tiny.engine_spec("fake", budget_mib=64), tiny.CPU)
    rows = [
        Row(prompt, tuple(prompt.encode()), 0, 200, SamplingParams(ignore_eos=True))
        for prompt in prompts
    ]
    return [
        bytes(tokens).decode() for tokens in run_slice(engine, rows, 200, lambda _: True).tokens
    ]


def test_a_node_killed_under_load_costs_no_request_and_no_token(cluster) -> None:
    async def main() -> None:
        workers = Watched(2, decode_s=0.02)
        async with client(workers) as http:
            await workers.until(WorkerReady, 2)
            workers.seen.clear()
            load = asyncio.gather(*[complete(http, prompt) for prompt in PROMPTS])
            await workers.until(PassProgress, 2)
            (second,) = cluster.worker_nodes
            cluster.remove_node(second, allow_graceful=False)
            assert await load == undisturbed()
            assert http.driver.stats.restarts.total() == 1
            (lost,) = await workers.until(WorkerLost)
            assert lost.reason.startswith("The actor")
            assert "crashed" in {
                event.failure for event in workers.seen if isinstance(event, PassDone)
            }
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
            (back,) = await workers.until(WorkerReady)
            assert back.worker == lost.worker
            assert await complete(http, PROMPTS[0]) == undisturbed()[0]

    asyncio.run(main())


def test_a_cluster_without_room_says_what_there_is(cluster) -> None:
    with pytest.raises(EngineError) as caught:
        asyncio.run(Watched(9, room_s=0.5).start(lambda _: None))
    assert says(caught.value.message, "9 workers", "1 CPU", "0.5 s")


def test_workers_restart_and_refuse_what_they_cannot_load(cluster) -> None:
    async def main() -> None:
        workers = Watched()
        await workers.start(lambda _: None)
        workers.run(0, slice_of([Row("poison", (CRASH,), 0, 40)], 20, 7))
        (lost,) = await workers.until(WorkerLost)
        assert "crash" in lost.reason
        workers.seen.clear()
        await workers.until(WorkerReady)
        workers.run(0, slice_of(ROWS, 20, 8))
        (done,) = await workers.until(PassDone)
        engine = make_engine(fake(), tiny.engine_spec("fake"), tiny.CPU)
        found = tokens_of(
            len(ROWS),
            [
                step
                for event in workers.seen
                if isinstance(event, PassProgress)
                for step in event.steps
            ],
        )
        assert (found, done.failure) == (run_slice(engine, ROWS, 20, lambda _: True), "")
        await workers.stop()
        with pytest.raises(EngineError, match="no such key"):
            await Watched(no_such_key=1).start(lambda _: None)

    asyncio.run(main())


def test_trials_on_the_cluster_give_the_same_results(cluster) -> None:
    bench = samples.task(trace(40, 0), trace(40, 1))
    wrong = bench.under(samples.chosen("slice", slice_tokens=0))
    tasks = [bench.under(samples.chosen("slice", slice_tokens=tokens)) for tokens in (8, 32)]
    assert collect(ClusterRunner(2), tasks) == collect(InProcessRunner(), tasks)
    with pytest.raises(InputError) as caught:
        collect(ClusterRunner(2), [wrong])
    with pytest.raises(InputError) as here:
        collect(InProcessRunner(), [wrong])
    assert (caught.value.message, caught.value.hint) == (here.value.message, here.value.hint)


def answers(actor: WorkerActor, number: int, frame: ToWorker) -> list[FromWorker]:
    return [FROM_WORKER.decode(data) for data in actor.call(number, encode(frame))]


def test_an_actor_handles_frames_in_order() -> None:
    """Ray may start a call before an earlier one: a `Stop` that arrives first still takes effect
    last.
    """
    actor = WorkerActor()
    start = Start(tiny.recipe(fake(), tiny.engine_spec("fake")).model_dump_json())
    actor.send(3, encode(Stop()))
    actor.send(1, encode(Interrupt(7)))
    with ThreadPoolExecutor() as threads:
        exit_code = threads.submit(actor.serve)
        *_, ready = answers(actor, 0, start)
        assert isinstance(ready, Ready)
        *_, done = answers(actor, 2, slice_of(tuple(ROWS), 20, 7))
        assert isinstance(done, PassDone)
        assert exit_code.result() == 0


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "Ray Client cannot stream"),
        ("head", "'local', 'auto' or HOST:PORT"),
        ("head:0", "'local', 'auto' or HOST:PORT"),
        (":6379", "'local', 'auto' or HOST:PORT"),
        ("head:99999", "'local', 'auto' or HOST:PORT"),
    ],
)
def test_an_invalid_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_address(address)


def test_the_error_of_an_unreachable_cluster_says_what_was_tried(cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    message = rf"no Ray cluster at {address}: Connection refused \(tried: a TCP connection"
    with pytest.raises(InputError, match=message) as caught, joined(address, 1):
        pass
    assert CANARY not in f"{caught.value.message} {caught.value.hint}"


def test_without_ray_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match="ray") as caught, joined("auto", 1):
        pass
    assert says(caught.value.hint, "llmctl-toolkit[ray]")
