"""The restart sweep beside a live search: what is tried, for how long, and what is kept of it."""

from pathlib import Path

import pytest

from benchmarks.engines.live_sweep import (
    Journal,
    Start,
    confirmed,
    show_pairs,
    tried,
    windows_within,
)
from toolkit.errors import InputError
from toolkit.files.live import BurstFigures, LiveTrial, LiveTuning, PredictionError


def figures(score: float) -> BurstFigures:
    return BurstFigures(
        score=score, goodput_rps=score, attained_percent=50.0, ttft_mean_s=0.1, e2e_mean_s=1.0
    )


def start(rows: int, score: float = 1.0, failed: str = "") -> Start:
    bursts = [] if failed else [figures(score)]
    return Start({"max_num_seqs": rows}, 1.0, 5.0, bursts, failed)


def tuning(rows: list[int], best: int) -> LiveTuning:
    trials = [
        LiveTrial(
            settings={"max_num_seqs": k},
            bursts=1,
            rounds=1,
            first=figures(1.0),
            predicted=figures(1.0),
        )
        for k in rows
    ]
    return LiveTuning.model_construct(
        trials=trials,
        start={"max_num_seqs": 128},
        best={"max_num_seqs": best},
        prediction=PredictionError(ttft_percent=1.0, e2e_percent=1.0, rank_correlation=0.5),
    )


def test_the_start_and_the_best_are_among_the_tried_settings() -> None:
    found = tried(tuning([1, 2, 3, 4, 128], best=4), 2)
    assert [one["max_num_seqs"] for one in found] == [128, 4, 1]
    assert [one["max_num_seqs"] for one in tried(tuning([1, 2], best=128), 9)] == [128, 1, 2]


def test_the_time_bounds_the_bursts_of_each_setting() -> None:
    found = windows_within(35.0, settings=60, starts=5, start_s=14.0, burst_s=4.0)
    spent_s = 60 * (14.0 + (1 + found) * 4.0) + 10 * (14.0 + 5 * 4.0)
    assert found >= 1
    assert spent_s <= 35.0 * 60.0
    assert windows_within(1e6, 60, 5, 14.0, 4.0) == 4
    assert windows_within(10.0, 60, 5, 14.0, 4.0) < 1


def test_the_journal_keeps_starts_and_refuses_those_of_another_sweep(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = Journal(path, "one")
    first.put(start(8, 2.0))
    first.put(start(9, failed="vLLM ended"))
    with path.open("a") as file:
        file.write('{"settings": {"max_num_s')  # it was killed while it wrote
    again = Journal(path, "one")
    assert len(again) == 2
    assert again.spent_s == 10.0
    assert again.get(0) == start(8, 2.0)
    assert again.get(1) == start(9, failed="vLLM ended")
    assert again.get(2) is None
    again.put(start(10))
    assert len(Journal(path, "one")) == 3
    with pytest.raises(InputError):
        Journal(path, "another")


class Starts:
    """In the place of a sweep: a start's score is its rows', and a little more each time."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def start(self, settings, windows) -> Start:
        rows = settings["max_num_seqs"]
        self.made.append(rows)
        return start(rows, rows + 0.01 * len(self.made))


def test_the_best_ones_are_confirmed_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    starts = Starts()
    pairs = confirmed(starts, {"max_num_seqs": 8}, {"max_num_seqs": 9}, 4)
    assert starts.made == [8, 9, 9, 8, 8, 9, 9, 8]
    assert [pair[0].settings["max_num_seqs"] for pair in pairs] == [8] * 4
    show_pairs(pairs)
    assert "they differ" in capsys.readouterr().out
    show_pairs([(start(8, score), start(9, 1.0)) for score in (0.9, 1.1, 1.0, 1.05)])
    assert "the same within noise" in capsys.readouterr().out
