"""Logs on a full disk: whole lines, and no exception."""

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
    FORMAT,
    EventLogHeader,
    RecordingScheduler,
    Submit,
    from_lines,
    replay,
    whole_lines,
)
from toolkit.sched.policies import make_policy
from toolkit.sched.scheduler import Scheduler
from toolkit.sched.types import Request, Worker
from toolkit.server.log import EventLog
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


def read(path: Path) -> list[str]:
    """The lines of a log, all of them whole."""
    data = path.read_bytes()
    assert data.endswith(b"\n") or not data
    return data.decode().splitlines()


def lines(first: int, last: int) -> bytes:
    return b"".join(f"line {number:04d}\n".encode() for number in range(first, last + 1))


def test_a_full_disk_ends_the_log_at_a_whole_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = LineLog(tmp_path / "log", 1 << 20)
    caplog.set_level(logging.WARNING)
    with room_for(1005):
        log.write(lines(1, 90))
        log.write(lines(91, 200))  # ten of them fit, the last by a part of it
        log.write(lines(201, 300))
    log.write(lines(301, 310))  # there is room again, and a gap before
    log.close()
    assert read(tmp_path / "log") == lines(1, 100).decode().splitlines()
    assert log.lost == 210
    full, lost = [record.getMessage() for record in caplog.records]
    assert "File too large" in full
    assert says(lost, "log", "210")


def test_the_size_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = LineLog(tmp_path / "log", 2000)
    for first in range(1, 1001, 10):
        log.write(lines(first, first + 9))
    log.close()
    found = read(tmp_path / "log")
    assert (tmp_path / "log").stat().st_size <= 2000
    assert (len(found), log.lost) == (200, 800)
    assert says(caplog.records[0].getMessage(), "log", "2000")


def test_a_pipe_that_is_not_read_ends_the_log_and_stalls_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    log = LineLog(tmp_path / "pipe", 1 << 30)
    log.write(lines(1, 10_000))
    log.close()
    found = list(whole_lines(os.read(reader, 1 << 20).splitlines(keepends=True)))
    os.close(reader)
    assert (len(found) + log.lost, log.lost > 0) == (10_000, True)
    assert b"".join(found) == lines(1, len(found))


def test_a_log_that_cannot_be_opened_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere/log"):
        LineLog(tmp_path / "nowhere" / "log", 1000)
    with pytest.raises(InputError, match=str(tmp_path)):
        EventLog(tmp_path)


def scheduler(sink=None) -> Scheduler:
    policy = make_policy("slice", {"slice_tokens": 8})
    workers = [Worker(0, LAW, ZetaMemory(4096))]
    return RecordingScheduler(policy, workers, sink) if sink else Scheduler(policy, workers)


def test_what_an_event_log_has_before_the_disk_was_full_is_replayed(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log") as log:
        recorded = scheduler(log.add)
        log.add(EventLogHeader(FORMAT, "slice", {"slice_tokens": 8}, 1))
        for number in range(100):
            recorded.submit(Request(f"r{number}", number, 5, 8), float(number))
        with room_for(4000):
            log.flush()
        recorded.submit(Request("after", 101.0, 5, 8), 101.0)
    events = list(from_lines((tmp_path / "log").read_bytes().splitlines(keepends=True)))
    submitted = [event.request.request_id for event in events if isinstance(event, Submit)]
    assert 0 < len(submitted) < 100
    assert submitted == [f"r{number}" for number in range(len(submitted))]
    assert list(replay(events, scheduler())) == []


@pytest.mark.parametrize(
    "header",
    [
        b'{"type":"header","policy":"slice","parameters":{},"workers":1}',
        b'{"type":"header","format":1,"policy":"slice","parameters":{},"workers":1}',
        b'{"type":"round","now_s":1.0}',
    ],
)
def test_an_event_log_of_another_format_is_refused_with_its_line(header: bytes) -> None:
    with pytest.raises(InputError, match="line 1 of"):
        list(from_lines([header + b"\n"]))


def test_a_trace_on_a_full_disk_keeps_whole_lines(tmp_path: Path) -> None:
    with TraceLog(tmp_path / "trace") as log:
        with room_for(1000):
            for number in range(1, 101):
                log.add(TraceLine(float(number), number, 1))
        log.add(TraceLine(101.0, 101, 1))
        assert log.lost > 0
    trace, report = read_trace(tmp_path / "trace")
    assert report.dropped == {}
    assert trace.prompt_tokens.tolist() == [*range(1, 101 - log.lost), 101]
