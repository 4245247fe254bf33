"""What benchmarks of live servers share: their server, and the errors of their replays."""

import argparse
from pathlib import Path

import httpx
import pytest

from benchmarks.common.serving import fake_plan
from benchmarks.engines.live import Work, middle, table
from toolkit.files.bench import BenchReport, CacheUse


def window(measured: float, predicted: float, cache: CacheUse | None = None) -> BenchReport:
    names = ("throughput_rps", "tpot_mean_s", "ttft_mean_s")
    return BenchReport.model_construct(
        measured=dict.fromkeys(names, measured),
        predicted=dict.fromkeys(names, predicted),
        cache=cache,
    )


def test_the_errors_of_a_window_are_medians_of_its_runs() -> None:
    cache = CacheUse(prompt_tokens=100, hit_tokens=60, predicted_percent=62.0)
    found = middle([window(2.0, 2.2, cache), window(4.0, 2.0, cache), window(1.0, 1.04)])
    assert found["runs"] == 3
    assert found["throughput_rps"]["errors"] == pytest.approx([10.0, -50.0, 4.0])
    assert found["hit_percent"]["errors"] == [2.0, 2.0]
    text = table([{"name": "one", **found}])
    assert "| one | hits, % | 3 | 60.0 | 62.0 | +2.0 | 1 | missed |" in text
    assert "| one | requests/s | 3 | 2.00 | 2.00 | +4.0 | 5 | kept |" in text
    assert "hits" not in table([{"name": "one", **middle([window(1.0, 1.0)])}])


@pytest.mark.slow
def test_a_server_is_ready_and_ends(tmp_path: Path) -> None:
    fake_plan(tmp_path)
    work = Work(argparse.Namespace(work=tmp_path, vllm_python=""), tmp_path / "recipe.json")
    with work.serving("plan.json") as url:
        assert httpx.get(f"{url}/ready").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/ready")
    assert work.has("serve.log")
    with pytest.raises(SystemExit, match="exit code 2"):
        work.llmctl("render", "no-such-recipe")
