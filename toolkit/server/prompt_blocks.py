"""Ids of the blocks of a prompt, by keyed hashes: what prompts share is seen, their content is not.

A block's id is a keyed hash of its content and of the id before it (a chain), cut to 53 bits, which
every JSON reader holds exactly. The key is random, made for one recording, and never stored, so
nothing can be looked up in the ids, also not by trying texts.

A prompt of token ids is cut into blocks of tokens. The tokens of a text are unknown: the bytes of
the prompt, or of a chat's tools and messages as the client wrote them, are cut into blocks of as
many bytes as a block of tokens had in the first text that the server counted. Each prompt gets as
many ids as its counted tokens make.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain, islice, repeat

from toolkit.openai.errors import ApiError
from toolkit.openai.requests import Prompt
from toolkit.server.bodies import LargeBodies

ID_BITS = 53
# A server adds tokens to a prompt, of a template or a picture; beyond these its count is not one.
MAX_ADDED_TOKENS = 1 << 16
LEAST_BYTES_PER_TOKEN = 1
MOST_BYTES_PER_TOKEN = 16  # of the blocks of texts


def chained_ids(pieces: Iterable[bytes], key: bytes) -> Iterator[int]:
    """Yield an id for each piece, which stands for it and all pieces before."""
    before = b""
    for piece in pieces:
        before = blake2b(before + piece, digest_size=16, key=key).digest()
        yield int.from_bytes(before[:8], "big") >> (64 - ID_BITS)


def pieces_of(
    prompt: Prompt, block_tokens: int, block_bytes: int, *, whole: bool = False
) -> list[bytes]:
    """Return a prompt in pieces of `block_tokens`, or of `block_bytes` of text. The last may be
    shorter, and with `whole` is then left out.
    """
    size = block_bytes
    content = prompt
    if not isinstance(content, bytes):
        content = array("q", content).tobytes()
        size = 8 * block_tokens
    end = len(content) - (size - 1 if whole else 0)
    return [content[at : at + size] for at in range(0, end, size)]


def blocks_of_prompt(
    content: Prompt, key: bytes, count: int, block_tokens: int, block_bytes: int
) -> list[int]:
    """Return `count` ids of a prompt. A server may add tokens: behind what a client sent the chain
    goes on, and so a longer prompt has other ids there.
    """
    pieces = chain(pieces_of(content, block_tokens, block_bytes), repeat(b""))
    return list(islice(chained_ids(pieces, key), count))


class PromptBlocks:
    """The ids of the prompts of one recording."""

    def __init__(self, block_tokens: int, bodies: LargeBodies) -> None:
        self._key = secrets.token_bytes(32)  # of this recording only, and never stored
        self._block_tokens = block_tokens
        self._bodies = bodies
        self._block_bytes = 0  # of text; 0: no text was counted yet

    async def ids(self, content: Prompt | None, prompt_tokens: int) -> list[int] | None:
        """Return the ids of a request's only prompt; None where they cannot be known, and where the
        prompt cannot have as many tokens.
        """
        if not content or not 1 <= prompt_tokens <= len(content) + MAX_ADDED_TOKENS:
            return None
        if isinstance(content, bytes) and not self._block_bytes:
            per_token = max(len(content) / prompt_tokens, LEAST_BYTES_PER_TOKEN)
            self._block_bytes = round(self._block_tokens * min(per_token, MOST_BYTES_PER_TOKEN))
        cut = partial(
            blocks_of_prompt,
            key=self._key,
            count=math.ceil(prompt_tokens / self._block_tokens),
            block_tokens=self._block_tokens,
            block_bytes=self._block_bytes,
        )
        try:
            return await self._bodies.read(cut, content)
        except ApiError:  # too many bodies wait to be read
            return None
