"""Prompts by their bytes: about how many tokens they have, and what they share. They are not
tokenized here.

A block's id is a keyed hash of its content and of the id before it (a chain), cut to 53 bits, which
every JSON reader holds exactly. The key is random, of this process, and never stored, so nothing
can be looked up in the ids, also not by trying texts.
"""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from toolkit.openai.requests import Prompt

ID_BITS = 53
BYTES_PER_TOKEN = 4.0  # of text, before any was counted
LEAST_BYTES_PER_TOKEN = 1.0  # of a prompt, whatever a server counts
MOST_BYTES_PER_TOKEN = 8.0
COUNTED_PROMPTS = 32  # then the bytes of a block are fixed
GAUGED_PROMPTS = 64  # that the mean is of: older ones lose weight
GAUGED_TOKENS = 1024  # a shorter prompt counts for less
# A server adds tokens to a prompt, of a template or a picture; beyond these its count is not one.
MAX_ADDED_TOKENS = 1 << 16


class PromptGauge:
    """Estimates of prompts from their bytes, with the mean bytes per token that servers counted.

    One request moves the mean by little, whatever its prompt and its server's count are: what one
    client sends must not change the limits of another.

    A block is a piece of a prompt: as many bytes as `block_tokens` tokens have in the first
    prompts. Equal ids stand for equal bytes in the block and in all before it.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._key = secrets.token_bytes(32)
        self._counted = 0
        self._block_bytes = round(block_tokens * BYTES_PER_TOKEN)
        self.bytes_per_token = BYTES_PER_TOKEN

    def tokens(self, prompts: Sequence[Prompt]) -> int:
        """About how many tokens prompts have together."""
        counts = (
            len(prompt) if isinstance(prompt, list) else round(len(prompt) / self.bytes_per_token)
            for prompt in prompts
        )
        return max(sum(max(count, 1) for count in counts), 1)

    def blocks(self, prompt: Prompt | None) -> tuple[int, ...]:
        """Return the ids of a prompt's full blocks."""
        content = prompt or b""
        size = self._block_bytes
        if not isinstance(content, bytes):
            content = array("q", content).tobytes()
            size = 8 * self.block_tokens
        ids: list[int] = []
        before = b""
        for at in range(0, len(content) - size + 1, size):
            piece = content[at : at + size]
            before = blake2b(before + piece, digest_size=16, key=self._key).digest()
            ids.append(int.from_bytes(before[:8], "big") >> (64 - ID_BITS))
        return tuple(ids)

    def logged(self, blocks: Sequence[int], tokens: int) -> list[int] | None:
        """Return an id for each block that a prompt of `tokens` begins: behind its full blocks, ids
        that no other prompt has. None where it cannot have as many tokens.
        """
        count = math.ceil(tokens / self.block_tokens)
        further = count - len(blocks)
        if further * self.block_tokens > MAX_ADDED_TOKENS:
            return None
        return [*blocks[:count], *(secrets.randbits(ID_BITS) for _ in range(further))]

    def count(self, prompt: Prompt | None, tokens: int) -> None:
        """A server counted a prompt's tokens."""
        if not isinstance(prompt, bytes) or tokens < 1 or not prompt:
            return
        ratio = min(max(len(prompt) / tokens, LEAST_BYTES_PER_TOKEN), MOST_BYTES_PER_TOKEN)
        weight = min(tokens / GAUGED_TOKENS, 1.0) / GAUGED_PROMPTS
        self.bytes_per_token += weight * (ratio - self.bytes_per_token)
        self._counted += 1
        if self._counted == COUNTED_PROMPTS:
            self._block_bytes = max(round(self.block_tokens * self.bytes_per_token), 1)
