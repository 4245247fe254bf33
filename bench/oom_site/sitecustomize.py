"""`bench/oom.py` puts this on workers' path: every n-th batch of several rows runs out of memory.

It does so after a step and not at its first allocation, so that what it had computed is to be computed again.
Batches of one row are spared: one that fails alone twice is given up, which is another promise.
"""

import os
import random
from collections.abc import Callable
from typing import Any

EVERY = int(os.environ.get("LLMCTL_BENCH_OOM_EVERY", "0"))


def install() -> None:
    """Engines that the factory makes from now on fail so. Nothing heavy is imported before it makes one."""
    from toolkit.engines import factory

    make = factory.make_engine

    def make_failing(*specs: Any) -> Any:
        engine = make(*specs)
        if hasattr(engine, "run_round"):
            engine.run_round = failing(engine.run_round, lambda plan: len(plan.enter) + len(engine._batch))
        engine.run_slice = failing(engine.run_slice, len)
        return engine

    factory.make_engine = make_failing


def failing(run: Callable[..., Any], rows_of: Callable[[Any], int]) -> Callable[..., Any]:
    """`run`, which fails in every n-th call with several rows, or in the next one that has a step to fail at."""
    rng, crowded, due = random.Random(0), 0, 0

    def called(work: Any, *arguments: Any) -> Any:
        nonlocal crowded, due
        *others, on_step = arguments
        crowded += rows_of(work) > 1
        due += rows_of(work) > 1 and crowded % EVERY == 0
        left = rng.randint(1, 16) if due and rows_of(work) > 1 else 0

        def failing_step(step: Any) -> bool:
            nonlocal left, due
            wanted = on_step(step)
            left -= 1
            if left == 0:
                import torch

                due -= 1
                raise torch.OutOfMemoryError("injected")
            return wanted

        return run(work, *others, failing_step)

    return called


if EVERY:
    install()
