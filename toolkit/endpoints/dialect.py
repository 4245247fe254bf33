"""How a server wants to be asked. Not all that speak OpenAI's API take the same fields; one request each tells.

vLLM, SGLang and llmctl take token ids and `ignore_eos`; transformers' `serve` takes text alone and refuses fields that
it does not know. Without token ids a prompt's length is only near what was wanted: the server's own count says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np

from toolkit.endpoints.target import Target, post, refusal
from toolkit.errors import InputError

# Short words, one token each in the usual vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "power hour game line end member law car city"
)
WORDS = _TEXT.split()
CALIBRATION = (16, 80)  # words of the two prompts from which tokens per word are taken
COMPLETIONS = "/v1/completions"
REFUSED = (400, 422)  # what a server answers that does not like a field

Prompt = list[int] | str


@dataclass(slots=True, frozen=True)
class Dialect:
    """What may stand in a request, and for prompts of text how many tokens words have."""

    token_ids: bool = True  # a prompt may be a list of token ids
    ignore_eos: bool = True
    usage_option: bool = True  # stream_options.include_usage; without it usage must come by itself
    tokens_per_word: float = 1.0
    flat_tokens: float = 0.0  # what the server puts around a prompt

    def prompt(self, rng: np.random.Generator, tokens: int, vocab_size: int) -> Prompt:
        """A random prompt of `tokens` tokens, as nearly as the server lets one say: no cache of prefixes helps."""
        if self.token_ids:
            return [int(token) for token in rng.integers(0, vocab_size, tokens)]
        count = max(round((tokens - self.flat_tokens) / self.tokens_per_word), 1)
        return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), count))

    def request(
        self,
        model: str,
        prompt: Prompt,
        max_tokens: int,
        *,
        end_after: int | None = None,
        stream: bool = True,
        priority: int = 0,
    ) -> dict[str, object]:
        """The body of a greedy completion of `max_tokens`, or of `end_after`, which llmctl's engine alone knows.

        A `priority` of 0 is every server's default, and not named: some refuse fields that they do not know.
        """
        fields: dict[str, object] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        fields["stream"] = stream
        if stream and self.usage_option:
            fields["stream_options"] = {"include_usage": True}
        if priority:
            fields["priority"] = priority
        return fields if end_after is None else fields | {"llmctl_end_after": end_after}

    @property
    def lacks(self) -> list[str]:
        """What this server does not do, for people."""
        missing = {"prompts of token ids": self.token_ids, "ignore_eos": self.ignore_eos}
        return [name for name, there in missing.items() if not there]


FULL = Dialect()


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class Answer(msgspec.Struct):
    usage: Usage


def learn(target: Target) -> Dialect:
    """The fullest dialect that the server takes.

    Raises `InputError` with the server's own words where it takes none, and where it does not count tokens.
    """
    first: tuple[int, bytes] | None = None
    for dialect in _dialects():
        status, body = post(target, COMPLETIONS, dialect.request(target.model, _probe(dialect), 1))
        if status == 200:
            return dialect if dialect.token_ids else _calibrated(target, dialect)
        if status not in REFUSED:
            first = status, body
            break
        first = first or (status, body)
    assert first
    raise refusal(target, COMPLETIONS, *first, "llmctl asks servers of text completions")


def _dialects() -> Iterator[Dialect]:
    """The fullest first."""
    for fields in sorted(product((True, False), repeat=3), key=lambda fields: -sum(fields)):
        yield Dialect(*fields)


def _probe(dialect: Dialect) -> Prompt:
    return dialect.prompt(np.random.default_rng(0), 8, 64)


def _calibrated(target: Target, dialect: Dialect) -> Dialect:
    few, many = (_counted(target, dialect, words) for words in CALIBRATION)
    per_word = (many - few) / (CALIBRATION[1] - CALIBRATION[0])
    if per_word <= 0:
        raise InputError(
            f"{target.url}: prompts of {CALIBRATION[0]} and {CALIBRATION[1]} words count as {few} and {many} tokens",
            "the server's usage.prompt_tokens cannot be right",
        )
    return Dialect(
        dialect.token_ids, dialect.ignore_eos, dialect.usage_option, per_word, few - CALIBRATION[0] * per_word
    )


def _counted(target: Target, dialect: Dialect, words: int) -> int:
    prompt = dialect.prompt(np.random.default_rng(words), words, 0)
    status, body = post(target, COMPLETIONS, dialect.request(target.model, prompt, 1, stream=False))
    try:
        if status == 200:
            return msgspec.json.decode(body, type=Answer).usage.prompt_tokens
    except msgspec.DecodeError:
        pass
    raise InputError(f"{target.url}: HTTP {status} without usage for {words} words", "a server must count its tokens")
