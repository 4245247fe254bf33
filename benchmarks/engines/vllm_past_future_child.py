"""The side of `vllm_past_future` that runs in vLLM's Python: one engine, schedulers in turns.

    VLLM-PYTHON -m benchmarks.engines.vllm_past_future_child FOLDER

Started by `vllm_past_future`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.command import read_words
from benchmarks.engines.vllm_alone import ENVIRONMENT, bind
from toolkit.metrics import Served, latencies, meets_sla


class Bench:
    """vLLM with a model, idle between runs; `core` holds its scheduler."""

    def __init__(self, folder: Path, work: dict[str, Any]) -> None:
        from vllm import LLM

        self.work = work
        llm = LLM(
            str(folder / "model"),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=768,
            max_num_seqs=64,
            block_size=work["block_size"],
            # vLLM never uses one of the blocks
            num_gpu_blocks_override=work["kv_tokens"] // work["block_size"] + 1,
            enforce_eager=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            async_scheduling=False,
        )
        self.engine = llm.llm_engine
        self.core = self.engine.engine_core.engine_core

    def fresh(self, kind: type) -> Any:
        """A scheduler of this class in its first state, which replaces the last one."""
        last = self.core.scheduler
        self.core.scheduler = kind(
            vllm_config=last.vllm_config,
            kv_cache_config=last.kv_cache_config,
            structured_output_manager=self.core.structured_output_manager,
            block_size=last.block_size,
            hash_block_size=last.hash_block_size,
            log_stats=False,
        )
        return self.core.scheduler

    def run(
        self, scheduler: Any, first: int, last: int
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Serve the requests from `first` to before `last`; the metrics, and the tokens."""
        requests = last - first
        preempted: list[int] = []
        preempt = scheduler._preempt_request

        def counted(request: Any, *args: Any, **kwargs: Any) -> None:
            preempted.append(request.num_computed_tokens)
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = counted
        scheduler.deciding_s = 0.0  # counted by ours; vLLM's own has no such counter
        sent = np.zeros(requests)
        times: list[list[float]] = [[] for _ in range(requests)]
        tokens: list[list[int]] = [[] for _ in range(requests)]
        steps = 0
        stepping_s = 0.0
        following = 0
        start = time.perf_counter()
        while following < min(requests, self.work["clients"]):
            sent[following] = self._send(first + following) - start
            following += 1
        while self.engine.has_unfinished_requests():
            before = time.perf_counter()
            outputs = self.engine.step()
            now = time.perf_counter()
            stepping_s += now - before
            steps += 1
            for output in outputs:
                number = int(output.request_id) - first
                new = output.outputs[0].token_ids
                tokens[number].extend(new)
                times[number].extend([now - start] * len(new))
                if output.finished and following < requests:
                    sent[following] = self._send(first + following) - start
                    following += 1
        seconds = time.perf_counter() - start
        served = Served(
            arrival_s=sent,
            first_token_s=np.array([one[0] for one in times]),
            finish_s=np.array([one[-1] for one in times]),
            output_tokens=np.array([len(one) for one in tokens]),
            max_gap_s=np.array([max(np.diff(one), default=0.0) for one in times]),
            ok=np.ones(requests, dtype=bool),
        )
        found = self._served_metrics(served, seconds) | {
            "preemptions": len(preempted),
            "recomputed_tokens": sum(preempted),
            "deciding_us": 1e6 * scheduler.deciding_s / steps,
            "step_ms": 1e3 * stepping_s / steps,
        }
        return found, tokens

    def _served_metrics(self, served: Served, seconds: float) -> dict[str, float]:
        """Rates, and mean latencies."""
        good = meets_sla(
            served, {"ttft_p99_s": self.work["ttft_s"], "mtpot_p99_s": self.work["mtpot_s"]}
        )
        means = {f"{name}_mean_s": float(of.mean()) for name, of in latencies(served).items()}
        return means | {
            "tokens_per_s": int(served.output_tokens.sum()) / seconds,
            "goodput": int(served.output_tokens[good].sum()) / seconds,
            "attained_percent": 100.0 * float(good.mean()),
        }

    def _send(self, number: int) -> float:
        """Send a request that allows the full limit; the schedulers do not know where it ends
        earlier.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=self.work["limit"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        now = time.perf_counter()
        self.engine.add_request(
            str(number), TokensPrompt(prompt_token_ids=self.work["prompts"][number]), sampling
        )
        queued = self.core.scheduler.requests
        queued[next(reversed(queued))].max_tokens = self.work["outputs"][number]
        return now


def main() -> None:
    folder = Path(*read_words(__doc__, "FOLDER"))
    work = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    os.environ |= ENVIRONMENT | bind(work["threads"])
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "LLMCTL_VLLM_POLICY": work["policy"]}
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    bench = Bench(folder, work)
    # imported as in a server: after vLLM has loaded the model
    from toolkit.backends.vllm.scheduler import LlmctlScheduler

    systems = {"vLLM's own": Scheduler, work["policy"]: LlmctlScheduler}
    total = len(work["outputs"])
    for kind in systems.values():
        bench.run(bench.fresh(kind), 0, min(total, 8))
    runs = []
    outputs = []
    for repeat in range(work["repeats"]):
        for name in list(systems)[:: 1 if repeat % 2 == 0 else -1]:
            scheduler = bench.fresh(systems[name])
            if work["warm"]:
                bench.run(scheduler, 0, work["warm"])
            found, tokens = bench.run(scheduler, work["warm"], total)
            runs.append({"system": name} | found)
            outputs.append(tokens)
            print(name, found, file=sys.stderr)
    model = bench.core.model_executor.driver_worker.worker.model_runner.model
    result = {
        "version": vllm.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "capacity_tokens": (bench.core.scheduler.cache_config.num_gpu_blocks - 1)
        * work["block_size"],
        "systems": list(systems),
        "runs": runs,
        "compared": total - work["warm"],
        "equal": sum(
            all(tokens == same[0] for tokens in same) for same in zip(*outputs, strict=True)
        ),
    }
    (folder / "runs.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
