"""A policy that decides as another does: what a test wants to see or change of its decisions, it
does in a subclass.
"""

from toolkit.sched.protocols import LengthHistory, Oracle, Ranks, Reorders, Reschedules, UsesHistory


class Around:
    def __init__(self, policy):
        self._policy = policy
        self.name = policy.name
        self.continuous = policy.continuous
        if isinstance(policy, Ranks):
            self.standings = policy.standings

    def first_history(self):
        return (
            self._policy.first_history()
            if isinstance(self._policy, UsesHistory)
            else LengthHistory(1000)
        )

    def with_lengths(self, output_tokens):
        return (
            type(self)(self._policy.with_lengths(output_tokens))
            if isinstance(self._policy, Oracle)
            else self
        )

    def release(self, view, now_s):
        return self._policy.release(view, now_s) if isinstance(self._policy, Reschedules) else ()

    def reorder(self, view, now_s):
        return self._policy.reorder(view, now_s) if isinstance(self._policy, Reorders) else ((), ())

    def route(self, view, now_s):
        return self._policy.route(view, now_s)

    def plan(self, view, now_s):
        return self._policy.plan(view, now_s)
