"""From a fit file to the objects that answer: what the simulator, the tuner and the server load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from toolkit.estimators.laws import (
    LinearSwap,
    SegmentedLaw,
    WithOverhead,
    law_of_rounds,
    swap_from_fit,
)
from toolkit.estimators.memory import MemoryEdge, RuleEdge, RuleMemory, ZetaEdge, ZetaMemory
from toolkit.files.fit import Fit, MemoryFit
from toolkit.sched.protocols import LatencyLaw, MemoryLaw
from toolkit.sched.types import NO_LIMIT, Joining


@dataclass(slots=True, frozen=True)
class Laws:
    """One worker's laws. `latency` includes what serving adds to the `engine`'s own time; `edge` is
    for simulation.

    `rounds` and `round_memory` are those of a worker that keeps its rows; without measured rounds,
    those of batches. Without a measured link to host memory there is no `swap` and there are no
    `host_tokens`. `joining` is how rows join the engine's running batch where that is one padded
    slab; None: its memory is paged. `slots` rows run at once. `front_s` of a server's time to a
    first token in rounds nobody else waits for.
    """

    latency: WithOverhead
    engine: SegmentedLaw
    memory: MemoryLaw
    edge: MemoryEdge
    swap: LinearSwap | None = None
    host_tokens: int = 0
    joining: Joining | None = None
    slots: int = NO_LIMIT
    front_s: float = 0.0
    rounds: LatencyLaw = field(kw_only=True)
    round_memory: MemoryLaw = field(kw_only=True)


def laws_from_fit(fit: Fit) -> Laws:
    """The laws that a fit file holds. `InputError` where its segments or rules are out of order."""
    prefill, decode = tuple(fit.prefill.segments), tuple(fit.decode.segments)
    engine = SegmentedLaw(prefill, decode, fit.engine.prefill_emits_token)
    latency = WithOverhead(engine, fit.overhead.batch_s, fit.overhead.stretch)
    memory, edge = memory_from_fit(fit.memory)
    swap, host_tokens = (
        swap_from_fit(fit.swap, fit.memory.kv_bytes_per_token) if fit.swap else (None, 0)
    )
    joining, slots = fit.engine.joining, fit.engine.max_rows or NO_LIMIT
    in_rounds = replace(engine, padded=joining is not None)
    rounds: LatencyLaw = latency
    round_memory = memory
    front_s = 0.0
    if (
        fit.engine.is_server
    ):  # its laws are of what clients see: HTTP, which whole slices add once, is in each already
        rounds, front_s = without_front(in_rounds)
    elif fit.rounds:
        rounds = law_of_rounds(in_rounds, fit.rounds)
        round_memory = ZetaMemory(fit.memory.capacity_tokens, fit.rounds.usable_share)
    measured = latency, engine, memory, edge, swap, host_tokens, joining, slots
    return Laws(*measured, front_s, rounds=rounds, round_memory=round_memory)


def without_front(seen: SegmentedLaw) -> tuple[SegmentedLaw, float]:
    """What clients see of a server, as its engine's own law and the seconds that HTTP and text take
    besides.

    A first token takes both, and only the engine's part holds up those who decode. The pass that
    computes a prompt costs what a step of one row does, and more for each of its tokens: what a
    prompt of no length takes beyond that step is the front's. It is taken for the same with every
    request, in and out together.
    """
    front_s = seen.prefill_s(1, 0.0) - seen.decode_s(1, 0.0, 1)
    least_s = min(seen.prefill_s(segment.batch_size_min, 0.0) for segment in seen.prefill)
    front_s = max(min(front_s, least_s), 0.0)
    inside = [each.model_copy(update={"const": each.const - front_s}) for each in seen.prefill]
    return replace(seen, prefill=tuple(inside)), front_s


def memory_from_fit(fit: MemoryFit) -> tuple[MemoryLaw, MemoryEdge]:
    """The law that a scheduler asks, and the edge that a simulated worker meets."""
    if fit.form == "rules":
        rules = tuple(fit.rules)
        return RuleMemory(rules), RuleEdge(rules, fit.zeta_std)
    law = ZetaMemory(fit.capacity_tokens, fit.zeta, fit.workspace)
    return law, ZetaEdge(fit.capacity_tokens, fit.zeta, fit.zeta_std, fit.workspace)
