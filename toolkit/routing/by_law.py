"""The router `by-law`: the time that a request adds, by the fitted law of a pass."""

from __future__ import annotations

from toolkit.laws.passes import PassLaw
from toolkit.routing.base import Router
from toolkit.routing.replicas import Replica, RouterView, Sent
from toolkit.sched.policies.parameters import parameter, policy
from toolkit.sched.types import Request

MOST_WEIGHED = 12  # replicas that it computes the costs of
SHARPNESS = 16  # how fast the chance to miss a target rises near it


@policy("by-law")
class LawRouter(Router):
    """The least time that the request adds to all requests, by the fitted law of a pass, and the
    fewest requests that miss a target because of it.

    For each replica: the seconds until the request's first token, behind the prompts that wait
    there and beside the rows that decode; the seconds of its own output; and what its passes add
    to the rows that run. Requests beyond the replica's cache wait until enough rows have ended.
    With targets, each request that would newly miss one counts `late` seconds more: this one by
    its first token, and those there that were in time so far, if a pass with this prompt makes
    their gap too long. So requests that are late in any case go where they make few others late.
    """

    others: float = parameter(
        1.0, high=100, search=(0.0, 3.0), doc="weight of the time that other requests lose"
    )
    first: float = parameter(
        1.0, high=100, search=(0.5, 5.0), doc="weight of the time to the request's first token"
    )
    late: float = parameter(
        5.0, high=1e4, search=(0.0, 50.0), doc="seconds that a newly missed target counts"
    )
    work: float = parameter(
        20.0,
        high=1e4,
        search=(0.0, 100.0),
        doc="seconds that a second of computing its prompt counts, for what comes later",
    )
    ttft_s: float = parameter(0.0, doc="target of the time to the first token; 0: none")
    gap_s: float = parameter(0.0, doc="target of the largest gap between two tokens; 0: none")

    def choose(self, request: Request, view: RouterView) -> int:
        """The replica of the least cost; what is expected there is left in `view.expected`."""
        view.replicas = _likely(view)
        each = [self.expected(request, replica, view) for replica in view.replicas]
        index = view.least([sent.cost_s for sent in each])
        for place, replica in enumerate(view.replicas):
            if replica.index == index:
                view.expected = each[place]
        return index

    def expected(self, request: Request, replica: Replica, view: RouterView) -> Sent:
        """Return the request as it would be sent to a replica now, with what to expect of it
        there.
        """
        law: PassLaw | None = replica.traits.law
        assert law is not None, "by-law needs the law of a pass of every replica"
        behind_s = law.terms.get("behind", 0.0)
        expected = view.expected_tokens if view.expected_tokens > 1.0 else 1.0
        prompt = request.prompt_tokens
        cached = view.cached_tokens(request, replica)
        sent = Sent(request, view.now_s, cached)
        new = sent.new_tokens
        rows = len(replica.sent) - replica.prefills  # with a first token
        decodes = min(rows, replica.max_rows)
        # rows that decode have generated half of their output on average
        context: float = replica.decode_tokens + rows * expected / 2
        room = max(replica.pass_tokens - decodes, 1)
        ahead = replica.prefill_tokens
        passes = -(-(ahead + new) // room)
        attended_ahead = ahead * (ahead / max(replica.prefills, 1)) / 2
        plain_s = law.pass_s(decodes, context, 0, 0, 0.0)
        chunks = (replica.prefills + 1) / passes
        chunks = chunks if chunks > 1.0 else 1.0
        keys = (new * (cached + new / 2) + attended_ahead) / passes
        chunk_s = law.pass_s(decodes, context, chunks, (ahead + new) / passes, keys)
        # what its own prompt adds to the passes of the rows that decode
        longer_s = chunk_s - plain_s
        own_s = (longer_s if longer_s > 0.0 else 0.0) * passes * new / (ahead + new)
        whole_s = passes * chunk_s - own_s - plain_s
        own_s += behind_s * _tokens_behind(1, cached, new, room)
        left = rest = 0.0  # seconds and tokens of the prompts ahead: part of them is computed
        if ahead:
            cached_ahead = replica.prefill_cached
            whole_s += behind_s * _tokens_behind(replica.prefills, cached_ahead, ahead, room)
            left = min(whole_s, max(replica.prefilled_s - view.now_s, 0.0))
            rest = ahead * left / (whole_s if whole_s > 1e-9 else 1e-9)
        longer = context + prompt + expected / 2
        slower_s = law.pass_s(decodes + 1, longer, 0, 0, 0.0) - plain_s
        first_s = left + own_s + plain_s
        first_s += _memory_wait_s(replica, new, context, plain_s, expected)
        lost_s = own_s * decodes + expected * slower_s * decodes
        late = 0.0
        ttft_s = self.ttft_s
        gap_s = self.gap_s
        if ttft_s:
            late = _chance(first_s, ttft_s)
        if gap_s:
            tokens = rest + new if rest + new < room else float(room)
            own = new if new < tokens else tokens
            attended = own * (prompt - own / 2) + (tokens - own) * attended_ahead / max(ahead, 1)
            longest_s = law.pass_s(decodes, context, 1, tokens, attended)
            longest_s += behind_s * (prompt - own)
            sent.stalls = longest_s > gap_s
            late += replica.in_time * _chance(longest_s, gap_s)
        cost_s = self.first * first_s + expected * (plain_s + slower_s) + self.others * lost_s
        sent.cost_s = cost_s + (self.late * late + self.work * own_s)
        sent.first_s = view.now_s + first_s
        sent.is_late = ttft_s > 0.0 and first_s > ttft_s
        return sent


def _likely(view: RouterView) -> list[Replica]:
    """The replicas that may be best: where more than `MOST_WEIGHED` are up, those with the longest
    matches, with the fewest tokens to compute, the fewest requests, and the fewest in time.
    """
    replicas = view.replicas
    if len(replicas) <= MOST_WEIGHED:
        return replicas
    part = MOST_WEIGHED // 3
    places: set[int] = set()
    for count, keys in (
        (part, [-view.matched(replica) for replica in replicas]),
        (part, [replica.prefill_tokens for replica in replicas]),
        (part, [len(replica.sent) for replica in replicas]),
        (2, [replica.in_time for replica in replicas]),
    ):
        places.update(sorted(range(len(keys)), key=keys.__getitem__)[:count])
    return [replicas[place] for place in sorted(places)]


def _chance(expected_s: float, target_s: float) -> float:
    """The chance to miss a target, from 0 to 1: a half where it is expected to be just met."""
    if expected_s <= 0.0:
        return 0.0
    ratio = target_s / expected_s
    return 1.0 / (1.0 + (ratio if ratio < 100.0 else 100.0) ** SHARPNESS)


def _tokens_behind(prompts: int, cached: int, new: int, room: int) -> float:
    """Tokens that parts of prompts find cached before them, those of earlier parts included, where
    a pass computes at most `room` new tokens; `cached` and `new` are of all `prompts` together.
    """
    parts = -(-new // (prompts * room))  # of each prompt
    return parts * cached + prompts * room * parts * (parts - 1) / 2


def _memory_wait_s(
    replica: Replica, new: int, context: float, pass_s: float, expected: float
) -> float:
    """Seconds until enough rows have ended to hold what waits and `new` tokens more."""
    held = context + replica.prefill_tokens
    excess = held + new - replica.capacity_tokens
    rows = len(replica.sent)
    slots = rows + 1 - replica.max_rows
    if not rows or (excess <= 0.0 and slots <= 0):
        return 0.0
    row_tokens = held / rows
    ends = excess / (row_tokens if row_tokens > 1.0 else 1.0)
    ends = slots if slots > ends else ends
    ends = ends if ends > 0.0 else 0.0
    return ends * expected * pass_s / min(rows, replica.max_rows)
