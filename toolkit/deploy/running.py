"""Which servers run here: a file each, written when one is ready, looked at by `llmctl status` and
`llmctl stop`.

A server in a process writes its own, and at its end how its requests ended. One whose process is
gone and that did not say so was killed; a process number that was given to another process is
noticed by its start time. No file holds a key.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from toolkit.deploy.folder import Manifest
from toolkit.errors import EngineError, InputError
from toolkit.files.io import write_file
from toolkit.files.strict import Strict, read_bytes, validate

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
    started: str | None = Field(
        default=None, description="the boot and the tick of it in which that process started"
    )
    started_s: float | None = Field(
        default=None,
        description="when that process started, in seconds since 1970, by the clock as it was then",
    )
    folder: str | None = Field(
        default=None, description="what it was rendered to, for systemd and compose"
    )
    certificate: str | None = Field(
        default=None, description="a file with what it shows, where it speaks TLS"
    )
    breaks: str = Field(
        default="", description="limits that its plan is predicted to break; '' for none"
    )
    ended: dict[str, int] | None = Field(
        default=None, description="requests by finish reason, once it has ended"
    )

    @property
    def alive(self) -> bool:
        """Whether its process is there. Of what a service manager runs, only the manager knows:
        yes.
        """
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
    """When a process started, in words that no step of the clock changes; None where the machine
    has none.

    The clock's time of a start is reckoned from the time of the boot, which moves with the clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    after_name = stat.rpartition(b")")[2].split()  # the name may hold spaces and brackets
    return f"{boot} {int(after_name[19])}"


def this_process(
    name: str, target: Where, url: str, model: str, workers: int, policy: str
) -> Running:
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
        raise InputError(
            f"no server '{name}' was started here", "llmctl status lists those that were"
        )
    return validate(Running, read_bytes(path), path, f"rm {path}")


# Service managers that a rendered folder can be handed to: systemd and Docker Compose, where they
# exist.
#
# What is missing is one line with the command that brings it, before anything is started.

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
LINES_SHOWN = 3


def start(folder: Path, manifest: Manifest) -> None:
    """Start what was rendered, and wait until it is ready. `EngineError` where the manager is not
    there, or fails.
    """
    if manifest.target == "systemd":
        _check_systemd()
        unit = f"{manifest.name}.service"
        _run(["systemctl", "link", str((folder / unit).absolute())])
        _start_unit(unit)
    else:
        _check_compose()
        _run(["docker", "compose", "--project-directory", str(folder), "up", "--detach", "--wait"])


def stop(folder: Path, manifest: Manifest) -> None:
    """Stop it, and wait for its drain. `EngineError` as in `start`."""
    if manifest.target == "systemd":
        _check_systemd()
        _run(["systemctl", "stop", f"{manifest.name}.service"])
    else:
        _check_compose()
        _run(["docker", "compose", "--project-directory", str(folder), "stop"])


def _start_unit(unit: str) -> None:
    """`systemctl start`. Where it fails, systemd would go on trying, and would not say why; the
    unit's log does.
    """
    since_s = time.time()
    started = subprocess.run(["systemctl", "start", unit], capture_output=True, text=True)
    if started.returncode == 0:
        return
    subprocess.run(["systemctl", "stop", unit], capture_output=True)
    log = [
        "journalctl",
        "--unit",
        unit,
        "--since",
        f"@{since_s:.6f}",
        "--output",
        "cat",
        "--no-pager",
    ]
    words = subprocess.run(log, capture_output=True, text=True).stdout
    reason = _reason(words) or _tail(started.stderr)
    no_key = f"its key has to be there first, and its plan: EXPLAIN.md says how; or see journalctl --unit {unit}"
    raise EngineError(
        f"{unit} did not start: {reason}",
        no_key if "credentials" in reason else f"journalctl --unit {unit}",
    )


def _reason(log: str) -> str:
    """What the service said first, or systemd of what it could not do for it; '' where neither did."""
    lines = log.splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said += [line.partition(": ")[2] for line in lines if ": Failed to " in line]
    return next(iter(said), "")


def _check_systemd() -> None:
    if not shutil.which("systemctl"):
        raise EngineError(
            "there is no systemd here", "sudo apt-get install systemd, or --target local"
        )
    if not BOOTED.is_dir():
        raise EngineError(
            "systemd does not run this machine",
            "copy the folder to one that it runs, or --target local",
        )


def _check_compose() -> None:
    if not shutil.which("docker"):
        raise EngineError(
            "docker is not installed", "sudo apt-get install docker.io docker-compose-v2"
        )
    if _fails(["docker", "compose", "version"]):
        raise EngineError("docker has no compose plugin", "sudo apt-get install docker-compose-v2")
    if _fails(["docker", "info"]):
        raise EngineError("no docker engine answers", "sudo systemctl start docker")


def _fails(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True).returncode != 0


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = _tail(done.stderr)
        raise EngineError(
            f"{' '.join(command[:3])}: {said}", f"run it yourself: {' '.join(command)}"
        )


def _tail(text: str) -> str:
    return " ".join(text.strip().splitlines()[-LINES_SHOWN:])
