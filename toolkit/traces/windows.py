"""Fitting a trace to a recipe, cutting it into windows, and describing it in numbers.

In this order: scaling (the rate to a machine, the lengths to a model's context; a server's requests
keep their lengths, and longer ones are left out), cutting into windows (some to search on, others,
which the search never sees, for the verdict), and the numbers that `llmctl trace inspect` prints.
Each change to a trace leaves a note in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from toolkit.engine_traits import traits_of
from toolkit.errors import InputError
from toolkit.files.recipe import Recipe
from toolkit.files.tuning import ScaledLengths, Scaling
from toolkit.traces.sharing import keep_sessions, reusable_tokens
from toolkit.traces.types import MAX_LENGTH, Trace

MIN_RATE_RPS = 1e-6
MAX_RATE_RPS = 1e6  # one request in 11 days; more than any server takes
FITTED_PERCENTILE = 99.0  # of the lengths: must fit after dividing; longer ones are clipped
# Share of the trace that windows cover where their length is not given or does not fit.
COVERED = 0.8
PHASES = 32  # places that are tried for the first of the stretches that a trace is divided into
ROUNDING = 1e-9  # of a stretch: the last one may end at the trace's end
PERCENTILES = (1, 25, 50, 75, 95, 99)

Tokens = NDArray[np.int64]


def mean_rate(trace: Trace) -> float:
    """Requests per second from the first arrival to the last; 0 where all arrive at once."""
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    return (len(trace) - 1) / span_s if span_s > 0 else 0.0


def check_rate(rate_rps: float) -> None:
    """Raise `InputError` if a rate is not from `MIN_RATE_RPS` to `MAX_RATE_RPS`."""
    if not MIN_RATE_RPS <= rate_rps <= MAX_RATE_RPS:
        hint = f"give a rate from {MIN_RATE_RPS:g} to {MAX_RATE_RPS:,.0f}"
        raise InputError(f"a rate of {rate_rps:g} requests/s is not possible", hint)


def scale_rate(trace: Trace, rate_rps: float) -> Trace:
    """Stretch or compress the arrival times to a mean rate; burstiness and order stay.

    Raises `InputError` if the rate is not from `MIN_RATE_RPS` to `MAX_RATE_RPS`, or if the trace
    has no rate: one request, or all at once.
    """
    check_rate(rate_rps)
    old_rps = mean_rate(trace)
    if old_rps == 0 and len(trace) == 1:
        raise InputError(
            f"{trace.source}: it has one request, so there is no rate to scale",
            "leave the rate out",
        )
    if old_rps == 0:
        raise _no_times(trace, "there is no rate to scale")
    factor = old_rps / rate_rps
    note = f"arrival times scaled by {factor:.4g}: {old_rps:.4g} -> {rate_rps:.4g} requests/s"
    return replace(trace, arrival_s=trace.arrival_s * factor, notes=(*trace.notes, note))


def scale_lengths(
    trace: Trace, max_model_len: int, max_new_tokens: int, model_context: int | None = None
) -> Trace:
    """Fit lengths into a model's context and keep the shape of their distribution.

    Outputs get `max_new_tokens`, prompts the rest of `max_model_len`. Each of the two is divided
    by the factor that makes its 99th percentile fit (1 where it fits already) and rounded up; the
    few lengths that are still too long are clipped. The result's `scaling` records this in numbers,
    with `model_context`, the tokens that the model itself takes; its last notes say it in words.

    Prompts that were scaled share nothing (`with_lengths`). A trace with sessions is divided by one
    factor, the greater of the two, since answers become parts of prompts; a turn that still does
    not hold the turn before and its answer starts a session of its own.

    Raises `InputError` if `max_new_tokens` leaves no token for the prompt.
    """
    room = max_model_len - max_new_tokens
    if max_new_tokens < 1 or room < 1:
        raise InputError(
            f"max_new_tokens {max_new_tokens} leaves {room} of {max_model_len} tokens of context "
            "for the prompt",
            "max_new_tokens must be positive and below model.max_model_len",
        )
    least = 1.0
    if trace.sessions is not None:
        least = max(
            1.0, _edge(trace.prompt_tokens) / room, _edge(trace.output_tokens) / max_new_tokens
        )
    prompts, of_prompts = _fit(trace.prompt_tokens, room, least)
    outputs, of_outputs = _fit(trace.output_tokens, max_new_tokens, least)
    limits = np.ceil(trace.max_tokens / of_outputs.divisor).astype(np.int64)
    scaling = Scaling(
        requests=len(trace),
        max_model_len=max_model_len,
        max_new_tokens=max_new_tokens,
        model_context=model_context,
        prompts=of_prompts,
        outputs=of_outputs,
    )
    fitted = replace(
        trace,
        max_tokens=np.minimum(limits, max_new_tokens),
        notes=(*trace.notes, scaling.summary()),
        scaling=scaling,
    )
    return with_lengths(fitted, prompts, outputs)


def leave_out_longer(
    trace: Trace, max_model_len: int, max_new_tokens: int, model_context: int | None = None
) -> Trace:
    """Return the requests that fit into a context, prompt and output together, with their own
    lengths: what a server such as vLLM takes. The result's `scaling` counts those left out.

    Where an output is longer than `max_new_tokens`, the limit of requests that have none becomes
    the longest output, or what their prompt leaves of the context: a server sets no lower one, and
    nothing tells a scheduler which outputs are long.

    Raises `InputError` if no request fits.
    """
    longest = trace.prompt_tokens + trace.output_tokens
    fits = longest <= max_model_len
    if not fits.any():
        raise InputError(
            f"{trace.source}: each of its {len(trace):,} requests is longer than {max_model_len:,} "
            f"tokens, prompt and output together: the shortest has {int(longest.min()):,}",
            "raise model.max_model_len in the recipe, or take another model",
        )
    left_out = int(len(trace) - fits.sum())
    kept = trace.take(np.flatnonzero(fits)) if left_out else trace
    scaling = Scaling(
        requests=len(trace),
        max_model_len=max_model_len,
        max_new_tokens=max_new_tokens,
        model_context=model_context,
        prompts=_as_they_are(trace.prompt_tokens, kept.prompt_tokens, max_model_len),
        outputs=_as_they_are(trace.output_tokens, kept.output_tokens, max_model_len),
        left_out=left_out,
    )
    kept = replace(
        kept,
        arrival_s=kept.arrival_s - kept.arrival_s[0],
        notes=(*trace.notes, scaling.summary()),
        scaling=scaling,
    )
    return with_long_limits(kept, max_new_tokens, max_model_len)


def with_long_limits(trace: Trace, max_new_tokens: int, max_model_len: int) -> Trace:
    """Return the trace with limits of outputs that cut none of them; see `leave_out_longer`."""
    most = int(trace.output_tokens.max())
    if most <= max_new_tokens:
        return trace
    room = np.maximum(max_model_len - trace.prompt_tokens, trace.output_tokens)
    limits = np.where(trace.max_tokens == 0, np.minimum(room, most), trace.max_tokens)
    return replace(trace, max_tokens=limits)


def _as_they_are(lengths: Tokens, kept: Tokens, limit: int) -> ScaledLengths:
    return ScaledLengths(
        limit_tokens=limit,
        mean_tokens=float(lengths.mean()),
        divisor=1.0,
        clipped=0,
        scaled_mean_tokens=float(kept.mean()),
    )


def fit_lengths(
    trace: Trace,
    engine: str,
    max_model_len: int,
    max_new_tokens: int,
    model_context: int | None = None,
) -> Trace:
    """Return the trace for an engine: for a server the requests that fit (`leave_out_longer`), for
    our own engines all of them, scaled (`scale_lengths`).
    """
    fit = leave_out_longer if traits_of(engine).server else scale_lengths
    return fit(trace, max_model_len, max_new_tokens, model_context)


def with_lengths(trace: Trace, prompts: Tokens, outputs: Tokens) -> Trace:
    """Return `trace` with these lengths, which were divided and clipped.

    Prompts of other lengths share nothing: an engine with scaled requests has no prefix cache.
    """
    same = np.array_equal(prompts, trace.prompt_tokens)
    if trace.sessions is not None:
        # Rounded up, a prompt may lack a token for the answer that it holds.
        later = np.flatnonzero(trace.sessions.previous >= 0)
        before = trace.sessions.previous[later]
        room = np.full(len(trace), MAX_LENGTH)
        room[before] = prompts[later] - prompts[before]
        outputs = np.where(room == outputs - 1, np.maximum(room, 1), outputs)
    return keep_sessions(
        replace(
            trace,
            prompt_tokens=prompts,
            output_tokens=outputs,
            shared=trace.shared if same else None,
        )
    )


def _edge(lengths: Tokens) -> float:
    return float(np.percentile(lengths, FITTED_PERCENTILE))


def _fit(lengths: Tokens, limit: int, least: float) -> tuple[Tokens, ScaledLengths]:
    """Lengths within `limit`, divided by `least` or more, and how they were scaled."""
    divisor = max(least, _edge(lengths) / limit)
    divided = np.ceil(lengths / divisor).astype(np.int64)
    fitted = np.minimum(divided, limit)
    return fitted, ScaledLengths(
        limit_tokens=limit,
        mean_tokens=float(lengths.mean()),
        divisor=divisor,
        clipped=int((divided > limit).sum()),
        scaled_mean_tokens=float(fitted.mean()),
    )


def prepare(
    trace: Trace, recipe: Recipe, rate_rps: float | None = None, max_new_tokens: int | None = None
) -> Trace:
    """Return the trace within the recipe's limits, or another limit of outputs, and with a mean
    rate if one is given.
    """
    model = recipe.model
    context = model.config.get("max_position_embeddings")
    known = context if isinstance(context, int) else None
    longest = max_new_tokens or recipe.serve.max_new_tokens
    fitted = fit_lengths(trace, recipe.engine.name, model.max_model_len, longest, known)
    return fitted if rate_rps is None else scale_rate(fitted, rate_rps)


def _no_times(trace: Trace, consequence: str) -> InputError:
    return InputError(
        f"{trace.source}: all {len(trace)} requests arrive at once, so {consequence}",
        "draw arrival times first: llmctl trace convert IN OUT --draw-rate REQUESTS_PER_S",
    )


class EmptyWindowError(InputError):
    """No request arrives in a window."""


@dataclass(slots=True, frozen=True)
class TraceWindow:
    """A stretch [start_s, end_s) of a trace. The times in `trace` count from start_s, or from the
    first request of its warm-up, which comes before.
    """

    start_s: float
    end_s: float
    trace: Trace


def excerpt(trace: Trace, start_s: float, duration_s: float | None) -> Trace:
    """`duration_s` seconds of the trace from `start_s` on, as by `cut`; None: to its end."""
    if start_s == 0 and duration_s is None:
        return trace
    return cut(trace, start_s, np.inf if duration_s is None else start_s + duration_s)


def cut(trace: Trace, start_s: float, end_s: float, *, warm_s: float = 0.0) -> Trace:
    """Return the requests that arrive in [start_s, end_s). Requests of the `warm_s` seconds before
    them are a warm-up. Times count from the beginning of the warm-up.

    Sessions are cut: a turn that continues one before the cut becomes a first turn. A note says how
    many these are. Raises `InputError` if no request arrives in [start_s, end_s).
    """
    first, last = np.searchsorted(trace.arrival_s, [start_s, end_s], side="left")
    if first >= last:
        raise InputError(
            f"{trace.source}: no request arrives in {_span(start_s, end_s)}",
            f"its {len(trace):,} requests arrive from 0 s to {trace.arrival_s[-1]:.6g} s",
        )
    notes = [f"cut to {_span(start_s, end_s)}: {last - first:,} requests"]
    counted = first
    begin_s = max(start_s - warm_s, 0.0)
    first = np.searchsorted(trace.arrival_s, begin_s, side="left")
    kept = trace.take(slice(int(first), int(last)))
    warmup = max(int(counted), min(trace.warmup, int(last))) - int(first)
    if trace.sessions and kept.sessions:
        later = trace.sessions.previous[first:last] >= 0
        lost = int(later.sum() - (kept.sessions.previous >= 0).sum())
        if lost:
            notes.append(
                f"{lost:,} of {int(later.sum()):,} later turns continue one before the cut: "
                "they start sessions of their own"
            )
    return replace(
        kept,
        arrival_s=kept.arrival_s - begin_s,
        notes=(*trace.notes, *notes),
        warmup=warmup,
    )


def busiest(trace: Trace, most: int) -> TraceWindow:
    """Return the whole trace if it has at most `most` requests; else `most`, the busiest among
    them: their middle is the middle of the busiest tenth of that number.
    """
    last_s = float(trace.arrival_s[-1])
    if len(trace) <= most:
        return TraceWindow(0.0, last_s, trace)
    burst = max(most // 10, 1)
    spans = trace.arrival_s[burst:] - trace.arrival_s[:-burst]
    middle = int(np.argmin(spans)) + burst // 2
    first = min(max(middle - most // 2, 0), len(trace) - most)
    start_s = float(trace.arrival_s[first])
    end_s = float(trace.arrival_s[first + most]) if first + most < len(trace) else np.inf
    return TraceWindow(start_s, min(end_s, last_s), cut(trace, start_s, end_s))


def _span(start_s: float, end_s: float) -> str:
    end = f"{end_s:.6g} s" if end_s < float("inf") else "its end"
    return f"{start_s:.6g} s .. {end}"


@dataclass(slots=True, frozen=True)
class Windows:
    """Windows of one trace. Each list is in order of time; all windows last `seconds`."""

    trace: Trace  # whole, with a note where the windows do not have the wished length
    search: list[TraceWindow]
    held_out: list[TraceWindow]
    seconds: float
    wished_s: float | None
    longest_s: float  # the greatest length that leaves gaps between windows


def fit_windows(
    trace: Trace,
    wished_s: float | None,
    search: int,
    held_out: int,
    seed: int = 0,
    *,
    warm: bool = False,
) -> Windows:
    """Cut windows of the wished length if the trace is long enough and most stretches of that
    length hold a request; else, and without a wish, as long as fits with gaps. See `split_windows`.

    Raises `InputError` for a wish that is not positive and for a trace with requests that all
    arrive at once; `EmptyWindowError` if even the longest windows would hold no request.
    """
    duration_s = float(trace.arrival_s[-1])
    if duration_s == 0:
        raise _no_times(trace, "it cannot be cut into windows")
    part_s = duration_s / max(search + held_out, 1)
    longest_s = COVERED * part_s

    def split(seconds: float, why: str = "") -> Windows:
        whole = trace
        if why and wished_s is not None:
            note = f"windows of {seconds:,.3g} s instead of {wished_s:,g} s: {trace.source} {why}"
            whole = replace(trace, notes=(*trace.notes, note))
        windows = split_windows(whole, seconds, search, held_out, seed, warm=warm)
        return Windows(whole, *windows, seconds, wished_s, longest_s)

    if wished_s is None:
        return split(longest_s)
    rate = f"{mean_rate(trace):.3g} requests/s"
    if wished_s > part_s:
        lasts = f"lasts {duration_s:,.4g} s at {rate}"
        return split(longest_s, f"{lasts}, for {search + held_out} windows")
    try:
        return split(wished_s)
    except EmptyWindowError:
        return split(longest_s, f"has no request in most of these at {rate}")


def split_windows(
    trace: Trace,
    window_s: float,
    search: int,
    held_out: int,
    seed: int = 0,
    *,
    warm: bool = False,
) -> tuple[list[TraceWindow], list[TraceWindow]]:
    """`search` and `held_out` windows of `window_s` each, disjoint, that cover the trace's loads.

    The trace is divided into stretches of `window_s`, so that one of them is as busy as any
    stretch of that length (`_stretches`). It is the first window. The others are at quantiles of
    the stretches' loads, drawn with `seed`, one in each equal part of the distribution. By falling
    load the two kinds take turns, as evenly as their numbers allow, the search first. Both lists
    are in order of time.

    Args:
        warm: whether the requests of as many seconds before a window are its warm-up.

    Raises `InputError` if the trace has fewer stretches, `EmptyWindowError` if no request arrives
    in half of them or more.
    """
    count = search + held_out
    duration_s = float(trace.arrival_s[-1])
    if not window_s > 0 or search < 0 or held_out < 0 or count == 0:
        raise InputError(
            f"{search} + {held_out} windows of {window_s:g} s cannot be cut",
            "give positive numbers",
        )
    part_s = duration_s / count
    if window_s > part_s:
        raise InputError(
            f"{trace.source}: lasts {duration_s:.6g} s, too short for {search} + {held_out} "
            f"windows of {window_s:g} s",
            f"windows of at most {part_s:.4g} s, or {int(duration_s / window_s)} windows in all, "
            "would fit",
        )
    edges, loads = _stretches(trace, window_s, count)
    busy = np.flatnonzero(loads)
    if len(busy) < count or 2 * len(busy) <= len(loads):
        raise EmptyWindowError(
            f"{trace.source}: no request arrives in {len(loads) - len(busy):,} of "
            f"{len(loads):,} stretches of {window_s:.3g} s, too many for {search} + {held_out} "
            f"windows ({len(trace):,} requests in {duration_s:,.6g} s)",
            "give a longer trace, longer windows (tune.window_s), or fewer windows",
        )
    by_load = busy[np.argsort(-loads[busy], kind="stable")]
    rng = np.random.default_rng(seed)
    others = len(by_load) - 1
    bounds = np.linspace(0, others, count).astype(int)  # each part has one stretch or more
    drawn = [int(rng.integers(low, high)) for low, high in pairwise(bounds)]
    chosen = [by_load[0], *(by_load[1 + place] for place in drawn)]
    found: tuple[list[TraceWindow], list[TraceWindow]] = ([], [])
    for place, stretch in enumerate(chosen):
        start_s = float(edges[stretch])
        end_s = float(edges[stretch + 1])
        warm_s = window_s if warm else 0.0
        window = TraceWindow(start_s, end_s, cut(trace, start_s, end_s, warm_s=warm_s))
        searched = -(-(place + 1) * search // count) > -(-place * search // count)
        found[0 if searched else 1].append(window)
    for windows in found:
        windows.sort(key=lambda window: window.start_s)
    return found


def _stretches(
    trace: Trace, window_s: float, least: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The edges of stretches of `window_s`, `least` or more, one after another, and their loads.

    The load is the share of all prompt tokens plus the share of all output tokens. Where the first
    stretch begins decides which bursts a stretch holds whole. Of several beginnings, the busiest
    stretch decides.
    """
    duration_s = float(trace.arrival_s[-1])
    tokens = trace.prompt_tokens / max(trace.prompt_tokens.sum(), 1)
    tokens = tokens + trace.output_tokens / max(trace.output_tokens.sum(), 1)
    before = np.concatenate([[0.0], np.cumsum(tokens)])
    slack_s = min(window_s, duration_s - least * window_s)
    best: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None
    for first_s in np.linspace(0.0, max(slack_s, 0.0), PHASES):
        number = max(int((duration_s - first_s) / window_s + ROUNDING), least)
        edges = np.minimum(first_s + window_s * np.arange(number + 1), duration_s)
        loads = np.diff(before[np.searchsorted(trace.arrival_s, edges)])
        if best is None or loads.max() > best[1].max():
            best = edges, loads
    assert best is not None
    return best


@dataclass(slots=True, frozen=True)
class LengthSpread:
    """How a length is distributed, in tokens."""

    mean: float
    percentiles: dict[str, float]  # p1, p25, p50, ...
    max: int


@dataclass(slots=True, frozen=True)
class Description:
    """A trace in numbers."""

    requests: int
    duration_s: float
    rate_rps: float
    burstiness_cv: float  # coefficient of variation of the gaps: 1 for a Poisson process
    input_tokens_per_s: float
    output_tokens_per_s: float
    prompt: LengthSpread
    output: LengthSpread
    # of the prompt tokens, that a prefix cache without limit finds; None: the trace does not say
    reusable_percent: float | None


def describe(trace: Trace) -> Description:
    """A trace in numbers. Rates are 0 where all requests arrive at once."""
    duration_s = float(trace.arrival_s[-1])
    gaps = np.diff(trace.arrival_s)
    per_s = 1.0 / duration_s if duration_s > 0 else 0.0
    shared_percent = None
    if trace.shared is not None:
        shared_percent = 100.0 * float(reusable_tokens(trace).sum() / trace.prompt_tokens.sum())
    return Description(
        requests=len(trace),
        duration_s=duration_s,
        rate_rps=mean_rate(trace),
        burstiness_cv=float(gaps.std() / gaps.mean()) if duration_s > 0 else 0.0,
        input_tokens_per_s=float(trace.prompt_tokens.sum()) * per_s,
        output_tokens_per_s=float(trace.output_tokens.sum()) * per_s,
        prompt=spread(trace.prompt_tokens),
        output=spread(trace.output_tokens),
        reusable_percent=shared_percent,
    )


def spread(lengths: NDArray[np.int64]) -> LengthSpread:
    """The mean, the percentiles and the greatest of lengths."""
    values = np.percentile(lengths, PERCENTILES)
    return LengthSpread(
        mean=float(lengths.mean()),
        percentiles={f"p{q}": float(value) for q, value in zip(PERCENTILES, values, strict=True)},
        max=int(lengths.max()),
    )
