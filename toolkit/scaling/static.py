"""The rule `static`: always the same number."""

from __future__ import annotations

from toolkit.scaling.base import Rule
from toolkit.scaling.types import FleetView
from toolkit.sched.policies.parameters import parameter, policy


@policy("static")
class StaticRule(Rule):
    """Wants the same number of replicas whatever comes."""

    replicas: int = parameter(1, low=1, doc="replicas")

    def decide(self, view: FleetView) -> int:
        return self.replicas
