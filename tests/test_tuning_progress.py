"""The remaining time that `llmctl tune` prints, by a clock that the test moves."""

import pytest
from said import says

from toolkit.cli.tune_output import DRIFT, ESTIMATE_AFTER, RECENT, TuneProgress

TOTAL = 400


class Search:
    """A search with evaluations of a given cost, in seconds."""

    def __init__(self, remembered: int = 0, jobs: int = 1) -> None:
        self.now_s = 0.0
        self.done = 0
        self._watch = TuneProgress(
            lambda *_, **changes: None, TOTAL, remembered, jobs, lambda: self.now_s
        )

    def evaluates(self, count: int, each_s: float) -> None:
        for _ in range(count):
            self.now_s += each_s
            self.done += 1
            self._watch(0.0)

    def expects(self, more: int) -> None:
        self._watch.expect(more)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_the_first_estimate_comes_after_a_few_evaluations(
    capsys: pytest.CaptureFixture[str],
) -> None:
    search = Search(jobs=2)
    search.evaluates(2, 50.0)  # with the start of the processes
    search.evaluates(ESTIMATE_AFTER - 1, 1.0)
    assert not printed(capsys)
    search.evaluates(1, 1.0)
    assert printed(capsys) == ["about 6 min for 382 more simulations, 2 at a time"]


def test_while_evaluations_take_as_long_it_is_printed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Search().evaluates(TOTAL, 1.0)
    assert len(printed(capsys)) == 1


def test_batches_that_end_together_are_no_drift(capsys: pytest.CaptureFixture[str]) -> None:
    search = Search()
    for _ in range(TOTAL // 8):
        search.evaluates(1, 8.0)
        search.evaluates(7, 0.0)
    assert len(printed(capsys)) == 1


@pytest.mark.parametrize(("first_s", "then_s", "word"), [(1.0, 3.0, "longer"), (3.0, 1.0, "less")])
def test_where_later_ones_differ_in_cost_it_is_corrected_by_their_rate(
    capsys: pytest.CaptureFixture[str], first_s: float, then_s: float, word: str
) -> None:
    search = Search()
    search.evaluates(100, first_s)
    printed(capsys)
    search.evaluates(RECENT, then_s)
    lines = printed(capsys)
    assert lines
    assert all(line.startswith("now about ") and line.endswith(f"took {word}") for line in lines)
    # what was printed last is within DRIFT of what is left, and stays so
    left_s = (TOTAL - search.done) * then_s
    value, unit = lines[-1].removeprefix("now about ").split()[:2]
    said_s = float(value) * {"s": 1.0, "min": 60.0}[unit]
    assert 1 / DRIFT < said_s / left_s < DRIFT
    search.evaluates(TOTAL - search.done, then_s)
    assert len(printed(capsys)) <= 1


def test_what_an_earlier_run_kept_comes_at_once_and_is_not_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    search = Search(remembered=200)
    search.evaluates(200, 0.0)
    search.evaluates(ESTIMATE_AFTER + 1, 1.0)
    [line] = printed(capsys)
    assert says(line, "3 min", "183")


def test_a_short_rest_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Search().evaluates(TOTAL, 0.01)
    assert not printed(capsys)


def test_more_simulations_than_expected_are_announced_with_a_new_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    search = Search()
    search.evaluates(ESTIMATE_AFTER + 1, 1.0)
    assert len(printed(capsys)) == 1
    search.expects(50)
    search.evaluates(1, 1.0)
    said, line = printed(capsys)
    assert says(said, "50")
    assert f"for {TOTAL + 50 - search.done} more simulations" in line
    search.expects(2)
    assert not printed(capsys)
