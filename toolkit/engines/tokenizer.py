"""Text to tokens and back, for the process that talks to clients: needs `tokenizers` and jinja2, no torch.

The byte tokenizer is built in code; others are read from `tokenizer.json` in a local folder or on the hub.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from toolkit.engines.bytes_tokenizer import ByteTokenizer, utf8
from toolkit.engines.chat import DEFAULT_TEMPLATE, ChatTemplate
from toolkit.errors import EngineError
from toolkit.files.recipe import ModelSpec

REPLACEMENT = "�"
MAX_HELD_TOKENS = 8  # no character is longer; what is still broken after these, stays broken


class Detokenizer(Protocol):
    """Turns one request's tokens into text, piece by piece."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens; bytes of an unfinished character wait inside."""
        ...

    def flush(self) -> str:
        """What was held back; nothing follows it."""
        ...


class Tokenizer(Protocol):
    """A model's tokenizer. Tokens that it does not have, and special ones, have no text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special` adds what the model expects around a text (BOS). `InputError` for a lone surrogate."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages of `role` and `content` in the model's chat template, up to where the assistant speaks."""
        ...

    def detokenizer(self) -> Detokenizer: ...


def load_tokenizer(model: ModelSpec) -> Tokenizer:
    """The tokenizer of a recipe's model. `EngineError` where there is none."""
    if model.tokenizer == "bytes":
        return ByteTokenizer()
    if model.source == "random":
        raise EngineError("a random model has no tokenizer of its own", "set model.tokenizer: bytes")
    file = _stored(model, "tokenizer.json")
    if file is None:
        raise EngineError(
            f"model {model.source} has no tokenizer.json",
            "save it once with transformers' AutoTokenizer, or set model.tokenizer: bytes",
        )
    settings = _stored(model, "tokenizer_config.json")
    template = _stored(model, "chat_template.jinja")
    return FileTokenizer(file, settings, template)


class FileTokenizer:
    """A tokenizer.json, with the special tokens and the chat template of the files beside it."""

    def __init__(self, file: Path, settings: Path | None = None, template: Path | None = None) -> None:
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # noqa: BLE001  (the library raises bare `Exception` for a file that it cannot read)
            raise EngineError(f"{file.name} is not a tokenizer: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        options = _read_json(settings)
        special = _special_tokens(options)
        self.vocab_size: int = self._inner.get_vocab_size()
        self.bos_token_id = self._id_of(special.get("bos_token"))
        self.eos_token_id = self._id_of(special.get("eos_token"))
        self._chat = ChatTemplate(_template_source(options, template), special)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        utf8(text)
        ids: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode(tokens, skip_special_tokens=True)
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(self._chat.render(messages), special=False)  # the template has written the special ones

    def detokenizer(self) -> WindowDetokenizer:
        return WindowDetokenizer(self)

    def _id_of(self, token: str | None) -> int | None:
        found: int | None = self._inner.token_to_id(token) if token else None
        return found


class WindowDetokenizer:
    """Decodes the last few tokens twice, without and with the new one: the difference is the new text.

    Decoding each token alone would lose what depends on its neighbours: spaces, and characters of several tokens. One
    token at a time, so that the text does not depend on how the tokens were delivered.
    """

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens of the last text that was given out, then those that wait
        self._given = 0  # how many of the window have been given out
        self._before = ""  # the text of these

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        return "".join([self._next(token) for token in tokens])

    def flush(self) -> str:
        """What was held back."""
        return self._give_out(self._tokenizer.decode(self._window))

    def _next(self, token: int) -> str:
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = len(text) > len(self._before) and not text.endswith(REPLACEMENT)
        if certain or len(self._window) - self._given >= MAX_HELD_TOKENS:
            return self._give_out(text)
        return ""

    def _give_out(self, text: str) -> str:
        new = text[len(self._before) :]
        self._window = self._window[self._given :]
        self._given = len(self._window)
        self._before = self._tokenizer.decode(self._window)
        return new


def _stored(model: ModelSpec, name: str) -> Path | None:
    """A file of the model: in its folder, or fetched from the hub (or the hub's local cache)."""
    folder = Path(model.source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model.source, name, revision=model.revision))
    except LocalEntryNotFoundError:
        raise _unreachable(model) from None
    except EntryNotFoundError:
        return None
    except (OSError, ValueError):
        raise _unreachable(model) from None


def _unreachable(model: ModelSpec) -> EngineError:
    return EngineError(
        f"the tokenizer of {model.source} is not here, and the hub cannot be reached or does not give it out",
        "check the name and HF_TOKEN, give a local folder, or set model.tokenizer: bytes",
    )


def _read_json(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EngineError(f"{file.name} is not JSON: {error}", "it comes with the model") from None
    return content if isinstance(content, dict) else {}


def _special_tokens(options: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on; each is a string, or an object with `content`."""
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = options.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_source(options: Mapping[str, Any], template: Path | None) -> str:
    """The file's template, or that of the settings, which may be a list of named ones; the default for neither."""
    if template is not None:
        return template.read_text(encoding="utf-8")
    source = options.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else DEFAULT_TEMPLATE
