"""The fewest workers that suffice: the search among numbers."""

from hypothesis import given
from hypothesis import strategies as st

from toolkit.tuning.deployments import WORKERS_MAX, fewest


@given(st.integers(1, WORKERS_MAX))
def test_the_fewest_workers_are_found_where_more_are_better(needed: int) -> None:
    asked: list[int] = []

    def keeps(count: int) -> bool:
        asked.append(count)
        return count >= needed

    assert fewest(keeps) == needed
    assert len(asked) == len(set(asked)) <= 18


@given(st.sets(st.integers(1, WORKERS_MAX)))
def test_the_answer_keeps_and_the_number_below_it_does_not(good: set[int]) -> None:
    found = fewest(good.__contains__)
    if found is not None:
        assert found in good
        assert found - 1 not in good


def test_fewest_is_none_where_no_number_suffices() -> None:
    assert fewest(lambda count: False) is None
