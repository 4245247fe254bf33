"""What a forward pass computes, and the features that a law of its time is a sum over.

`FEATURES` is the one list of terms. A new term is a line there: fits can use it, fit.json can name
it, and every law evaluates it. It counts a number of the pass (`NUMBERS`) in one part of the time:

    both         the work of any pass
    alone        the work of a pass of decodes alone
    mixed        the work of a pass with chunks of prompts
    reads        what decodes alone read, and passes with chunks at least, beside what is `mixed`
    arithmetic   with chunks: and at least this
    host         between two passes that do not overlap
    graph, piece, eager      the launch of a CUDA graph, in pieces, or kernel by kernel

Each row pays for the sampler. Decodes read their cache; chunks attend to theirs and to themselves,
and also pay for reading theirs, as a short chunk behind a long cache shows. Attention kernels that
compute decodes and chunks together may read a decode's cache more slowly than kernels for decodes
alone (1.9 times on an RTX 4090, by the measured operators of LLMServingSim).

A mixture of experts reads the weights of those experts that at least one of T new tokens chose: of
E, k per token, E * (1 - (1 - k / E)^T) are expected, if all are chosen alike. In layers with
sliding windows of W tokens a decode reads at most W - 1 cached tokens. Layers with states (Mamba,
linear attention) read no cached tokens, but a state for each row.

Only sums over the batch matter, as in Vidur (arXiv:2405.05465), so a pass needs no list of its
rows. Cache reads are counted in tokens, not in blocks.
"""

from __future__ import annotations

import math
from typing import Final

from mypy_extensions import i64

# What a `StepShape` is made of, in the order of its constructor.
SHAPE_NUMBERS: Final = (
    *("decodes", "decode_cached", "prefills", "prefill_tokens", "prefill_attended"),
    *("prefill_cached", "decode_inside", "prefill_inside", "growing", "draft_tokens"),
)


class StepShape:
    """What one forward pass computes. Its constructor is by hand, like that of `Pass`.

    Attributes:
        decodes: rows that compute their last token, and with speculative decoding drafts.
        decode_cached: sum of the tokens in those rows' caches before the pass.
        prefills: rows that compute a chunk of their prompt or of a recomputed input.
        prefill_tokens: sum of the chunks' tokens.
        prefill_attended: new * (cached + new / 2), summed over the chunks.
        prefill_cached: sum of the tokens in the caches before the chunks.
        decode_inside: of a model with sliding windows of W tokens, min(cached, W - 1), summed over
            the rows that decode.
        prefill_inside: new * min(cached + new / 2, W), summed over the chunks.
        growing: decoding rows with less than W - 1 tokens cached.
        draft_tokens: drafts that the decodes verify, together.
    """

    __slots__ = (
        "decode_cached",
        "decode_inside",
        "decodes",
        "draft_tokens",
        "growing",
        "prefill_attended",
        "prefill_cached",
        "prefill_inside",
        "prefill_tokens",
        "prefills",
    )

    def __init__(
        self,
        decodes: int,
        decode_cached: int,
        prefills: int = 0,
        prefill_tokens: int = 0,
        prefill_attended: float = 0.0,
        prefill_cached: int = 0,
        decode_inside: int = 0,
        prefill_inside: float = 0.0,
        growing: int = 0,
        draft_tokens: int = 0,
    ) -> None:
        self.decodes = decodes
        self.decode_cached = decode_cached
        self.prefills = prefills
        self.prefill_tokens = prefill_tokens
        self.prefill_attended = prefill_attended
        self.prefill_cached = prefill_cached
        self.decode_inside = decode_inside
        self.prefill_inside = prefill_inside
        self.growing = growing
        self.draft_tokens = draft_tokens

    def values(self) -> tuple[int, int, int, int, float, int, int, float, int, int]:
        """Return the numbers that the constructor takes, in its order (`SHAPE_NUMBERS`)."""
        return (
            self.decodes,
            self.decode_cached,
            self.prefills,
            self.prefill_tokens,
            self.prefill_attended,
            self.prefill_cached,
            self.decode_inside,
            self.prefill_inside,
            self.growing,
            self.draft_tokens,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepShape) and self.values() == other.values()

    @property
    def rows(self) -> int:
        """Rows in the pass."""
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        """New tokens in the pass; `max_num_batched_tokens` bounds them."""
        return self.decodes + self.draft_tokens + self.prefill_tokens


ONE: Final = 0
ROWS: Final = 1
CACHED: Final = 2
TOKENS: Final = 3
CHUNKS: Final = 4
ATTENDED: Final = 5
BEHIND: Final = 6
EXPERTS: Final = 7
INSIDE: Final = 8
ATTENDED_INSIDE: Final = 9
LENGTH: Final = 10
# In the order of the constants above. `tokens` counts a graph's padding, `experts` does not;
# `length` is the mean of the rows, which in a batch of equal rows is the length of each.
NUMBERS: Final = (
    "one",
    "rows",
    "cached",
    "tokens",
    "chunks",
    "attended",
    "behind",
    "experts",
    "inside",
    "attended_inside",
    "length",
)


def number_of(number: i64, shape: StepShape, tokens: int, experts: float) -> float:
    """Return one of the `NUMBERS` of a pass with these new tokens and touched experts."""
    if number == ONE:
        return 1.0
    if number == ROWS:
        return float(shape.decodes + shape.prefills)
    if number == CACHED:
        return float(shape.decode_cached)
    if number == TOKENS:
        return float(tokens)
    if number == CHUNKS:
        return float(shape.prefills)
    if number == ATTENDED:
        return shape.prefill_attended
    if number == BEHIND:
        return float(shape.prefill_cached)
    if number == EXPERTS:
        return experts
    if number == INSIDE:
        return float(shape.decode_inside)
    if number == ATTENDED_INSIDE:
        return shape.prefill_inside
    return (shape.decode_cached + shape.prefill_tokens) / (shape.decodes + shape.prefills)


GRAPH: Final = 0
PIECEWISE: Final = 1
EAGER: Final = 2
ALONE: Final = 3
MIXED: Final = 4
READS: Final = 5
ARITHMETIC: Final = 6
HOST: Final = 7
PARTS: Final[dict[str, tuple[int, ...]]] = {
    "graph": (GRAPH,),
    "piece": (PIECEWISE,),
    "eager": (EAGER,),
    "both": (ALONE, MIXED),
    "alone": (ALONE,),
    "mixed": (MIXED,),
    "reads": (ALONE, READS),
    "arithmetic": (ARITHMETIC,),
    "host": (HOST,),
}


class Feature:
    """What a term counts: a number of a pass.

    Attributes:
        number: its place in `NUMBERS`.
        parts: of the time, in which it counts.
        words: for messages.
    """

    __slots__ = ("number", "parts", "words")

    def __init__(self, part: str, number: str, words: str) -> None:
        self.parts = PARTS[part]
        self.number: i64 = NUMBERS.index(number)
        self.words = words

    def of(self, shape: StepShape, tokens: int, experts: float) -> float:
        """Return what it counts in a pass, 0 where it does not apply to the pass."""
        if self.parts == (ALONE if shape.prefills else MIXED,):
            return 0.0
        return number_of(self.number, shape, tokens, experts)


FEATURES: dict[str, Feature] = {
    "pass": Feature("both", "one", "a pass"),
    "row": Feature("both", "rows", "a row"),
    "chunk": Feature("mixed", "chunks", "a chunk"),
    "cached": Feature("both", "cached", "cached tokens of decodes"),
    "cached_alone": Feature("alone", "cached", "cached tokens of decodes alone"),
    "cached_beside": Feature("mixed", "cached", "cached tokens of decodes beside chunks"),
    "attended": Feature("mixed", "attended", "attended tokens of chunks"),
    "behind": Feature("mixed", "behind", "cached tokens before chunks"),
    "token": Feature("both", "tokens", "new tokens"),
    "expert": Feature("both", "experts", "touched experts"),
    "inside": Feature("both", "inside", "cached tokens in windows of decodes"),
    "attended_inside": Feature("mixed", "attended_inside", "attended tokens in windows of chunks"),
    "length": Feature("both", "length", "tokens of the longest row"),
    "host": Feature("host", "one", "the host's time between passes"),
    "host_row": Feature("host", "rows", "the host's time of a row"),
    # of passes that overlap
    "pass_read": Feature("reads", "one", "a pass that reads the weights"),
    "expert_read": Feature("reads", "experts", "experts that are read"),
    "token_alone": Feature("alone", "tokens", "new tokens of decodes alone"),
    "token_arithmetic": Feature("arithmetic", "tokens", "new tokens where arithmetic limits"),
    "graph": Feature("graph", "one", "the launch of a CUDA graph"),
    "graph_row": Feature("graph", "rows", "the launch of a CUDA graph, a row"),
    "piece": Feature("piece", "one", "a launch in pieces"),
    "piece_row": Feature("piece", "rows", "a launch in pieces, a row"),
    "eager": Feature("eager", "one", "a launch kernel by kernel"),
    "eager_chunk": Feature("eager", "chunks", "a launch kernel by kernel, a chunk"),
}


def touched_experts(tokens: int, experts: int, per_token: int) -> float:
    """Return how many experts of a layer at least one of `tokens` is expected to choose."""
    if not experts:
        return 0.0
    return experts * (1.0 - math.pow(1.0 - per_token / experts, float(tokens)))


def chunk_attended(cached: int, new: int) -> float:
    """Sum of the keys that `new` tokens attend to after `cached` ones."""
    return new * (cached + new / 2)


def chunk_inside(cached: int, new: int, window: int) -> float:
    """As `chunk_attended`, where each token attends to at most `window` of them."""
    return new * min(cached + new / 2, float(window))
