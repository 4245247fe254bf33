"""The load generator: replays a trace against a server, in open loop, in closed loop by session, or
at a fixed concurrency.

Requests are sent at the trace's times whatever the server does, and latencies count from these
times, so that a server cannot hide a stall by slowing the client down. In a trace with sessions
this holds for first turns. A later turn is sent when the turn before has ended and the client's
think time is over; its latency counts from then. At a fixed concurrency the next request of the
trace is sent when any one has ended, and its latency counts from then. `probe_dialect` and
`limits_of` find which requests a server takes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.endpoints.load import INTERRUPTED, Sample, heartbeat, load_client, send_timed
from toolkit.endpoints.target import FULL, Dialect, Target, learn
from toolkit.endpoints.upstream import Upstream
from toolkit.engine_traits import traits_of
from toolkit.files.bench import LATE_SHARE, LEAST_LATE_S, ClientTimes
from toolkit.files.plan import Plan
from toolkit.files.recipe import SAFE_VOCABULARY
from toolkit.interrupts import InterruptedReplayError, cancelling
from toolkit.metrics import Served, latencies
from toolkit.openai.requests import COMPLETIONS
from toolkit.traces.types import Trace
from toolkit.traces.windows import leave_out_longer, scale_lengths, scale_rate

Hashes = NDArray[np.uint64]


def mixed(values: Hashes) -> Hashes:
    """Each value hashed to 64 bits (the finalizer of splitmix64): neighbours become unrelated."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


STEP = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's, between the numbers that are hashed


class Prompts:
    """Makes the prompts of `trace`: random tokens.

    A block's tokens follow from its id and the seed alone, so prompts with the same leading block
    ids begin with the same tokens, in every run and for every tokenizer. Prompts share nothing
    else. In a closed loop, a turn's prompt is the prompt before, its answer, and new tokens.

    Token ids are from 0 to below `vocab_size`, and a prompt has exactly as many tokens as in the
    trace.
    """

    def __init__(self, trace: Trace, vocab_size: int, seed: int) -> None:
        self._trace = trace
        self._vocab_size = vocab_size
        self._seed = seed
        # With another seed, the same block ids have other tokens.
        self._salt = mixed(np.array([seed + 1], dtype=np.uint64) * STEP)

    def prompt(self, row: int) -> list[int]:
        """Return the prompt of a first turn."""
        tokens = int(self._trace.prompt_tokens[row])
        shared = self._trace.shared
        ids = shared.of(row) if shared else np.empty(0, dtype=np.int64)
        if shared is None or not len(ids):
            return [int(one) for one in self._rng(row).integers(0, self._vocab_size, tokens)]
        places = np.arange(shared.block_tokens)
        hashes = self._hashes(ids[:, None], places).reshape(-1)[:tokens]
        return [int(one) for one in hashes % np.uint64(self._vocab_size)]

    def next_prompt(self, row: int, before: list[int], answered: Sample) -> list[int]:
        """Return the prompt of a later turn: the prompt `before`, its answer, and new tokens up to
        the trace's length (none if the two are longer).

        Random tokens stand for an answer without token ids.
        """
        rng = self._rng(row)
        wanted = int(self._trace.prompt_tokens[row])
        answer = answered.answer_ids
        if len(answer) != answered.output_tokens:
            answer = rng.integers(0, self._vocab_size, answered.output_tokens).tolist()
        left = max(wanted - len(before) - len(answer), 0)
        return [*before, *answer, *rng.integers(0, self._vocab_size, left).tolist()]

    def _rng(self, row: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, row])

    def _hashes(self, ids: NDArray[np.int64], places: NDArray[np.int64]) -> Hashes:
        """The hashes of places in blocks; the shapes of both broadcast."""
        of_block = mixed(ids.astype(np.uint64) * STEP + self._salt)
        return mixed(of_block + (places.astype(np.uint64) + np.uint64(1)) * STEP)


DEFAULT_LIMIT = 256  # output tokens, as in recipes
END_AFTER = b"llmctl_end_after"  # part of the refusal of a server that rejects this field
PREPARED = 2000  # requests made before the clock starts: making them takes the machine's CPU

Lengths = Literal["hidden", "given"]
# called with a title and a count; gives advance()
Progress = Callable[[str, int], AbstractContextManager[Callable[..., None]]]


@dataclass(slots=True, frozen=True)
class LoadSpec:
    """How a trace becomes requests.

    With `lengths` 'hidden', a request's max_tokens is its client's limit (`max_new_tokens` where
    the trace has none), and only the engine gets the output length. With 'given', max_tokens is
    the output length, so the scheduler knows it.

    `concurrency`: the number of requests that run at once, in the trace's order. 0: they are sent
    at the trace's times.
    """

    lengths: Lengths
    max_new_tokens: int
    vocab_size: int
    timeout_s: float = 600.0
    seed: int = 0
    dialect: Dialect = FULL
    concurrency: int = 0


@dataclass(slots=True, frozen=True)
class Replay:
    """The outcome of each request, in the trace's order, and whether the replay was interrupted.
    Times count from `start_s` of the performance counter.

    `beats_late_s` is how late the client came to its timers (`heartbeat`). With `tls`, connections
    have a handshake.
    """

    samples: list[Sample]
    interrupted: bool
    start_s: float = 0.0
    beats_late_s: list[float] = field(default_factory=list)
    tls: bool = False


def probe_dialect(
    target: Target, lengths: Lengths | None, max_tokens: int
) -> tuple[Lengths, Dialect]:
    """How the server takes a trace's lengths, found with a few requests of one token each.

    Where `lengths` is None they are hidden if the server allows it: llmctl's own does with
    `--allow-end-after`. Raises `InputError` with the server's own message where it refuses.
    """
    if lengths == "given" or (lengths is None and not target.own):
        return "given", learn(target)
    fields = FULL.request(target.model, [1], max_tokens, end_after=1, stream=False)
    status, body = target.ask(COMPLETIONS, fields)
    if status == 200:
        return "hidden", FULL
    if END_AFTER not in body:
        raise target.refusal(COMPLETIONS, status, body)
    if lengths is None:
        return "given", learn(target)
    hint = "start it with: llmctl serve --allow-end-after; or leave out --lengths hidden"
    raise target.refusal(COMPLETIONS, status, body, hint)


class LengthLimits(NamedTuple):
    """Limits of requests, in tokens.

    `own`: the server runs one of our engines, which has a limit of outputs. Others, such as vLLM,
    have none but the context.
    """

    context: int | None  # prompt + output; None: the server does not say
    output: int
    vocabulary: int
    own: bool = True


def limits_of(plan: Plan | None, target: Target) -> LengthLimits:
    """Return the plan's limits, else the server's, else limits that any server accepts."""
    if plan is not None:
        model = plan.recipe.model
        serve = plan.recipe.serve
        engine = plan.fit.engine
        output = serve.max_new_tokens
        own = not traits_of(plan.recipe.engine.name).server
        return LengthLimits(model.max_model_len, output, engine.vocab_size, own)
    context = target.max_model_len
    usual = DEFAULT_LIMIT if context is None else min(DEFAULT_LIMIT, context // 2)
    return LengthLimits(context, usual, SAFE_VOCABULARY, target.own)


def fitted(trace: Trace, limits: LengthLimits, rate: float | None) -> Trace:
    """The trace at the given rate in requests per second, with requests that the server accepts:
    of our own engines' with scaled lengths, of another's without longer ones.
    """
    if limits.context is not None:
        fit = scale_lengths if limits.own else leave_out_longer
        trace = fit(trace, limits.context, limits.output)
    return trace if rate is None else scale_rate(trace, rate)


def run(target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]) -> Replay:
    """Replay `trace` from start to end; `on_done` is called as each request ends.

    Ctrl-C ends it early: an unanswered request then has the failure 'interrupted' or 'not sent'.
    """
    with cancelling(), asyncio.Runner() as runner:  # asyncio's own loop: `toolkit.endpoints.load`
        return runner.run(replay(target, trace, load, on_done))


def run_whole(target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]) -> Replay:
    """As `run`; raises `InterruptedReplayError` where Ctrl-C ended it early."""
    whole = run(target, trace, load, on_done)
    if whole.interrupted:
        raise InterruptedReplayError
    return whole


def served(samples: Sequence[Sample]) -> Served:
    """The samples as arrays for `toolkit.metrics`."""
    return Served(
        arrival_s=np.array([one.scheduled_s for one in samples]),
        first_token_s=np.array([one.first_token_s for one in samples]),
        finish_s=np.array([one.last_token_s for one in samples]),
        output_tokens=np.array([one.output_tokens for one in samples], dtype=np.int64),
        max_gap_s=np.array([one.max_gap_s for one in samples]),
        ok=np.array([not one.failure for one in samples], dtype=np.bool_),
    )


@contextmanager
def before_others() -> Iterator[None]:
    """Give this thread priority over ordinary ones, where the system allows it (Linux, as root).

    The client mostly sleeps. Where it shares a core with a server that polls, Linux may let it wait
    for hundreds of milliseconds once its session has used its share. Now and then, requests and
    readings would be late by as much, which no warm-up foresees.
    """
    try:
        usual = os.sched_getscheduler(0), os.sched_getparam(0)
        # threads and processes that it starts are ordinary ones
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except (AttributeError, OSError):  # another system, or without the right to do so
        usual = None
    try:
        yield
    finally:
        if usual is not None:
            os.sched_setscheduler(0, *usual)


async def replay(
    target: Target, trace: Trace, load: LoadSpec, on_done: Callable[[], None]
) -> Replay:
    """`run` on the caller's event loop; cancelling the task interrupts it."""
    samples = [Sample(at_s, prompt, output) for at_s, prompt, output, _, _ in trace.rows()]
    interrupted = False
    async with aclosing(load_client(target)) as server:
        sender = _Sender(server, target, trace, load, samples, on_done)
        with before_others(), heartbeat() as beats_late_s:
            try:
                await sender.send_all()
            except asyncio.CancelledError:
                interrupted = True
                await sender.cancel()
    tls = target.url.startswith("https:")
    return Replay(samples, interrupted, sender.start_s, beats_late_s, tls)


NOT_CONTINUED = "the turn before failed"


class _Sender:
    """Makes requests and sends them. Its clock starts at 0 in `send_all`."""

    def __init__(
        self,
        server: Upstream,
        target: Target,
        trace: Trace,
        load: LoadSpec,
        samples: Sequence[Sample],
        on_done: Callable[[], None],
    ) -> None:
        self._server = server
        self._target = target
        self._load = load
        self._samples = samples
        self._on_done = on_done
        self._limits = trace.max_tokens.tolist()
        self._priorities = trace.priorities
        self._prompts = Prompts(trace, load.vocab_size, load.seed)
        self.start_s = 0.0
        self._next: dict[int, int] = {}  # the row of the next turn
        self._think_s: list[float] = []
        self._sessions: list[int] = []  # of each row, as the simulator names them
        self._firsts = list(range(len(samples)))  # the rows of first turns
        if trace.sessions is not None:
            self._sessions = trace.sessions.first.tolist()
            later = np.flatnonzero(trace.sessions.previous >= 0)
            before = trace.sessions.previous[later]
            self._next = dict(zip(before.tolist(), later.tolist(), strict=True))
            self._think_s = trace.sessions.think_s.tolist()
            self._firsts = np.flatnonzero(trace.sessions.previous < 0).tolist()
        self._prepared = deque(self._make_first(row) for row in self._firsts[:PREPARED])
        self._running: set[asyncio.Task[None]] = set()

    def clock(self) -> float:
        return time.perf_counter() - self.start_s

    async def send_all(self) -> None:
        """Send every request in time, and wait for the ends."""
        self.start_s = time.perf_counter()
        load = self._load
        if load.concurrency:
            rows = iter(self._firsts)
            for _ in range(min(load.concurrency, len(self._firsts))):
                self._running.add(asyncio.create_task(self._place(rows)))
            await asyncio.gather(*self._running)
            return
        for row in self._firsts:
            prompt = self._first(row)
            await asyncio.sleep(self._samples[row].scheduled_s - self.clock())
            task = asyncio.create_task(self._session(row, prompt))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        while self._running:
            await asyncio.wait(self._running)

    async def cancel(self) -> None:
        """Interrupt the requests that run."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _first(self, row: int) -> list[int]:
        """Write the request of a first turn; its prompt, if a later one will need it."""
        return self._prepared.popleft() if self._prepared else self._make_first(row)

    def _make_first(self, row: int) -> list[int]:
        prompt = self._prompts.prompt(row)
        self._write(row, prompt)
        return prompt if row in self._next else []

    def _write(self, row: int, prompt: list[int]) -> None:
        load = self._load
        sample = self._samples[row]
        if load.lengths == "hidden":
            tokens = self._limits[row] or load.max_new_tokens
            end_after = sample.wanted_tokens
        else:
            tokens = sample.wanted_tokens
            end_after = None
        sample.keeps_answer = row in self._next
        fields = load.dialect.request(
            self._target.model,
            prompt,
            tokens,
            end_after=end_after,
            priority=self._priorities[row],
            keep=sample.keeps_answer,
        )
        session = str(self._sessions[row]) if self._sessions else ""
        sample.write(self._target, fields, session)

    async def _place(self, rows: Iterator[int]) -> None:
        """Take the next of `rows` and send its request, one after the other."""
        for row in rows:
            sample = self._samples[row]
            sample.scheduled_s = self.clock()
            self._first(row)
            await self._send(sample)
            if sample.failure == INTERRUPTED:
                return

    async def _send(self, sample: Sample) -> None:
        await send_timed(self._server, sample, self.clock, self._load.timeout_s)
        self._on_done()

    async def _session(self, row: int, prompt: list[int]) -> None:
        """Send a request, then the later turns of its session in order, until one fails."""
        while True:
            sample = self._samples[row]
            await self._send(sample)
            after = self._next.get(row)
            if after is None or sample.failure == INTERRUPTED:
                return
            if sample.failure:
                left: int | None = after
                while left is not None:
                    self._samples[left].scheduled_s = self.clock()
                    self._samples[left].failure = NOT_CONTINUED
                    self._on_done()
                    left = self._next.get(left)
                return
            row = after
            before = sample
            prompt = self._prompts.next_prompt(row, prompt, before)
            before.answer_ids = []
            sample = self._samples[row]
            sample.scheduled_s = before.last_token_s + self._think_s[row]
            sample.prompt_tokens = len(prompt)
            self._write(row, prompt)
            await asyncio.sleep(sample.scheduled_s - self.clock())


BEATS_MIN = 100  # in a shorter replay the 99th percentile is one moment's


def client_times(replay: Replay, sla: Mapping[str, float]) -> ClientTimes | None:
    """How late the client itself was, and whether that is too much beside what it measured.

    A replay of less than `BEATS_MIN` beats is too short to be judged. None where no request was
    served: there is nothing to compare with.
    """
    seconds = latencies(served(replay.samples))
    if not len(seconds["ttft"]):
        return None
    means_s = [float(seconds["ttft"].mean())]
    if len(seconds["mtpot"]) and any(target.startswith(("mtpot", "itl")) for target in sla):
        means_s.append(float(seconds["mtpot"].mean()))
    limit_s = max(LATE_SHARE * min(means_s), LEAST_LATE_S)
    connects_s = np.array([one.connected_s - one.scheduled_s for one in replay.samples])
    connects_s = connects_s[~np.isnan(connects_s)]
    fastest_s = float(connects_s.min()) if len(connects_s) else 0.0
    beat_s = _p99(replay.beats_late_s)
    send_s = _p99([one.sent_s - one.scheduled_s for one in replay.samples])
    connect_s = _p99(connects_s)
    connect_late_s = 0.0 if replay.tls else connect_s - fastest_s
    enough = len(replay.beats_late_s) >= BEATS_MIN
    return ClientTimes(
        beats=len(replay.beats_late_s),
        beat_late_p99_s=beat_s,
        beat_late_max_s=max(replay.beats_late_s, default=0.0),
        send_late_p99_s=send_s,
        connect_p99_s=connect_s,
        connect_late_p99_s=connect_late_s,
        limit_s=limit_s,
        late=enough and max(beat_s, send_s, connect_late_s) > limit_s,
    )


def _p99(values_s: Sequence[float] | NDArray[np.float64]) -> float:
    """The 99th percentile without NaN; 0 of nothing."""
    known = np.asarray(values_s)
    known = known[~np.isnan(known)]
    return float(np.percentile(known, 99)) if len(known) else 0.0
