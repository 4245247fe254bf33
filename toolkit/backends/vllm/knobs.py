"""The settings that a scheduler inside vLLM takes between two passes, without dropping a request.

Knobs (`toolkit.backends.vllm.settings`) are called like vLLM's flags; knobs of llmctl's policy
inside it are called `policy.NAME`. Bounds follow from the start: buffers, CUDA graphs and the
profile of memory were made for its values, and a lower value uses a part of them. A request that
was accepted is always served: fewer requests at once let running ones end, and no bound lets a
prompt wait for ever.

`LiveSettings` holds the knobs of one scheduler: vLLM's own, or llmctl's class inside it.
`NEEDS_RESTART` says why other settings are none.
"""

from __future__ import annotations

from typing import Any

from toolkit.backends.vllm.settings import Knob, Knobs, knobs_of_policy
from toolkit.sched.policies.parameters import Parameter
from toolkit.sched.policies.vllm import ROWS, TOKENS

POLICIES = ("fcfs", "priority")  # vLLM's `SchedulingPolicy`
NEEDS_RESTART = {
    "chunked_prefill": "a restart: whether prompts are cut decides which requests are accepted",
    "prefix_caching": "a restart: blocks that were cached without hashes cannot be found",
    "block_size": "a restart: the KV cache is laid out in such blocks",
    "num_gpu_blocks_override": "a restart: the KV cache is allocated at the start",
    "gpu_memory_utilization": "a restart: the KV cache is allocated at the start",
    "kv_cache_memory_bytes": "a restart: the KV cache is allocated at the start",
    "max_model_len": "a restart: buffers are as long as the longest request",
    "async_scheduling": "a restart: the engine's loop is chosen at the start",
    "tensor_parallel_size": "a restart: each GPU loads its part of the weights",
    "data_parallel_size": "a restart: each engine is a process",
    "cudagraph_capture_sizes": "a restart: CUDA graphs are captured at the start",
}


class LiveSettings(Knobs):
    """The knobs of a scheduler inside vLLM, which has just been made."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__([*_of_vllm(scheduler), *_of_policy(scheduler)], NEEDS_RESTART)


def _of_vllm(scheduler: Any) -> list[Knob]:
    """The knobs of vLLM's own code, which llmctl's class runs, too."""
    config = scheduler.scheduler_config
    chunked = bool(config.enable_chunked_prefill)
    most_rows = scheduler.max_num_running_reqs
    most_tokens = scheduler.max_num_scheduled_tokens
    # In a chunk of a model with states vLLM rounds to its blocks: such a model keeps its values.
    rounds_chunks = bool(getattr(scheduler, "need_mamba_block_aligned_split", False))
    knobs = []
    if hasattr(scheduler, "max_num_active_reqs"):
        knobs.append(
            Knob(
                ROWS,
                int,
                _limits(1, most_rows, "the most requests that run at once"),
                lambda: int(scheduler.max_num_active_reqs),
                lambda value: _set_rows(scheduler, value),
                "a restart with a larger --max-num-seqs: buffers and graphs are made for it",
            )
        )
    # every running request may need a token, and as many more as there are drafts
    drafts = getattr(scheduler, "num_spec_tokens", 0)
    least_tokens = min(most_rows * (1 + drafts), most_tokens)
    if not chunked or rounds_chunks:
        least_tokens = most_tokens
    knobs.append(
        Knob(
            TOKENS,
            int,
            _limits(
                least_tokens,
                most_tokens,
                "the most new tokens in a pass; at least a token for each of --max-num-seqs, and "
                "all of a prompt without chunked prefill",
            ),
            lambda: int(scheduler.max_num_scheduled_tokens),
            lambda value: setattr(scheduler, "max_num_scheduled_tokens", value),
            "a restart with a larger --max-num-batched-tokens: buffers are made for it",
        )
    )
    if chunked and not rounds_chunks:
        longest = scheduler.max_model_len
        knobs.append(
            Knob(
                "long_prefill_token_threshold",
                int,
                _limits(
                    0,
                    longest,
                    "the most tokens of one prompt in a pass while others are there; 0: no limit",
                ),
                lambda: int(config.long_prefill_token_threshold),
                lambda value: setattr(config, "long_prefill_token_threshold", value),
            )
        )
    knobs.append(
        Knob(
            "watermark",
            float,
            _limits(0.0, 0.99, "share of the blocks that stay free when one more is admitted"),
            lambda: float(config.watermark),
            lambda share: _set_watermark(scheduler, share),
        )
    )
    knobs.append(
        Knob(
            "scheduler_reserve_full_isl",
            bool,
            _limits(0, 1, "whether a request is admitted only if its whole input fits"),
            lambda: bool(scheduler.scheduler_reserve_full_isl),
            lambda value: setattr(scheduler, "scheduler_reserve_full_isl", value),
        )
    )
    if not hasattr(scheduler, "steps"):  # llmctl's class has a policy of its own
        doc = "in which order requests are admitted, and which are preempted"
        knobs.append(
            Knob(
                "policy",
                str,
                Parameter(0, 0, None, False, doc, POLICIES),
                lambda: str(scheduler.policy.value),
                lambda value: _set_policy(scheduler, value),
            )
        )
    return knobs


def _limits(low: float, high: float, doc: str) -> Parameter:
    return Parameter(low, high, None, False, doc)


def _set_rows(scheduler: Any, rows: int) -> None:
    scheduler.max_num_active_reqs = rows
    steps = getattr(scheduler, "steps", None)
    if steps is not None:
        steps.configure({}, rows)


def _set_watermark(scheduler: Any, share: float) -> None:
    blocks = scheduler.kv_cache_config.num_blocks
    scheduler.kv_cache_manager.watermark_blocks = int(share * blocks)
    scheduler.scheduler_config.watermark = share


def _set_policy(scheduler: Any, name: str) -> None:
    """Move the waiting requests into queues of another order. First come, first served is the order
    of arrival: a request that was preempted came before all that wait.
    """
    from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

    policy = SchedulingPolicy(name)
    for queue_name in ("waiting", "kv_holding_waiting"):
        before = getattr(scheduler, queue_name, None)
        if before is None:
            continue
        queue = create_request_queue(policy)
        for request in sorted(before, key=lambda one: one.arrival_time):
            queue.add_request(request)
        setattr(scheduler, queue_name, queue)
    scheduler.policy = policy
    scheduler.scheduler_config.policy = name


def _of_policy(scheduler: Any) -> list[Knob]:
    """The parameters of llmctl's policy inside vLLM, as far as they can change."""
    steps = getattr(scheduler, "steps", None)
    return [] if steps is None else knobs_of_policy(steps.scheduler, steps.configure)
