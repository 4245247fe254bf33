"""`llmctl trace from-metrics`: a trace drawn from the metrics of a server of vLLM.

Three sources: pages of metrics that were saved, a server that is scraped for a while, and a
Prometheus server that has scraped it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.cli.arguments import (
    ApiKeyOption,
    JsonOption,
    argument,
    command_of,
    option,
    refuse_useless,
)
from toolkit.cli.output import note, put_trace
from toolkit.errors import InputError
from toolkit.files.io import check_writable

if TYPE_CHECKING:
    from toolkit.endpoints.acceptance import Sample
    from toolkit.traces.histograms import LengthHistogram, ScrapedTraffic
    from toolkit.traces.types import Trace

SCRAPE_EVERY_S = 15.0
QUERY_EVERY_S = 60.0
WAYS = (
    "give --rate for one scrape, --for SECONDS to scrape a server meanwhile, or --past SECONDS for"
    " a Prometheus server"
)


@dataclass(frozen=True, slots=True)
class FromMetricsOptions:
    out: Annotated[Path, typer.Option(help="Write the trace to this file, canonical JSONL.")]
    source: str = argument(
        "The URL of a server of vLLM or of Prometheus, or a saved page of /metrics.",
        metavar="URL|FILE",
    )
    later: Path | None = argument(
        "A page of the same server that was saved later: the requests in between are taken.",
        None,
        metavar="LATER",
    )
    for_s: float | None = option(
        None, "Scrape the server for this many seconds; between two files, the time between them.",
        "--for", min=0.001,
    )  # fmt: skip
    past: float | None = option(
        None, "Ask a Prometheus server for this many seconds up to now.", min=1.0
    )
    every: float | None = option(
        None,
        "Seconds of an interval, in which the rate is even; default: 15, with --past 60. Prometheus"
        " needs at least four of its own scrapes in one.",
        min=0.001,
    )
    rate: float | None = option(
        None, "Draw arrivals at this rate, requests/s, where the metrics do not say it."
    )
    cv: float | None = option(
        None, "With --rate: coefficient of variation of the gaps; default: 1, Poisson."
    )
    requests: int | None = option(
        None, "With --rate: draw this many requests; default: as many as were counted.", min=1
    )
    model: str | None = option(None, "Take the requests of this model, if there are several.")
    longest: int | None = option(
        None,
        "The longest possible length, in tokens; default: as far as vLLM's buckets say.",
        min=1,
    )
    api_key: ApiKeyOption = ""
    seed: int = option(0, "Draw from this seed; the same seed gives the same trace.", min=0)
    as_json: JsonOption = False


@command_of(FromMetricsOptions)
def from_metrics(args: FromMetricsOptions) -> None:
    """Draw a trace from the metrics of a server of vLLM: its histograms of prompt and output
    tokens, and how many requests ended when.

    The lengths have the counts of each bucket and the sum that the metrics tell. What metrics do
    not know is named. Ctrl-C ends the scraping early; what was seen so far is used.
    """
    check_writable(args.out)
    made = _drawn(args)
    put_trace(made, args.out, args.as_json)


def _drawn(args: FromMetricsOptions) -> Trace:
    """The trace of the source. `InputError` for options that do not fit it."""
    from toolkit.traces.generate import Arrivals
    from toolkit.traces.histograms import draw_timed, draw_untimed

    is_url = args.source.startswith(("http://", "https://"))
    if args.rate is None:
        of_rate = {"--cv": args.cv, "--requests": args.requests}
        refuse_useless(of_rate, "without --rate no arrivals are drawn", "add --rate")
    if is_url and args.later is not None:
        raise InputError(f"{args.later}: a second page beside a URL", "give two files, or one URL")
    ways = {"--for": args.for_s, "--past": args.past, "--rate": args.rate}
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        what = f"{' and '.join(given)} contradict each other" if given else "no times are known"
        raise InputError(f"{args.source}: {what}", WAYS)
    if args.every is not None and (args.rate is not None or not is_url):
        refuse_useless({"--every": args.every}, "the source has no intervals")
    if args.past is not None:
        if not is_url:
            raise InputError(f"--past: {args.source} is not a URL", "name a Prometheus server")
        return draw_timed(_asked(args, args.past), args.seed, args.longest)
    if args.for_s is not None and is_url:
        return draw_timed(_watched(args, args.for_s), args.seed, args.longest)
    if args.for_s is not None and args.later is None:
        raise InputError(f"{args.source}: one page has no times", "give --rate, or a second page")
    traffic = _scraped(args) if is_url else _saved(args)
    if args.rate is None:
        return draw_timed([traffic], args.seed, args.longest)
    arrivals = Arrivals(args.rate, 1.0 if args.cv is None else args.cv)
    return draw_untimed(traffic, args.requests, arrivals, args.seed, args.longest)


def _saved(args: FromMetricsOptions) -> ScrapedTraffic:
    """The requests that a saved page counts, or those between two pages."""
    from toolkit.endpoints.target import page_metrics
    from toolkit.files.strict import read_bytes
    from toolkit.traces.histograms import traffic_of

    def page(path: Path, at_s: float) -> ScrapedTraffic:
        metrics = page_metrics(read_bytes(path, "save it with curl"), path.name)
        _note_acceptance(metrics, at_s)
        return traffic_of(metrics, args.model, path.name, at_s)

    first = page(Path(args.source), 0.0)
    if args.later is None:
        return first
    return page(args.later, args.for_s or 0.0).since(first)


def _scraped(args: FromMetricsOptions, at_s: float = 0.0) -> ScrapedTraffic:
    """The requests that a server counts now."""
    from toolkit.endpoints.prometheus import metrics_page
    from toolkit.traces.histograms import traffic_of

    metrics = metrics_page(args.source, args.api_key)
    _note_acceptance(metrics, at_s)
    return traffic_of(metrics, args.model, args.source, at_s)


def _note_acceptance(metrics: Iterable[Sample], at_s: float) -> None:
    """Print how many drafts the server has accepted, as a recipe takes it, at the first look."""
    from toolkit.endpoints.acceptance import acceptance_of

    found = acceptance_of(metrics) if not at_s else None
    if found is not None and found.rates is not None:
        rates = ", ".join(f"{rate:.3f}" for rate in found.rates)
        text = f"speculative decoding; for serve.acceptance of a recipe: rates: [{rates}]"
        note(f"{text}, proposed: {found.proposed:.3f}")


def _watched(
    args: FromMetricsOptions,
    for_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[ScrapedTraffic]:
    """The requests that end while a server is scraped; after Ctrl-C those that were seen."""
    every_s = SCRAPE_EVERY_S if args.every is None else args.every
    start_s = clock()
    scrapes = [_scraped(args)]
    note(f"scraping {args.source} every {min(every_s, for_s):g} s for {for_s:g} s")
    try:
        while (now_s := clock() - start_s) < for_s:
            sleep(max(min(every_s * len(scrapes), for_s) - now_s, 0.0))
            scrapes.append(_scraped(args, clock() - start_s))
    except KeyboardInterrupt:
        scrapes.append(_scraped(args, clock() - start_s))
        note(f"interrupted after {scrapes[-1].end_s:.1f} s")
    return [now.since(before) for before, now in pairwise(scrapes)]


def _asked(args: FromMetricsOptions, past_s: float) -> list[ScrapedTraffic]:
    """The requests of the past, as a Prometheus server has scraped them."""
    from toolkit.endpoints.prometheus import Series, query_range
    from toolkit.traces.histograms import MODEL, OUTPUT, PROMPT, ScrapedTraffic, choose_model

    step_s = QUERY_EVERY_S if args.every is None else args.every
    end_s = time.time()
    start_s = end_s - past_s + step_s  # a point holds the interval before it
    if start_s > end_s:
        raise InputError(
            f"--past {past_s:g} is shorter than an interval of {step_s:g} s",
            "give a shorter --every",
        )

    def ask(query: str) -> list[Series]:
        return query_range(args.source, query, start_s, end_s, step_s, args.api_key)

    counted = ask(f"sum by ({MODEL}) ({PROMPT}_count)")
    if not counted:
        raise InputError(f"{args.source}: it has no {PROMPT}", "does it scrape a server of vLLM?")
    names = {one.metric.get(MODEL, "") for one in counted}
    model = choose_model(names, args.model, args.source)
    where = f"{{{MODEL}={json.dumps(model)}}}[{round(1000 * step_s)}ms]"
    found: dict[str, dict[float, LengthHistogram]] = {}
    for name in (PROMPT, OUTPUT):
        by_bucket = ask(f"sum by (le) (increase({name}_bucket{where}))")
        buckets = {one.metric.get("le", ""): dict(one.points()) for one in by_bucket}
        sums: dict[float, float] = {}
        for one in ask(f"sum (increase({name}_sum{where}))"):
            sums |= one.points()
        found[name] = _histograms(buckets, sums)
    intervals = [
        ScrapedTraffic(found[PROMPT][at_s], found[OUTPUT][at_s], at_s - step_s, at_s)
        for at_s in sorted(found[PROMPT].keys() & found[OUTPUT].keys())
    ]
    if not intervals:
        raise InputError(
            f"{args.source}: no increase of {PROMPT} within {past_s:g} s",
            "give a longer --past, or an --every of at least four scrapes",
        )
    missing = round(past_s / step_s) - len(intervals)
    if missing > 0:
        note(f"{missing} of {round(past_s / step_s)} intervals have no data, and are left out")
    return intervals


def _histograms(
    buckets: dict[str, dict[float, float]], sums: dict[float, float]
) -> dict[float, LengthHistogram]:
    """The histogram at each time at which every bucket and the sum are known."""
    from toolkit.traces.histograms import LengthHistogram, bound_of

    known = set(sums)
    for points in buckets.values():
        known &= points.keys()
    if "+Inf" not in buckets:
        return {}
    bounds = {le: bound_of(le, "Prometheus") for le in buckets}
    return {
        at_s: LengthHistogram.of({bounds[le]: buckets[le][at_s] for le in buckets}, sums[at_s])
        for at_s in known
    }
