"""Whole profiles with the fake engine: their content, and that an interrupted one loses nothing."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
from llmctl_fake import FakeEngine
from said import says
from samples import ENVIRONMENT, HEAD, recipe
from synthetic_profiles import FACTS

from toolkit.errors import EngineError, InputError
from toolkit.estimators.fitting import fit_profile
from toolkit.files.profile import FailedPoint, SlicePoint
from toolkit.files.shipped import load_recipe
from toolkit.profiling.grid import GridPoint, SliceShape, grid, in_rounds
from toolkit.profiling.measure import Journal, JournalConditions, grid_points, measure, visits_left
from toolkit.profiling.process import (
    DEATHS_MAX,
    Died,
    EngineProcess,
    LocalTimedEngine,
    Unmeasurable,
    busy_neighbours,
    engine_process,
)
from toolkit.profiling.run import journal_path, profile
from toolkit.profiling.worker_runs import Feed, WholeSlice
from toolkit.workers.pool import ProcessWorkers
from toolkit.workers.protocol import PassDone, WorkerLost, WorkerReady

RECIPE = """
name: fake
model:
  {source: random, config: {model_type: fake}, dtype: float32, tokenizer: bytes, max_model_len: 512}
hardware: {device: cpu, name: none}
engine: {name: fake, kv_cache_memory_mib: 2}
workers: 2
profile:
  batch_sizes: [1, 2, 8, 32]
  input_lengths: [16, 64, 128]
  cached_lengths: [16, 32, 64]
  memory_lengths: [64, 128]
  repeats: 2
  slices: 8
  sequences: 5
"""
POINTS = 4 * 3 + 4 * 3 - 3  # 32 rows of 64 tokens and one more do not fit into 2,048, nor of 128


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "fake.yaml"
    path.write_text(RECIPE)
    return path


CONDITIONS = JournalConditions(tool_version="1", recipe={}, environment=ENVIRONMENT, engine=FACTS)


class Watching:
    """Records what it is told; interrupts the run after `until` results, as Ctrl-C does."""

    def __init__(self, until: int = -1) -> None:
        self.until = until
        self.plan = None
        self.steps = []

    def planned(self, plan):
        self.plan = plan

    def advanced(self, text):
        self.steps.append(text)
        if len(self.steps) == self.until:
            raise KeyboardInterrupt


def run(source: Path, watch: Watching, workers=None):
    @contextlib.contextmanager
    def timed(recipe):
        with engine_process(recipe) as bench:
            bench.workers = workers or InMemory.of
            yield bench

    out = source.with_name("profile.json")
    return profile(load_recipe(source), source, out, watch, timed=timed)


class InMemory:
    """Workers that answer at once from a fake engine; `fate` may decide the outcome of a batch."""

    def __init__(self, size: int, fate=lambda pass_id, rows: "") -> None:
        self.size = size
        self.fate = fate
        self.ran = []
        self._busy = set()
        self._engines = [FakeEngine(FACTS) for _ in range(size)]

    @classmethod
    def of(cls, recipe):
        return cls(recipe.workers)

    async def start(self, on_event):
        self._on_event = on_event
        for worker in range(self.size):
            on_event(WorkerReady(worker, FACTS))

    def run(self, worker, plan):
        assert worker not in self._busy
        self._busy.add(worker)
        pass_id = plan.pass_id
        end_soon = asyncio.get_running_loop().call_soon
        if not plan.keep_cache:
            shape = SliceShape(len(plan.enter), len(plan.enter[0].tokens), plan.steps)
            self.ran.append((worker, pass_id, shape))
        end_soon(self._end, worker, pass_id, plan)

    def _end(self, worker, pass_id, plan):
        failure = self.fate(pass_id, plan.enter)
        if failure == "crashed":
            self._engines[worker] = FakeEngine(FACTS)
            output = None
        else:
            output = self._engines[worker].run(plan, lambda _: True)
            failure = failure or ("oom" if output.is_short else "")
        self._report(PassDone(worker, pass_id, output, failure))

    def _report(self, done):
        self._busy.discard(done.worker)
        self._on_event(done)
        if done.failure == "crashed":
            self._on_event(WorkerLost(done.worker, "killed"))
            ready = WorkerReady(done.worker, FACTS)
            asyncio.get_running_loop().call_soon(self._on_event, ready)

    async def stop(self):
        self.stopped = True


@pytest.mark.slow
def test_a_profile_holds_all_points_of_its_recipe(source):
    watch = Watching()
    found = run(source, watch)
    assert (watch.plan.points, watch.plan.resumed, watch.plan.set_aside) == (POINTS, 0, "")
    ((why, count),) = watch.plan.skipped.items()
    assert count == 3
    assert says(why, "2048")
    assert len(watch.steps) == watch.plan.steps
    assert len(found.prefill) + len(found.decode) == POINTS
    assert all(len(point.seconds) >= 2 for point in [*found.prefill, *found.decode])
    assert len(found.slices) == 8
    assert found.engine.load_s > 0
    assert len(found.rounds.sequences) == 5
    parts = {point.part for point in found.rounds.parts}
    assert parts == {"join", "leave", "grow", "swap_out", "swap_in"}
    edges = [(one.input_length, one.largest_ok, one.smallest_oom) for one in found.rounds.memory]
    assert edges == [(64, 31, 32), (128, 15, 16)]  # of 65 tokens, as prefill gives one
    assert {(point.input_length, point.steps, point.largest_ok) for point in found.memory} == {
        (64, 32, 21),
        (64, 448, 4),
        (128, 32, 12),
        (128, 384, 4),
    }
    assert found.failed
    assert all(says(point.reason, "2048") for point in found.failed)
    assert (found.engine.engine, found.clock, found.workers) == ("fake", "wall", 2)
    assert found.inputs["recipe"].name == "fake.yaml"


@pytest.mark.slow
def test_a_killed_profile_resumes(source):
    script = f"""
import os, signal
from pathlib import Path
from toolkit.files.io import load_recipe
from toolkit.profiling.run import journal_path, profile
class Watch:
    steps = 0
    def planned(self, plan): pass
    def advanced(self, text):
        self.steps += 1
        if self.steps == 25: os.kill(os.getpid(), signal.SIGKILL)
source = Path({str(source)!r})
profile(load_recipe(source), source, source.with_name("profile.json"), Watch())
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    watch = Watching()
    found = run(source, watch)
    assert watch.plan.resumed == 25
    assert len(watch.steps) == watch.plan.steps
    assert (len(found.prefill) + len(found.decode), len(found.slices)) == (POINTS, 8)
    journal = journal_path(source.with_name("profile.json")).read_text().splitlines()
    keys = [json.loads(line)["key"] for line in journal[1:]]
    assert len(keys) == len(set(keys)), "nothing is measured twice"


@pytest.mark.slow
def test_a_changed_grid_begins_anew_and_a_changed_latency_target_does_not(source):
    with pytest.raises(KeyboardInterrupt):
        run(source, Watching(until=5))
    source.write_text(f"{RECIPE}sla: {{ttft_p99_s: 1.0}}\n")
    watch = Watching()
    run(source, watch)
    assert (watch.plan.resumed, watch.plan.set_aside) == (5, "")
    source.write_text(RECIPE.replace("repeats: 2", "repeats: 3"))
    watch = Watching()
    run(source, watch)
    assert watch.plan.resumed == 0
    assert says(watch.plan.set_aside, "'profile'")


@pytest.mark.slow
def test_a_profile_of_the_pool_of_processes_can_be_fitted(source):
    source.write_text(
        RECIPE.replace("model_type: fake", "model_type: fake, prefill_s: 0.001, decode_s: 0.0005")
    )
    found = run(source, Watching(), workers=_pool)
    fitted = fit_profile(found, HEAD)
    assert fitted.overhead.error.points == 8
    assert fitted.memory.zeta == pytest.approx(1.0, abs=0.03)


def _pool(recipe):
    return ProcessWorkers(recipe, recipe.workers)


@pytest.mark.slow
def test_an_engine_that_cannot_be_loaded_is_an_error_of_the_user(source):
    source.write_text(RECIPE.replace("model_type: fake", "model_type: fake, eos_one_inn: 3"))
    with pytest.raises(InputError, match="eos_one_inn") as error:
        run(source, Watching())
    assert error.value.hint == "did you mean 'eos_one_in'?"


def test_a_failing_point_is_recorded_and_the_others_are_measured(tmp_path):
    class Faulty(LocalTimedEngine):
        def time(self, point, warmups):
            if point.batch_size == 4:
                raise Unmeasurable("a kernel is missing")
            return super().time(point, warmups)

    spec = recipe(
        profile={
            "batch_sizes": [1, 4],
            "input_lengths": [16, 32],
            "cached_lengths": [16],
            "memory_lengths": [16],
        }
    ).profile
    points, _ = grid(spec, FACTS)
    with Journal(tmp_path / "journal", CONDITIONS) as journal:
        visited = []
        measure(
            visits_left(in_rounds(points, spec), journal),
            Faulty(FakeEngine(FACTS), "wall"),
            spec,
            journal,
            visited.append,
        )
        prefill, decode = grid_points(points, journal.results)
        failed = [result for result in journal.results.values() if isinstance(result, FailedPoint)]
        assert visits_left(in_rounds(points, spec), journal) == []
    assert [(point.batch_size, point.input_length) for point in prefill] == [(1, 16), (1, 32)]
    assert [(point.batch_size, point.cached_length) for point in decode] == [(1, 16)]
    assert {(point.kind, point.batch_size, point.length, point.reason) for point in failed} == {
        ("prefill", 4, 16, "a kernel is missing"),
        ("prefill", 4, 32, "a kernel is missing"),
        ("decode", 4, 16, "a kernel is missing"),
    }


def fake_recipe(**config):
    return recipe(
        model={"source": "random", "config": {"model_type": "fake", **config}, "max_model_len": 512}
    )


@pytest.mark.slow
def test_a_point_or_a_probe_that_kills_its_process_gets_a_new_one():
    with engine_process(fake_recipe()) as bench:
        bench._child.kill()
        with pytest.raises(Died, match="killed by SIGKILL"):
            bench.time(GridPoint("prefill", 1, 16), 0)
        assert bench.time(GridPoint("prefill", 1, 16), 0)
        bench._child.kill()
        assert not bench.fits(SliceShape(1, 16, 16)), "it did not fit"
        assert bench.fits(SliceShape(1, 16, 16))


@pytest.mark.slow
def test_an_engine_that_keeps_dying_ends_the_profile():
    bench = EngineProcess(fake_recipe())
    bench._deaths = DEATHS_MAX - 1
    bench.start()
    bench.wait()
    bench._child.kill()
    with pytest.raises(EngineError, match=f"ended {DEATHS_MAX} times"):
        bench.time(GridPoint("decode", 1, 16), 0)


@pytest.mark.slow
def test_what_an_engine_s_process_has_started_ends_with_it(monkeypatch, tmp_path):
    """As the ranks of a model that several processes share do."""
    noted = tmp_path / "pid"
    engine = (
        "import pathlib, subprocess; "
        "started = subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL); "
        f"pathlib.Path({str(noted)!r}).write_text(str(started.pid))"
    )
    monkeypatch.setattr("toolkit.profiling.process.COMMAND", (sys.executable, "-c", engine))
    bench = EngineProcess(fake_recipe())
    bench.start()
    with pytest.raises(EngineError, match="exit code 0"):
        bench.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        rank = psutil.Process(int(noted.read_text()))
        deadline_s = time.monotonic() + 10.0
        while rank.status() != psutil.STATUS_ZOMBIE:  # init has not reaped it yet
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.mark.slow
def test_an_exception_of_the_engine_fails_only_its_point():
    with (
        engine_process(fake_recipe(crash_token=1)) as bench,
        pytest.raises(Unmeasurable, match="RuntimeError: a prompt"),
    ):
        bench.fits(SliceShape(1, 16, 16))


@pytest.mark.slow
def test_neighbours_end_with_the_measurement():
    started = []

    class Noted(EngineProcess):
        def keep_busy(self, shapes):
            super().keep_busy(shapes)
            started.append(self._child)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.profiling.process.EngineProcess", Noted)
        with busy_neighbours(fake_recipe(decode_s=0.001), 2, [SliceShape(2, 16, 8)]):
            assert all(child.running for child in started)
    assert not any(child.running for child in started)


SHAPES = {number: SliceShape(1 + number % 3, 16, 8) for number in range(10)}


def recorded_by(workers, feed):
    """What a feed of these workers records, by number."""
    recorded = {}

    def record(number, result):
        assert number not in recorded
        recorded[number] = result

    asyncio.run(feed(record).run())
    assert workers.stopped
    return recorded


def run_shapes(workers):
    slices = partial(WholeSlice, SHAPES, 95)
    return recorded_by(workers, lambda record: Feed(workers, SHAPES, slices, record))


def test_each_slice_is_recorded_once_with_its_shape():
    workers = InMemory(2)
    recorded = run_shapes(workers)
    assert recorded.keys() == SHAPES.keys()
    for number, result in recorded.items():
        assert isinstance(result, SlicePoint)
        assert SliceShape(result.batch_size, result.input_length, result.steps) == SHAPES[number]
        assert result.seconds > 0


def test_a_slice_that_runs_out_of_memory_is_recorded_as_failed():
    recorded = run_shapes(InMemory(2, fate=lambda pass_id, rows: "oom" if pass_id == 5 else ""))
    failed = [result for result in recorded.values() if isinstance(result, FailedPoint)]
    assert recorded.keys() == SHAPES.keys()
    assert [(point.kind, point.reason) for point in failed] == [("slice", "oom")]


def test_a_crashed_worker_gets_slices_again_after_its_restart():
    workers = InMemory(1, fate=lambda pass_id, rows: "crashed" if pass_id == 3 else "")
    recorded = run_shapes(workers)
    assert recorded.keys() == SHAPES.keys()
    assert sum(isinstance(result, FailedPoint) for result in recorded.values()) == 1


@pytest.mark.slow
def test_a_grid_without_a_measurable_point_is_an_error(source):
    source.write_text(RECIPE.replace("batch_sizes: [1, 2, 8, 32]", "batch_sizes: [500]"))
    with pytest.raises(EngineError, match="no prefill"):
        run(source, Watching())
