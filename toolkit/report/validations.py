"""The validation: what was predicted beside what a server then did, with the errors' signs."""

from __future__ import annotations

from toolkit.report.material import Material
from toolkit.report.parts import Figure, Section, Table, missing
from toolkit.report.svg import bars
from toolkit.units import percent

KEY, TITLE = "validation", "The validation"


def validation_section(found: Material) -> Section:
    """What `validation.json` holds."""
    validation = found.validation
    if validation is None:
        lead = "The predictions were not held against a running server yet."
        return missing(KEY, TITLE, lead, "llmctl validate plan.json --url URL", found.why.get("validation", ""))
    requests = sum(window.requests for window in validation.windows)
    failed = sum(window.failed for window in validation.windows)
    lead = (
        f"{requests:,} requests in {len(validation.windows)} windows of a trace, replayed against {validation.model} "
        f"under policy '{validation.policy}'; {failed:,} failed."
    )
    section = Section(KEY, TITLE, lead, lines=[validation.summary()])
    errors = {one.metric: one.error_percent for one in validation.metrics}
    section.figures.append(Figure(bars(errors, " %"), "the prediction's error, of the means over the windows"))
    rows = [
        (one.metric, one.measured, one.predicted, percent(one.error_percent), percent(one.worst_percent))
        for one in validation.metrics
    ]
    columns = ["metric", "measured", "predicted", "its error", "worst window"]
    section.tables.append(Table("Means over the windows", columns, rows))
    by_request = [
        (one.latency, percent(one.median_percent), f"{one.median_absolute_percent:.1f} %", one.requests)
        for one in validation.requests
    ]
    columns = ["request by request", "median error", "median size of it", "requests"]
    section.tables.append(Table("Request by request", columns, by_request))
    section.lines += [f"Noted: {note}." for note in validation.notes]
    return section
