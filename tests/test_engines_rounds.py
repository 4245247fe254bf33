"""The engine and the simulated worker do the same in each round: one scheduler drives both."""

import random
from collections import Counter

import pytest
from rounds import FREE, RoundDriver, rebatch_engine

from toolkit.engines.protocol import Row
from toolkit.estimators.laws import LinearSwap, bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, Joining, Moves, Request, RoundResult, Worker
from toolkit.sim.continuous import RoundSetup
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run
from toolkit.sim.slab import SlabWorker

LAW = bilinear_law((0.0, 0.0, 0.01, 1.0), (0.0, 0.0, 0.0, 1.0), prefill_emits_token=True)


SWAP = LinearSwap(0.5, 100.0, 200.0)
CAPACITY = 250
MOVES = {"pause", "resume", "swap_out", "swap_in"}


class Both:
    """The simulated worker, and an engine that runs the same rounds; their results must agree."""

    def __init__(self, simulated: SlabWorker, driver: RoundDriver) -> None:
        self.simulated = simulated
        self.driver = driver
        self.interrupted = False
        self.moved: Counter[str] = Counter()

    def run(self, batch: Batch, now_s: float) -> float:
        self.batch = batch
        self.interrupted = False
        return self.simulated.run(batch, now_s)

    def interrupt(self, now_s: float) -> float:
        self.interrupted = True
        return self.simulated.interrupt(now_s)

    def finish(self) -> RoundResult:
        batch = self.batch
        result = self.simulated.finish()
        # Time decides when a round is interrupted, so the engine gets the simulated number of
        # steps.
        steps = result.steps if self.interrupted else batch.steps
        moves = batch.moves or Moves()
        plan = {"evict": batch.evict, "pause": moves.pause, "resume": moves.resume}
        plan |= {"swap_out": moves.swap_out, "swap_in": moves.swap_in}
        named = {name: tuple(int(job.request_id) for job in jobs) for name, jobs in plan.items()}
        enter = tuple(int(job.request_id) for job in batch.jobs)
        output = self.driver.run(steps, enter=enter, overlap=moves.overlap, **named)
        assert (output.steps, set(output.ended)) == (result.steps, set(map(int, result.ended)))
        joined = (
            dict(result.joined or ())
            if result.joined is not None
            else dict.fromkeys(map(str, enter), 0)
        )
        assert {(str(number), steps) for number, steps in output.joined} == set(joined.items())
        assert output.padded_tokens <= CAPACITY
        self.moved.update({name: len(numbers) for name, numbers in named.items()})
        return result


@pytest.mark.parametrize(
    ("changes", "joining"),
    [({}, "embed"), ({"joining": "shape"}, "shape")],
)
def test_the_facts_say_whether_memory_is_a_slab(
    changes: dict[str, str], joining: Joining | None
) -> None:
    assert rebatch_engine(**changes).facts.joining == joining


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "parameters", "joining", "expected_moves"),
    [
        ("fcfs", {}, "embed", set()),
        ("conservative", {"interval_steps": 3}, "embed", set()),
        ("aggressive", {"watermark": 1.0}, "embed", {"evict"}),
        ("aggressive", {"watermark": 1.0}, "shape", set()),
        ("past-future", {}, "embed", set()),
        ("mlfq", {"quantum_s": 3.0, "starvation_s": 60.0, "max_batch_size": 3}, "embed", MOVES),
        ("mlfq", {"quantum_s": 2.0, "swap": "reactive"}, "embed", MOVES),
        ("mlfq", {"quantum_s": 2.0}, "embed", MOVES),
        ("mlfq", {"quantum_s": 2.0}, "shape", MOVES),
        ("baton", {"max_batch_size": 4}, "embed", set()),
        (
            "baton",
            {"memory_threshold": 0.6, "headroom_steps": 1, "max_prefill_tokens": 40},
            "embed",
            MOVES - {"pause"},
        ),
        ("baton", {"headroom_steps": 1, "memory_threshold": 0.6}, "shape", MOVES - {"pause"}),
    ],
)
def test_the_engine_does_what_the_simulated_worker_does(
    policy: str, parameters: dict[str, object], joining: Joining, expected_moves: set[str]
) -> None:
    rng = random.Random(0)
    lengths = [(rng.randint(1, 60), rng.randint(1, 30)) for _ in range(30)]
    requests = [Request(str(k), 4.0 * k, prompt, 30) for k, (prompt, _) in enumerate(lengths)]
    rows = [
        Row(str(k), (k,) * prompt, 0, output, FREE) for k, (prompt, output) in enumerate(lengths)
    ]
    worker = Worker(0, LAW, ZetaMemory(CAPACITY), swap=SWAP, host_tokens=5000, joining=joining)
    ledger = Ledger(
        [request.arrival_s for request in requests], [output for _, output in lengths], 1
    )
    setup = RoundSetup(LAW, swap=SWAP, joining=joining, capacity_tokens=CAPACITY)
    simulated = SlabWorker(0, ledger, setup)
    both = Both(simulated, RoundDriver(rebatch_engine(joining=joining), rows))
    assert run(Scheduler(make_policy(policy, parameters), [worker]), requests, [both]) == []
    assert [len(tokens) for tokens in both.driver.got] == [output for _, output in lengths]
    assert {name for name, count in both.moved.items() if count} == expected_moves
    assert (both.moved["evict"], both.moved["swap_out"]) == (ledger.evictions, ledger.swaps_out)
