"""The keys of servers with live settings, kept where only their user reads them.

A server holds a lock on the file of its key while it runs, so that the file of a server that was
killed is known, and removed. The folder is XDG's for state that outlives a process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote


def _folder() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "llmctl" / "control-keys"


@contextmanager
def kept_key(url: str, key: str) -> Iterator[None]:
    """Keep the key of the server at `url` meanwhile. Raises OSError if it cannot be written."""
    path = _folder() / quote(url, safe="")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(key)
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def known_keys() -> dict[str, str]:
    """Return the keys of the servers with live settings that run here, by URL."""
    found = {}
    for path in sorted(_folder().glob("*")):
        with path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:  # its server runs
                found[unquote(path.name)] = file.read()
    return found
