"""The alternatives to a result: the highest rate, sibling recipes, one server for `auto`, and their
words.
"""

from functools import partial
from itertools import pairwise

import pytest
import samples
from lean import without_capacity
from said import says
from test_tuning import trace

from toolkit.files.plan import Kind
from toolkit.files.tuning import Alternatives, SizingRow, Tuning
from toolkit.report.verdict import verdict
from toolkit.sched.policies import KNOWN, STARTED, engines_for, footnote, marked, refusal
from toolkit.tuning.alternatives import WorkerCounts, nothing_suffices
from toolkit.tuning.executor import InProcessRunner, collect
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.tune import tune, tune_to_size
from toolkit.tuning.workload import make_workload

TWO = {"windows": 2, "held_out_windows": 2}  # of a trace of seconds
TUNE = {"trials": 2, "draws": 0, "request_rate_rps": 60.0, "policies": ["own"], **TWO}


def inputs(sla: dict[str, float], siblings: tuple[Kind, ...] = (), **changes: object) -> Inputs:
    recipe = samples.recipe(
        sla=sla, **({"engine": {"name": "transformers"}, "tune": TUNE} | changes)
    )
    fit = (
        samples.paged_fit()
        if recipe.engine.name == "vllm"
        else samples.fit(engine=recipe.engine.name)
    )
    return Inputs(recipe, fit, make_workload(recipe, fit, trace(1000)), siblings=siblings)


def sibling() -> Kind:
    """A recipe for vLLM."""
    recipe = samples.recipe(
        name="bare", engine={"name": "vllm"}, workers=1, policy={"name": "vllm"}
    )
    return Kind(recipe=recipe, fit=samples.paged_fit(capacity_tokens=65536), workers=1)


def tuned(given: Inputs, auto: bool = False) -> tuple[Tuning, Alternatives]:
    result = (tune_to_size if auto else tune)(
        given, InProcessRunner(), samples.HEAD, lambda best: None
    )
    assert result.alternatives is not None
    return result, result.alternatives


@pytest.mark.slow
def test_a_sibling_that_keeps_the_limits_is_named_before_fewer_requests_and_more_workers() -> None:
    result, found = tuned(inputs({"ttft_p99_s": 0.5}, (sibling(),)))
    assert not found.feasible
    (one,) = found.siblings
    assert (one.recipe, one.engine, one.workers, one.outcome.policy) == ("bare", "vllm", 1, "vllm")
    assert one.feasible
    assert one.up_to_rps is not None
    assert one.up_to_rps >= result.request_rate_rps
    assert found.workers is None
    lines = verdict(result)
    places = [
        k
        for k, line in enumerate(lines)
        if line.startswith(("  another engine: recipe bare", "  fewer", "  not f"))
    ]
    assert len(places) == 2
    assert all(one < other for one, other in pairwise(places))


@pytest.mark.slow
def test_without_such_a_sibling_workers_and_rate_are_searched() -> None:
    result, found = tuned(inputs({"ttft_p99_s": 0.5}))
    assert not found.feasible
    assert found.siblings == []
    assert found.workers is not None
    assert found.workers > result.workers
    most_rps = result.capacity.recommended_rps
    assert most_rps < result.request_rate_rps
    assert f"  more workers: {found.workers} with the best settings" in verdict(result)
    fewer, kept = tuned(inputs({"ttft_p99_s": 0.5}, tune=TUNE | {"request_rate_rps": most_rps / 2}))
    assert kept.feasible, fewer.usage


@pytest.mark.slow
def test_a_sibling_that_serves_clearly_more_gets_a_line_where_limits_are_kept() -> None:
    given = inputs({"e2e_p95_s": 3.0}, (sibling(),), tune=TUNE | {"request_rate_rps": 2.0})
    result, found = tuned(given)
    assert found.feasible
    own = result.capacity.recommended_rps
    other = found.siblings[0].up_to_rps
    assert own is not None
    assert other is not None
    assert other > 1.25 * own
    assert any(says(line, "bare") for line in verdict(result))


@pytest.mark.slow
@without_capacity()
def test_a_sibling_is_named_before_more_workers() -> None:
    result, found = tuned(inputs({"ttft_p99_s": 0.5}, (sibling(),)), auto=True)
    assert result.sizing is not None
    assert result.sizing.workers > 1
    assert found.siblings[0].workers == 1
    lines = verdict(result)
    before = next(
        k for k, line in enumerate(lines) if line.startswith("before you add workers: recipe bare")
    )
    assert lines[before + 1].startswith("workers needed: ")


@pytest.mark.slow
@without_capacity()
def test_where_no_number_of_workers_suffices_the_hint_is_the_sibling() -> None:
    given = inputs({"ttft_p99_s": 0.5}, (sibling(),))
    _, found = tuned(given)
    row = SizingRow(
        settings="recipe",
        workers=256,
        feasible=False,
        goodput_rps=0.0,
        attainment_percent=0.0,
        binding="x",
        binding_ratio=2.0,
    )
    sizes = WorkerCounts(given.whole, partial(collect, InProcessRunner()), {("recipe", 256): row})
    assert says(nothing_suffices(sizes, found.siblings).hint, "tune bare", "with 1")
    assert nothing_suffices(sizes).hint.startswith("a looser target")


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "workers"), [(5.0, 1), (300.0, 2)])
@without_capacity()
def test_auto_gives_a_server_replicas(rate: float, workers: int) -> None:
    spec = {"engine": {"name": "vllm"}, "workers": 1, "policy": {"name": "vllm"}}
    tune_spec = TUNE | {"request_rate_rps": rate, "routers": ["own"]}
    result, found = tuned(inputs({"e2e_p95_s": 3.0}, tune=tune_spec, **spec), auto=True)
    assert found.feasible
    assert result.sizing is not None
    assert result.sizing.workers >= workers
    line = f"workers needed: {result.sizing.workers}, with "
    assert any(told.startswith(line) for told in verdict(result))


@pytest.mark.slow
@without_capacity()
def test_half_of_the_trials_are_for_the_best_served_policy_and_half_for_each_in_turn() -> None:
    result, _ = tuned(inputs({"ttft_p99_s": 2.0}, tune=TUNE | {"trials": 32, "policies": ["all"]}))
    trials = {one.policy: one.trials for one in result.policies}
    served = sum(count for policy, count in trials.items() if policy in ("slice", "sequence"))
    assert served >= 14
    assert min(trials.values()) >= 2
    assert result.best.policy in ("slice", "sequence")


def test_marked_policies_are_those_that_cannot_be_served() -> None:
    for policy in KNOWN:
        able = engines_for(policy)
        for engine in STARTED:
            assert (refusal(policy, [engine]) is None) == (engine in able)
            assert (marked(policy, [engine]) == policy) == (engine in able)
            assert (footnote([policy], [engine]) == "") == (engine in able)
    assert marked("past-future", []) == "past-future"
    assert says(footnote(["srpt-oracle"], []), "srpt-oracle")
