"""Reading logs by the names of their columns: which column is the time, a length, the session.

Gateways, clients and servers log requests under many names. A column is found by the usual ones,
whatever their case and spelling (`promptTokens`, `prompt_tokens`, `usage.prompt_tokens`), among the
keys of nested objects, too; or by `--columns time=ts,prompt=in`. A column is taken only if it holds
values that fit. What was taken as what is in the report, with the unit of the times and why.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from toolkit.errors import InputError, nearest
from toolkit.traces import formats
from toolkit.traces.formats import (
    BLAMED,
    DATES,
    PER_SECOND,
    REASON,
    TOOK,
    UNITS,
    Format,
    Record,
    seconds_of,
)

LOG = "log"  # the name of the format of all such files

SAMPLE = 1000  # rows from which columns and units are found
SHOWN = 12  # columns in a message
LONG_NAME = 60  # characters of a column's name in a message
MAX_COLUMNS = 4096  # names of columns, those of nested objects included
NAMED = 6  # columns in the note about what was not used
# A mean gap above this many seconds is taken as a sign of another unit.
SLOW_S = 10.0
# A request that takes longer, in the middle, is taken as a sign that the unit is ms.
LONG_S = 100.0
# From 2000 to 2100, in seconds since 1970.
EPOCH_S = (946_684_800.0, 4_102_444_800.0)

UNCOUNTED = "without token counts"
UNTIMED = "without how long they took"

Value = TypeVar("Value")
Path = tuple[str, ...]  # of keys, from the outermost object to the value

# The usual names by role, squeezed: lower case, letters and digits only. The first that a file has
# is taken. Sources: Azure, Mooncake, BurstGPT and Vidur (traces); OpenAI, Anthropic and Gemini
# (usage); LiteLLM, Langfuse, Helicone and OpenRouter (logs); OpenTelemetry's gen_ai attributes;
# vLLM's request metrics; nginx' variables.
NAMES: dict[str, tuple[str, ...]] = {
    "prompt": (
        "prompttokens", "inputtokens", "contexttokens", "requesttokens", "numprompttokens",
        "numinputtokens", "numprefilltokens", "inputlength", "inputlen", "promptlength",
        "promptlen", "prompttokencount", "inputtokencount", "tokensprompt", "tokensinput",
        "tokensin", "prompt", "input", "in",
    ),
    "output": (
        "completiontokens", "outputtokens", "generatedtokens", "generationtokens",
        "responsetokens", "numcompletiontokens", "numoutputtokens", "numgeneratedtokens",
        "numgenerationtokens", "numdecodetokens", "outputlength", "outputlen", "completionlength",
        "candidatestokencount", "completiontokencount", "outputtokencount", "tokenscompletion",
        "tokensoutput", "tokensout", "completion", "output", "out",
    ),
    "time": (
        "arrivaltime", "arrivaltimestamp", "arrivedat", "arrivals", "arrival", "requeststarttime",
        "requesttimestamp", "requestcreatedat", "requestedat", "starttime", "starttimestamp",
        "starttimeunixnano", "startedat", "timestamp", "timestampms", "createdat", "created",
        "submittedat", "receivedat", "datetime", "time", "timems", "times", "timesec", "date",
        "ts", "tsms", "epoch", "epochms", "t",
    ),
    "end": (
        "endtime", "endtimestamp", "endtimeunixnano", "endedat", "finishedat", "completedat",
        "responsecreatedat", "msec", "timeiso8601", "timelocal",
    ),
    "duration": (
        "requesttime", "duration", "durationms", "durations", "latency", "latencyms", "e2ems",
        "e2elatency", "latencye2e", "elapsedtime", "elapsed", "elapsedms", "requestduration",
    ),
    "session": (
        "sessionid", "session", "conversationid", "conversation", "convid", "conv", "chatid",
        "threadid", "dialogid",
    ),
    "max_tokens": ("maxtokens", "maxcompletiontokens", "maxoutputtokens", "maxnewtokens"),
    "priority": ("priority",),
    "status": ("status", "statuscode", "responsestatus", "httpstatus", "httpstatuscode"),
}  # fmt: skip
ROLES = tuple(NAMES)
TIMES = ("time", "end", "duration")
# Words that may stand before a name.
PREFIXES = (
    "spanattributes", "attributes", "genairequest", "genai", "usagemetadata", "usagedetails",
    "usage", "llm", "properties", "helicone", "litellm", "metadata", "native",
)  # fmt: skip
# nginx writes a line when a request has ended; `request_time` tells its logs.
NGINX_DURATION = "requesttime"
ANY_TIME = {"time", "timestamp", "datetime", "date", "ts"}  # of the start or of the end
UNIT_WORDS = {
    "ms": "ms", "millis": "ms", "milliseconds": "ms", "us": "us", "micros": "us",
    "microseconds": "us", "ns": "ns", "nano": "ns", "nanos": "ns", "nanoseconds": "ns", "s": "s",
    "sec": "s", "secs": "s", "seconds": "s",
}  # fmt: skip
# A column with such a word in its name looks like a time, a length or a session.
TELLING = {
    "time", "times", "timestamp", "date", "datetime", "ts", "created", "started", "arrival",
    "arrived", "tokens", "token", "length", "len", "session", "conversation", "thread", "chat",
}  # fmt: skip
SERVED = {
    "", "ok", "200", "success", "succeeded", "successful", "complete", "completed", "finished",
    "done", "default", "unset", "statuscodeok", "statuscodeunset", "stop", "length",
}  # fmt: skip
EXAMPLE = "--columns time=ts:ms,prompt=in,output=out,session=conv"


@dataclass(frozen=True, slots=True)
class NamedColumn:
    """A column that the user named for a role, and the unit of its times ('': find it)."""

    name: str
    unit: str = ""


def parse_columns(text: str) -> dict[str, NamedColumn]:
    """Parse `time=ts:ms,prompt=in,output=usage.out`: role to column. `InputError` for an unknown
    role or unit.
    """
    chosen: dict[str, NamedColumn] = {}
    for word in text.split(","):
        role, equals, name = (part.strip() for part in word.partition("="))
        if not (equals and name):
            raise InputError(f"--columns {text}: '{word}' is not ROLE=NAME", EXAMPLE)
        if role not in ROLES:
            raise InputError(f"--columns {text}: no role '{role}'", nearest(role, ROLES))
        if role in chosen:
            raise InputError(f"--columns {text}: '{role}' is named twice", EXAMPLE)
        before, colon, unit = name.rpartition(":")
        if colon and role in TIMES:
            if unit not in UNITS or (unit == DATES and role == "duration"):
                raise InputError(f"--columns {text}: no unit '{unit}'", nearest(unit, UNITS))
            chosen[role] = NamedColumn(before, unit)
        else:
            chosen[role] = NamedColumn(name)
    names = [column.name for column in chosen.values()]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--columns {text}: '{name}' is named for two roles", EXAMPLE)
    return chosen


def refuse_many(count: int, source: str) -> None:
    """Raise `InputError` for more columns than a log has."""
    if count > MAX_COLUMNS:
        raise InputError(
            f"{source}: {count:,} columns in its first rows; at most {MAX_COLUMNS:,} are read",
            "cut it to the columns of times and lengths",
        )


def squeezed(name: str) -> str:
    """A name without its case and its spelling: 'Prompt Tokens' and `promptTokens` are equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def spelled(path: Path) -> str:
    """A path as it is written on the command line and in messages."""
    return ".".join(path)


def plain_records(records: Iterator[Record]) -> Iterator[Record]:
    """Rows of a log; those of OpenTelemetry's exporter and of `{"data": [...]}` one by one."""
    for record in records:
        if record is None:
            yield None
        elif isinstance(record.get("resourceSpans"), list):
            yield from _spans(record)
        elif isinstance(record.get("data"), list) and set(record) <= {"data", "meta", "object"}:
            yield from _dicts(record["data"])
        elif isinstance(record.get("attributes"), list):
            yield {**record, "attributes": _attributes(record["attributes"])}
        else:
            yield record


def _spans(record: Mapping[str, object]) -> Iterator[Record]:
    """The spans of OTLP in JSON: resources have scopes, and scopes have spans."""
    for resource in _dicts(record.get("resourceSpans")):
        for scope in _dicts(resource.get("scopeSpans")):
            for span in _dicts(scope.get("spans")):
                yield {**span, "attributes": _attributes(span.get("attributes"))}


def _dicts(values: object) -> list[dict[str, object]]:
    return [one for one in values if isinstance(one, dict)] if isinstance(values, list) else []


def _attributes(pairs: object) -> dict[str, object]:
    """OTLP's list of keys and typed values as an object."""
    found: dict[str, object] = {}
    for pair in _dicts(pairs):
        value = pair.get("value")
        inner = next(iter(value.values()), None) if isinstance(value, dict) else value
        found[str(pair.get("key"))] = inner
    return found


def _leaves(record: Mapping[str, object], outer: Path) -> Iterator[Path]:
    for key, value in record.items():
        path = (*outer, str(key))
        if isinstance(value, dict) and len(path) < 6:
            yield from _leaves(value, path)
        elif not isinstance(value, list):
            yield path


def look_up(record: Mapping[str, object], path: Path) -> object:
    """The value at `path`; None where there is none, and for an empty text or a dash."""
    value: object = record
    for key in path:
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return None if value in ("", "-") else value


def was_served(status: object) -> bool:
    """Whether a status is that of a request that was served: HTTP's 2xx, or a word for success."""
    if status is None:
        return True
    try:
        code = formats.number(status)
    except ValueError:
        return isinstance(status, str) and squeezed(status) in SERVED
    return 200 <= code < 300 or code in (0, 1)  # 0 and 1: OpenTelemetry's unset and ok


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that was taken for a role."""

    path: Path
    unit: str = ""  # of times
    why: str = ""  # the unit, in words

    @property
    def name(self) -> str:
        return spelled(self.path)


class _Finder:
    """Finds the columns of a log in a sample of its rows."""

    def __init__(
        self, sample: Sequence[Record], chosen: Mapping[str, NamedColumn], source: str
    ) -> None:
        self._rows = [record for record in sample if record is not None]
        self._chosen = chosen
        self._source = source
        # in the order in which they come; those of nested objects, too
        self.paths = list(dict.fromkeys(path for row in self._rows for path in _leaves(row, ())))
        refuse_many(len(self.paths), source)
        self.taken: dict[str, _Column] = {}
        for role in sorted(ROLES, key=lambda role: role not in chosen):
            path = self._named(chosen[role]) if role in chosen else self._usual(role)
            if path is not None:
                self.taken[role] = _Column(path)
        self._name_ends()
        for role in TIMES:
            if role in self.taken:
                self.taken[role] = self._timed(role, self.taken[role].path)

    def _values(self, path: Path) -> list[object]:
        values = (look_up(record, path) for record in self._rows)
        return [value for value in values if value is not None]

    def _named(self, choice: NamedColumn) -> Path:
        """The column that the user named: exactly, or but for its case."""
        for same in (str, str.lower):
            found = [path for path in self.paths if same(spelled(path)) == same(choice.name)]
            if len(found) == 1:
                return found[0]
        names = [spelled(path) for path in self.paths]
        raise InputError(
            f"{self._source}: no column '{choice.name}'; found {_listed(names)}",
            nearest(choice.name, names) if names else EXAMPLE,
        )

    def _usual(self, role: str) -> Path | None:
        """The column with the first of the role's usual names that has values which fit it."""
        used = {column.path for column in self.taken.values()}
        ranked = []
        for place, path in enumerate(self.paths):
            ranks = [NAMES[role].index(name) for name in _short(path) if name in NAMES[role]]
            if ranks and path not in used:
                ranked.append((min(ranks), len(path), place, path))
        fitting = (path for *_, path in sorted(ranked) if self._fits(role, path))
        return next(fitting, None)

    def _fits(self, role: str, path: Path) -> bool:
        """Whether half of the values or more are possible in the role."""
        possible: dict[str, Callable[[object], object]] = {
            "prompt": formats.length,
            "output": formats.length,
            "max_tokens": formats.length,
            "priority": formats.priority_of,
            "duration": formats.number,
            "time": _any_time,
            "end": _any_time,
        }
        values = self._values(path)
        if role in possible:
            fitting = parsed(possible[role], values)
        else:  # a session or a status: a number or a text
            fitting = [value for value in values if isinstance(value, str | int)]
        return bool(values) and len(fitting) >= len(values) / 2

    def _name_ends(self) -> None:
        """nginx writes a line at the end of a request, whatever the column of the time is called. A
        time that the user named is an arrival.
        """
        duration = self.taken.get("duration")
        time = self.taken.get("time")
        if duration is None or time is None or "time" in self._chosen:
            return
        if squeezed(duration.path[-1]) == NGINX_DURATION and squeezed(time.path[-1]) in ANY_TIME:
            del self.taken["time"]
            self.taken.setdefault("end", time)

    def _timed(self, role: str, path: Path) -> _Column:
        """The column with its unit: the named one, else the name's, else the values'."""
        choice = self._chosen.get(role)
        if choice and choice.unit:
            why = "dates" if choice.unit == DATES else f"{choice.unit}, as named"
            return _Column(path, choice.unit, why)
        values = self._values(path)
        numbers = sorted(filter(math.isfinite, parsed(formats.number, values)))
        if len(numbers) < len(values) / 2 or not numbers:
            return _Column(path, DATES, "dates")
        word = UNIT_WORDS.get(_words(path[-1])[-1], "")
        early = numbers[len(numbers) // 4]
        middle = numbers[len(numbers) // 2]
        if role == "duration":
            return _Column(path, *_unit_of_duration(word, numbers, middle))
        for unit, factor in PER_SECOND.items():
            if EPOCH_S[0] <= early / factor and middle / factor <= EPOCH_S[1]:
                return _Column(path, unit, f"{unit} since 1970")
        if word:
            return _Column(path, word, f"{word}, as its name says")
        gap = (numbers[-1] - numbers[0]) / max(len(numbers) - 1, 1)
        unit = next((u for u, factor in PER_SECOND.items() if gap / factor <= SLOW_S), "ns")
        why = f"taken as {unit}: a request every {gap / PER_SECOND[unit]:.3g} s"
        other = "s" if unit == "ms" else "ms"
        remedy = f"otherwise --columns {role}={spelled(path)}:{other}"
        return _Column(path, unit, f"{why}; {remedy}")

    def whole_seconds(self, column: _Column) -> bool:
        """Whether all its times are whole seconds, of several requests."""
        times = parsed(partial(seconds_of, unit=column.unit), self._values(column.path))
        return len(set(times)) < len(times) and all(time.is_integer() for time in times)

    def unused(self) -> list[str]:
        """The columns that look like a time, a length or a session, and are not used."""
        used = {column.path for column in self.taken.values()}
        return [spelled(path) for path in self.paths if path not in used and _telling(path)]


def _short(path: Path) -> set[str]:
    """The squeezed names by which a column may be known: its key, the end of that, and the whole
    path, without what may stand before a name.
    """
    names = {squeezed(path[-1]), squeezed(path[-1].rpartition(".")[2]), squeezed(spelled(path))}
    shortened = set()
    for name in names:
        rest = name
        while prefix := next((one for one in PREFIXES if rest.startswith(one)), ""):
            rest = rest.removeprefix(prefix)
            shortened.add(rest)
    return names | shortened


def _words(name: str) -> list[str]:
    """The words of a name: `startTimeUnixNano` has start, time, unix and nano."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)] or [""]


def _telling(path: Path) -> bool:
    return bool(TELLING.intersection(_words(path[-1])))


def unused_columns(columns: Sequence[str], form: Format) -> tuple[str, ...]:
    """The columns of a file in a known format that look like a time, a length or a session, and
    that the format does not use.
    """
    used = {
        form.arrival, form.prompt, form.output, form.max_tokens, form.priority, form.status,
        form.blocks, form.session, form.think, "block_tokens", *form.known_by,
    }  # fmt: skip
    return tuple(name for name in columns if name not in used and _telling((name,)))


def not_used(names: Sequence[str]) -> str:
    """The note about columns that look useful and are not used; '' without any."""
    return f"not used: {_listed(names, NAMED)}" if names else ""


def _listed(names: Sequence[str], most: int = SHOWN) -> str:
    shown = ", ".join(f"'{name[:LONG_NAME]}'" for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def parsed(parse: Callable[[object], Value], values: Iterable[object]) -> list[Value]:
    """The values that can be parsed, parsed."""
    found = []
    for value in values:
        with suppress(ValueError, OverflowError):
            found.append(parse(value))
    return found


def _any_time(value: object) -> float:
    try:
        return formats.number(value)
    except ValueError:
        return formats.date_seconds(value)


def _unit_of_duration(word: str, numbers: Sequence[float], middle: float) -> tuple[str, str]:
    if word:
        return word, f"{word}, as its name says"
    if middle > LONG_S and all(value == int(value) for value in numbers):
        return "ms", "taken as ms, since they are whole and long"
    return "s", "taken as s"


def find(
    sample: Sequence[Record], chosen: Mapping[str, NamedColumn], source: str
) -> tuple[Format | None, InputError]:
    """The log of which `sample` has the first rows, as a format; or None, and the error that names
    the lengths that were not found. `InputError` for a column of `chosen` that is not there.
    """
    finder = _Finder(sample, chosen, source)
    taken = finder.taken
    missing = [role for role in ("prompt", "output") if role not in taken]
    if missing:
        named = " and ".join(f"{role} tokens" for role in missing)
        names = [spelled(path) for path in finder.paths]
        problem = f"{source}: no column has the {named}; found {_listed(names) or 'none'}"
        named = ",".join(f"{role}=NAME" for role in missing)
        hint = f"name them: llmctl trace convert FILE OUT --columns {named}"
        return None, InputError(problem, hint)
    ends = "time" not in taken and "end" in taken
    arrival = taken.get("time") or taken.get("end")
    duration = taken.get("duration")
    remarks, think_remark = _remarks(finder, arrival, ends)
    form = Format(
        LOG,
        prompt=taken["prompt"].name,
        output=taken["output"].name,
        arrival=arrival.name if arrival else "",
        unit=arrival.unit if arrival else "s",
        max_tokens=_name(taken, "max_tokens"),
        priority=_name(taken, "priority"),
        status=_name(taken, "status"),
        served=was_served,
        session=_name(taken, "session"),
        think="\0think_ms" if "session" in taken else "",
        whole=partial(_rows, taken=taken, ends=ends and duration is not None),
        ends=ends and duration is not None,
        any_order=True,
        described=_described(taken, ends),
        remarks=remarks,
        think_remark=think_remark,
    )
    return form, InputError("")


def _name(taken: Mapping[str, _Column], role: str) -> str:
    return taken[role].name if role in taken else ""


def _remarks(finder: _Finder, arrival: _Column | None, ends: bool) -> tuple[tuple[str, ...], str]:
    """What a user must know: about the times, and what is not used; and about times to think."""
    taken = finder.taken
    remarks = []
    if ends and "duration" not in taken:
        remarks.append(
            f"'{taken['end'].name}' is when requests ended, and no column says how long they took:"
            " arrivals are later than they were"
        )
    if arrival and finder.whole_seconds(arrival):
        remarks.append(f"'{arrival.name}' is in whole seconds: requests of a second arrive at once")
    remarks.append(not_used(finder.unused()))
    known = "duration" in taken or ("end" in taken and not ends)
    think = "" if known else "times to think include the answers: no column says how long they took"
    return tuple(filter(None, remarks)), think


def _described(taken: Mapping[str, _Column], ends: bool) -> str:
    """What was taken as what."""
    parts = []
    for role in ("time", "end", "duration", "prompt", "output", "session", "max_tokens",
                 "priority", "status"):  # fmt: skip
        if column := taken.get(role):
            unit = f" ({column.why})" if column.why else ""
            parts.append(f"{role} '{column.name}'{unit}")
    if ends and "duration" in taken:
        parts.append("a request arrives at its end minus its duration")
    return ", ".join(parts)


def _rows(
    records: Iterator[Record], _: str, *, taken: Mapping[str, _Column], ends: bool
) -> Iterator[Record]:
    """The rows with the columns that are used, by their names, and `TOOK` where it is known."""
    duration, time, end = (taken.get(role) for role in ("duration", "time", "end"))
    for record in plain_records(records):
        if record is None:
            yield None
            continue
        row = {column.name: look_up(record, column.path) for column in taken.values()}
        if "session" in taken:
            label = row[taken["session"].name]
            row[taken["session"].name] = label if isinstance(label, str | int) else None
        took_s = None
        if time and end:
            begins_s = _seconds(time, row)
            ends_s = _seconds(end, row)
            if begins_s is not None and ends_s is not None:
                took_s = ends_s - begins_s
        elif duration:
            took_s = _seconds(duration, row)
        if took_s is not None and 0 <= took_s < formats.LATEST_S:
            row[TOOK] = took_s
        elif ends and duration:
            row[REASON] = UNTIMED
            row[BLAMED] = duration.name
        lengths = [taken[role].name for role in ("prompt", "output")]
        if all(row[name] is None for name in lengths):
            row[REASON] = UNCOUNTED
            row[BLAMED] = lengths[0]
        yield row


def _seconds(column: _Column, row: Mapping[str, object]) -> float | None:
    try:
        return seconds_of(row[column.name], column.unit)
    except (ValueError, OverflowError):
        return None
