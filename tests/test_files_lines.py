"""Logs on a full disk: whole lines, a mark where lines are missing, and no exception."""

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from said import says
from toy_server import LAW

from toolkit.errors import InputError
from toolkit.estimators.memory import ZetaMemory
from toolkit.files.io import LineLog
from toolkit.sched.eventlog import (
    EventLogHeader,
    Lost,
    RecordingScheduler,
    Submit,
    from_lines,
    replay,
)
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request, Worker
from toolkit.serve.launch import EventLog
from toolkit.traces.read import read_trace
from toolkit.traces.write import TraceLine, TraceLog


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file gets longer than `size`: a write that crosses it is short, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mark(lost: int, reason: str) -> bytes:
    return f"<{lost} {reason}>".encode()


def read(path: Path) -> list[str]:
    """The lines of a log, without the padding of marks."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return [line.strip() for line in data.decode().splitlines()]


def lines(first: int, last: int) -> bytes:
    return b"".join(f"line {number:04d}\n".encode() for number in range(first, last + 1))


def test_a_full_disk_loses_lines_and_the_log_counts_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = LineLog(tmp_path / "log", 1 << 20, mark)
    caplog.set_level(logging.WARNING)
    with room_for(1005):
        log.write(lines(1, 90))
        log.write(lines(91, 200))  # ten of them fit, the last by a part of it
        log.write(lines(201, 300))
    found = read(tmp_path / "log")
    kept = len(found) - 1
    assert found[:kept] == lines(1, kept).decode().splitlines()
    assert found[-1] == f"<{300 - kept} File too large>"
    assert log.lost == 300 - kept
    assert (tmp_path / "log").stat().st_size <= 1005
    log.write(lines(301, 310))  # there is room again
    log.close()
    assert read(tmp_path / "log") == found + lines(301, 310).decode().splitlines()
    full, lost = [record.getMessage() for record in caplog.records]
    assert "File too large" in full
    assert says(lost, "log", str(log.lost))


def test_the_size_is_bounded_and_the_mark_names_the_limit(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "log", 2000, mark)
    for first in range(1, 1001, 10):
        log.write(lines(first, first + 9))
    log.close()
    found = read(tmp_path / "log")
    assert (tmp_path / "log").stat().st_size <= 2000
    assert found[-1] == f"<{1000 - (len(found) - 1)} its limit of 2000 bytes is reached>"


def test_a_pipe_that_is_not_read_loses_lines_and_stalls_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = LineLog(tmp_path / "pipe", 1 << 30, mark)
    log.write(lines(1, 10_000))
    assert log.lost > 0
    first = os.read(reader, 1 << 20)
    lost = log.lost
    log.write(lines(10_001, 10_002))
    log.close()
    second = os.read(reader, 1 << 20)
    os.close(reader)
    found = [line.strip() for line in (first + second).decode().splitlines()]
    assert found[-3:] == [f"<{lost} Resource temporarily unavailable>", "line 10001", "line 10002"]
    assert all(line.startswith("line") for line in found[:-4])


def test_a_log_that_cannot_be_opened_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere/log"):
        LineLog(tmp_path / "nowhere" / "log", 1000, mark)
    with pytest.raises(InputError, match=str(tmp_path)):
        EventLog(tmp_path)


def scheduler(sink=None) -> Scheduler:
    policy = make_policy("slice", {"slice_tokens": 8})
    workers = [Worker(0, LAW, ZetaMemory(4096))]
    return RecordingScheduler(policy, workers, sink) if sink else Scheduler(policy, workers)


def test_the_replay_of_an_event_log_reports_lost_events(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        recorded = scheduler(log.add)
        log.add(EventLogHeader("slice", {"slice_tokens": 8}, 1))
        for number in range(100):
            recorded.submit(Request(f"r{number}", number, 5, 8), float(number))
        with room_for(4000):
            log.flush()
            recorded.submit(Request("lost", 100.0, 5, 8), 100.0)
        recorded.submit(Request("after", 101.0, 5, 8), 101.0)
    events = list(from_lines((tmp_path / "log").read_bytes().splitlines(keepends=True)))
    submitted = [event.request.request_id for event in events if isinstance(event, Submit)]
    (gap,) = (event for event in events if isinstance(event, Lost))
    assert gap.events == 102 - len(submitted)
    said = list(replay(events, scheduler()))
    at = events.index(gap) + 1
    assert len(said) == 1
    assert says(said[0], f"event {at}", str(gap.events), "File too large")


def test_a_trace_on_a_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    with TraceLog(tmp_path / "trace") as log:
        with room_for(1000):
            for number in range(1, 101):
                log.add(TraceLine(float(number), number, 1))
        log.add(TraceLine(101.0, 101, 1))
        assert (log.lines, log.lost) == (101 - log.lost, log.lost)
    trace, report = read_trace(tmp_path / "trace")
    assert report.dropped == {}
    assert trace.prompt_tokens.tolist() == [*range(1, log.lines), 101]
