"""The report of a replay: measured beside predicted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from toolkit.bench.client import Lengths, Replay, client_times, served
from toolkit.endpoints.load import INTERRUPTED, Sample
from toolkit.files.bench import BenchReport, CacheUse, Compared, Warmup
from toolkit.files.io import EnvelopeFields
from toolkit.files.tuning import NO_OUTCOME, Outcome
from toolkit.metrics import sla_ratios, summarize
from toolkit.traces.types import Trace
from toolkit.traces.write import TraceLine, to_ms

COMPARED = (
    "throughput_rps",
    "goodput_rps",
    *(f"{name}_{stat}_s" for name in ("ttft", "tpot", "e2e") for stat in ("mean", "p95", "p99")),
)
NUMBER = re.compile(r"\d+(\.\d+)?")
CACHE_QUERIES = "vllm:prefix_cache_queries_total"
CACHE_HITS = "vllm:prefix_cache_hits_total"
NOT_SENT = Sample.__dataclass_fields__["failure"].default


@dataclass(slots=True, frozen=True)
class Prediction:
    """A prediction at the warm-up's speed and as fitted; empty without a plan."""

    outcome: Outcome = NO_OUTCOME
    as_fitted: Outcome = NO_OUTCOME
    warmup: Warmup | None = None


def report(
    replay: Replay,
    head: EnvelopeFields,
    *,
    model: str,
    lengths: Lengths,
    trace_notes: Sequence[str],
    changes: str = "",
    sla: Mapping[str, float],
    predicted: Prediction,
    slowdown: float | None = None,
    cache: CacheUse | None = None,
    policy: str | None = None,
    request_rate_rps: float | None = None,
    concurrency: int = 0,
) -> BenchReport:
    """Return the report of a replay; `slowdown` is of the server's batches during it.

    An interrupted replay is not compared, since the prediction is of all requests.
    """
    answered = [one for one in replay.samples if one.failure not in (INTERRUPTED, NOT_SENT)]
    seen = served(answered)
    measured = Outcome(
        metrics=summarize(seen, sla) if answered else {},
        used=sla_ratios(seen, sla) if seen.ok.any() else {},
    )
    if replay.interrupted:
        predicted = Prediction(warmup=predicted.warmup)
    return BenchReport(
        **head,
        model=model,
        policy=policy,
        request_rate_rps=request_rate_rps,
        concurrency=concurrency,
        lengths=lengths,
        trace_notes=list(trace_notes),
        changes=changes,
        interrupted=replay.interrupted,
        requests=len(replay.samples),
        answered=len(answered),
        failures=_failures(one.failure for one in answered if one.failure),
        refused=sum(one.refused for one in answered),
        wrong_length=sum(
            not one.failure and one.output_tokens != one.wanted_tokens for one in answered
        ),
        client=client_times(replay, sla),
        sla=dict(sla),
        warmup=predicted.warmup,
        replay_slowdown=slowdown,
        cache=cache,
        measured=measured,
        predicted=predicted.outcome,
        predicted_as_fitted=predicted.as_fitted,
        compared=compare(measured.metrics, predicted.outcome.metrics, predicted.as_fitted.metrics),
    )


def cache_use(
    samples: Sequence[Sample],
    trace: Trace,
    before: Mapping[str, float],
    after: Mapping[str, float],
    predicted: Mapping[str, float],
) -> CacheUse | None:
    """Return what the server took from its prefix cache; `before` and `after` are its counters.

    An answer without `cached_tokens` hit nothing if another one has them: vLLM omits a 0. None
    where neither the server nor the prediction has a cache.
    """
    ok = [one for one in samples if not one.failure]
    said = any(one.cached_tokens is not None for one in ok)
    grown = hits = None
    if {CACHE_QUERIES, CACHE_HITS} <= before.keys() & after.keys():
        grown = after[CACHE_QUERIES] - before[CACHE_QUERIES]
        hits = after[CACHE_HITS] - before[CACHE_HITS]
    queries = predicted.get("query_tokens")
    blind = bool(predicted) and queries is None and trace.shared is not None
    if not (said or grown or queries or blind):
        return None
    return CacheUse(
        prompt_tokens=sum(one.counted_prompt_tokens or one.prompt_tokens for one in ok),
        hit_tokens=sum(one.cached_tokens or 0 for one in ok) if said else None,
        counter_queries=grown,
        counter_hits=hits,
        predicted_percent=100.0 * predicted["hit_tokens"] / queries if queries else None,
        blind=blind,
    )


def _failures(reasons: Iterable[str]) -> dict[str, int]:
    """The number of each reason. Reasons that differ only in numbers, such as forecast seconds,
    count together, with dots for the numbers.
    """
    by_form: defaultdict[str, list[str]] = defaultdict(list)
    for reason in reasons:
        status, _, words = reason.partition(": ")
        form = f"{status}: {NUMBER.sub('...', words)}" if words else reason
        by_form[form].append(reason)
    return {(same[0] if len(set(same)) == 1 else form): len(same) for form, same in by_form.items()}


def compare(
    measured: Mapping[str, float], predicted: Mapping[str, float], as_fitted: Mapping[str, float]
) -> list[Compared]:
    """Each of `COMPARED` that was measured or predicted."""
    return [
        Compared(
            metric=metric,
            measured=measured.get(metric),
            predicted=predicted.get(metric),
            error_percent=_error_percent(measured.get(metric), predicted.get(metric)),
            as_fitted=as_fitted.get(metric),
            as_fitted_error_percent=_error_percent(measured.get(metric), as_fitted.get(metric)),
        )
        for metric in COMPARED
        if metric in measured or metric in predicted
    ]


def _error_percent(measured: float | None, predicted: float | None) -> float | None:
    return 100.0 * (predicted / measured - 1.0) if measured and predicted is not None else None


def request_lines(samples: Sequence[Sample]) -> list[TraceLine]:
    """A canonical trace with the measured latencies; `status` has the reason of a failure."""
    return [
        TraceLine(
            timestamp=to_ms(one.scheduled_s),
            input_length=one.prompt_tokens,
            output_length=one.output_tokens,
            ttft_ms=None if one.failure else to_ms(one.first_token_s - one.scheduled_s),
            e2e_ms=None if one.failure else to_ms(one.last_token_s - one.scheduled_s),
            status=one.failure or "ok",
        )
        for one in samples
    ]
