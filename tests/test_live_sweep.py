"""The restart sweep beside a live search: what is tried, and how the best ones are compared."""

import pytest

from benchmarks.engines.live_sweep import Start, confirmed, show_pairs, tried
from toolkit.files.live import BurstFigures, LiveTrial, LiveTuning, PredictionError


def figures(score: float) -> BurstFigures:
    return BurstFigures(
        score=score, goodput_rps=score, attained_percent=50.0, ttft_mean_s=0.1, e2e_mean_s=1.0
    )


def start(rows: int, score: float) -> Start:
    return Start({"max_num_seqs": rows}, 5.0, [figures(score)])


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
