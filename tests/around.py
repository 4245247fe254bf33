"""A policy that decides as another does: what a test wants to see or change of its decisions, it
does in a subclass.
"""

from toolkit.sched.policies.base import Policy


class Around(Policy):
    def __init__(self, policy):
        self._policy = policy
        self.name = policy.name
        self.continuous = policy.continuous
        self.knows_lengths = policy.knows_lengths
        self.output_tokens = policy.output_tokens
        self.first_history = policy.first_history
        self.ranking = policy.ranking

    def with_lengths(self, output_tokens):
        return type(self)(self._policy.with_lengths(output_tokens))

    def release(self, view, now_s):
        return self._policy.release(view, now_s)

    def reorder(self, view, now_s):
        return self._policy.reorder(view, now_s)

    def route(self, view, now_s):
        return self._policy.route(view, now_s)

    def plan(self, view, now_s):
        return self._policy.plan(view, now_s)
