"""Which machines of a Ray cluster a plan's workers belong on, and what is said where there is no
room. No cluster.
"""

import pytest
import samples
import tiny

from toolkit.cluster.workers import (
    Machine,
    MachineShare,
    WorkerPlacement,
    accelerator_type,
    no_room,
    node_labels,
    places,
)
from toolkit.errors import InputError
from toolkit.files.plan import Kind
from toolkit.workers.pool import WorkerSpec

H200 = {"ray.io/accelerator-type": "H200"}


def kind(name: str, device: str = "cpu", workers: int = 1, **nodes: str) -> Kind:
    fit = samples.fit()
    fit = fit.model_copy(update={"engine": fit.engine.model_copy(update={"device": device})})
    hardware = {"device": "cpu" if device == "cpu" else "cuda", "name": device}
    return Kind(
        recipe=samples.recipe(name=name, hardware=hardware), fit=fit, workers=workers, nodes=nodes
    )


def place(gpus: int = 0, **labels: str) -> WorkerPlacement:
    hardware = tiny.CPU.model_copy(update={"device": "cuda"}) if gpus else tiny.CPU
    engine = tiny.engine_spec("llama").model_copy(
        update={"tensor_parallel_size": max(gpus, 1), "threads": 1}
    )
    return WorkerPlacement(WorkerSpec(tiny.model_spec(), engine, hardware), labels)


def test_a_worker_takes_its_threads_and_the_gpus_of_its_machine() -> None:
    engine = tiny.engine_spec("fake").model_copy(update={"threads": 3})
    assert MachineShare.of(engine, tiny.CPU).bundle == {"CPU": 3.0}
    pair = engine.model_copy(update={"tensor_parallel_size": 2})
    share = MachineShare.of(pair, tiny.CPU.model_copy(update={"device": "cuda"}))
    assert share.bundle == {"CPU": 6.0, "GPU": 2.0}
    assert share.times({"CPU": 20.0, "GPU": 4.0, "memory": 1.0}) == 2
    assert share.times({"CPU": 20.0}) == 0


@pytest.mark.parametrize(
    ("name", "said"), [("H200", "H200"), ("A100-80GB", "A100"), ("NVIDIA A100-SXM4-40GB", "A100")]
)
def test_gpus_have_rays_names_also_from_data_sheets(name: str, said: str) -> None:
    assert accelerator_type(name) == said


def test_gpus_are_found_by_rays_label_and_cpus_by_ours() -> None:
    kinds = [kind("fast", "NVIDIA H200", 2), kind("old", "NVIDIA A100-SXM4-80GB"), kind("cpus")]
    labels = [H200, {"ray.io/accelerator-type": "A100"}, {"llmctl.io/kind": "cpus"}]
    assert node_labels(kinds) == labels
    assert [one.labels for one in places(kinds)] == [labels[0], *labels]


def test_a_fleet_may_say_which_machines() -> None:
    kinds = [kind("fast", "NVIDIA H200", pool="new"), kind("slow", "NVIDIA H200", pool="old")]
    assert node_labels(kinds) == [{"pool": "new"}, {"pool": "old"}]


def test_one_kind_runs_anywhere_unless_labels_are_said() -> None:
    assert node_labels([kind("fast", "NVIDIA H200")]) == [{}]
    assert node_labels([kind("fast", "NVIDIA H200", pool="new")]) == [{"pool": "new"}]


def test_recipes_for_the_same_gpu_share_its_machines() -> None:
    assert node_labels([kind("one", "NVIDIA H200"), kind("two", "NVIDIA H200")]) == [H200, H200]


def test_gpus_that_ray_calls_the_same_need_labels_of_their_own() -> None:
    kinds = [kind("large", "NVIDIA A100-SXM4-80GB"), kind("small", "NVIDIA A100-SXM4-40GB")]
    said = "NVIDIA A100-SXM4-80GB and with NVIDIA A100-SXM4-40GB have the same label in a Ray cluster, .*=A100"
    with pytest.raises(InputError, match=said) as caught:
        node_labels(kinds)
    assert "ray start --labels=memory=80GB" in caught.value.hint


def test_a_name_that_is_no_label_is_refused() -> None:
    with pytest.raises(InputError, match=r"recipe 'odd.': its name cannot be a label") as caught:
        node_labels([kind("odd."), kind("cpus")])
    assert caught.value.hint == "name them in the fleet: nodes"


MACHINES = [
    Machine({"ray.io/accelerator-type": "A100"}, {"CPU": 32.0, "GPU": 8.0}),
    Machine({"ray.io/accelerator-type": "A100"}, {"CPU": 32.0, "GPU": 8.0}),
    Machine({}, {"CPU": 4.0}),
]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (
            [place(1, **H200), place(1, **{"ray.io/accelerator-type": "A100"})],
            "1 worker of 1 CPU and 1 GPU each on machines with ray.io/accelerator-type=H200: none of its 3 has that; "
            "they have none (1), ray.io/accelerator-type=A100 (2)",
        ),
        (
            [place(5, **{"ray.io/accelerator-type": "A100"})] * 3,
            "3 workers of 5 CPU and 5 GPU each on machines with ray.io/accelerator-type=A100: 64 CPU and 16 GPU in all "
            "on 2 of them, of which some may be in use",
        ),
        (
            [place()] * 99,
            "99 workers of 1 CPU each: 68 CPU in all on 3 machines, of which some may be in use",
        ),
        (
            [place(), place(1, **{"ray.io/accelerator-type": "A100"})],
            "1 worker of 1 CPU each: 68 CPU in all on 3 machines, of which some may be in use; and none for "
            "1 worker of 1 CPU and 1 GPU each on machines with ray.io/accelerator-type=A100: 64 CPU and 16 GPU in all "
            "on 2 of them, of which some may be in use",
        ),
    ],
)
def test_where_there_is_no_room_it_is_said_for_whom_and_what_there_is(
    wanted: list[WorkerPlacement], said: str
) -> None:
    assert no_room(wanted, MACHINES) == f"the cluster has no room for {said}"
