"""The shipped recipes: valid, current with their schema, and right in their arithmetic."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel
from said import says

from docs.make_recipes import names_and_texts
from toolkit.catalogue.gpus import GPUS as GPUS_KNOWN
from toolkit.cli.arguments import open_recipe
from toolkit.deploy.doctor import check_recipe, check_sizes
from toolkit.engines.devices import CudaDevice, Devices
from toolkit.errors import InputError
from toolkit.files.find_model import find_model
from toolkit.files.new_recipe import Wish, new_recipe
from toolkit.files.recipe import ModelSpec, Recipe, recipe_schema
from toolkit.files.shipped import shipped_recipes
from toolkit.profiling.analytic import pass_shape, pass_times

DOCS = Path(__file__).parent.parent / "docs"
MADE = names_and_texts()
RECIPES = sorted(shipped_recipes().glob("*.yaml"))
BY_HAND = [path for path in RECIPES if path.stem not in MADE]
GPU_RECIPES = [path for path in BY_HAND if not path.stem.startswith("tiny")]
CPU_ONLY = Devices(torch="2.13.0+cpu", cuda="", driver="", gpus=())

# Layers, KV heads, head dimension, bytes per value, and parameters, as published with each model.
PUBLISHED = {
    "meta-llama/Llama-3.1-8B": (32, 8, 128, 2, 8_030_261_248),
}
GPUS = {"A100-80GB": ("NVIDIA A100-SXM4-80GB", 79.1), "H200": ("NVIDIA H200", 139.8)}


@pytest.mark.slow
def test_every_model_has_a_recipe_for_every_gpu() -> None:
    found = {(recipe.model.source, recipe.hardware.name) for recipe in map(open_recipe, BY_HAND)}
    wanted = {(model, gpu) for model in PUBLISHED for gpu in GPUS}
    assert found == wanted | {("random", "any CPU")}


@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_a_bare_name_is_the_recipe_for_vllm(path: Path) -> None:
    engine = open_recipe(path).engine.name
    base = re.fullmatch(r"(.*-(?:h200|a100-80gb))(?:-(\w+))?", path.stem)
    assert base
    assert {None: "vllm", "measured": "vllm"}.get(base[2], base[2]) == engine
    assert open_recipe(shipped_recipes() / f"{base[1]}.yaml").engine.name == "vllm"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid_and_named_as_its_file(path: Path) -> None:
    assert open_recipe(path).name == path.stem
    assert path.read_text().startswith("# yaml-language-server: $schema=recipe.schema.json\n")


@pytest.mark.slow
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_a_gpu_recipe_has_the_published_sizes(path: Path) -> None:
    model = open_recipe(path).model
    layers, kv_heads, head_dim, size, parameters = PUBLISHED[model.source]
    assert model.kv_bytes_per_token == 2 * layers * kv_heads * head_dim * size
    assert model.weight_bytes == size * parameters
    assert model.weight_bytes == size * parameters_of(model)


def parameters_of(model: ModelSpec) -> int:
    """Parameters of the model that transformers builds from the recipe's config; nothing is
    allocated.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from toolkit.engines.loading import load_config

    config = load_config(model.model_copy(update={"load_format": "dummy"}))
    with torch.device("meta"):
        return sum(
            weights.numel() for weights in AutoModelForCausalLM.from_config(config).parameters()
        )


@pytest.mark.parametrize("name", MADE)
def test_a_made_recipe_is_what_recipe_new_writes(name: str) -> None:
    path = shipped_recipes() / f"{name}.yaml"
    assert path.read_text(encoding="utf-8") == MADE[name], "make reference"
    recipe = open_recipe(path)
    assert [check.status for check in check_sizes(recipe)] == ["ok"]
    assert pass_times(recipe).one(pass_shape(1, 1024)) > 0.0


@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_a_recipe_by_hand_has_what_recipe_new_would_write(tmp_path: Path, gpu: str) -> None:
    model = "llama-3.1-8b"
    file = tmp_path / "recipe.yaml"
    file.write_text(new_recipe(find_model(model), Wish(GPUS_KNOWN[gpu])).text, encoding="utf-8")
    made = open_recipe(file)
    shipped = open_recipe(shipped_recipes() / f"{model}-{gpu}.yaml")
    assert shipped.name == made.name
    assert (shipped.model, shipped.engine, shipped.policy) == (made.model, made.engine, made.policy)
    assert (shipped.sla, shipped.serve.max_new_tokens) == (made.sla, made.serve.max_new_tokens)
    figures = {"gpu", "usd_per_hour"}
    assert shipped.hardware.model_dump(exclude=figures) == made.hardware.model_dump(exclude=figures)


@pytest.mark.slow
@pytest.mark.parametrize("path", BY_HAND, ids=lambda path: path.stem)
def test_a_recipe_fits_its_own_hardware(path: Path) -> None:
    recipe = open_recipe(path)
    devices = CPU_ONLY
    if recipe.hardware.device == "cuda":
        name, memory_gib = GPUS[recipe.hardware.name]
        gpu = CudaDevice(0, name, int(memory_gib * 2**30), int(memory_gib * 2**30))
        devices = Devices(torch="2.13.0", cuda="12.8", driver="570.1", gpus=(gpu,))
    checks = {check.name: check for check in check_recipe(recipe, devices)}
    assert checks["memory"].status == "ok"
    assert checks["hardware"].status in (
        "ok",
        "note",
    )  # a note where this machine has fewer CPUs than threads


@pytest.mark.slow
def test_a_recipe_for_vllm_has_that_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMCTL_VLLM_PYTHON", "/nowhere/python")
    found = {
        check.name: check
        for check in check_recipe(open_recipe(shipped_recipes() / "tiny-llama-vllm.yaml"), CPU_ONLY)
    }
    assert found["engine"].status == "missing"
    assert says(found["engine"].found, "/nowhere/python")
    assert "pip install 'vllm" in found["engine"].remedy


def test_the_schema_file_is_current() -> None:
    written = json.loads((shipped_recipes() / "recipe.schema.json").read_text())
    assert written == recipe_schema(), "write it again: python -m docs.make_recipes"


@pytest.mark.parametrize(
    ("name", "parameters", "named"),
    [
        ("slise", "{}", ("'slise'",)),
        ("slice", "{slice_token: 32}", ("'slice'", "'slice_token'")),
        ("slice", "{slice_tokens: 0}", ("'slice'", "slice_tokens", "0", "1")),
    ],
)
def test_an_unknown_policy_or_parameter_is_named(
    tmp_path: Path, name: str, parameters: str, named: tuple[str, ...]
) -> None:
    text = (shipped_recipes() / "tiny-llama-cpu.yaml").read_text()
    assert "\n  name: slice " in text
    changed = text.replace("\n  name: slice ", f"\n  name: {name}\n  parameters: {parameters} ")
    (tmp_path / "recipe.yaml").write_text(changed)
    with pytest.raises(InputError) as caught:
        open_recipe(tmp_path / "recipe.yaml")
    assert says(caught.value.message, "recipe.yaml: policy", *named)


def keys_of(model: type[BaseModel]) -> set[str]:
    """The names of all keys of a model and of the models in it."""
    named = [
        kind
        for f in model.model_fields.values()
        for kind in (f.annotation, *get_args(f.annotation))
    ]
    inner = [kind for kind in named if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return set(model.model_fields).union(*map(keys_of, inner))


def test_every_key_has_a_meaning_that_the_docs_show() -> None:
    text = (DOCS / "reference" / "recipe-keys.md").read_text(encoding="utf-8")
    documented = {
        key: meaning.strip()
        for key, meaning in re.findall(r"^\| `(\w+)` \|.*\| (.*)\|$", text, re.M)
    }
    sections = set(re.findall(r"^### (\w+)$", text, re.M))
    assert documented.keys() | sections == keys_of(Recipe)
    assert [key for key, meaning in documented.items() if not meaning] == []


def test_the_recipe_in_the_docs_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(
        r"```yaml\n(.*?)```", (DOCS / "reference" / "recipe.md").read_text(), re.S
    )
    (tmp_path / "recipe.yaml").write_text(example)
    assert open_recipe(tmp_path / "recipe.yaml").name == "my-model-h200"
