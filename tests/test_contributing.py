"""The files that contributors and their tools read: valid, and true of this repository."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import toolkit

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SCHEMAS = {
    ".github/workflows/ci.yml": "vendor.github-workflows",
    ".github/ISSUE_TEMPLATE/bug.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/feature.yml": "vendor.github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "vendor.github-issue-config",
    "CITATION.cff": "vendor.citation-file-format",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_the_forges_files_fit_their_schemas(name: str) -> None:
    words = ["-m", "check_jsonschema", "--builtin-schema", SCHEMAS[name], str(ROOT / name)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def targets() -> set[str]:
    """The targets of the Makefile that `make help` lists."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE))


def test_runs_of_tests_keep_bytecode_whatever_the_shell_says() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z-]+):.*##.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    run_tests = {target for target, recipe in rules if "$(PYTEST)" in recipe}
    kept = re.search(r"^(.*): export PYTHONDONTWRITEBYTECODE =$", text, re.MULTILINE)
    assert kept is not None
    assert {"quick", "test"} <= run_tests == set(kept[1].split())


@pytest.mark.parametrize(
    "name",
    [
        "CONTRIBUTING.md",
        ".github/workflows/ci.yml",
        ".github/PULL_REQUEST_TEMPLATE.md",
        ".pre-commit-config.yaml",
    ],
)
def test_every_make_target_that_is_named_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^    |run: |entry: )make ([a-z-]+)", text, re.MULTILINE))
    assert named
    assert named <= targets()


def test_every_action_is_pinned_by_commit() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)(.*)", text)
    assert used
    for action, comment in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r"  # v\d+\.\d+\.\d+", comment), action


def test_ci_tests_the_pythons_that_the_package_names() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert jobs["quick"]["strategy"]["matrix"]["python"] == named


def test_the_version_is_the_same_everywhere() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[?(\d+\.\d+\.\d+)\]?", changelog, re.MULTILINE)
    assert PROJECT["version"] == released[0] == citation["version"] == toolkit.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "toolkit" / "py.typed").is_file()
    assert "Typing :: Typed" in PROJECT["classifiers"]
