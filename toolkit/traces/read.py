"""Reading traces and logs, with a report of the rows that were kept and dropped.

CSV, JSON lines and JSON arrays are read, whatever the file is called, and whether or not it is
packed with gzip. The names of the columns say what is what (toolkit/traces/columns.py); the tokens
of conversations are counted (toolkit/traces/chats.py). What prompts share is checked in
toolkit/traces/sharing.py.

A row with impossible values (no tokens, a negative time, a failed response, something that is not a
number) is counted and left out, never repaired. The report shows the first of each kind with its
value and the limit. The canonical format is Mooncake's JSONL; the server's own log and `llmctl
bench --save-requests` write it with more keys. A trace holds no text: lengths and times only.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import chain, islice, repeat, zip_longest
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from toolkit.errors import InputError
from toolkit.traces import chats, columns
from toolkit.traces.chats import TokenCounter
from toolkit.traces.columns import (
    BLOCK_TOKENS,
    BLOCKS,
    DATES,
    MOONCAKE,
    PER_SECOND,
    THINK,
    Column,
    Record,
    Unusable,
    Value,
)
from toolkit.traces.sharing import Problems, blocks_of, sessions_of
from toolkit.traces.types import MAX_LENGTH, Trace

SAMPLE = 1000  # rows from which columns and units are found
SHOWN = 40  # characters of a value in a message
MAX_LINE = 64 << 20  # characters of a line; a row with the blocks of its prompt has some thousand
MAX_WHOLE = 1 << 30  # characters of a file that is one value of JSON
MAX_UNPACKED = 1 << 28  # bytes of a gzip file, and beyond: so many times its size on disk
MAX_RATIO = 100
# The year 10000 in seconds since 1970. A later time is in another unit, or a mistake.
LATEST_S = 253_402_300_800.0
GZIP = b"\x1f\x8b"  # the first bytes of a file that is packed with gzip
SEPARATORS = ",;\t"  # of CSV: the first of the most frequent ones in the header

UNPARSABLE = "unparsable"
TOO_LATE = "with a time beyond the year 9999"
NO_TOKENS = "with a non-positive length"
NEGATIVE = "with a negative time"
FAILED = "failed responses"
BEYOND = "longer than their max_tokens"
UNCOUNTED = "without token counts"
UNTIMED = "without how long they took"

TOKENS = f"must be a whole number from 1 to {MAX_LENGTH:,}"
LIMIT = f"must be a whole number from 0 to {MAX_LENGTH:,}"
PRIORITY = "must be a whole number of 32 bits"
KNOWN = "a trace is CSV with a header, or JSON objects, with the lengths of prompts and outputs"


@dataclass(slots=True, frozen=True)
class ReadReport:
    """How many rows of a file were kept, and how many were dropped, by reason."""

    source: str
    rows: int = 0
    kept: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason to count
    # reason to the first row that was dropped for it, with its value and the limit
    examples: Mapping[str, str] = field(default_factory=dict)
    understood: str = ""  # which column was taken as what, and the unit of the times
    # what a user must know about the reading, such as columns that were not used
    remarks: tuple[str, ...] = ()
    canonical: bool = False  # Mooncake's columns, which need no explanation
    text: bool = False  # the file has conversations, of which the tokens were counted
    reordered: bool = False  # rows were not in order of arrival and were sorted
    timeless: bool = False  # the file has no times: all requests arrive at 0
    unshared: Problems = field(default_factory=Problems)  # rows that are read as sharing nothing
    unlinked: Problems = field(default_factory=Problems)  # turns that are read as first turns
    # when the first request arrives, in seconds since 1970 by the clock of the dates' own zone;
    # None: the times are not dates
    clock_s: float | None = None

    @property
    def says_think(self) -> bool:
        """Whether the file says times to think, or is known to have none."""
        return self.canonical or self.text

    def lines(self) -> tuple[str, ...]:
        """Return the report in words, one line each."""
        lines = [f"read {self.kept:,} of {self.rows:,} rows"]
        if not self.canonical:
            lines.append(self.understood)
        if self.dropped:
            reasons = sorted(self.dropped.items())
            listed = "; ".join(
                f"{count:,} {reason} ({self.examples[reason]})" for reason, count in reasons
            )
            count = self.rows - self.kept
            lines.append(f"dropped {count:,} {'row' if count == 1 else 'rows'}: {listed}")
        if self.reordered:
            lines.append("rows were not in order of arrival: sorted")
        if self.timeless:
            remedy = "draw some: llmctl trace convert FILE OUT --draw-rate RATE"
            lines.append(f"there are no arrival times: all requests arrive at 0 s; {remedy}")
        lines += self.remarks
        if self.unshared.counts:
            lines.append(self.unshared.line("as sharing nothing"))
        if self.unlinked.counts:
            lines.append(self.unlinked.line("as first turns"))
        return tuple(lines)


def read_trace(
    path: Path,
    chosen: Mapping[str, Column] | None = None,
    counter: TokenCounter | None = None,
) -> tuple[Trace, ReadReport]:
    """Read the trace in `path`, sorted by arrival with the first at 0 s. Its notes have the report,
    too.

    `chosen` names columns by their roles (`columns.parse_columns`); the others are found by their
    names. `counter` counts the tokens of conversations, which have text and no lengths.

    Raises `InputError` if the file cannot be read, lacks a column, or has no usable row, or if it
    has conversations and there is no counter.
    """
    source = path.name
    try:
        with _open(path) as file:
            header, records = _open_records(file, source)
            sample = list(islice(records, SAMPLE))
            names = header or columns.names_of(sample, source)
            taken = columns.find_columns(sample, names, chosen or {}, source)
            records = chain(sample, records)
            if {"prompt", "output"} <= taken.keys():
                canonical = taken["prompt"].name == MOONCAKE
                report = ReadReport(
                    source,
                    understood=columns.describe_columns(taken),
                    remarks=columns.column_remarks(taken, names, sample),
                    canonical=canonical,
                )
                shares = canonical or BLOCKS in names or "session" in taken
                return _collect(records, taken, report, shares=shares)
            if not chats.has_messages(sample):
                raise columns.no_lengths_error(taken, names, source)
            if counter is None:
                raise chats.no_counter_error(source)
            report = ReadReport(
                source,
                understood=chats.DESCRIBED,
                remarks=(counter.remark,),
                text=True,
            )
            answers = chats.requests_of(records, counter.count)
            return _collect(answers, chats.COLUMNS, report, shares=True)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: the gzip file is damaged: {error}", "copy it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot read the trace: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a trace: it is not UTF-8 text", KNOWN) from error


def _open(path: Path) -> TextIO:
    """Open a file, unpacked if it is packed with gzip, whatever its name."""
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
    if packed:
        return io.TextIOWrapper(_BoundedGzip(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


class _BoundedGzip(gzip.GzipFile):
    """A gzip file. Raises `InputError` if it unpacks to far more than a trace, which packed has a
    third to a thirtieth of its size.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path = path
        self._most = max(MAX_UNPACKED, MAX_RATIO * path.stat().st_size)

    def read1(self, size: int = -1) -> bytes:
        if self.tell() > self._most:
            raise InputError(
                f"{self._path}: unpacks to more than {self._most:,} bytes, {MAX_RATIO} times its "
                "size",
                "unpack it first, and look at it",
            )
        return super().read1(size)


def _lines(file: TextIO, source: str) -> Iterator[str]:
    """Yield the lines of a file. Raises `InputError` if one is longer than any row."""
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            raise InputError(f"{source}: a line of {MAX_LINE:,} characters or more", KNOWN)
        yield line


def _open_records(file: TextIO, source: str) -> tuple[list[str], Iterator[Record]]:
    """Return the names of columns in CSV's header, and the rows of CSV or JSON. The file's first
    character decides which of them it is.
    """
    head = ""
    while not head and (line := file.readline(MAX_LINE)):
        head = line.strip()
    file.seek(0)
    if head == "":
        raise InputError(f"{source}: the trace is empty", KNOWN)
    if head[0] not in "[{":
        lines = _csv_lines(file, source, max(SEPARATORS, key=head.count))
        cells = next((line for line in lines if "".join(line).strip()), [])
        names = [name.strip() for name in cells]
        columns.refuse_many(len(names), source)
        # A short row has None for missing columns. Values beyond the columns of a row are ignored.
        return names, (dict(zip_longest(names, line[: len(names)])) for line in lines if line)
    values = _json_array(file, source) if head[0] == "[" else _json_lines(file, source)
    records = (value if isinstance(value, dict) else None for value in values)
    for skipped, record in enumerate(records):
        if record is not None:
            return [], chain(repeat(None, skipped), [record], records)
    raise InputError(f"{source}: not a trace: no JSON object in a line or a list", KNOWN)


def _csv_lines(file: TextIO, source: str, separator: str) -> Iterator[list[str]]:
    """Yield the cells of each line. Raises `InputError` if a line is no CSV."""
    reader = csv.reader(_lines(file, source), delimiter=separator)
    try:
        yield from reader
    except csv.Error as error:
        raise InputError(f"{source}: line {reader.line_num}: {error}") from error


def _json_lines(file: TextIO, source: str) -> Iterator[object]:
    """Yield the value of each line; None if a line is no JSON."""
    for line in _lines(file, source):
        if line.strip():
            try:
                yield msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError):
                yield _lenient(line)


def _lenient(text: str) -> object:
    """Parse JSON with NaN and Infinity, which some writers make, so that a message can name the
    value. Return None if it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_array(file: TextIO, source: str) -> Iterator[object]:
    """Yield the values of an array. Raises `InputError` if the file is too long, or is none."""
    text = file.read(MAX_WHOLE + 1)
    if len(text) > MAX_WHOLE:
        problem = f"{source}: one value of JSON with more than {MAX_WHOLE:,} characters"
        raise InputError(problem, "write a row per line: jq -c .[] FILE")
    try:
        values: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        values = _lenient(text)
        if not isinstance(values, list):
            raise InputError(f"{source}: not a JSON array: {error}", KNOWN) from error
    assert isinstance(values, list), "the text begins with a bracket"
    yield from values


def _collect(
    records: Iterable[Record | Unusable],
    taken: Mapping[str, Column],
    report: ReadReport,
    *,
    shares: bool,
) -> tuple[Trace, ReadReport]:
    """Return the usable rows as a trace, sorted by arrival, and the whole report.

    `shares`: whether rows may say what prompts share, or of which session they are.
    """
    parser = _RowParser(taken)
    session = taken.get("session")
    # Of the kept rows, in the file's order; arrays, since a log may have millions.
    arrivals_s = array("d")
    took_s = array("d")
    numbers = array("q")  # the place in the file, prompt, output, limit and priority of each row
    more: list[tuple[object, ...]] = []  # session, time to think, blocks, and their size
    nothing = (None, None, None, None)  # one for all rows, which saves memory
    dropped = Problems()
    for number, record in enumerate(records, start=1):
        try:
            arrival_s, seconds, lengths = parser.row(record)
        except Unusable as error:
            dropped.add(error.reason, f"row {number:,}: {error.shown}")
            continue
        arrivals_s.append(arrival_s)
        took_s.append(seconds)
        numbers.extend((number, *lengths))
        if shares and isinstance(record, Mapping):
            label = session.of(record) if session else None
            said = (label, record.get(THINK), record.get(BLOCKS), record.get(BLOCK_TOKENS))
            more.append(nothing if said == nothing else said)
    report = replace(
        report,
        rows=len(arrivals_s) + dropped.counts.total(),
        kept=len(arrivals_s),
        dropped=dict(dropped.counts),
        examples=dropped.examples,
        timeless=parser.arrival is None,
    )
    if not arrivals_s:
        problem = f"{report.source}: no usable row: {'; '.join(report.lines())}"
        raise InputError(problem, "correct these rows; docs/reference/traces.md has the limits")
    times_s = np.frombuffer(arrivals_s)
    places, prompts, outputs, limits, priorities = (
        np.frombuffer(numbers, dtype=np.int64).reshape(-1, 5).T
    )
    by_arrival = np.argsort(times_s, kind="stable")
    trace = Trace(
        times_s - times_s.min(),
        prompts,
        outputs,
        limits,
        report.source,
        priority=priorities if priorities.any() else None,
    ).take(by_arrival)
    report = replace(
        report,
        reordered=bool((np.diff(by_arrival) < 0).any()),
        clock_s=parser.clock_s(float(times_s.min())),
    )
    if any(said is not nothing for said in more):
        order = by_arrival.tolist()
        labels, thinks, blocks, sizes = zip(*(more[place] for place in order), strict=True)
        rows = places[by_arrival].tolist()
        shared = blocks_of(trace, blocks, sizes, rows, report.unshared)
        trace = replace(trace, shared=shared)
        sessions = sessions_of(
            trace,
            labels,
            thinks if report.says_think else None,
            [took_s[place] for place in order],
            rows,
            report.unlinked,
        )
        trace = replace(trace, sessions=sessions)
        report = replace(report, remarks=(*report.remarks, *_shared_in_words(trace, report, taken)))
    return replace(trace, notes=report.lines()), report


def _shared_in_words(
    trace: Trace, report: ReadReport, taken: Mapping[str, Column]
) -> Iterator[str]:
    """Say what is known of what prompts share, and of sessions."""
    if trace.shared is not None:
        yield f"what prompts share is known in blocks of {trace.shared.block_tokens} tokens"
    if trace.sessions is not None:
        previous = trace.sessions.previous
        later = np.flatnonzero(previous >= 0)
        several = len(np.setdiff1d(previous[later], later))  # first turns that another follows
        yield f"{several:,} sessions have {len(later) + several:,} turns"
        if report.text:
            yield "no time to think is known: a later turn follows the turn before at once"
        elif not (report.says_think or {"end", "duration"} & taken.keys()):
            yield "times to think include the answers: no column says how long they took"


class _RowParser:
    """Reads the numbers of rows by the columns of their file."""

    def __init__(self, taken: Mapping[str, Column]) -> None:
        self._taken = taken
        self._prompt = taken["prompt"]
        self._output = taken["output"]
        self._limit = taken.get("max_tokens")
        self._priority = taken.get("priority")
        self._status = taken.get("status")
        self._end = taken.get("end")
        self._duration = taken.get("duration")
        self.arrival = taken.get("time") or self._end
        # The time is that of the end: the duration is subtracted.
        self._ends = "time" not in taken and self._end is not None and self._duration is not None
        self._zone: timedelta | None = None  # of the first date, ahead of UTC

    def row(self, record: Record | Unusable) -> tuple[float, float, tuple[int, int, int, int]]:
        """Return when a row's request came and how long it took, in seconds (0: not known), and its
        prompt, output, limit and priority. Raises `Unusable` if a value is impossible.
        """
        if isinstance(record, Unusable):
            raise record
        if record is None:
            raise Unusable(UNPARSABLE, "not a JSON object")
        if self._status and not columns.was_served(self._status.of(record)):
            raise Unusable(FAILED, _shown(record, self._status))
        if self._prompt.of(record) is None and self._output.of(record) is None:
            raise Unusable(UNCOUNTED, _shown(record, self._prompt))
        prompt = _value(record, self._prompt, columns.length, TOKENS)
        output = _value(record, self._output, columns.length, TOKENS)
        max_tokens = priority = 0
        if self._limit and self._limit.of(record) is not None:
            max_tokens = _value(record, self._limit, columns.length, LIMIT)
        if self._priority and self._priority.of(record) is not None:
            priority = _value(record, self._priority, columns.priority_of, PRIORITY)
        arrival_s = self._arrival_s(record)
        took_s = self._took_s(record, arrival_s) if self._end or self._duration else None
        if self._ends and self._duration:
            if took_s is None:
                raise Unusable(UNTIMED, _shown(record, self._duration))
            arrival_s -= took_s
        if prompt <= 0:
            raise Unusable(NO_TOKENS, f"{_shown(record, self._prompt)}, {TOKENS}")
        if output <= 0:
            raise Unusable(NO_TOKENS, f"{_shown(record, self._output)}, {TOKENS}")
        if self._limit and max_tokens < 0:
            raise Unusable(NO_TOKENS, f"{_shown(record, self._limit)}, {LIMIT}")
        if self._limit and 0 < max_tokens < output:
            shown = f"{_shown(record, self._output)}, {_shown(record, self._limit)}"
            raise Unusable(BEYOND, shown)
        return arrival_s, took_s or 0.0, (prompt, output, max_tokens, priority)

    def _arrival_s(self, record: Mapping[str, object]) -> float:
        """Return the arrival of a row, or its end. Raises `Unusable` if the time is impossible."""
        if self.arrival is None:
            return 0.0
        unit = self.arrival.unit
        allowed = f"must be a finite number of {unit}"
        if unit == DATES:
            date = _value(record, self.arrival, columns.date_of, "must be an ISO 8601 time")
            if self._zone is None:
                self._zone = date.utcoffset()
            return date.timestamp()
        time_s = _value(record, self.arrival, columns.number, allowed) / PER_SECOND[unit]
        if not math.isfinite(time_s):
            raise Unusable(UNPARSABLE, f"{_shown(record, self.arrival)}, {allowed}")
        if time_s > LATEST_S:
            limit = f"must be at most {LATEST_S * PER_SECOND[unit]:.4g} {unit}"
            raise Unusable(TOO_LATE, f"{_shown(record, self.arrival)}, {limit}")
        if time_s < 0.0:
            raise Unusable(NEGATIVE, f"{_shown(record, self.arrival)}, must be at least 0 {unit}")
        return time_s

    def _took_s(self, record: Mapping[str, object], arrival_s: float) -> float | None:
        """Return how long the request took; None if that is not known, or impossible."""
        try:
            if self._end and self._end is not self.arrival:
                took_s = self._end.seconds(record) - arrival_s
            elif self._duration:
                took_s = self._duration.seconds(record)
            else:
                return None
        except (ValueError, OverflowError):
            return None
        return took_s if 0.0 <= took_s < LATEST_S else None

    def clock_s(self, first_s: float) -> float | None:
        """Return the first arrival by the clock of the dates' zone; UTC for seconds since 1970."""
        if self._zone is not None:
            return first_s + self._zone.total_seconds()
        return first_s if columns.EPOCH_S[0] <= first_s <= columns.EPOCH_S[1] else None


def _value(
    record: Mapping[str, object], column: Column, parse: Callable[[object], Value], allowed: str
) -> Value:
    """Return the value of a column in a row. Raises `Unusable` if it is not what is `allowed`."""
    try:
        return parse(column.of(record))
    except (ValueError, OverflowError) as error:
        raise Unusable(UNPARSABLE, f"{_shown(record, column)}, {allowed}") from error


def _shown(record: Mapping[str, object], column: Column) -> str:
    """Return the value of a column in a row, shortened for a message."""
    value = column.of(record)
    if value is None:
        return f"no {column.name}"
    text = repr(value) if isinstance(value, str) else str(value)
    return f"{column.name} is {text if len(text) <= SHOWN else text[:SHOWN] + '...'}"
