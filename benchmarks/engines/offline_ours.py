"""Systems of `offline_throughput` that run here: our engines under our scheduler, and transformers.

    python -m benchmarks.engines.offline_ours FOLDER SYSTEM

Started by `offline_throughput`, which lists the systems. All requests wait from the start, and the
scheduler decides in the loop, in this process. It knows each request's limit, 128 tokens, and not
its length, which only the engine gets, as `end_after`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.utils import logging

from benchmarks.common.command import read_words
from benchmarks.engines.offline_child import Outputs, Serve, answer
from benchmarks.engines.offline_work import LONGEST_OUTPUT, LONGEST_PROMPT, STATIC_ROWS, Work
from toolkit.engines.protocol import SamplingParams, StepOutput
from toolkit.engines.rebatch_engine import RebatchEngine
from toolkit.estimators.laws import bilinear_law
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.recipe import EngineSpec, HardwareSpec, ModelSpec
from toolkit.sched.policies import make_policy
from toolkit.sched.policies.parameters import Value
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Batch, BatchResult, Request, RoundResult, Worker
from toolkit.serve.driver import ResidentRows
from toolkit.serve.live import ActiveRequest, GenerationRequest

# the policies here use no law: a clock that counts decode steps
LAW = bilinear_law((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 1.0), prefill_emits_token=True)


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

    def serve(self, count: int) -> Outputs:
        """One run: submit all, then tick and run until no job is left."""
        work = self.work
        name, _, rows = self.system.partition("-")
        parameters: dict[str, Value] = {"batch_size": int(rows)} if rows else {}
        policy = make_policy("sequence" if name == "static" else "past-future", parameters)
        worker = Worker(0, LAW, ZetaMemory(work.kv_tokens), joining=self.engine.facts.joining)
        scheduler = Scheduler(policy, [worker])
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


class Generate:
    """transformers' `generate`, greedy: one request after the other, over every `sample`-th one."""

    def __init__(self, folder: Path) -> None:
        self.work = Work.read(folder)
        self.model = _transformers_model(folder, self.work.threads)

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


def load() -> Serve:
    where, system = read_words(__doc__, "FOLDER", "SYSTEM")
    folder = Path(where)
    name, _, rows = system.partition("-")
    if name == "generate":
        return Generate(folder).serve
    if name == "generate_batch":
        return GenerateBatch(folder, int(rows)).serve
    return Ours(folder, system).serve


if __name__ == "__main__":
    answer(load)
