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
    piece_of,
)
from benchmarks.serving.replica_ends import cases, tried


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "name"), list(cases()), ids=lambda each: getattr(each, "name", each)
)
def test_an_answer_may_end_anywhere(dialect: Dialect, name: str):
    """At some places; `benchmarks.serving.replica_ends` tries every one."""
    found = asyncio.run(tried(dialect, name, every=97, first=len(name)))
    assert found.positions > 2
    assert found.differences == []


def texts(ids: list[int], stops: list[str], *, sends_stop: bool) -> tuple[list[str], str]:
    """The new text after each id until a stop string, and the stop string."""
    made = Detokenizer(stops, sends_stop=sends_stop)
    told = list[str]()
    for number, token in enumerate(ids):
        made.add(token)
        finished = bool(made.stopped) or number == len(ids) - 1
        told.append(made.take(finished=finished))
        if made.stopped:
            break
    return told, made.stopped


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
        assert texts(ids, [], sends_stop=False)[0] == theirs


def byte_names() -> dict[int, str]:
    """The characters by which byte-level vocabularies name bytes, as GPT-2's."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


@pytest.mark.slow
def test_the_detokenizer_gives_the_texts_of_vllms():
    detokenizer = pytest.importorskip("vllm.v1.engine.detokenizer")

    class Theirs(detokenizer.BaseIncrementalDetokenizer):
        """vLLM's rules of stop strings and of what is held back, over these pieces."""

        def __init__(self, request: object) -> None:
            super().__init__(request)
            self.pending = b""

        def decode_next(self, next_token_id: int) -> str:
            self.pending += piece_of(next_token_id)
            try:
                new = self.pending.decode()
            except UnicodeDecodeError:
                return ""
            self.pending = b""
            return new

    params = pytest.importorskip("vllm").SamplingParams
    rng = random.Random(3)
    for ids in samples(300):
        text = b"".join(map(piece_of, ids)).decode(errors="ignore")
        at = rng.randrange(len(text) - 5)
        stops = [text[at : at + rng.randrange(1, 5)], "zzz"]
        for sends_stop in (False, True):
            wanted = params(stop=stops, include_stop_str_in_output=sends_stop)
            theirs = Theirs(type("Request", (), {"sampling_params": wanted})())
            told = []
            stopped = None
            for number, token in enumerate(ids):
                stopped = theirs.update([token], False)
                finished = stopped is not None or number == len(ids) - 1
                told.append(theirs.get_next_output_text(finished, True))
                if stopped is not None:
                    break
            assert texts(ids, stops, sends_stop=sends_stop) == (told, stopped or "")
