"""Which GPUs workers see: a group of their own each, as far as there are any."""

from pathlib import Path

import pytest

from toolkit.workers.gpus import gpus_of, visible_gpus


@pytest.mark.parametrize(
    ("worker", "each", "visible", "expected"),
    [
        (0, 1, ["0", "1"], "0"),
        (1, 1, ["0", "1"], "1"),
        (1, 2, ["0", "1", "2", "3"], "2,3"),
        (2, 1, ["4", "7"], "4"),
        (1, 2, ["0", "1", "2"], "0,1"),
        (0, 2, ["0"], None),
        (0, 1, [], None),
    ],
)
def test_each_worker_has_gpus_of_its_own(worker: int, each: int, visible: list[str], expected: str | None):
    assert gpus_of(worker, each, visible) == expected


def test_the_environment_goes_before_the_driver(tmp_path: Path):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:02:00.0").mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-5f"}, tmp_path) == ["3", "GPU-5f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({}, tmp_path / "none") == []
