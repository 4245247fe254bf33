"""A random model on disk: that of the recipe, made once, with a byte tokenizer."""

from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from toolkit.engines.loading import load_model
from toolkit.engines.saved import saved_model
from toolkit.engines.tokenizer import ByteTokenizer
from toolkit.files.recipe import HardwareSpec, ModelSpec

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
CPU = HardwareSpec(device="cpu", name="any")


def spec(**changes: object) -> ModelSpec:
    config = {"model_type": "llama", "vocab_size": 512, "max_position_embeddings": 64} | SIZES
    found = {
        "source": "random",
        "config": config,
        "tokenizer": "bytes",
        "dtype": "float32",
        "max_model_len": 64,
    }
    return ModelSpec.model_validate(found | changes)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_saved_model_is_that_of_the_recipe_and_is_made_once():
    folder = saved_model(spec(), CPU)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(
        torch.equal(value, stored[name])
        for name, value in load_model(spec(), CPU).state_dict().items()
    )
    made = (Path(folder) / "config.json").stat().st_mtime_ns
    assert saved_model(spec(), CPU) == folder
    assert (Path(folder) / "config.json").stat().st_mtime_ns == made
    assert saved_model(spec(seed=1), CPU) != folder


def test_a_saved_model_has_the_byte_tokenizer():
    found = tokenizers.Tokenizer.from_file(str(Path(saved_model(spec(), CPU)) / "tokenizer.json"))
    text = "naïve 🙂\n\tfn(x) 's"
    assert found.encode(text).ids == ByteTokenizer().encode(text)
    assert found.decode(found.encode(text).ids) == text


def test_a_stored_model_is_loaded_from_its_own_folder():
    assert saved_model(spec(source="org/name"), CPU) == "org/name"
