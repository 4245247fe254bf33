"""Which GPUs workers see: a group of their own each, as far as there are any."""

from pathlib import Path

import pytest

from toolkit.workers.gpus import share_gpus, visible_gpus


@pytest.mark.parametrize(
    ("sizes", "visible", "expected"),
    [
        ([1, 1], ["0", "1"], ["0", "1"]),
        ([2, 2], ["0", "1", "2", "3"], ["0,1", "2,3"]),
        ([1, 1, 1], ["4", "7"], ["4", "7", "4"]),
        ([2, 2], ["0", "1", "2"], ["0,1", "0,1"]),
        ([2], ["0"], [None]),
        ([1], [], [None]),
        ([2, 1, 0, 1], ["0", "1", "2", "3"], ["0,1", "2", None, "3"]),
    ],
)
def test_each_worker_has_gpus_of_its_own(sizes: list[int], visible: list[str], expected: list[str | None]):
    assert share_gpus(sizes, visible) == expected


def test_the_environment_goes_before_the_driver(tmp_path: Path):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:02:00.0").mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3,GPU-5f"}, tmp_path) == ["3", "GPU-5f"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []
    assert visible_gpus({}, tmp_path / "none") == []
