"""The columns of traces and logs: their usual names, the units of times, and how values are parsed.

`NAMES` is the whole table. `find_columns` takes for each role the first of its names that a file
has, and `--columns time=ts,prompt=in` names others. A dot leads into an object:
`usage.prompt_tokens`.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from toolkit.errors import InputError, nearest
from toolkit.traces.types import MAX_LENGTH

# By role, without regard to case. Sources: Mooncake (`input_length`), Azure (`ContextTokens`),
# BurstGPT (`Request tokens`), Vidur (`num_prefill_tokens`), ShareGPT and LiteLLM (`prompt_tokens`),
# OpenAI's `usage`, also in answers of batches, vLLM's request metrics (`num_prompt_tokens`),
# LangSmith (`start_time`), nginx (`msec`).
NAMES: dict[str, tuple[str, ...]] = {
    "time": (
        "arrival_time", "arrived_at", "arrival", "startTime", "start_time", "started_at",
        "request_created_at", "timestamp", "timestamp_ms", "@timestamp", "created_at", "created",
        "createdAt", "response.body.created", "datetime", "time", "time_ms", "date", "ts", "ts_ms",
    ),
    "end": (
        "endTime", "end_time", "ended_at", "finished_at", "completed_at", "msec", "time_iso8601",
        "time_local",
    ),
    "duration": (
        "request_time", "request_duration_ms", "duration", "duration_ms", "e2e_latency", "latency",
        "latency_ms",
    ),
    "prompt": (
        "prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "usage.prompt_tokens",
        "usage.input_tokens", "response.body.usage.prompt_tokens",
        "response.body.usage.input_tokens", "num_prompt_tokens", "num_prefill_tokens",
        "ContextTokens", "Request tokens", "input_length",
    ),
    "output": (
        "completion_tokens", "output_tokens", "completionTokens", "outputTokens",
        "usage.completion_tokens", "usage.output_tokens", "response.body.usage.completion_tokens",
        "response.body.usage.output_tokens", "num_generation_tokens", "num_decode_tokens",
        "GeneratedTokens", "Response tokens", "output_length",
    ),
    "session": ("session", "session_id", "conversation_id", "thread_id", "chat_id"),
    "max_tokens": ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens_param"),
    "priority": ("priority",),
    "status": ("status", "status_code", "response.status_code"),
}  # fmt: skip
ROLES = tuple(NAMES)
TIMES = ("time", "end", "duration")
MOONCAKE = "input_length"  # tells Mooncake's format, which llmctl writes: its times are in ms
NGINX_DURATION = "request_time"  # tells nginx' logs: it writes a line when a request has ended
SESSION_ID = "session_id"
LANGSMITH = "dotted_order"  # tells LangSmith's runs, of which `SESSION_ID` is the project

# The units of times, by the name that `--columns` gives them; `DATES`: dates as text.
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
DATES = "iso"
UNITS = (*PER_SECOND, DATES)
EPOCH_S = (946_684_800.0, 4_102_444_800.0)  # from 2000 to 2100, in seconds since 1970

MAX_COLUMNS = 4096  # names of columns, those of nested objects included
DEPTH = 6  # of objects in which columns are looked for
SHOWN = 12  # columns in a message
NAMED = 6  # columns in the note about what was not used
LONG_NAME = 60  # characters of a column's name in a message
# A column with such a word in its name looks like a time, a length or a session.
TELLING = {
    "time", "times", "timestamp", "date", "datetime", "ts", "created", "started", "arrival",
    "arrived", "tokens", "token", "length", "len", "session", "conversation", "thread", "chat",
}  # fmt: skip
SERVED = {
    "", "ok", "success", "succeeded", "successful", "complete", "completed", "finished", "done",
    "stop", "length",
}  # fmt: skip
EXAMPLE = "--columns time=ts:ms,prompt=in,output=out,session=conv"

BLOCKS = "hash_ids"  # the ids of a prompt's blocks
BLOCK_TOKENS = "block_tokens"  # tokens of each block
THINK = "think_ms"  # from the end of the turn before

Record = Mapping[str, object] | None  # one row by column name; None: it could not be parsed
Value = TypeVar("Value")


class Unusable(Exception):  # noqa: N818  (a verdict on a row, which readers catch)
    """A row that is left out: the reason that is counted, and the value for which it is, with the
    values that are allowed there.
    """

    def __init__(self, reason: str, shown: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.shown = shown


def number(value: object) -> float:
    """Return a number of JSON or of a CSV field. Raises ValueError if it is none, like `true`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


def seconds_of(value: object, unit: str) -> float:
    """Return the seconds of a time in one of the `UNITS`. Raises ValueError if it is no time."""
    return date_of(value).timestamp() if unit == DATES else number(value) / PER_SECOND[unit]


def date_of(value: object) -> datetime:
    """Return a date with its zone: ISO 8601, also with ` UTC` behind it and UTC where it names no
    zone, or nginx's `time_local` (`16/Nov/2023:18:15:46 +0000`). Raises ValueError if it is none.
    """
    if not isinstance(value, str):
        raise ValueError(f"not a date: {value!r}")
    if value[2:3] == "/":
        return datetime.strptime(value, "%d/%b/%Y:%H:%M:%S %z")
    time = datetime.fromisoformat(value.removesuffix(" UTC"))
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def length(value: object) -> int:
    """Return a length, a whole number (`374` or `374.0`). Raises ValueError if it is none."""
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


def priority_of(value: object) -> int:
    """Return a priority, a whole number of 32 bits. Raises ValueError if it is none."""
    exact = number(value)
    if exact != int(exact) or abs(exact) > MAX_LENGTH:
        raise ValueError(f"not a priority: {exact}")
    return int(exact)


def block_ids(value: object) -> array[int] | None:
    """Return the ids of a prompt's blocks; None if it is no list of whole numbers of 64 bits."""
    if not isinstance(value, list):
        return None
    try:
        return array("q", value)
    except (TypeError, OverflowError):
        return None


def was_served(status: object) -> bool:
    """Return whether a request with this status was served: HTTP's 2xx, or a word for success."""
    if status is None:
        return True
    try:
        return 200 <= number(status) < 300
    except (ValueError, OverflowError):
        return isinstance(status, str) and status.lower() in SERVED


@dataclass(frozen=True, slots=True)
class Column:
    """A column that was taken for a role.

    Attributes:
        name: in the file; dots lead into objects.
        unit: of times, one of `UNITS`; '': it is not known yet.
        why: the unit, in words.
    """

    name: str
    unit: str = ""
    why: str = ""

    def of(self, record: Mapping[str, object]) -> object:
        """Return the value in a row; None where there is none, and for an empty text or a dash."""
        value = record.get(self.name)
        if value is None and "." in self.name:
            value = record
            for key in self.name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
        return None if value in ("", "-") else value

    def seconds(self, record: Mapping[str, object]) -> float:
        """Return the seconds of the time in a row. Raises ValueError if it is none."""
        return seconds_of(self.of(record), self.unit)

    def values(self, sample: Iterable[Record]) -> list[object]:
        """Return the values in these rows, without missing ones."""
        found = (self.of(record) for record in sample if record is not None)
        return [value for value in found if value is not None]


def parse_columns(text: str) -> dict[str, Column]:
    """Parse `time=ts:ms,prompt=in,output=usage.out`: role to column. Raises `InputError` if a role
    or a unit is unknown.
    """
    chosen: dict[str, Column] = {}
    for word in text.split(","):
        role, equals, name = (part.strip() for part in word.partition("="))
        if not (equals and name):
            raise InputError(f"--columns {text}: '{word}' is not ROLE=NAME", EXAMPLE)
        if role not in ROLES:
            raise InputError(f"--columns {text}: no role '{role}'", nearest(role, ROLES))
        if role in chosen:
            raise InputError(f"--columns {text}: '{role}' is named twice", EXAMPLE)
        before, colon, unit = name.rpartition(":")
        chosen[role] = Column(name)
        if colon and role in TIMES:
            if unit not in UNITS or (unit == DATES and role == "duration"):
                raise InputError(f"--columns {text}: no unit '{unit}'", nearest(unit, UNITS))
            chosen[role] = Column(before, unit)
    names = [column.name for column in chosen.values()]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--columns {text}: '{name}' is named for two roles", EXAMPLE)
    return chosen


def refuse_many(count: int, source: str) -> None:
    """Raise `InputError` if a file has more columns than logs have."""
    if count > MAX_COLUMNS:
        raise InputError(
            f"{source}: {count:,} columns in its first rows; at most {MAX_COLUMNS:,} are read",
            "cut it to the columns of times and lengths",
        )


def names_of(sample: Iterable[Record], source: str) -> list[str]:
    """Return the names of the columns in these rows, in the order in which they come. Raises
    `InputError` if there are too many.
    """
    names: dict[str, None] = {}
    for record in sample:
        names.update(dict.fromkeys(_leaves(record or {})))
        refuse_many(len(names), source)
    return list(names)


def _leaves(record: Mapping[str, object], outer: str = "", depth: int = 1) -> Iterator[str]:
    """Yield the names of columns; names in nested objects have dots."""
    for key, value in record.items():
        if isinstance(value, dict) and depth < DEPTH:
            yield from _leaves(value, f"{outer}{key}.", depth + 1)
        else:
            yield f"{outer}{key}"


def find_columns(
    sample: Sequence[Record], names: Sequence[str], chosen: Mapping[str, Column], source: str
) -> dict[str, Column]:
    """Return the columns of a file by their roles, times with their units.

    Args:
        sample: its first rows, of which `names` are the columns.
        chosen: columns that the user named.

    Raises `InputError` if a column of `chosen` is not there, and if lengths may be of turns without
    the turns before them.
    """
    taken = {role: _named(column, names, source) for role, column in chosen.items()}
    by_case = {name.lower(): name for name in reversed(names)}
    for role, usual in NAMES.items():
        used = [column.name for column in taken.values()]
        there = [by_case[name.lower()] for name in usual if name.lower() in by_case]
        free = [name for name in there if name not in used]
        if LANGSMITH in names and SESSION_ID in free:
            free.remove(SESSION_ID)
        if free and role not in taken:
            taken[role] = Column(free[0])
    duration = taken.get("duration")
    if "time" in taken and "time" not in chosen and duration and duration.name == NGINX_DURATION:
        taken.setdefault("end", taken.pop("time"))
    in_ms = "prompt" in taken and taken["prompt"].name == MOONCAKE
    session = taken.get("session")
    if in_ms and "session" not in chosen and session and session.name == SESSION_ID:
        both = f"'{MOONCAKE}' beside '{SESSION_ID}'"
        remedy = f"llmctl trace convert FILE OUT --columns session={SESSION_ID}"
        raise InputError(
            f"{source}: {both} may be the length of what is new in a turn, not of its prompt",
            f"if it is of whole prompts: {remedy}",
        )
    for role in TIMES:
        if role in taken:
            taken[role] = _timed(role, taken[role], sample, in_ms=in_ms)
    return {role: taken[role] for role in ROLES if role in taken}


def _named(choice: Column, names: Sequence[str], source: str) -> Column:
    """Return the column that the user named: exactly, or but for its case."""
    for same in (str, str.lower):
        found = [name for name in names if same(name) == same(choice.name)]
        if len(found) == 1:
            return replace(choice, name=found[0])
    raise InputError(
        f"{source}: no column '{choice.name}'; found {list_names(names)}",
        nearest(choice.name, names) if names else EXAMPLE,
    )


def _timed(role: str, column: Column, sample: Iterable[Record], *, in_ms: bool) -> Column:
    """Return the column with its unit: the named one, dates, a calendar time, ms if the format or
    the name says so, or else seconds.
    """
    if column.unit:
        why = "dates" if column.unit == DATES else f"{column.unit}, as named"
        return replace(column, why=why)
    values = column.values(sample)
    numbers = sorted(filter(math.isfinite, parse_all(number, values)))
    if in_ms and not numbers:
        return replace(column, unit="ms", why="ms")
    if not in_ms and (len(numbers) < len(values) / 2 or not numbers):
        return replace(column, unit=DATES, why="dates")
    by_name = column.name.endswith("_ms")
    if role == "duration":
        unit = "ms" if by_name else "s"
        return replace(column, unit=unit, why=unit)
    # A stray value tells nothing of a log. A trace in Mooncake's format may last eleven days, and
    # its first time is 0.
    early, late = numbers[len(numbers) // 4], numbers[len(numbers) // 2]
    if in_ms:
        early, late = numbers[0], numbers[-1]
    for unit, factor in PER_SECOND.items():
        if EPOCH_S[0] <= early / factor and late / factor <= EPOCH_S[1]:
            return replace(column, unit=unit, why=f"{unit} since 1970")
    if in_ms or by_name:
        return replace(column, unit="ms", why="ms")
    gap_s = (numbers[-1] - numbers[0]) / max(len(numbers) - 1, 1)
    why = f"taken as s: a request every {gap_s:.3g} s; otherwise --columns {role}={column.name}:ms"
    return replace(column, unit="s", why=why)


def parse_all(parse: Callable[[object], Value], values: Iterable[object]) -> list[Value]:
    """Return the values that can be parsed, each parsed."""
    found = []
    for value in values:
        with suppress(ValueError, OverflowError):
            found.append(parse(value))
    return found


def describe_columns(taken: Mapping[str, Column]) -> str:
    """Say what was taken as what."""
    parts = [
        f"{role} '{column.name}'" + (f" ({column.why})" if column.why else "")
        for role, column in taken.items()
    ]
    if "time" not in taken and {"end", "duration"} <= taken.keys():
        parts.append("a request arrives at its end minus its duration")
    return ", ".join(parts)


def column_remarks(
    taken: Mapping[str, Column], names: Sequence[str], sample: Sequence[Record]
) -> tuple[str, ...]:
    """Say what a user must know about the times, and which columns are not used."""
    found = []
    arrival = taken.get("time") or taken.get("end")
    if "time" not in taken and "end" in taken and "duration" not in taken:
        found.append(
            f"'{taken['end'].name}' is when requests ended, and no column says how long they took:"
            " arrivals are later than they were"
        )
    if arrival:
        times = parse_all(partial(seconds_of, unit=arrival.unit), arrival.values(sample))
        if len(set(times)) < len(times) and all(time.is_integer() for time in times):
            found.append(
                f"'{arrival.name}' is in whole seconds: requests of a second arrive at once"
            )
    used = {BLOCK_TOKENS, *(column.name for column in taken.values())}
    unused = [name for name in names if name not in used and TELLING.intersection(_words(name))]
    if unused:
        found.append(f"not used: {list_names(unused, NAMED)}")
    return tuple(found)


def _words(name: str) -> list[str]:
    """Return the words of a name behind its last dot: `startTime` has start and time."""
    last = name.rpartition(".")[2]
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", last)]


def list_names(names: Sequence[str], most: int = SHOWN) -> str:
    """Return the first of these names, and how many more there are; 'none' without any."""
    shown = ", ".join(f"'{name[:LONG_NAME]}'" for name in names[:most]) or "none"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def no_lengths_error(taken: Mapping[str, Column], names: Sequence[str], source: str) -> InputError:
    """Return the error for a file in which no column has the lengths."""
    missing = [role for role in ("prompt", "output") if role not in taken]
    named = " and ".join(f"{role} tokens" for role in missing)
    words = ",".join(f"{role}=NAME" for role in missing)
    return InputError(
        f"{source}: not a trace: no column has the {named}; found {list_names(names)}",
        f"name them: llmctl trace convert FILE OUT --columns {words}",
    )
