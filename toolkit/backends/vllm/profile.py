"""The bench of vLLM: its own server, started by llmctl, driven over HTTP, timed by its log of
passes.

It times the server that will serve, and the client's own delays affect `FrontPoint` only. A prefill
of [N, L] lasts from the first pass with a chunk of the N prompts to the last one. A decode step of
N rows is a pass of exactly these rows, plus the gap to the next pass. All passes, of mixes and of
traffic too, are kept for the law of passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import IO

from toolkit.backends.openai import TRIES, Endpoint, ServerBench, prompt_around
from toolkit.backends.vllm.command import (
    DRAFTS,
    POLICY,
    VllmCommand,
    VllmServer,
    draft_flags,
    flags_of,
    vllm_server,
    vllm_version,
)
from toolkit.backends.vllm.overlap import Following, sampler_s
from toolkit.backends.vllm.setup import ITERATIONS_VARIABLE, log_of_rank
from toolkit.catalogue.caches import is_plain, logged_tokens, read_tokens
from toolkit.catalogue.classes import ClassFound, of_resolved, refuse
from toolkit.catalogue.families import always_has_experts
from toolkit.catalogue.layers import experts_of, text_config
from toolkit.endpoints.fronts import front_seconds, names_of
from toolkit.endpoints.load import Sample
from toolkit.engines.saved import saved_model
from toolkit.errors import InputError
from toolkit.files.io import processor
from toolkit.files.iterations import (
    IterationLogHeader,
    LoggedPass,
    header_of,
    passes_of,
    shape_of_rows,
)
from toolkit.files.modelled import refuse_recipe
from toolkit.files.profile import EngineFacts, FrontPoint, StepPoint, StepsProfile
from toolkit.files.recipe import Recipe
from toolkit.laws.features import StepShape
from toolkit.laws.passes import LAUNCHES
from toolkit.profiling.grid import (
    APART,
    BESIDE_STEPS,
    HITS,
    LOAD_S,
    MIX_STEPS,
    STEPS,
    GridPoint,
    log_uniform,
    log_uniform_mean,
)
from toolkit.profiling.process import VISIT_SAMPLES, Passes, Unmeasurable
from toolkit.sched.policies.vllm import ROWS, TOKENS, refuse_later


@dataclass(slots=True, frozen=True)
class TimedPass:
    """A pass that computed something.

    Attributes:
        host_s: the gap to the next pass; None if nothing waits, or the next pass was scheduled
            before this one ended, so that there is no gap.
        idle: no pass was under way when it was scheduled.
        launch_s: from its scheduling to the end of its launch; None: not known.
    """

    shape: StepShape
    start_s: float
    end_s: float
    host_s: float | None
    idle: bool
    launch_s: float | None

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def timed(passes: Sequence[LoggedPass], window: int = 0) -> list[TimedPass]:
    """Consecutive passes with their times, in seconds, of a model with sliding windows of `window`
    tokens (0: without). A pass that was scheduled before the end of the previous one begins at that
    end.
    """
    times: list[TimedPass] = []
    end_s = -1.0
    for one, following in pairwise([*[one for one in passes if one.rows], None]):
        assert one is not None
        idle = one.start_s >= end_s
        launch_s = one.launched_s - one.start_s if one.launched_s else None
        start_s = max(one.start_s, end_s)
        end_s = one.end_s
        busy = following is not None and (
            one.waiting or {row.request_id for row in one.rows} - set(one.ended)
        )
        apart = following is not None and following.start_s >= end_s
        host_s = following.start_s - end_s if busy and apart and following else None
        shape = shape_of_rows(one.rows, window)
        times.append(TimedPass(shape, start_s, end_s, host_s, idle, launch_s))
    return times


def least_sampler_s(logged: Sequence[LoggedPass]) -> float:
    """The least time that a launch went on after its stamp; infinity where no pass shows it."""
    found_s = math.inf
    end_s = -math.inf
    for one, later in pairwise([one for one in logged if one.rows]):
        if later.start_s < one.end_s:
            following = Following(later.start_s, later.rows, later.launched_s)
            shown_s = sampler_s(one, following, from_idle=one.start_s >= end_s)
            found_s = min(found_s, shown_s)
        end_s = one.end_s
    return found_s


def points(passes: Sequence[TimedPass]) -> list[StepPoint]:
    """One point for each pass with chunks, and one for each stretch of equally many decodes."""
    stretches: list[list[TimedPass]] = []
    for one in passes:
        if stretches and _continues(stretches[-1][-1], one):
            stretches[-1].append(one)
        else:
            stretches.append([one])
    return [_point(stretch) for stretch in stretches]


def _continues(before: TimedPass, one: TimedPass) -> bool:
    """Whether both passes decode the same number of rows, without a rest between them."""
    if before.shape.prefills or one.shape.prefills:
        return False
    rested = one.idle and before.host_s is None
    alike = before.shape.decodes == one.shape.decodes
    return alike and before.shape.draft_tokens == one.shape.draft_tokens and not rested


def _point(stretch: Sequence[TimedPass]) -> StepPoint:
    shape = stretch[0].shape
    launches = [one.launch_s for one in stretch if one.launch_s is not None]
    return StepPoint(
        decodes=shape.decodes,
        decode_cached=fmean(one.shape.decode_cached for one in stretch),
        prefills=shape.prefills,
        prefill_tokens=shape.prefill_tokens,
        prefill_attended=shape.prefill_attended,
        prefill_cached=shape.prefill_cached,
        decode_inside=fmean(one.shape.decode_inside for one in stretch),
        prefill_inside=shape.prefill_inside,
        seconds=[one.seconds for one in stretch],
        host_s=[one.host_s for one in stretch if one.host_s is not None],
        idle=stretch[0].idle,
        draft_tokens=shape.draft_tokens,
        launch_s=launches if len(launches) == len(stretch) else [],
    )


def steps_of_header(header: IterationLogHeader, recipe: Recipe) -> StepsProfile:
    """What the first line of a log says of an engine's passes; points are still to be added."""
    experts, per_token = experts_of(text_config(recipe.model.config))
    drafts = header.resolved.drafts if header.resolved else None
    return StepsProfile(
        block_tokens=header.block_tokens,
        blocks=header.blocks,
        max_num_batched_tokens=header.max_num_batched_tokens,
        async_scheduling=header.async_scheduling,
        graph_sizes=header.graph_sizes,
        graph_mode=header.graph_mode,
        executor=header.executor,
        experts=experts,
        experts_per_token=per_token,
        resolved=header.resolved,
        draft_method=drafts.method if drafts else "",
        draft_tokens=drafts.tokens if drafts else 0,
        points=[],
        front=[],
    )


def refuse_not_modelled(header: IterationLogHeader, ranks: int = 1) -> None:
    """`InputError` for a server that does what no law or simulation knows; `ranks`: the engines
    of data parallelism that wrote a log.
    """
    server = "this vLLM server"
    if ranks > 1:
        refuse(server, [ClassFound("data parallel", f"{ranks} engines of data parallelism")])
    if header.resolved is not None:
        refuse(server, of_resolved(header.resolved))
    mode = header.graph_mode
    if header.async_scheduling and mode and mode not in LAUNCHES:
        raise InputError(
            f"{server} has cudagraph_mode {mode}, which llmctl does not model",
            "profile it without that, or as engine openai, from outside",
        )


def refuse_unknown_experts(recipe: Recipe, model_type: str) -> None:
    """`InputError` for a mixture of experts if the recipe's config does not give their number."""
    config = text_config(recipe.model.config)
    if always_has_experts(model_type) and not experts_of(config)[0]:
        raise InputError(
            f"{model_type}: the law of a pass needs the number of its experts, and "
            "model.config gives none",
            "copy num_experts and num_experts_per_tok from its config.json, or make the recipe with"
            " llmctl recipe new",
        )


LOGGED = ("--scheduler-cls", "toolkit.backends.vllm.iterations.logged_scheduler")
ACCEPTED = 0.7  # of drafts after accepted ones only, while it is measured
STAGGER = 0.6  # of the time of a mix's decodes: its prompts arrive within it
POLL_S = 1e-3  # between two looks whether all rows beside prompts have their first tokens
LOAD_OUTPUTS = (8, 512)  # tokens; a longer output would outlast the load
LOAD_REQUESTS_MIN = 8
PACE_ROWS = 32  # of the larger decode step that shows the pace
ONCE = ("lone", "burst", "load")  # kinds with one sample in a visit, which has several requests


@dataclass(slots=True, frozen=True)
class ServerPace:
    """Seconds of a server's passes, roughly: `step_s` is a decode step of one row, `row_s` each
    further row in it, `token_s` each token of a prompt.
    """

    step_s: float
    row_s: float
    token_s: float

    def steps_s(self, rows: int) -> float:
        """Return the seconds of a decode step of `rows` rows."""
        return self.step_s + self.row_s * max(rows - 1, 0)


class VllmBench(ServerBench):
    """A running vLLM server, which writes its passes to `log`, open at its first line."""

    def __init__(self, recipe: Recipe, server: VllmServer, log: IO[bytes], ranks: int = 1) -> None:
        super().__init__(Endpoint(recipe, server.url), "vLLM")
        self._server = server
        self._log = log
        self._recipe = recipe
        self._header: IterationLogHeader = header_of(log.readline())
        refuse_not_modelled(self._header, ranks)
        refuse_unknown_experts(recipe, self._header.model_type)
        self.facts = facts_of(recipe, self._header)
        resolved = self._header.resolved
        self._window = 0
        if resolved is not None:
            self._window = read_tokens(resolved.groups, resolved.index_topk)
        self._endpoint.vocab_size = self.facts.vocab_size
        self._rng = random.Random(recipe.profile.seed)
        self._longest = recipe.serve.max_new_tokens
        self._step_s = 0.0  # of a decode step, roughly
        self._pace: ServerPace | None = None
        self._passes: list[TimedPass] = []  # of the last run
        self._steps: list[StepPoint] = []
        self._front: list[FrontPoint] = []
        self._sampler_s: float | None = None
        self._log.readlines()

    @property
    def steps(self) -> StepsProfile:
        return steps_of_header(self._header, self._recipe)

    def take_passes(self) -> Passes:
        passes = Passes(
            steps=self._steps,
            front=self._front,
            sampler_s=self._sampler_s,
        )
        self._steps = []
        self._front = []
        self._sampler_s = None
        return passes

    def prepare(self, points: Sequence[GridPoint]) -> None:
        """Find out how long passes take. Where they overlap, every length of a lone prompt runs
        once, too, so that what an engine compiles or allocates at first is in no timing.

        Raises `EngineError` when the server has ended.
        """
        if not {"prefill", "decode"} <= {point.kind for point in points}:
            return
        for point in points:
            if point.kind == "lone" and not point.batch_size:
                self._try(point)
        self._pace = pace_of(points, self._second_run)
        self.take_passes()

    def _second_run(self, point: GridPoint) -> list[TimedPass]:
        """The passes of a point's second run."""
        self._try(point)
        self._try(point)
        return self._passes

    def _try(self, point: GridPoint) -> None:
        """Run a point that need not succeed."""
        self._passes = []
        with contextlib.suppress(Unmeasurable):
            self._measure(point)
        if not self._server.running:
            raise self._server.died("during a measurement")

    def time(self, point: GridPoint, warmups: int) -> list[float]:
        """See `TimedEngine.time`. Raises `EngineError` when the server has ended, or `FAILURES_MAX`
        points fail in a row.
        """
        with self.counting_failures():
            try:
                if point.kind != "traffic":  # which has many requests
                    for _ in range(warmups):
                        self._measure(point)
                self.take_passes()
                once = point.kind in ONCE or point.tokens > STEPS
                samples = [self._measure(point) for _ in range(1 if once else VISIT_SAMPLES)]
            except Unmeasurable:
                if not self._server.running:
                    raise self._server.died("during a measurement") from None
                raise
        return samples

    def _measure(self, point: GridPoint) -> float:
        """One run of a point. A decode step is tried again where its rows were not all in one pass:
        a request may come late when the machine stands still for a moment.
        """
        for _ in range(TRIES - 1 if point.kind == "decode" else 0):
            with contextlib.suppress(NeverAtOnce):
                return self._measure_once(point)
        return self._measure_once(point)

    def _measure_once(self, point: GridPoint) -> float:
        if point.kind == "hit":
            return self._measure_hits(point)
        beside = point.kind in ("lone", "burst")
        requests = self._requests(point)
        names = names_of(requests)
        start_s = perf_counter()
        if beside:
            sent = self._beside(point, requests, names, start_s)
        else:
            sent = self._endpoint.at_times(requests, start_s, names=names)
        samples = self._runner.run(sent)
        logged = passes_of(self._log.readlines())
        passes = self._passes = timed(logged, self._window)
        if not passes:
            raise Unmeasurable("no pass was logged")
        steps = [one for one in passes if not one.shape.prefills]
        self._step_s = fmean(one.seconds for one in steps) if steps else self._step_s
        self._steps += points(passes)
        self._see_sampler(logged)
        if beside and not point.batch_size:  # every prompt came alone
            self._front += [
                FrontPoint(rows=1, prompt_tokens=point.length, seconds=seconds)
                for seconds in front_seconds(samples, names, logged, start_s)
                if seconds > 0.0
            ]
        elif not beside and point.kind not in ("traffic", "load"):
            self._front.append(_front(samples, passes, start_s))
        if point.kind != "decode":
            return passes[-1].end_s - passes[0].start_s
        whole = [one for one in steps if one.shape.decodes == point.batch_size]
        if not whole:
            raise NeverAtOnce(f"its rows never decoded all at once: raise {TOKENS} or {ROWS}")
        return fmean(one.seconds + (one.host_s or 0.0) for one in whole)

    async def _beside(
        self, point: GridPoint, requests: list[Sample], names: list[str], start_s: float
    ) -> list[Sample]:
        """Send prompts, one at a time or at once, while the first N of the requests decode."""
        count = point.batch_size
        send = self._endpoint.at_times
        rows = requests[:count]
        prompts = requests[count:]
        apart_s = APART * (self._pace.steps_s(count) if self._pace else self._step_s)
        decoding = asyncio.create_task(send(rows, start_s, names=names[:count]))
        try:
            while not decoding.done() and any(math.isnan(one.first_token_s) for one in rows):
                await asyncio.sleep(POLL_S)
            at_once = len(prompts) if point.kind == "burst" else 1
            for first in range(0, len(prompts), at_once):
                await asyncio.sleep(apart_s)
                sent_s = perf_counter() - start_s
                group = prompts[first : first + at_once]
                for one in group:
                    one.scheduled_s = sent_s
                place = count + first
                await send(group, start_s, names=names[place : place + at_once])
        finally:
            await decoding
        return requests

    def _see_sampler(self, logged: Sequence[LoggedPass]) -> None:
        """Keep the least time that a launch went on after its stamp."""
        shown_s = least_sampler_s(logged)
        if shown_s < (math.inf if self._sampler_s is None else self._sampler_s):
            self._sampler_s = shown_s

    def _measure_hits(self, point: GridPoint) -> float:
        """A prompt, then others that begin with it, one after another; seconds of such a pass. A
        model that vLLM keeps no prefixes of computes them whole, which is no failure.
        """
        beginning = self._endpoint.prompt(point.length)
        length = point.length + point.others
        for _ in range(1 + HITS):
            new = self._endpoint.prompt(point.others)
            assert isinstance(beginning, list)
            assert isinstance(new, list)
            self._runner.run(self._endpoint.first_token(beginning + new, length))
        passes = timed(passes_of(self._log.readlines()), self._window)
        self._steps += points(passes)
        hits = [one.seconds for one in passes if one.shape.prefill_cached >= point.length // 2]
        if not passes:
            raise Unmeasurable("no pass was logged")
        return fmean(hits or [one.seconds for one in passes])

    def _requests(self, point: GridPoint) -> list[Sample]:
        """The requests of a point, with their times. Requests of traffic have exponential gaps, and
        about N of them run at once.
        """
        length = point.length
        longest = self.facts.max_model_len
        if point.kind == "prefill":
            return [Sample(0.0, length, 1) for _ in range(point.batch_size)]
        if point.kind == "decode":
            steps = min(STEPS, longest - 1)
            prompt = prompt_around(length, steps, longest)
            return [Sample(0.0, prompt, steps) for _ in range(point.batch_size)]
        if point.kind in ("lone", "burst"):
            steps = min(BESIDE_STEPS, longest - MIX_STEPS)
            decoding = [Sample(0.0, MIX_STEPS, steps) for _ in range(point.batch_size)]
            return decoding + [Sample(0.0, length, 1) for _ in range(point.others)]
        if point.kind == "load":
            return self._load(point)
        if not self._step_s:
            self._measure(GridPoint("decode", point.batch_size, MIX_STEPS))
        if point.kind != "traffic":
            decoding = [Sample(0.0, MIX_STEPS, MIX_STEPS) for _ in range(point.batch_size)]
            gap_s = STAGGER * MIX_STEPS * self._step_s / point.others
            return decoding + [Sample((k + 1) * gap_s, length, 1) for k in range(point.others)]
        around = (length // 2 + 1, 2 * length)
        sizes = (8, self._longest)
        rng = self._rng
        prompts = [min(log_uniform(around, rng), longest - 1) for _ in range(point.others)]
        outputs = [min(log_uniform(sizes, rng), longest - prompt) for prompt in prompts]
        rate = point.batch_size / (fmean(outputs) * self._step_s)
        start_s = 0.0
        samples = []
        for prompt, output in zip(prompts, outputs, strict=True):
            samples.append(Sample(start_s, prompt, output))
            start_s += rng.expovariate(rate)
        return samples

    def _load(self, point: GridPoint) -> list[Sample]:
        """Requests that arrive with exponential gaps, for `LOAD_S`, at a share of the rate at which
        N rows of them would always decode.
        """
        if self._pace is None or not self._pace.step_s:
            raise Unmeasurable("how long its passes take is not known")
        rng = self._rng
        pace = self._pace
        rows = point.batch_size
        around = (point.length // 2 + 1, 2 * point.length)
        outputs = (LOAD_OUTPUTS[0], min(LOAD_OUTPUTS[1], self._longest))
        prompts_s = pace.token_s * log_uniform_mean(*around)
        request_s = prompts_s + log_uniform_mean(*outputs) * pace.steps_s(rows) / rows
        rate = point.others / 100.0 / request_s
        samples: list[Sample] = []
        at_s = 0.0
        while at_s < LOAD_S or len(samples) < LOAD_REQUESTS_MIN:
            prompt = log_uniform(around, rng)
            room = self.facts.max_model_len - prompt
            samples.append(Sample(at_s, prompt, min(log_uniform(outputs, rng), room)))
            at_s += rng.expovariate(rate)
        return samples


def pace_of(points: Sequence[GridPoint], run: Callable[[GridPoint], list[TimedPass]]) -> ServerPace:
    """The pace of a server by four runs: prompts of few and of many tokens, decode steps of few and
    of more rows. `run` gives the passes of a point's run.
    """
    prefills = sorted(
        (point for point in points if point.kind == "prefill"),
        key=lambda point: (point.batch_size, point.length),
    )
    alone = [point for point in prefills if point.batch_size == prefills[0].batch_size]
    decodes = sorted(
        (point for point in points if point.kind == "decode"),
        key=lambda point: (point.length, point.batch_size),
    )
    first = decodes[0]
    several = [
        point for point in decodes if point.length == first.length and point.batch_size <= PACE_ROWS
    ]
    chunks = [_chunks(run(point)) for point in (alone[0], alone[-1])]
    (few, few_s, few_passes), (many, many_s, many_passes) = chunks
    steps_s = []
    for point in (several[0], several[-1]):
        passes = run(point)
        steps = [one.seconds + (one.host_s or 0.0) for one in passes if not one.shape.prefills]
        steps_s.append(fmean(steps) if steps else 0.0)
    return ServerPace(
        step_s=steps_s[0],
        row_s=max(steps_s[1] - steps_s[0], 0.0)
        / max(several[-1].batch_size - several[0].batch_size, 1),
        token_s=max(many_s - few_s * many_passes / few_passes, 0.0) / max(many - few, 1),
    )


def _chunks(passes: Sequence[TimedPass]) -> tuple[int, float, int]:
    """Tokens, seconds and number of the passes with chunks, at least one."""
    with_chunks = [one for one in passes if one.shape.prefills]
    tokens = sum(one.shape.prefill_tokens for one in with_chunks)
    return tokens, sum(one.seconds for one in with_chunks), max(len(with_chunks), 1)


class NeverAtOnce(Unmeasurable):
    """The rows of a decode step never decoded in the same pass."""


def _front(samples: list[Sample], passes: list[TimedPass], start_s: float) -> FrontPoint:
    """The time outside the passes: of one request before its first token, of several at the end."""
    rows = len(samples)
    prompt = samples[0].prompt_tokens
    if rows == 1:
        first_end_s = next(one.end_s for one in passes if _emits(one, prompt))
        seconds = samples[0].first_token_s - samples[0].sent_s - (first_end_s - passes[0].start_s)
    else:
        seconds = max(one.last_token_s for one in samples) + start_s - passes[-1].end_s
    return FrontPoint(rows=rows, prompt_tokens=prompt, seconds=max(seconds, 0.0))


def _emits(one: TimedPass, prompt: int) -> bool:
    """Whether a pass of a single request ends its prompt."""
    shape = one.shape
    if not shape.prefills:
        return False
    # Each of its tokens attends to the cached ones and, on average, to half of the pass.
    cached = shape.prefill_attended / shape.prefill_tokens - shape.prefill_tokens / 2
    return round(cached + shape.prefill_tokens) >= prompt


def facts_of(recipe: Recipe, header: IterationLogHeader) -> EngineFacts:
    """The facts as vLLM resolved them, from the log's header. With several groups of caches, a
    token's bytes are taken from the longest request.
    """
    capacity = header.blocks * header.block_tokens
    token_bytes = header.kv_bytes_per_token
    budget = capacity * token_bytes
    resolved = header.resolved
    if resolved is not None and not is_plain(resolved.groups):
        longest = header.max_model_len
        in_flight = resolved.max_in_flight_tokens
        capacity = logged_tokens(resolved.groups, header.blocks, longest, in_flight)
        budget = header.blocks * resolved.bytes_per_block
        token_bytes = budget // capacity
    return EngineFacts(
        engine="vllm",
        engine_version=header.version,
        model_type=header.model_type,
        parameters=0,
        dtype=header.dtype,
        device=header.device,
        threads=recipe.engine.threads,
        kv_bytes_per_token=token_bytes,
        kv_budget_bytes=budget,
        capacity_tokens=capacity,
        max_model_len=header.max_model_len,
        vocab_size=header.vocab_size,
        prefill_emits_token=True,
        max_rows=header.max_num_seqs,
        processor=processor() if header.device == "cpu" else "",
        tensor_parallel_size=recipe.engine.tensor_parallel_size,
    )


@contextlib.contextmanager
def vllm_bench(recipe: Recipe) -> Iterator[VllmBench]:
    """Yield a bench on a server of its own, with the recipe's flags and a prefix cache, which holds
    no prompt but where a point wants that: prompts are random. Raises as `vllm_server`.
    """
    refuse_recipe(recipe)
    with tempfile.TemporaryDirectory(prefix="llmctl-passes-") as name:
        path = Path(name) / "passes.jsonl"
        policy = recipe.policy
        if policy.name == POLICY:
            refuse_later(policy.parameters, vllm_version(recipe))
        flags = [*flags_of(policy.name, policy.parameters, prefix_caching=True), *LOGGED]
        if policy.name == POLICY:
            # of random prompts no draft would be accepted
            tokens = int(policy.parameters.get(DRAFTS, 0))
            rates = [ACCEPTED**k for k in range(1, tokens + 1)]
            if recipe.hardware.device == "cpu":  # there vLLM 0.32 has no made-up acceptance
                rates = []
            flags += draft_flags(recipe, policy.parameters, rates)
        model = saved_model(recipe.model, recipe.hardware)
        command = VllmCommand(recipe, model, recipe.name, flags, {ITERATIONS_VARIABLE: str(path)})
        with (
            vllm_server(command, quiet=True) as server,
            path.open("rb") as log,
            VllmBench(recipe, server, log, _ranks(path)) as bench,
        ):
            yield bench


def _ranks(path: Path) -> int:
    """How many engines of data parallelism wrote a log of passes; each does as it loads."""
    count = 1
    while log_of_rank(path, count).exists():
        count += 1
    return count
