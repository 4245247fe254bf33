"""The kinds of caches and servers that are compared by their passes: a file each, with a `KIND`.

A new kind is a new file here. Its workloads name their caches in `groups`, which `driven` turns
into vLLM's own, or their drafts in `drafts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from toolkit.backends.vllm.conformance.workloads import Case, Pass
from toolkit.backends.vllm.touched import Need


@dataclass(frozen=True, slots=True)
class ModelKind:
    """A row of the result.

    Attributes:
        name: for readers.
        classes: of `toolkit.catalogue.classes` that it stands for; none: full attention.
        make: the workload of a seed; the second argument: with async scheduling.
        differs: the first pass of vLLM's in which the simulator differs; None: none does.
        needs: what of vLLM it touches.
        cited: verdicts about models of these classes cite it; not one of a setting of its own.
        since: the first release that has it; '': all have.
        one_in: it takes so many times as long as the others, and gets one workload in so many.
        order: where it is in the list.
    """

    name: str
    classes: tuple[str, ...]
    make: Callable[[int, bool], Case]
    differs: Callable[[Case, list[Pass]], int | None]
    needs: Need = "simulation"
    since: str = ""
    one_in: int = 1
    cited: bool = True
    order: int = 100


@cache
def kinds() -> tuple[ModelKind, ...]:
    """All kinds, in order."""
    found: list[ModelKind] = [
        import_module(f"{__name__}.{module.name}").KIND for module in iter_modules(__path__)
    ]
    return tuple(sorted(found, key=lambda kind: (kind.order, kind.name)))


def first_difference(ours: list[Pass], theirs: list[Pass]) -> int | None:
    """The first pass that differs; None: no pass differs."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return number
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))
