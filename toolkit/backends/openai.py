"""An engine that is a server somewhere else, timed from outside: any that speaks OpenAI's API of
completions.

Requests are sent together, each with a prompt of its own, so that no cache of prefixes helps. A
prefill of [N, L] is N requests for one token, from when they are due to the last answer,
connections included. A decode step of N rows is read off N requests for some tokens: between the
first and the last token of the one that came last, where all N decode. What a server does with them
inside is its own affair: these are the times that its clients see.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import numpy as np

from toolkit.endpoints.target import Dialect, Metric, Target, find_target, learn, scrape, version
from toolkit.endpoints.wire import ClientConnection, Sample, loop_factory
from toolkit.engines.protocol import FinishReason, Round, Row, SliceOutput
from toolkit.errors import EngineError, InputError
from toolkit.files.profile import EngineFacts
from toolkit.files.recipe import Recipe
from toolkit.profiling.bench import VISIT_S, VISIT_SAMPLES, Unmeasurable
from toolkit.profiling.grid import GridPoint, SliceShape
from toolkit.profiling.run import ProfileBench
from toolkit.workers.protocol import BatchDone, OnEvent, Times, WorkerReady, Workers
from toolkit.workers.supervisor import SilentWorkerError

# What a server says of itself: its version, its limits, and how much KV cache it has, where
# /metrics tells.
#
# What it does not say, the recipe must: a simulation cannot go without.

MIB = 1 << 20
SAFE_VOCABULARY = 256  # token ids that every model has


def facts_of(recipe: Recipe, target: Target, dialect: Dialect, max_rows: int | None) -> EngineFacts:
    """The facts of a served model. `InputError` where nobody says how many tokens its KV cache
    holds.
    """
    model = recipe.model
    capacity = kv_tokens(scrape(target)) or _kv_tokens_of(recipe, target)
    config_vocabulary = model.config.get("vocab_size")
    return EngineFacts(
        engine="openai",
        engine_version=version(target),
        model_type=target.model,
        parameters=0,
        dtype=model.dtype,
        device=recipe.hardware.name,
        threads=recipe.engine.threads,
        kv_bytes_per_token=model.kv_bytes_per_token or 1,
        kv_budget_bytes=capacity * (model.kv_bytes_per_token or 1),
        capacity_tokens=capacity,
        max_model_len=min(model.max_model_len, target.max_model_len or model.max_model_len),
        vocab_size=config_vocabulary if isinstance(config_vocabulary, int) else SAFE_VOCABULARY,
        prefill_emits_token=True,
        max_rows=max_rows,
        lacks=dialect.lacks,
    )


def kv_tokens(metrics: Sequence[Metric]) -> int | None:
    """Tokens of KV cache by the names of vLLM, SGLang and llmctl; None where none of them is there."""
    for name, labels, value in metrics:
        if name == "vllm:cache_config_info" and labels.get("num_gpu_blocks", "").isdigit():
            return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        if name in ("sglang:max_total_num_tokens", "llmctl_kv_cache_tokens") and value > 0:
            return int(value)
    return None


def _kv_tokens_of(recipe: Recipe, target: Target) -> int:
    budget, per_token = recipe.engine.kv_cache_memory_mib, recipe.model.kv_bytes_per_token
    if budget is None or per_token is None:
        raise InputError(
            f"{target.url}/metrics does not say how many tokens the KV cache holds, and the recipe does not either",
            "give engine.kv_cache_memory_mib and model.kv_bytes_per_token",
        )
    return int(budget * MIB) // per_token


KEY_VARIABLE = "LLMCTL_ENGINE_API_KEY"  # never in a recipe: profiles and logs carry those
# tokens of a request whose decode steps are timed; servers may hold a last one back for a while
STEPS = 48
# of the tokens that those who came first had got before the last came, so many more are asked of
# them
HEAD_START = 1.25
EARLY_SHARE = 0.25  # of the steps that are timed may lack rows that have ended
TRIES = 4  # to have all rows of a decode step run at once
PATIENCE_S = 300.0  # for one group of requests
FAILURES_MAX = 5  # groups in a row that were not answered: the server is gone
ADMISSION_TOKENS = 8, 48  # prompt and output of the requests that find out how many run at once


class Endpoint:
    """A server, and how it is asked. The key comes from the environment.

    Raises `InputError`, naming the URL, where nobody answers, the key is refused, or the model is not served.
    """

    def __init__(self, recipe: Recipe, url: str | None = None) -> None:
        url = url or recipe.engine.url
        assert url is not None, "the recipe was checked"
        self.target: Target = find_target(
            url, recipe.engine.served_model, os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
        )
        self.dialect: Dialect = learn(self.target)
        self._connection = ClientConnection(self.target)
        self._rng = np.random.default_rng(
            time.time_ns()
        )  # prompts that no earlier run has put into a cache
        self._vocab_size = 1

    def draws_below(self, vocab_size: int) -> None:
        """Token ids of prompts are below this from now on."""
        self._vocab_size = vocab_size

    async def together(self, prompts: Sequence[int], max_tokens: Sequence[int]) -> list[Sample]:
        """Send a request for each prompt length and number of tokens at once. Raises as `at_times`
        does.
        """
        samples = [
            Sample(0.0, length, tokens) for length, tokens in zip(prompts, max_tokens, strict=True)
        ]
        return await self.at_times(samples)

    async def at_times(self, samples: list[Sample], start_s: float | None = None) -> list[Sample]:
        """Send each when its time has come, and wait for all.

        Times count from `start_s` of the performance counter; None: from when all requests are
        made, and before any has a connection, as in a replay.

        Raises `Unmeasurable` with the first failure, or where an output has another length than it was asked for.
        """
        dialect, model = self.dialect, self.target.model
        requests = [
            self._connection.request(
                dialect.request(
                    model,
                    dialect.prompt(self._rng, sample.prompt_tokens, self._vocab_size),
                    sample.wanted_tokens,
                )
            )
            for sample in samples
        ]

        zero_s = time.perf_counter() if start_s is None else start_s

        def clock() -> float:
            return time.perf_counter() - zero_s

        async def send(request: bytes, sample: Sample) -> None:
            if sample.scheduled_s:
                await asyncio.sleep(sample.scheduled_s - clock())
            await self._connection.send(request, sample, clock, PATIENCE_S)

        await asyncio.gather(*[send(*pair) for pair in zip(requests, samples, strict=True)])
        for sample in samples:
            if sample.failure:
                raise Unmeasurable(sample.failure)
            if sample.output_tokens != sample.wanted_tokens:
                why = "" if dialect.ignore_eos else ": the server does not take ignore_eos"
                asked = f"{sample.wanted_tokens} were asked for{why}"
                raise Unmeasurable(f"{sample.output_tokens} tokens came where {asked}")
        return samples


class ServerBench:
    """What all benches on a server share: requests over HTTP, slices, and the count of failures.

    A server has no memory edge: requests that do not fit wait in its queue. `name` stands in
    errors.
    """

    facts: EngineFacts

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self._endpoint = endpoint
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._name = name
        self._failures = 0

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
    """`toolkit.profiling.bench.TimedEngine` on a server that runs already.

    Raises `EngineError` when the server cannot answer the first requests.
    """

    def __init__(self, recipe: Recipe) -> None:
        endpoint = Endpoint(recipe)
        super().__init__(endpoint, endpoint.target.url)
        self._head_starts: dict[GridPoint, list[int]] = {}
        try:
            rows = self._measure_max_rows(4 * max(recipe.profile.batch_sizes))
            self.facts = facts_of(recipe, endpoint.target, endpoint.dialect, rows)
        except Unmeasurable as reason:
            self.stop()
            raise EngineError(
                f"{endpoint.target.url} does not serve: {reason}", "try it with: llmctl bench"
            ) from None
        endpoint.draws_below(self.facts.vocab_size)

    def time(self, point: GridPoint, warmups: int) -> list[float]:
        """See `Bench.time`. Raises `EngineError` where the server does not answer any more."""
        measure = self._prefill_s if point.kind == "prefill" else self._decode_s
        for _ in range(warmups):
            measure(point)
        samples: list[float] = []
        end_s = time.perf_counter() + VISIT_S
        while not samples or (len(samples) < VISIT_SAMPLES and time.perf_counter() < end_s):
            samples.append(measure(point))
        return samples

    def _prefill_s(self, point: GridPoint) -> float:
        samples = self._together([point.length] * point.batch_size, [1] * point.batch_size)
        return max(one.last_token_s for one in samples)

    def _decode_s(self, point: GridPoint) -> float:
        """Mean of the steps around the cached length while all rows decode: half of them come
        before it, half after.

        A server that prefills in chunks lets the first rows decode long before the last. Those are
        asked for more tokens then, so that they are still there; how many, is found out once for a
        point.
        """
        steps = min(STEPS, self.facts.max_model_len // 4)
        prompt = prompt_around(point.length, steps, self.facts.max_model_len)
        more_max = self.facts.max_model_len - prompt - steps
        head_starts = self._head_starts.setdefault(point, [0] * point.batch_size)
        for _ in range(TRIES):
            samples = self._together(
                [prompt] * point.batch_size, [steps + more for more in head_starts]
            )
            last = max(samples, key=lambda one: one.first_token_s)
            seconds = last.last_token_s - last.first_token_s
            if seconds <= 0.0:
                raise Unmeasurable(
                    "all tokens of an output came at once: the server does not stream"
                )
            step_s = seconds / (last.output_tokens - 1)
            if (
                min(one.last_token_s for one in samples)
                >= last.last_token_s - EARLY_SHARE * seconds
            ):
                return step_s
            leads_s = [last.first_token_s - one.first_token_s for one in samples]
            head_starts[:] = [
                min(math.ceil(HEAD_START * lead_s / step_s), more_max) for lead_s in leads_s
            ]
        raise Unmeasurable(
            f"{point.batch_size} requests of {prompt} tokens did not decode at once: the first had ended"
        )

    def _measure_max_rows(self, limit: int) -> int | None:
        """How many requests run at once at most; None: at least `limit`.

        Those run at once whose first token comes before the first of them ends.
        """
        size = 8
        while size <= limit:
            prompt, tokens = ADMISSION_TOKENS
            samples = self._together([prompt] * size, [tokens] * size)
            first_end_s = min(one.last_token_s for one in samples)
            at_once = sum(one.first_token_s < first_end_s for one in samples)
            if at_once < size:
                return at_once
            size *= 2
        return None

    def _together(self, prompts: Sequence[int], max_tokens: Sequence[int]) -> list[Sample]:
        with self.counting_failures():
            return self._runner.run(self._endpoint.together(prompts, max_tokens))


@contextlib.contextmanager
def endpoint_bench(recipe: Recipe) -> Iterator[EndpointBench]:
    """A bench on the recipe's server."""
    bench = EndpointBench(recipe)
    try:
        yield bench
    finally:
        bench.stop()


# A server as a pool of one worker, for whole slices: N requests sent together, until the last has
# ended.


class EndpointWorkers:
    """`toolkit.workers.protocol.Workers`: slices only. What the tokens were, nobody asks; they are
    counted.
    """

    size = 1

    def __init__(self, endpoint: Endpoint, facts: EngineFacts) -> None:
        self._endpoint = endpoint
        self._facts = facts
        self._on_event: OnEvent | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, on_event: OnEvent) -> None:
        """It runs already."""
        self._on_event = on_event
        on_event(WorkerReady(0, self._facts))

    def run(
        self,
        worker: int,
        batch_id: int,
        rows: Sequence[Row],
        steps: int,
        estimated_s: float = math.inf,
    ) -> None:
        """Send the rows as requests, each with a prompt of its own."""
        self._task = asyncio.create_task(
            self._run(batch_id, [len(row.tokens) for row in rows], steps)
        )

    def run_round(
        self, worker: int, batch_id: int, plan: Round, estimated_s: float = math.inf
    ) -> None:
        """Rounds are the server's own affair."""
        raise ValueError("a server runs no rounds for others")

    def kill(self, worker: int) -> None:
        """A server is not ours to kill."""

    def silent(self) -> list[SilentWorkerError]:
        """A server's silence is its own."""
        return []

    def interrupt(self, worker: int, batch_id: int) -> None:
        """Nothing can be interrupted."""

    def cancel(self, worker: int, batch_id: int, request_ids: Sequence[str]) -> None:
        """Nothing is cancelled."""

    async def stop(self) -> None:
        """End what is under way; the server goes on."""
        self._on_event = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, batch_id: int, prompts: Sequence[int], steps: int) -> None:
        start_s = time.perf_counter()
        counts = [0] * len(prompts)
        with contextlib.suppress(
            Unmeasurable
        ):  # whose tokens did not all come, counts as none: the slice has failed
            counts = [
                sample.output_tokens
                for sample in await self._endpoint.together(prompts, [steps] * len(prompts))
            ]
        finish: FinishReason = "length"
        output = SliceOutput(tuple((0,) * count for count in counts), (finish,) * len(counts))
        if self._on_event is not None:
            self._on_event(
                BatchDone(0, batch_id, output, Times(engine_s=time.perf_counter() - start_s))
            )


class OpenaiBackend:
    """`toolkit.backends.Backend` of a server that runs already."""

    def timed(self, recipe: Recipe) -> AbstractContextManager[ProfileBench]:
        """See `Backend.timed`."""
        return endpoint_bench(recipe)
