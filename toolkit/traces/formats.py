"""The formats of traces: their columns, and the values in these.

First the parsers of values, then what a format is. After it come the two formats of sessions in
which a row cannot be read alone: AIPerf's turns hold only what is new in them, and the coding
agents' files hold a whole session each. Both become rows with whole prompts, as in the canonical
format. At the end are the table of formats and how a file's format is found. Files of any other
format are read by the names of their columns (toolkit/traces/columns.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from typing import NamedTuple

from toolkit.errors import InputError

SUCCESS = (None, "", "ok", 200)  # `status` of a request that was served; anything else failed
MAX_LENGTH = 2**31 - 1  # tokens; a greater length is a mistake, and would overflow sums
# The year 10000 in seconds since 1970. A later time is in another unit, or a mistake.
LATEST_S = 253_402_300_800.0

MOONCAKE_BLOCK = 512  # tokens of a block in Mooncake's traces, which do not say it

PARTS = "deltas_without_responses"
WHOLE = "message_array_with_responses"  # of AIPerf
AFTER_UNUSABLE = "after an unusable turn of their session"
ANEW = "\0anew"  # a key of rows that might continue another and do not

Record = Mapping[str, object] | None  # one row by column name; None: it could not be parsed
REASON = "\0reason"  # the key of a reason to drop the row, which `Format.whole` found
BLAMED = "\0blamed"  # the key of the column to show for it; without it, the session is shown
TOOK = "\0took"  # the key of the seconds that the request took


def number(value: object) -> float:
    """A JSON number, or a CSV field that holds one. ValueError otherwise, also for `true`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


# The units of times, by the name that `--columns` gives them; `DATES`: dates as text.
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
DATES = "iso"
UNITS = (*PER_SECOND, DATES)


def seconds_of(value: object, unit: str) -> float:
    """Seconds of a time in one of the `UNITS`. ValueError for anything else."""
    return date_seconds(value) if unit == DATES else number(value) / PER_SECOND[unit]


def date_seconds(value: object) -> float:
    """Seconds since 1970 of a date, to the microsecond: ISO 8601, also with ` UTC` behind it and
    UTC where it names no zone, or nginx's `time_local` (`16/Nov/2023:18:15:46 +0000`).
    """
    return _date(value).timestamp()


def zone_s(value: object) -> float:
    """Seconds by which the zone of a date is ahead of UTC. ValueError as `date_seconds`."""
    ahead = _date(value).utcoffset()
    assert ahead is not None
    return ahead.total_seconds()


def _date(value: object) -> datetime:
    """A date with its zone."""
    if not isinstance(value, str):
        raise ValueError(f"not a date: {value!r}")
    if value[2:3] == "/":
        return datetime.strptime(value, "%d/%b/%Y:%H:%M:%S %z")
    time = datetime.fromisoformat(value.removesuffix(" UTC"))
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def length(value: object) -> int:
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


def priority_of(value: object) -> int:
    """A priority: a whole number of 32 bits, as in requests. ValueError otherwise."""
    exact = number(value)
    if exact != int(exact) or abs(exact) > MAX_LENGTH:
        raise ValueError(f"not a priority: {exact}")
    return int(exact)


def block_ids(value: object) -> array[int] | None:
    """The ids of a prompt's blocks; None for anything but a list of whole numbers of 64 bits."""
    if not isinstance(value, list):
        return None
    try:
        return array("q", value)
    except (TypeError, OverflowError):
        return None


def was_served(status: object) -> bool:
    """Whether a request with this `status` was served, in the canonical format."""
    return status in SUCCESS


@dataclass(slots=True, frozen=True)
class Format:
    """The columns of a format, and what its times mean. Empty: the format lacks that column."""

    name: str
    prompt: str
    output: str
    arrival: str = ""
    unit: str = "s"  # of its times, one of `UNITS`; dates may be before 1970
    max_tokens: str = ""  # optional: the limit that the client set
    priority: str = ""  # optional: smaller is more urgent
    status: str = ""  # optional: whether the request was served
    served: Callable[[object], bool] = was_served  # of a status
    zero_output_failed: bool = False  # 0 output tokens mean that the request failed
    blocks: str = ""  # optional: the ids of the prompt's blocks (`SharedBlocks`)
    # optional: a label; a row is the next turn after the last row before it with the same label
    session: str = ""
    think: str = ""  # optional: milliseconds from the end of the turn before
    known_by: tuple[str, ...] = ()  # the columns that tell the format, where others do
    # Makes rows with whole prompts of the file's rows.
    whole: Callable[[Iterator[Record], str], Iterator[Record]] | None = None
    ends: bool = False  # `arrival` is the time at which requests ended: `TOOK` is subtracted
    any_order: bool = False  # turns of a session follow by their times, not by their places
    described: str = ""  # what was taken as what, of one file
    remarks: tuple[str, ...] = ()  # what a user must know about the reading
    think_remark: str = ""  # the same about the times to think, if there are sessions

    @property
    def required(self) -> tuple[str, ...]:
        own = (self.arrival, self.prompt, self.output)
        return self.known_by or tuple(column for column in own if column)

    @property
    def dates(self) -> bool:
        """Whether its times are dates as text."""
        return self.unit == DATES

    def describe(self, found: Collection[str]) -> str:
        """What is taken as what of these columns, for people: `time 'TIMESTAMP' (dates), ...`."""
        columns = {
            "time": self.arrival,
            "prompt": self.prompt,
            "output": self.output,
            "session": self.session,
            "max_tokens": self.max_tokens,
            "priority": self.priority,
            "status": self.status,
        }
        parts = [f"{role} '{name}'" for role, name in columns.items() if name in found]
        if self.arrival in found:
            parts[0] += " (dates)" if self.dates else f" ({self.unit})"
        return ", ".join(parts)


def whole_prompts(records: Iterator[Record], source: str) -> Iterator[Record]:
    """AIPerf's turns with their whole prompts: the turn before, its answer, and what is new.

    A turn's own length and `hash_ids` are those of what is new in it (the first turn's are whole),
    unless its `context_mode` says that it holds the whole prompt. What is new in a later turn is
    taken as shared with no other session: its blocks do not begin where those of the whole prompt
    do. Turns without a `timestamp` arrive as if answers took no time.
    """
    turns: dict[object, _Turn | None] = {}  # the last one by session; None: it was not usable
    fresh = count(-1, -1)
    for row, record in enumerate(records, start=1):
        if record is None:
            raise InputError(
                f"{source}: row {row:,} is not a JSON object, so the prompts after it are unknown",
                "correct or remove this row",
            )
        label = record.get("session_id")
        if not isinstance(label, str | int):
            yield record
            continue
        before = turns.get(label)
        if label in turns and before is None:
            yield {**record, REASON: AFTER_UNUSABLE}
            continue
        mode = record.get("context_mode")
        if mode not in (None, PARTS, WHOLE):
            raise InputError(
                f"{source}: row {row:,}: context_mode is {mode!r}, which is not known",
                f"known: {PARTS}, {WHOLE}",
            )
        try:
            turn = _Turn.of(record, before, mode == WHOLE, fresh)
        except (ValueError, OverflowError):
            turn = None
        turns[label] = turn
        yield record if turn is None else {**record, **turn._asdict()}


class _Turn(NamedTuple):
    """The columns of an AIPerf turn with its whole prompt. Times are in milliseconds."""

    timestamp: float
    delay: float
    input_length: int
    output_length: int
    hash_ids: object  # a list of ids; something else if the file's were not usable

    @classmethod
    def of(
        cls, record: Mapping[str, object], before: _Turn | None, whole: bool, fresh: Iterator[int]
    ) -> _Turn:
        """The turn of a row. ValueError and OverflowError for values that are not usable."""
        new = length(record.get("input_length"))
        output = length(record.get("output_length"))
        if new < 1 or output < 1:
            raise ValueError("no tokens")
        delay_ms = number(record.get("delay") or 0.0)
        time = record.get("timestamp")
        follows_ms = before.timestamp + delay_ms if before else 0.0
        arrival_ms = follows_ms if time is None else number(time)
        own_ids = record.get("hash_ids")
        if before is None or whole:
            ids = _fresh_ids(new, fresh) if own_ids is None else own_ids
            return cls(arrival_ms, delay_ms, new, output, ids)
        prompt = length(before.input_length + before.output_length + new)
        fits = isinstance(own_ids, list) and len(own_ids) == -(-new // MOONCAKE_BLOCK)
        if not isinstance(before.hash_ids, list) or not (own_ids is None or fits):
            return cls(arrival_ms, delay_ms, prompt, output, "no list")
        kept = before.hash_ids[: before.input_length // MOONCAKE_BLOCK]
        more = _fresh_ids(prompt - len(kept) * MOONCAKE_BLOCK, fresh)
        return cls(arrival_ms, delay_ms, prompt, output, kept + more)


def _fresh_ids(tokens: int, fresh: Iterator[int]) -> list[int]:
    """New ids for so many tokens."""
    return [next(fresh) for _ in range(-(-tokens // MOONCAKE_BLOCK))]


@dataclass(slots=True)
class _Open:
    """The last turn of a session of a coding agent."""

    label: int
    place: int  # among the requests of its list
    prompt: int
    output: int
    end_s: float


class _AgentFile:
    """The requests of one file, a coding agent's session, as rows.

    A request is the next turn after another one if its prompt begins with all whole blocks of the
    other one's, and is long enough for that one's answer. Other requests of the file begin anew, at
    their own times: a side task, or a context that was edited.
    """

    def __init__(
        self, session: Mapping[str, object], labels: Iterator[int], fresh: Iterator[int], base: int
    ) -> None:
        self.top = base  # the greatest id so far
        self._block = length(session.get("block_size"))
        if self._block < 1:
            raise ValueError("a block without tokens")
        self._base = base if session.get("hash_id_scope") == "local" else 0
        self._labels = labels
        self._fresh = fresh
        self._open: dict[int, _Open] = {}  # by the id of the last whole block of the prompt

    def rows(self, requests: object, start_s: float = 0.0) -> Iterator[Record]:
        """The rows of a list of requests; those of subagents come where they were started."""
        for place, request in enumerate(requests if isinstance(requests, list) else [None]):
            if not isinstance(request, dict):
                yield None
            elif isinstance(request.get("requests"), list):
                yield from self.rows(request["requests"], start_s + number(request.get("t")))
            else:
                yield self._row(request, place, start_s)

    def _row(self, request: Mapping[str, object], place: int, start_s: float) -> Record:
        try:
            time_s = start_s + number(request.get("t"))
            prompt = length(request.get("in"))
            output = length(request.get("out"))
            api_s = number(request.get("api_time") or 0.0)
        except (ValueError, OverflowError):
            return request
        ids = block_ids(request.get("hash_ids"))
        if ids is None:
            return request
        whole = prompt // self._block
        listed = [one + self._base for one in ids]
        self.top = max(self.top, *listed) if listed else self.top
        before = self._continued(listed, prompt)
        label = before.label if before else next(self._labels)
        last = listed[whole - 1] if 0 < whole <= len(listed) else None
        if len(listed) == whole and prompt % self._block:  # it lists whole blocks only
            listed.append(next(self._fresh))
        if last is not None:
            self._open[last] = _Open(label, place, prompt, output, time_s + api_s)
        think_s = request.get("think_time")
        if before and (think_s is None or before.place != place - 1):
            think_s = max(time_s - before.end_s, 0.0)
        row = {
            **request,
            "t": time_s,
            "hash_ids": listed,
            "block_tokens": self._block,
            "session": label,
            "think_ms": 1000.0 * number(think_s) if before else 0.0,
        }
        return row if before or place == 0 else {**row, ANEW: True}

    def _continued(self, ids: list[int], prompt: int) -> _Open | None:
        """The turn before, which no other continues; None for a prompt that begins anew."""
        for whole in range(len(ids), 0, -1):
            before = self._open.get(ids[whole - 1])
            fits = before and before.prompt // self._block == whole
            if before and fits and before.prompt + before.output <= prompt:
                return self._open.pop(ids[whole - 1])
        return None


def agent_requests(records: Iterator[Record], _: str = "") -> Iterator[Record]:
    """The requests of coding agents' sessions, each of which is one record, as rows."""
    labels = count()
    fresh = count(-1, -1)
    base = 0
    for record in records:
        try:
            file = _AgentFile(record or {}, labels, fresh, base)
        except (ValueError, OverflowError):
            yield None
            continue
        yield from file.rows((record or {}).get("requests"))
        base = file.top + 1


AIPERF = Format(
    "aiperf",
    prompt="input_length",
    output="output_length",
    arrival="timestamp",
    unit="ms",
    blocks="hash_ids",
    session="session_id",
    think="delay",
    known_by=("session_id", "input_length", "output_length"),
    whole=whole_prompts,
)

# A file per session: https://github.com/callanjfox/kv-cache-tester, traces/
AGENTS = Format(
    "agents",
    prompt="in",
    output="out",
    arrival="t",
    blocks="hash_ids",
    session="session",
    think="think_ms",
    known_by=("requests", "block_size"),
    whole=agent_requests,
    described="time 't' (s), prompt 'in', output 'out', of each of the 'requests'",
)

MOONCAKE = Format(
    "mooncake",
    prompt="input_length",
    output="output_length",
    arrival="timestamp",
    unit="ms",
    max_tokens="max_tokens",
    priority="priority",
    status="status",
    blocks="hash_ids",
    session="session",
    think="think_ms",
)

# The first that fits wins, so a format without times comes after its sibling with times.
FORMATS = (
    AIPERF,
    AGENTS,
    MOONCAKE,
    Format("azure", "ContextTokens", "GeneratedTokens", arrival="TIMESTAMP", unit=DATES),
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
NAMING = "llmctl trace convert FILE OUT --columns time=NAME,prompt=NAME,output=NAME"
KNOWN = "known: " + "; ".join(f"{known.name} ({', '.join(known.required)})" for known in FORMATS)


def detect(found: Collection[str]) -> Format | None:
    """The first format of the table with all its required columns among `found`."""
    return next((known for known in FORMATS if set(known.required) <= set(found)), None)


def unknown(found: Collection[str], lacking: InputError, source: str) -> InputError:
    """The error for columns that no format has: it names those that the nearest format lacks, and
    those found. It is `lacking` where less than two columns are those of one format.
    """
    nearest = max(FORMATS, key=lambda candidate: len(set(candidate.required) & set(found)))
    listed = [f"'{column[:60]}'" for column in found]
    columns = ", ".join(listed[:12]) + (f" and {len(listed) - 12} more" if listed[12:] else "")
    missing = [column for column in nearest.required if column not in found]
    if len(nearest.required) - len(missing) == 1:
        return lacking
    if len(missing) == len(nearest.required):
        return InputError(
            f"{source}: not a trace: none of the known columns, found {columns or 'none'}",
            f"{KNOWN}; other names: {NAMING}",
        )
    named = " and ".join(f"'{column}'" for column in missing)
    return InputError(
        f"{source}: column {named} of the {nearest.name} format is missing; found {columns}",
        f"the {nearest.name} format has {', '.join(nearest.required)}; other names: {NAMING}",
    )
