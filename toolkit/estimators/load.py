"""From a fit file to its laws: what the simulator, the tuner and the server load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from toolkit.engine_traits import traits_of
from toolkit.estimators.laws import (
    LinearLaw,
    LinearSwap,
    RoundsByPass,
    law_of_rounds,
    swap_from_fit,
)
from toolkit.estimators.memory import RuleMemory, ZetaMemory
from toolkit.files.fit import Fit
from toolkit.files.modelled import refuse_fit
from toolkit.sched.protocols import MemoryLaw
from toolkit.sched.types import LatencyLaw


@dataclass(slots=True, frozen=True, kw_only=True)
class Laws:
    """The laws of one worker."""

    latency: LinearLaw  # of batches, with what serving adds to the engine's own time
    memory: ZetaMemory | RuleMemory
    swap: LinearSwap | None  # to host memory; None: it was not measured
    host_tokens: int  # of KV cache that host memory holds; 0 without `swap`
    # of a server's time to first token that delay no other request, in rounds: HTTP and text
    front_s: float
    # of a worker that keeps its rows; without measured rounds those of batches
    rounds: LatencyLaw
    round_memory: MemoryLaw


def laws_from_fit(fit: Fit) -> Laws:
    """Return the laws that a fit file holds. Raises InputError for a server that is not
    modelled.
    """
    refuse_fit(fit)
    engine = LinearLaw(fit.prefill.law, fit.decode.law, fit.engine.prefill_emits_token)
    # Workers that run at the same time slow one another down, and each batch is dispatched.
    latency = replace(engine.times(fit.overhead.stretch), batch_s=fit.overhead.batch_s)
    memory: ZetaMemory | RuleMemory = ZetaMemory(
        fit.memory.capacity_tokens, fit.memory.zeta, fit.memory.workspace
    )
    if fit.memory.form == "rules":
        memory = RuleMemory(tuple(fit.memory.rules))
    swap, host_tokens = (
        swap_from_fit(fit.swap, fit.memory.kv_bytes_per_token) if fit.swap else (None, 0)
    )
    in_rounds = replace(engine, padded=fit.engine.joining is not None)
    rounds: LatencyLaw = latency
    round_memory: MemoryLaw = memory
    front_s = 0.0
    if traits_of(fit.engine.engine).timed_by_pass:
        # The engine itself timed its passes, and its front was measured apart from them.
        rounds = in_rounds
        if fit.steps is not None:
            front_s = fit.steps.front_s
            if fit.steps.law.graphs is not None:
                rounds = RoundsByPass(fit.steps.law)
    elif fit.engine.is_server:
        # A server's laws describe what clients measure. They include HTTP in every step already,
        # which a slice adds only once.
        rounds, front_s = without_front(in_rounds)
    elif fit.rounds:
        rounds = law_of_rounds(in_rounds, fit.rounds)
        round_memory = ZetaMemory(fit.memory.capacity_tokens, fit.rounds.usable_share)
    return Laws(
        latency=latency,
        memory=memory,
        swap=swap,
        host_tokens=host_tokens,
        front_s=front_s,
        rounds=rounds,
        round_memory=round_memory,
    )


def without_front(seen: LinearLaw) -> tuple[LinearLaw, float]:
    """Split a server's law as clients measure it into the engine's own law and the seconds of HTTP
    and text.

    A first token takes both, but only the engine's part delays rows that decode. A pass that
    computes a prompt costs as much as a decode step of one row, and more for each prompt token. So
    the time of a prompt of length 0, less that of such a step, belongs to the front. The front's
    time is assumed to be equal for all requests, and to cover the way in and out.
    """
    pass_s = seen.prefill.terms["pass"]
    front_s = min(max(seen.prefill_s(1, 0.0) - seen.decode_s(1, 0.0, 1), 0.0), pass_s)
    return replace(seen, prefill=seen.prefill.with_terms({"pass": pass_s - front_s})), front_s
