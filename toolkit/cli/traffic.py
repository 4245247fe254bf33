"""Which requests are served and when they come: the options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.cli.arguments import TraceOption, option
from toolkit.errors import InputError
from toolkit.files.new_recipe import TraceLengths

if TYPE_CHECKING:
    from toolkit.traces.types import Trace

USUAL_TRACE = "chat-small"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """The options of a command that serves a trace, also at a fixed concurrency. Its rate is an
    option of the command, since some take several.
    """

    trace: TraceOption = USUAL_TRACE
    concurrency: int | None = option(
        None,
        "Serve so many requests at once: the next one of the trace starts when any one ends, "
        "whatever the trace's times.",
        min=1,
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests, and how they come.

    Attributes:
        trace: the requests; at a fixed concurrency their order counts, not their times.
        path: the trace's file.
        concurrency: so many at once; 0: they come at their times.
    """

    trace: Trace
    path: Path
    concurrency: int = 0


def read_traffic(options: TrafficOptions, rate: object) -> Traffic:
    """Read the trace that the options name, with its own lengths.

    Args:
        rate: the command's --rate, to which it scales the trace; None: it has none.

    Raises `InputError` if options contradict each other, or the trace cannot be read.
    """
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    concurrency = options.concurrency or 0
    if concurrency and rate is not None:
        raise InputError(
            f"--concurrency {concurrency} starts a request when one ends, so there is no --rate",
            "leave one of the two out",
        )
    path = trace_path(options.trace)
    trace, _ = read_trace(path)
    if concurrency:
        trace = _unordered(trace)
    return Traffic(trace, path, concurrency)


def _unordered(trace: Trace) -> Trace:
    """Return the trace without its sessions, which a fixed concurrency does not keep."""
    from dataclasses import replace

    if trace.sessions is None:
        return trace
    later = int((trace.sessions.previous >= 0).sum())
    note = (
        f"a fixed concurrency keeps no sessions: {later:,} later turns start when a place is free"
    )
    return replace(trace, sessions=None, notes=(*trace.notes, note))


def lengths_of(name: str | None) -> TraceLengths | None:
    """The lengths of the trace of --trace."""
    from toolkit.traces.read import read_trace
    from toolkit.traces.types import trace_path

    if name is None:
        return None
    trace, _ = read_trace(trace_path(name))
    totals = sorted((trace.prompt_tokens + trace.output_tokens).tolist())
    return TraceLengths(name, totals, int(trace.output_tokens.max()))
