"""The logs of a server: on stderr, a line for what an operator has to know, with its time and
level; and in a file, the calls of its scheduler, or of its autoscaler.

Modules use Python's `logging`. Lost workers and replicas, and their return, are logged where they
are noticed (`toolkit.processes`, `toolkit.server`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from toolkit.files.io import LineLog
from toolkit.scaling.log import FleetLine
from toolkit.sched.eventlog import Event, to_line

FORM = "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s"
TIME_FORM = "%Y-%m-%dT%H:%M:%S"  # in UTC
PENDING_BYTES_MAX = 1 << 16  # of an event log, before they are written
EVENT_LOG_BYTES_MAX = 1 << 30  # an hour or so of a busy server
FLUSH_EVERY_S = 1.0


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Log to stderr within the block."""
    handler = logging.StreamHandler()
    formatter = logging.Formatter(FORM, TIME_FORM)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logger = logging.getLogger("toolkit")
    logger.setLevel(logging.INFO)  # what is lost is a warning, and its return is of level INFO
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class EventLog:
    """The calls of a scheduler, or of an autoscaler, in a new file that can be replayed.

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

    def add(self, event: Event | FleetLine) -> None:
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
