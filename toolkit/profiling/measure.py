"""Measuring: visits to the grid's points, the search for the memory edge, and the journal.

The grid is measured in rounds, and every sample is kept. Repeats of a point one after the other
would share one state of the machine; in rounds, a disturbance spoils a few samples of every point.

The journal has every result on disk at once, so that a killed profile resumes where it was. It has
one JSON object per line: first the conditions of the measurement, then a key and a result each. A
last line that a kill has torn is cut off. If another line is damaged, it and all after it are
measured again, and the file is kept as it was. The caller writes the profile, then deletes the
journal.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TypeVar

from pydantic import ValidationError

from toolkit.errors import InputError
from toolkit.files.profile import (
    DecodePoint,
    EngineFacts,
    FailedPoint,
    MemoryPoint,
    PartPoint,
    PrefillPoint,
    RoundSequence,
    SlicePoint,
    differences,
    identity,
)
from toolkit.files.recipe import ProfileSpec
from toolkit.files.strict import Environment, Strict
from toolkit.profiling.grid import GridPoint, SliceShape
from toolkit.profiling.process import Passes, TimedEngine, Unmeasurable


class JournalConditions(Strict):
    """The conditions that must be equal for results to belong together."""

    tool_version: str
    recipe: dict[str, str]  # section to the digest of its content
    environment: Environment
    engine: EngineFacts

    def differences(self, now: JournalConditions) -> list[str]:
        """What has changed, in words."""
        names = sorted({name for name, _ in self.recipe.items() ^ now.recipe.items()})
        changed = [f"'{name}' of the recipe" for name in names]
        if self.tool_version != now.tool_version:
            changed.append(f"llmctl ({self.tool_version}, now {now.tool_version})")
        changed += _environment_changes(self.environment, now.environment)
        then = self.engine
        engine = now.engine
        if abs(then.capacity_tokens / engine.capacity_tokens - 1.0) < 0.01:
            # On a GPU the KV budget is what was free when the engine loaded.
            budget = engine.kv_budget_bytes
            tokens = engine.capacity_tokens
            then = then.model_copy(update={"kv_budget_bytes": budget, "capacity_tokens": tokens})
        if then != engine:
            found = differences(identity(self.engine), identity(engine))
            changed += found or ["what the engine says of itself"]
        return changed


class PointVisit(Passes):
    """Samples of a visit to a grid point, in seconds, and its passes if the engine reports them."""

    seconds: list[float]


ResultT = TypeVar("ResultT")
Result = PointVisit | SlicePoint | MemoryPoint | RoundSequence | FailedPoint


class JournalEntry(Strict):
    """A line of the file."""

    key: str
    result: Result


class Journal:
    """Results by key, each on disk when `put` returns. One process at a time may have it open.

    Args:
        path: the file. Content that is unusable or unwanted is kept as <path>.old.
        conditions: the present ones.

    Attributes:
        results: those in the file, and those put since.
        set_aside: why an old file, or its end, was set aside; '' if none was.

    Raises `InputError` if the file cannot be written, or another process has it open.
    """

    def __init__(self, path: Path, conditions: JournalConditions) -> None:
        self._old = path.with_name(path.name + ".old")
        self.results: dict[str, Result] = {}
        self.set_aside = ""
        self._stream = _open_locked(path)
        lines = self._stream.read().splitlines(keepends=True)
        # Without a line break a kill has torn the first line, and none follows.
        if lines and lines[0].endswith(b"\n"):
            try:
                then = JournalConditions.model_validate_json(lines[0])
                changed = ", ".join(then.differences(conditions))
                self.set_aside = f"changed since: {changed}" if changed else ""
            except ValidationError:
                self.set_aside = "its first line cannot be read"
            if not self.set_aside:
                self._load(lines)
                return
            self._stream.close()
            os.replace(path, self._old)
            self._stream = _open_locked(path)
        self._stream.truncate(0)
        self._append(conditions)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def put(self, key: str, result: Result) -> None:
        """Record a result."""
        self.results[key] = result
        self._append(JournalEntry(key=key, result=result))

    def _append(self, line: Strict) -> None:
        self._stream.write(line.model_dump_json().encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _load(self, lines: list[bytes]) -> None:
        """Load the lines up to the first that is torn or damaged, and cut off it and the rest."""
        end = len(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            try:
                entry = JournalEntry.model_validate_json(line)
            except ValidationError:
                if line.endswith(b"\n"):
                    self._old.write_bytes(b"".join(lines))
                    self.set_aside = f"from line {number} on, which cannot be read"
                break
            if not line.endswith(b"\n"):
                break
            self.results[entry.key] = entry.result
            end += len(line)
        self._stream.truncate(end)
        self._stream.seek(end)


def _environment_changes(then: Environment, now: Environment) -> list[str]:
    """The packages with other versions now, and whether the machine does."""
    changed = []
    for name in sorted(then.packages.keys() | now.packages.keys()):
        was = then.packages.get(name, "none")
        version = now.packages.get(name, "none")
        if was != version:
            changed.append(f"{name} ({was}, now {version})")
    same: dict[str, object] = {"packages": now.packages}
    if now.device != "cpu" and _without_kernel(then.platform) == _without_kernel(now.platform):
        # Rented GPUs of one kind run on hosts with different kernels.
        same["platform"] = now.platform
    if then.model_copy(update=same) != now:
        changed.append("the machine")
    return changed


def _without_kernel(platform: str) -> str:
    """`platform.platform()` without the kernel's release: Linux-6.18.44-gpu-x86_64-with-glibc2.39
    is Linux-x86_64-with-glibc2.39.
    """
    return re.sub(r"^Linux-.*?-(x86_64|aarch64)", r"Linux-\1", platform)


def _open_locked(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+b")
    except OSError as error:
        why = f"{path}: cannot be written: {error.strerror}"
        raise InputError(why, "choose another place with --out") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        why = f"{path}: another llmctl profile is writing it"
        raise InputError(why, "wait for it, or choose another --out") from None
    stream.seek(0)
    return stream


def of_kind(kind: type[ResultT], results: Iterable[object]) -> list[ResultT]:
    """The results of this type."""
    return [result for result in results if isinstance(result, kind)]


def visits_left(
    visits: Iterable[tuple[int, GridPoint]], journal: Journal
) -> list[tuple[int, GridPoint]]:
    """(number, point) of every visit that the journal lacks."""
    return [
        (number, point)
        for number, point in visits
        if journal.results.keys().isdisjoint((point.key, f"{point.key}/{number}"))
    ]


def measure(
    visits: Sequence[tuple[int, GridPoint]],
    bench: TimedEngine,
    spec: ProfileSpec,
    journal: Journal,
    advanced: Callable[[str], None],
) -> None:
    """Make the visits, and tell `advanced` of each. A point that cannot be measured is recorded as
    failed, and left out then.
    """
    for number, point in visits:
        if point.key not in journal.results:
            try:
                seconds = bench.time(point, warmups(number, spec))
            except Unmeasurable as reason:
                journal.put(point.key, point.failed(str(reason)))
            else:
                visit = PointVisit(seconds=seconds, **dict(bench.take_passes()))
                journal.put(f"{point.key}/{number}", visit)
        advanced(str(point))


def warmups(number: int, spec: ProfileSpec) -> int:
    """Runs before the first sample of a point's first visit, for one-time compilation and
    allocation. Later visits have none: a prefill follows work of another shape in serving, too, and
    the engine itself lets a decode step follow another one.
    """
    return spec.warmups if number == 0 else 0


def grid_points(
    points: Sequence[GridPoint], results: dict[str, Result]
) -> tuple[list[PrefillPoint], list[DecodePoint]]:
    """The points of the profile, with the samples of all their visits."""
    prefill = []
    decode = []
    for point, seconds in _measured(points, results):
        rows = point.batch_size
        length = point.length
        if point.kind == "prefill":
            prefill.append(PrefillPoint(batch_size=rows, input_length=length, seconds=seconds))
        elif point.kind == "decode":
            decode.append(DecodePoint(batch_size=rows, cached_length=length, seconds=seconds))
    return prefill, decode


def round_parts(points: Sequence[GridPoint], results: dict[str, Result]) -> list[PartPoint]:
    """The parts of rounds, with the samples of all their visits."""
    return [
        PartPoint(
            part=point.kind,
            rows=point.batch_size,
            length=point.length,
            others=point.others,
            seconds=seconds,
        )
        for point, seconds in _measured(points, results)
        if point.kind not in ("prefill", "decode", "mix", "traffic")
    ]


def _measured(
    points: Sequence[GridPoint], results: dict[str, Result]
) -> Iterator[tuple[GridPoint, list[float]]]:
    """Points that were measured and never failed, with all their samples."""
    for point in points:
        visits: list[PointVisit] = []
        while isinstance(visit := results.get(f"{point.key}/{len(visits)}"), PointVisit):
            visits.append(visit)
        seconds = [second for visit in visits for second in visit.seconds]
        if seconds and point.key not in results:
            yield point, seconds


ROWS_MAX = 4096
# Probes end at this multiple of the capacity: an engine that holds more has no edge to find.
PROBE_SHARE_MAX = 2.0
PRECISION = 0.005  # as a share of the batch size: half a percent is precise enough
TIME_LIMIT_S = 300.0  # for all lengths
SAFE_SHARE = 0.9


def find_edge(
    fits: Callable[[int], bool], guess: int, limit: int, enough: Callable[[], bool] = lambda: False
) -> tuple[int, int | None]:
    """(largest size that fits, smallest that does not): gallop from `guess`, then bisect.

    The two are neighbours, or `PRECISION` apart, or what is known when `enough` returns True. The
    second is None if no probe up to `limit` failed.
    """
    fitted = 0
    failed = limit + 1
    size = min(max(guess, 1), limit)
    step = 1
    while True:
        if fits(size):
            fitted = size
        else:
            failed = size
        if failed - fitted <= max(1, int(PRECISION * fitted)) or enough():
            return fitted, failed if failed <= limit else None
        if fitted and failed <= limit:
            size = (fitted + failed) // 2
        else:
            size = min(fitted + step, limit) if fitted else max(failed - step, 1)
            step *= 2


def probe_shapes(spec: ProfileSpec, facts: EngineFacts) -> list[tuple[int, int]]:
    """(L, S) of every probe of the memory edge; none for a server, which queues.

    At each memory length S is the recipe's longest slice, and all that the model can generate: the
    two separate the memory of a row's prompt from the memory of its output.
    """
    if facts.is_server:
        return []
    lengths = sorted(set(spec.memory_lengths))
    all_steps = {length: facts.max_model_len - length for length in lengths}
    return [
        (length, steps)
        for length, most in all_steps.items()
        for steps in sorted({min(max(spec.slice_tokens), most), most})
        if most > 0
    ]


def admission_lengths(spec: ProfileSpec, facts: EngineFacts) -> list[int]:
    """The lengths at which rows are admitted one by one; each row can still generate two tokens."""
    lengths = sorted(set(spec.memory_lengths))
    return [length for length in lengths if length + 2 <= facts.max_model_len]


def probe_admission(bench: TimedEngine, length: int) -> MemoryPoint:
    """The memory edge of rounds at one input length: rows enter until the next one has no room, or
    `PROBE_SHARE_MAX` times the capacity is reached.
    """
    limit = min(ROWS_MAX, max(1, int(PROBE_SHARE_MAX * bench.facts.capacity_tokens / (length + 1))))
    rows, ran_out = bench.admit(length, limit)
    return MemoryPoint(
        input_length=length, steps=1, largest_ok=rows, smallest_oom=rows + 1 if ran_out else None
    )


def record_probe(journal: Journal, key: str, length: int, probe: Callable[[], MemoryPoint]) -> None:
    """Record what a probe of the memory edge at one input length finds, or why it failed."""
    result: MemoryPoint | FailedPoint
    try:
        result = probe()
    except Unmeasurable as reason:
        result = FailedPoint(kind="memory", batch_size=0, length=length, reason=str(reason))
    journal.put(key, result)


def safe_tokens(probes: Iterable[MemoryPoint], facts: EngineFacts) -> float:
    """N * (L + S) that runs at any length: `SAFE_SHARE` of the edge, at most of the capacity."""
    edges = [one.largest_ok * (one.input_length + one.steps) for one in probes if one.largest_ok]
    return SAFE_SHARE * min([*edges, facts.capacity_tokens])


def probe_memory(bench: TimedEngine, length: int, steps: int, deadline_s: float) -> MemoryPoint:
    """The memory edge at one input length. The search stops at `deadline_s`, a monotonic time."""
    total = length + steps
    capacity = bench.facts.capacity_tokens
    largest_ok, smallest_oom = find_edge(
        lambda size: bench.fits(SliceShape(size, length, steps)),
        guess=capacity // total,
        limit=min(ROWS_MAX, max(1, int(PROBE_SHARE_MAX * capacity / total))),
        enough=lambda: time.monotonic() > deadline_s,
    )
    return MemoryPoint(
        input_length=length, steps=steps, largest_ok=largest_ok, smallest_oom=smallest_oom
    )
