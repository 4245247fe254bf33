"""A whole profile: load the engine, say what will be done, probe the memory edge, measure the grid, run slices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from toolkit.errors import EngineError
from toolkit.files.io import Head, head
from toolkit.files.profile import (
    MEASURED_SECTIONS,
    EngineFacts,
    FailedPoint,
    MemoryPoint,
    Profile,
    SlicePoint,
    StepsProfile,
)
from toolkit.files.recipe import Recipe
from toolkit.profiling.bench import Bench, PassBench, RoundBench, Unmeasurable
from toolkit.profiling.grid import GridPoint, Shape, grid, mix_points, slice_shapes, traffic_points
from toolkit.profiling.journal import Conditions, Journal, Result, Visit, of_kind
from toolkit.profiling.measure import grid_points, measure, visits_left
from toolkit.profiling.memory import TIME_LIMIT_S, probe_memory, probe_shapes, safe_tokens
from toolkit.profiling.plan import Plan, Work, estimate_s, skip_reasons
from toolkit.profiling.process import busy_neighbours, engine_process
from toolkit.profiling.rounds import RoundsStage
from toolkit.profiling.slices import run_slices
from toolkit.sched.policies import REBATCHING
from toolkit.workers.gpus import require_gpu
from toolkit.workers.protocol import Workers

MakeWorkers = Callable[[Recipe], Workers]


class ProfileBench(Bench, Protocol):
    """A bench that knows the workers which run whole slices."""

    def stop(self) -> None:
        """Nothing more is asked of it; its memory is the workers'."""
        ...

    def workers(self, recipe: Recipe) -> Workers:
        """What the server, or whoever serves, will run slices on."""
        ...


class Watch(Protocol):
    """Who is told what happens: a progress bar, or a test."""

    def planned(self, plan: Plan) -> None:
        """The engine is loaded, and this is what will be done."""
        ...

    def advanced(self, text: str) -> None:
        """One of `Plan.steps` is done; its result is on disk."""
        ...


def journal_path(out: Path) -> Path:
    """Where the results of an unfinished profile are kept: beside the profile."""
    return out.with_name(f"{out.name}.partial")


def profile(
    recipe: Recipe,
    source: Path,
    out: Path,
    watch: Watch,
    *,
    fresh: bool = False,
    make_workers: MakeWorkers | None = None,
) -> Profile:
    """Measure what `recipe`, read from `source`, describes. Goes on from the journal of an earlier, interrupted run.

    `out` is where the profile will be written, by the caller, who then removes `journal_path(out)`; `fresh` sets an
    earlier journal aside. Points that cannot be measured are in `Profile.failed`.

    Raises `InputError` for a recipe that the engine refuses or a journal that cannot be written, and `EngineError`
    where a recipe for a GPU finds none, the engine cannot be loaded or keeps dying, or nothing of the grid can be
    measured.
    """
    require_gpu([recipe])
    started_s = time.perf_counter()
    with _bench(recipe) as bench:
        load_s = time.perf_counter() - started_s
        made_from = head(inputs={"recipe": source}, device=bench.facts.device)
        with Journal(journal_path(out), _conditions(made_from, bench.facts), fresh=fresh) as journal:
            session = _Session(recipe, bench.facts, journal, watch)
            watch.planned(session.plan(bench, load_s))
            session.probe_memory(bench)
            session.probe_admission(bench)
            session.keep_limits(bench)
            session.measure(bench)
            bench.stop()  # its memory is the workers' now
            session.run_slices(make_workers or bench.workers)
            session.run_sequences(make_workers or bench.workers)
            return session.result(made_from)


def _bench(recipe: Recipe) -> AbstractContextManager[ProfileBench]:
    if recipe.engine.name == "openai":
        from toolkit.profiling.endpoint import endpoint_bench

        return endpoint_bench(recipe)
    if recipe.engine.name == "vllm":
        from toolkit.profiling.vllm_bench import vllm_bench

        return vllm_bench(recipe)
    return engine_process(recipe)


def _conditions(made_from: Head, facts: EngineFacts) -> Conditions:
    sections = made_from["inputs"]["recipe"].sections
    return Conditions(
        tool_version=made_from["tool_version"],
        recipe={name: sections[name] for name in MEASURED_SECTIONS if name in sections},
        environment=made_from["environment"],
        engine=facts,
    )


def _memory_key(length: int, steps: int) -> str:
    return f"memory/{length}/{steps}"


def _slice_key(number: int) -> str:
    return f"slice/{number}"


class _Session:
    """The stages of one profile, and what they share."""

    def __init__(self, recipe: Recipe, facts: EngineFacts, journal: Journal, watch: Watch) -> None:
        self._recipe = recipe
        self._spec = recipe.profile
        self._facts = facts
        self._journal = journal
        self._watch = watch
        self._points, self._skipped = grid(self._spec, facts)
        self._rounds = RoundsStage(recipe, facts, journal) if facts.engine in REBATCHING else None
        self._steps: StepsProfile | None = None
        self._mixes: list[GridPoint] = []
        if facts.engine == "vllm":
            self._mixes = mix_points(self._spec, facts)
            self._mixes += traffic_points(self._spec, facts, recipe.serve.max_new_tokens)
        parts = self._rounds.points if self._rounds else self._mixes
        self._work = Work(
            visits=visits_left([*self._points, *parts], self._spec, journal),
            memory=[each for each in probe_shapes(self._spec, facts) if _memory_key(*each) not in journal.results],
            slices=self._slices_left(),
            admissions=self._rounds.lengths_left() if self._rounds else (),
            sequences=self._rounds.sequences_left() if self._rounds else (),
        )

    def _slices_left(self) -> dict[int, Shape]:
        """Those that the journal does not know. Until memory has been probed, they may be too large."""
        results = self._journal.results
        tokens_max = safe_tokens(_batch_probes(results), self._facts)
        shapes = slice_shapes(self._spec, tokens_max, self._facts.max_model_len)
        return {number: shape for number, shape in shapes.items() if _slice_key(number) not in results}

    def plan(self, bench: Bench, load_s: float) -> Plan:
        work = self._work
        loads = bool(work.visits) + bool(work.slices) + bool(work.sequences)  # the neighbours', the workers' twice
        work_s = estimate_s(work, self._points, self._spec, bench, self._recipe.workers)
        return Plan(
            points=len(self._points),
            steps=work.steps,
            about_s=work_s + loads * load_s,
            resumed=len(self._journal.results),
            skipped=skip_reasons(self._skipped),
            set_aside=self._journal.set_aside,
        )

    def probe_memory(self, bench: Bench) -> None:
        deadline_s = time.monotonic() + TIME_LIMIT_S
        for length, steps in self._work.memory:
            result: MemoryPoint | FailedPoint
            try:
                result = probe_memory(bench, length, steps, deadline_s)
            except Unmeasurable as reason:
                result = FailedPoint(kind="memory", batch_size=0, length=length, reason=str(reason))
            self._journal.put(_memory_key(length, steps), result)
            self._watch.advanced(f"memory L={length} S={steps}")

    def probe_admission(self, bench: Bench) -> None:
        if self._rounds:
            self._rounds.probe_admission(cast(RoundBench, bench), self._watch.advanced)

    def measure(self, bench: Bench) -> None:
        """The grid, beside as many busy engines as there will be when it serves. On GPUs, each has its own device."""
        if not self._work.visits:
            return
        shared = self._recipe.hardware.device == "cpu"
        others = self._recipe.workers - 1 if shared else 0
        tokens_max = safe_tokens(_batch_probes(self._journal.results), self._facts)
        shapes = slice_shapes(self._spec, tokens_max, self._facts.max_model_len)
        with busy_neighbours(self._recipe, others, list(shapes.values())):
            measure(self._work.visits, bench, self._spec, self._journal, self._watch.advanced)

    def keep_limits(self, bench: Bench) -> None:
        """Of an engine that tells of its passes: what bounds them."""
        if isinstance(bench, PassBench):
            self._steps = bench.steps

    def run_slices(self, make_workers: MakeWorkers) -> None:
        def record(number: int, result: SlicePoint | FailedPoint) -> None:
            self._journal.put(_slice_key(number), result)
            self._watch.advanced(f"slice {number + 1} of {self._spec.slices}")

        left = self._slices_left()
        if left:
            workers = make_workers(self._recipe)
            asyncio.run(run_slices(workers, left, self._facts.vocab_size, record))

    def run_sequences(self, make_workers: MakeWorkers) -> None:
        if self._rounds and self._work.sequences:
            self._rounds.run_sequences(make_workers(self._recipe), self._watch.advanced)

    def result(self, made_from: Head) -> Profile:
        results = self._journal.results
        prefill, decode = grid_points(self._points, self._spec, results)
        if not prefill or not decode:
            failed = next((r.reason for r in results.values() if isinstance(r, FailedPoint)), "nothing fits")
            kind = "decode step" if prefill else "prefill"
            raise EngineError(f"not one {kind} of the grid could be measured: {failed}", "see profile in the recipe")
        return Profile(
            **made_from,
            recipe_name=self._recipe.name,
            workers=self._recipe.workers,
            clock=self._spec.clock,
            engine=self._facts,
            prefill=prefill,
            decode=decode,
            slices=of_kind(SlicePoint, results.values()),
            memory=_batch_probes(results),
            failed=[*self._skipped, *of_kind(FailedPoint, results.values())],
            rounds=self._rounds.result() if self._rounds else None,
            steps=_with_points(self._steps, results) if self._steps else None,
        )


def _with_points(limits: StepsProfile, results: Mapping[str, Result]) -> StepsProfile:
    """All passes that were seen while the grid was measured."""
    visits = of_kind(Visit, results.values())
    points = [point for visit in visits for point in visit.steps]
    front = [point for visit in visits for point in visit.front]
    return limits.model_copy(update={"points": points, "front": front})


def _batch_probes(results: Mapping[str, Result]) -> list[MemoryPoint]:
    """Those of the memory edge of batches."""
    probes = (result for key, result in results.items() if key.startswith("memory/"))
    found = [probe for probe in probes if isinstance(probe, MemoryPoint)]
    return sorted(found, key=lambda probe: (probe.input_length, probe.steps))
