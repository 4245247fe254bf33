"""The servers that run on this machine, and starting and stopping them with service managers.

Each server has a file, written when it is ready and read by `llmctl status` and `llmctl stop`. A
server in a process writes its own file and, at its end, how its requests ended. If its process is
gone without that, it was killed; the start time shows whether its process number was reused. No
such file holds a key. The key of the control of a server with live settings is beside it, in a file
that only its user reads.

`start` and `stop` hand a rendered folder to systemd or Docker Compose. If a manager is missing, the
error names the command that installs it, before anything is started.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import psutil
from pydantic import Field

from toolkit.deploy.render import Manifest
from toolkit.errors import EngineError, InputError
from toolkit.files.io import write_file
from toolkit.files.strict import Strict, optional, read_bytes, validate

Where = Literal["local", "ray", "systemd", "compose"]
SAME_START_S = 1.0  # start times that differ by less are those of one process
BOOTED = Path("/run/systemd/system")  # exists where systemd runs the machine: sd_booted(3)
UNITS = (".service", ".target")
LINES_SHOWN = 3  # of a failed command's stderr


class Running(Strict):
    """A server that was started here."""

    schema_version: Literal[1] = 1
    name: str
    target: Where
    url: str
    model: str
    workers: int
    policy: str
    pid: int | None = optional("of a server in a process of this machine")
    started: str | None = optional("the start of that process: the boot, and the tick since it")
    started_s: float | None = optional(
        "the start of that process in seconds since 1970, by the clock at that time"
    )
    folder: str | None = optional("the rendered folder, for systemd and compose")
    certificate: str | None = optional("the file of its TLS certificate, if it has one")
    breaks: str = Field("", description="limits that its plan is predicted to break; '' for none")
    ended: dict[str, int] | None = optional("requests by finish reason, once it has ended")

    @property
    def alive(self) -> bool:
        """Whether its process exists. True under a service manager, since only that knows."""
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
    """The folder of the servers' files, in XDG's folder for state that outlives a process."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "llmctl" / "servers"


def name_of(recipe: str, url: str) -> str:
    """A server's name: its recipe and its port."""
    port = re.search(r":([0-9]+)$", url)
    return f"{recipe[:50]}-{port[1]}" if port else recipe[:50]


def start_of(pid: int) -> str | None:
    """The start of a process as text that does not depend on the clock; None if not available.

    The start time in seconds is derived from the boot time, which moves when the clock is set.
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
    """The record of this process as a server."""
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
    """Write a server's file. Raises `InputError` where it cannot be written."""
    path = folder_of_states() / f"{server.name}.json"
    write_file(server, path)
    return path


def forget(server: Running) -> None:
    """Remove a server's file, and the key of its control."""
    (folder_of_states() / f"{server.name}.json").unlink(missing_ok=True)
    _key_file(server.name).unlink(missing_ok=True)


def keep_control_key(server: Running, key: str) -> None:
    """Keep the key of a server's control for `control_keys`. Raises `InputError` where it cannot be
    written.
    """
    path = _key_file(server.name)
    path.unlink(missing_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def control_keys() -> dict[str, str]:
    """The keys of the servers with live settings that run here, by URL."""
    found = {}
    for server in remembered():
        path = _key_file(server.name)
        if path.is_file() and server.alive and server.ended is None:
            found[server.url] = path.read_text(encoding="utf-8").strip()
    return found


def _key_file(name: str) -> Path:
    return folder_of_states() / f"{name}.control-key"


def remembered() -> Iterator[Running]:
    """Every server with a file, sorted by name. Raises `InputError` for an unreadable file."""
    for path in sorted(folder_of_states().glob("*.json")):
        yield recall(path.stem)


def recall(name: str) -> Running:
    """The server of that name. Raises `InputError` where it has no file."""
    path = folder_of_states() / f"{name}.json"
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", name) or not path.is_file():
        raise InputError(
            f"no server '{name}' was started here", "llmctl status lists those that were"
        )
    return validate(Running, read_bytes(path), path, f"rm {path}")


def start(folder: Path, manifest: Manifest) -> None:
    """Start a rendered server and wait until it is ready.

    Raises `EngineError` where the service manager is missing or fails. Of systemd its message is
    the reason in the units' logs, which systemctl does not name.
    """
    if manifest.target != "systemd":
        _check_compose()
        _run(["docker", "compose", "--project-directory", str(folder), "up", "--detach", "--wait"])
        return
    _check_systemd()
    files = [name for name in manifest.files if Path(name).suffix in UNITS]
    _run(["systemctl", "link", *(str((folder / file).absolute()) for file in files)])
    units = _units(manifest)
    since = f"@{time.time():.6f}"
    started = subprocess.run(["systemctl", "start", units[0]], capture_output=True, text=True)
    if started.returncode == 0:
        return
    subprocess.run(["systemctl", "stop", *units], capture_output=True)  # or it would keep trying
    logs = [word for unit in units for word in ("--unit", unit)]
    command = ["journalctl", *logs, "--since", since, "--output", "cat", "--no-pager"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    # The first error of the service, else of systemd, else of systemctl.
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reasons += [line.partition(": ")[2] for line in lines if ": Failed to " in line]
    reason = reasons[0] if reasons else _tail(started.stderr)
    hint = f"journalctl {shlex.join(logs)}"
    if "credentials" in reason:
        hint = f"its key and plan must exist first: EXPLAIN.md says how; or see {hint}"
    raise EngineError(f"{units[0]} did not start: {reason}", hint)


def stop(folder: Path, manifest: Manifest) -> None:
    """Stop a rendered server and wait for its drain. Raises `EngineError` as `start` does."""
    if manifest.target == "systemd":
        _check_systemd()
        _run(["systemctl", "stop", *_units(manifest)])
    else:
        _check_compose()
        _run(["docker", "compose", "--project-directory", str(folder), "stop"])


def _units(manifest: Manifest) -> list[str]:
    """The server's unit; or the target of a front and its replicas, then these, as patterns.

    The first starts all. Stopping the target ends all, too, but systemctl waits only for units that
    it is given.
    """
    name = manifest.name
    target = f"{manifest.name}.target"
    units = [f"{name}.service"]
    if target not in manifest.files:
        return units
    templates = [file for file in manifest.files if file.endswith("@.service")]
    return [target, *units, *(file.replace("@", "@*") for file in templates)]


def _check_systemd() -> None:
    if not shutil.which("systemctl"):
        raise EngineError(
            "there is no systemd here", "sudo apt-get install systemd, or --target local"
        )
    if not BOOTED.is_dir():
        raise EngineError(
            "systemd does not run this machine",
            "copy the folder to a machine that it runs, or --target local",
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
        raise EngineError(
            f"{' '.join(command[:3])}: {_tail(done.stderr)}",
            f"run it yourself: {' '.join(command)}",
        )


def _tail(text: str) -> str:
    return " ".join(text.strip().splitlines()[-LINES_SHOWN:])
