"""The passes of each replayed window, from the log of a server on this machine (`llmctl serve
--pass-log`). With them, the engine and its front can be told apart after the fact.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import msgspec

from toolkit.bench.client import Replay
from toolkit.endpoints.fronts import names_of, seen_in_traffic
from toolkit.errors import InputError
from toolkit.files.io import write_text
from toolkit.sched.iterations import header_of, passes_of


class PassLogs:
    """The log of a running server, `source`, cut into a file for each window beside `result`.

    Raises `InputError` if `source` cannot be read or is not a log of passes.
    """

    def __init__(self, source: Path, result: Path) -> None:
        self._source = source
        self._result = result
        self._start = 0  # of the window, in bytes
        try:
            with source.open("rb") as log:
                self._head = log.readline()
            header_of(self._head)
        except OSError as error:
            raise InputError(
                f"{source}: cannot be read: {error.strerror}",
                "start the server with: llmctl serve --pass-log FILE",
            ) from None
        except msgspec.DecodeError:
            raise InputError(
                f"{source}: its first line is not that of a log of passes",
                "name the file of: llmctl serve --pass-log",
            ) from None

    def begin(self) -> None:
        """A window begins: what the log has now is of other requests."""
        self._start = self._source.stat().st_size

    def file(self, window: int) -> Path:
        """Where the passes of a window are written."""
        return self._result.with_name(f"{self._result.stem}.passes-{window}.jsonl")

    def end(self, window: int, replay: Replay) -> float | None:
        """Write the window's passes; the mean seconds of the front before a first token, or None
        where the log has no request of the replay.
        """
        with self._source.open("rb") as log:
            log.seek(self._start)
            lines = log.read().splitlines(keepends=True)
        lines = [line for line in lines if line.endswith(b"\n")]
        write_text(self.file(window), (self._head + b"".join(lines)).decode())
        samples = replay.samples
        names = names_of(samples)
        fronts = seen_in_traffic(samples, names, passes_of(lines), replay.start_s)
        return fmean(one.in_s + one.out_s for one in fronts) if fronts else None
