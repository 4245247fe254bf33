"""Measurements of another device, engine, version or model: refused with both sides named, or
reported where forced.
"""

import pytest
import samples
from said import says

from toolkit.errors import ForeignError
from toolkit.files.profile import EngineFacts, differences, identity, refuse_foreign

HERE = samples.fit().engine.model_copy(
    update={
        "engine": "transformers",
        "engine_version": "5.23.0",
        "device": "NVIDIA H100",
        "torch": "2.13.0+cu130",
        "model_type": "llama",
        "parameters": 1_706_112,
        "config_sha256": "0123456789abcdef",
    }
)


def changed(**facts: object) -> EngineFacts:
    return HERE.model_copy(update=facts)


def found(made: EngineFacts) -> list[str]:
    return differences(identity(made), identity(HERE))


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"device": "NVIDIA A100"}, "device NVIDIA A100 (here NVIDIA H100)"),
        ({"engine_version": "5.17.0"}, "engine transformers 5.17.0 (here transformers 5.23.0)"),
        ({"engine": "rebatch"}, "engine rebatch 5.23.0 (here transformers 5.23.0)"),
        ({"torch": "2.11.1"}, "torch 2.11 (here 2.13)"),
        ({"parameters": 2}, "model llama of 2 parameters (here llama of 1,706,112 parameters)"),
        ({"dtype": "float16"}, "dtype float16 (here float32)"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2 (here 1)"),
        ({"config_sha256": "fedcba9876543210"}, "model_config fedcba987654 (here 0123456789ab)"),
    ],
)
def test_a_difference_names_both_sides(facts: dict[str, object], said: str):
    assert found(changed(**facts)) == [said]


def test_a_patch_release_or_budget_is_the_same_engine():
    assert found(changed(torch="2.13.1+cpu", kv_budget_bytes=1, capacity_tokens=1, threads=4)) == []


def test_a_cpu_without_a_known_name_equals_any_cpu():
    unnamed = identity(changed(device="cpu"))
    gpu = identity(HERE)
    assert differences(unnamed, identity(changed(device="cpu", processor="Xeon"))) == []
    assert differences(unnamed, gpu) == ["device CPU (here NVIDIA H100)"]


def test_only_the_model_of_an_analytic_profile_is_compared():
    analytic = changed(analytic="assumed", device="A100-80GB", engine_version="")
    assert found(analytic) == []
    assert found(analytic.model_copy(update={"dtype": "float16"})) == [
        "dtype float16 (here float32)"
    ]


def test_a_foreign_fit_is_refused_with_all_differences():
    with pytest.raises(ForeignError, match=r"device A.*float16") as refused:
        refuse_foreign(changed(device="A", dtype="float16"), [identity(HERE)])
    assert "\n" not in refused.value.message
    assert "--force" in refused.value.hint
    assert refused.value.exit_code == 2


def test_with_force_the_same_message_is_given_once():
    told: list[str] = []
    refuse_foreign(changed(device="A"), [identity(HERE)] * 3, told.append)
    assert len(told) == 1
    assert says(told[0], "device A", "NVIDIA H100")
