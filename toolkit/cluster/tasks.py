"""Functions run on the processors of the cluster, for whoever has many independent things to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def processors() -> int:
    """The CPUs of the cluster that this process has joined."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def spread(function: Callable[[Item], Result], items: Iterable[Item], at_once: int) -> Iterator[tuple[Item, Result]]:
    """Each item and what `function` makes of it, as results come; at most `at_once` run or wait for a processor.

    Ray pickles the function, by its name, the items and the results. What a lost machine had is run again elsewhere;
    what is left when nobody asks for more is cancelled.
    """
    import ray

    remote = ray.remote(num_cpus=1, max_retries=-1)(function)
    waiting = iter(items)
    running: dict[Any, Item] = {remote.remote(item): item for item in islice(waiting, at_once)}
    try:
        while running:
            (done, *_), _ = ray.wait(list(running))
            item = running.pop(done)
            running |= {remote.remote(one): one for one in islice(waiting, 1)}
            yield item, ray.get(done)
    finally:
        for left in running:
            ray.cancel(left)
