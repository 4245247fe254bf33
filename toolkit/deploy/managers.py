"""Service managers that a rendered folder can be handed to: systemd and Docker Compose, where they exist.

What is missing is one line with the command that brings it, before anything is started.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from toolkit.deploy.folder import Manifest
from toolkit.errors import EngineError

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
LINES_SHOWN = 3


def start(folder: Path, manifest: Manifest) -> None:
    """Start what was rendered, and wait until it is ready. `EngineError` where the manager is not there, or fails."""
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
    """`systemctl start`. Where it fails, systemd would go on trying, and would not say why; the unit's log does."""
    since_s = time.time()
    started = subprocess.run(["systemctl", "start", unit], capture_output=True, text=True)
    if started.returncode == 0:
        return
    subprocess.run(["systemctl", "stop", unit], capture_output=True)
    log = ["journalctl", "--unit", unit, "--since", f"@{since_s:.6f}", "--output", "cat", "--no-pager"]
    words = subprocess.run(log, capture_output=True, text=True).stdout
    reason = _reason(words) or _tail(started.stderr)
    no_key = f"its key has to be there first, and its plan: EXPLAIN.md says how; or see journalctl --unit {unit}"
    raise EngineError(
        f"{unit} did not start: {reason}", no_key if "credentials" in reason else f"journalctl --unit {unit}"
    )


def _reason(log: str) -> str:
    """What the service said first, or systemd of what it could not do for it; '' where neither did."""
    lines = log.splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said += [line.partition(": ")[2] for line in lines if ": Failed to " in line]
    return next(iter(said), "")


def _check_systemd() -> None:
    if not shutil.which("systemctl"):
        raise EngineError("there is no systemd here", "sudo apt-get install systemd, or --target local")
    if not BOOTED.is_dir():
        raise EngineError("systemd does not run this machine", "copy the folder to one that it runs, or --target local")


def _check_compose() -> None:
    if not shutil.which("docker"):
        raise EngineError("docker is not installed", "sudo apt-get install docker.io docker-compose-v2")
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
        raise EngineError(f"{' '.join(command[:3])}: {said}", f"run it yourself: {' '.join(command)}")


def _tail(text: str) -> str:
    return " ".join(text.strip().splitlines()[-LINES_SHOWN:])
