"""The log of a server on stderr: a line for what an operator has to know, with its time and level.

Modules use Python's `logging`. Lost workers and replicas, and their return, are logged where they
are noticed (`toolkit.processes`, `toolkit.gateway`); refused requests here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.serve.stats import Stats

FORM = "%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s"
TIME_FORM = "%Y-%m-%dT%H:%M:%S"  # in UTC
# Their returns are of level INFO. Of other modules, only warnings are for an operator.
TALKING = ("toolkit.processes.supervisor", "toolkit.gateway.replicas")
LOOK_EVERY_S = 1.0
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
