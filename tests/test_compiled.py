"""Compiled code runs only where it is of today's sources, and gives the same results."""

import copy
import importlib.machinery
import os
import pickle
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from said import says

from toolkit import compiled
from toolkit.compiled import SUFFIX
from toolkit.errors import InputError
from toolkit.files.fit import Fit
from toolkit.files.io import read_file
from toolkit.files.shipped import shipped_profiles
from toolkit.sim.world import make_world

ROOT = Path(compiled.__file__).parent.parent
hatch_build = runpy.run_path(str(ROOT / "hatch_build.py"), run_name="hatch_build")
MODULES = hatch_build["MODULES"]
NAME = MODULES[0]


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a library of each module, of today's sources, and a finder that takes them."""
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "here")
    monkeypatch.setattr(compiled, "finder", compiled.Finder(), raising=False)
    monkeypatch.delenv(compiled.VARIABLE, raising=False)
    # what the finder sets for processes that it starts is undone
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / compiled.MANIFEST).write_text(compiled.manifest(MODULES))
    for name in MODULES:
        (tmp_path / "here" / f"{name}{SUFFIX}").touch()
    return tmp_path / "here"


def found(name: str = NAME) -> str | None:
    """The file that the finder has for a module."""
    spec = compiled.finder.find_spec(name)
    return spec and spec.origin


def edit(folder: Path) -> None:
    """Make the libraries those of another source of NAME."""
    text = (folder / compiled.MANIFEST).read_text()
    (folder / compiled.MANIFEST).write_text("0" + text[1:] if text[0] != "0" else "1" + text[1:])


def test_libraries_of_the_sources_are_found_and_nothing_else(libraries: Path) -> None:
    assert found() == str(libraries / f"{NAME}{SUFFIX}")
    assert found("toolkit.errors") is found("json") is None


def test_a_stale_library_is_not_taken_with_one_warning(
    libraries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(libraries)
    assert found() is found(MODULES[-1]) is None  # all or nothing
    (warning,) = capsys.readouterr().err.splitlines()
    assert says(warning, NAME, "make compile")
    assert os.environ[compiled.VARIABLE] == "0"  # processes that this one starts are silent
    assert NAME in compiled.unusable()


def test_without_libraries_plain_python_runs_silently(
    libraries: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(libraries)
    assert found() is None
    assert capsys.readouterr().err == ""


def test_the_variable_forces_either(libraries: Path) -> None:
    os.environ[compiled.VARIABLE] = "0"
    assert found() is None
    os.environ[compiled.VARIABLE] = "1"
    compiled.finder._usable = None
    assert found()
    edit(libraries)
    compiled.finder._usable = None
    with pytest.raises(InputError, match="LLMCTL_COMPILED=1") as caught:
        found()
    assert caught.value.hint == "make compile"
    os.environ[compiled.VARIABLE] = "yes"
    with pytest.raises(InputError, match="LLMCTL_COMPILED=yes"):
        compiled.wish()


def test_only_compiled_modules_may_declare_a_value_final() -> None:
    """mypyc copies such a value into the modules that use it, and does not see it change."""
    using = [
        path
        for path in ROOT.joinpath("toolkit").rglob("*.py")
        if re.search(r"^\s*from typing(_extensions)? import .*\bFinal\b", path.read_text(), re.M)
        or "typing.Final" in path.read_text()
    ]
    allowed = {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in MODULES}
    assert set(using) <= allowed


@pytest.mark.parametrize(
    "path", sorted(shipped_profiles().rglob("*fit.json")), ids=lambda p: p.parent.name
)
def test_worlds_go_to_other_processes_and_back(path: Path) -> None:
    world = make_world(read_file(Fit, path), {})
    assert pickle.loads(pickle.dumps(world)) == world
    assert copy.deepcopy(world) == world


# The frozen data classes of libraries that are not pickled by their fields, after the imports of
# a simulation: it loads some libraries by the finder, and compiled code loads others.
UNPICKLED = """
import copyreg, dataclasses, sys
import toolkit.sim.world, toolkit.cli.tune
print([
    name
    for module in list(sys.modules.values())
    if "_compiled" in (getattr(module, "__file__", None) or "")
    for name, made in vars(module).items()
    if isinstance(made, type) and made.__module__ == module.__name__
    if dataclasses.is_dataclass(made) and made.__dataclass_params__.frozen
    if made not in copyreg.dispatch_table
])
"""


@pytest.mark.slow
@pytest.mark.skipif(not hatch_build["is_current"](), reason="nothing is compiled here")
def test_frozen_data_classes_of_libraries_are_pickled_whoever_loads_them() -> None:
    variables = {**os.environ, "LLMCTL_COMPILED": "1"}
    words = [sys.executable, "-c", UNPICKLED]
    done = subprocess.run(words, env=variables, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from, in which one small module is compiled."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("toolkit", "recipes", "profiles", "templates"):
        skipped = shutil.ignore_patterns("_compiled", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=skipped)
    path = folder / "hatch_build.py"
    one = 'MODULES = (\n    "toolkit.units",\n)'
    text, count = re.subn(r"(?s)^MODULES = \(.*?^\)", one, path.read_text(), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    return folder


def run(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != compiled.VARIABLE}
    return subprocess.run(
        [sys.executable, *words],
        cwd=checkout,
        env=environment | {"PYTHONPATH": str(checkout)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )


WHICH = "import toolkit.units as u; print(type(u.__loader__).__name__)"


@pytest.mark.slow
def test_without_a_compiler_a_wheel_is_plain(checkout: Path, tmp_path: Path) -> None:
    build = ["-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = run(checkout, *build, CC="/no/compiler")
    assert says(done.stderr, "/no/compiler")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if "_compiled" in name]
    done = run(checkout, "hatch_build.py", CC="/no/compiler", LLMCTL_COMPILED="1")
    assert done.returncode
    assert says(done.stderr, "LLMCTL_COMPILED=1", "/no/compiler")
    done = run(checkout, "hatch_build.py", CC="/no/compiler")
    assert done.returncode == 0
    assert says(done.stdout, "/no/compiler", "make compile")


@pytest.mark.slow
@pytest.mark.skipif(
    bool(os.environ.get("CC")) or not shutil.which("cc"), reason="needs a C compiler"
)
def test_compiled_code_runs_until_its_source_is_edited(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, "hatch_build.py")
    assert done.stdout.endswith("\ncompiled: 1 modules\n"), done.stdout + done.stderr
    assert "up to date" in run(checkout, "hatch_build.py").stdout
    assert run(checkout, "-c", WHICH).stdout.strip() == "ExtensionFileLoader"
    assert run(checkout, "-c", WHICH, LLMCTL_COMPILED="0").stdout.strip() == "SourceFileLoader"

    run(checkout, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    assert not wheel.name.endswith("-any.whl")
    run(checkout, "-c", f"import zipfile; zipfile.ZipFile('{wheel}').extractall('{tmp_path}')")
    assert run(tmp_path, "-c", WHICH, LLMCTL_COMPILED="1").stdout.strip() == "ExtensionFileLoader"

    with (checkout / "toolkit" / "units.py").open("a") as file:
        file.write("EDITED = True\n")
    done = run(checkout, "-c", f"{WHICH}; print(u.EDITED)")
    assert done.stdout.split() == ["SourceFileLoader", "True"]
    assert says(done.stderr, "toolkit.units")
    assert run(checkout, "-c", WHICH, LLMCTL_COMPILED="1").returncode
    assert importlib.machinery.EXTENSION_SUFFIXES[0] == SUFFIX
