"""From a fit file to the objects that answer: what the simulator, the tuner and the server load."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from toolkit.estimators.edge import MemoryEdge, RuleEdge, ZetaEdge
from toolkit.estimators.laws import SegmentedLaw, WithOverhead
from toolkit.estimators.memory import RuleMemory, ZetaMemory
from toolkit.estimators.rounds import law_of_rounds
from toolkit.estimators.swap import LinearSwap, swap_from_fit
from toolkit.files.fit import Fit, MemoryFit
from toolkit.sched.protocols import LatencyLaw, MemoryLaw
from toolkit.sched.types import NO_LIMIT, Joining


@dataclass(slots=True, frozen=True)
class Laws:
    """One worker's laws. `latency` includes what serving adds to the `engine`'s own time; `edge` is for simulation.

    `rounds` and `round_memory` are those of a worker that keeps its rows; without measured rounds, those of batches.
    Without a measured link to host memory there is no `swap` and there are no `host_tokens`. `joining` is how rows join
    the engine's running batch where that is one padded slab; None: its memory is paged. `slots` rows run at once.
    """

    latency: WithOverhead
    engine: SegmentedLaw
    memory: MemoryLaw
    edge: MemoryEdge
    swap: LinearSwap | None = None
    host_tokens: int = 0
    joining: Joining | None = None
    slots: int = NO_LIMIT
    rounds: LatencyLaw = field(kw_only=True)
    round_memory: MemoryLaw = field(kw_only=True)


def laws_from_fit(fit: Fit) -> Laws:
    """The laws that a fit file holds. `InputError` where its segments or rules are out of order."""
    prefill, decode = tuple(fit.prefill.segments), tuple(fit.decode.segments)
    engine = SegmentedLaw(prefill, decode, fit.engine.prefill_emits_token)
    latency = WithOverhead(engine, fit.overhead.batch_s, fit.overhead.stretch)
    memory, edge = memory_from_fit(fit.memory)
    swap, host_tokens = swap_from_fit(fit.swap, fit.memory.kv_bytes_per_token) if fit.swap else (None, 0)
    joining, slots = fit.engine.joining, fit.engine.max_rows or NO_LIMIT
    in_rounds = replace(engine, padded=joining is not None)
    rounds: LatencyLaw = latency
    round_memory = memory
    if fit.engine.is_server:  # its laws are of what clients see: HTTP, which whole slices add once, is in each already
        rounds = in_rounds
    elif fit.rounds:
        rounds = law_of_rounds(in_rounds, fit.rounds)
        round_memory = ZetaMemory(fit.memory.capacity_tokens, fit.rounds.usable_share)
    measured = latency, engine, memory, edge, swap, host_tokens, joining, slots
    return Laws(*measured, rounds=rounds, round_memory=round_memory)


def memory_from_fit(fit: MemoryFit) -> tuple[MemoryLaw, MemoryEdge]:
    """The law that a scheduler asks, and the edge that a simulated worker meets."""
    if fit.form == "rules":
        rules = tuple(fit.rules)
        return RuleMemory(rules), RuleEdge(rules, fit.zeta_std)
    law = ZetaMemory(fit.capacity_tokens, fit.zeta, fit.workspace)
    return law, ZetaEdge(fit.capacity_tokens, fit.zeta, fit.zeta_std, fit.workspace)
