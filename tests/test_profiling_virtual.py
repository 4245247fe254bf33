"""The law of passes that overlap, fitted to a profile by their own grid: of a server in virtual
time that follows a known law.
"""

import pytest
import samples
from test_profiling_overlapping import facts, steps
from virtual_gpu import VirtualServer, profiled

from toolkit.estimators.pipeline import GraphSettings, PipelineLaw
from toolkit.estimators.pipeline_fit import PassColumns, fit_law, graphs_of
from toolkit.estimators.steps import StepShape
from toolkit.profiling.overlapping import grid, in_rounds, other_points

pytestmark = pytest.mark.slow

SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
GPU = {
    "decode_s": 5.06e-3,
    "row_s": 1.05e-5,
    "cached_s": 3.21e-8,
    "token_s": 2.28e-5,
    "attended_s": 7.6e-10,
    "beside_s": 5.2e-8,
}
FLOOR = {"floor_s": 5.2e-3, "floor_token_s": 6e-6}
LAUNCHES = {
    "graph_s": 2.9e-3,
    "graph_row_s": 3.26e-5,
    "piece_s": 5e-3,
    "piece_row_s": 1e-5,
    "eager_s": 9e-3,
    "eager_chunk_s": 3.7e-4,
}
SHAPES = [
    StepShape(8, 4_000),
    StepShape(32, 16_000),
    StepShape(32, 3_000, 1, 264, 264 * 132.0),
    StepShape(0, 0, 1, 64, 64 * 32.0),
    StepShape(128, 10_000, 1, 4096, 4096 * 2048.0),
]


@pytest.mark.parametrize(
    ("mode", "eager_s", "known"),
    [
        ("FULL_AND_PIECEWISE", 9e-3, GPU | FLOOR),
        ("FULL_DECODE_ONLY", 2.5e-2, GPU),  # launches hide the least time of short prompts
    ],
)
def test_the_grid_shows_every_coefficient_though_launches_drift(
    mode: str, eager_s: float, known: dict[str, float]
):
    graphs = GraphSettings(mode, SIZES)
    law = PipelineLaw(graphs, **GPU, **FLOOR, **(LAUNCHES | {"eager_s": eager_s}))
    limits = steps().model_copy(
        update={"graph_sizes": list(SIZES), "graph_mode": mode, "executor": "uni"}
    )
    points = [*grid(facts(), limits), *other_points(facts(), limits)]
    visits = [point for _, point in in_rounds(points, samples.recipe().profile)]
    server = VirtualServer(law, budget=8192, slots=1024, cv=0.24, seed=1)
    measured = profiled(server, visits, limits)
    found = graphs_of(measured)
    assert found is not None
    fitted = fit_law(PassColumns.of(measured.points, found))
    loose = {"attended_s": 0.2, "beside_s": 0.15}
    for name, value in known.items():
        within = loose.get(name, 0.03)
        assert getattr(fitted, name) == pytest.approx(value, rel=within), name
    for shape in SHAPES:
        assert fitted.launch_s(shape) == pytest.approx(law.launch_s(shape), rel=0.1)
    assert server.now_s - len(visits) < 180.0, "seconds of the whole profile"
