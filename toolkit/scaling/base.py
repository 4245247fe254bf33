"""What a rule is: a frozen set of parameters, and a pure function of what a cluster shows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from toolkit.scaling.types import FleetView
from toolkit.sched.policies.parameters import Value, validate


class Rule:
    """A way to decide how many replicas a fleet needs. The fields are its parameters.

    A rule keeps no state: what it must remember is in the history, so a log of samples replays its
    decisions. `Behaviour` then limits how fast the number may change; `usual_behaviour` is how its
    project sets it, where that differs from Kubernetes' defaults.
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    usual_behaviour: ClassVar[Mapping[str, Value]] = MappingProxyType({})

    def __post_init__(self) -> None:
        validate(self, f"rule '{self.name}'")

    @property
    def memory_s(self) -> float:
        """How many seconds of samples it reads."""
        return 600.0

    def decide(self, view: FleetView) -> int:
        """Return how many replicas are needed; the caller keeps it between `least` and `most`."""
        raise NotImplementedError
