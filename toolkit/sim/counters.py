"""What is counted in a simulation besides the requests' times: batches, padding, memory, how busy the workers were."""

from __future__ import annotations

import statistics

from toolkit.sim.ledger import Ledger


def counters(ledger: Ledger, refused: int, usable_tokens: int) -> dict[str, float]:
    """What is counted besides the requests' times, by name with the unit in it; of all policies, but `rounds`.

    A batch of a continuous worker is a prefill of those who enter; its size is the mean number of residents.
    """
    batches, requests, steps = max(ledger.batches, 1), max(sum(ledger.ok), 1), max(ledger.decoding_steps, 1)
    found = {
        "refused": float(refused),
        "unfinished": float(len(ledger.ok) - sum(ledger.ok) - refused),
        "batches": float(ledger.batches),
        "batch_size_mean": ledger.row_steps / steps if ledger.rounds else ledger.rows / batches,
        "slices_per_request": ledger.rows / requests,
        "pad_tokens_per_request": ledger.pad_tokens / requests,
        "invalid_tokens_per_request": ledger.invalid_tokens / requests,
        "early_return_percent": 100.0 * ledger.early_returns / batches,
        "decoding_steps": float(ledger.decoding_steps),
        "oom_percent": 100.0 * ledger.oom_batches / (batches + ledger.oom_batches),
        "evicted_percent": 100.0 * ledger.evictions / requests,
        "consumed_memory_percent": 100.0 * ledger.memory_token_steps / steps / usable_tokens,
        "peak_memory_percent": 100.0 * ledger.peak_tokens / usable_tokens,
        "extrapolated_batches_percent": 100.0 * ledger.extrapolated / max(ledger.rounds or ledger.batches, 1),
    }
    if ledger.rounds:
        found["rounds"] = float(ledger.rounds)
        found["swaps_out"] = float(ledger.swaps_out)
        found["swaps_in"] = float(ledger.swaps_in)
        found["swapped_tokens"] = float(ledger.swapped_tokens)
        found["swap_wait_s"] = ledger.swap_wait_s
        found["peak_host_tokens"] = float(ledger.peak_host_tokens)
        found["rerouted_percent"] = 100.0 * ledger.reroutes / requests
    if ledger.attempts:
        future = ledger.future_token_attempts / ledger.attempts
        found["future_required_memory_percent"] = 100.0 * future / usable_tokens
    if ledger.token_gaps is not None:
        found |= ledger.token_gaps.summary()
    return found | _of_workers(ledger)


def _of_workers(ledger: Ledger) -> dict[str, float]:
    """How evenly, and how much, the workers worked; CT STD is the SCLS paper's."""
    makespan_s = max(ledger.completed_s, default=0.0)
    shares = [100.0 * busy_s / makespan_s if makespan_s else 0.0 for busy_s in ledger.busy_s]
    return {
        "completion_time_std_s": statistics.pstdev(ledger.completed_s),
        "utilisation_percent": statistics.fmean(shares),
    } | {f"utilisation_worker_{k}_percent": share for k, share in enumerate(shares)}
