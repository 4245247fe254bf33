"""The server's log: refused requests are told at once and then once a minute; a line has its time,
its level and its words.
"""

import logging
import re

import pytest
from said import logged_to, says

from toolkit.server.log import REPEAT_EVERY_S, RefusalLog, logging_to_stderr
from toolkit.server.stats import LATE, QUEUE_FULL, Stats


def test_the_first_refusal_is_told_at_once_and_then_the_count_once_a_minute() -> None:
    stats = Stats()
    log = RefusalLog(stats)
    said: list[str] = []

    def look(at_s: float, refused: int = 0, why: str = LATE) -> list[str]:
        stats.refusals[why] += refused
        said.clear()
        log.look(at_s)
        return said.copy()

    with logged_to(said):
        assert look(0.0) == []
        (first,) = look(1.0, 3)
        assert first.startswith("WARNING")
        assert says(first, "3")
        assert look(2.0, 5) == []
        assert look(REPEAT_EVERY_S, 4, QUEUE_FULL) == []
        (minute,) = look(1.0 + REPEAT_EVERY_S)
        assert says(minute, "9", "5", "4", "60 s"), "each reason, and all since the last line"
        assert look(1.0 + 2 * REPEAT_EVERY_S) == [], "a minute without any is not told"
        (again,) = look(2.0 + 2 * REPEAT_EVERY_S, 1)
        assert says(again, "1"), "and the next one is a first one"
    assert stats.refused == 13


def test_a_line_has_its_time_and_level(capfd: pytest.CaptureFixture[str]) -> None:
    pool = logging.getLogger("toolkit.processes.supervisor")
    talks = logging.getLogger("toolkit.server.relay")
    with logging_to_stderr():
        pool.warning("worker %d is lost", 3)
        pool.info("worker %d is back", 3)
        talks.info("each attempt of each request")
    pool.warning("after the end")
    lines = capfd.readouterr().err.splitlines()[:2]
    times = [re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (\w+) worker 3", x) for x in lines]
    assert [found and found[1] for found in times] == ["WARNING", "INFO"]
    assert len(logging.getLogger("toolkit").handlers) == 0
