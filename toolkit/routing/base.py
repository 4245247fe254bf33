"""What a router is: a frozen set of parameters, and a pure function of what it may look at."""

from __future__ import annotations

from typing import ClassVar

from mypy_extensions import mypyc_attr

from toolkit.routing.replicas import RouterView
from toolkit.sched.policies.parameters import validate
from toolkit.sched.types import Request


@mypyc_attr(native_class=False)  # so that subclasses may be data classes with slots
class Router:
    """A way to choose a replica. The fields are its parameters.

    `reads_reports`: whether it reads what replicas report of themselves. For each replica,
    `index_blocks` bounds the blocks that are remembered (0: as many as its cache holds; -1: no
    bound), and `index_ttl_s` the seconds (0: no bound).
    """

    __slots__ = ()
    name: ClassVar[str] = ""
    reads_reports: ClassVar[bool] = False
    index_blocks: ClassVar[int] = 0
    index_ttl_s: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        validate(self, f"router '{self.name}'")

    def choose(self, request: Request, view: RouterView) -> int:
        """The index of the replica that gets the request."""
        raise NotImplementedError
