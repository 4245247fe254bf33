"""Reading traces of every known format, with a report of the rows that were kept and dropped.

The module first describes the formats, then opens a file, finds its format and checks its rows.

The column names decide the format, whatever the file is called. A row with impossible values (no
tokens, a negative time, a failed response, something that is not a number) is counted and left
out, never repaired. The report shows the first of each kind with its value and the limit. The
canonical format is Mooncake's JSONL; the server's own log and `llmctl bench --save-requests` write
it with more keys. No format holds text: lengths and times only.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from toolkit.errors import InputError
from toolkit.traces.types import Trace

SUCCESS = (None, "", "ok", 200)  # `status` of a request that was served; anything else failed
MAX_LENGTH = 2**31 - 1  # tokens; a greater length is a mistake, and would overflow sums
# The year 10000 in seconds since 1970. A later time is in another unit, or a mistake.
LATEST_S = 253_402_300_800.0
SHOWN = 40  # characters of a value in a message

UNPARSABLE = "unparsable"
TOO_LATE = "with a time beyond the year 9999"
NO_TOKENS = "with a non-positive length"
NEGATIVE = "with a negative time"
FAILED = "failed responses"
BEYOND = "longer than their max_tokens"

Record = Mapping[str, object] | None  # one row by column name; None: it could not be parsed
Row = tuple[float, int, int, int, int]  # arrival in seconds, prompt, output, max_tokens, priority


def number(value: object) -> float:
    """A JSON number, or a CSV field that holds one. ValueError otherwise, also for `true`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


def milliseconds(value: object) -> float:
    """Seconds from milliseconds."""
    return number(value) / 1000.0


def iso_seconds(value: object) -> float:
    """Seconds since 1970 of an ISO 8601 time, UTC where it names no zone, to the microsecond."""
    if not isinstance(value, str):
        raise ValueError(f"not an ISO time: {value!r}")
    time = datetime.fromisoformat(value)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


@dataclass(slots=True, frozen=True)
class Format:
    """The columns of a format, and what its times mean. Empty: the format lacks that column."""

    name: str
    prompt: str
    output: str
    arrival: str = ""
    seconds: Callable[[object], float] = number
    max_tokens: str = ""  # optional: the limit that the client set
    priority: str = ""  # optional: smaller is more urgent
    status: str = ""  # optional: see SUCCESS
    zero_output_failed: bool = False  # 0 output tokens mean that the request failed
    absolute_time: bool = False  # times are dates; those before 1970 are valid

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(column for column in (self.arrival, self.prompt, self.output) if column)

    @property
    def unit_s(self) -> float:
        """The unit of its times, in seconds."""
        return 0.001 if self.seconds is milliseconds else 1.0

    @property
    def unit(self) -> str:
        return "ms" if self.seconds is milliseconds else "s"

    @property
    def time(self) -> str:
        """What its times are, in words."""
        return (
            "an ISO 8601 time" if self.seconds is iso_seconds else f"a finite number of {self.unit}"
        )


MOONCAKE = Format(
    "mooncake",
    prompt="input_length",
    output="output_length",
    arrival="timestamp",
    seconds=milliseconds,
    max_tokens="max_tokens",
    priority="priority",
    status="status",
)

# The first that fits wins, so a format without times comes after its sibling with times.
FORMATS = (
    MOONCAKE,
    Format(
        "azure",
        "ContextTokens",
        "GeneratedTokens",
        arrival="TIMESTAMP",
        seconds=iso_seconds,
        absolute_time=True,
    ),
    Format(
        "burstgpt",
        "Request tokens",
        "Response tokens",
        arrival="Timestamp",
        zero_output_failed=True,
    ),
    Format("vidur", "num_prefill_tokens", "num_decode_tokens", arrival="arrived_at"),
    Format("vidur-lengths", "num_prefill_tokens", "num_decode_tokens"),
    Format("sharegpt-o1", "prompt_tokens", "completion_tokens"),
)
KNOWN = "known: " + "; ".join(f"{known.name} ({', '.join(known.required)})" for known in FORMATS)


def detect(found: Collection[str], source: str) -> Format:
    """The format with all its required columns among `found`.

    `InputError` names the columns that the nearest format lacks, and those found.
    """
    for candidate in FORMATS:
        if set(candidate.required) <= set(found):
            return candidate
    nearest = max(FORMATS, key=lambda candidate: len(set(candidate.required) & set(found)))
    columns = ", ".join(f"'{column}'" for column in found)
    missing = [column for column in nearest.required if column not in found]
    if len(missing) == len(nearest.required):
        raise InputError(
            f"{source}: not a trace: none of the known columns, found {columns or 'none'}",
            KNOWN,
        )
    named = " and ".join(f"'{column}'" for column in missing)
    raise InputError(
        f"{source}: column {named} of the {nearest.name} format is missing; found {columns}",
        f"the {nearest.name} format has {', '.join(nearest.required)}",
    )


@dataclass(slots=True, frozen=True)
class ReadReport:
    """How many rows of a file were kept, and how many were dropped, by reason."""

    source: str
    format: str
    rows: int
    kept: int
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason to count
    # reason to the first row that was dropped for it, with its value and the limit
    examples: Mapping[str, str] = field(default_factory=dict)
    reordered: bool = False  # rows were not in order of arrival and were sorted
    timeless: bool = False  # the format has no times: all requests arrive at 0

    def lines(self) -> tuple[str, ...]:
        """The report in words, one line each."""
        lines = [f"read {self.kept:,} of {self.rows:,} rows ({self.format} format)"]
        if self.dropped:
            reasons = sorted(self.dropped.items())
            each = "; ".join(
                f"{count:,} {reason} ({self.examples[reason]})" for reason, count in reasons
            )
            count = self.rows - self.kept
            lines.append(f"dropped {count:,} {'row' if count == 1 else 'rows'}: {each}")
        if self.reordered:
            lines.append("rows were not in order of arrival: sorted")
        if self.timeless:
            lines.append("the format has no arrival times: all requests arrive at 0 s")
        return tuple(lines)


class _Dropped(ValueError):  # noqa: N818  (a verdict on a row, caught in this module)
    """A row with impossible values; the text is the reason that is counted."""


def read_trace(path: Path) -> tuple[Trace, ReadReport]:
    """Read the trace in `path`, sorted by arrival with the first at 0 s.

    Returns it with the report, which is also in its notes. Raises `InputError` where the file
    cannot be read, has no known format, lacks a column, or has no usable row.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found, records = _open_records(file, path.name)
            form = detect(found, path.name)
            return _collect(records, form, path.name)
    except OSError as error:
        raise InputError(f"{path}: cannot read the trace: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a trace: it is not UTF-8 text", KNOWN) from error


def _open_records(file: TextIO, source: str) -> tuple[list[str], Iterator[Record]]:
    """The column names and the rows of CSV or JSON: the file's first character decides."""
    first = ""
    while not first and (line := file.readline()):
        first = line.strip()[:1]
    file.seek(0)
    if first == "":
        raise InputError(f"{source}: the trace is empty", KNOWN)
    if first in "[{":
        return _json(_json_array(file, source) if first == "[" else _json_lines(file), source)
    lines = _csv_lines(file, source)
    columns = [name.strip() for name in next((line for line in lines if "".join(line).strip()), [])]
    # A short row has None for missing columns. Values beyond the columns of a row are ignored.
    return columns, (dict(zip_longest(columns, line[: len(columns)])) for line in lines if line)


def _csv_lines(file: TextIO, source: str) -> Iterator[list[str]]:
    reader = csv.reader(file)
    try:
        yield from reader
    except csv.Error as error:
        raise InputError(f"{source}: line {reader.line_num}: {error}") from error


def _json_lines(file: TextIO) -> Iterator[object]:
    for line in file:
        if line.strip():
            try:
                yield msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError):
                yield _lenient(line)


def _lenient(text: str) -> object:
    """Parse JSON with NaN and Infinity, which some writers make, so that a message can name the
    value. None for anything else.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_array(file: TextIO, source: str) -> Iterator[object]:
    text = file.read()
    try:
        values: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        values = _lenient(text)
        if not isinstance(values, list):
            raise InputError(f"{source}: not a JSON array: {error}", KNOWN) from error
    assert isinstance(values, list), "the text begins with a bracket"
    yield from values


def _json(values: Iterable[object], source: str) -> tuple[list[str], Iterator[Record]]:
    """The columns of the first object, and all values as records."""
    rest = iter(values)
    head: list[Record] = []
    for value in rest:
        head.append(value if isinstance(value, dict) else None)
        if head[-1] is not None:
            break
    if not head or head[-1] is None:
        raise InputError(f"{source}: not a trace: it holds no JSON object", KNOWN)

    def rows() -> Iterator[Record]:
        yield from head
        for value in rest:
            yield value if isinstance(value, dict) else None

    return list(head[-1]), rows()


def _collect(records: Iterator[Record], form: Format, source: str) -> tuple[Trace, ReadReport]:
    kept: list[Row] = []
    dropped: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for row, record in enumerate(records, start=1):
        try:
            kept.append(_row(record, form))
        except _Dropped as error:
            reason = str(error)
            dropped[reason] += 1
            if reason not in examples:
                examples[reason] = f"row {row:,}: {_detail(record, form, reason)}"
    rows = len(kept) + dropped.total()
    arrivals = np.array([row[0] for row in kept], dtype=np.float64)
    reordered = bool((np.diff(arrivals) < 0).any())
    report = ReadReport(
        source, form.name, rows, len(kept), dict(dropped), examples, reordered, not form.arrival
    )
    if not kept:
        problem = f"{source}: no usable row: {'; '.join(report.lines())}"
        raise InputError(
            problem,
            "correct these rows; docs/reference/traces.md, 'Rows that cannot be', has the limits",
        )
    order = np.argsort(arrivals, kind="stable")
    lengths = np.array([row[1:] for row in kept], dtype=np.int64)[order]
    arrivals = arrivals[order] - arrivals.min()
    priority = lengths[:, 3] if lengths[:, 3].any() else None
    return Trace(
        arrivals, lengths[:, 0], lengths[:, 1], lengths[:, 2], source, report.lines(), priority
    ), report


def _row(record: Record, form: Format) -> Row:
    """The numbers of one row. Raises `_Dropped` with the reason for impossible values."""
    if record is None:
        raise _Dropped(UNPARSABLE)
    if form.status and record.get(form.status) not in SUCCESS:
        raise _Dropped(FAILED)
    try:
        arrival = form.seconds(record.get(form.arrival)) if form.arrival else 0.0
        prompt = _length(record.get(form.prompt))
        output = _length(record.get(form.output))
        limit = record.get(form.max_tokens) if form.max_tokens else None
        max_tokens = 0 if limit is None else _length(limit)
        urgency = record.get(form.priority) if form.priority else None
        priority = 0 if urgency is None else _priority(urgency)
    except (ValueError, OverflowError) as error:
        raise _Dropped(UNPARSABLE) from error
    if not math.isfinite(arrival):
        raise _Dropped(UNPARSABLE)
    if not -LATEST_S <= arrival <= LATEST_S:
        raise _Dropped(NEGATIVE if arrival < 0 else TOO_LATE)
    if form.zero_output_failed and output == 0:
        raise _Dropped(FAILED)
    if prompt <= 0 or output <= 0 or max_tokens < 0:
        raise _Dropped(NO_TOKENS)
    if arrival < 0 and not form.absolute_time:
        raise _Dropped(NEGATIVE)
    if 0 < max_tokens < output:
        raise _Dropped(BEYOND)
    return arrival, prompt, output, max_tokens, priority


def _detail(record: Record, form: Format, reason: str) -> str:
    """The value for which a row was dropped, and the values that are allowed there."""
    if record is None:
        return "not a JSON object"
    if reason == TOO_LATE:
        latest = f"{LATEST_S / form.unit_s:.4g} {form.unit}"
        return f"{_shown(record, form.arrival)}, must be at most {latest}"
    if reason == NEGATIVE:
        return f"{_shown(record, form.arrival)}, must be at least 0 {form.unit}"
    if reason == BEYOND:
        return f"{_shown(record, form.output)}, {_shown(record, form.max_tokens)}"
    if reason == FAILED:
        return _shown(record, form.output if record.get(form.status) in SUCCESS else form.status)
    checks: list[tuple[str, Callable[[object], float], float, str]] = [
        (form.prompt, _length, 1, f"a whole number from 1 to {MAX_LENGTH:,}"),
        (form.output, _length, 1, f"a whole number from 1 to {MAX_LENGTH:,}"),
        (form.max_tokens, _length, 0, f"a whole number from 0 to {MAX_LENGTH:,}"),
        (form.priority, _priority, -MAX_LENGTH, "a whole number of 32 bits"),
    ]
    for column, parse, least, allowed in checks:
        if column in form.required or record.get(column) is not None:
            try:
                wrong = parse(record.get(column)) < least
            except (ValueError, OverflowError):
                wrong = True
            if wrong:
                return f"{_shown(record, column)}, must be {allowed}"
    return f"{_shown(record, form.arrival)}, must be {form.time}"


def _shown(record: Mapping[str, object], column: str) -> str:
    """The value of a column in a row, shortened for a message."""
    value = record.get(column)
    if value is None:
        return f"no {column}"
    text = repr(value) if isinstance(value, str) else str(value)
    return f"{column} is {text if len(text) <= SHOWN else text[:SHOWN] + '...'}"


def _length(value: object) -> int:
    """A length in tokens: a whole number (`374` or `374.0`). ValueError otherwise."""
    if type(value) is str and value.isdecimal():
        value = int(value)
    elif type(value) is not int:
        exact = number(value)
        value = int(exact)
        if value != exact:
            raise ValueError(f"not a whole number: {exact}")
    if value > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH} tokens: {value}")
    return value


def _priority(value: object) -> int:
    """A priority: a whole number of 32 bits, as in requests. ValueError otherwise."""
    exact = number(value)
    if exact != int(exact) or abs(exact) > MAX_LENGTH:
        raise ValueError(f"not a priority: {exact}")
    return int(exact)
