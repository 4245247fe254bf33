"""The best settings of a tuning once more, by another scheduler."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import samples
from said import says
from test_sim_paged_commands import trace

from toolkit.errors import InputError
from toolkit.files.tuning import Confirmation, Confirmed, Outcome, Trial
from toolkit.metrics import differences
from toolkit.report.verdict import _confirmed_lines
from toolkit.sim.world import world_from_fit
from toolkit.tuning.confirm import best_trials, confirmed
from toolkit.tuning.evaluate import EvaluationSetup, Task


def trial(number: int, goodput_rps: float, seqs: int, **more: object) -> Trial:
    outcome = Outcome(
        policy=str(more.pop("policy", "vllm")),
        parameters={"max_num_seqs": seqs, "max_num_batched_tokens": 512},
        metrics={"goodput_rps": goodput_rps},
    )
    return Trial(number=number, outcome=outcome, feasible=bool(more.pop("feasible", True)), **more)


def test_the_best_trials_are_each_of_other_settings() -> None:
    trials = [
        trial(0, 1.0, 4),
        trial(1, 3.0, 8),
        trial(2, 3.0, 8),
        trial(3, 9.0, 16, feasible=False),
        trial(4, 9.0, 32, screened_out=True),
        trial(5, 9.0, 64, policy="fcfs"),
    ]
    assert [one.number for one in best_trials(trials, 5)] == [1, 0, 3]
    assert [one.number for one in best_trials(trials, 1)] == [1]


def test_a_search_without_the_scheduler_has_nothing_to_confirm() -> None:
    with pytest.raises(InputError) as error:
        best_trials([trial(0, 1.0, 4, policy="fcfs")], 5)
    assert says(error.value.whole, "vllm")


def test_the_same_world_confirms_and_another_does_not() -> None:
    fit = samples.paged_fit()
    world = world_from_fit(fit, workers=1, max_new_tokens=64)
    setup = EvaluationSetup(world, [trace(60)], {})
    flags = {"max_num_seqs": 8, "max_num_batched_tokens": 256}
    outcome = Task(setup, "vllm", flags).run().outcome
    found = Trial(number=3, outcome=outcome, feasible=True)
    same = confirmed(found, setup)
    assert same.metric is None
    assert same.goodput_rps == same.model_goodput_rps
    assert world.paged is not None
    slower = replace(world, paged=world.paged.slowed(1.5))
    other = confirmed(found, replace(setup, world=slower))
    assert other.metric is not None
    assert other.apart_percent > 1.0


def test_the_verdict_says_whether_it_is_confirmed() -> None:
    def line(metric: str | None) -> str:
        one = Confirmed(
            trial=0, goodput_rps=1.0, model_goodput_rps=1.0, feasible=True, metric=metric,
            apart_percent=7.0 if metric else 0.0,
        )  # fmt: skip
        found = Confirmation(vllm_version="0.32.0", settings=[one])
        [said] = _confirmed_lines(SimpleNamespace(confirmation=found))  # type: ignore[arg-type]
        return said

    assert says(line(None), "0.32.0")
    assert says(line("ttft_p99_s"), "ttft_p99_s", "7 %")
    assert _confirmed_lines(SimpleNamespace(confirmation=None)) == []  # type: ignore[arg-type]


def test_figures_that_depend_on_leaps_are_not_compared() -> None:
    one = {"rounds": 5.0, "itl_p50_s": 1.0, "utilisation_percent": 9.0, "ttft_mean_s": 1.0}
    other = one | {"itl_p50_s": 2.0, "utilisation_percent": 8.0, "ttft_mean_s": 1.0 + 1e-12}
    assert differences(one, other) == {}
    assert differences(one, other | {"rounds": 4.0}) == {"rounds": pytest.approx(0.2)}
