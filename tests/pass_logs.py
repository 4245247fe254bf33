"""Logs of passes that a simulated vLLM would write, by a known law."""

import numpy as np

from toolkit.files.iterations import (
    IterationLogHeader,
    LoggedPass,
    LoggedRow,
    shape_of_rows,
    to_line,
)
from toolkit.laws.passes import PassLaw
from toolkit.sched.policies.vllm import VllmPolicy
from toolkit.sched.types import Request
from toolkit.sim.kv_cache import PagedRow
from toolkit.sim.vllm import VllmScheduler

LAW = PassLaw(
    {"pass": 4e-3, "row": 3e-4, "chunk": 5e-4, "cached": 1e-6, "attended": 1e-7, "host": 2e-4},
    (1e-4,),
    (0,),
)
BLOCKS = 400
BLOCK_TOKENS = 32


def header(**more) -> IterationLogHeader:
    given = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "block_tokens": BLOCK_TOKENS,
        "blocks": BLOCKS,
        "enable_chunked_prefill": True,
        "prefix_caching": True,
        "async_scheduling": False,
        "policy": "fcfs",
        "version": "0.32.0",
        "model_type": "llama",
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 512,
        "vocab_size": 512,
        "kv_bytes_per_token": 4096,
        "executor": "uni",
    }
    return IterationLogHeader(**(given | more))


def one_pass(start_s: float, end_s: float, rows: list[LoggedRow], **more) -> LoggedPass:
    """A pass of these rows, alone."""
    given = {"step": 1, "preempted": [], "ended": [], "waiting": 0, "free_blocks": 9}
    return LoggedPass(start_s=start_s, end_s=end_s, rows=rows, **(given | more))


def requests(count: int, rate: float, seed: int = 0):
    """(arrival, prompt, output) of each, at random."""
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(rng.exponential(1.0 / rate, count))
    return list(
        zip(
            arrival.tolist(),
            rng.integers(4, 300, count).tolist(),
            rng.integers(2, 120, count).tolist(),
            strict=True,
        )
    )


def passes(asked, *, law=LAW, noise=0.02, seed=0, start_s=1000.0) -> list[LoggedPass]:
    """The passes that serve these requests, with times by `law`."""
    rng = np.random.default_rng(seed)
    scheduler = VllmScheduler(VllmPolicy(max_num_seqs=64, max_num_batched_tokens=512), BLOCKS, 32)
    now_s = start_s
    arrived = 0
    made: list[LoggedPass] = []
    while True:
        came = []
        while arrived < len(asked) and start_s + asked[arrived][0] <= now_s:
            at_s, prompt, output = asked[arrived]
            scheduler.add(PagedRow(arrived, prompt, output))
            came.append(Request(f"r{arrived}", start_s + at_s, prompt, output))
            arrived += 1
        plan = scheduler.schedule()
        if not plan.rows:
            if arrived == len(asked):
                return made
            now_s = start_s + asked[arrived][0]
            continue
        rows = [LoggedRow(f"r{n}", had, new, asked[n][1]) for n, had, new in scheduler.rows()]
        seconds = law.forward_s(shape_of_rows(rows, law.window)) * (
            1.0 + noise * abs(rng.standard_normal())
        )
        ended = scheduler.commit().ended
        made.append(
            LoggedPass(
                step=len(made) + 1,
                start_s=now_s,
                end_s=now_s + seconds,
                rows=rows,
                preempted=[f"r{row.number}" for row in plan.preempted],
                ended=[f"r{row.number}" for row in ended],
                waiting=len(scheduler.waiting),
                free_blocks=scheduler.pool.free,
                arrived=came,
            )
        )
        scheduler.settle()
        now_s += seconds + law.after_s(plan.rows)


def write(path, made, **more) -> None:
    """A log of these passes."""
    lines = [to_line(header(**more)), *map(to_line, made)]
    path.write_bytes(b"".join(lines))
