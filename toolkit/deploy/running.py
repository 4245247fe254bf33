"""Which servers run here: a file each, written when one is ready, looked at by `llmctl status` and `llmctl stop`.

A server in a process writes its own, and at its end how its requests ended. One whose process is gone and that did not
say so was killed; a process number that was given to another process is noticed by its start time. No file holds a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from toolkit.errors import InputError
from toolkit.files.envelope import Strict
from toolkit.files.io import write_file
from toolkit.files.validate import read_bytes, validate

Where = Literal["local", "ray", "systemd", "compose"]
SAME_START_S = 1.0


class Running(Strict):
    """A server that was started here."""

    schema_version: Literal[1] = 1
    name: str
    target: Where
    url: str
    model: str
    workers: int
    policy: str
    pid: int | None = Field(default=None, description="of a server in a process of this machine")
    started: str | None = Field(default=None, description="the boot and the tick of it in which that process started")
    started_s: float | None = Field(
        default=None, description="when that process started, in seconds since 1970, by the clock as it was then"
    )
    folder: str | None = Field(default=None, description="what it was rendered to, for systemd and compose")
    certificate: str | None = Field(default=None, description="a file with what it shows, where it speaks TLS")
    breaks: str = Field(default="", description="limits that its plan is predicted to break; '' for none")
    ended: dict[str, int] | None = Field(default=None, description="requests by finish reason, once it has ended")

    @property
    def alive(self) -> bool:
        """Whether its process is there. Of what a service manager runs, only the manager knows: yes."""
        if self.pid is None:
            return True
        try:
            process = psutil.Process(self.pid)
            if self.started is not None:
                same = start_of(self.pid) == self.started
            else:
                same = abs(process.create_time() - (self.started_s or 0.0)) < SAME_START_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


def folder_of_states() -> Path:
    """XDG's folder for state that outlives a process."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "llmctl" / "servers"


def name_of(recipe: str, url: str) -> str:
    """A server's name: its recipe and its port."""
    port = re.search(r":([0-9]+)$", url)
    return f"{recipe[:50]}-{port[1]}" if port else recipe[:50]


def start_of(pid: int) -> str | None:
    """When a process started, in words that no step of the clock changes; None where the machine has none.

    The clock's time of a start is reckoned from the time of the boot, which moves with the clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    after_name = stat.rpartition(b")")[2].split()  # the name may hold spaces and brackets
    return f"{boot} {int(after_name[19])}"


def this_process(name: str, target: Where, url: str, model: str, workers: int, policy: str) -> Running:
    """What this process is to write of itself."""
    me = psutil.Process()
    return Running(
        name=name,
        target=target,
        url=url,
        model=model,
        workers=workers,
        policy=policy,
        pid=me.pid,
        started=start_of(me.pid),
        started_s=me.create_time(),
    )


def remember(server: Running) -> Path:
    """Write a server's file. `InputError` where it cannot be written."""
    path = folder_of_states() / f"{server.name}.json"
    write_file(server, path)
    return path


def forget(server: Running) -> None:
    """Remove a server's file."""
    (folder_of_states() / f"{server.name}.json").unlink(missing_ok=True)


def remembered() -> Iterator[Running]:
    """Every server that has a file, by name; one that cannot be read is an `InputError`."""
    for path in sorted(folder_of_states().glob("*.json")):
        yield recall(path.stem)


def recall(name: str) -> Running:
    """The server of that name. `InputError` where there is no file of it."""
    path = folder_of_states() / f"{name}.json"
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name) or not path.is_file():
        raise InputError(f"no server '{name}' was started here", "llmctl status lists those that were")
    return validate(Running, read_bytes(path), path, f"rm {path}")
