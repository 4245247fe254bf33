"""`make setup` takes the first Python that fits, whatever it is called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("python3", "python3.13", "python3.12", "python3.11")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]


def install(folder: Path, name: str, version: tuple[int, int], *, venv: bool = True) -> None:
    """A Python of that name that says it is of that version, and may lack venv. It makes no
    environment.
    """
    hidden = "" if venv else "sys.modules['ensurepip'] = None; "
    told = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}; {hidden}exec(sys.argv[1])"
    script = f"""#!/bin/sh
case "$1" in
-c) exec {sys.executable} -c "{told}" "$2" ;;
--version) echo Python {version[0]}.{version[1]} ;;
*) echo "$0 $*"; exit 3 ;;
esac
"""
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs in which the shell's own tools are, and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "test", "env", "make"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return folder


def make(programs: Path, *words: str) -> tuple[str, str]:
    """What `make setup` says in a folder without .venv, on stdout and stderr."""
    venv = programs.parent / "venv"
    words = ("-C", str(ROOT), f"VENV={venv}", "setup", *words)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))
    }
    done = subprocess.run(
        ["make", *words],
        env=environment | {"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0  # at the latest when pip is wanted
    assert not (venv / ".installed").exists()
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3": (3, 12), "python3.11": (3, 11)}, "python3"),
        ({"python3": (3, 10), "python3.11": (3, 11)}, "python3.11"),
        ({"python3": (3, 14), "python3.12": (3, 12), "python3.11": (3, 11)}, "python3.12"),
        ({"python3.13": (3, 13), "python3.12": (3, 12)}, "python3.13"),
    ],
)
def test_the_first_python_that_fits_is_taken(
    there: dict[str, tuple[int, int]], chosen: str, programs: Path
) -> None:
    for name, version in there.items():
        install(programs, name, version)
    assert f"{programs / chosen} -m venv" in make(programs)[0]


def test_one_without_venv_is_passed_over(programs: Path) -> None:
    install(programs, "python3", (3, 13), venv=False)
    install(programs, "python3.12", (3, 12))
    assert f"{programs / 'python3.12'} -m venv" in make(programs)[0]


def test_where_none_fits_it_says_what_was_tried(programs: Path) -> None:
    install(programs, "python3", (3, 10))
    out, err = make(programs)
    assert "-m venv" not in out
    assert all(name in err for name in NAMES)


def test_the_one_that_is_named_wins(programs: Path) -> None:
    install(programs, "python3", (3, 12))
    install(programs, "mine", (3, 13))
    assert f"{programs / 'mine'} -m venv" in make(programs, "PYTHON=mine")[0]
    assert "none-such" in make(programs, "PYTHON=none-such")[1]
