"""vLLM's own data-parallel engines on one workload: runs in vLLM's Python.

Each engine is vLLM's `DPEngineCoreProc` with its own loop, scheduler and waves, in a thread; the
requests are dealt by vLLM's `DPLBAsyncMPClient`. No process, socket or model is there: this module
stands in for the executor, for the all-reduce of the engines, and for the messages between client,
coordinator and engines, which it delivers between two rounds of the loops.

What a workload has besides `workloads.Case`: `ranks`, `servers` (API servers, which get requests in
turn), `sync` (passes between two agreements; None: vLLM's default), and `publish` (rounds between
two publications of the engines' figures).
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from toolkit.backends.vllm.conformance.driven import Driven
from toolkit.backends.vllm.conformance.workloads import Case, CaseArrivals, Pass, outputs_of

MOST_ROUNDS = 5_000
WAIT_S = 60.0  # for engines that wait for one another


class RankGroup:
    """The process group of the engines: sums what all have."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()
        self._sum: Any = None
        self._all_gave = threading.Barrier(ranks)
        self._all_took = threading.Barrier(ranks, action=self._clear)

    def size(self) -> int:
        """Engines."""
        return self._ranks

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> None:
        """In place of `torch.distributed.all_reduce`."""
        with self._lock:
            self._sum = tensor.clone() if self._sum is None else self._sum + tensor
        self._all_gave.wait(WAIT_S)
        tensor.copy_(self._sum)
        self._all_took.wait(WAIT_S)

    def _clear(self) -> None:
        self._sum = None


class Later:
    """What an executor gives for a pass, known when it is asked for."""

    def __init__(self, look: Callable[[], Any]) -> None:
        self.result = look


class Executor:
    """In place of vLLM's executor, of one engine: records passes and gives tokens."""

    is_sleeping = False

    def __init__(self, engine: DrivenRank) -> None:
        self._engine = engine
        self._output: Any = None

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        self._output = output
        empty = EMPTY_MODEL_RUNNER_OUTPUT if not output.num_scheduled_tokens else None
        return Later(lambda: empty)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        output = self._output
        _, gives = self._engine.under_way[-1]
        later = Later(lambda: self._engine.computed(output, gives, {}))
        return later if non_block else later.result()

    def execute_dummy_batch(self) -> None:
        self._engine.dummy = True


class DrivenRank(Driven):
    """One of the engines: vLLM's loop around vLLM's scheduler."""

    def __init__(self, model: str, case: Case, rank: int, group: RankGroup) -> None:
        super().__init__(model, case)
        self.dummy = False  # whether the last round had a dummy pass
        self.step: Pass | None = None  # the pass of the last round
        self.ended: list[int] = []
        self._schedule = self.scheduler.schedule
        self._update = self.scheduler.update_from_output
        self.scheduler.schedule = self._planned
        self.scheduler.update_from_output = self._updated
        self.scheduler.finished_req_ids_dict = defaultdict(set)
        self.core = _core(self, rank, case, group)

    def _planned(self, *args: Any) -> Any:
        self.preempted = []
        output = self._schedule(*args)
        planned = self.planned(output)
        if planned.rows or planned.preempted:
            self.step = {
                "rows": [list(row[:3]) for row in planned.rows],
                "preempted": planned.preempted,
                "free": planned.free,
                "waiting": planned.waiting,
                "found": list(planned.found),
            }
        return output

    def _updated(self, output: Any, result: Any) -> Any:
        before = set(self.scheduler.requests)
        outputs = self._update(output, result)
        self.ended += self.forget(before)
        return outputs


def _core(engine: DrivenRank, rank: int, case: Case, group: RankGroup) -> Any:
    """vLLM's `DPEngineCoreProc` with this scheduler, as its constructors leave it."""
    from vllm.v1.engine.core import DPEngineCoreProc, EngineShutdownState

    core: Any = object.__new__(DPEngineCoreProc)
    config = engine.scheduler.vllm_config
    ahead = engine.settings.ahead
    default = getattr(config.parallel_config, "dp_sync_interval", None)
    attributes = {
        "vllm_config": config,
        "log_stats": False,
        "scheduler": engine.scheduler,
        "model_executor": Executor(engine),
        "use_spec_decode": False,
        "check_for_draft_tokens": False,
        "batch_queue_size": 2 if ahead else 1,
        "batch_queue": deque(maxlen=2) if ahead else None,
        "step_fn": core.step_with_batch_queue if ahead else core.step,
        "async_scheduling": ahead,
        "is_ec_consumer": True,  # until 0.30
        "is_mm_encoder_only": False,
        "is_pooling_model": False,
        "aborts_queue": queue.Queue(),
        "input_queue": queue.Queue(),
        "output_queue": queue.Queue(),
        "_idle_state_callbacks": [],
        "_weight_version": "",
        "engine_index": rank,
        "engines_running": False,
        "shutdown_state": EngineShutdownState.RUNNING,
        "reject_new_requests": False,
        "has_coordinator": True,
        "publish_dp_lb_stats": True,
        "last_counts": (0, 0),
        "process_input_queue_block": False,
        "enable_fault_tolerance": False,
        "prefill_schedule_interval": 1,
        "dp_sync_interval": case["sync"] or default,
        "step_counter": 0,
        "current_wave": 0,
        "pending_pause": False,
        "ignore_start_dp_wave": False,
        "eep_scaling_state": None,
        "dp_rank": rank,
        "dp_size": group.size(),
        "dp_group": group,
    }
    for name, value in attributes.items():
        setattr(core, name, value)
    return core


def _client(case: Case, server: int) -> Any:
    """vLLM's `DPLBAsyncMPClient` of an API server, as its constructors leave it."""
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    client: Any = object.__new__(DPLBAsyncMPClient)
    ranks = case["ranks"]
    client.client_count = case["servers"]
    client.reqs_in_flight = {}
    client.engine_inflight = Counter()
    client.streaming_reqs = set()
    client.core_engines = [rank.to_bytes(2, "little") for rank in range(ranks)]
    client.lb_engines = [[0, 0, 0.0] for _ in range(ranks)]
    client.eng_start_index = ranks * server // case["servers"]
    return client


class DrivenRanks:
    """The engines of one server on one workload. `model` is a folder with a config.json."""

    def __init__(self, model: str, case: Case) -> None:
        self.case = case
        self.group = RankGroup(case["ranks"])
        self.engines = [DrivenRank(model, case, rank, self.group) for rank in range(case["ranks"])]
        self.clients = [_client(case, server) for server in range(case["servers"])]
        self._figures = [[0, 0, 0.0] for _ in self.engines]
        self._server_of: dict[int, int] = {}
        self._wave = 0
        self._running = False
        self._begin = threading.Barrier(case["ranks"] + 1)
        self._end = threading.Barrier(case["ranks"] + 1)
        self._over = False
        self._failed: list[BaseException] = []

    def run(self) -> list[Pass]:
        """The passes of all engines, round by round; the last one is {"stuck": ...} where it does
        not end.
        """
        _reduce_by(self.group)
        threads = [
            threading.Thread(target=self._loop, args=(engine,), daemon=True)
            for engine in self.engines
        ]
        for thread in threads:
            thread.start()
        try:
            return self._serve()
        finally:
            self._over = True
            self._begin.abort()
            for thread in threads:
                thread.join(WAIT_S)

    def _loop(self, engine: DrivenRank) -> None:
        first = True

        def go_on() -> bool:
            """In place of `_handle_shutdown`, which is asked before each round."""
            nonlocal first
            if not first:
                self._end.wait(WAIT_S)
            first = False
            self._begin.wait()
            return not self._over

        engine.core._handle_shutdown = go_on
        try:
            engine.core.run_busy_loop()
        except SystemExit:
            pass
        except threading.BrokenBarrierError:
            if not self._over:
                self._failed.append(RuntimeError("engines wait for one another"))
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            self._failed.append(error)
            self._end.abort()

    def _serve(self) -> list[Pass]:
        arrivals = CaseArrivals(self.case)
        found: list[Pass] = []
        for rounds in range(MOST_ROUNDS):
            came = [[number, self._send(number)] for number in arrivals.due(rounds)]
            if not self._running and not came:
                if not arrivals.skip(rounds):
                    return found
                came = [[number, self._send(number)] for number in arrivals.due(rounds)]
            self._round()
            ends = self._take()
            for rank, engine in enumerate(self.engines):
                found.append({"rank": rank, "dummy": engine.dummy, **(engine.step or {})})
                for number in sorted(engine.ended):
                    arrivals.ended(number, rounds + 1)
                engine.ended.clear()
            found[-1] |= {"came": came, "ends": ends}
            if (rounds + 1) % self.case["publish"] == 0:
                found[-1]["figures"] = [list(one) for one in self._figures]
                for client in self.clients:
                    client.lb_engines = [list(one) for one in self._figures]
        return [*found, {"stuck": True}]

    def _send(self, number: int) -> int:
        """A request comes to an API server, which sends it to an engine."""
        from vllm.v1.engine import EngineCoreRequestType

        server = len(self._server_of) % len(self.clients)
        self._server_of[number] = server
        client = self.clients[server]
        asked = SimpleNamespace(
            request_id=str(number), data_parallel_rank=None, pooling_params=None, resumable=False
        )
        rank: int = client.core_engines.index(client.get_core_engine_for_request(asked))
        engine = self.engines[rank]
        limit = self.case["requests"][number][3]
        outputs = outputs_of(self.case, number)
        request = engine.request(number, engine.prompts[number], outputs, limit)
        request.client_index = server
        engine.core.input_queue.put((EngineCoreRequestType.ADD, (request, self._wave)))
        if not self._running:
            self._running = True
            for other in self.engines:
                wave = (EngineCoreRequestType.START_DP_WAVE, (self._wave, rank))
                other.core.input_queue.put(wave)
        return rank

    def _round(self) -> None:
        """Let each engine go through its loop once."""
        for engine in self.engines:
            engine.dummy = False
            engine.step = None
        try:
            self._begin.wait(WAIT_S)
            self._end.wait(WAIT_S)
        except threading.BrokenBarrierError:
            raise (self._failed or [RuntimeError("an engine does not go on")])[0] from None

    def _take(self) -> bool:
        """Take what the engines sent: ends to the clients, figures, and whether a wave ended."""
        ends = False
        for rank, engine in enumerate(self.engines):
            while not engine.core.output_queue.empty():
                server, outputs = engine.core.output_queue.get()
                if server >= 0:
                    _hear(self.clients[server], outputs)
                if (stats := outputs.scheduler_stats) is not None and server < 0:
                    running = stats.num_running_reqs
                    used = stats.kv_cache_usage
                    self._figures[rank] = [stats.num_waiting_reqs, running, round(used, 9)]
                if outputs.wave_complete is not None:
                    ends = True
                    self._wave = outputs.wave_complete + 1
                    self._running = False
        running = {bool(engine.core.engines_running) for engine in self.engines}
        if running != {self._running}:
            raise RuntimeError(f"engines run {running}, and the coordinator says {self._running}")
        return ends


def _hear(client: Any, outputs: Any) -> None:
    """A client takes what an engine sent it: a coroutine that waits for nothing."""
    heard = client.process_engine_outputs(client, outputs)
    try:
        heard.send(None)
    except StopIteration:
        return


def _reduce_by(group: RankGroup) -> None:
    """Put the group's sum in the place of `torch.distributed.all_reduce`."""
    from vllm.config import parallel

    parallel.torch.distributed.all_reduce = group.reduce
    if hasattr(parallel, "cpu_all_reduce_"):  # since 0.33
        parallel.cpu_all_reduce_ = group.reduce
