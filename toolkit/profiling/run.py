"""A whole profile: load the engine, announce the work, probe memory, measure the grid, run slices.

Order: the estimate of the work's time, `profile` and its stages (`_Session`), and `OtherLoad`, the
machine's load by other programs.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from toolkit.engine_traits import traits_of
from toolkit.engines.resources import require_gpu, share_gpus, visible_gpus
from toolkit.errors import EngineError
from toolkit.files.io import EnvelopeFields, head
from toolkit.files.profile import (
    MEASURED_SECTIONS,
    FailedPoint,
    MemoryPoint,
    Profile,
    SlicePoint,
    StepPoint,
)
from toolkit.files.recipe import Recipe
from toolkit.interrupts import cancelling
from toolkit.profiling import overlapping
from toolkit.profiling.grid import (
    GridPoint,
    SliceShape,
    grid,
    hit_points,
    in_rounds,
    mix_points,
    slice_shapes,
    traffic_points,
)
from toolkit.profiling.measure import (
    TIME_LIMIT_S,
    Journal,
    JournalConditions,
    PointVisit,
    Result,
    grid_points,
    measure,
    of_kind,
    probe_memory,
    probe_shapes,
    record_probe,
    safe_tokens,
    visits_left,
)
from toolkit.profiling.process import (
    ProfileBench,
    busy_neighbours,
    engine_process,
)
from toolkit.profiling.worker_runs import Feed, RoundsStage, WholeSlice


@dataclass(slots=True, frozen=True)
class Work:
    """The work that is left."""

    visits: Sequence[tuple[int, GridPoint]]
    memory: Sequence[tuple[int, int]]  # (input length, steps)
    slices: dict[int, SliceShape]  # by number
    admissions: Sequence[int] = ()  # input lengths at which rows are admitted
    sequences: Sequence[int] = ()  # numbers of sequences of rounds

    @property
    def steps(self) -> int:
        """The number of steps of a progress bar."""
        parts = self.visits, self.memory, self.slices, self.admissions, self.sequences
        return sum(map(len, parts))


@dataclass(slots=True, frozen=True)
class ProfileWork:
    """The announcement before the work starts."""

    points: int  # all points of the grid
    steps: int
    resumed: int  # results of an earlier run
    skipped: dict[str, int]  # reason to the number of points
    set_aside: str  # why an earlier run's results are not used; '' if they are or there are none


class ProfileProgress(Protocol):
    """The observer of a profile: a progress bar, or a test."""

    def planned(self, plan: ProfileWork) -> None:
        """The engine is loaded, and this is the work."""
        ...

    def advanced(self, text: str) -> None:
        """One of `ProfileWork.steps` is done; its result is on disk."""
        ...


def journal_path(out: Path) -> Path:
    """The file for the results of an unfinished profile, next to the profile."""
    return out.with_name(f"{out.name}.partial")


def profile(
    recipe: Recipe,
    source: Path,
    out: Path,
    watch: ProfileProgress,
    *,
    timed: Callable[[Recipe], AbstractContextManager[ProfileBench]] = engine_process,
) -> Profile:
    """Measure what `recipe`, read from `source`, describes, resuming from an earlier journal.

    The caller writes the profile to `out` and then removes `journal_path(out)`. Points that cannot
    be measured are in `Profile.failed`.

    Raises `InputError` for a recipe that the engine refuses or a journal that cannot be written.
    Raises `EngineError` if a recipe for a GPU finds none, the engine cannot be loaded or keeps
    dying, or no point of the grid can be measured.
    """
    require_gpu(recipe)
    engine = recipe.engine
    if recipe.hardware.device == "cuda" and traits_of(engine.name).load:
        # The workers that run slices come last: too few GPUs for them are reported now.
        share_gpus(recipe.workers, 1, visible_gpus(), shared=engine.share_gpus)
    started_s = time.perf_counter()
    with timed(recipe) as bench:
        load_s = time.perf_counter() - started_s
        made_from = head(inputs={"recipe": source}, device=bench.facts.device)
        sections = made_from["inputs"]["recipe"].sections
        conditions = JournalConditions(
            tool_version=made_from["tool_version"],
            recipe={name: sections[name] for name in MEASURED_SECTIONS if name in sections},
            environment=made_from["environment"],
            engine=bench.facts,
        )
        with Journal(journal_path(out), conditions) as journal:
            session = _Session(recipe, bench, journal, watch, load_s)
            watch.planned(session.plan())
            session.probe_memory()
            session.measure()
            bench.stop()  # frees its memory for the workers
            session.run_workers()
            return session.result(made_from)


class _Session:
    """The stages of one profile and their shared state."""

    def __init__(
        self,
        recipe: Recipe,
        bench: ProfileBench,
        journal: Journal,
        watch: ProfileProgress,
        load_s: float,
    ) -> None:
        facts = bench.facts
        self._recipe = recipe
        self._bench = bench
        self._facts = facts
        self._load_s = load_s
        self._journal = journal
        self._progress = watch
        self._spec = recipe.profile
        traits = traits_of(facts.engine)
        self._rounds = RoundsStage(recipe, facts, journal) if traits.keeps_rows else None
        self._steps = bench.steps
        if self._steps is not None and self._steps.async_scheduling:
            # All shapes run before the first timing, so no point needs a run of its own for that.
            self._spec = self._spec.model_copy(update={"warmups": 0})
            self._points = overlapping.grid(facts, self._steps)
            self._skipped: list[FailedPoint] = []
            points = [*self._points, *overlapping.other_points(facts, self._steps)]
            visits = overlapping.in_rounds(points, self._spec)
        else:
            self._points, self._skipped = grid(self._spec, facts)
            parts = self._rounds.points if self._rounds else []
            if traits.timed_by_pass:
                parts = mix_points(self._spec, facts)
                parts += traffic_points(self._spec, facts, recipe.serve.max_new_tokens)
                parts += hit_points(self._spec, facts)
            visits = in_rounds([*self._points, *parts], self._spec)
        self._work = Work(
            visits=visits_left(visits, journal),
            memory=[
                (length, steps)
                for length, steps in probe_shapes(self._spec, facts)
                if f"memory/{length}/{steps}" not in journal.results
            ],
            slices=self._slices_left(),
            admissions=self._rounds.lengths_left() if self._rounds else (),
            sequences=self._rounds.sequences_left() if self._rounds else (),
        )

    def _shapes(self) -> dict[int, SliceShape]:
        """The slices by number. Before memory is probed, they may be too large."""
        tokens_max = safe_tokens(_batch_probes(self._journal.results), self._facts)
        return slice_shapes(self._spec, tokens_max, self._facts.max_model_len)

    def _slices_left(self) -> dict[int, SliceShape]:
        """The slices that the journal lacks."""
        results = self._journal.results
        shapes = self._shapes()
        return {k: shape for k, shape in shapes.items() if f"slice/{k}" not in results}

    def plan(self) -> ProfileWork:
        return ProfileWork(
            points=len(self._points),
            steps=self._work.steps,
            resumed=len(self._journal.results),
            skipped=dict(Counter(point.reason for point in self._skipped)),
            set_aside=self._journal.set_aside,
        )

    def probe_memory(self) -> None:
        """Search the memory edge of static batches, and of rounds if the engine runs them."""
        deadline_s = time.monotonic() + TIME_LIMIT_S
        for length, steps in self._work.memory:
            probe = partial(probe_memory, self._bench, length, steps, deadline_s)
            record_probe(self._journal, f"memory/{length}/{steps}", length, probe)
            self._progress.advanced(f"memory L={length} S={steps}")
        if self._rounds:
            self._rounds.probe_admission(self._bench, self._progress.advanced)

    def measure(self) -> None:
        """Measure the grid. On a CPU as many other engines are busy meanwhile as when serving; on
        GPUs each worker has its own.
        """
        if not self._work.visits:
            return
        self._bench.prepare([*self._points, *(point for _, point in self._work.visits)])
        shared = self._recipe.hardware.device == "cpu"
        others = self._recipe.workers - 1 if shared else 0
        with busy_neighbours(self._recipe, others, list(self._shapes().values())):
            visits = self._work.visits
            measure(visits, self._bench, self._spec, self._journal, self._progress.advanced)

    def run_workers(self) -> None:
        """Run slices, and sequences of rounds if the engine runs them, on all workers."""

        def record(number: int, result: SlicePoint | FailedPoint) -> None:
            self._journal.put(f"slice/{number}", result)
            self._progress.advanced(f"slice {number + 1} of {self._spec.slices}")

        if left := self._slices_left():
            workers = self._bench.workers(self._recipe)
            slices = partial(WholeSlice, left, self._facts.vocab_size)
            feed = Feed(workers, left, slices, record)
            with cancelling():
                asyncio.run(feed.run())
        if self._rounds and self._work.sequences:
            self._rounds.run_sequences(self._bench.workers(self._recipe), self._progress.advanced)

    def result(self, made_from: EnvelopeFields) -> Profile:
        results = self._journal.results
        prefill, decode = grid_points(self._points, results)
        if not prefill or not decode:
            failed = [one.reason for one in of_kind(FailedPoint, results.values())]
            kind = "decode step" if prefill else "prefill"
            why = [*failed, "nothing fits"][0]
            message = f"no {kind} of the grid could be measured: {why}"
            raise EngineError(message, "see profile in the recipe")
        steps = self._steps
        visits = of_kind(PointVisit, results.values())
        if steps is not None:  # with all passes that were logged while the grid was measured
            passes = [point for visit in visits for point in visit.steps]
            front = [point for visit in visits for point in visit.front]
            known = [visit.sampler_s for visit in visits if visit.sampler_s is not None]
            passes = [with_sampler(point, min(known, default=0.0)) for point in passes]
            steps = steps.model_copy(update={"points": passes, "front": front})
        # A server that ran before was not loaded here.
        load_s = round(self._load_s, 1) if traits_of(self._facts.engine).started else None
        return Profile(
            **made_from,
            recipe_name=self._recipe.name,
            workers=self._recipe.workers,
            clock=self._spec.clock,
            engine=self._facts.model_copy(update={"load_s": load_s}),
            prefill=prefill,
            decode=decode,
            slices=of_kind(SlicePoint, results.values()),
            memory=_batch_probes(results),
            failed=[*self._skipped, *of_kind(FailedPoint, results.values())],
            rounds=self._rounds.result() if self._rounds else None,
            steps=steps,
        )


def with_sampler(point: StepPoint, sampler_s: float) -> StepPoint:
    """The passes with launches that last until the sampler is launched, too."""
    if not point.launch_s:
        return point
    launch_s = [each + sampler_s for each in point.launch_s]
    return point.model_copy(update={"launch_s": launch_s})


def _batch_probes(results: Mapping[str, Result]) -> list[MemoryPoint]:
    """The probes of the memory edge of static batches."""
    probes = (result for key, result in results.items() if key.startswith("memory/"))
    points = of_kind(MemoryPoint, probes)
    return sorted(points, key=lambda point: (point.input_length, point.steps))


class OtherLoad:
    """The CPU time of programs other than this one and its ended children, from now on."""

    def __init__(self) -> None:
        self._start = _snapshot()

    def percent(self) -> float:
        """The share of all CPUs' time since the start, with time that a hypervisor gave away."""
        wall_s, others_s = (now - then for now, then in zip(_snapshot(), self._start, strict=True))
        return max(0.0, 100.0 * others_s / max(wall_s, 1e-9))


def _snapshot() -> tuple[float, float]:
    """Seconds of all CPUs, and seconds that other programs used."""
    import psutil  # here: a profile also runs where only torch and transformers are installed

    cpus = psutil.cpu_times()
    own = os.times()
    names = "user", "nice", "system", "irq", "softirq", "steal"
    busy_s = sum(getattr(cpus, name, 0.0) for name in names)
    own_s = own.user + own.system + own.children_user + own.children_system
    return time.monotonic() * (psutil.cpu_count() or 1), busy_s - own_s
