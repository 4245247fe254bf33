"""The locks, which everything is installed from: whole, with hashes, and what pyproject.toml asks
for.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "locks").glob("*.txt")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
UNLOCKED = {"vllm"}  # it pins a transformers of its own
OURSELVES = PROJECT["project"]["name"]
BESIDE = "# Beside engines.txt."


def requirements(lock: str) -> dict[str, str]:
    """Name to version, of a lock with the right form."""
    found = {}
    plain = re.sub(r"^ *(#|--(only|no)-binary ).*\n", "", LOCKS[lock], flags=re.MULTILINE)
    for line in plain.replace("\\\n", "").splitlines():
        wanted, *hashes = line.split("--hash=")
        assert hashes, f"{lock}: {wanted} has no hash"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each.strip()) for each in hashes), wanted
        (pin,) = Requirement(wanted).specifier
        assert pin.operator == "==", wanted
        found[Requirement(wanted).name] = pin.version
    return found


def has(locked: dict[str, str], wanted: Iterable[str], which: str) -> None:
    """Assert that all that applies here of `wanted` is locked, in a version that it allows for."""
    for each in map(Requirement, wanted):
        if each.name == OURSELVES:  # an extra of ours: all that it needs
            for extra in each.extras:
                has(locked, EXTRAS[extra], which)
        elif each.marker is None or each.marker.evaluate():
            version = locked.get(canonicalize_name(each.name))
            assert version, f"{which} needs {each}, which no lock has: make lock"
            assert each.specifier.contains(version, prereleases=True), (
                f"{which} needs {each}; locked is {version}"
            )


def of_extra(extra: str) -> dict[str, str]:
    """All that `locks/install.sh` installs for an extra, but for CUDA's libraries."""
    found = requirements("run") | requirements(extra)
    if extra == "engines" or BESIDE in LOCKS[extra]:
        found |= requirements("torch") | requirements("engines")
    return found


def test_the_locks_have_what_the_project_asks_for() -> None:
    assert EXTRAS.keys() - UNLOCKED <= LOCKS.keys()
    has(requirements("run"), PROJECT["project"]["dependencies"], "llmctl")
    for extra in EXTRAS.keys() - UNLOCKED:
        has(of_extra(extra), EXTRAS[extra], f"the extra {extra}")
    has(requirements("build"), PROJECT["build-system"]["requires"], "the build")


def test_the_constraints_have_the_same_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    locked: dict[str, str] = {}
    for lock in LOCKS:
        for name, version in requirements(lock).items():
            assert (
                locked.setdefault(name, version).partition("+")[0] == version.partition("+")[0]
            ), name
    assert {name: version.partition("+")[0] for name, version in locked.items()} == pinned


PYTHON = """#!/bin/sh
case "$1 $2 $3 $4" in
"-c "*) exit {cuda} ;;
"-m pip config list") echo "{config}"; exit ;;
esac
words="$*"
echo "$words" >>"{said}"
case "$words" in
*torch-cpu.txt) exit {cpu} ;;
*tools.txt)
    folder=${{words#*--target }}
    mkdir "${{folder%% *}}/bin"
    printf '#!/bin/sh\\necho "$*" >>"{said}"\\nexit {uv}\\n' >"${{folder%% *}}/bin/uv"
    chmod +x "${{folder%% *}}/bin/uv" ;;
esac
"""


def installed(
    folder: Path,
    *words: str,
    cuda: bool = False,
    cpu: bool = False,
    uv: bool = True,
    config: str = ":env:.find-links='/wheels'",
) -> tuple[int, list[str], str]:
    """What pip and uv are called for, with stand-ins for Python and uv; whether torch asks for
    CUDA, and has a wheel for CPUs, whether uv succeeds, and what configures pip.
    """
    python, said = folder / "python", folder / "said"
    codes = {"cuda": int(not cuda), "cpu": int(not cpu), "uv": int(not uv)}
    python.write_text(PYTHON.format(said=said, config=config, **codes))
    python.chmod(0o755)
    command = ["sh", str(ROOT / "locks" / "install.sh"), str(python), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, said.read_text().splitlines() if said.exists() else [], done.stderr


def locks_of(calls: list[str]) -> list[str]:
    """The locks that these calls install from."""
    return [name for call in calls for name in re.findall(r"-r \S*/locks/(\S+)\.txt", call)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "cuda", "cpu", "locks"),
    [
        ((), False, True, ["build", "run"]),
        (("engines",), False, True, ["build", "run", "torch-cpu", "engines"]),
        (("engines",), True, False, ["build", "run", "torch-cpu", "torch", "cuda", "engines"]),
        (("-e", "dev"), False, True, ["build", "run", "torch-cpu", "engines", "dev"]),
        (("ray",), True, False, ["build", "run", "ray"]),
        (
            ("ray", "deepspeed"),
            True,
            False,
            ["build", "run", "torch-cpu", "torch", "cuda", "engines", "ray", "deepspeed"],
        ),
    ],
)
def test_all_but_the_project_itself_comes_from_locks(
    tmp_path: Path, words: tuple[str, ...], cuda: bool, cpu: bool, locks: list[str]
) -> None:
    status, calls, _ = installed(tmp_path, *words, cuda=cuda, cpu=cpu)
    assert status == 0
    *others, itself = calls
    assert locks_of(others) == ["tools", *locks]
    by_pip = [call for call in others if call.startswith("-m pip ")]
    assert {"tools"} <= set(locks_of(by_pip)) <= {"tools", "torch", "torch-cpu"}
    assert all("--require-hashes" in call for call in others)
    assert all("--no-deps" in call and "--no-build-isolation" in call for call in calls)
    assert itself.endswith(("-e " if "-e" in words else "") + f"{ROOT}/locks/..")


@pytest.mark.slow
def test_pip_goes_on_where_uv_fails(tmp_path: Path) -> None:
    status, calls, error = installed(tmp_path, "ray", uv=False)
    assert status == 0
    assert len(error.splitlines()) == 1
    assert locks_of(calls) == ["tools", "build", "run", "build", "run", "ray"]
    assert [call.startswith("-m pip ") for call in calls] == [True, False, True, True, True]
    assert all("--require-hashes" in call for call in calls[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("config", ["global.index-url='https://example.org'", ":env:.no-index='1'"])
def test_an_index_that_pip_is_given_is_pips(tmp_path: Path, config: str) -> None:
    status, calls, error = installed(tmp_path, config=config)
    assert (status, error) == (0, "")
    assert locks_of(calls) == ["build", "run"]
    assert all(call.startswith("-m pip ") for call in calls)


@pytest.mark.slow
def test_an_extra_without_a_lock_is_refused_first(tmp_path: Path) -> None:
    status, calls, error = installed(tmp_path, "vllm")
    assert (status, calls) == (2, [])
    assert "vllm" in error
