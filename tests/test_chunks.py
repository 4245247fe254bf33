"""Prefills in chunks: the simulated worker, the engine and the scheduler agree on which job joined
after which step.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llmctl_fake import FakeConfig, FakeEngine

from toolkit.engines.protocol import SamplingParams
from toolkit.estimators.laws import LinearLaw, LinearSwap
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.profile import EngineFacts
from toolkit.laws.passes import PassLaw
from toolkit.sched.eventlog import RecordingScheduler, from_lines, replay, to_line
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Pass, PassResult, Request, Worker
from toolkit.server.driver import WorkerRows
from toolkit.server.live import LiveRequest
from toolkit.sim.continuous import ContinuousWorker
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.slab import SlabWorker
from toolkit.sim.world import World

CAPACITY = 400
LIMIT = 30
# Coefficients that are multiples of powers of two: no sum is rounded, so the same time is the same
# number.
PREFILL = PassLaw({"token": 2**-14, "row": 2**-10, "length": 2**-13, "pass": 2**-6})
DECODE = PassLaw({"cached": 2**-16, "row": 2**-12, "length": 2**-14, "pass": 2**-7})
LAW = LinearLaw(PREFILL, DECODE, prefill_emits_token=True)
SWAP = LinearSwap(2**-7, 2**12, 2**12)

CASES = {
    "past-future": ("past-future", {}),
    "aggressive": ("aggressive", {"watermark": 1.0, "interval_steps": 3}),
    "conservative": (
        "conservative",
        {"overcommit": 3.0, "interval_steps": 1, "max_prefill_tokens": 100},
    ),
    "fcfs": ("fcfs", {"max_batch_size": 3}),
    "mlfq": (
        "mlfq",
        {"quantum_s": 2**-4, "starvation_s": 1.0, "max_batch_size": 3, "interval_steps": 5},
    ),
    "mlfq, reactive": ("mlfq", {"quantum_s": 2**-5, "swap": "reactive"}),
    "baton": ("baton", {"max_batch_size": 4}),
    "baton, scaling": ("baton", {"memory_threshold": 0.6, "headroom_steps": 1}),
    "past-future-sla": ("past-future-sla", {"ttft_s": 1.0, "mtpot_s": 0.05}),
    "slice-continuous": ("slice-continuous", {"slice_tokens": 8, "interval_steps": 4}),
}


class Clock:
    now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class LawfulEngine(FakeEngine):
    """A fake engine with the times of a law, on a clock of its own."""

    def __init__(self, clock: Clock) -> None:
        facts = EngineFacts.model_construct(engine="fake", capacity_tokens=CAPACITY)
        super().__init__(facts, FakeConfig(eos_one_in=0))
        self.wait = clock.sleep

    def prefill_s(self, batch_size: int, length: int) -> float:
        return LAW.prefill_s(batch_size, length)

    def decode_s(self, batch_size: int, length: int) -> float:
        return LAW.decode_s(batch_size, length - 1, 1)


def active(name: str, prompt: int, output: int) -> LiveRequest:
    return LiveRequest(name, (7,) * prompt, output, SamplingParams(), None, None)  # type: ignore[arg-type]


class Both:
    """The simulated worker, and the fake engine that runs the same rounds as a server would have
    it.
    """

    def __init__(
        self, simulated: ContinuousWorker, prompts: dict[str, int], outputs: dict[str, int]
    ) -> None:
        self.simulated = simulated
        self.clock = Clock()
        self.engine = LawfulEngine(self.clock)
        self.kept = WorkerRows()
        self.lives = {name: active(name, prompts[name], outputs[name]) for name in prompts}
        self.scheduler: Scheduler
        self.cancels: dict[int, str] = {}  # at the start of the so-manieth round
        self.results: list[PassResult] = []

    def run(self, batch: Pass, now_s: float) -> float:
        self.batch = batch
        self.interrupted_s = float("inf")
        self.plan = self.kept.begin(batch, [self.lives[job.request_id] for job in batch.jobs])
        moves = batch.moves
        self.clock.now_s = now_s
        ends_s = self.simulated.run(batch, now_s)
        if moves and not moves.overlap:
            self.clock.now_s = self.simulated._begun_s
        if len(self.results) in self.cancels:
            self.scheduler.cancel(self.cancels.pop(len(self.results)), now_s)
        return ends_s

    def interrupt(self, now_s: float) -> float:
        self.interrupted_s = now_s
        return self.simulated.interrupt(now_s)

    def finish(self) -> PassResult:
        expected = self.simulated.finish()

        def on_step(step):
            for number, token in zip(step.rows, step.tokens, strict=True):
                live = self.kept.receive(number, 1, ended=number in dict(step.ended))
                live.tokens.append(token)
            return self.clock.now_s < self.interrupted_s

        result = self.kept.kept(self.batch, self.engine.run(self.plan, on_step))
        assert (result.steps, set(result.ended)) == (expected.steps, set(expected.ended))
        assert self.joined(result) == self.joined(expected)
        self.results.append(result)
        return result

    def joined(self, result: PassResult) -> set[tuple[str, int]]:
        """The step at which each job joined; if a result names none, all waiting jobs joined at
        once.
        """
        if result.joined is not None:
            return set(result.joined)
        prefilling = self.scheduler.workers[0].running.prefilling
        return {(job.request_id, 0) for job in prefilling}

    def check_counts(self) -> None:
        """What the scheduler takes residents to have is what they have."""
        residents = self.scheduler.workers[0].running
        for job in residents.jobs:
            generated = job.generated + residents.steps - job.joined
            assert generated == len(self.lives[job.request_id].tokens)
        assert residents.used == sum(residents.holds(job) for job in residents.jobs)


class Checked(RecordingScheduler):
    both: Both

    def complete(self, result, now_s):
        super().complete(result, now_s)
        self.both.check_counts()


def worker(slab: bool = False) -> Worker:
    joining = "embed" if slab else None
    return Worker(0, LAW, ZetaMemory(CAPACITY), swap=SWAP, host_tokens=1000, joining=joining)


def serve(
    case: str,
    chunk_tokens: int,
    lengths: list[tuple[float, int, int]],
    cancels: dict[int, str],
    slab: bool,
):
    """All requests under a policy; the ledger, both workers and the log."""
    name, parameters = CASES[case]
    policy = make_policy(name, parameters | {"chunk_tokens": chunk_tokens})
    requests = [Request(str(k), at_s, prompt, LIMIT) for k, (at_s, prompt, _) in enumerate(lengths)]
    ledger = Ledger(
        [request.arrival_s for request in requests], [output for _, _, output in lengths], 1
    )
    world = World(LAW, ZetaMemory(CAPACITY), 1, LIMIT, swap=SWAP, joining="embed")
    both = Both(
        (SlabWorker if slab else ContinuousWorker)(0, ledger, world),
        {request.request_id: request.prompt_tokens for request in requests},
        {request.request_id: lengths[k][2] for k, request in enumerate(requests)},
    )
    lines: list[bytes] = []
    scheduler = Checked(policy, [worker(slab)], lambda event: lines.append(to_line(event)))
    both.scheduler = scheduler
    both.cancels = dict(cancels)
    scheduler.both = both
    assert run(scheduler, requests, [both]) == []
    assert list(replay(from_lines(lines), Scheduler(policy, [worker(slab)]))) == []
    return ledger, both


arrivals = st.integers(0, 64).map(lambda k: k / 64)
workloads = st.lists(
    st.tuples(arrivals, st.integers(1, 150), st.integers(1, LIMIT)), min_size=1, max_size=14
)


@pytest.mark.slow
@given(
    lengths=workloads,
    case=st.sampled_from(sorted(CASES)),
    chunk_tokens=st.integers(1, 200),
    slab=st.booleans(),
    cancels=st.dictionaries(st.integers(0, 12), st.integers(0, 13).map(str), max_size=3),
)
def test_engine_simulator_and_scheduler_agree_on_every_round(
    lengths, case, chunk_tokens, slab, cancels
):
    lengths = sorted(lengths)
    ledger, both = serve(case, chunk_tokens, lengths, cancels, slab)
    for k, (_, _, output) in enumerate(lengths):
        if ledger.outcomes[k].ok:
            assert len(both.lives[str(k)].tokens) == output
    assert sum(each.ok for each in ledger.outcomes) >= len(lengths) - len(cancels)


@given(lengths=workloads, chunk_tokens=st.integers(8, 200), slab=st.booleans())
def test_no_running_row_waits_for_more_than_a_pass_and_a_step(lengths, chunk_tokens, slab):
    ledger, _ = serve("fcfs", chunk_tokens, sorted(lengths), {}, slab)
    passes = [
        LAW.pass_s(rows, 150 - chunk_tokens // rows, 150)
        for rows in range(1, 4)
        if chunk_tokens // rows < 150
    ]
    whole = [LAW.prefill_s(rows, min(chunk_tokens // rows, 150)) for rows in range(1, 4)]
    largest_s = max(each.max_gap_s for each in ledger.outcomes)
    assert largest_s <= max(passes + whole) + LAW.decode_s(3, 150 + LIMIT, 1)


def test_chunks_shorten_gaps_and_cost_the_newcomer_time():
    lengths = [(0.0, 4, 30), (2 / 64, 120, 5)]
    (whole, _), (chunked, _) = (
        serve("fcfs", chunk_tokens, lengths, {}, True) for chunk_tokens in (0, 15)
    )
    step_s = LAW.decode_s(2, 120 + LIMIT, 1)
    shorter_s = chunked.outcomes[0].max_gap_s
    longer_s = whole.outcomes[0].max_gap_s
    assert shorter_s <= LAW.pass_s(1, 105, 120) + step_s
    assert longer_s > LAW.prefill_s(1, 120) + LAW.decode_s(1, 4, 1) > shorter_s
    assert chunked.outcomes[1].first_token_s > whole.outcomes[1].first_token_s


class CrashError(Exception):
    """What ends an engine in the middle of a round."""


@given(
    prompts=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    later=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    chunk_tokens=st.integers(0, 40),
    first_steps=st.integers(1, 6),
    reports=st.integers(0, 12),
)
def test_a_worker_that_dies_amid_chunks_costs_no_token(
    prompts, later, chunk_tokens, first_steps, reports
):
    scheduler = Scheduler(
        make_policy("aggressive", {"chunk_tokens": chunk_tokens, "interval_steps": 1}), [worker()]
    )
    names = [str(k) for k in range(len(prompts) + len(later))]
    lives = {
        name: active(name, prompt, LIMIT)
        for name, prompt in zip(names, prompts + later, strict=True)
    }
    kept = WorkerRows()
    running = LawfulEngine(Clock())
    jobs = scheduler._jobs

    def submit(some):
        for name in some:
            scheduler.submit(Request(name, 0.0, len(lives[name].prompt), LIMIT), 0.0)

    def receive(step):
        for number, token in zip(step.rows, step.tokens, strict=True):
            kept.receive(number, 1, ended=False).tokens.append(token)

    def dies(step):
        nonlocal reports
        if not reports:
            raise CrashError
        reports -= 1
        receive(step)
        return True

    submit(names[: len(prompts)])
    (batch,) = scheduler.tick(0.0)
    batch.steps = min(batch.steps, first_steps)
    output = running.run(
        kept.begin(batch, [lives[job.request_id] for job in batch.jobs]),
        lambda step: receive(step) or True,
    )
    scheduler.complete(kept.kept(batch, output), 1.0)
    submit(names[len(prompts) :])
    (batch,) = scheduler.tick(1.0)
    batch.steps = min(batch.steps, 5)
    try:
        output = running.run(kept.begin(batch, [lives[job.request_id] for job in batch.jobs]), dies)
        result = kept.kept(batch, output)
    except CrashError:
        result = kept.crashed(batch)
    scheduler.complete(result, 2.0)
    if result.failure:
        assert {name: jobs[name].generated for name in names} == {
            name: len(lives[name].tokens) for name in names
        }
