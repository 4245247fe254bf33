"""What the workers of a plan take of the machines of a Ray cluster, and the error if there is no
room. No cluster is started.
"""

import pytest
import tiny

from toolkit.cluster.workers import bundle_of, no_room


def test_a_worker_takes_its_threads_and_a_gpu_of_its_machine() -> None:
    engine = tiny.engine_spec("llama", threads=3)
    assert bundle_of(tiny.recipe(tiny.model_spec(), engine)) == {"CPU": 3.0}
    gpus = tiny.CPU.model_copy(update={"device": "cuda"})
    assert bundle_of(tiny.recipe(tiny.model_spec(), engine, gpus)) == {"CPU": 3.0, "GPU": 1.0}


MACHINES = [{"CPU": 32.0, "GPU": 8.0}, {"CPU": 32.0, "GPU": 8.0}, {"CPU": 4.0}]


@pytest.mark.parametrize(
    ("bundle", "workers", "message"),
    [
        (
            {"CPU": 5.0, "GPU": 5.0},
            4,
            "4 workers of 5 CPU and 5 GPU each: 68 CPU and 16 GPU in all",
        ),
        ({"CPU": 1.0}, 99, "99 workers of 1 CPU each: 68 CPU in all"),
        ({"CPU": 64.0}, 1, "1 worker of 64 CPU each: 68 CPU in all"),
    ],
)
def test_no_room_names_the_workers_and_the_cluster_s_resources(
    bundle: dict[str, float], workers: int, message: str
) -> None:
    there = "on 3 machines, of which some may be in use"
    assert no_room(bundle, workers, MACHINES) == f"the cluster has no room for {message} {there}"
