"""Which machines of a Ray cluster a plan's workers need, and the error if there is no room. No
cluster is started.
"""

import pytest
import samples
import tiny
from said import says

from toolkit.cluster.places import (
    Machine,
    MachineShare,
    WorkerPlacement,
    accelerator_type,
    no_room,
    node_labels,
    places,
)
from toolkit.cluster.servers import CpuShares
from toolkit.errors import InputError
from toolkit.files.plan import Kind

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
        update={"name": "vllm", "tensor_parallel_size": max(gpus, 1), "threads": 1}
    )
    return WorkerPlacement(tiny.recipe(tiny.model_spec("fake"), engine, hardware), labels)


def test_a_worker_takes_its_threads_and_the_gpus_of_its_machine() -> None:
    engine = tiny.engine_spec("llama", threads=3)
    assert MachineShare.of(tiny.recipe(tiny.model_spec(), engine)).bundle == {"CPU": 3.0}
    pair = engine.model_copy(update={"name": "vllm", "tensor_parallel_size": 2})
    gpus = tiny.CPU.model_copy(update={"device": "cuda"})
    share = MachineShare.of(tiny.recipe(tiny.model_spec(), pair, gpus))
    assert share.bundle == {"CPU": 6.0, "GPU": 2.0}
    assert share.fits({"CPU": 20.0, "GPU": 4.0, "memory": 1.0}) == 2
    assert share.fits({"CPU": 20.0}) == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("H200", "H200"), ("A100-80GB", "A100"), ("NVIDIA A100-SXM4-40GB", "A100")],
)
def test_names_from_data_sheets_give_ray_s_accelerator_types(name: str, expected: str) -> None:
    assert accelerator_type(name) == expected


def test_gpus_have_ray_s_label_and_cpus_that_of_llmctl() -> None:
    kinds = [kind("fast", "NVIDIA H200", 2), kind("old", "NVIDIA A100-SXM4-80GB"), kind("cpus")]
    labels = [H200, {"ray.io/accelerator-type": "A100"}, {"llmctl.io/kind": "cpus"}]
    assert node_labels(kinds) == labels
    assert [placement.labels for placement in places(kinds)] == [labels[0], *labels]


def test_a_fleet_may_set_labels() -> None:
    kinds = [kind("fast", "NVIDIA H200", pool="new"), kind("slow", "NVIDIA H200", pool="old")]
    assert node_labels(kinds) == [{"pool": "new"}, {"pool": "old"}]


def test_one_kind_runs_anywhere_unless_labels_are_set() -> None:
    assert node_labels([kind("fast", "NVIDIA H200")]) == [{}]
    assert node_labels([kind("fast", "NVIDIA H200", pool="new")]) == [{"pool": "new"}]


def test_recipes_for_the_same_gpu_share_its_machines() -> None:
    assert node_labels([kind("one", "NVIDIA H200"), kind("two", "NVIDIA H200")]) == [H200, H200]


def test_gpus_of_one_accelerator_type_need_labels() -> None:
    kinds = [kind("large", "NVIDIA A100-SXM4-80GB"), kind("small", "NVIDIA A100-SXM4-40GB")]
    message = "NVIDIA A100-SXM4-80GB.*NVIDIA A100-SXM4-40GB.*=A100"
    with pytest.raises(InputError, match=message) as caught:
        node_labels(kinds)
    assert says(caught.value.hint, "ray start --labels=memory=80GB")


def test_a_recipe_name_that_cannot_be_a_label_is_refused() -> None:
    with pytest.raises(InputError, match=r"'odd\.'") as caught:
        node_labels([kind("odd."), kind("cpus")])
    assert says(caught.value.hint, "nodes")


MACHINES = [
    Machine({"ray.io/accelerator-type": "A100"}, {"CPU": 32.0, "GPU": 8.0}),
    Machine({"ray.io/accelerator-type": "A100"}, {"CPU": 32.0, "GPU": 8.0}),
    Machine({}, {"CPU": 4.0}),
]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            [place(1, **H200), place(1, **{"ray.io/accelerator-type": "A100"})],
            "1 worker of 1 CPU and 1 GPU each on machines with ray.io/accelerator-type=H200: none "
            "of its 3 has that; "
            "they have none (1), ray.io/accelerator-type=A100 (2)",
        ),
        (
            [place(5, **{"ray.io/accelerator-type": "A100"})] * 3,
            "3 workers of 5 CPU and 5 GPU each on machines with ray.io/accelerator-type=A100: 64 "
            "CPU and 16 GPU in all "
            "on 2 of them, of which some may be in use",
        ),
        (
            [place()] * 99,
            "99 workers of 1 CPU each: 68 CPU in all on 3 machines, of which some may be in use",
        ),
        (
            [place(), place(1, **{"ray.io/accelerator-type": "A100"})],
            "1 worker of 1 CPU each: 68 CPU in all on 3 machines, of which some may be in use; "
            "and none for "
            "1 worker of 1 CPU and 1 GPU each on machines with ray.io/accelerator-type=A100: 64 "
            "CPU and 16 GPU in all "
            "on 2 of them, of which some may be in use",
        ),
    ],
)
def test_no_room_names_the_workers_and_the_cluster_s_resources(
    wanted: list[WorkerPlacement], message: str
) -> None:
    assert no_room(wanted, MACHINES) == f"the cluster has no room for {message}"


def test_servers_of_one_machine_have_their_own_cpus() -> None:
    shares = CpuShares()
    assert shares.take("a", "here", 2) == ([0, 1], {0, 1})
    assert shares.take("b", "here", 1) == ([2], {0, 1, 2})
    assert shares.take("c", "there", 1) == ([0], {0})
    shares.free("a")
    shares.free("never there")
    assert shares.take("d", "here", 3) == ([0, 1, 3], {0, 1, 2, 3})
    assert shares.take("gpu", "here", 0) == ([], {0, 1, 2, 3})
