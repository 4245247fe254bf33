"""`benchmarks.serving.oom` puts this on the workers' path: every n-th batch of several rows fails.

A batch runs out of memory after a pass and not at its first allocation, so that computed work is
lost. In a round several passes in a row fail: with one of them, repeating the pass helps; with two
the engine computes it in parts, and with six a row has to be evicted. Batches of one row are
spared: a row that fails alone twice is given up, which is another promise.
"""

import os
import random
from collections.abc import Callable
from typing import Any

EVERY = int(os.environ.get("LLMCTL_BENCH_OOM_EVERY", "0"))
LOG = os.environ.get("LLMCTL_BENCH_OOM_LOG", os.devnull)  # gets a byte for each error
FAILURES = int(os.environ.get("LLMCTL_BENCH_OOM_FAILURES", "2"))  # in a row, of a round's passes
LATEST = 16  # the pass or step of a batch at which it fails, at the latest


def install() -> None:
    """Make the engines that workers load fail. Imports nothing heavy before the first engine."""
    from toolkit.engines import protocol

    make = protocol.make_engine

    def make_failing(*specs: Any) -> Any:
        engine = make(*specs)
        if hasattr(engine, "run_round"):
            engine.run_round = failing_rounds(engine)
        engine.run_slice = failing_slices(engine.run_slice)  # type: ignore[method-assign]
        return engine

    protocol.make_engine = make_failing  # type: ignore[assignment]


class Turns:
    """Which batches fail, and when: each n-th of several rows, or the next one that lasts long
    enough.
    """

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._crowded = 0
        self._due = 0

    def begin(self, rows: int) -> int:
        """The pass after which a batch of this many rows fails; 0: it does not fail."""
        self._crowded += rows > 1
        self._due += rows > 1 and self._crowded % EVERY == 0
        return self._rng.randint(1, LATEST) if self._due and rows > 1 else 0

    def failed(self) -> None:
        self._due -= 1


def failing_slices(run: Callable[..., Any]) -> Callable[..., Any]:
    turns = Turns()

    def called(rows: Any, steps: int, on_step: Callable[[Any], bool]) -> Any:
        left = turns.begin(len(rows))

        def failing_step(step: Any) -> bool:
            nonlocal left
            wanted = on_step(step)
            left -= 1
            if left == 0:
                turns.failed()
                raise out_of_memory()
            return wanted

        return run(rows, steps, failing_step)

    return called


def failing_rounds(engine: Any) -> Callable[..., Any]:
    turns = Turns()
    left = 0
    run = engine.run_round
    network = engine._network

    def failing_pass(*arguments: Any, **options: Any) -> Any:
        nonlocal left
        output = network(*arguments, **options)
        left -= 1
        if -FAILURES < left <= 0 and is_armed:
            if left == 0:
                turns.failed()
            raise out_of_memory()
        return output

    is_armed = False
    engine._network = failing_pass

    def called(plan: Any, on_step: Callable[[Any], bool]) -> Any:
        nonlocal left, is_armed
        left = turns.begin(len(plan.enter) + len(engine._batch))
        is_armed = left > 0
        output = run(plan, on_step)
        is_armed = False
        return output

    return called


def out_of_memory() -> Exception:
    import torch

    with open(LOG, "ab", buffering=0) as log:
        log.write(b".")
    return torch.OutOfMemoryError("injected")


if EVERY:
    install()
