"""What the workers of a plan take of the machines of a Ray cluster, and the error if there is no
room. No cluster is started.
"""

import pytest
import tiny

from toolkit.cluster.places import MachineShare, no_room


def test_a_worker_takes_its_threads_and_the_gpus_of_its_machine() -> None:
    engine = tiny.engine_spec("llama", threads=3)
    assert MachineShare.of(tiny.recipe(tiny.model_spec(), engine)).bundle == {"CPU": 3.0}
    pair = engine.model_copy(update={"name": "vllm", "tensor_parallel_size": 2})
    gpus = tiny.CPU.model_copy(update={"device": "cuda"})
    share = MachineShare.of(tiny.recipe(tiny.model_spec(), pair, gpus))
    assert share.bundle == {"CPU": 6.0, "GPU": 2.0}


MACHINES = [{"CPU": 32.0, "GPU": 8.0}, {"CPU": 32.0, "GPU": 8.0}, {"CPU": 4.0}]


@pytest.mark.parametrize(
    ("share", "workers", "message"),
    [
        (MachineShare(5, 5), 4, "4 workers of 5 CPU and 5 GPU each: 68 CPU and 16 GPU in all"),
        (MachineShare(1, 0), 99, "99 workers of 1 CPU each: 68 CPU in all"),
        (MachineShare(64, 0), 1, "1 worker of 64 CPU each: 68 CPU in all"),
    ],
)
def test_no_room_names_the_workers_and_the_cluster_s_resources(
    share: MachineShare, workers: int, message: str
) -> None:
    there = "on 3 machines, of which some may be in use"
    assert no_room(share, workers, MACHINES) == f"the cluster has no room for {message} {there}"
