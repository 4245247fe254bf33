"""What a server's front adds to requests, by the log of passes.

The log has each request's id, which begins with the name that its client gave it. So a request's
time at the client and its passes in the engine are known, and the rest is the front's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from toolkit.endpoints.load import Sample
from toolkit.files.iterations import LoggedPass

PREFIX = "cmpl-"  # vLLM puts it before the name of a completion, and a number and more behind it


def names_of(samples: Sequence[Sample]) -> list[str]:
    """Return a name for each request, without the character that ends a name in the log."""
    return [f"llmctl{number}" for number in range(len(samples))]


def _name(request_id: str) -> str:
    return request_id.removeprefix(PREFIX).partition("-")[0]


def front_seconds(
    samples: Sequence[Sample], names: Sequence[str], passes: Sequence[LoggedPass], start_s: float
) -> list[float]:
    """Return the seconds that each request waited besides `passes`, which served no others: on its
    way in and until its first token.

    The times of `samples` count from `start_s` of the clock of the passes. The engine looks for
    requests when it schedules a pass: half of the time since the schedule before is taken off, so
    each is right in the mean only. A request that may have waited for room is left out, as is one
    without all of its passes.
    """
    passes = [one for one in passes if one.rows]
    first: dict[str, int] = {}
    token: dict[str, int] = {}
    for number, one in enumerate(passes):
        for row in one.rows:
            name = _name(row.request_id)
            first.setdefault(name, number)
            if row.computed + row.new >= row.prompt_tokens:
                token.setdefault(name, number)
    crowded = {number + 1 for number, one in enumerate(passes) if one.waiting}
    gaps_s = [0.0, *(_gap_s(before, one) for before, one in pairwise(passes))]
    found = []
    for sample, name in zip(samples, names, strict=True):
        if sample.failure or name not in token or first[name] in crowded:
            continue
        began = first[name]
        in_s = passes[began].start_s - start_s - sample.sent_s - gaps_s[began] / 2
        found.append(in_s + start_s + sample.first_token_s - passes[token[name]].end_s)
    return found


def _gap_s(before: LoggedPass, one: LoggedPass) -> float:
    """The time between two schedules; 0 where the engine was idle before the second, and so took a
    request as soon as it came.
    """
    ended = {row.request_id for row in before.rows} <= set(before.ended)
    idle = ended and one.start_s >= before.end_s
    return 0.0 if idle else one.start_s - before.start_s
