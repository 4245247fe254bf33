"""The prompts of a replay: random tokens that share what the trace says they share.

A block's tokens follow from its id and the seed alone, so prompts with the same leading ids begin
with the same tokens, in every run and for every tokenizer. A prompt without blocks has tokens of
its own. In a closed loop a turn's prompt is the prompt that was sent before, the answer that the
server gave, and new tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.endpoints.target import WORDS, Dialect, Prompt
from toolkit.endpoints.wire import Sample
from toolkit.traces.types import Trace

Hashes = NDArray[np.uint64]


def mixed(values: Hashes) -> Hashes:
    """Each value hashed to 64 bits (the finalizer of splitmix64): neighbours become unrelated."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


STEP = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's, between the numbers that are hashed


class Prompts:
    """Makes the prompts of `trace` in a server's dialect.

    Token ids are from 0 to below `vocab_size`, and a prompt has exactly its tokens. Without token
    ids it has words, about as many tokens, and shares the words of leading blocks.
    """

    def __init__(self, trace: Trace, dialect: Dialect, vocab_size: int, seed: int) -> None:
        self._trace, self._dialect = trace, dialect
        self._vocab_size, self._seed = vocab_size, seed
        # Of the blocks of this seed; the ids of another seed's have other tokens.
        self._salt = mixed(np.array([seed + 1], dtype=np.uint64) * STEP)

    def prompt(self, row: int) -> Prompt:
        """The prompt of a request that continues none."""
        tokens = int(self._trace.prompt_tokens[row])
        shared = self._trace.shared
        ids = shared.of(row) if shared else np.empty(0, dtype=np.int64)
        if shared is None or not len(ids):
            return self._dialect.prompt(self._rng(row), tokens, self._vocab_size)
        block = shared.block_tokens
        if self._dialect.token_ids:
            found = self._hashes(ids, np.arange(block))[:tokens]
            return [int(one) for one in found % np.uint64(self._vocab_size)]
        dialect = self._dialect
        count = max(round((tokens - dialect.flat_tokens) / dialect.tokens_per_word), 1)
        words = np.arange(count)
        place = np.minimum((words * dialect.tokens_per_word) // block, len(ids) - 1)
        hashes = self._hashes(ids[place.astype(np.int64)], words, each=True)
        return " ".join(WORDS[int(one)] for one in hashes % np.uint64(len(WORDS)))

    def next_prompt(self, row: int, before: Prompt, answered: Sample) -> Prompt:
        """The prompt of a turn: `before`, which was sent, its answer, and new tokens up to the
        trace's length (none if the two are longer).

        Where the server gave no token ids of its answer, other tokens stand for these.
        """
        dialect, rng = self._dialect, self._rng(row)
        wanted = int(self._trace.prompt_tokens[row])
        if isinstance(before, str):
            left = wanted - answered.counted_prompt_tokens - answered.output_tokens
            count = max(round(left / dialect.tokens_per_word), 0)
            new = [WORDS[index] for index in rng.integers(0, len(WORDS), count)]
            return " ".join([before + "".join(answered.answer_text), *new])
        answer = answered.answer_ids
        if len(answer) != answered.output_tokens:
            answer = self._drawn(rng, answered.output_tokens)
        new_ids = self._drawn(rng, max(wanted - len(before) - len(answer), 0))
        return [*before, *answer, *new_ids]

    def _drawn(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(0, self._vocab_size, count)]

    def _rng(self, row: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, row])

    def _hashes(
        self, ids: NDArray[np.int64], places: NDArray[np.int64], *, each: bool = False
    ) -> Hashes:
        """The hashes of all places in each block, one block after another; with `each` of one place
        in each.
        """
        of_block = mixed(ids.astype(np.uint64) * STEP + self._salt)
        steps = (places.astype(np.uint64) + np.uint64(1)) * STEP
        return mixed(of_block + steps) if each else mixed(of_block[:, None] + steps).reshape(-1)
