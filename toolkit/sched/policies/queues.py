"""Multi-level feedback queues as arithmetic: in which queue a job is, from its own counters and a law alone."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from toolkit.sched.protocols import LatencyLaw

NEVER = 1 << 40  # tokens after which a job leaves its queue, where it does not
LONGEST = 1 << 24  # tokens; a quantum that lasts longer is never used up
JOBS_KEPT = 1 << 16
LAWS_KEPT = 8


class Queues:
    """Queues under one law, numbered from 0.

    A job joins the first queue whose quantum covers its prefill, or queue 0 if it is naive or was promoted, and leaves
    a queue when it has used its quantum up. The last queue has none.

    Service is counted in seconds of the law as if the job ran alone: T_prefill(1, L), and each decode step's.

    Args:
        law: the worker's.
        first_s: quantum of queue 0, in seconds.
        growth: each quantum over the one before.
        count: how many queues there are.
        skip_join: false: every job joins queue 0.
    """

    def __init__(self, law: LatencyLaw, first_s: float, growth: float, count: int, skip_join: bool) -> None:
        self.quanta_s = [first_s * growth**k for k in range(count)]
        self._law, self._skip_join, self._emits = law, skip_join, int(law.prefill_emits_token)
        self._known: dict[tuple[int, int], tuple[int, list[int]]] = {}

    def find(self, prompt_tokens: int, generated: int, promoted_at: int = -1) -> tuple[int, int]:
        """The queue of a job that generated so much, and the count of generated tokens with which it will leave it.

        `promoted_at` is what it had generated when it was promoted last, -1 if it never was.
        """
        key = (prompt_tokens, promoted_at)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= JOBS_KEPT:
                self._known.clear()
            known = self._known[key] = self._way(prompt_tokens, promoted_at)
        first, leaves = known
        passed = bisect_right(leaves, generated)
        return first + passed, leaves[passed] if passed < len(leaves) else NEVER

    def service_s(self, prompt_tokens: int, generated: int) -> float:
        """Seconds of prefill and decode that give a job so many tokens when it runs alone."""
        if not generated:
            return 0.0
        decoded = generated - self._emits
        prefill_s = self._law.prefill_s(1, prompt_tokens)
        return prefill_s + (self._law.decode_s(1, prompt_tokens, decoded) if decoded else 0.0)

    def _way(self, prompt_tokens: int, promoted_at: int) -> tuple[int, list[int]]:
        """The queue that a job joins, and the generated tokens with which it leaves that one and the next ones."""
        queue, used_s = 0, 0.0
        if promoted_at >= 0:
            used_s = self.service_s(prompt_tokens, promoted_at)
        elif self._skip_join:
            prefill_s = self._law.prefill_s(1, prompt_tokens)
            while queue < len(self.quanta_s) - 1 and self.quanta_s[queue] < prefill_s:
                queue += 1
        leaves: list[int] = []
        for quantum_s in self.quanta_s[queue:-1]:
            used_s += quantum_s
            tokens = self._tokens(prompt_tokens, used_s, leaves[-1] if leaves else max(promoted_at, 0))
            leaves.append(tokens)
            if tokens == NEVER:
                break
        return queue, leaves

    def _tokens(self, prompt_tokens: int, service_s: float, least: int) -> int:
        """The first count of generated tokens, from `least` up, that takes so much service."""
        high = max(least, 1)
        while self.service_s(prompt_tokens, high) < service_s:
            high *= 2
            if high > LONGEST:
                return NEVER
        low = max(least, high // 2)
        while low < high:
            middle = (low + high) // 2
            if self.service_s(prompt_tokens, middle) >= service_s:
                high = middle
            else:
                low = middle + 1
        return low


def queues_of(law: LatencyLaw, first_s: float, growth: float, count: int, skip_join: bool) -> Queues:
    """The same object for the same arguments: what it has worked out is not worked out again."""
    key = (id(law), first_s, growth, count, skip_join)
    known = _by_identity.get(key)
    if known is None or known[0] is not law:  # to compare laws takes longer than all the rest
        if len(_by_identity) >= LAWS_KEPT:
            _by_identity.clear()
        known = _by_identity[key] = law, _queues_of(law, first_s, growth, count, skip_join)
    return known[1]


_by_identity: dict[tuple[int, float, float, int, bool], tuple[LatencyLaw, Queues]] = {}


@lru_cache(maxsize=LAWS_KEPT)
def _queues_of(law: LatencyLaw, first_s: float, growth: float, count: int, skip_join: bool) -> Queues:
    return Queues(law, first_s, growth, count, skip_join)
