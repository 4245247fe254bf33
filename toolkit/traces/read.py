"""Reading traces of every known format, with a report of the rows that were kept and dropped.

The module opens a file, finds its format (toolkit/traces/formats.py) and checks its rows. What
prompts share is checked in toolkit/traces/sharing.py.

The column names decide the format, whatever the file is called, and whether or not it is packed
with gzip. A log in none of the known formats is read by the names of its columns
(toolkit/traces/columns.py), conversations by counting their tokens (toolkit/traces/chats.py).

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise, repeat, zip_longest
from pathlib import Path
from typing import TextIO

import msgspec
import numpy as np

from toolkit.errors import InputError
from toolkit.traces import chats, columns, formats
from toolkit.traces.chats import TokenCounter
from toolkit.traces.columns import NamedColumn
from toolkit.traces.formats import Format, Record
from toolkit.traces.sharing import Problems, Sharing
from toolkit.traces.types import Trace

SHOWN = 40  # characters of a value in a message
MAX_LINE = 64 << 20  # characters of a line; a row with the blocks of its prompt has some thousand
MAX_WHOLE = 1 << 30  # characters of a file that is one value of JSON
MAX_UNPACKED = 1 << 28  # bytes of a gzip file, and beyond: so many times its size on disk
MAX_RATIO = 100
GZIP = b"\x1f\x8b"  # the first bytes of a file that is packed with gzip
SEPARATORS = ",;\t"  # of CSV: the first of the most frequent ones in the header

UNPARSABLE = "unparsable"
TOO_LATE = "with a time beyond the year 9999"
NO_TOKENS = "with a non-positive length"
NEGATIVE = "with a negative time"
FAILED = "failed responses"
BEYOND = "longer than their max_tokens"

Row = tuple[float, int, int, int, int]  # arrival in seconds, prompt, output, max_tokens, priority


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
    unshared: Problems = field(default_factory=Problems)  # rows that are read as sharing nothing
    unlinked: Problems = field(default_factory=Problems)  # turns that are read as first turns
    block_tokens: int = 0  # of the blocks of prompts; 0: the file does not say what they share
    sessions: int = 0  # of two turns or more
    turns: int = 0  # in these
    understood: str = ""  # which column was taken as what, and the unit of the times
    # what a user must know about the reading, such as columns that were not used
    remarks: tuple[str, ...] = ()
    think_remark: str = ""  # the same about the times to think of sessions
    # when the first request arrives, in seconds since 1970 by the clock of the dates' own zone;
    # None: the times are not dates
    clock_s: float | None = None

    def lines(self) -> tuple[str, ...]:
        """The report in words, one line each."""
        lines = [f"read {self.kept:,} of {self.rows:,} rows ({self.format} format)"]
        if self.format == columns.LOG:
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
        if self.block_tokens:
            lines.append(f"what prompts share is known in blocks of {self.block_tokens} tokens")
        if self.unshared.counts:
            lines.append(self.unshared.line("as sharing nothing"))
        if self.sessions:
            lines.append(f"{self.sessions:,} sessions have {self.turns:,} turns")
            if self.think_remark:
                lines.append(self.think_remark)
        if self.unlinked.counts:
            lines.append(self.unlinked.line("as first turns"))
        return tuple(lines)


class _Dropped(Exception):  # noqa: N818  (a verdict on a row, caught in this module)
    """A row with impossible values: the reason that is counted, and the value for which it was
    dropped, with the values that are allowed there.
    """

    def __init__(self, reason: str, shown: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.shown = shown


def read_trace(
    path: Path,
    chosen: Mapping[str, NamedColumn] | None = None,
    counter: TokenCounter | None = None,
) -> tuple[Trace, ReadReport]:
    """Read the trace in `path`, sorted by arrival with the first at 0 s. Its notes have the report,
    too. A folder is read as the sessions in its *.json files.

    `chosen` names columns by their roles (`columns.parse_columns`); the others are found by their
    names. `counter` counts the tokens of conversations, which have text and no lengths.

    Raises `InputError` where the file cannot be read, has no known format, lacks a column, or has
    no usable row, and for conversations without a counter.
    """
    try:
        if path.is_dir():
            return _read_folder(path)
        with _open(path) as file:
            names, records = _open_records(file, path.name)
            sample = list(islice(records, columns.SAMPLE))
            keys = {key for record in sample for key in record or ()}
            columns.refuse_many(len(keys), path.name)
            form = _format_of(names, sample, path.name, chosen or {}, counter)
            records = chain(sample, records)
            whole = form.whole(records, path.name) if form.whole else records
            return _collect(whole, form, path.name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: the gzip file is damaged: {error}", "copy it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot read the trace: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a trace: it is not UTF-8 text", formats.KNOWN) from error


def _open(path: Path) -> TextIO:
    """The text of a file, unpacked if it is packed with gzip, whatever its name."""
    with path.open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
    if packed:
        return io.TextIOWrapper(_BoundedGzip(path), encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


class _BoundedGzip(gzip.GzipFile):
    """A gzip file. Raises `InputError` where it unpacks to far more than traces do, which packed
    have a third to a thirtieth of their size.
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
    """The lines of a file. Raises `InputError` for one that is longer than any row."""
    while line := file.readline(MAX_LINE):
        if len(line) == MAX_LINE:
            problem = f"{source}: a line of {MAX_LINE:,} characters or more"
            raise InputError(problem, formats.KNOWN)
        yield line


def _whole(file: TextIO, source: str) -> str:
    """All of a file. Raises `InputError` for one that is too long to be one value of JSON."""
    text = file.read(MAX_WHOLE + 1)
    if len(text) > MAX_WHOLE:
        problem = f"{source}: one value of JSON with more than {MAX_WHOLE:,} characters"
        raise InputError(problem, "write a row per line: jq -c .[] FILE")
    return text


def _format_of(
    names: list[str],
    sample: list[Record],
    source: str,
    chosen: Mapping[str, NamedColumn],
    counter: TokenCounter | None,
) -> Format:
    """The format of a file, from its columns and its first rows.

    A known format is taken if its times can be read; one without times, only if no column has times
    under another name.
    """
    known = None if chosen else formats.detect(names)
    if known and (known.whole or _has_times(sample, known)):
        return _of_file(known, sample)
    log, lacking = columns.find(list(columns.plain_records(iter(sample))), chosen, source)
    if known and not (log and log.arrival):
        return _of_file(known, sample)
    if known and log and log.arrival == known.arrival:  # its times are in another unit
        form = _of_file(known, sample)
        remarks = (log.described, *form.remarks)
        return replace(form, unit=log.unit, described=log.described, remarks=remarks)
    if log:
        return log
    if chats.has_messages(sample):
        return chats.conversations(counter, source)
    raise formats.unknown(names, lacking, source)


def _has_times(sample: list[Record], form: Format) -> bool:
    """Whether the format has times, and those of these rows fit it: dates, or numbers that are not
    the seconds since 1970 in a format of milliseconds.
    """
    if not form.arrival:
        return False
    values = [(record or {}).get(form.arrival) for record in sample]
    times = columns.parsed(partial(formats.seconds_of, unit=form.unit), values)
    if form.unit != "ms":
        return bool(times)
    low, high = (end / formats.PER_SECOND["ms"] for end in columns.EPOCH_S)
    return any(not low <= time <= high for time in times)


def _of_file(form: Format, sample: list[Record]) -> Format:
    """The known format, with what is used of the file's columns, and with a remark that names those
    which look useful and are not used.
    """
    names = list(dict.fromkeys(chain.from_iterable(record or () for record in sample)))
    unused = columns.not_used(columns.unused_columns(names, form))
    described = form.described or form.describe(names)
    return replace(form, described=described, remarks=(unused,) if unused else ())


def _read_folder(folder: Path) -> tuple[Trace, ReadReport]:
    """The sessions in a folder, one per file; rows are counted over the files by their names."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError(
            f"{folder}: no *.json file in it", "name a trace, or a folder of agents' sessions"
        )

    def records() -> Iterator[Record]:
        for path in files:
            with _open(path) as file:
                names, rows = _open_records(file, path.name)
                if formats.detect(names) is not formats.AGENTS:
                    raise InputError(
                        f"{path}: not an agent's session", "a folder may hold nothing else"
                    )
                yield from rows

    return _collect(formats.agent_requests(records(), folder.name), formats.AGENTS, folder.name)


def _open_records(file: TextIO, source: str) -> tuple[list[str], Iterator[Record]]:
    """The column names and the rows of CSV or JSON: the file's first character decides."""
    head = ""
    while not head and (line := file.readline(MAX_LINE)):
        head = line.strip()
    file.seek(0)
    if head == "":
        raise InputError(f"{source}: the trace is empty", formats.KNOWN)
    if head[0] not in "[{":
        lines = _csv_lines(file, source, max(SEPARATORS, key=head.count))
        cells = next((line for line in lines if "".join(line).strip()), [])
        names = [name.strip() for name in cells]
        columns.refuse_many(len(names), source)
        # A short row has None for missing columns. Values beyond the columns of a row are ignored.
        return names, (dict(zip_longest(names, line[: len(names)])) for line in lines if line)
    values: Iterable[object]
    if head[0] == "[":
        values = _json_array(file, source)
    elif _lenient(head) is None and (whole := _lenient(_whole(file, source))):
        values = [whole]  # an object over several lines
    else:
        file.seek(0)
        values = _json_lines(file, source)
    records = (value if isinstance(value, dict) else None for value in values)
    for skipped, record in enumerate(records):
        if record is not None:
            return list(record), chain(repeat(None, skipped), [record], records)
    raise InputError(f"{source}: not a trace: no JSON object in a line or a list", formats.KNOWN)


def _csv_lines(file: TextIO, source: str, separator: str) -> Iterator[list[str]]:
    reader = csv.reader(_lines(file, source), delimiter=separator)
    try:
        yield from reader
    except csv.Error as error:
        raise InputError(f"{source}: line {reader.line_num}: {error}") from error


def _json_lines(file: TextIO, source: str) -> Iterator[object]:
    for line in _lines(file, source):
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


def _json_array(file: TextIO, source: str) -> list[object]:
    text = _whole(file, source)
    try:
        values: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        values = _lenient(text)
        if not isinstance(values, list):
            raise InputError(f"{source}: not a JSON array: {error}", formats.KNOWN) from error
    assert isinstance(values, list), "the text begins with a bracket"
    return values


def _collect(records: Iterator[Record], form: Format, source: str) -> tuple[Trace, ReadReport]:
    kept: list[Row] = []
    linked: list[tuple[int, Record]] = []  # of the kept rows: number in the file, and record
    sharing = Sharing(form, source) if form.blocks or form.session else None
    dropped = Problems()
    ahead_s = None  # the zone of the first date
    for row, record in enumerate(records, start=1):
        try:
            numbers = _row(record, form)
        except _Dropped as error:
            dropped.add(error.reason, f"row {row:,}: {error.shown}")
            if sharing and not form.any_order:
                sharing.lost(record)
        else:
            kept.append(numbers)
            if form.dates and ahead_s is None and record:
                ahead_s = formats.zone_s(record.get(form.arrival))
            if sharing and form.any_order:
                linked.append((row, record))
            elif sharing and record:
                sharing.add(record, row, numbers[1])
    report = ReadReport(
        source,
        form.name,
        len(kept) + dropped.counts.total(),
        len(kept),
        dict(dropped.counts),
        dropped.examples,
        timeless=not form.arrival,
        understood=form.described,
        remarks=form.remarks,
        think_remark=form.think_remark,
    )
    if not kept:
        problem = f"{source}: no usable row: {'; '.join(report.lines())}"
        raise InputError(
            problem,
            "correct these rows; llmctl docs reference/traces, 'Invalid rows', has the limits",
        )
    report = replace(report, clock_s=_clock_s(min(row[0] for row in kept), ahead_s))
    reordered = any(later[0] < row[0] for row, later in pairwise(kept))
    if form.any_order:
        order = sorted(range(len(kept)), key=lambda place: kept[place][0])
        kept = [kept[place] for place in order]
        if sharing:
            _link(sharing, form, kept, [linked[place] for place in order])
    return _ordered(kept, sharing, replace(report, reordered=reordered))


def _clock_s(first_s: float, ahead_s: float | None) -> float | None:
    """`ReadReport.clock_s` of a first arrival, and of the dates' zone; None: they are numbers, of
    which seconds since 1970 are dates in UTC.
    """
    if ahead_s is not None:
        return first_s + ahead_s
    return first_s if columns.EPOCH_S[0] <= first_s <= columns.EPOCH_S[1] else None


def _link(
    sharing: Sharing, form: Format, kept: list[Row], linked: list[tuple[int, Record]]
) -> None:
    """Add the rows of a log, which are in order of arrival, with their times to think: from the end
    of the turn before; from its arrival where its end is not known.
    """
    ends_s: dict[object, float] = {}
    for (arrival_s, prompt, *_), (row, record) in zip(kept, linked, strict=True):
        assert record is not None, "a kept row has a record"
        label = record.get(form.session)
        think_s = max(arrival_s - ends_s.get(label, arrival_s), 0.0)
        took_s = record.get(formats.TOOK)
        ends_s[label] = arrival_s + (took_s if isinstance(took_s, float) else 0.0)
        sharing.add({**record, form.think: 1000.0 * think_s}, row, prompt)


def _ordered(
    kept: list[Row], sharing: Sharing | None, report: ReadReport
) -> tuple[Trace, ReadReport]:
    """The kept rows as a trace, sorted by arrival, and the whole report."""
    arrivals = np.array([row[0] for row in kept], dtype=np.float64)
    prompts, outputs, limits, priorities = np.array([row[1:] for row in kept], dtype=np.int64).T
    trace = Trace(
        arrivals - arrivals.min(),
        prompts,
        outputs,
        limits,
        report.source,
        priority=priorities if priorities.any() else None,
    )
    if sharing:
        trace = sharing.attach(trace)
        previous = trace.sessions.previous if trace.sessions else np.empty(0, dtype=np.int64)
        later = np.flatnonzero(previous >= 0)  # turns after the first
        sessions = len(np.setdiff1d(previous[later], later))  # first turns that another follows
        report = replace(
            report,
            unshared=sharing.unshared,
            unlinked=sharing.unlinked,
            block_tokens=trace.shared.block_tokens if trace.shared else 0,
            sessions=sessions,
            turns=len(later) + sessions,
        )
    if report.reordered:
        trace = trace.take(np.argsort(trace.arrival_s, kind="stable"))
    return replace(trace, notes=report.lines()), report


def _row(record: Record, form: Format) -> Row:
    """The numbers of one row. Raises `_Dropped` for impossible values."""
    if record is None:
        raise _Dropped(UNPARSABLE, "not a JSON object")
    if form.status and not form.served(record.get(form.status)):
        raise _Dropped(FAILED, _shown(record, form.status))
    if form.whole and formats.REASON in record:
        blamed = str(record.get(formats.BLAMED, form.session))
        raise _Dropped(str(record[formats.REASON]), _shown(record, blamed))
    try:
        arrival = 0.0
        if form.arrival:
            arrival = formats.seconds_of(record.get(form.arrival), form.unit)
        if form.ends:
            arrival -= formats.number(record.get(formats.TOOK))
        prompt = formats.length(record.get(form.prompt))
        output = formats.length(record.get(form.output))
        limit = record.get(form.max_tokens) if form.max_tokens else None
        max_tokens = 0 if limit is None else formats.length(limit)
        urgency = record.get(form.priority) if form.priority else None
        priority = 0 if urgency is None else formats.priority_of(urgency)
    except (ValueError, OverflowError) as error:
        raise _Dropped(UNPARSABLE, _impossible(record, form)) from error
    if not math.isfinite(arrival):
        raise _Dropped(UNPARSABLE, _impossible(record, form))
    unit = "s" if form.dates else form.unit
    if arrival > formats.LATEST_S:
        latest = formats.LATEST_S * formats.PER_SECOND[unit]
        allowed = f"must be at most {latest:.4g} {unit}"
        raise _Dropped(TOO_LATE, f"{_shown(record, form.arrival)}, {allowed}")
    if form.zero_output_failed and output == 0:
        raise _Dropped(FAILED, _shown(record, form.output))
    if prompt <= 0 or output <= 0 or max_tokens < 0:
        raise _Dropped(NO_TOKENS, _impossible(record, form))
    if arrival < (-formats.LATEST_S if form.dates else 0.0):
        raise _Dropped(NEGATIVE, f"{_shown(record, form.arrival)}, must be at least 0 {unit}")
    if 0 < max_tokens < output:
        raise _Dropped(BEYOND, f"{_shown(record, form.output)}, {_shown(record, form.max_tokens)}")
    return arrival, prompt, output, max_tokens, priority


def _impossible(record: Mapping[str, object], form: Format) -> str:
    """The first impossible value of a row, and the values that are allowed there."""
    tokens = f"a whole number from 1 to {formats.MAX_LENGTH:,}"
    checks: list[tuple[str, Callable[[object], float], float, str]] = [
        (form.prompt, formats.length, 1, tokens),
        (form.output, formats.length, 1, tokens),
        (form.max_tokens, formats.length, 0, f"a whole number from 0 to {formats.MAX_LENGTH:,}"),
        (form.priority, formats.priority_of, -formats.MAX_LENGTH, "a whole number of 32 bits"),
    ]
    for column, parse, least, allowed in checks:
        if column in form.required or record.get(column) is not None:
            try:
                wrong = parse(record.get(column)) < least
            except (ValueError, OverflowError):
                wrong = True
            if wrong:
                return f"{_shown(record, column)}, must be {allowed}"
    time = "an ISO 8601 time" if form.dates else f"a finite number of {form.unit}"
    return f"{_shown(record, form.arrival)}, must be {time}"


def _shown(record: Mapping[str, object], column: str) -> str:
    """The value of a column in a row, shortened for a message."""
    value = record.get(column)
    if value is None:
        return f"no {column}"
    text = repr(value) if isinstance(value, str) else str(value)
    return f"{column} is {text if len(text) <= SHOWN else text[:SHOWN] + '...'}"
