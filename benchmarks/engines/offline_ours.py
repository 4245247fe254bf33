"""Systems of `offline_throughput` that run here: our engines under our scheduler, and transformers.

    python -m benchmarks.engines.offline_ours FOLDER SYSTEM

Started by `offline_throughput`, which lists the systems. All requests wait from the start, and the
scheduler decides in the loop, in this process. It knows each request's limit, 128 tokens, and not
its length, which only the engine gets, as `end_after`. SCLS needs laws to cut its batches: they are
fitted to a dozen timings that precede its first run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from benchmarks.common.command import read_words
from benchmarks.engines.offline_child import Outputs, Serve, answer
from benchmarks.engines.offline_work import LONGEST_OUTPUT, LONGEST_PROMPT, STATIC_ROWS, Work
from toolkit.engines.protocol import SamplingParams, StepOutput
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.estimators.laws import SegmentedLaw, bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Request, RoundResult, Worker
from toolkit.serve.driver import ResidentRows
from toolkit.serve.live import ActiveRequest, GenerationRequest

SLICE = 32  # tokens
# for policies that use no law: a clock that counts decode steps
STEPS = bilinear_law((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0), prefill_emits_token=True)
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "slices": ("slice", {"slice_tokens": SLICE}),
    "rebatch": ("past-future", {}),
    "rebatch-slab": ("past-future", {}),
}


class Ours:
    """An engine, and a new scheduler for each run."""

    def __init__(self, folder: Path, system: str) -> None:
        self.work = Work.read(folder)
        self.system = system
        source = str(folder / "model")
        model = ModelSpec(source=source, dtype="float32", max_model_len=512, tokenizer="model")
        spec = EngineSpec(
            name="rebatch",
            threads=self.work.threads,
            kv_cache_memory_mib=4096.0,
            kv_layout="rows" if system == "rebatch" else "slab",
        )
        self.engine = RebatchEngine(model, spec, HardwareSpec(device="cpu", name="any CPU"))
        self.engine.ledger.budget_bytes = self.engine.slice_bytes(
            STATIC_ROWS, LONGEST_PROMPT, LONGEST_OUTPUT
        )
        self.law: SegmentedLaw | None = None

    @property
    def facts(self) -> Mapping[str, Any]:
        budget_mib = (self.engine.ledger.budget_bytes or 0) / (1 << 20)
        return {"budget_mib": budget_mib, "parameters": self.engine.facts.parameters}

    def serve(self, count: int) -> Outputs:
        """One run: submit all, then tick and run until no job is left."""
        work = self.work
        law = self.law
        if law is None:
            law = self.law = self._law() if self.system == "slices" else STEPS
        if self.system.startswith("static"):
            name = "sequence"
            parameters = {"batch_size": int(self.system.partition("-")[2])}
        else:
            name, parameters = POLICIES[self.system]
        worker = Worker(0, law, ZetaMemory(work.kv_tokens), joining=self.engine.facts.joining)
        scheduler = Scheduler(make_policy(name, parameters), [worker])
        free = SamplingParams(ignore_eos=True)
        self.requests: dict[str, ActiveRequest] = {}
        none = cast(Any, None)
        for index in range(count):
            name = str(index)
            prompt = tuple(work.prompts[index])
            end = work.outputs[index]
            request = GenerationRequest(name, prompt, LONGEST_OUTPUT, free, end_after=end)
            self.requests[name] = ActiveRequest(request, none, none, 0.0)
            scheduler.submit(Request(name, 0.0, len(prompt), LONGEST_OUTPUT), 0.0)
        kept = ResidentRows()
        start = time.perf_counter()
        while scheduler.jobs:
            for batch in scheduler.tick(time.perf_counter() - start):
                result = self._round(kept, batch) if batch.keep_cache else self._slice(batch)
                scheduler.complete(result, time.perf_counter() - start)
        return {int(name): active.tokens for name, active in self.requests.items()}

    def _round(self, kept: ResidentRows, batch: Batch) -> RoundResult:
        def receive(step: StepOutput) -> bool:
            ended = {number for number, _ in step.ended}
            for number, token in zip(step.rows, step.tokens, strict=True):
                kept.receive(number, 1, ended=number in ended).tokens.append(token)
            return True

        plan = kept.begin(batch, self.requests.__getitem__)
        return kept.result(batch, self.engine.run_round(plan, receive))

    def _slice(self, batch: Batch) -> BatchResult:
        requests = [self.requests[job.request_id] for job in batch.jobs]
        rows = [active.row() for active in requests]
        output = self.engine.run_slice(rows, batch.steps, lambda _: True)
        for active, tokens in zip(requests, output.tokens, strict=True):
            active.tokens += tokens
        counts = tuple(len(tokens) for tokens in output.tokens)
        return BatchResult(batch.batch_id, 0, counts, tuple(map(bool, output.finish)))

    def _law(self) -> SegmentedLaw:
        """Eq. 3 and 4 of the SCLS paper, least squares over relative errors, the best of three
        timings per point.
        """
        points = [(1, 32), (1, 256), (8, 32), (8, 256), (32, 32), (32, 192)]
        terms = np.array([(rows * length, rows, length, 1.0) for rows, length in points])
        laws: list[tuple[float, float, float, float]] = []
        for timed in (self.engine.time_prefill, self.engine.time_decode):
            times = [[timed(*point, time.perf_counter) for _ in range(3)] for point in points]
            seconds = np.min(times, axis=1)
            found = np.linalg.lstsq(terms / seconds[:, None], np.ones(len(points)), rcond=None)[0]
            per_nl, per_n, per_l, flat = found.clip(min=0.0).tolist()
            laws.append((per_nl, per_n, per_l, flat))
        return bilinear_law(laws[0], laws[1], prefill_emits_token=True)


class Generate:
    """transformers' `generate`, greedy: one request after the other, over every `sample`-th one."""

    def __init__(self, folder: Path) -> None:
        self.work = Work.read(folder)
        self.model = _transformers_model(folder, self.work.threads)
        self.facts = {"requests": len(range(0, len(self.work.prompts), self.work.sample))}

    def serve(self, count: int) -> Outputs:
        found = {}
        with torch.inference_mode():
            for index in range(0, count, self.work.sample):
                ids = torch.tensor([self.work.prompts[index]])
                tokens = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=self.work.outputs[index],
                    do_sample=False,
                )
                found[index] = tokens[0, ids.shape[1] :].tolist()
        return found


class GenerateBatch:
    """The parts of `generate_batch`, with a length for each request, which `generate_batch` itself
    does not accept.
    """

    PAGE = 32

    def __init__(self, folder: Path, rows: int) -> None:
        self.work = Work.read(folder)
        self.model = _transformers_model(folder, self.work.threads)
        self.generation = GenerationConfig(
            do_sample=False, eos_token_id=None, max_new_tokens=LONGEST_OUTPUT
        )
        self.config = ContinuousBatchingConfig(
            page_size=self.PAGE,
            num_blocks=self.work.kv_tokens // self.PAGE,
            max_batch_tokens=512,
            max_requests_per_batch=rows or None,
            allow_block_sharing=False,
        )
        self.facts = {"num_blocks": self.config.num_blocks, "page_size": self.PAGE, "rows": rows}

    def serve(self, count: int) -> Outputs:
        found: dict[int, list[int]] = {}
        work = self.work
        with self.model.continuous_batching_context_manager(
            self.generation, continuous_batching_config=self.config
        ) as one:
            for index in range(count):
                request = {"request_id": str(index), "max_new_tokens": work.outputs[index]}
                one.add_request(work.prompts[index], **request, eos_token_id=-1)
            while len(found) < count:
                result = one.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[int(result.request_id)] = result.generated_tokens
                elif result is None and not one.is_running():
                    raise RuntimeError("generate_batch ended early")
        return found


def _transformers_model(folder: Path, threads: int) -> Any:
    logging.set_verbosity_error()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def load() -> tuple[Mapping[str, Any], Serve]:
    where, system = read_words(__doc__, "FOLDER", "SYSTEM")
    folder = Path(where)
    if system == "generate":
        one: Any = Generate(folder)
    elif system.startswith("generate_batch"):
        one = GenerateBatch(folder, int(system.partition("-")[2] or 0))
    else:
        one = Ours(folder, system)
    return one.facts, one.serve


if __name__ == "__main__":
    answer(load)
