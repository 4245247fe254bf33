"""A server that was looked at, a trace as it takes it, and how it is asked: what every replay begins with."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from toolkit.bench.client import Lengths, Load, try_out
from toolkit.bench.foreign import check_server
from toolkit.bench.limits import fitted, limits_of
from toolkit.endpoints.target import Target
from toolkit.files.identity import OnForeign
from toolkit.files.plan import Plan
from toolkit.traces.types import Trace

GIVEN = "each request asks for exactly its output: the scheduler knows the lengths as limits"
HIDDEN = "the scheduler sees each request's limit; the engine alone knows the lengths"


@dataclass(slots=True, frozen=True)
class Wanted:
    """What somebody asks of the requests besides their trace; None: as the plan has it, else as any server takes it.

    `rate` is in requests per second; `lengths` are by default hidden from a server that allows it
    (llmctl's with `--allow-end-after`), and given to others.
    """

    rate: float | None = None
    lengths: Lengths | None = None
    max_new_tokens: int | None = None
    vocab_size: int | None = None
    timeout_s: float = 600.0
    seed: int = 0


@dataclass(slots=True, frozen=True)
class Subject:
    """`trace` with the lengths that `target` takes and the rate that is wanted, and how it becomes requests.

    Its limits are those that the requests name: where lengths are given, each is the request's output,
    so that a prediction simulates what is asked.
    """

    target: Target
    trace: Trace
    load: Load

    @property
    def notes(self) -> list[str]:
        """What a reader must know of how the server was asked."""
        lacks = self.load.dialect.lacks
        given = self.load.lengths == "given"
        return [f"the server does not take {lacking}: lengths may differ from the trace's" for lacking in lacks] + [
            f"replay: {GIVEN if given else HIDDEN}"
        ]


def look_at(
    target: Target, trace: Trace, plan: Plan | None, wanted: Wanted, on_foreign: OnForeign | None = None
) -> Subject:
    """Ask the server what it takes, with a few requests of its own.

    `ForeignError` where it is not the one that `plan` was fitted to (with `on_foreign` that is told instead),
    `InputError` in the server's own words where it refuses.
    """
    if plan is not None:
        check_server(plan, target, on_foreign)
    limits = limits_of(plan, target, wanted.max_new_tokens, wanted.vocab_size)
    whole = fitted(trace, limits, wanted.rate)
    lengths, dialect = try_out(target, wanted.lengths, limits.output)
    asked = whole.output_tokens if lengths == "given" else np.where(whole.max_tokens, whole.max_tokens, limits.output)
    whole = replace(whole, max_tokens=asked)
    load = Load(lengths, limits.output, limits.vocabulary, wanted.timeout_s, wanted.seed, dialect)
    return Subject(target, whole, load)
