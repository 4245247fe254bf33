"""The trace log: whole lines, bounded files, and lines of earlier processes stay."""

import errno
import itertools
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from said import says

from toolkit.errors import InputError
from toolkit.traces.read import read_trace
from toolkit.traces.write import TraceLine, TraceLog

ENDLESS = """
import itertools, sys
from pathlib import Path
from toolkit.traces.write import TraceLine, TraceLog
log = TraceLog(Path(sys.argv[1]), 20_000)
for index in itertools.count(1):
    log.add(TraceLine(index, index, 1))
    if index == 2000:
        print("running", flush=True)
"""


def line(index: int = 1, **more) -> TraceLine:
    return TraceLine(float(index), index, 2 * index, **more)


def test_a_line_is_in_the_file_after_add(tmp_path: Path):
    with TraceLog(tmp_path / "log") as log:
        log.add(line(1, max_tokens=9, ttft_ms=1.5, e2e_ms=2, status="ok"))
        written = (tmp_path / "log").read_text()
    expected = (
        '"timestamp":1.0,"input_length":1,"output_length":2,"max_tokens":9,'
        '"ttft_ms":1.5,"e2e_ms":2,"status":"ok"'
    )
    assert written == "{" + expected + "}\n"


def test_a_torn_last_line_loses_no_other_line(tmp_path: Path):
    whole = '{"timestamp":1,"input_length":1,"output_length":1}\n'
    (tmp_path / "log").write_text(whole + '{"timestamp":2,"inp')
    with TraceLog(tmp_path / "log") as log:
        log.add(line(3))
    _, report = read_trace(tmp_path / "log")
    assert (report.kept, dict(report.dropped)) == (2, {"unparsable": 1})


def test_two_files_of_bounded_size_hold_the_last_requests(tmp_path: Path):
    with TraceLog(tmp_path / "log", max_bytes=1000) as log:
        for index in range(1, 101):
            log.add(line(index))
    files = [tmp_path / "log.1", tmp_path / "log"]
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert all(file.stat().st_size <= 1000 for file in files)
    kept = [length for file in files for length in read_trace(file)[0].prompt_tokens.tolist()]
    assert kept == list(range(101 - len(kept), 101))


@pytest.mark.slow
def test_a_killed_process_leaves_whole_lines(tmp_path: Path):
    command = [sys.executable, "-c", ENDLESS, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"running\n"
        process.send_signal(signal.SIGKILL)
    lengths = []
    for file in (tmp_path / "log.1", tmp_path / "log"):
        if file.exists() and file.stat().st_size:  # it may have died between the two
            trace, report = read_trace(file)
            assert report.dropped == {}
            lengths += trace.prompt_tokens.tolist()
    assert lengths[-1] >= 2000
    assert all(after == before + 1 for before, after in itertools.pairwise(lengths))


def test_a_file_that_is_not_a_trace_is_not_changed(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("name: mine\n")
    with pytest.raises(InputError, match=r"recipe\.yaml"):
        TraceLog(tmp_path / "recipe.yaml")
    with pytest.raises(InputError, match="nowhere/log"):
        TraceLog(tmp_path / "nowhere" / "log")
    assert (tmp_path / "recipe.yaml").read_text() == "name: mine\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_loses_lines_and_warns_at_the_first_and_at_the_end(
    caplog: pytest.LogCaptureFixture,
):
    with caplog.at_level(logging.WARNING), TraceLog(Path("/dev/full")) as log:
        for index in range(3):
            log.add(line(index + 1))
    assert log.lost == 3
    first, last = [record.getMessage() for record in caplog.records]
    assert os.strerror(errno.ENOSPC) in first
    assert says(last, "full", "3")
