"""Text to tokens and back: bytes, a tokenizer.json and chat templates, all without torch."""

import json
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engines.tokenizer import (
    MAX_RENDER_S,
    MAX_TEMPLATE_CHARS,
    ByteTokenizer,
    ChatTemplate,
    FileTokenizer,
    load_tokenizer,
)
from toolkit.errors import EngineError, InputError
from toolkit.files.recipe import ModelSpec

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
TOKENS = st.lists(st.integers(0, 600))
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte-level BPE of 270 tokens and a template."""
    path = tmp_path_factory.mktemp("model")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["the cat sat on the mat, and the rat sat on that cat " * 20], trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    bpe.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": (
            "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        ),
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def bpe(folder: Path) -> FileTokenizer:
    return FileTokenizer(folder / "tokenizer.json", folder / "tokenizer_config.json")


def fed_one_by_one(tokenizer: ByteTokenizer | FileTokenizer, tokens: list[int]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join([detokenizer.feed([token]) for token in tokens]) + detokenizer.flush()


@given(TEXT)
def test_decoding_inverts_encoding(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens == list(text.encode())
    assert tokenizer.decode(tokens) == fed_one_by_one(tokenizer, tokens) == text


@given(TOKENS)
def test_any_tokens_decode_to_the_same_text_whole_and_in_pieces(tokens: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert fed_one_by_one(tokenizer, tokens) == tokenizer.decode(tokens)


def test_an_unfinished_character_is_held_back() -> None:
    detokenizer = ByteTokenizer().detokenizer()
    assert [detokenizer.feed([token]) for token in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    assert (detokenizer.feed([0xE2, 0x82]), detokenizer.flush()) == ("", "�")


def test_special_and_unknown_tokens_have_no_text() -> None:
    assert ByteTokenizer().decode([72, 256, 257, 258, 300, 511, 105]) == "Hi"


@pytest.mark.parametrize("text", ["a\ud800", "\udfff"])
def test_a_lone_surrogate_is_an_input_error(text: str, bpe: FileTokenizer) -> None:
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(InputError, match="lone surrogate"):
            tokenizer.encode(text)


@given(TEXT)
def test_a_tokenizer_file_encodes_and_streams_back(bpe: FileTokenizer, text: str) -> None:
    tokens = bpe.encode(text, special=False)
    assert bpe.decode(tokens) == fed_one_by_one(bpe, tokens) == text


@given(TOKENS)
def test_a_tokenizer_file_survives_any_tokens(bpe: FileTokenizer, tokens: list[int]) -> None:
    detokenizer = bpe.detokenizer()
    at_once = detokenizer.feed(tokens) + detokenizer.flush()
    assert at_once == fed_one_by_one(bpe, tokens)


def test_special_tokens_come_from_the_settings_file(bpe: FileTokenizer) -> None:
    assert (bpe.eos_token_id, bpe.vocab_size) == (1, 270)
    assert bpe.encode("the cat")[0] == 0
    assert bpe.encode("the cat")[1:] == bpe.encode("the cat", special=False)


def test_chat_uses_the_models_template(bpe: FileTokenizer) -> None:
    assert bpe.encode_chat(HELLO) == bpe.encode("<s>[system]Be brief.[user]Hi", special=False)


def test_a_template_file_takes_precedence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}!")
    settings = folder / "tokenizer_config.json"
    both = FileTokenizer(folder / "tokenizer.json", settings, tmp_path / "chat_template.jinja")
    assert both.decode(both.encode_chat(HELLO)) == "Hi!"


def test_a_model_without_a_template_gets_a_plain_one() -> None:
    tokenizer = ByteTokenizer()
    assert (
        tokenizer.decode(tokenizer.encode_chat(HELLO)) == "system: Be brief.\nuser: Hi\nassistant:"
    )


def test_the_tokenizer_of_a_recipe_is_loaded_from_its_folder(folder: Path) -> None:
    stored = ModelSpec(source=str(folder), max_model_len=10)
    assert load_tokenizer(stored).vocab_size == 270
    assert load_tokenizer(stored.model_copy(update={"tokenizer": "bytes"})).vocab_size == 259


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        load_tokenizer(ModelSpec(source=str(tmp_path), max_model_len=10))


def test_a_tokenizer_that_cannot_be_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match="example/missing"):
        load_tokenizer(ModelSpec(source="example/missing", max_model_len=10))


def test_an_invalid_tokenizer_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        load_tokenizer(ModelSpec(source=str(tmp_path), max_model_len=10))


def test_a_random_model_has_only_the_byte_tokenizer() -> None:
    with pytest.raises(EngineError) as caught:
        load_tokenizer(ModelSpec(source="random", config={"model_type": "llama"}, max_model_len=10))
    assert "model.tokenizer: bytes" in caught.value.hint


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 9 ** 9999999 }}",
        "{% for i in range(100000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxx{% endfor "
        "%}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
    ],
)
def test_forbidden_operations_of_a_template_are_refused(source: str) -> None:
    with pytest.raises(InputError, match="chat template"):
        ChatTemplate(source).render(HELLO)


def test_a_template_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count(0.0, MAX_RENDER_S / 3)
    monkeypatch.setattr("toolkit.engines.tokenizer.time.monotonic", lambda: next(ticks))
    with pytest.raises(InputError, match="takes too long"):
        ChatTemplate("{% for i in range(9) %}x{% endfor %}").render(HELLO)


@pytest.mark.parametrize("source", ["{% for %}", "x" * (MAX_TEMPLATE_CHARS + 1)])
def test_an_unusable_template_is_refused(source: str) -> None:
    with pytest.raises(EngineError, match="chat template"):
        ChatTemplate(source)


@pytest.mark.slow
def test_the_front_needs_no_torch() -> None:
    code = (
        "import sys, toolkit.engines.tokenizer, toolkit.engines.protocol;"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
