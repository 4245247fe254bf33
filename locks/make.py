"""Makes the locks again, which `locks/install.sh` installs from: `make lock`.

Run it after a change of the dependencies in pyproject.toml, or of a version in constraints.txt. It
needs the package registry and uv (`make lock` installs the one of tools.txt beside .venv). It
writes

    build.txt     what builds the wheel of this project, and of packages that have none
    run.txt       what `llmctl` needs without extras
    EXTRA.txt     what an extra of pyproject.toml needs beside it; its second line says whether it
                  also needs engines.txt
    torch.txt     torch, which engines.txt needs, as the package registry has it
    torch-cpu.txt torch for CPUs alone, which is smaller, and is taken where an index has it
    cuda.txt      what torch needs beside it where it is built for CUDA, as the registry's is
    tools.txt     uv

for Linux and macOS, and for every Python of pyproject.toml. constraints.txt has the version of
every package; a package that is new there is added to it, in the version that uv chose.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
CONSTRAINTS = ROOT / "constraints.txt"
# setuptools also for packages that have no wheel; with mypy it compiles (hatch_build.py)
BUILD = ["hatchling", "editables", "setuptools", "mypy"]
TOOLS = ["uv"]
# vllm pins a transformers of its own, and is installed beside it: docs/how-to/vllm.md
UNLOCKED = {"vllm"}
NO_WHEEL = "deepspeed"
CUDA = re.compile(r"(nvidia|cuda)-|triton$")
# Of PyTorch's own index, which uv does not ask: its wheels for CPUs on Linux, of Python 3.11, 3.12
# and 3.13, each for x86_64 and aarch64. The index's own list has these hashes.
CPU_TORCH = {
    "2.13.0": [
        "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
        "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
        "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
        "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
        "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
        "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",
    ],
}
# what uv writes beside a package that is needed in every environment of pyproject.toml's tool.uv
EVERYWHERE = (
    " ; python_full_version < '3.14' and (sys_platform == 'darwin' or sys_platform == 'linux')"
)
HEAD = "# Made by `make lock` from pyproject.toml and constraints.txt. Not to be edited.\n"
ENGINES = "engines"  # the extra with torch
BESIDE_ENGINES = "# Beside engines.txt.\n"  # locks/install.sh reads it
BLOCK = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)[^\n]*\n(?:[ ]+[^\n]*\n)*", re.MULTILINE
)


def compiled(uv: str, *arguments: str, requirements: list[str] | None = None) -> dict[str, str]:
    """Name to lines, of everything that is needed: the requirement, its hashes, and what asks for
    it.
    """
    command = [
        uv,
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version=3.11",
        "--generate-hashes",
    ]
    command += [
        "--no-header",
        "-c",
        CONSTRAINTS.name,
        *arguments,
        "pyproject.toml" if requirements is None else "-",
    ]
    given = "\n".join(requirements or ())
    done = subprocess.run(
        command, cwd=ROOT, input=given, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"uv found no versions that fit:\n{done.stderr}")
    blocks = {found["name"]: found[0] for found in BLOCK.finditer(done.stdout)}
    if sum(map(len, blocks.values())) != len(done.stdout):
        sys.exit("uv wrote something that is not understood here:\n" + BLOCK.sub("", done.stdout))
    return {name: block.replace(EVERYWHERE + " \\\n", " \\\n") for name, block in blocks.items()}


def cpu_torch(block: str) -> str:
    """The lines of torch for CPUs, of the version that `block` has."""
    version = block.split("==")[1].split()[0]
    if version not in CPU_TORCH:
        sys.exit(f"torch {version}: say in locks/make.py which hashes its wheels for CPUs have")
    return (
        " \\\n".join(
            [f"torch=={version}+cpu", *(f"    --hash=sha256:{one}" for one in CPU_TORCH[version])]
        )
        + "\n"
    )


def write(name: str, blocks: dict[str, str], beside: str = "") -> None:
    """One lock. No package is built from its sources but the one that has no wheel."""
    options = "--only-binary :all:\n" + (f"--no-binary {NO_WHEEL}\n" if NO_WHEEL in blocks else "")
    text = HEAD + beside + options + "".join(blocks[each] for each in sorted(blocks))
    (HERE / f"{name}.txt").write_text(text, encoding="utf-8")
    print(f"locks/{name}.txt: {len(blocks)} packages")


def main(uv: str) -> None:
    """Write all locks, and what is new into constraints.txt."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    run = compiled(uv)
    engines = compiled(uv, f"--extra={ENGINES}")
    cuda = {name: block for name, block in engines.items() if CUDA.match(name)}
    locks = {
        "build": compiled(uv, requirements=BUILD),
        "tools": compiled(uv, requirements=TOOLS),
        "cuda": cuda,
    }
    torch = engines["torch"]
    locks |= {"torch": {"torch": torch}, "torch-cpu": {"torch": cpu_torch(torch)}}
    locks["run"] = run
    apart = {"torch", *cuda, *run}
    locks[ENGINES] = {name: block for name, block in engines.items() if name not in apart}
    with_engines = set()
    for extra in extras.keys() - UNLOCKED - {ENGINES}:
        blocks = compiled(uv, f"--extra={extra}")
        others: Iterable[str] = run
        if "torch" in blocks:
            with_engines.add(extra)
            others = engines
        locks[extra] = {name: block for name, block in blocks.items() if name not in others}
    for name, blocks in locks.items():
        write(name, blocks, BESIDE_ENGINES if name in with_engines else "")
    pin(
        [
            block
            for name, blocks in locks.items()
            for block in blocks.values()
            if name != "torch-cpu"
        ]
    )


def pin(blocks: list[str]) -> None:
    """Make constraints.txt have exactly the packages of these blocks."""
    versions = {found["name"]: found["version"] for found in BLOCK.finditer("".join(blocks))}
    head = [
        line
        for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()
        if line.startswith("#")
    ]
    lines = [f"{name}=={versions[name]}" for name in sorted(versions)]
    CONSTRAINTS.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
