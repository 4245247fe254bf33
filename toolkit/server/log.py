"""The logs of a server: on stderr, a line for what an operator has to know, with its time and
level; and in a file, the calls of its scheduler.

Modules use Python's `logging`. Lost workers and replicas, and their return, are logged where they
are noticed (`toolkit.processes`, `toolkit.server`); refused requests here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from toolkit.files.io import LineLog
from toolkit.sched.eventlog import Event, to_line
from toolkit.server.stats import Stats

FORM = "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s"
TIME_FORM = "%Y-%m-%dT%H:%M:%S"  # in UTC
# Their returns are of level INFO. Of other modules, only warnings are for an operator.
TALKING = ("toolkit.processes.supervisor", "toolkit.server.replicas")
LOOK_EVERY_S = 1.0
PENDING_BYTES_MAX = 1 << 16  # of an event log, before they are written
EVENT_LOG_BYTES_MAX = 1 << 30  # an hour or so of a busy server
FLUSH_EVERY_S = 1.0
REPEAT_EVERY_S = 60.0  # while requests are refused
_logger = logging.getLogger(__name__)


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Log to stderr within the block."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter(FORM, TIME_FORM)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logger = logging.getLogger("toolkit")
    for name in TALKING:
        logging.getLogger(name).setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class RefusalLog:
    """Logs refused requests: when the first is refused, and then once a minute how many were.

    A minute without any ends it; the next refusal is a first one again. Times are in seconds on one
    clock.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._told: Counter[str] = Counter()  # what was logged, by the reason
        self._since_s: float | None = None  # of the last line; None: none were refused

    def look(self, now_s: float) -> None:
        """Log what there is to say now."""
        new = self._stats.refusals - self._told
        if self._since_s is None:
            if new:
                _logger.warning("requests are refused with 503: %s", _by_reason(new))
                self._tell(now_s)
        elif now_s - self._since_s >= REPEAT_EVERY_S:
            if new:
                took_s = now_s - self._since_s
                text = "%d requests were refused with 503 in %.0f s: %s"
                _logger.warning(text, new.total(), took_s, _by_reason(new))
                self._tell(now_s)
            else:
                self._since_s = None

    def _tell(self, now_s: float) -> None:
        self._told = self._stats.refusals.copy()
        self._since_s = now_s

    async def follow(self) -> None:
        """Look until cancelled."""
        while True:
            self.look(time.monotonic())
            await asyncio.sleep(LOOK_EVERY_S)


def _by_reason(refusals: Counter[str]) -> str:
    return ", ".join(f"{count} because {reason}" for reason, count in refusals.most_common())


class EventLog:
    """The calls of a scheduler, in a new file that can be replayed.

    `flushing` writes it once a second: a killed server loses little, and an event costs no system
    call. Only whole lines are written. Where an event cannot be written, the log ends
    (`toolkit.files.io`). An error of the disk raises nothing here.
    """

    def __init__(self, path: Path) -> None:
        self._pending = bytearray()
        self._log = LineLog(path, EVENT_LOG_BYTES_MAX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._log.close()

    def add(self, event: Event) -> None:
        self._pending += to_line(event)
        if len(self._pending) >= PENDING_BYTES_MAX:
            self.flush()

    async def flushing(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            self.flush()

    def flush(self) -> None:
        self._log.write(bytes(self._pending))
        self._pending.clear()
