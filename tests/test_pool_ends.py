"""Wherever a replica ends its answer, the client gets the answer that was not disturbed."""

import asyncio
import random

import pytest

from benchmarks.common.dialects import (
    FIRST_ID,
    PIECES,
    Detokenizer,
    Dialect,
    generate,
)
from benchmarks.serving.replica_ends import cases, tried
from toolkit.server import relay


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "name"), list(cases()), ids=lambda each: getattr(each, "name", each)
)
def test_an_answer_may_end_anywhere(dialect: Dialect, name: str, monkeypatch: pytest.MonkeyPatch):
    """At some places; `benchmarks.serving.replica_ends` tries every one."""
    monkeypatch.setattr(relay, "PAUSE_S", 0.0)
    found = asyncio.run(tried(dialect, name, every=211, first=len(name)))
    assert found.positions > 2
    assert found.differences == []


def texts(ids: list[int]) -> list[str]:
    """The new text after each id."""
    made = Detokenizer([], sends_stop=False)
    told = []
    for number, token in enumerate(ids):
        made.add(token)
        told.append(made.take(finished=number == len(ids) - 1))
    return told


def samples(count: int) -> list[list[int]]:
    rng = random.Random(7)
    found = []
    for number in range(count):
        tokens = generate([rng.randrange(50)], plain=number % 3 == 0)
        found.append([next(tokens) for _ in range(40)])
    return found


def test_the_detokenizer_gives_the_texts_of_hugging_faces():
    """Without stop strings: `DecodeStream` over bytes, which vLLM's own uses."""
    tokenizers = pytest.importorskip("tokenizers")
    names = byte_names()
    vocabulary = {
        "".join(names[byte] for byte in piece): number for number, piece in enumerate(PIECES)
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for ids in samples(200):
        stream = tokenizers.decoders.DecodeStream(skip_special_tokens=False)
        theirs = [stream.step(tokenizer, token - FIRST_ID) or "" for token in ids]
        assert texts(ids) == theirs


def byte_names() -> dict[int, str]:
    """The characters by which byte-level vocabularies name bytes, as GPT-2's."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }
