"""A round means the same to the engine as to the simulated worker: one scheduler drives both, round by round."""

import random

import pytest
from rounds import FREE, Desk, rebatch_engine

from toolkit.engines.protocol import Row
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, Request, RoundResult, Worker
from toolkit.sim.continuous import RoundWorker
from toolkit.sim.ledger import Ledger
from toolkit.sim.loop import run

LAW = bilinear_law((0.0, 0.0, 0.01, 1.0), (0.0, 0.0, 0.0, 1.0), prefill_emits_token=True)


class Both:
    """The simulated worker, and an engine that runs the same rounds; they have to say the same of each."""

    def __init__(self, simulated: RoundWorker, desk: Desk) -> None:
        self.simulated = simulated
        self.desk = desk
        self.rounds = self.evictions = 0

    def run(self, batch: Batch, now_s: float) -> float:
        self.batch = batch
        return self.simulated.run(batch, now_s)

    def finish(self) -> RoundResult:
        batch, result = self.batch, self.simulated.finish()
        enter, evict = (tuple(int(job.request_id) for job in jobs) for jobs in (batch.jobs, batch.evict))
        output = self.desk.run(batch.steps, enter=enter, evict=evict, stop_every=batch.stop_every)
        assert (output.steps, set(output.ended)) == (result.steps, set(map(int, result.ended)))
        assert output.joined == tuple((number, 0) for number, _ in output.joined)
        assert {number for number, _ in output.joined} == set(enter)
        self.rounds += 1
        self.evictions += len(evict)
        return result

    def interrupt(self, now_s: float) -> float:
        raise AssertionError("all requests are there from the start")


@pytest.mark.parametrize(
    ("policy", "parameters"),
    [
        ("fcfs", {}),
        ("conservative", {"interval_steps": 3}),
        ("aggressive", {"watermark": 1.0}),
        ("past-future", {}),
    ],
)
def test_the_engine_does_what_the_simulated_worker_does(policy: str, parameters: dict[str, object]) -> None:
    rng = random.Random(policy)
    lengths = [(rng.randint(1, 60), rng.randint(1, 30)) for _ in range(30)]
    requests = [Request(str(k), 0.0, prompt, 30) for k, (prompt, _) in enumerate(lengths)]
    rows = [Row(str(k), (k,) * prompt, 0, output, FREE) for k, (prompt, output) in enumerate(lengths)]
    scheduler = Scheduler(make_policy(policy, parameters), [Worker(0, LAW, ZetaMemory(300))])
    ledger = Ledger([0.0] * 30, [output for _, output in lengths], 1)
    simulated = RoundWorker(0, LAW, ledger, {request.request_id: k for k, request in enumerate(requests)})
    both = Both(simulated, Desk(rebatch_engine(), rows))
    assert run(scheduler, requests, [both]) == []
    assert [len(tokens) for tokens in both.desk.got] == [output for _, output in lengths]
    assert both.evictions == ledger.evictions
    assert (both.evictions > 0) == (policy == "aggressive")
