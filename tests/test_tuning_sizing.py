"""The fewest workers that suffice: the search, its check, and the error where no number does."""

import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from lean import without_capacity
from said import says
from test_tuning import trace

from toolkit.errors import InputError, LimitsBrokenError
from toolkit.files.tuning import Tuning
from toolkit.tuning.alternatives import WORKERS_MAX, fewest
from toolkit.tuning.executor import InProcessRunner
from toolkit.tuning.inputs import Inputs
from toolkit.tuning.tune import tune_to_size
from toolkit.tuning.workload import make_workload

TUNE = {"trials": 6, "window_s": 4, "request_rate_rps": 60.0, "policies": ["own"]}


@without_capacity()
def size(sla: dict[str, float]) -> Tuning:
    recipe = samples.recipe(tune=TUNE, sla=sla)
    inputs = Inputs(recipe, samples.fit(), make_workload(recipe, samples.fit(), trace()))
    return tune_to_size(inputs, InProcessRunner(), samples.HEAD, lambda best: None)


@pytest.fixture(scope="module")
def sized() -> Tuning:
    return size({"e2e_p95_s": 3.0})


@given(st.integers(1, WORKERS_MAX))
def test_the_fewest_workers_are_found_where_more_are_better(needed: int) -> None:
    asked: list[int] = []

    def keeps(count: int) -> bool:
        asked.append(count)
        return count >= needed

    assert fewest(keeps) == needed
    assert len(asked) == len(set(asked)) <= 18


@given(st.sets(st.integers(1, WORKERS_MAX)), st.integers(1, WORKERS_MAX))
def test_the_answer_keeps_and_the_number_below_it_does_not(good: set[int], known: int) -> None:
    found = fewest((good | {known}).__contains__, known)
    assert found is not None
    assert found in good | {known}
    assert found - 1 not in good | {known}


def test_fewest_is_none_where_no_number_suffices() -> None:
    assert fewest(lambda count: False) is None


@pytest.mark.slow
def test_the_answer_and_its_neighbours_were_simulated(sized: Tuning) -> None:
    sizing = sized.sizing
    assert sizing is not None
    rows = {row.workers: row.feasible for row in sizing.rows if row.settings == sizing.settings}
    assert sizing.workers == sized.workers > 1
    assert (rows[sizing.workers - 1], rows[sizing.workers]) == (False, True)
    assert rows[sizing.workers + 1] == sizing.one_more_keeps


@pytest.mark.slow
def test_the_tuning_has_the_found_number_of_workers(sized: Tuning) -> None:
    assert sized.sizing is not None
    recipes = [
        row.workers for row in sized.sizing.rows if row.settings == "recipe" and row.feasible
    ]
    assert sized.workers <= min(recipes)


@pytest.mark.slow
def test_the_limit_that_no_number_of_workers_keeps_is_named() -> None:
    with pytest.raises(LimitsBrokenError) as caught:
        size({"ttft_p50_s": 1e-3})
    message = caught.value.message
    assert says(message, "256", "ttft_p50_s")
    assert message.endswith("of its limit even with 256")


def test_sizing_without_targets_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"--workers auto.*targets"):
        size({})
