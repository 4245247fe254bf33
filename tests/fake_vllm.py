"""The parts of vLLM that our scheduler inside it uses: blocks that running requests share, chunked
prefill, preemption, async scheduling; no model.
"""

from __future__ import annotations

import importlib
import sys
from collections import deque
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace


@dataclass(eq=False)
class Request:
    """`length` is the output at which it ends, known to the model only."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    length: int
    priority: int = 0
    arrival_time: float = 0.0
    resumable: bool = False
    generated: int = 0
    computed: int = 0
    in_flight: int = 0  # tokens of unfinished steps
    preemptions: int = 0  # how often its cache was dropped
    block_hashes: list[str] = field(default_factory=list)  # of the full blocks of its prompt


class FullAttentionSpec:
    """A cache that grows with its tokens."""


@dataclass
class UniformTypeKVCacheSpecs:
    """Layers with the same number of slots for a token."""

    kv_cache_specs: dict[str, object]


@dataclass
class SchedulerOutput:
    """The requests of a step, and for each the count of its preemptions when it gets a token."""

    took_part: list[str] = field(default_factory=list)
    sampled: dict[str, int] = field(default_factory=dict)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return len(self.took_part)


class Scheduler:
    """The base that mix-ins for vLLM's schedulers name."""


class AsyncScheduler(Scheduler):
    """Serves first come, first served, with the real scheduler's names."""

    def __init__(
        self,
        *,
        blocks=9,
        block_size=4,
        slots=4,
        budget=8,
        max_model_len=1000,
        ahead=False,
        kind=None,
        **config,
    ):
        self.vllm_config = SimpleNamespace(
            speculative_config=None,
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
            kv_transfer_config=None,
            ec_transfer_config=None,
            model_config=SimpleNamespace(runner_type="generate", is_diffusion=False),
            scheduler_config=SimpleNamespace(async_scheduling=ahead),
        )
        vars(self.vllm_config).update(config)
        self.cache_config = SimpleNamespace(num_gpu_blocks=blocks, enable_prefix_caching=True)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind or FullAttentionSpec())]
        )
        self.block_size = self.hash_block_size = block_size
        self.max_num_running_reqs = self.max_num_active_reqs = slots
        self.max_model_len = max_model_len
        self.budget = budget
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = None  # vLLM's queue, which ours replaces
        self.current_step = 0
        self.stale: set[str] = set()

    def add_request(self, request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def schedule(self, throttle_prefills=False) -> SchedulerOutput:
        self.current_step += 1
        output = SchedulerOutput()
        budget = self.budget
        preempted = False
        for request in list(self.running):
            while request in self.running and budget:
                new = self._new_tokens(request, budget)
                if not new or self._fits(request, new):
                    budget -= self._run(request, new, output)
                    break
                self._preempt_request(self.running.pop(), 0.0)
                preempted = True
        while (
            budget
            and not preempted
            and self.waiting
            and len(self.running) < self.max_num_active_reqs
        ):
            request = self.waiting.peek_request()
            tokens = request.num_prompt_tokens + request.generated
            found = self._found(request, tokens)
            if not self._fits(request, tokens):
                break
            request.computed = found
            new = self._new_tokens(request, budget)
            self.waiting.pop_request()
            self.running.append(request)
            budget -= self._run(request, new, output)
        assert len(self.running) <= self.max_num_running_reqs
        return output

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = []
        for request_id, preemptions in scheduler_output.sampled.items():
            request = self.requests.get(request_id)
            if request is None or (request.preemptions != preemptions and request_id in self.stale):
                continue
            request.generated += 1
            request.in_flight -= request.preemptions == preemptions
            ended = request.generated >= min(request.length, request.max_tokens)
            outputs.append(
                SimpleNamespace(
                    request_id=request_id, new_token_ids=[7], finish_reason=ended or None
                )
            )
            if ended:
                self._forget_request(request)
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, request_ids, finished_status):
        found = [
            self.requests[request_id] for request_id in request_ids if request_id in self.requests
        ]
        for request in found:
            self._forget_request(request)
        return found

    def shutdown(self) -> None:
        pass

    def _preempt_request(self, request, timestamp, drop_stale_output=False) -> None:
        if drop_stale_output:
            self.stale.add(request.request_id)
        request.computed = request.in_flight = 0
        request.preemptions += 1
        self.waiting.prepend_request(request)

    def _new_tokens(self, request, budget) -> int:
        if request.generated + request.in_flight >= request.max_tokens:
            return 0  # its last token is being computed
        return min(
            request.num_prompt_tokens + request.generated + request.in_flight - request.computed,
            budget,
        )

    def _run(self, request, new, output) -> int:
        if not new:
            return 0
        request.computed += new
        output.took_part.append(request.request_id)
        if request.computed == request.num_prompt_tokens + request.generated + request.in_flight:
            request.in_flight += 1
            output.sampled[request.request_id] = request.preemptions
        return new

    def _fits(self, request, new) -> bool:
        others = [
            (other, other.computed) for other in self.requests.values() if other is not request
        ]
        held = self.held([*others, (request, request.computed + new)])
        return held < self.cache_config.num_gpu_blocks

    def held(self, requests) -> int:
        """The blocks that requests with so many computed tokens hold."""
        shared = set()
        own = 0
        for request, computed in requests:
            known = request.block_hashes[: computed // self.block_size]
            shared.update(known)
            own += self._blocks(computed) - len(known)
        return own + len(shared)

    def _found(self, request, tokens) -> int:
        """Tokens at the start of a request that running ones hold."""
        there = {
            one
            for other in self.running
            for one in other.block_hashes[: other.computed // self.block_size]
        }
        most = (tokens - 1) // self.block_size
        missing = (k for k, one in enumerate(request.block_hashes[:most]) if one not in there)
        return next(missing, min(most, len(request.block_hashes))) * self.block_size

    def _blocks(self, tokens) -> int:
        return -(-tokens // self.block_size)

    def _forget_request(self, request) -> None:
        del self.requests[request.request_id]
        self.running = [other for other in self.running if other is not request]
        self.waiting.remove_requests([request])


def run(scheduler, requests, *, ahead=0, look=lambda: None) -> dict[str, int]:
    """Steps until all have ended, so many of them under way at once; what each has generated. They
    arrive by steps. `look` is called after each schedule.
    """
    arriving = deque(sorted(requests, key=lambda request: request.arrival_time))
    flying = deque()
    for number in range(5000):
        while arriving and arriving[0].arrival_time <= number:
            scheduler.add_request(arriving.popleft())
        if not arriving and not scheduler.requests:
            return {request.request_id: request.generated for request in requests}
        flying.append(scheduler.schedule())
        look()
        if len(flying) > ahead:
            scheduler.update_from_output(flying.popleft(), None)
    raise AssertionError(f"{sorted(scheduler.requests)} do not end")


class Values(list):
    """A series of Prometheus that keeps all that it is given."""

    inc = observe = list.append


def pass_series() -> SimpleNamespace:
    """`toolkit.backends.vllm.iterations.PassSeries`, with what it was given."""
    return SimpleNamespace(**{name: Values() for name in ("took", "predicted")})


def install(version="0.32.0+cpu") -> dict[str, ModuleType]:
    """The modules under vLLM's names."""
    contents = {
        "vllm": {"__version__": version, "__file__": "no-such-folder/__init__.py"},
        "vllm.v1": {},
        "vllm.v1.core": {},
        "vllm.v1.core.sched": {},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": AsyncScheduler},
        "vllm.v1.core.sched.scheduler": {"Scheduler": Scheduler},
        "vllm.v1.core.sched.output": {"SchedulerOutput": SchedulerOutput},
        "vllm.v1.kv_cache_interface": {
            "FullAttentionSpec": FullAttentionSpec,
            "UniformTypeKVCacheSpecs": UniformTypeKVCacheSpecs,
        },
        "vllm.v1.request": {"Request": Request},
    }
    found = {}
    for name, values in contents.items():
        found[name] = module = ModuleType(name)
        vars(module).update(values)
    sys.modules |= found
    return found


INSIDE = tuple(f"toolkit.backends.vllm.{name}" for name in ("scheduler", "iterations"))


def imported(name: str, version: str = "0.32.0+cpu") -> ModuleType:
    """A module that runs inside vLLM, imported over the fake. Later imports do not see the fake."""

    def hidden() -> dict[str, ModuleType]:
        names = [key for key in sys.modules if key.split(".")[0] == "vllm" or key in INSIDE]
        return {key: sys.modules.pop(key) for key in names}

    before = hidden()
    install(version)
    try:
        return importlib.import_module(name)
    finally:
        hidden()
        sys.modules |= before
