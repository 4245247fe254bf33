"""The files that contributors and their tools read: valid, and true of this repository."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

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
    import check_jsonschema  # it takes a second

    words = ["--builtin-schema", SCHEMAS[name], str(ROOT / name)]
    done = CliRunner().invoke(check_jsonschema.main, words)
    assert done.exit_code == 0, done.output


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
