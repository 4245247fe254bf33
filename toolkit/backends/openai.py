"""The backend of a server that runs already: any that speaks OpenAI's completions API.

The server is timed from outside, as its clients see it. Requests of one measurement are sent
together, each with its own random prompt, so that no prefix cache helps. A prefill of [N, L] is N
requests for one token, from their due time to the last answer, connections included. A decode step
of N rows is timed while N requests decode: it is the mean time between tokens of the request that
got its first token last.

Order: the server's facts, `Endpoint` (requests), the benches, and `EndpointWorkers` (whole slices).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from toolkit.backends import Check
from toolkit.endpoints.load import Sample, load_client, send_timed
from toolkit.endpoints.target import (
    Dialect,
    Metric,
    Target,
    find_target,
    learn,
    scrape,
    version,
)
from toolkit.engines.protocol import EnginePass, PassOutput
from toolkit.errors import EngineError, InputError
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import Recipe
from toolkit.interrupts import cancelling
from toolkit.profiling.grid import STEPS, GridPoint, SliceShape
from toolkit.profiling.process import ProfileBench, Unmeasurable, visit
from toolkit.units import MIB
from toolkit.workers.protocol import (
    Cancel,
    Interrupt,
    OnEvent,
    PassDone,
    WorkerReady,
    Workers,
)

Asked = TypeVar("Asked")
KEY_VARIABLE = "LLMCTL_ENGINE_API_KEY"  # not in a recipe: profiles and logs hold recipes
# A request that gets its first token early is sent with this many times the tokens of its lead.
LEAD_MARGIN = 1.25
EARLY_SHARE = 0.25  # of the timed steps may lack rows that have ended
TRIES = 4  # attempts to let all rows of a decode step run at once
GROUP_TIMEOUT_S = 300.0  # bound on one group of requests
FAILURES_MAX = 5  # in a row: the server is gone
ROW_LIMIT_TOKENS = 8, 48  # prompt and output, to find the row limit


def facts_of(recipe: Recipe, target: Target, dialect: Dialect, max_rows: int | None) -> EngineFacts:
    """The facts of a served model, from its version, limits and /metrics, else from the recipe.

    Raises `InputError` if none of them says how many tokens the KV cache holds.
    """
    model = recipe.model
    per_token = recipe.model.kv_bytes_per_token
    capacity = kv_tokens(scrape(target))
    budget = recipe.engine.kv_cache_memory_mib
    if not capacity:
        if budget is None or per_token is None:
            raise InputError(
                f"neither {target.url}/metrics nor the recipe says how many tokens the KV cache "
                "holds",
                "give engine.kv_cache_memory_mib and model.kv_bytes_per_token",
            )
        capacity = int(budget * MIB) // per_token
    return EngineFacts(
        engine="openai",
        engine_version=version(target),
        model_type=target.model,
        parameters=0,
        dtype=model.dtype,
        device=recipe.hardware.name,
        threads=recipe.engine.threads,
        kv_bytes_per_token=per_token or 1,
        kv_budget_bytes=capacity * (per_token or 1),
        capacity_tokens=capacity,
        max_model_len=min(model.max_model_len, target.max_model_len or model.max_model_len),
        vocab_size=model.vocab_size,
        prefill_emits_token=True,
        max_rows=max_rows,
        lacks=dialect.lacks,
    )


def kv_tokens(metrics: Sequence[Metric]) -> int | None:
    """Tokens of KV cache by the metric names of vLLM, SGLang and llmctl; None if none is there."""
    for name, labels, value in metrics:
        if name == "vllm:cache_config_info":
            sizes = [labels.get(one, "") for one in ("num_gpu_blocks", "block_size")]
            if all(re.fullmatch(r"[0-9]{1,12}", size) for size in sizes):
                return math.prod(map(int, sizes))
        is_size = name in ("sglang:max_total_num_tokens", "llmctl_kv_cache_tokens")
        if is_size and 0 < value < math.inf:
            return int(value)
    return None


class Endpoint:
    """A server and its dialect. The key comes from the environment variable LLMCTL_ENGINE_API_KEY.

    Raises `InputError`, naming the URL, if the server does not answer, refuses the key, or does not
    serve the model.
    """

    def __init__(self, recipe: Recipe, url: str | None = None) -> None:
        url = url or recipe.engine.url
        assert url is not None, "the recipe was checked"
        self.target: Target = find_target(
            url, recipe.engine.served_model, os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        )
        self.dialect: Dialect = learn(self.target)
        # A new seed for each run, so that no prompt is in a prefix cache.
        self._rng = np.random.default_rng(time.time_ns())
        self.vocab_size = 1  # token ids of prompts are below it

    async def first_token(self, prompt: list[int], length: int) -> Sample:
        """Send this prompt of `length` tokens for one token. Raises like `at_times`."""
        (sample,) = await self.at_times([Sample(0.0, length, 1)], prompts=[prompt])
        return sample

    def prompt(self, tokens: int) -> list[int]:
        """Return a random prompt, which no cache holds."""
        return [int(token) for token in self._rng.integers(0, self.vocab_size, tokens)]

    async def at_times(
        self,
        samples: list[Sample],
        start_s: float | None = None,
        prompts: Sequence[list[int]] | None = None,
        names: Sequence[str] | None = None,
    ) -> list[Sample]:
        """Send each request at its scheduled time, by default with a random prompt; wait for all.
        The server gets the `names` of the requests, if there are any.

        Times count from `start_s` of the performance counter, by default from when all requests are
        built, before any has a connection, as in a replay. Raises `Unmeasurable` with the first
        failure, or if an output has another length than requested.
        """
        dialect = self.dialect
        model = self.target.model
        prompts = prompts or [self.prompt(sample.prompt_tokens) for sample in samples]
        names = names or [""] * len(samples)
        for sample, prompt, name in zip(samples, prompts, names, strict=True):
            fields = dialect.request(model, prompt, sample.wanted_tokens)
            sample.write(self.target, fields, name=name)
        zero_s = time.perf_counter() if start_s is None else start_s

        def clock() -> float:
            return time.perf_counter() - zero_s

        async def send(sample: Sample) -> None:
            if sample.scheduled_s:
                await asyncio.sleep(sample.scheduled_s - clock())
            await send_timed(server, sample, clock, GROUP_TIMEOUT_S)

        async with contextlib.aclosing(load_client(self.target)) as server:
            await asyncio.gather(*map(send, samples))
        for sample in samples:
            if sample.failure:
                raise Unmeasurable(sample.failure)
            if sample.output_tokens != sample.wanted_tokens:
                why = "" if dialect.ignore_eos else ": the server does not take ignore_eos"
                tokens = sample.output_tokens
                wanted = sample.wanted_tokens
                raise Unmeasurable(f"{tokens} tokens came, {wanted} were requested{why}")
        return samples


class ServerBench(ProfileBench):
    """What benches on a server share: requests, slices, and failures. `name` is in errors."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._endpoint = endpoint
        self._runner = asyncio.Runner()  # of asyncio's own loop: see `toolkit.endpoints.load`
        self._name = name
        self._failures = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the client. The server keeps running, for slices."""
        self._runner.close()

    def workers(self, recipe: Recipe) -> Workers:
        """Run whole slices on the same server."""
        return EndpointWorkers(self._endpoint, self.facts)

    def fits(self, shape: SliceShape) -> bool:
        """Always true: requests that do not fit wait in the server's queue."""
        return True

    @contextlib.contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Count `Unmeasurable` errors. Raises `EngineError` after `FAILURES_MAX` in a row."""
        try:
            yield
        except Unmeasurable as reason:
            self._failures += 1
            if self._failures >= FAILURES_MAX:
                raise EngineError(
                    f"{self._name}: {FAILURES_MAX} points failed in a row, the last one: {reason}",
                    "the results so far are kept: the same command resumes from there",
                ) from None
            raise
        self._failures = 0


def prompt_around(length: int, steps: int, max_model_len: int) -> int:
    """The prompt tokens for which half of `steps` decode steps come before a cached `length`."""
    return max(min(length - steps // 2, max_model_len - steps), 1)


class EndpointBench(ServerBench):
    """A server that runs already. Raises `EngineError` if it cannot answer the first requests."""

    def __init__(self, recipe: Recipe) -> None:
        endpoint = Endpoint(recipe)
        super().__init__(endpoint, endpoint.target.url)
        self._extra_tokens: dict[GridPoint, list[int]] = {}
        with contextlib.ExitStack() as failed:
            failed.callback(self.stop)
            try:
                rows = self._measure_row_limit(4 * max(recipe.profile.batch_sizes))
                self.facts = facts_of(recipe, endpoint.target, endpoint.dialect, rows)
            except Unmeasurable as reason:
                raise EngineError(
                    f"{endpoint.target.url} does not serve: {reason}", "try it with: llmctl bench"
                ) from None
            failed.pop_all()
        endpoint.vocab_size = self.facts.vocab_size

    def time(self, point: GridPoint, warmups: int) -> list[float]:
        """See `TimedEngine.time`. Raises `EngineError` if the server no longer answers."""
        if point.kind != "prefill":
            return visit(lambda: self._decode_s(point), warmups)
        rows = point.batch_size

        def prefill_s() -> float:
            samples = self._together([Sample(0.0, point.length, 1) for _ in range(rows)])
            return max(sample.last_token_s for sample in samples)

        return visit(prefill_s, warmups)

    def _decode_s(self, point: GridPoint) -> float:
        """Mean time of the steps around the cached length while all rows decode, half before it.

        A server that prefills in chunks lets the first rows decode long before the last. Those rows
        get extra tokens, kept per point, so that they still run when the last one decodes.
        """
        steps = min(STEPS, self.facts.max_model_len // 4)
        prompt = prompt_around(point.length, steps, self.facts.max_model_len)
        extra_max = self.facts.max_model_len - prompt - steps
        extra_tokens = self._extra_tokens.setdefault(point, [0] * point.batch_size)
        for _ in range(TRIES):
            requests = [Sample(0.0, prompt, steps + extra) for extra in extra_tokens]
            samples = self._together(requests)
            last = max(samples, key=lambda sample: sample.first_token_s)
            seconds = last.last_token_s - last.first_token_s
            if seconds <= 0.0:
                why = "all tokens of an output arrived at once: the server does not stream"
                raise Unmeasurable(why)
            step_s = seconds / (last.output_tokens - 1)
            first_end_s = min(sample.last_token_s for sample in samples)
            if first_end_s >= last.last_token_s - EARLY_SHARE * seconds:
                return step_s
            leads_s = [last.first_token_s - sample.first_token_s for sample in samples]
            extra_tokens[:] = [
                min(math.ceil(LEAD_MARGIN * lead_s / step_s), extra_max) for lead_s in leads_s
            ]
        raise Unmeasurable(
            f"{point.batch_size} requests of {prompt} tokens did not decode at once: "
            "the first had ended"
        )

    def _measure_row_limit(self, limit: int) -> int | None:
        """How many requests run at once at most; None if at least `limit` do. They do if all have
        their first token before one of them ends.
        """
        size = 8
        (prompt, tokens) = ROW_LIMIT_TOKENS
        while size <= limit:
            samples = self._together([Sample(0.0, prompt, tokens) for _ in range(size)])
            first_end_s = min(sample.last_token_s for sample in samples)
            at_once = sum(sample.first_token_s < first_end_s for sample in samples)
            if at_once < size:
                return at_once
            size *= 2
        return None

    def _run(self, asked: Coroutine[Any, Any, Asked]) -> Asked:
        with cancelling():
            return self._runner.run(asked)

    def _together(self, samples: list[Sample]) -> list[Sample]:
        with self.counting_failures():
            return self._run(self._endpoint.at_times(samples))


class EndpointWorkers:
    """`toolkit.workers.protocol.Workers` of one server: a pool of one worker, for slices only.

    A slice is N requests sent together, until the last has ended. Its tokens are only counted.
    """

    size = 1

    def __init__(self, endpoint: Endpoint, facts: EngineFacts) -> None:
        self._endpoint = endpoint
        self._facts = facts
        self._on_event: OnEvent | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, on_event: OnEvent) -> None:
        """Report the worker as ready: the server runs already."""
        self._on_event = on_event
        on_event(WorkerReady(0, self._facts))

    def run(self, worker: int, plan: EnginePass, estimated_s: float = math.inf) -> None:
        """Send the rows of a slice as requests, each with its own random prompt. Raises ValueError
        for a pass that keeps caches: the server schedules by itself.
        """
        if plan.keep_cache:
            raise ValueError("a server schedules by itself and runs slices only")
        self._task = asyncio.create_task(self._run(plan))

    def kill(self, worker: int) -> None:
        """Do nothing: llmctl did not start the server."""

    def tell(self, worker: int, change: Interrupt | Cancel) -> None:
        """Do nothing: a running request cannot be cancelled."""

    async def stop(self) -> None:
        """Cancel running requests. The server keeps running."""
        self._on_event = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, plan: EnginePass) -> None:
        output = PassOutput(0)  # if a request fails
        with contextlib.suppress(Unmeasurable):
            samples = [Sample(0.0, len(row.tokens), plan.steps) for row in plan.enter]
            await self._endpoint.at_times(samples)
            output = PassOutput(plan.steps, ended=plan.numbers)
        if self._on_event is not None:
            self._on_event(PassDone(0, plan.pass_id, output))


class OpenaiBackend:
    """`toolkit.backends.Backend` of a server that runs already."""

    def timed(self, recipe: Recipe) -> contextlib.AbstractContextManager[ProfileBench]:
        return EndpointBench(recipe)

    def check(self, recipe: Recipe) -> list[Check]:
        """See `Backend.check`: the server need not run on this machine."""
        return []
