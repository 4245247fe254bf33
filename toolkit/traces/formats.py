"""The trace formats that can be read: which columns each one has, by name, and what its time means.

The canonical one is Mooncake's JSONL; the server's own log and `llmctl bench --save-requests` write it too, with more
keys. Text is in none of them: lengths and times only. Opening and parsing files is `toolkit.traces.read`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from toolkit.errors import InputError

SUCCESS = (None, "", "ok", 200)  # what `status` says of a request that was served; anything else failed


def number(value: object) -> float:
    """A JSON number, or a CSV field that holds one. ValueError for all else, `true` included."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"not a number: {value!r}")
    return float(value)


def milliseconds(value: object) -> float:
    """Seconds from milliseconds."""
    return number(value) / 1000.0


def iso_seconds(value: object) -> float:
    """Seconds since 1970 of an ISO 8601 time; without a zone it is UTC. Digits beyond microseconds are cut off."""
    if not isinstance(value, str):
        raise ValueError(f"not an ISO time: {value!r}")
    time = datetime.fromisoformat(value)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


@dataclass(slots=True, frozen=True)
class Format:
    """Where a format keeps what a trace needs. An empty name: the format does not have it."""

    name: str
    prompt: str
    output: str
    arrival: str = ""
    seconds: Callable[[object], float] = number
    max_tokens: str = ""  # optional, the limit that the client set
    priority: str = ""  # optional, the smaller the more urgent
    status: str = ""  # optional, see SUCCESS
    zero_output_failed: bool = False  # 0 output tokens is how the format says that a request failed
    absolute_time: bool = False  # times are dates, so there is no negative one

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(column for column in (self.arrival, self.prompt, self.output) if column)

    @property
    def unit_s(self) -> float:
        """Of its times, in seconds."""
        return 0.001 if self.seconds is milliseconds else 1.0

    @property
    def unit(self) -> str:
        return "ms" if self.seconds is milliseconds else "s"

    @property
    def time(self) -> str:
        """What its times are, for people."""
        return "an ISO 8601 time" if self.seconds is iso_seconds else f"a finite number of {self.unit}"


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

# Where two fit, the first wins: a format without times comes after its sibling with times.
FORMATS = (
    MOONCAKE,
    Format("azure", "ContextTokens", "GeneratedTokens", arrival="TIMESTAMP", seconds=iso_seconds, absolute_time=True),
    Format("burstgpt", "Request tokens", "Response tokens", arrival="Timestamp", zero_output_failed=True),
    Format("vidur", "num_prefill_tokens", "num_decode_tokens", arrival="arrived_at"),
    Format("vidur-lengths", "num_prefill_tokens", "num_decode_tokens"),
    Format("sharegpt-o1", "prompt_tokens", "completion_tokens"),
)
KNOWN = "known: " + "; ".join(f"{known.name} ({', '.join(known.required)})" for known in FORMATS)


def detect(found: Collection[str], source: str) -> Format:
    """The format whose columns are all among `found`.

    InputError names the columns that the nearest format lacks, and those found.
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
