"""The scripts for researchers run. `docs/check_pages.py` checks the page that shows them."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(("script", "policies"), [("two_policies.py", 2), ("own_policy.py", 4)])
def test_an_example_prints_a_line_for_each_policy(
    script: str,
    policies: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) == policies
    if script == "two_policies.py":
        assert (tmp_path / "ttft.svg").read_text(encoding="utf-8").count("<path") > 2
