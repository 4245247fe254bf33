"""Synthetic traces: arrival times and lengths drawn with a seed.

The module holds the distributions of lengths (spelled `lognormal:400:1`), the arrival process
(Gamma gaps), and then the functions that draw traces, or parts of them.

Example, the setting of the SCLS paper: prompts lognormal:400:1 and outputs lognormal:120:0.75,
both clipped to 1,024 tokens, Poisson arrivals at 20 requests/s for 600 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError, nearest
from toolkit.traces.histograms import LengthHistogram
from toolkit.traces.types import MAX_LENGTH, SharedBlocks, Trace

Floats = NDArray[np.float64]

# At this sigma, a third of the lengths differs from the median by a factor above 20,000.
MAX_SIGMA = 10.0
MIN_ALPHA = 0.1  # at this exponent, half of the lengths exceed 1,000 times the least
MAX_ALPHA = 1000.0  # at this exponent, all lengths equal LOW
MAX_REQUESTS = 10_000_000  # in one trace: about 1 GB while it is drawn and written
MAX_TEMPLATES = 1_000_000
BLOCK_TOKENS = 16  # of the blocks in which shared prompts are written
MAX_BLOCKS = 200_000_000  # of all prompts of one trace: about 8 GB while it is drawn
# Gamma's shape is 1e-4 at this variation. Far above it every gap rounds to 0, so no trace ends.
MAX_CV = 100.0
# Below this variation, gaps are equal to the microsecond, and rounding loses their variance.
MIN_CV = 1e-6
FORMS = {
    "lognormal": "MEDIAN:SIGMA",
    "uniform": "LOW:HIGH",
    "pareto": "LOW:ALPHA",
    "fixed": "TOKENS",
}


@dataclass(slots=True, frozen=True)
class Lengths:
    """A distribution of lengths in tokens. Lengths are whole, at least 1 and at most `longest`.

    lognormal: median `a`, and `b` is the sigma of the logarithm. uniform: from `a` to `b`, both
    included. pareto: a heavy tail from `a` on with exponent `b` (no mean at 1 and below). fixed:
    always `a`. Impossible numbers raise `InputError`.
    """

    kind: str
    a: float
    b: float = 0.0
    longest: int = MAX_LENGTH

    def __post_init__(self) -> None:
        if self.kind not in FORMS:
            raise InputError(
                f"'{self.kind}' is not a distribution of lengths", nearest(self.kind, FORMS)
            )
        low, high, limits = {  # of the second number
            "uniform": (self.a, MAX_LENGTH, ", LOW not above HIGH"),
            "lognormal": (1e-9, MAX_SIGMA, f", SIGMA above 0 and up to {MAX_SIGMA:g}"),
            "pareto": (MIN_ALPHA, MAX_ALPHA, f", ALPHA from {MIN_ALPHA:g} to {MAX_ALPHA:g}"),
            "fixed": (0.0, 0.0, ""),
        }[self.kind]
        if not (1 <= self.a <= MAX_LENGTH and low <= self.b <= high):
            raise InputError(
                f"'{self._spelled()}' is not possible",
                f"{self.kind}:{FORMS[self.kind]}, lengths from 1 to {MAX_LENGTH} tokens{limits}",
            )
        if not 1 <= self.longest <= MAX_LENGTH:
            raise InputError(
                f"lengths cannot be clipped to {self.longest} tokens", f"give 1 to {MAX_LENGTH}"
            )

    def __str__(self) -> str:
        return self._spelled() + (f" up to {self.longest}" if self.longest < MAX_LENGTH else "")

    def _spelled(self) -> str:
        numbers = [self.a] if self.kind == "fixed" else [self.a, self.b]
        return ":".join([self.kind, *(f"{value:g}" for value in numbers)])

    def draw(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw `count` lengths in tokens."""
        return clip(self.draw_unclipped(rng, count), self.longest)

    def draw_unclipped(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw `count` whole lengths, also above `longest`."""
        match self.kind:
            case "lognormal":
                values: Floats
                values = self.a * np.exp(self.b * rng.standard_normal(count))
            case "uniform":
                low = round(self.a)
                high = round(self.b)
                values = rng.integers(low, high, count, endpoint=True).astype(np.float64)
            case "pareto":
                values = self.a * (1.0 - rng.random(count)) ** (-1.0 / self.b)
            case _:
                values = np.full(count, self.a)
        return np.rint(values)


DrawnLengths = Lengths | LengthHistogram


def clip(drawn: Floats, longest: int) -> NDArray[np.int64]:
    """Return drawn lengths, of which those above `longest` become `longest`."""
    return np.clip(drawn, 1, longest).astype(np.int64)


def clip_note(drawn: Floats, longest: int, what: str) -> tuple[str, ...]:
    """Return a note that says how many of these lengths are clipped; none without any."""
    count = int((drawn > longest).sum())
    if not count:
        return ()
    share = f"{count:,} of {len(drawn):,}, {100.0 * count / len(drawn):.1f} %"
    return (f"{what} clipped to {longest:,} tokens: {share}",)


def parse_lengths(text: str, longest: int = MAX_LENGTH) -> Lengths:
    """Parse `lognormal:400:1`, `uniform:32:4096`, `pareto:20:1.5` or `fixed:128`.

    Raises `InputError` if the distribution is unknown, or a number is wrong.
    """
    kind, *rest = text.split(":")
    if kind not in FORMS:
        raise InputError(f"'{text}' is not a distribution of lengths", nearest(kind, FORMS))
    wanted = FORMS[kind].count(":") + 1
    try:
        numbers = [float(value) for value in rest]
    except ValueError as error:
        raise InputError(f"'{text}': {error}", f"give {kind}:{FORMS[kind]}") from error
    if len(numbers) != wanted:
        raise InputError(
            f"'{text}' has {len(numbers)} numbers, not {wanted}", f"give {kind}:{FORMS[kind]}"
        )
    return Lengths(kind, numbers[0], numbers[1] if wanted == 2 else 0.0, longest)


@dataclass(slots=True, frozen=True)
class Arrivals:
    """How requests arrive: gaps follow a Gamma distribution with mean 1/rate_rps.

    `cv` is the gaps' coefficient of variation: 1 is a Poisson process, above 1 (up to 100) is
    bursty, 0 gives equal gaps. Impossible numbers raise `InputError`.
    """

    rate_rps: float
    cv: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.rate_rps < math.inf:
            raise InputError(
                f"a rate of {self.rate_rps:g} requests/s is not possible", "give a positive rate"
            )
        if not 0 <= self.cv <= MAX_CV:
            raise InputError(
                f"a variation of gaps of {self.cv:g} is not possible",
                f"give 0 to {MAX_CV:g}; 1 is Poisson, above 1 is bursty",
            )

    def __str__(self) -> str:
        return f"{self.rate_rps:g} requests/s, gaps with cv {self.cv:g}"

    def gaps(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw `count` gaps in seconds."""
        if self.cv < MIN_CV:
            return np.full(count, 1.0 / self.rate_rps)
        return rng.gamma(1.0 / self.cv**2, self.cv**2 / self.rate_rps, count)

    def first(self, rng: np.random.Generator, count: int) -> Floats:
        """Draw the first `count` arrival times; they begin at 0."""
        return np.concatenate([np.zeros(1), np.cumsum(self.gaps(rng, count - 1))])

    def times(self, rng: np.random.Generator, duration_s: float) -> Floats:
        """Draw arrival times in [0, duration_s); the first is 0."""
        if not 0 < duration_s < math.inf:
            raise InputError(f"a trace cannot last {duration_s:g} s", "give a positive duration")
        check_count(
            self.rate_rps * duration_s, f"{self.rate_rps:g} requests/s for {duration_s:g} s"
        )
        times = np.zeros(1)
        while times[-1] < duration_s:
            expected = int(self.rate_rps * (duration_s - times[-1])) + 64
            times = np.concatenate([times, times[-1] + np.cumsum(self.gaps(rng, expected))])
        return times[times < duration_s]


@dataclass(slots=True, frozen=True)
class SharedContent:
    """What generated prompts begin with: the system prompt, then one of the templates (the k-th
    most frequent is chosen with a weight of 1 / k). Then comes a part of its own. Impossible
    numbers raise `InputError`.
    """

    system_tokens: int = 0
    templates: int = 0
    template: Lengths = Lengths("fixed", 512)

    def __post_init__(self) -> None:
        for name, value, most in (
            ("a system prompt of {:g} tokens", self.system_tokens, MAX_LENGTH),
            ("{:g} templates", self.templates, MAX_TEMPLATES),
        ):
            if not 0 <= value <= most:
                raise InputError(f"{name.format(value)}: not possible", f"give 0 to {most:g}")

    def __str__(self) -> str:
        parts = []
        if self.system_tokens:
            parts.append(f"a system prompt of {self.system_tokens} tokens")
        if self.templates:
            parts.append(f"{self.templates} templates {self.template}")
        return ", ".join(parts)


def generate(
    arrivals: Arrivals,
    duration_s: float,
    prompt: DrawnLengths,
    output: DrawnLengths,
    seed: int,
    content: SharedContent | None = None,
) -> Trace:
    """Draw a trace of `duration_s` seconds. The same arguments give the same trace."""
    rng = np.random.default_rng(seed)
    arrival_s = arrivals.times(rng, duration_s)
    note = f"{arrivals} for {duration_s:g} s, prompts {prompt}, outputs {output}, seed {seed}"
    return _requests(arrival_s, prompt, output, rng, content, note)


def backlog(
    count: int,
    prompt: DrawnLengths,
    output: DrawnLengths,
    seed: int,
    content: SharedContent | None = None,
) -> Trace:
    """Draw `count` requests that all arrive at 0 s; the same for the same arguments."""
    if count < 1:
        raise InputError(f"a backlog of {count} requests is not possible", "give at least 1")
    check_count(count, "the backlog")
    rng = np.random.default_rng(seed)
    note = f"a backlog of {count} requests, prompts {prompt}, outputs {output}, seed {seed}"
    return _requests(np.zeros(count), prompt, output, rng, content, note)


def _requests(
    arrival_s: Floats,
    prompt: DrawnLengths,
    output: DrawnLengths,
    rng: np.random.Generator,
    content: SharedContent | None,
    note: str,
) -> Trace:
    """Requests with drawn lengths at these times; what prompts share stands before their own."""
    count = len(arrival_s)
    drawn = prompt.draw_unclipped(rng, count)
    answers = output.draw_unclipped(rng, count)
    notes: tuple[str, ...] = (f"generated: {note}",)
    notes += clip_note(drawn, prompt.longest, "prompts" if content is None else "parts of prompts")
    notes += clip_note(answers, output.longest, "outputs")
    prompts = clip(drawn, prompt.longest)
    outputs = clip(answers, output.longest)
    shared = None
    if content is not None:
        notes += (f"shared: {content}",)
        template = np.zeros(count, dtype=np.int64)
        ahead = np.full(count, content.system_tokens)
        if content.templates:
            weights = np.arange(1, content.templates + 1) ** -1.0
            template = rng.choice(content.templates, count, p=weights / weights.sum())
            ahead += content.template.draw(rng, content.templates)[template]
        prompts = prompts + ahead
        longest = int(prompts.max())
        if longest > MAX_LENGTH:
            raise InputError(f"a prompt would have {longest:,} tokens", "give shorter parts")
        shared = _content_blocks(content, prompts, template, ahead)
    no_limits = np.zeros(count, dtype=np.int64)
    return Trace(arrival_s, prompts, outputs, no_limits, "generated", notes, shared=shared)


def _content_blocks(
    content: SharedContent,
    prompts: NDArray[np.int64],
    template: NDArray[np.int64],
    ahead: NDArray[np.int64],
) -> SharedBlocks:
    """The blocks of prompts. A block is shared by all prompts with the part in which it ends: the
    system prompt, or a template; a block that ends in a prompt's own part by none.
    """
    size = BLOCK_TOKENS
    counts = -(-prompts // size)
    blocks = int(counts.sum())
    if blocks > MAX_BLOCKS:
        raise InputError(
            f"prompts of {blocks:,} blocks are too many for one trace",
            f"generate at most {MAX_BLOCKS:,}: fewer or shorter prompts",
        )
    offsets = np.concatenate([[0], np.cumsum(counts)])
    row = np.repeat(np.arange(len(prompts)), counts)
    place = np.arange(blocks) - offsets[row]
    end = (place + 1) * size
    # The part is the one of three kinds, and its number.
    kind = np.full(blocks, 2)
    number = row.copy()
    in_template = end <= ahead[row]
    kind[in_template] = 1
    number[in_template] = template[row][in_template]
    in_system = end <= content.system_tokens
    kind[in_system] = 0
    number[in_system] = 0
    key = (number * 3 + kind) * int(counts.max()) + place
    ids = np.unique(key, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return SharedBlocks(size, ids, offsets)


def check_count(count: float, what: str) -> None:
    if count > MAX_REQUESTS:
        limit = f"generate at most {MAX_REQUESTS:,} at a time"
        raise InputError(f"{what}: {count:,.0f} requests are too many for one trace", limit)


def draw_arrivals(trace: Trace, arrivals: Arrivals, seed: int) -> Trace:
    """Return the requests in their order with drawn arrival times, for traces that have none.

    Of a session, the first turn's time is drawn, and the others stay as long after it as they are.
    """
    rng = np.random.default_rng(seed)
    sessions = trace.sessions
    if sessions is None:
        notes = (*trace.notes, f"arrival times drawn: {arrivals}, seed {seed}")
        return replace(trace, arrival_s=arrivals.first(rng, len(trace)), notes=notes)
    first = sessions.first
    starts = np.flatnonzero(sessions.previous < 0)
    drawn = replace(arrivals, rate_rps=arrivals.rate_rps * (len(starts) / len(trace)))
    start_s = np.zeros(len(trace))
    start_s[starts] = drawn.first(rng, len(starts))
    arrival_s = start_s[first] + trace.arrival_s - trace.arrival_s[first]
    note = f"arrival times of {len(starts):,} sessions drawn: {drawn}, seed {seed}"
    whole = replace(trace, arrival_s=arrival_s, notes=(*trace.notes, note))
    return whole.take(np.argsort(arrival_s, kind="stable"))
