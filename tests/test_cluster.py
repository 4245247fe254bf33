"""Workers on Ray: tests on one cluster of two nodes, and tests that need no cluster."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import samples
import tiny
from said import says
from test_tuning import trace

from benchmarks.common.serving import client
from toolkit.cluster.connect import check_address, joined
from toolkit.cluster.places import KIND, WorkerPlacement, accelerator_type
from toolkit.cluster.servers import HostedServer, RayServers, ServerSeat, StartServer
from toolkit.cluster.workers import RayWorkers, WorkerActor
from toolkit.engines.protocol import Row, SamplingParams, make_engine
from toolkit.errors import EngineError, InputError
from toolkit.files.recipe import ModelSpec
from toolkit.tuning.evaluate import EvaluationSetup, Task, make_world
from toolkit.tuning.executor import ClusterRunner, InProcessRunner, collect
from toolkit.workers.pool import PATIENCE
from toolkit.workers.process import GPUS_VARIABLE
from toolkit.workers.protocol import (
    BatchDone,
    BatchProgress,
    Done,
    FromWorker,
    Interrupt,
    OnEvent,
    Ready,
    Refused,
    RunSlice,
    Start,
    Stop,
    ToWorker,
    WorkerEvent,
    WorkerLost,
    WorkerReady,
    front_side,
    pack,
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
        kinds: Sequence[str] = (),
        room_timeout_s: float = 30.0,
        **config: object,
    ) -> None:
        engine = tiny.engine_spec("fake", budget_mib=64, flush_s=0.01)
        recipe = tiny.recipe(fake(**config), engine)
        places = [WorkerPlacement(recipe, {KIND: kind}) for kind in kinds] or [
            WorkerPlacement(recipe)
        ] * size
        super().__init__(places, room_timeout_s, PATIENCE)
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
    return [bytes(tokens).decode() for tokens in engine.run_slice(rows, 200, lambda _: True).tokens]


def test_a_node_killed_under_load_costs_no_request_and_no_token(cluster) -> None:
    async def main() -> None:
        workers = Watched(2, decode_s=0.02)
        async with client(workers) as http:
            await workers.until(WorkerReady, 2)
            workers.seen.clear()
            load = asyncio.gather(*[complete(http, prompt) for prompt in PROMPTS])
            await workers.until(BatchProgress, 2)
            (second,) = cluster.worker_nodes
            cluster.remove_node(second, allow_graceful=False)
            assert await load == undisturbed()
            assert http.driver.stats.worker_restarts == 1
            (lost,) = await workers.until(WorkerLost)
            assert lost.reason.startswith("The actor")
            assert "crashed" in {
                event.failure for event in workers.seen if isinstance(event, BatchDone)
            }
            cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
            (back,) = await workers.until(WorkerReady)
            assert back.worker == lost.worker
            assert await complete(http, PROMPTS[0]) == undisturbed()[0]

    asyncio.run(main())


@pytest.fixture(scope="module")
def kinds(cluster) -> dict[str, object]:
    """Two more nodes, one of each kind, as by `ray start --labels=llmctl.io/kind=NAME`."""
    options = {"num_cpus": 1, "object_store_memory": 80 << 20}
    return {kind: cluster.add_node(labels={KIND: kind}, **options) for kind in ("large", "small")}


def kinds_of_places(workers: RayWorkers) -> list[str]:
    """The kind of the node that Ray chose for each worker."""
    import ray

    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    chosen = ray.util.placement_group_table(workers._room.group)["bundles_to_node_id"]
    return [labels[chosen[index]][KIND] for index in range(workers.size)]


GPUS = [
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100 80GB PCIe",
    "NVIDIA H200",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA GH200 480GB",
    "Tesla V100-SXM2-16GB",
    "Tesla T4",
    "NVIDIA L40S",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition",
]
LONG = "x" * 300  # with 200 tokens more than the small worker holds


@pytest.mark.parametrize("name", GPUS)
def test_accelerator_types_are_ray_s_own_names(cluster, name: str) -> None:
    from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

    assert accelerator_type(name) == NvidiaGPUAcceleratorManager._gpu_name_to_accelerator_type(name)


def test_a_kind_without_nodes_is_told_the_kinds_there_are(cluster, kinds) -> None:
    with pytest.raises(EngineError) as caught:
        asyncio.run(Watched(kinds=["large", "huge"], room_timeout_s=0.5).start(lambda _: None))
    wanted = "1 worker", "1 CPU", "llmctl.io/kind=huge", "0.5 s"
    there = "llmctl.io/kind=large (1)", "llmctl.io/kind=small (1)", "none (2)"
    assert all(word in caught.value.message for word in (*wanted, *there))


def test_fleet_workers_run_on_nodes_of_their_kind(cluster, kinds) -> None:
    async def main() -> None:
        workers = Watched(kinds=["large", "small"], decode_s=0.01)
        async with client(workers, capacity=(4096, 480)) as http:
            await workers.until(WorkerReady, 2)
            assert kinds_of_places(workers) == ["large", "small"]
            load = [asyncio.create_task(complete(http, prompt)) for prompt in [*PROMPTS[:6], LONG]]
            await workers.until(BatchProgress, 2)
            cluster.remove_node(kinds.pop("large"), allow_graceful=False)
            assert await asyncio.gather(*load[:-1]) == undisturbed(PROMPTS[:6]), (
                "on the small worker alone"
            )
            assert not load[-1].done(), "only the large one holds it"
            workers.seen.clear()
            kinds["large"] = cluster.add_node(
                labels={KIND: "large"}, num_cpus=1, object_store_memory=80 << 20
            )
            assert [await load[-1]] == undisturbed([LONG])
            assert kinds_of_places(workers) == ["large", "small"]

    asyncio.run(main())


def test_workers_restart_and_refuse_what_they_cannot_load(cluster) -> None:
    async def main() -> None:
        workers = Watched()
        await workers.start(lambda _: None)
        workers.run(0, RunSlice(7, [Row("poison", (CRASH,), 0, 40)], 20))
        (lost,) = await workers.until(WorkerLost)
        assert "crash" in lost.reason
        workers.seen.clear()
        await workers.until(WorkerReady)
        workers.run(0, RunSlice(8, ROWS, 20))
        (done,) = await workers.until(BatchDone)
        engine = make_engine(fake(), tiny.engine_spec("fake"), tiny.CPU)
        assert done.output == engine.run_slice(ROWS, 20, lambda _: True)
        await workers.stop()
        with pytest.raises(EngineError, match="no such key"):
            await Watched(no_such_key=1).start(lambda _: None)

    asyncio.run(main())


def test_trials_on_the_cluster_give_the_same_results(cluster) -> None:
    bench = EvaluationSetup(
        make_world(samples.recipe(), samples.fit()), [trace(40, seed) for seed in range(2)], {}
    )
    tasks = [Task(bench, "slice", {"slice_tokens": tokens}) for tokens in (8, 32)]
    assert collect(ClusterRunner(2), tasks) == collect(InProcessRunner(), tasks)
    with pytest.raises(InputError) as caught:
        collect(ClusterRunner(2), [Task(bench, "slice", {"slice_tokens": 0})])
    with pytest.raises(InputError) as here:
        collect(InProcessRunner(), [Task(bench, "slice", {"slice_tokens": 0})])
    assert (caught.value.message, caught.value.hint) == (here.value.message, here.value.hint)


def answers(actor: WorkerActor, number: int, frame: ToWorker) -> list[FromWorker]:
    return [found for data in actor.call(number, pack(frame)) for found in front_side().feed(data)]


def test_an_actor_handles_frames_in_order() -> None:
    """Ray may start a call before an earlier one: a `Stop` that arrives first still takes effect
    last.
    """
    actor = WorkerActor()
    start = Start(tiny.recipe(fake(), tiny.engine_spec("fake")).model_dump_json())
    actor.send(3, pack(Stop()))
    actor.send(1, pack(Interrupt(7)))
    with ThreadPoolExecutor() as threads:
        exit_code = threads.submit(actor.serve)
        *_, ready = answers(actor, 0, start)
        assert isinstance(ready, Ready)
        *_, done = answers(actor, 2, RunSlice(7, tuple(ROWS), 20))
        assert isinstance(done, Done)
        assert exit_code.result() == 0


def test_an_actor_that_cannot_load_sends_the_reason() -> None:
    actor = WorkerActor()
    recipe = tiny.recipe(fake(no_such_key=1), tiny.engine_spec("fake"))
    with ThreadPoolExecutor() as threads:
        exit_code = threads.submit(actor.serve)
        *_, refused = answers(actor, 0, Start(recipe.model_dump_json()))
        assert isinstance(refused, Refused)
        assert exit_code.result() == 2


def sleeper(faults: Sequence[str]) -> StartServer:
    """Starts a process that ends with its parent, which is an actor. A local function: Ray sends it
    whole, for its machines do not have the tests.
    """

    def start(seat: ServerSeat, folder: Path) -> tuple[HostedServer, list[str]]:
        gpus = os.environ.get(GPUS_VARIABLE, "") if "gpus" in faults else ""

        class Sleeper:
            url = f"http://{seat.host}:1/{list(seat.cpus)}{gpus}"

            def __init__(self) -> None:
                self.child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, cwd=folder)

            @property
            def running(self) -> bool:
                return self.child.poll() is None

            def ended_by(self) -> str:
                return f"exit code {self.child.wait()}"

            def wait_until_ready(self) -> None:
                if "dies" in faults:
                    raise EngineError("it has no engine", "install one")

            def stop(self) -> None:
                self.child.communicate()

        return Sleeper(), [f"{folder.name.partition('-')[0]} warns"]

    return start


def placed(count: int, kind: str = "") -> list[WorkerPlacement]:
    engine = tiny.engine_spec("fake", threads=1)
    labels = {KIND: kind} if kind else {}
    return [WorkerPlacement(tiny.recipe(fake(), engine), labels)] * count


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_servers_run_in_actors_and_end_with_them(cluster) -> None:
    said = list[str]()
    with closing(RayServers(placed(2), 60.0, "")) as servers:
        first, second = (servers.start(number, sleeper([]), said.append) for number in (0, 1))
        assert first.running, "it has not ended"
        for each in (first, second):
            each.wait_until_ready()
        cpus = [each.url.rpartition("/")[2] for each in (first, second)]
        assert sorted(cpus) == ["[0]", "[1]"], "one machine, though two nodes"
        assert re.fullmatch(r"on [0-9.]+: llmctl warns", said[0])
        children = [one for one in psutil.process_iter() if _title(one) == "cat"]
        assert len(children) == 2
        for each in psutil.process_iter():
            if _title(each).startswith("ray::ServerActor"):
                each.kill()
        until(lambda: not first.running and not second.running)
        psutil.wait_procs(children, 30)
        assert not any(child.is_running() for child in children)
        first.stop()
        second.stop()
        again = servers.start(0, sleeper([]), said.append)
        again.wait_until_ready()
        assert again.url.endswith("[0]"), "its CPUs are free again"
        again.stop()
        until(lambda: not again.running)
        bad = servers.start(0, sleeper(["dies"]), said.append)
        with pytest.raises(EngineError, match=r"^on [0-9.]+: .*no engine$") as caught:
            bad.wait_until_ready()
        assert caught.value.hint == "install one"
        bad.stop()


def test_ray_divides_the_gpus_of_a_machine_between_servers(cluster) -> None:
    labels = {KIND: "gpus"}
    options = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80 << 20}
    node = cluster.add_node(labels=labels, **options)
    try:
        hardware = tiny.CPU.model_copy(update={"device": "cuda"})
        recipe = tiny.recipe(fake(), tiny.engine_spec("fake", threads=1), hardware)
        places = [WorkerPlacement(recipe, labels)] * 2
        with closing(RayServers(places, 60.0, "")) as servers:
            found = [servers.start(number, sleeper(["gpus"]), print) for number in (0, 1)]
            for each in found:
                each.wait_until_ready()
            assert sorted(each.url.rpartition("/")[2] for each in found) == ["[]0", "[]1"]
            for each in found:
                each.stop()
    finally:
        cluster.remove_node(node)


def _title(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [""])[0]
    except psutil.Error:
        return ""


def test_a_server_without_room_says_what_there_is(cluster) -> None:
    with closing(RayServers(placed(1, "nowhere"), 0.5, "")) as servers:
        late = servers.start(0, sleeper([]), print)
        with pytest.raises(EngineError, match="1 worker of 1 CPU"):
            late.wait_until_ready()
        late.stop()
    with closing(RayServers(placed(1, "nowhere"), 60.0, "")) as servers:
        ended = servers.start(0, sleeper([]), print)
        with ThreadPoolExecutor() as threads:
            waiting = threads.submit(ended.wait_until_ready)
            ended.stop()
            with pytest.raises(EngineError):
                waiting.result(30)


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
