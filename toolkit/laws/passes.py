"""The law of an engine's forward passes: seconds by what a pass computes, and how passes follow.

    work          the terms of `both` and `alone`, or of `both` and `mixed`, and f(new tokens)
    with chunks   the larger of `reads` and `arithmetic` is added; all is at least `least_s`
    next pass     `host` seconds later

`f` is continuous and linear between knots: reading the weights limits a pass of few tokens, and
arithmetic limits a pass of many. Kernels are made for tiles of tokens, so it may fall where a tile
fills up. The host schedules the pass and delivers its tokens before the next pass begins.

**Passes that overlap.** With `graphs` the law is of vLLM's async scheduling on a GPU: the CPU
schedules and launches pass n + 1 while the GPU runs pass n, and hands out the tokens of pass n only
when it has launched pass n + 1. With S the time at which a pass is scheduled, c its launch on the
CPU, g its work on the GPU, G its end there and E the time at which its tokens exist:

    G[n] = max(max(G[n-1], P[n]) + g[n], S[n] + c[n])
    E[n] = max(G[n], S[n+1] + c[n+1])
    S[n+1] = E[n-1], and after a pass from idle S[n] + c[n]

P is the time at which the GPU can begin the pass: S + c for a CUDA graph, which one call launches,
and S for a pass that is launched kernel by kernel. An engine that launches passes in processes of
their own (tensor parallelism) does not hold back tokens for a launch: there E[n] = G[n], and
launches follow one another.

How a pass is launched depends on the server's `cudagraph_mode` and on its tokens:

    mode                 decodes alone     with chunks      more tokens than the largest graph
    NONE                 eager             eager            eager
    PIECEWISE            piecewise         piecewise        eager
    FULL                 graph             graph            eager
    FULL_DECODE_ONLY     graph             eager            eager
    FULL_AND_PIECEWISE   graph             piecewise        eager

A graph computes its own number of tokens, to which a pass is padded. Layers with sliding windows or
states have no terms of their own there: what they read does not grow with the cache but for rows
shorter than a window, and so belongs to rows and tokens. Reading the weights limits short
chunks, as it limits decodes, and arithmetic limits long ones.

Source: vLLM 0.32, v1/engine/core.py (`step_with_batch_queue`), v1/worker/gpu/cudagraph_utils.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Final

from mypy_extensions import i64

from toolkit.errors import InputError
from toolkit.laws.features import (
    ALONE,
    ARITHMETIC,
    EAGER,
    FEATURES,
    GRAPH,
    HOST,
    MIXED,
    ONE,
    PIECEWISE,
    READS,
    StepShape,
    number_of,
    touched_experts,
)
from toolkit.laws.stored import stored_schema

# of each mode: how decodes alone are launched, and passes with chunks
LAUNCHES: Final[dict[str, tuple[int, int]]] = {
    "NONE": (EAGER, EAGER),
    "PIECEWISE": (PIECEWISE, PIECEWISE),
    "FULL": (GRAPH, GRAPH),
    "FULL_DECODE_ONLY": (GRAPH, EAGER),
    "FULL_AND_PIECEWISE": (GRAPH, PIECEWISE),
}
UNLIMITED: Final = 1 << 53


class Stored:
    """A law or a part of one, which files hold as a mapping of its fields."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return stored_schema(cls, handler, FIELD_TYPES)


@dataclass(frozen=True)
class HeldOutError(Stored):
    """Absolute percentage errors on points that the fit did not see."""

    median_percent: float
    p95_percent: float
    worst_percent: float
    points: int


@dataclass(frozen=True)
class PassRange(Stored):
    """Where a law was measured; use outside is extrapolation. What is not given has no bound.

    Attributes:
        rows_max: rows of a pass.
        tokens_max: its new tokens.
        cached_max: cached tokens of the rows that decode, together.
        length_max: tokens of a prompt, or in a decoding row's cache.
    """

    rows_max: int = UNLIMITED
    tokens_max: int = UNLIMITED
    cached_max: int = UNLIMITED
    length_max: int = UNLIMITED

    def holds(self, shape: StepShape) -> bool:
        """Return whether a pass is inside the range. Its rows' lengths are not looked at."""
        return (
            shape.decodes + shape.prefills <= self.rows_max
            and shape.tokens <= self.tokens_max
            and shape.decode_cached <= self.cached_max
        )

    def both(self, other: PassRange) -> PassRange:
        """Return what is inside both ranges."""
        return PassRange(
            min(self.rows_max, other.rows_max),
            min(self.tokens_max, other.tokens_max),
            min(self.cached_max, other.cached_max),
            min(self.length_max, other.length_max),
        )

    def holds_batch(self, rows: int, length: float) -> bool:
        """Return whether a batch of rows of at most this length is inside the range."""
        return rows <= self.rows_max and length <= self.length_max

    def __str__(self) -> str:
        bounds = (
            (self.rows_max, "rows"),
            (self.tokens_max, "new tokens"),
            (self.cached_max, "cached tokens"),
            (self.length_max, "tokens of a row"),
        )
        given = [f"{most:,} {what}" for most, what in bounds if most < UNLIMITED]
        return f"up to {', '.join(given)}" if given else "anywhere"


@dataclass(frozen=True)
class GraphSettings(Stored):
    """What a server says of its CUDA graphs.

    Attributes:
        mode: vLLM's `cudagraph_mode`.
        sizes: the tokens of each graph, ascending; empty: there are none.
        apart: passes are launched in processes of their own (tensor parallelism).
    """

    mode: str
    sizes: tuple[int, ...]
    apart: bool = False

    def __post_init__(self) -> None:
        if self.mode not in LAUNCHES:
            modes = ", ".join(LAUNCHES)
            raise InputError(f"cudagraph_mode {self.mode!r} is not modelled", f"one of {modes} is")

    def launch_of(self, shape: StepShape) -> int:
        """GRAPH, PIECEWISE or EAGER: how a pass is launched."""
        if not self.sizes or shape.tokens > self.sizes[-1]:
            return EAGER
        alone, mixed = LAUNCHES[self.mode]
        return mixed if shape.prefills else alone

    def tokens_of(self, shape: StepShape) -> int:
        """Return how many tokens a pass computes: a graph computes its own number."""
        tokens = shape.tokens
        if self.launch_of(shape) == EAGER:
            return tokens
        return self.sizes[bisect_left(self.sizes, tokens)]


class Term:
    """A term of a law: a place in `NUMBERS`, and seconds."""

    __slots__ = ("number", "seconds")

    def __init__(self, number: i64, seconds: float) -> None:
        self.number: i64 = number
        self.seconds = seconds


class TermSum:
    """The terms of one part of a pass's time, in the order of `FEATURES`. Those that count 1 are in
    `constant_s`.
    """

    __slots__ = ("constant_s", "terms")

    def __init__(self, part: int, seconds: Mapping[str, float]) -> None:
        self.constant_s = 0.0
        self.terms: list[Term] = []
        for name, feature in FEATURES.items():
            value = seconds.get(name, 0.0)
            if not value or part not in feature.parts:
                continue
            if feature.number == ONE:
                self.constant_s += value
            else:
                self.terms.append(Term(feature.number, value))

    def of(self, shape: StepShape, tokens: int, experts: float) -> float:
        """Return the seconds of a pass with these (padded) tokens and touched experts."""
        total = self.constant_s
        for term in self.terms:
            total += term.seconds * number_of(term.number, shape, tokens, experts)
        return total


@dataclass(frozen=True)
class PassLaw(Stored):
    """Seconds of a forward pass by its shape: as it is fitted, stored in fit.json, and evaluated.

    Attributes:
        terms: seconds per unit of each feature (`FEATURES`), all >= 0; one that is left out is 0.
        token_s: seconds per new token: `token_s[k]` applies between knots[k] and knots[k + 1], and
            the last one beyond the last knot. Only the last must be >= 0, and with the constant
            terms the sum up to each knot.
        knots: numbers of new tokens, ascending from 0.
        least_s: the shortest pass with chunks: its kernels are launched one by one.
        flat_s: the shortest pass of decodes alone.
        experts, experts_per_token: of a layer; 0: there are none.
        window: tokens of the model's sliding windows; 0: there are none.
        graphs: passes overlap, and are launched so; None: one ends before the next begins.
        spread: launches other than graphs take these times as long, in turn; their mean is 1.
            Empty: all take as long.
        valid: where it was measured; None: not known.
        error: on held-out points; None: not known.
    """

    terms: dict[str, float]
    token_s: tuple[float, ...] = ()
    knots: tuple[int, ...] = ()
    least_s: float = 0.0
    flat_s: float = 0.0
    experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    graphs: GraphSettings | None = None
    spread: tuple[float, ...] = ()
    valid: PassRange | None = None
    error: HeldOutError | None = None
    # what evaluation reads
    _parts: list[TermSum] = field(init=False, repr=False, compare=False)
    _knot_s: tuple[float, ...] = field(init=False, repr=False, compare=False)  # up to each knot
    _host_s: float = field(init=False, repr=False, compare=False, default=0.0)
    _host_row_s: float = field(init=False, repr=False, compare=False, default=0.0)

    def __post_init__(self) -> None:
        between = zip(self.token_s, pairwise(self.knots), strict=False)
        knot_s = (0.0, *accumulate([slope * (end - start) for slope, (start, end) in between]))
        self._check(knot_s)
        found: dict[str, object] = {
            "_parts": [TermSum(part, self.terms) for part in range(HOST)],
            "_knot_s": knot_s,
            "_host_s": self.terms.get("host", 0.0),
            "_host_row_s": self.terms.get("host_row", 0.0),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def _check(self, knot_s: Sequence[float]) -> None:
        knots = self.knots
        if (
            (knots and knots[0] != 0)
            or list(knots) != sorted(set(knots))
            or len(knots) != len(self.token_s)
        ):
            raise InputError(
                f"law of passes: knots {list(knots)} with {len(self.token_s)} slopes; they must "
                "begin at 0 and ascend, one slope for each"
            )
        unknown = [name for name in self.terms if name not in FEATURES]
        if unknown:
            raise InputError(
                f"law of passes: unknown terms {', '.join(unknown)}",
                f"terms: {', '.join(FEATURES)}",
            )
        pass_s = self.terms.get("pass", 0.0)
        values = {f"the term {name}": value for name, value in self.terms.items()}
        values |= {f"up to {knots[k]} tokens it": pass_s + knot_s[k] for k in range(1, len(knots))}
        values |= {"least_s": self.least_s, "flat_s": self.flat_s}
        values |= {"the last of token_s": self.token_s[-1]} if self.token_s else {}
        for what, value in values.items():
            if not (abs(value) < math.inf and value >= 0.0):
                raise InputError(f"law of passes: {what} is {value}; it must be finite and >= 0")

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.terms.items())), self.token_s, self.knots))

    def __reduce__(self) -> tuple[object, ...]:
        return PassLaw, (
            self.terms,
            self.token_s,
            self.knots,
            self.least_s,
            self.flat_s,
            self.experts,
            self.experts_per_token,
            self.window,
            self.graphs,
            self.spread,
            self.valid,
            self.error,
        )

    @property
    def apart(self) -> bool:
        """Whether passes are launched in processes of their own."""
        return self.graphs is not None and self.graphs.apart

    def gpu_s(self, shape: StepShape) -> float:
        """Return the seconds of the pass's work; without launches, all of the pass."""
        tokens = shape.tokens
        experts = touched_experts(tokens, self.experts, self.experts_per_token)
        graphs = self.graphs
        if graphs is not None:
            tokens = graphs.tokens_of(shape)
        mixed = shape.prefills > 0
        parts = self._parts
        seconds = parts[MIXED if mixed else ALONE].of(shape, tokens, experts)
        if self.knots:
            place = bisect_left(self.knots, tokens, 1) - 1
            seconds += self._knot_s[place] + self.token_s[place] * (tokens - self.knots[place])
        if not mixed:
            return self.flat_s if seconds < self.flat_s else seconds
        reads_s = parts[READS].of(shape, tokens, experts)
        arithmetic_s = parts[ARITHMETIC].of(shape, tokens, experts)
        seconds += reads_s if reads_s > arithmetic_s else arithmetic_s
        return self.least_s if seconds < self.least_s else seconds

    def growth_s(self, shape: StepShape) -> float:
        """Return by how many seconds each following pass of the same decodes alone takes longer."""
        grown = StepShape(
            shape.decodes,
            shape.decode_cached + shape.decodes,
            decode_inside=shape.decode_inside + shape.growing,
            draft_tokens=shape.draft_tokens,
        )
        # of new tokens and experts both have the same
        return self._parts[ALONE].of(grown, 0, 0.0) - self._parts[ALONE].of(shape, 0, 0.0)

    def prompt_token_s(self, attended: float) -> float:
        """Return the seconds that a token of a long chunk adds, which attends to `attended`."""
        terms = self.terms
        inside_s = terms.get("attended_inside", 0.0) * min(attended, float(self.window))
        token_s = self.token_s[-1] if self.token_s else terms.get("token_arithmetic", 0.0)
        return token_s + terms.get("attended", 0.0) * attended + inside_s

    def launch_s(self, shape: StepShape) -> float:
        """Return the seconds on the CPU from scheduling the pass to its last kernel launched, on
        average; 0 where passes do not overlap, and launches are part of the work.
        """
        if self.graphs is None:
            return 0.0
        return self._parts[self.graphs.launch_of(shape)].of(shape, 0, 0.0)

    def drawn_launch_s(self, shape: StepShape, number: int) -> float:
        """Return `launch_s` of the launch with this number; graphs take no varying time."""
        seconds = self.launch_s(shape)
        if not self.spread or self.waits_for_launch(shape):
            return seconds
        return seconds * self.spread[number % len(self.spread)]

    def waits_for_launch(self, shape: StepShape) -> bool:
        """Return whether the GPU can begin the pass only when its launch has ended."""
        return self.graphs is None or self.graphs.launch_of(shape) == GRAPH

    def forward_s(self, shape: StepShape) -> float:
        """Return the seconds of a pass that nothing overlaps, from its schedule to its tokens."""
        gpu_s = self.gpu_s(shape)
        launch_s = self.launch_s(shape)
        return launch_s + gpu_s if self.waits_for_launch(shape) else max(launch_s, gpu_s)

    def after_s(self, rows: int) -> float:
        """Return the seconds from the end of a pass that nothing overlaps to the next; 0 where they
        are in its launch.
        """
        return self._host_s + self._host_row_s * rows

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds from the start of one such pass to the next, if they follow."""
        if self.graphs is not None:
            return max(self.gpu_s(shape), self.launch_s(shape))
        return self.gpu_s(shape) + self.after_s(shape.rows)

    def pass_s(
        self, decodes: int, decode_cached: float, chunks: float, new_tokens: float, attended: float
    ) -> float:
        """Return `step_s` of averages, for routers. Chunks have no cached tokens before them."""
        shape = StepShape(decodes, round(decode_cached), round(chunks), round(new_tokens), attended)
        window = self.window
        if window:  # as if all rows were alike
            shape.decode_inside = round(min(decode_cached, float(decodes * (window - 1))))
            shape.prefill_inside = min(attended, new_tokens * window)
        return self.step_s(shape)

    def with_terms(self, terms: Mapping[str, float]) -> PassLaw:
        """Return the law with other seconds for these terms."""
        return replace(self, terms=self.terms | dict(terms))

    def plus(self, other: PassLaw) -> PassLaw:
        """Return the law of passes that take the terms of both. What is flat takes the constants of
        both; under it, what `other` takes by rows and tokens is left out.
        """
        terms = {
            name: self.terms.get(name, 0.0) + other.terms.get(name, 0.0)
            for name in self.terms | other.terms
        }
        flat_s = self.flat_s and self.flat_s + other.terms.get("pass", 0.0)
        return replace(self, terms=terms, flat_s=flat_s)

    def times(self, factor: float) -> PassLaw:
        """Return the law of passes that take `factor` times as long, launches and host alike."""
        return replace(
            self,
            terms={name: factor * value for name, value in self.terms.items()},
            token_s=tuple([factor * value for value in self.token_s]),
            least_s=factor * self.least_s,
            flat_s=factor * self.flat_s,
        )

    def columns(self, shapes: Sequence[StepShape]) -> list[list[float]]:
        """Return what each term counts in each pass [n, k]: the terms in their order, then the new
        tokens between each knot and the next. A graph's padding counts.
        """
        found = []
        chosen = [FEATURES[name] for name in self.terms]
        ends = (*[float(knot) for knot in self.knots[1:]], math.inf)
        for shape in shapes:
            tokens = shape.tokens
            experts = touched_experts(tokens, self.experts, self.experts_per_token)
            if self.graphs is not None:
                tokens = self.graphs.tokens_of(shape)
            row = [feature.of(shape, tokens, experts) for feature in chosen]
            for start, end in zip(self.knots, ends, strict=False):
                row.append(max(0.0, min(float(tokens), end) - start))
            found.append(row)
        return found

    @property
    def form(self) -> str:
        """Its form in words, for reports: its terms, or how many they are."""
        if self.knots:
            return f"{len(self.terms)} terms, {len(self.knots) - 1} knots"
        return ", ".join([name for name, value in self.terms.items() if value])

    def with_values(self, values: Sequence[float]) -> PassLaw:
        """Return the law with these seconds, in the order of `columns`."""
        count = len(self.terms)
        terms = dict(zip(self.terms, values[:count], strict=True))
        return replace(self, terms=terms, token_s=tuple(values[count:]))


def overlapped(
    scheduled_s: float,
    launched_s: float,
    ended_s: float,
    launch_s: float,
    work_s: float,
    *,
    waits: bool,
    apart: bool,
) -> tuple[float, float, float]:
    """Return when the launch of a pass has ended (L), when the GPU can begin the pass, and when the
    GPU has ended it (G), by the recursion above.

    Args:
        scheduled_s: S, when the pass is scheduled.
        launched_s, ended_s: L and G of the pass before.
        launch_s, work_s: c and g, the seconds of its launch and of its work on the GPU.
        waits: the GPU can begin it only when its launch has ended.
        apart: launches follow one another, in processes of their own.
    """
    launch_begins_s = max(scheduled_s, launched_s) if apart else scheduled_s
    launched_s = launch_begins_s + launch_s
    begins_s = max(ended_s, launched_s if waits else launch_begins_s)
    return launched_s, begins_s, max(begins_s + work_s, launched_s)


# of fields of what files hold, by their names, where they are no plain numbers or text
FIELD_TYPES: dict[str, Any] = {
    "terms": dict[str, float],
    "token_s": tuple[float, ...],
    "knots": tuple[int, ...],
    "graphs": GraphSettings,
    "sizes": tuple[int, ...],
    "spread": tuple[float, ...],
    "valid": PassRange,
    "error": HeldOutError,
}
