"""The engines of a data-parallel server: what lock step, waves and vLLM's balancer make of them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import llmctl
from paged import FLAT, LAW, pass_by_pass, same_times, trace_of, world
from test_sim_replicas import made_up

from toolkit.backends.vllm.conformance.kinds.ranks import passes_of_ranks
from toolkit.catalogue.resolved import Resolved
from toolkit.errors import InputError
from toolkit.estimators.steps import StepShape
from toolkit.files.fit import Fit
from toolkit.files.io import read_file, shipped_fit
from toolkit.routing.rank_balancer import Coordinator, RankBalancer
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sim.api import SimResult, simulate
from toolkit.sim.paged_engine import PagedEngine
from toolkit.sim.ranks import DataParallel, Waves, padded, sync_rule
from toolkit.sim.world import parallel_of
from toolkit.traces.types import Trace

DATA = Path(__file__).parent / "data"
POLICY = VllmPolicy(max_num_seqs=6, max_num_batched_tokens=64)


def dummies_cost_nothing(shapes: Sequence[StepShape]) -> float:
    """A pass that only real rows make longer: of the slowest engine."""
    real = [shape for shape in shapes if shape.decode_cached or shape.prefills]
    return max((LAW.gpu_s(shape) for shape in real), default=0.0)


def same(one: SimResult, other: SimResult) -> None:
    same_times(one, other, rtol=1e-12, atol=1e-12)
    assert one.served.ok.all()
    for name in ("rounds", "batches", "evicted_percent", "peak_memory_percent", "itl_mean_s"):
        assert one.counters[name] == pytest.approx(other.counters[name], rel=1e-12)
    assert one.counters.get("hit_tokens") == other.counters.get("hit_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("lock_step", [False, True])
def test_one_engine_serves_as_an_engine_without_others(
    ahead: bool, shares: bool, lock_step: bool
) -> None:
    one = DataParallel(
        1, lock_step=lock_step, sync_passes=1, graph_tokens=0, pass_s=dummies_cost_nothing
    )
    evicted = 0.0
    for seed in range(6):
        trace = made_up(seed)
        trace = trace if shares else replace(trace, shared=None)
        alone = world(PagedEngine(LAW, 25, 4, ahead))
        found = simulate(trace, POLICY, replace(alone, parallel=one))
        same(found, simulate(trace, POLICY, alone))
        evicted += found.counters["evicted_percent"]
    assert evicted > 0


def served(trace: Trace, parallel: DataParallel, *, ahead: bool = False, law=FLAT) -> SimResult:
    engine = PagedEngine(law, 25, 4, ahead)
    return simulate(trace, POLICY, replace(world(engine), parallel=parallel))


def test_a_request_in_the_tail_of_a_wave_waits_for_a_dummy_pass() -> None:
    """Passes of a second: the first request's two, then dummies up to the fourth."""
    trace = trace_of([(0.0, 4, 2), (2.5, 4, 1), (7.5, 4, 1)])
    waits = DataParallel(2, sync_passes=4)
    found = served(trace, waits)
    # the second one's pass is the fourth, and ends the wave
    assert found.served.first_token_s.tolist() == [1.0, 4.0, 8.5]
    # of the first wave: two beside the first request, two in the third pass, one in the fourth;
    # the third request ends with the first pass of its wave, where all agree
    assert found.counters["dummy_passes"] == 2 + 2 + 1 + 1
    later = served(trace, replace(waits, syncs_first=False))
    assert later.served.first_token_s.tolist() == [1.0, 4.0, 8.5]
    assert later.counters["dummy_passes"] == 2 + 2 + 1 + 1 + 3 * 2
    alone = served(trace, replace(waits, lock_step=False))
    assert alone.served.first_token_s.tolist() == [1.0, 3.5, 8.5]
    assert "dummy_passes" not in alone.counters


def test_a_pass_takes_as_long_as_the_slowest_engine() -> None:
    trace = trace_of([(0.0, 40, 2), (0.0, 4, 2)])
    parallel = DataParallel(2, graph_tokens=0)
    found = served(trace, parallel, law=LAW)
    chunk = LAW.step_s(StepShape(0, 0, 1, 40, 40 * 20))
    assert found.served.first_token_s.tolist() == pytest.approx([chunk - LAW.after_s(1)] * 2)
    last = chunk + LAW.forward_s(StepShape(1, 40))
    assert found.served.finish_s.tolist() == pytest.approx([last] * 2)


def test_engines_with_graphs_compute_as_many_tokens_as_the_largest() -> None:
    shapes = [StepShape(3, 300), StepShape(1, 900)]
    parallel = DataParallel(2, graph_tokens=8)
    longer = LAW.forward_s(shapes[1]) + 2 * LAW.token_s[0]
    assert LAW.forward_s(padded(shapes[1], 3)) == pytest.approx(longer)
    assert parallel.seconds(LAW, shapes, ahead=False) == pytest.approx(longer)
    eager = replace(parallel, graph_tokens=2)
    slowest = max(map(LAW.forward_s, shapes))
    assert eager.seconds(LAW, shapes, ahead=False) == slowest < longer


@pytest.mark.parametrize("ahead", [False, True])
def test_leaps_are_the_passes_one_by_one(ahead: bool) -> None:
    rng = np.random.default_rng(3)
    rows = [(at, *rng.integers(2, 40, 2)) for at in np.cumsum(rng.exponential(0.02, 60))]
    parallel = DataParallel(3, servers=2, graph_tokens=4)
    found = served(trace_of(rows), parallel, ahead=ahead, law=LAW)
    waves = found.counters["dummy_passes"]
    with pass_by_pass() as patch:
        patch.setattr(Waves, "until_sync", 1)
        one_by_one = served(trace_of(rows), parallel, ahead=ahead, law=LAW)
    same(found, one_by_one)
    assert found.counters["evicted_percent"] > 0
    assert waves == one_by_one.counters["dummy_passes"] > 0


def test_a_wave_ends_where_all_agree() -> None:
    waves = Waves(4, syncs_first=True)
    waves.begin()
    waves.passed(unfinished=True)
    assert waves.until_sync == 3
    for unfinished in (False, False):
        waves.passed(unfinished=unfinished)
    assert waves.running
    waves.passed(unfinished=False)
    assert (waves.running, waves.number, waves.step) == (False, 1, 0)
    assert sync_rule((0, 29)) == (32, False)
    assert sync_rule((0, 33)) == (16, True)


def test_the_balancer_counts_its_own_requests_between_publications() -> None:
    balancer = RankBalancer(2)
    assert [balancer.choose() for _ in range(4)] == [0, 1, 0, 1]
    balancer.hear([(0, 9, 0.1), (0, 1, 0.1)])
    assert [balancer.choose() for _ in range(3)] == [1, 1, 1]
    balancer.hear([(4, 0, 1.0), (0, 12, 1.0)])
    assert balancer.choose() == 1, "four waiting ones of a full cache count four times"


def test_the_coordinator_publishes_figures_of_one_pass() -> None:
    coordinator = Coordinator(2, lock_step=True)
    coordinator.publish()
    coordinator.tell(0, (1, 0, 0.0), (0, 0), 3.0)
    assert coordinator.due_s == 3.05
    coordinator.tell(0, (0, 1, 0.2), (0, 1), 3.02)
    assert coordinator.due_s == 3.02, "the figures before this pass are complete"
    assert coordinator.publish() == [(1, 0, 0.0), (0, 0, 0.0)]
    assert coordinator.due_s == pytest.approx(3.12)
    assert coordinator.publish() == [(0, 1, 0.2), (0, 0, 0.0)]


def test_what_is_not_modelled_is_refused() -> None:
    trace = trace_of([(0.0, 4, 2)])
    engine = PagedEngine(FLAT, 25, 4)
    several = replace(world(engine), parallel=DataParallel(2), workers=2)
    with pytest.raises(InputError):
        simulate(trace, POLICY, several)
    one = replace(several, workers=1)
    with pytest.raises(InputError):
        simulate(trace, VllmPolicy(prefill_schedule_interval=2), one)
    for wrong in ({"size": 0}, {"size": 2, "servers": 0}, {"size": 2, "sync_passes": 0}):
        with pytest.raises(InputError):
            DataParallel(**wrong)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_passes_of_all_engines_are_those_of_vllm_s_own(number: int) -> None:
    """As `vllm-check` found them with vLLM 0.32.0: both schedulers, 2 and 4 engines, with one API
    server and more, dummy passes, ends of waves, preemptions, figures of several ages.
    """
    case, theirs = json.loads((DATA / "vllm-0.32.0-ranks.json").read_text())[number]
    assert passes_of_ranks(case) == theirs
    assert sum(one["dummy"] for one in theirs) > 10


def measured(*, experts: int, dp: int = 1, version: str = "0.32.0") -> Fit:
    """The fit of a server of `dp` engines."""
    path = shipped_fit("llama-3.1-8b-h200")
    assert path is not None
    fit = read_file(Fit, path)
    assert fit.steps is not None
    resolved = Resolved([], 100, 1, 16, 16, dp=dp, ep=dp > 1)
    steps = fit.steps.model_copy(
        update={"experts": experts, "experts_per_token": 2, "resolved": resolved}
    )
    engine = fit.engine.model_copy(update={"engine_version": version})
    return fit.model_copy(update={"steps": steps, "engine": engine})


def test_engines_of_a_mixture_of_experts_need_a_law_of_as_many() -> None:
    alone = parallel_of(measured(experts=8))
    assert alone is None
    with pytest.raises(InputError):
        parallel_of(measured(experts=8), 2)
    with pytest.raises(InputError):
        parallel_of(measured(experts=8, dp=2), 4)
    with pytest.raises(InputError):
        parallel_of(None, 2)
    with pytest.raises(InputError):
        parallel_of(measured(experts=0), 1, servers=2)
    found = parallel_of(measured(experts=8, dp=2, version="0.29.1"))
    assert found is not None
    kept = (found.size, found.lock_step, found.servers, found.sync_passes, found.syncs_first)
    assert kept == (2, True, 2, 32, False)
    dense = parallel_of(measured(experts=0), 4, servers=1)
    assert dense is not None
    assert (dense.size, dense.lock_step, dense.servers) == (4, False, 1)


def test_engines_of_one_server_are_set_for_a_simulation(capsys: pytest.CaptureFixture) -> None:
    words = "simulate --fit llama-3.1-8b-h200 --policy vllm --prompt 100 --output 20 --json"
    words += " --concurrency 8 --requests 40 --set data_parallel_size=2"
    assert llmctl(*words.split()) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["utilisation_worker_1_percent"] > 0
    for more in ("--workers 2", "--set replica_router=vllm-dp", "--policy fcfs"):
        assert llmctl(*words.split(), *more.split()) == 2
