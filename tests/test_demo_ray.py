"""What `make demo-ray` measures is little, and enough for a fit."""

from demo_ray import SMALL

from toolkit.estimators.fitting import POINTS_MIN
from toolkit.estimators.forms import SLICES_MIN


def test_the_quick_profile_has_the_points_that_a_fit_asks_for():
    batches = len(SMALL["batch_sizes"])
    assert batches * len(SMALL["input_lengths"]) >= POINTS_MIN
    assert batches * len(SMALL["cached_lengths"]) >= POINTS_MIN
    assert SMALL["slices"] >= SLICES_MIN
    assert SMALL["memory_lengths"]
