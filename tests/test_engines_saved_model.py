"""A random model on disk: that of the recipe, made once, with a byte tokenizer."""

from pathlib import Path

import pytest
import tiny
import tokenizers
import torch
from transformers import AutoModelForCausalLM

from toolkit.engines.loading import load_model
from toolkit.engines.saved import saved_model
from toolkit.engines.tokenizer import ByteTokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_saved_model_is_that_of_the_recipe_and_is_made_once():
    folder = saved_model(tiny.model_spec(), tiny.CPU)
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert all(
        torch.equal(value, stored[name])
        for name, value in load_model(tiny.model_spec(), tiny.CPU).state_dict().items()
    )
    made = (Path(folder) / "config.json").stat().st_mtime_ns
    assert saved_model(tiny.model_spec(), tiny.CPU) == folder
    assert (Path(folder) / "config.json").stat().st_mtime_ns == made
    assert saved_model(tiny.model_spec(seed=2), tiny.CPU) != folder


def test_a_saved_model_has_the_byte_tokenizer():
    found = tokenizers.Tokenizer.from_file(
        str(Path(saved_model(tiny.model_spec(), tiny.CPU)) / "tokenizer.json")
    )
    text = "naïve 🙂\n\tfn(x) 's"
    assert found.encode(text).ids == ByteTokenizer().encode(text)
    assert found.decode(found.encode(text).ids) == text


def test_a_stored_model_is_loaded_from_its_own_folder():
    assert saved_model(tiny.model_spec(source="org/name"), tiny.CPU) == "org/name"
