"""Text to tokens and back, for the process that serves clients: needs `tokenizers` and jinja2, not
torch.

A chat template comes with a model, never from a request. It runs in jinja2's immutable sandbox,
with bounds on its size, its output and its time, because a model's folder is downloaded data.
"""

from __future__ import annotations

import codecs
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from toolkit.errors import EngineError, InputError
from toolkit.extras import require
from toolkit.files.recipe import ModelSpec

# of the byte tokenizer
BOS = 256
EOS = 257
PAD = 258
VOCAB_SIZE = 259
BYTES_AT_ONCE = 1 << 18

REPLACEMENT = "�"
MAX_HELD_TOKENS = 8  # no character is longer: text that is still broken then stays broken

MAX_TEMPLATE_CHARS = 1 << 18
MAX_TEXT_CHARS = 1 << 24
MAX_RENDER_S = 5.0

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# What a template raises for messages that it does not expect: a client's error, not a crash.
TEMPLATE_FAILURES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)


class Detokenizer(Protocol):
    """Turns one request's tokens into text, piece by piece."""

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens; unfinished characters wait inside."""
        ...

    def flush(self) -> str:
        """The text that was held back, at the end of the output."""
        ...


class Tokenizer(Protocol):
    """A model's tokenizer. Unknown and special tokens have no text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int | None: ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The text's tokens; `special` adds the model's own special tokens (BOS). Raises
        `InputError` for a lone surrogate.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages of `role` and `content` in the chat template, up to the assistant's turn."""
        ...

    def detokenizer(self) -> Detokenizer: ...


def load_tokenizer(model: ModelSpec) -> Tokenizer:
    """The tokenizer of a recipe's model. Raises `EngineError` if there is none."""
    if model.tokenizer == "bytes":
        return ByteTokenizer()
    if model.source == "random":
        raise EngineError(
            "a random model has no tokenizer of its own", "set model.tokenizer: bytes"
        )
    file = _stored(model, "tokenizer.json")
    if file is None:
        raise EngineError(
            f"model {model.source} has no tokenizer.json",
            "save it once with transformers' AutoTokenizer, or set model.tokenizer: bytes",
        )
    settings = _stored(model, "tokenizer_config.json")
    template = _stored(model, "chat_template.jinja")
    return FileTokenizer(file, settings, template)


class ByteTokenizer:
    """`Tokenizer` with a token per UTF-8 byte and three special tokens.

    A model may have more tokens: those and the special ones have no text.
    """

    vocab_size = VOCAB_SIZE
    eos_token_id: int | None = EOS

    def __init__(self) -> None:
        self._chat = ChatTemplate()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        content = utf8(text)
        tokens: list[int] = []
        for at in range(0, len(content), BYTES_AT_ONCE):  # between, other threads may run
            tokens += content[at : at + BYTES_AT_ONCE]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return _bytes_of(tokens).decode("utf-8", "replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(self._chat.render(messages))

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    """Incremental UTF-8: the bytes of an unfinished character wait; invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        return self._decoder.decode(_bytes_of(tokens))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def utf8(text: str) -> bytes:
    """The text's bytes. Raises `InputError` for half of a surrogate pair, which JSON can hold."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, "
            "which is not text",
            "send both halves of the pair, or none",
        ) from None


def _bytes_of(tokens: Sequence[int]) -> bytes:
    return bytes([token for token in tokens if 0 <= token < 256])


class FileTokenizer:
    """`Tokenizer` from a tokenizer.json, and the special tokens and template in its folder.

    Raises `EngineError` if the file is none, or `tokenizers` is not installed.
    """

    def __init__(
        self, file: Path, settings: Path | None = None, template: Path | None = None
    ) -> None:
        require(("tokenizers",), file.name, "pip install tokenizers")
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # noqa: BLE001  (the library raises bare `Exception`)
            raise EngineError(f"{file.name} is not a tokenizer: {error}") from None
        self._inner.no_truncation()
        self._inner.no_padding()
        options = _read_json(settings)
        special = _special_tokens(options)
        self.vocab_size: int = self._inner.get_vocab_size()
        eos = special.get("eos_token")
        self.eos_token_id: int | None = self._inner.token_to_id(eos) if eos else None
        self._chat = ChatTemplate(_template_source(options, template), special)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        utf8(text)
        # A batch of one text: other than `encode`, this call releases Python's global lock.
        (encoded,) = self._inner.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._inner.decode(tokens, skip_special_tokens=True)
        return text

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = self._chat.render(messages)  # with special tokens, so `encode` must add none
        return self.encode(text, special=False)

    def detokenizer(self) -> WindowDetokenizer:
        return WindowDetokenizer(self)


class WindowDetokenizer:
    """Decodes the last few tokens without and with each new one: the difference is the new text.

    Decoding a token alone would lose what depends on its neighbours: spaces, and characters of
    several tokens. Tokens are decoded one at a time, so that the text does not depend on how they
    were delivered.
    """

    def __init__(self, tokenizer: FileTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the tokens of the last emitted text, then the held ones
        self._emitted = 0  # tokens at the start of the window, with emitted text
        self._emitted_text = ""

    def feed(self, tokens: Sequence[int]) -> str:
        certain_text = ""
        for token in tokens:
            self._window.append(token)
            text = self._tokenizer.decode(self._window)
            certain = len(text) > len(self._emitted_text) and not text.endswith(REPLACEMENT)
            if certain or len(self._window) - self._emitted >= MAX_HELD_TOKENS:
                certain_text += self._emit(text)
        return certain_text

    def flush(self) -> str:
        return self._emit(self._tokenizer.decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self._emitted_text = self._tokenizer.decode(self._window)
        return new


def _stored(model: ModelSpec, name: str) -> Path | None:
    """A file of the model's folder, or of the hub or its local cache; None if it has none."""
    folder = Path(model.source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model.source, name, revision=model.revision))
    except (EntryNotFoundError, OSError, ValueError) as error:
        was_reached = not isinstance(error, LocalEntryNotFoundError)
        if was_reached and isinstance(error, EntryNotFoundError):
            return None
        raise EngineError(
            f"the tokenizer of {model.source} is not on this machine, and the hub cannot be "
            "reached or does not provide it",
            "check the name and HF_TOKEN, give a local folder, or set model.tokenizer: bytes",
        ) from None


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
    special: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = options.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special[name] = text
    return special


def _template_source(options: Mapping[str, Any], template: Path | None) -> str:
    """The template of the file, else of the settings, perhaps from a list, else the default."""
    if template is not None:
        return template.read_text(encoding="utf-8")
    source = options.get("chat_template")
    if isinstance(source, list):
        named = {
            entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)
        }
        source = named.get("default")
    return source if isinstance(source, str) else DEFAULT_TEMPLATE


class ChatTemplate:
    """A compiled chat template: from a list of messages to the text that a model was trained on.

    Args:
        source: jinja2 text; the default names each speaker.
        special_tokens: `bos_token` and the like, which templates refer to.

    Raises `EngineError` for a template that is too large or does not compile.
    """

    def __init__(
        self, source: str = DEFAULT_TEMPLATE, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise EngineError(
                f"the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE_CHARS}"
            )
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # Plain JSON, not escaped for HTML, as in transformers.
        environment.filters["tojson"] = lambda value, indent=None, **_: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise EngineError(
                f"the chat template does not compile: {error}", "it comes with the model"
            ) from None
        self._special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt's text. Raises `InputError` if the template refuses these messages, writes too
        much or takes too long.
        """
        deadline_s = time.monotonic() + MAX_RENDER_S
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=list(messages), add_generation_prompt=True, **self._special_tokens
            ):
                size += len(piece)
                if size > MAX_TEXT_CHARS or time.monotonic() > deadline_s:
                    raise InputError(
                        "messages: the model's chat template writes too much or takes too long"
                    )
                pieces.append(piece)
        except TEMPLATE_FAILURES as error:
            raise InputError(f"messages: the model's chat template refuses them: {error}") from None
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox; it also stops a template that multiplies or pads a string to gigabytes."""

    intercepted_binops = frozenset(("*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = (int, float)
        if not (isinstance(left, numbers) and isinstance(right, numbers)):
            raise SecurityError(f"'{operator}' accepts only numbers here")
        if operator == "**" and abs(right) > 64:
            raise SecurityError(f"the exponent {right} is too large")
        return super().call_binop(context, operator, left, right)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
