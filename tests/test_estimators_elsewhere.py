"""What analytic predictions were off beside servers that others measured."""

import pytest

from toolkit.estimators import elsewhere
from toolkit.estimators.elsewhere import error_words, measured_elsewhere
from toolkit.estimators.gpu_operators import measured_gpus

NAMES = ("tpot_percent", "tpot_p90_percent", "ttft_percent", "ttft_p90_percent")


def spread(servers: int, *percent: float) -> dict[str, float]:
    return {"servers": servers} | dict(zip(NAMES, percent, strict=True))


ALL = spread(30, 6.0, 20.0, 9.0, 30.0)
DENSE = spread(20, 4.0, 11.0, 8.0, 25.0)
EXPERTS = spread(10, 7.0, 21.0, 10.0, 31.0)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        {"gpu": "h100_sxm", "experts": False, **DENSE},
        {"gpu": "h200_sxm", "experts": True, **EXPERTS},
    ]
    monkeypatch.setattr(elsewhere, "_content", lambda: {"all": ALL, "groups": groups})


@pytest.mark.usefixtures("shipped")
@pytest.mark.parametrize(
    ("gpu", "experts", "found"),
    [
        ("h100_sxm", False, {"gpu": "h100_sxm", **DENSE}),
        ("h200_sxm", True, {"gpu": "h200_sxm", **EXPERTS}),
        ("h100_sxm", True, {"gpu": None, **ALL}),
        ("h200_sxm", False, {"gpu": None, **ALL}),
        ("a100_sxm", False, {"gpu": None, **ALL}),
        ("mi300x", False, {"gpu": None, **ALL}),
    ],
)
def test_errors_are_of_this_gpu_and_class_or_of_no_gpu(
    gpu: str, experts: bool, found: dict[str, object]
) -> None:
    error = measured_elsewhere(gpu, experts=experts)
    assert error.model_dump() == found
    said = error_words(error, experts=experts)
    assert all(f"{found[name]:g}" in said for name in (*NAMES, "servers"))


def test_the_shipped_groups_are_of_known_gpus() -> None:
    content = elsewhere._content()
    groups = content["groups"]
    assert {one["gpu"] for one in groups} <= set(measured_gpus())
    assert len({(one["gpu"], one["experts"]) for one in groups}) == len(groups)
    assert sum(one["servers"] for one in groups) == content["all"]["servers"]
    for gpu in ("a100_sxm", "l40s"):
        assert measured_elsewhere(gpu, experts=False).gpu is None
