"""The remaining time that `llmctl tune` prints, by a clock that the test moves."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from said import says

from toolkit.cli.tune_output import DRIFT, ESTIMATE_AFTER, RECENT, TuneProgress

TOTAL = 400
REQUESTS = 100  # of an evaluation


class Search:
    """A search with evaluations of a given cost, in seconds."""

    def __init__(self, jobs: int = 1, planned: Sequence[int] = (REQUESTS,) * TOTAL) -> None:
        self.now_s = 0.0
        self.done = 0
        self._watch = TuneProgress(lambda *_, **changes: None, planned, jobs, lambda: self.now_s)

    def evaluates(self, count: int, each_s: float, requests: int = REQUESTS) -> None:
        for _ in range(count):
            self.now_s += each_s
            self.done += 1
            self._watch.simulated(requests)
            self._watch(0.0)

    def finds(self, count: int) -> None:
        """Evaluations that are kept from an earlier run."""
        for _ in range(count):
            self.done += 1
            self._watch(0.0)


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
    search = Search()
    search.finds(200)
    search.evaluates(ESTIMATE_AFTER + 1, 1.0)
    [line] = printed(capsys)
    assert says(line, "3 min", "183")


def test_a_short_rest_is_not_worth_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    Search().evaluates(TOTAL, 0.01)
    assert not printed(capsys)


UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def said_s(line: str) -> float:
    """The seconds of an estimate."""
    value, unit = line.removeprefix("now ").removeprefix("about ").split()[:2]
    return float(value) * UNITS[unit]


@pytest.mark.parametrize("ratio", [0.1, 10.0, 50.0])
def test_evaluations_count_by_their_requests(
    capsys: pytest.CaptureFixture[str], ratio: float
) -> None:
    """Trials on windows come first, then the verdict on a trace of other length: one estimate is
    enough, and it is what the rest takes.
    """
    whole = int(ratio * REQUESTS)
    planned = [REQUESTS] * 60 + [whole] * 50
    search = Search(planned=planned)
    rate_s = 0.02  # of a request
    search.evaluates(ESTIMATE_AFTER + 1, rate_s * REQUESTS)
    left_s = rate_s * sum(planned[search.done :])
    search.evaluates(60 - search.done, rate_s * REQUESTS)
    search.evaluates(50, rate_s * whole, whole)
    [line] = printed(capsys)
    assert said_s(line) == pytest.approx(left_s, rel=0.05)


def test_what_ends_early_tells_the_speed_by_what_was_simulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    search = Search()
    rate_s = 0.02
    search.evaluates(ESTIMATE_AFTER + 1, rate_s * 25, 25)  # the first quarter of each
    [line] = printed(capsys)
    assert said_s(line) == pytest.approx(rate_s * REQUESTS * (TOTAL - search.done), rel=0.05)


@pytest.mark.parametrize("slower", [1.0, 3.0, 10.0])
def test_no_estimate_is_ten_times_the_one_before(
    capsys: pytest.CaptureFixture[str], slower: float
) -> None:
    """Even where the whole trace is longer by ten and its requests cost ten times as much: the cost
    shows while its first simulations end.
    """
    search = Search(planned=[REQUESTS] * 60 + [10 * REQUESTS] * 50)
    search.evaluates(60, 2.0)
    search.evaluates(50, 20.0 * slower, 10 * REQUESTS)
    said = list(map(said_s, printed(capsys)))
    assert said
    assert all(later < 10 * earlier for earlier, later in pairwise(said))
