"""What is recommended: candidates of a search, judged on the whole trace, beside the defaults."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import samples
from lean import without_capacity
from said import says
from test_tuning import trace

from toolkit.files.tuning import BEHIND, MOST_BEHIND_PERCENT, Evaluation, Outcome, Settings, Tuning
from toolkit.metrics import Served, behind_percent, judge, sla_ratios
from toolkit.report.verdict import verdict
from toolkit.sched.policies import make_any
from toolkit.sim.api import simulate
from toolkit.sim.deployment import Deployment, Workload
from toolkit.traces.windows import prepare, scale_rate
from toolkit.tuning.evaluate import Task
from toolkit.tuning.executor import InProcessRunner, Runner, collect
from toolkit.tuning.judge import NEXT, JudgedCandidates, is_better, judge_candidates
from toolkit.tuning.search import SearchSettings, search, search_settings
from toolkit.tuning.tune import tune
from toolkit.tuning.workload import TuneInputs, cut_trace

TTFT = "ttft_p99_s"
WHOLE = "whole trace"
Rule = Callable[[int], float]  # from slice_tokens to the used share of the target


class Made(InProcessRunner):
    """Simulates nothing: more goodput with longer slices, and a share of the target by a rule for
    the windows of the search and one for the whole trace.
    """

    def __init__(self, whole: Rule, windows: Rule = lambda tokens: 0.5) -> None:
        self.rules = {"search": windows, WHOLE: whole}
        self.tried: list[int] = []  # on the whole trace

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for index, task in enumerate(tasks):
            parameters = task.settings.parameters
            tokens = int(parameters["slice_tokens"])
            if task.label == WHOLE:
                self.tried.append(tokens)
            metrics = {"goodput_rps": float(tokens), "e2e_mean_s": 1.0}
            used = {TTFT: self.rules[task.label](tokens)}
            yield index, samples.evaluation("slice", parameters, metrics, used)


def judged(runner: Made, trials: int = 20) -> tuple[JudgedCandidates, list[int]]:
    """What is judged, and the slices that the search tried, the best first."""
    recipe = samples.recipe(
        engine={"name": "transformers"},
        tune={"trials": trials, "policies": ["own"], "space": {"slice_tokens": [1, 512]}},
    )
    settings = search_settings(recipe, samples.fit())
    own = samples.task(trace(100), given=recipe)
    result, trials = judged_on_whole(own, runner, settings)
    slices = sorted({tokens_of(one) for one in trials}, reverse=True)
    return result, slices


def judged_on_whole(
    own: Task, runner: Runner, settings: SearchSettings
) -> tuple[JudgedCandidates, list[Evaluation]]:
    """What is judged on the whole trace, and what the search found on windows."""
    trials = search(own, runner, settings, lambda best: None)

    def judge(settings: Settings) -> Task:
        return replace(own.under(settings), label=WHOLE)

    return judge_candidates(trials, settings, judge, partial(collect, runner)), trials


def tokens_of(evaluation: Evaluation) -> int:
    return int(evaluation.settings.parameters["slice_tokens"])


class Misled(Made):
    """What is best on the windows is worst on the whole trace, and the recipe's slices are best."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for task, (index, found) in zip(tasks, super().run(tasks), strict=True):
            if task.label == WHOLE:
                metrics = found.metrics
                metrics["goodput_rps"] = 1000.0 - abs(tokens_of(found) - 128)
            yield index, found


@pytest.mark.slow
def test_the_best_is_never_worse_than_the_defaults() -> None:
    found, slices = judged(Misled(whole=lambda tokens: 0.5))
    assert slices[0] > 128  # what the search took for the best
    assert tokens_of(found.best(found.tried)) == 128


@pytest.mark.slow
def test_where_the_best_keeps_the_limits_nothing_else_is_tried() -> None:
    runner = Made(whole=lambda tokens: 1.0)
    found, slices = judged(runner)
    assert tokens_of(found.best(found.tried)) == slices[0]
    assert runner.tried == [128, slices[0]]  # the recipe's, and the best
    assert found.further == []


@pytest.mark.slow
def test_where_the_best_breaks_a_limit_the_next_best_are_tried() -> None:
    _, slices = judged(Made(whole=lambda tokens: 1.0))
    third = slices[2]
    assert third > 128
    runner = Made(whole=lambda tokens: 0.9 if tokens == third else 1.5)
    found, _ = judged(runner)
    assert [tokens_of(one) for one in found.further] == slices[1 : NEXT + 1]
    best = found.best(found.tried)
    assert (tokens_of(best), best.outcome.kept) == (third, True)


class FewTokens(InProcessRunner):
    """Busy windows discard passes of few tokens, with which the whole trace is served sooner."""

    def __init__(self) -> None:
        self.tried: set[int] = set()  # on the whole trace

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for index, task in enumerate(tasks):
            parameters = task.settings.parameters
            tokens = int(parameters["max_num_batched_tokens"])
            used = 1.5 if tokens < 6000 else 0.5
            if task.label == WHOLE:
                self.tried.add(tokens)
                used = 0.5 if tokens >= 500 else 1.5
            metrics = {"goodput_rps": 1.0, "e2e_mean_s": tokens / 1000.0}
            yield index, samples.evaluation("vllm", parameters, metrics, {TTFT: used})


@pytest.mark.slow
def test_few_tokens_a_pass_are_tried_on_the_whole_trace_though_windows_discard_them() -> None:
    recipe = samples.recipe(
        engine={"name": "vllm"},
        workers=1,
        policy={"name": "vllm", "parameters": {"max_num_batched_tokens": 8192}},
        tune={"trials": 10, "policies": ["own"]},
    )
    fit = samples.paged_fit()
    runner = FewTokens()
    own = samples.task(trace(100), given=recipe, laws=fit)
    found, _ = judged_on_whole(own, runner, search_settings(recipe, fit))
    assert min(runner.tried) < 500 < 16_000 < max(runner.tried)
    best = found.best(found.tried).settings.parameters["max_num_batched_tokens"]
    assert 500 <= best <= 1000


def evaluation(
    goodput_rps: float, e2e_mean_s: float = 1.0, used: float = 0.5, other: float = 0.1
) -> Evaluation:
    metrics = {"goodput_rps": goodput_rps, "e2e_mean_s": e2e_mean_s}
    return samples.evaluation("slice", {}, metrics, {TTFT: used, "e2e_p95_s": other})


DEFAULT = evaluation(10.0)


@pytest.mark.parametrize(
    ("best", "default", "better"),
    [
        (evaluation(10.2), DEFAULT, True),
        (evaluation(10.05), DEFAULT, False),
        (evaluation(9.0), DEFAULT, False),
        # more goodput is worth more latency, and a nearer limit
        (evaluation(10.2, e2e_mean_s=2.0, used=0.9), DEFAULT, True),
        # no less goodput and less latency, while the limit that binds is no nearer, or far
        (evaluation(10.0, e2e_mean_s=0.9), DEFAULT, True),
        (evaluation(9.995, e2e_mean_s=0.9), DEFAULT, True),
        (evaluation(9.98, e2e_mean_s=0.9), DEFAULT, False),
        (evaluation(10.0, e2e_mean_s=0.995), DEFAULT, False),
        (evaluation(10.0, e2e_mean_s=0.6, used=0.2), evaluation(10.0, used=0.1), True),
        (evaluation(10.0, e2e_mean_s=0.9, used=0.8), DEFAULT, True),
        (evaluation(10.0, e2e_mean_s=0.6, used=0.9), evaluation(10.0, used=0.85), False),
        (evaluation(10.0, e2e_mean_s=0.9, used=0.9), evaluation(10.0, used=0.9), True),
        (evaluation(10.0, e2e_mean_s=0.9, used=0.2, other=0.505), DEFAULT, True),
        # what keeps the limits is better, at any goodput
        (evaluation(5.0), evaluation(10.0, used=1.1), True),
        (evaluation(20.0, used=1.1), DEFAULT, False),
        # where both break limits, no limit may be broken by more
        (evaluation(10.2, used=1.3), evaluation(10.0, used=1.2), False),
        (evaluation(10.2, used=1.2), evaluation(10.0, used=1.2), True),
    ],
)
def test_other_settings_are_better_where_a_change_is_worth_it(
    best: Evaluation, default: Evaluation, better: bool
) -> None:
    assert is_better(best, default) is better


# The whole of `tune`

TUNE = {"trials": 6, "window_s": 4.0, "policies": ["own"]}
SLA = {"ttft_p99_s": 20.0}


def run(
    rate_rps: float, runner: Runner | None = None, count: int = 600, **changes: object
) -> Tuning:
    recipe = samples.recipe(
        engine={"name": "transformers"},
        sla=SLA,
        tune=TUNE | {"request_rate_rps": rate_rps} | changes,
    )
    inputs = TuneInputs(recipe, samples.fit(), cut_trace(recipe, samples.fit(), trace(count)))
    return tune(inputs, runner or InProcessRunner(), samples.HEAD, lambda best: None)


@pytest.fixture(scope="module")
@without_capacity()
def tuned() -> Tuning:
    return run(20.0)


@pytest.mark.slow
def test_what_tune_says_is_what_simulate_gives_to_the_digit(tuned: Tuning) -> None:
    recipe = samples.recipe(engine={"name": "transformers"})
    requests = scale_rate(prepare(trace(600), recipe), 20.0)
    world = Deployment.of(recipe, samples.fit()).world(Workload(requests))
    assert (tuned.judged.whole, tuned.judged.requests) == (True, 600)
    for found in (tuned.defaults, tuned.best, tuned.recommended):
        policy = make_any(found.settings.policy, found.settings.parameters)
        done = simulate(requests, policy, world)
        said = done.metrics(SLA)
        assert {name: found.metrics[name] for name in said} == said
    # the last of them is the recommended one
    assert sla_ratios(done.served, SLA)[TTFT] == tuned.recommended.outcome.used[TTFT]


class Worse(InProcessRunner):
    """Other settings than the recipe's have half the goodput on the whole trace."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for index, done in super().run(tasks):
            own = done.settings.parameters["slice_tokens"] == 128
            if tasks[index].label.startswith(WHOLE) and not own:
                done.metrics["goodput_rps"] /= 2
            yield index, done


@pytest.mark.slow
def test_the_defaults_are_the_best_where_others_are_worse_on_the_whole_trace() -> None:
    found = run(20.0, Worse())
    assert found.best.settings == found.defaults.settings
    assert found.gain_percent == 0.0
    assert found.keep_defaults
    assert found.recommended == found.defaults
    assert found.capacity is not None
    assert found.capacity.recommended_rps == found.capacity.defaults_rps


class Nearer(InProcessRunner):
    """Other settings than the recipe's have 60 % of its mean E2E. They use the share `used` of the
    target, the recipe's 0.1 less.
    """

    def __init__(self, used: float) -> None:
        self.used = used

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Evaluation]]:
        for index, done in super().run(tasks):
            own = done.settings.parameters["slice_tokens"] == 128
            metrics = done.metrics | {"e2e_mean_s": 5.0 if own else 3.0, "goodput_rps": 20.0}
            outcome = Outcome(metrics=metrics, used={TTFT: self.used - 0.1 * own})
            yield index, done.model_copy(update={"outcome": outcome})


@pytest.mark.slow
@without_capacity()
def test_latency_is_taken_while_every_limit_is_far_else_named_as_declined() -> None:
    far = run(20.0, Nearer(0.2))
    used = far.recommended.outcome.used[TTFT]
    assert (far.keep_defaults, used, far.alternatives.declined) == (False, 0.2, None)
    assert far.recommended.metrics["e2e_mean_s"] == 3.0
    near = run(20.0, Nearer(0.9))
    declined = near.alternatives.declined
    assert declined is not None
    assert (near.keep_defaults, near.recommended.outcome.used[TTFT]) == (True, pytest.approx(0.8))
    assert declined.outcome.used == {TTFT: 0.9}
    assert declined.metrics["e2e_mean_s"] == 3.0
    slices = declined.settings.parameters["slice_tokens"]
    assert any(f"slice_tokens {slices}" in line for line in verdict(near))
    same = run(20.0, Nearer(1.1))
    assert same.alternatives.declined is None  # it breaks a limit


@pytest.mark.slow
def test_where_the_queue_grows_the_server_is_called_overloaded(tuned: Tuning) -> None:
    with without_capacity():
        over = run(200.0, count=5000, trials=1)
    behind = {limit.name: limit for limit in over.limits}[BEHIND]
    assert (behind.bound, behind.limit) == ("at most", MOST_BEHIND_PERCENT)
    assert behind.predicted is not None
    assert behind.predicted > MOST_BEHIND_PERCENT
    assert (over.keeps_limits, behind.kept) == (False, False)
    assert over.recommended.outcome.used[BEHIND] == pytest.approx(
        behind.predicted / MOST_BEHIND_PERCENT
    )
    assert any(line.startswith("overloaded") for line in verdict(over))
    binds = next(line for line in verdict(over) if "binds" in line)
    assert says(binds, "ttft_p99_s")  # a queue is no target
    assert tuned.recommended.outcome.used[BEHIND] <= 1.0
    assert not any(line.startswith("overloaded") for line in verdict(tuned))


def served(share: float, count: int = 1000) -> Served:
    """One request a second, of which the server serves this share."""
    arrival_s = np.arange(float(count))
    first_s = np.maximum(arrival_s, arrival_s / share) + 0.1
    one = np.ones(count, np.int64)
    return Served(arrival_s, first_s, first_s + 1.0, one, 0.0 * arrival_s, one.astype(np.bool_))


@pytest.mark.parametrize(("share", "behind"), [(2.0, 0.0), (1.0, 0.0), (0.8, 22.5), (0.5, 90.0)])
def test_a_server_that_serves_a_share_is_behind_by_the_rest_however_long_the_trace(
    share: float, behind: float
) -> None:
    """Between the middles of the first and the last tenth lie 90 % of the time."""
    for count in (100, 1000):
        assert behind_percent(served(share, count)) == pytest.approx(behind, rel=0.02)
        late = judge(served(share, count), {}) == "overloaded"
        assert late == (behind > MOST_BEHIND_PERCENT)
