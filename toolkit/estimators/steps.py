"""The law of a paged engine's forward pass, which computes decoding rows and prompt chunks
together.

    forward = base + row * rows + prefill * chunks + f(new tokens)
              + cached * (sum of the decodes' cached tokens)
              + attended * (sum over chunks of new * (cached + new / 2))
              + behind * (sum over chunks of the cached tokens before them)
              + expert * (experts of a layer that the new tokens touch)
    pass    = forward + host + host_row * rows

A pass with chunks takes at least `least`, since its kernels are launched one by one. In such a
pass, `beside` takes the place of `cached`: attention kernels that compute decodes
and chunks together read a decode's cache more slowly than kernels for decodes alone (1.9 times on
an RTX 4090, by the measured operators of LLMServingSim).

A mixture of experts reads the weights of those experts that at least one of T new tokens chose: of
E, k per token, E * (1 - (1 - k / E)^T) are expected, if all are chosen alike.

In layers with sliding windows of W tokens a decode reads at most W - 1 cached tokens (`inside`).
Layers with states (Mamba, linear attention) read no cached tokens, but a state for each row that
decodes.

`f` is continuous and linear between knots: reading the weights limits a pass of few tokens, and
arithmetic limits a pass of many. Kernels are made for tiles of tokens, so it may fall where a tile
fills up. Each row pays for the sampler. Decodes read their cache; chunks
attend to theirs and to themselves, and also pay for reading theirs, as a short chunk behind a long
cache shows. The host schedules the pass and delivers its tokens before the next pass begins. Only
sums over the batch matter, as in Vidur (arXiv:2405.05465), so a pass needs no list of its rows.
Cache reads are counted in tokens, not in blocks.

An engine that launches a pass while another one runs has the law of `toolkit.estimators.pipeline`.

The fit of the coefficients and its errors are in `part_fits`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from toolkit.errors import InputError
from toolkit.files.iterations import LoggedRow

FIXED = 7  # coefficients of `StepLaw` before those of new tokens


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

    def _values(self) -> tuple[int, int, int, int, float, int, int, float, int, int]:
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

    def __reduce__(self) -> tuple[type[StepShape], tuple[object, ...]]:
        return StepShape, self._values()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StepShape) and self._values() == other._values()

    def __repr__(self) -> str:
        return f"StepShape{self._values()}"

    @property
    def rows(self) -> int:
        """Rows in the pass."""
        return self.decodes + self.prefills

    @property
    def tokens(self) -> int:
        """New tokens in the pass; `max_num_batched_tokens` bounds them."""
        return self.decodes + self.draft_tokens + self.prefill_tokens


def touched_experts(tokens: int, experts: int, per_token: int) -> float:
    """How many of a layer's experts are expected to be chosen by at least one of so many tokens."""
    return experts * (1.0 - math.pow(1.0 - per_token / experts, float(tokens)))


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Seconds of a forward pass by its shape. All coefficients are >= 0, in seconds per unit. Of
    `token_s` the last one is, and with `base_s` the sum up to each knot.

    Attributes:
        knots: numbers of new tokens, ascending from 0. `token_s[k]` applies between knots[k] and
            knots[k + 1], and the last one beyond the last knot.
        host_s, host_row_s: from the end of a forward pass to the start of the next, constant and
            per row.
        behind_s: per cached token before a chunk.
        beside_s: per cached token of a decode in a pass with chunks; None: `cached_s`.
        expert_s: per touched expert of a layer, all layers together.
        experts, experts_per_token: of a layer; 0: there are none.
        window: tokens of the model's sliding windows; 0: there are none.
        inside_s: per cached token of a decode that is inside the windows.
        attended_inside_s: per token that a chunk's tokens attend to inside the windows.
        least_s: the shortest pass with chunks.
    """

    base_s: float
    row_s: float
    prefill_s: float
    cached_s: float
    attended_s: float
    token_s: tuple[float, ...]
    knots: tuple[int, ...] = (0,)
    host_s: float = 0.0
    host_row_s: float = 0.0
    behind_s: float = 0.0
    beside_s: float | None = None
    expert_s: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    inside_s: float = 0.0
    attended_inside_s: float = 0.0
    least_s: float = 0.0
    _slopes: tuple[tuple[float, int, float], ...] = field(
        init=False, repr=False, compare=False, default=()
    )

    def __post_init__(self) -> None:
        if (
            self.knots[:1] != (0,)
            or list(self.knots) != sorted(set(self.knots))
            or len(self.knots) != len(self.token_s)
        ):
            raise InputError(
                f"steps: knots {list(self.knots)} with {len(self.token_s)} slopes; they must begin "
                "at 0 and ascend, one slope for each"
            )
        ends = (*[float(knot) for knot in self.knots[1:]], math.inf)
        of_tokens = [self.base_s]
        for slope, start, end in zip(self.token_s[:-1], self.knots[:-1], ends, strict=False):
            of_tokens.append(of_tokens[-1] + slope * (end - start))
        others = (*self.coefficients[:FIXED], *self.coefficients[FIXED + len(self.token_s) :])
        last = (self.token_s[-1], self.host_s, self.host_row_s, self.least_s)
        for value in (*others, *of_tokens, *last):
            if not 0.0 <= value < math.inf:
                raise InputError(f"steps: a coefficient is {value}; all must be finite and >= 0")
        object.__setattr__(self, "_slopes", tuple(zip(self.token_s, self.knots, ends, strict=True)))

    @classmethod
    def of(
        cls,
        coefficients: Sequence[float],
        knots: tuple[int, ...] = (0,),
        host_s: float = 0.0,
        host_row_s: float = 0.0,
        experts: tuple[int, int] = (0, 0),
        window: int = 0,
    ) -> StepLaw:
        """The law with these `coefficients`, in the order of `features`."""
        values = [float(value) for value in coefficients]
        attended_inside_s = values.pop() if window else 0.0
        inside_s = values.pop() if window else 0.0
        expert_s = values.pop() if experts[0] else 0.0
        base_s, row_s, prefill_s, cached_s, beside_s, attended_s, behind_s = values[:FIXED]
        return cls(
            base_s,
            row_s,
            prefill_s,
            cached_s,
            attended_s,
            tuple(values[FIXED:]),
            knots,
            host_s,
            host_row_s,
            behind_s,
            None if beside_s == cached_s else beside_s,
            expert_s,
            experts[0],
            experts[1],
            window,
            inside_s,
            attended_inside_s,
        )

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients of the forward pass, in the order of `features`."""
        fixed = self.base_s, self.row_s, self.prefill_s, self.cached_s
        beside_s = self.cached_s if self.beside_s is None else self.beside_s
        found = (*fixed, beside_s, self.attended_s, self.behind_s, *self.token_s)
        if self.experts:
            found = (*found, self.expert_s)
        if self.window:
            found = (*found, self.inside_s, self.attended_inside_s)
        return found

    def read_s(self, shape: StepShape) -> float:
        """Seconds per cached token of a decode in such a pass."""
        if shape.prefills and self.beside_s is not None:
            return self.beside_s
        return self.cached_s

    def growth_s(self, shape: StepShape) -> float:
        """Seconds that each following pass of the same decodes takes more than the one before."""
        read_s = self.cached_s
        if shape.prefills and self.beside_s is not None:
            read_s = self.beside_s
        growth_s = read_s * shape.decodes
        if self.window:
            growth_s += self.inside_s * shape.growing
        return growth_s

    def forward_s(self, shape: StepShape) -> float:
        """Seconds of the forward pass alone, from its schedule to its tokens."""
        decodes = shape.decodes
        prefills = shape.prefills
        rows = decodes + prefills
        tokens = decodes + shape.draft_tokens + shape.prefill_tokens
        seconds = self.base_s + self.row_s * rows + self.prefill_s * prefills
        read_s = self.read_s(shape)
        seconds += read_s * shape.decode_cached + self.attended_s * shape.prefill_attended
        if self.behind_s:
            seconds += self.behind_s * shape.prefill_cached
        for slope, start, end in self._slopes:
            if tokens <= start:
                break
            seconds += slope * ((end if tokens > end else tokens) - start)
        if self.experts:
            touched = touched_experts(tokens, self.experts, self.experts_per_token)
            seconds += self.expert_s * touched
        if self.window:
            seconds += self.inside_s * shape.decode_inside
            seconds += self.attended_inside_s * shape.prefill_inside
        if prefills and seconds < self.least_s:
            return self.least_s
        return seconds

    def prompt_token_s(self, attended: float) -> float:
        """Seconds that a token of a long chunk adds, which attends to so many tokens."""
        inside_s = self.attended_inside_s * min(attended, float(self.window))
        return self.token_s[-1] + self.attended_s * attended + inside_s

    def after_s(self, rows: int) -> float:
        """Seconds from the end of a pass of `rows` rows to the next, if there is work."""
        return self.host_s + self.host_row_s * rows

    def step_s(self, shape: StepShape) -> float:
        """Seconds from the start of a pass to the start of the next."""
        return self.forward_s(shape) + self.after_s(shape.rows)

    def gpu_s(self, shape: StepShape) -> float:
        """As `forward_s`: all of a pass, where nothing is known of launches."""
        return self.forward_s(shape)

    def launch_s(self, shape: StepShape) -> float:
        """Zero: launches are part of `forward_s`."""
        return 0.0

    def drawn_launch_s(self, shape: StepShape, number: int) -> float:
        """As `launch_s`."""
        return 0.0

    def waits_for_launch(self, shape: StepShape) -> bool:
        """Whether the pass begins when its launch has ended, which here takes no time."""
        return True

    def times(self, factor: float) -> StepLaw:
        """The law of an engine that takes `factor` times as long."""
        scaled = [factor * value for value in self.coefficients]
        experts = (self.experts, self.experts_per_token)
        host_s = factor * self.host_s
        host_row_s = factor * self.host_row_s
        law = StepLaw.of(scaled, self.knots, host_s, host_row_s, experts, self.window)
        return replace(law, least_s=factor * self.least_s)


def features(
    shape: StepShape,
    knots: Sequence[int] = (0,),
    experts: tuple[int, int] = (0, 0),
    window: int = 0,
) -> tuple[float, ...]:
    """The factor of each coefficient: 1, rows, chunks, the decodes' cached tokens in a pass of
    decodes alone and in one with chunks, attended, cached before chunks, the new tokens between
    each knot and the next, of a model with `experts` (of a layer, and per token) those touched, and
    of one with windows of `window` tokens what is read and attended to inside them.
    """
    cached = float(shape.decode_cached)
    ends = (*knots[1:], math.inf)
    touched = (touched_experts(shape.tokens, *experts),) if experts[0] else ()
    inside = (float(shape.decode_inside), float(shape.prefill_inside)) if window else ()
    return (
        1.0,
        float(shape.rows),
        float(shape.prefills),
        0.0 if shape.prefills else cached,
        cached if shape.prefills else 0.0,
        float(shape.prefill_attended),
        float(shape.prefill_cached),
        *(max(0.0, min(shape.tokens, end) - start) for start, end in zip(knots, ends, strict=True)),
        *touched,
        *inside,
    )


def shape_of_rows(rows: Sequence[LoggedRow], window: int = 0) -> StepShape:
    """The composition of a logged pass of a model with windows of `window` tokens; 0: without."""
    decodes = [row.computed for row in rows if row.decodes]
    drafts = sum(row.drafts for row in rows if row.decodes)
    chunks = [row for row in rows if not row.decodes]
    attended = sum(chunk_attended(row.computed, row.new) for row in chunks)
    new = sum(row.new for row in chunks)
    before = sum(row.computed for row in chunks)
    shape = StepShape(
        len(decodes), sum(decodes), len(chunks), new, attended, before, draft_tokens=drafts
    )
    if window:
        shape.decode_inside = sum(min(cached, window - 1) for cached in decodes)
        shape.prefill_inside = sum(chunk_inside(row.computed, row.new, window) for row in chunks)
        shape.growing = sum(cached < window - 1 for cached in decodes)
    return shape


def chunk_attended(cached: int, new: int) -> float:
    """Sum of the keys that `new` tokens attend to after `cached` ones."""
    return new * (cached + new / 2)


def chunk_inside(cached: int, new: int, window: int) -> float:
    """As `chunk_attended`, where each token attends to at most `window` of them."""
    return new * min(cached + new / 2, float(window))
