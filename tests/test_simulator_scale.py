"""The benchmark of the simulator's growth can be run in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.papers import simulator_scale as scale
from toolkit.errors import InputError

GROUPS = scale.plans_of(100_000, scale.PER_WORKER)
PLANS = [plan for group in GROUPS for plan in group]


class _Plain:
    compiled = False
    reason = "a test"


def _faked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float, int]]:
    """Rows cost what their place in the list says; returns the plans that were run."""
    ran: list[tuple[str, int, float, int]] = []

    def simulated(policy: str, plans: Sequence[scale.Plan], repeats: int) -> list[scale.Row]:
        rows = []
        for plan in plans:
            ran.append((policy, *plan))
            rows.append(scale.Row(policy, *plan, 1e6 / len(ran), 0.5 * len(ran)))
        return rows

    monkeypatch.setattr(scale, "simulated", simulated)
    return ran


def test_a_second_piece_measures_only_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = _faked(monkeypatch)
    path = tmp_path / "rows.json"
    begun = scale.Measured(False, 1e7, None)
    clock = iter(range(100))
    monkeypatch.setattr(scale, "monotonic", lambda: next(clock))
    left = scale.measure(begun, ["fcfs"], GROUPS, 1, budget_s=2.0, path=path)
    assert len(ran) == 5
    assert left == len(PLANS) - 5
    monkeypatch.setattr(scale, "running", _Plain)
    again = scale.Measured.begun(path)
    assert again.rows == begun.rows
    assert scale.measure(again, ["fcfs"], GROUPS, 1, budget_s=None, path=path) == 0
    assert sorted(ran) == sorted(("fcfs", *plan) for plan in PLANS)  # each once
    capsys.readouterr()
    scale.print_growth(again.rows)
    # the first four rows are 8 and 512 workers, then the backlog: costs 1, 2, 3 and 4, then 5
    assert "| fcfs | 2.00 | 2.00 | 1.33 | 5.00 |" in capsys.readouterr().out


def test_rows_of_compiled_and_of_plain_code_are_not_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    scale.Measured(True, 1e7, 4e8).save(path)
    monkeypatch.setattr(scale, "running", _Plain)
    with pytest.raises(InputError, match="rows of compiled code; plain Python runs now"):
        scale.Measured.begun(path)
