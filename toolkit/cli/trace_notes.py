"""What commands say of the trace that they use: what was done to its lengths first, then the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.cli.output import note

if TYPE_CHECKING:
    from toolkit.cli.results import Requests
    from toolkit.traces.types import Trace


def note_trace(trace: Trace) -> None:
    """All that was done to `trace`, on stderr; what was done to its lengths comes first."""
    note_scaling(trace)
    note_rest(trace)


def note_scaling(trace: Trace) -> None:
    """What was done to its lengths, in one line; nothing where they are as they were read."""
    if trace.scaling is not None:
        mark = "warning: " if trace.scaling.notable else ""
        note(f"{mark}trace: {trace.scaling.summary()}")


def note_rest(trace: Trace) -> None:
    """Everything but what was done to its lengths, a line each."""
    lengths = trace.scaling.summary() if trace.scaling else None
    for line in trace.notes:
        if line != lengths:
            note(f"trace: {line}")


def plain(trace: Trace) -> Requests:
    """The trace as `--json` shows it."""
    from toolkit.cli.results import Requests

    return Requests(source=trace.source, requests=len(trace), notes=list(trace.notes), scaling=trace.scaling)
