"""What analytic predictions were off where others measured."""

import json

import pytest

from toolkit.estimators import elsewhere
from toolkit.estimators.elsewhere import FILE, measured_elsewhere
from toolkit.estimators.gpu_operators import measured_gpus


def test_the_group_with_the_most_rows_is_cited(monkeypatch: pytest.MonkeyPatch) -> None:
    common = {"gpu": "h100_sxm", "experts": False, "tpot_percent": 4.5, "ttft_percent": 12.0}
    groups = [common | {"version": "", "rows": 5}, common | {"version": "0.12.0", "rows": 90}]
    monkeypatch.setattr(elsewhere, "_groups", lambda: groups)
    said = measured_elsewhere("h100_sxm", experts=False)
    assert all(words in said for words in ("4.5 %", "12 %", "90 rows", "H100", "0.12.0"))
    assert measured_elsewhere("h100_sxm", experts=True) == ""
    assert measured_elsewhere("l40s", experts=False) == ""


def test_the_shipped_groups_are_of_known_gpus() -> None:
    groups = json.loads(FILE.read_text(encoding="utf-8"))["groups"]
    assert {one["gpu"] for one in groups} <= set(measured_gpus())
    assert {one["gpu"] for one in groups} == set(elsewhere.CHIPS)
    assert all(one["rows"] > 0 and one["tpot_percent"] >= 0 for one in groups)
