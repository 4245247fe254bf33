"""The way from a simulation to vLLM's schedulers in another process (`toolkit.sim.installed`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from toolkit.sched.policies.vllm import VllmPolicy
    from toolkit.sim.blocks import PagedRequest
    from toolkit.sim.drafts import DrawnDrafts
    from toolkit.sim.groups.caches import CacheSettings


class InstalledPlan(Protocol):
    """A pass as vLLM plans it: see `toolkit.backends.vllm.messages.PlannedPass`."""

    @property
    def rows(self) -> Sequence[tuple[int, int, int, int, bool]]: ...
    @property
    def preempted(self) -> Sequence[int]: ...
    @property
    def free(self) -> int: ...
    @property
    def found(self) -> tuple[int, int, int, int]: ...


class InstalledUpdate(Protocol):
    """What vLLM did with the tokens of a pass: see `toolkit.backends.vllm.messages.GivenTokens`."""

    @property
    def ended(self) -> Sequence[int]: ...
    @property
    def free(self) -> int: ...


class SchedulerLink(Protocol):
    """The way to vLLM's schedulers, each with a number."""

    def open(
        self,
        flags: VllmPolicy,
        blocks: int,
        block_tokens: int,
        *,
        ahead: bool,
        drafts: DrawnDrafts | None,
        caches: CacheSettings | None,
    ) -> int:
        """Make a scheduler with these flags and caches, as of `PagedEngine`; its number."""
        ...

    def add(self, scheduler: int, row: PagedRequest, tokens: Sequence[tuple[int, int]]) -> None:
        """A request comes with its tokens, the output's too: (first, how many consecutive)."""
        ...

    def plan(self, scheduler: int) -> InstalledPlan:
        """Plan a pass."""
        ...

    def update(
        self, scheduler: int, accepted: Mapping[int, int], offered: Mapping[int, int]
    ) -> InstalledUpdate:
        """The tokens of the oldest pass exist; accepted drafts, and drafts that are proposed next,
        by request.
        """
        ...

    def close(self, scheduler: int) -> None:
        """Forget a scheduler."""
        ...
