"""The server's log: a line has its time, its level and its words."""

import logging
import re

import pytest

from toolkit.server.log import logging_to_stderr


def test_a_line_has_its_time_and_level(capfd: pytest.CaptureFixture[str]) -> None:
    pool = logging.getLogger("toolkit.processes.supervisor")
    talks = logging.getLogger("toolkit.server.relay")
    with logging_to_stderr():
        pool.warning("worker %d is lost", 3)
        pool.info("worker %d is back", 3)
        talks.debug("each attempt of each request")
    lines = capfd.readouterr().err.splitlines()
    times = [
        re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) worker 3", x) for x in lines[:2]
    ]
    assert [found and found[1] for found in times] == ["WARNING", "INFO"]
    assert lines[2:] == []
    assert len(logging.getLogger("toolkit").handlers) == 0
