"""T_serve, how long a static batch takes: what queues are estimated by and loads are counted in."""

from __future__ import annotations

from toolkit.sched.protocols import LatencyLaw


def serving_s(law: LatencyLaw, batch_size: int, input_length: int, steps: int) -> float:
    """T_serve(N, L, S), SCLS Eq. 1: a prefill, and the decode steps for the tokens that it does not give."""
    decode_steps = steps - law.prefill_emits_token
    return law.prefill_s(batch_size, input_length) + law.decode_s(batch_size, input_length, decode_steps)
