"""Collect the wheels that a GPU machine without network lacks, to travel beside the tree.

    python -m benchmarks.gpu.wheels [--to .whl] [--python-version 3.12] [NAME ...]

Takes a few seconds. Needs a package registry and pip. Versions are those of locks/run.txt. The
names are by default those that `benchmarks.gpu.preflight` checks and that an image with torch and
transformers often lacks. On the machine, without network:

    python3 -m pip install --no-index --no-deps --target /tmp/site .whl/*.whl
    export PYTHONPATH=/tmp/site
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT
from benchmarks.common.command import make_parser
from benchmarks.gpu.preflight import OFTEN_LACKING

LOCK = ROOT / "locks" / "run.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT_BYTES = 64 << 20  # with the tree


def main() -> int:
    options = _options()
    options.to.mkdir(parents=True, exist_ok=True)
    pins = [f"{name}=={version}" for name, version in locked(options.names or OFTEN_LACKING, LOCK)]
    done = subprocess.run(download(pins, options.to, options.python_version))
    if done.returncode:
        return done.returncode
    size = sum(path.stat().st_size for path in options.to.glob("*.whl"))
    print(f"{len(pins)} wheels in {options.to}, {size / (1 << 20):.1f} MiB: {', '.join(pins)}")
    if size > LIMIT_BYTES:
        print(f"error: more than {LIMIT_BYTES >> 20} MiB cannot travel", file=sys.stderr)
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    default = f"default: {', '.join(OFTEN_LACKING)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=default)
    parser.add_argument("--to", type=Path, default=Path(".whl"), help="the folder for the wheels")
    parser.add_argument("--python-version", default="3.12", help="of the GPU machine")
    return parser.parse_args()


def locked(names: Sequence[str], lock: Path) -> list[tuple[str, str]]:
    """(name, version) of each package, from a lock. `SystemExit` names what it lacks."""
    text = lock.read_text(encoding="utf-8")
    versions = dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", text, re.MULTILINE))
    missing = [name for name in names if name not in versions]
    if missing:
        raise SystemExit(f"error: {lock.name} has no {', '.join(missing)}")
    return [(name, versions[name]) for name in names]


def download(pins: Sequence[str], to: Path, python_version: str) -> list[str]:
    """pip's command for the wheels of another Python."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python_version, "--dest", str(to)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    return [*command, *pins]


if __name__ == "__main__":
    sys.exit(main())
