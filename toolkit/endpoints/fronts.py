"""What a server's front adds to requests in traffic, by the log of passes.

The log has each request's id, which begins with the name that its client gave it. So a request's
time at the client and its passes in the engine are known, and the rest is the front's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from toolkit.endpoints.load import Sample
from toolkit.files.iterations import LoggedPass
from toolkit.files.profile import TrafficFront

PREFIX = "cmpl-"  # vLLM puts it before the name of a completion, and a number and more behind it
RATE_S = 1.0  # over which the rate of tokens is taken


def names_of(samples: Sequence[Sample]) -> list[str]:
    """Return a name for each request, without the character that ends a name in the log."""
    return [f"llmctl{number}" for number in range(len(samples))]


def _name(request_id: str) -> str:
    return request_id.removeprefix(PREFIX).partition("-")[0]


def seen_in_traffic(
    samples: Sequence[Sample], names: Sequence[str], passes: Sequence[LoggedPass], start_s: float
) -> list[TrafficFront]:
    """What each request waited besides `passes`, which served no others.

    The times of `samples` count from `start_s` of the clock of the passes. A request that may have
    waited for room is left out, as is one without all of its passes.
    """
    passes = [one for one in passes if one.rows]
    ends_s = [one.end_s for one in passes]
    tokens = [0, *accumulate(_first_and_next(one) for one in passes)]
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
        ended = token[name]
        since = bisect_right(ends_s, ends_s[ended] - RATE_S)
        found.append(
            TrafficFront(
                rows=len(passes[ended].rows),
                tokens_per_s=(tokens[ended + 1] - tokens[since]) / RATE_S,
                in_s=passes[began].start_s - start_s - sample.sent_s - gaps_s[began] / 2,
                scheduled_s=gaps_s[began],
                out_s=start_s + sample.first_token_s - ends_s[ended],
            )
        )
    return found


def _first_and_next(one: LoggedPass) -> int:
    """The tokens that clients get from a pass."""
    return sum(row.computed + row.new >= row.prompt_tokens for row in one.rows)


def _gap_s(before: LoggedPass, one: LoggedPass) -> float:
    """The time between two schedules; 0 where the engine was idle before the second, and so took a
    request as soon as it came.
    """
    ended = {row.request_id for row in before.rows} <= set(before.ended)
    idle = ended and one.start_s >= before.end_s
    return 0.0 if idle else one.start_s - before.start_s
