"""`llmctl doctor`: missing things come with a remedy, and fail only with --strict."""

import os
from pathlib import Path

import pytest
from commands import printed, ran, refused
from said import says

from toolkit.deploy.doctor import Check, check_machine, check_recipe
from toolkit.engines.devices import CudaDevice, Devices
from toolkit.errors import InputError
from toolkit.files.shipped import load_recipe

GIB = 1 << 30
CPU_ONLY = Devices(torch="2.13.0+cpu", cuda="", driver="", gpus=())
A100 = CudaDevice(0, "NVIDIA A100-SXM4-80GB", int(79.1 * GIB), 78 * GIB)
ONE_A100 = Devices(torch="2.13.0", cuda="12.8", driver="570.133.20", gpus=(A100,))
H200 = CudaDevice(0, "NVIDIA H200", int(139.8 * GIB), 139 * GIB)
ONE_H200 = Devices(torch="2.13.0", cuda="12.8", driver="570.1", gpus=(H200,))

RECIPE = """\
name: test
model: {source: random, max_model_len: 512, config: {model_type: llama},
  kv_bytes_per_token: 1024, weight_bytes: 4096}
hardware: {device: cpu, name: any}
engine: {threads: 1, kv_cache_memory_mib: 1}
profile: {batch_sizes: [1], input_lengths: [8], cached_lengths: [8], memory_lengths: [8]}
"""


def checked(
    folder: Path, old: str = "", new: str = "", devices: Devices = CPU_ONLY
) -> dict[str, Check]:
    """The checks of RECIPE with `old` replaced."""
    assert old in RECIPE
    (folder / "test.yaml").write_text(RECIPE.replace(old, new))
    return {check.name: check for check in check_recipe(load_recipe(folder / "test.yaml"), devices)}


@pytest.mark.slow
def test_this_machine_can_run_the_demo(capsys):
    result = printed(capsys, "doctor tiny-llama-cpu --strict")
    assert (result["recipe"], result["usable"]) == ("tiny-llama-cpu", True)
    wanted = "device cpu disk hardware model memory"
    assert {*wanted.split()} <= {check["name"] for check in result["checks"]}


@pytest.mark.slow
def test_a_recipe_for_another_machine_fails_only_with_strict(capsys, monkeypatch):
    monkeypatch.setattr("toolkit.engines.devices.find_devices", lambda: CPU_ONLY)
    out = ran(capsys, "doctor llama-3.1-8b-a100-80gb").out
    assert says(" ".join(out.split()), "1", "A100-80GB", "79.1")
    assert says(out, "llama-3.1-8b-a100-80gb")
    assert max(map(len, out.splitlines())) <= 80
    assert (
        "error: missing: hardware"
        in ran(capsys, "doctor llama-3.1-8b-a100-80gb --strict", code=3).err
    )


def test_a_wrong_recipe_is_an_error(tmp_path, capsys):
    (tmp_path / "r.yaml").write_text(RECIPE.replace("engine:", "engin:"))
    assert says(refused(capsys, "doctor", tmp_path / "r.yaml")[0], "r.yaml", "engin", "'engine'")


HARDWARE = "{device: cpu, name: any}"


@pytest.mark.parametrize(
    ("hardware", "devices", "status", "said"),
    [
        ("name: A100-80GB, memory_gib: 79.1", ONE_A100, "ok", ""),
        ("name: a100, memory_gib: 40", ONE_A100, "ok", ""),
        ("name: H200, memory_gib: 79.1", ONE_A100, "missing", "A100"),
        ("name: A100-80GB, memory_gib: 139.8", ONE_A100, "missing", "A100"),
        ("name: H20, memory_gib: 95", ONE_H200, "missing", "H200"),  # a longer name
    ],
)
def test_a_gpu_is_known_by_name_and_memory(tmp_path, hardware, devices, status, said):
    check = checked(tmp_path, HARDWARE, f"{{device: cuda, {hardware}}}", devices)["hardware"]
    assert (check.status, said in check.found) == (status, True)


def test_each_worker_needs_a_gpu(tmp_path):
    checks = checked(tmp_path, HARDWARE, "{device: cuda, name: A100}\nworkers: 2", ONE_A100)
    assert says(checks["hardware"].found, "2", "A100", "NVIDIA", "A100-SXM4-80GB")


ABSENT = "source: absent/such-a-model"


@pytest.mark.parametrize(
    ("old", "new", "name", "status", "said"),
    [
        ("", "", "memory", "ok", "engine.kv_cache_memory_mib 1.0 1,024 2 512"),
        ("threads: 1", "threads: 4096", "hardware", "note", "4096"),
        ("memory_mib: 1", "memory_mib: 0.4", "memory", "missing", "not one row"),
        ("max_model_len: 512", "max_model_len: 2048", "memory", "missing", "not one row"),
        ("memory_mib: 1", "memory_mib: 1.0e+9", "memory", "missing", "1 workers 976,562.5 GiB"),
        ("source: random", "source: no/such/folder", "model", "missing", "no/such/folder"),
        ("source: random", ABSENT, "model", "missing", "hf download absent/such-a-model"),
        ("source: random", f"{ABSENT}, load_format: dummy, tokenizer: bytes", "model", "ok", ""),
        ("source: random", f"{ABSENT}, load_format: dummy, tokenizer: model", "model", "note", ""),
        ("type: llama", "type: llama, index_topk: 128", "not modelled", "missing", "128"),
    ],
)
def test_what_a_recipe_needs_is_checked(tmp_path, old, new, name, status, said):
    check = checked(tmp_path, old, new)[name]
    assert check.status == status
    assert says(f"{check.found} {check.remedy}", *said.split())


def test_kv_bytes_that_contradict_the_config_are_an_error(tmp_path):
    sizes = "num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 4, hidden_size: 256"
    with pytest.raises(InputError) as caught:
        checked(tmp_path, "model_type: llama", f"model_type: llama, {sizes}")
    assert says(caught.value.message, "model.kv_bytes_per_token", "1024", "2048")
    assert says(caught.value.hint, "4 layers", "4 KV heads")


def test_a_model_folder_needs_its_files(tmp_path):
    def check() -> Check:
        return checked(tmp_path, "source: random", f"source: {tmp_path}")["model"]

    assert check().found.endswith("no config.json in it")
    (tmp_path / "config.json").write_text("{}")
    assert check().found.endswith("no *.safetensors in it")
    (tmp_path / "model.safetensors").write_text("")
    assert check().status == "ok"


def test_a_folder_that_cannot_be_written_is_missing(tmp_path, monkeypatch):
    real = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path and real(path, mode))
    checks = {check.name: check for check in check_machine(CPU_ONLY, tmp_path / "out")}
    assert checks["disk"].status == "missing"
    assert checks["disk"].found == f"{tmp_path} cannot be written"


@pytest.mark.parametrize(
    ("devices", "status", "part"),
    [
        (CPU_ONLY, "ok", "CPU only; torch 2.13.0+cpu"),
        (ONE_A100, "ok", "NVIDIA A100-SXM4-80GB (79.1 GiB, 78.0 GiB free); driver 570.133.20"),
        (Devices("2.13.0+cpu", "", "570.1", ()), "note", "built without CUDA"),
        (Devices("2.13.0", "12.8", "", ()), "note", "sees no GPU"),
    ],
)
def test_the_device_is_described(tmp_path, devices, status, part):
    check = next(check for check in check_machine(devices, tmp_path) if check.name == "device")
    assert check.status == status
    assert part in check.found


@pytest.mark.parametrize("beside", ["", "0.32.0", "0.1.0"])
def test_the_program_that_a_recipe_names_is_not_run(beside, tmp_path):
    program = tmp_path / "bin" / "python"
    ran = tmp_path / "ran"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {ran}\necho 0.32.0\n")
    program.chmod(0o755)
    if beside:
        (tmp_path / f"lib/python3.12/site-packages/vllm-{beside}.dist-info").mkdir(parents=True)
    engine = f"engine: {{name: vllm, vllm: {{python: {program}}}, "
    found = checked(tmp_path, "engine: {threads: 1, ", engine)["engine"]
    assert found.status == {"": "note", "0.32.0": "ok", "0.1.0": "missing"}[beside]
    assert beside in found.found
    assert not ran.exists()
