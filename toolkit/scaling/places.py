"""Which replicas start and which end, so that there are as many as are wanted."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.scaling.log import State


def to_start(states: Sequence[State], wanted: int, free: float) -> list[int]:
    """Return the places in which replicas start: the lowest that are free, then new ones.

    Args:
        states: of the replicas, by place.
        wanted: replicas that are wanted.
        free: replicas that there are GPUs for, with those that run and drain.
    """
    gone = [place for place, state in enumerate(states) if state == "gone"]
    held = len(states) - len(gone)
    number = min(wanted - (held - states.count("draining")), free - held)
    places = [*gone, *range(len(states), len(states) + max(wanted, 0))]
    return places[: max(int(number), 0)]


def to_end(states: Sequence[State], wanted: int) -> list[int]:
    """Return the places in which replicas end: starting ones first, then the highest place."""
    living = [place for place, state in enumerate(states) if state in ("starting", "ready")]
    living.sort(key=lambda place: (states[place] == "starting", place), reverse=True)
    return living[: max(len(living) - wanted, 0)]
