"""The byte-level tokenizer: a token per UTF-8 byte, and three special ones. Built in code, it needs no download.

A model may have more tokens than this tokenizer: those, and the special ones, have no text.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

from toolkit.engines.chat import ChatTemplate
from toolkit.errors import InputError

BOS, EOS, PAD = 256, 257, 258
VOCAB_SIZE = 259


class ByteTokenizer:
    """`toolkit.engines.tokenizer.Tokenizer` without a vocabulary."""

    vocab_size = VOCAB_SIZE
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS

    def __init__(self) -> None:
        self._chat = ChatTemplate()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(utf8(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return _bytes_of(tokens).decode("utf-8", "replace")

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(self._chat.render(messages))

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    """Incremental UTF-8: bytes that begin a character wait, bytes that can be none become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        return self._decoder.decode(_bytes_of(tokens))

    def flush(self) -> str:
        """What was held back."""
        return self._decoder.decode(b"", final=True)


def utf8(text: str) -> bytes:
    """The text's bytes. `InputError` where it holds half of a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}, which is not text",
            "send both halves of the pair, or none",
        ) from None


def _bytes_of(tokens: Sequence[int]) -> bytes:
    return bytes([token for token in tokens if 0 <= token < 256])
